// A bias that is loose (bias_rows.h): its rows begin anywhere, where TMA wants 16 bytes, also of each box. A loader
// copies the 16-byte pieces that hold a row's keys of a tile, and consumers take their elements from them. A copy in
// front of the kernel moves twice the bytes that the kernel reads, and takes about as long. Evidence: masked-variants.
#pragma once

#include "../../common/modifiers.cuh"
#include "../fwd/tiles.h"

namespace flash_ext::sm90 {

inline constexpr int kLooseKeys = FwdModTile::kPartKeys;

// How many elements behind 16 bytes a row begins.
__device__ __forceinline__ int elements_behind(const BiasView& x, int b, int h, int row) {
  const auto low = [](auto number) { return static_cast<uint32_t>(number); };
  const uint32_t at = low(reinterpret_cast<uintptr_t>(x.ptr) / 2) + low(b) * low(x.batch_stride) +
                      low(h) * low(x.head_stride) + low(row) * low(x.row_stride);
  return static_cast<int>(at % 8);
}
// The same of the row so many rows below one. Every eighth begins alike.
__device__ __forceinline__ int behind_below(int behind, const BiasView& x, int rows) {
  return static_cast<int>((behind + rows * static_cast<uint32_t>(x.row_stride)) % 8);
}

// Called by a warp: copies kRows rows from `row0` on, kLooseKeys keys from `col0` on, to rows of kLoosePitch bytes, and
// has them complete a phase of `bar`, which counts one arrival. What lies beyond the bias becomes 0. Addresses are made
// for eight rows, and those of the next eight are as far behind 16 bytes: made for each piece they are slower
// (docs/benchmarks.md).
template <int kRows>
__device__ __forceinline__ void load_loose_bias(const BiasView& x, int b, int h, int row0, int col0, uint32_t to,
                                                uint32_t bar) {
  constexpr int kPieces = kLooseKeys / 8, kRowsAtOnce = 32 / kPieces, kKinds = 8 / kRowsAtOnce;
  const int lane = ptx::fresh_lane(), left = 2 * (x.cols - col0);
  const char* const tile =
      static_cast<const char*>(x.ptr) + 2 * (b * x.batch_stride + h * x.head_stride + row0 * x.row_stride + col0);
  const int64_t eight_rows = 16 * x.row_stride;
  struct Pieces {  // of every eighth row
    const char* from;
    int bytes;
  };
  const auto pieces_of = [&](int row, int piece) -> Pieces {
    const char* const begin = tile + 2 * row * x.row_stride;
    const int behind = static_cast<int>(reinterpret_cast<uintptr_t>(begin) % 16);
    return {begin - behind + 16 * piece, min(max(left + behind - 16 * piece, 0), 16)};
  };
  Pieces of_lane[kKinds];
#pragma unroll
  for (int k = 0; k < kKinds; ++k) of_lane[k] = pieces_of(k * kRowsAtOnce + lane / kPieces, lane % kPieces);
  const int rows_left = x.rows - row0 - lane / kPieces;
  const uint32_t lane_to = to + lane / kPieces * kLoosePitch + lane % kPieces * 16;
#pragma unroll
  for (int i = 0; i < kRows / kRowsAtOnce; ++i) {
    Pieces& p = of_lane[i % kKinds];
    ptx::cp_async_16(lane_to + i * kRowsAtOnce * kLoosePitch, p.from, i * kRowsAtOnce < rows_left ? p.bytes : 0);
    p.from += eight_rows;
  }
  Pieces last = pieces_of(lane, kPieces);  // of each row
#pragma unroll
  for (int i = 0; i < kRows / 32; ++i) {
    const bool is_row = row0 + i * 32 + lane < x.rows;
    ptx::cp_async_16(to + (i * 32 + lane) * kLoosePitch + 16 * kPieces, last.from, is_row ? last.bytes : 0);
    last.from += 4 * eight_rows;
  }
  ptx::cp_async_mbarrier_arrive(bar);
  __syncwarp();
  if (lane == 0) ptx::mbarrier_arrive(bar);
}

// s = s * scale + bias, of 64 keys at `place`, where this warp's rows begin at `warp_row`. `behind`: of this lane's
// rows. What lies behind the first 16 keys is left out where there are no more: 197 keys end 5 keys behind a part.
template <typename E, int kCount>
__device__ __forceinline__ void add_loose_bias(float (&s)[kCount], float scale, uint32_t place, int warp_row,
                                               int behind, int keys) {
  const int lane = ptx::fresh_lane();
  const uint32_t at = place + (warp_row + lane / 4) * kLoosePitch + 2 * behind + lane % 4 * 4;
#pragma unroll
  for (int n = 0; n < kCount / 4; ++n) {
    if (n == 2 && keys <= 16) return;
#pragma unroll
    for (int i = 0; i < 4; ++i) {  // two neighbours of a row, then of the row eight below
      const uint16_t bits = ptx::load_shared_half(at + i / 2 * 8 * kLoosePitch + n * 16 + i % 2 * 2);
      s[4 * n + i] = fmaf(s[4 * n + i], scale, ptx::to_float<E>(*reinterpret_cast<const E*>(&bits)));
    }
  }
}

}  // namespace flash_ext::sm90
