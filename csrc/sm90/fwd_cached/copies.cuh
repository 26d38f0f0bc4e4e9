// How tiles of a cache come to a ring of stages: in pieces that TMA copies, or in rows that lanes copy, 16 bytes each,
// to where TMA would put them. TMA spends about 95 clocks on a copy, however few rows it has.
#pragma once

#include "../fwd/config.cuh"
#include "pieces.cuh"

namespace flash_ext::sm90 {

inline constexpr int kLeastPieceRows = 16;

template <typename T>
struct CachedBarriers : Barriers<T> {
  // Of rows that lanes copy.
  __device__ uint32_t landed(int stage) const { return this->work_ending() + 8 * (1 + stage); }

  __device__ void init() const {
    for (int i = 0; i < T::kKvStages; ++i) ptx::mbarrier_init(landed(i), 1);
    Barriers<T>::init();
  }
};

// A tile is found before its stage is free, then copied.
template <typename Ring, int kRows, int kChunks>
struct PieceCopies {
  static constexpr int kStages = Ring::kStages;
  const Ring& ring;
  const CUtensorMap& map;
  const StridedView& view;
  int64_t row_bytes;
  int piece_rows;
  PiecePlace own;  // of this lane's piece

  __device__ __forceinline__ void find(const CachedKeys& keys, const KvCache& c, int h_k, int first, bool) {
    const int own_row = min(static_cast<int>(threadIdx.x) % 32 * piece_rows, kRows - piece_rows);
    own = PiecePlace::of(keys, c, view, row_bytes, h_k, first + own_row, piece_rows);
  }
  __device__ __forceinline__ void start(const CachedKeys&, const KvCache&, int, int, int stage) const {
    const bool is_first = threadIdx.x % 32 == 0;
    const uint32_t bar = ring.full(stage);
    if (is_first) ptx::mbarrier_arrive_expect_tx(bar, kChunks * kRows * Ring::kRowBytes);
    uint32_t to = ring.tile(stage);
#pragma unroll 1
    for (int i = 0; i * piece_rows < kRows; ++i, to += piece_rows * Ring::kRowBytes) {
      const int row = __shfl_sync(ptx::kFullWarp, own.row, i);
      const int far = __shfl_sync(ptx::kFullWarp, own.far, i), near = __shfl_sync(ptx::kFullWarp, own.near, i);
      if (is_first) {
#pragma unroll
        for (int c = 0; c < kChunks; ++c) {
          ptx::tma_load_5d(to + c * kRows * Ring::kRowBytes, &map, bar, Ring::kColumns * c, row, far, near, 0);
        }
      }
    }
  }
};

template <typename Ring, int kRows, int kChunks>
struct RowCopies {
  static constexpr int kStages = Ring::kStages;
  static constexpr int kPieces = Ring::kRowBytes / 16, kRowsAtOnce = 32 / kPieces, kHeld = kRows / 32;
  const Ring& ring;
  const StridedView& view;
  int bytes;  // of a row
  int32_t entries[kHeld];  // of the table, of this lane's rows

  // is_first: of a work tile. The entries of the others have been asked for when the tile before was copied.
  __device__ __forceinline__ void find(const CachedKeys& keys, const KvCache& c, int, int first, bool is_first) {
    if (!is_first) return;
#pragma unroll
    for (int i = 0; i < kHeld; ++i) entries[i] = entry(keys, c, first + 32 * i);
  }
  __device__ __forceinline__ void start(const CachedKeys& keys, const KvCache& c, int h_k, int first, int stage) {
    if (bytes == kChunks * Ring::kRowBytes) {
      copy<true>(keys, c, h_k, first, stage);
    } else {
      copy<false>(keys, c, h_k, first, stage);
    }
    const uint32_t bar = ring.landed(stage);
    ptx::cp_async_mbarrier_arrive(bar);
    __syncwarp();
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(bar);
  }

 private:
  __device__ __forceinline__ static int own_row(const CachedKeys& keys, int from) {
    return min(max(from, 0) + static_cast<int>(threadIdx.x) % 32, keys.length - 1);
  }
  __device__ __forceinline__ static int32_t entry(const CachedKeys& keys, const KvCache& c, int from) {
    return keys.length > 0 ? keys.entry(c, own_row(keys, from)) : 0;
  }
  // kWhole: rows fill the chunks.
  template <bool kWhole>
  __device__ __forceinline__ void copy(const CachedKeys& keys, const KvCache& c, int h_k, int first, int stage) {
    const int lane = threadIdx.x % 32, piece = lane % kPieces, row = lane / kPieces;
    const int swizzle = Ring::kRowBytes == 128 ? row : row / 2 % 4;
    const uint32_t to = ring.tile(stage) + row * Ring::kRowBytes + ((piece ^ swizzle) << 4);
    const char* const head = static_cast<const char*>(view.ptr) + 2 * h_k * view.head_stride + 16 * piece;
    const int left = keys.length - first - row;
#pragma unroll
    for (int held = 0; held < kHeld; ++held) {
      const int own = own_row(keys, first + 32 * held);
      const int64_t at = 2 * keys.offset_in(c, view.batch_stride, view.row_stride, own, entries[held]);
      entries[held] = entry(keys, c, first - kRows + 32 * held);
#pragma unroll(kWhole ? 4 : 1)
      for (int i = 0; i < 32 / kRowsAtOnce; ++i) {
        const char* const from = head + __shfl_sync(ptx::kFullWarp, at, i * kRowsAtOnce + row);
        const bool is_there = 32 * held + i * kRowsAtOnce < left;
        // Rows of 128 bytes are permuted in eights, and four come at once.
        const uint32_t turned = Ring::kRowBytes == 128 ? to ^ (i % 2 * 64) : to;
#pragma unroll
        for (int k = 0; k < kChunks; ++k) {
          const uint32_t place = turned + (k * kRows + 32 * held + i * kRowsAtOnce) * Ring::kRowBytes;
          const int there = is_there ? bytes - 16 * piece - k * Ring::kRowBytes : 0;
          if constexpr (kWhole) {
            ptx::cp_async_16_or_zeros(place, from + k * Ring::kRowBytes, !is_there);
          } else {
            ptx::cp_async_16(place, from + k * Ring::kRowBytes, min(max(there, 0), 16));
          }
        }
      }
    }
  }
};

// A warp of its own: makes rows that lanes have copied visible to wgmma, which reads through another proxy.
template <typename T>
__device__ __forceinline__ void pass_on_tiles(const typename T::Tile* work_tiles, const CachedBarriers<T>& bars) {
  PipelineState<T::kKvStages> ring;
  PipelineState<T::kWorkStages> work_ring;
#pragma unroll 1
  while (true) {
    const WorkTile& work = wait_for_work<T>(work_tiles, bars, work_ring);
    if (work.w.block < 0) return;
    work_ring.advance();
    constexpr int kTiles = T::kHasValues ? 2 : 1;  // a step
#pragma unroll 1
    for (int left = kTiles * (work.blocks.end - work.blocks.begin); left > 0; --left) {
      wait(bars.landed(ring.stage), ring.phase);
      ptx::fence_proxy_async();
      __syncwarp();
      if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(bars.kv_full(ring.stage));
      ring.advance();
    }
  }
}

}  // namespace flash_ext::sm90
