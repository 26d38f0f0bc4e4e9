// The warpgroups that turn tiles of bytes (e4m3 or int8) into tiles of 16-bit elements, which wgmma multiplies.
//
// Both types hold every byte exactly. A factor of a slot is multiplied in fp32 before the one rounding, which is that
// of a 16-bit cache.
#pragma once

#include "../../common/fragments.cuh"
#include "../../common/kv_rows.cuh"
#include "../fwd/config.cuh"

namespace flash_ext::sm90 {

// Four bytes as pairs of E.
template <typename E, bool kInt8>
__device__ __forceinline__ uint2 elements_of(uint32_t bytes) {
  if constexpr (std::is_same_v<E, __half>) {
    return ptx::bytes_as_half<kInt8>(bytes);
  } else if constexpr (kInt8) {
    static_assert(std::is_same_v<E, __nv_bfloat16>, "another element type");
    // 128 + the lower 7 bits, less 128 or, where the sign is set, 256: all of them are numbers of bf16 with that
    // exponent.
    const auto pair = [](uint32_t x) {
      const uint32_t raised = x & 0xff7fff7f, below = x & 0xff80ff80;
      const __nv_bfloat162 y =
          __hsub2(*reinterpret_cast<const __nv_bfloat162*>(&raised), *reinterpret_cast<const __nv_bfloat162*>(&below));
      return *reinterpret_cast<const uint32_t*>(&y);
    };
    return make_uint2(pair(__byte_perm(bytes, 0x43434343, 0x4140)), pair(__byte_perm(bytes, 0x43434343, 0x4342)));
  } else {
    const uint2 halves = ptx::bytes_as_half<false>(bytes);
    const float2 lo = ptx::unpack2<__half>(halves.x), hi = ptx::unpack2<__half>(halves.y);
    return make_uint2(ptx::pack2<E>(lo.x, lo.y), ptx::pack2<E>(hi.x, hi.y));
  }
}

// The same times a factor.
template <typename E, bool kInt8>
__device__ __forceinline__ uint2 scaled_elements_of(uint32_t bytes, float factor) {
  float x[4];
  if constexpr (kInt8) {
    const uint32_t raised = bytes ^ 0x80808080;
#pragma unroll
    for (int i = 0; i < 4; ++i) {  // x + 128 in the mantissa of 2^23
      x[i] = (__uint_as_float(__byte_perm(raised, 0x4b000000, 0x7440 + i)) - 8388736.f) * factor;
    }
  } else {
    const uint2 halves = ptx::bytes_as_half<false>(bytes);
    const float2 lo = ptx::unpack2<__half>(halves.x), hi = ptx::unpack2<__half>(halves.y);
    x[0] = lo.x * factor, x[1] = lo.y * factor, x[2] = hi.x * factor, x[3] = hi.y * factor;
  }
  return make_uint2(ptx::pack2<E>(x[0], x[1]), ptx::pack2<E>(x[2], x[3]));
}

// Where a thread reads 16 bytes of a row and where it stores their elements, in the first of the passes over a tile.
// Eight neighbouring threads have four pieces of two rows whose numbers differ in bits 0 and 2. So the swizzles spread
// what they read over all banks, and what they store as well.
template <typename T>
struct ConvertedPlace {
  static constexpr int kRowBytes = T::kRawRowBytes, kPieces = kRowBytes / 16;  // of a row of a chunk of bytes
  static constexpr int kRowsOfPass = 32 / T::kChunks, kPasses = T::kBlockN / kRowsOfPass;
  static_assert(kRowsOfPass % 8 == 0, "the swizzle of a row is that of all passes");
  uint32_t from, to;  // `to` is of the first 8 elements; those of the others lie at to ^ 16
  int row;

  __device__ static __forceinline__ ConvertedPlace of(int thread) {
    const int rest = thread / 8, chunk = rest % T::kChunks, rows = rest / T::kChunks;
    const int row = rows / 4 * 8 + (rows % 4 ^ (thread / 4 % 2 * 5));
    const int piece = chunk * 4 + thread % 4;
    const int raw_swizzle = kRowBytes == 128 ? row % 8 : row / 2 % 4;
    return {static_cast<uint32_t>(piece / kPieces * T::kBlockN * kRowBytes + row * kRowBytes +
                                  ((piece % kPieces ^ raw_swizzle) << 4)),
            static_cast<uint32_t>((chunk * T::kBlockN + row) * 128 + ((thread % 4 * 2 ^ row % 8) << 4)), row};
  }
};

// A thread's share of a tile: from the bytes at `raw`, with the factors of rows at `factors`.
template <typename T, bool kInt8, bool kScaled>
__device__ __forceinline__ void convert_share(uint32_t raw, uint32_t factors, uint32_t to) {
  using E = typename T::Element;
  using Place = ConvertedPlace<T>;
  constexpr int kAhead = 2;
  stream_fragments<Place::kPasses, kAhead>(
      [&](int i, uint32_t (&b)[4]) { ptx::load_shared_words(b, raw + i * Place::kRowsOfPass * Place::kRowBytes); },
      [&](int i, const uint32_t (&b)[4]) {
        uint2 x[4];
        float factor = 1.f;
        if constexpr (kScaled) {
          factor = __uint_as_float(ptx::load_shared_word(factors + i * Place::kRowsOfPass * 4));
        }
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          x[j] = kScaled ? scaled_elements_of<E, kInt8>(b[j], factor) : elements_of<E, kInt8>(b[j]);
        }
        const uint32_t at = to + i * Place::kRowsOfPass * 128;
        ptx::store_shared(at, make_uint4(x[0].x, x[0].y, x[1].x, x[1].y));
        ptx::store_shared(at ^ 16, make_uint4(x[2].x, x[2].y, x[3].x, x[3].y));
      });
}

// Tiles in the order of the rings: of two warpgroups each takes every second one, beginning with its `index`. Which
// tiles are K and which V does not matter here.
template <typename T, typename Ring>
__device__ __forceinline__ void convert_tiles(const typename T::Args& a, const typename T::Tile* work_tiles,
                                              const Ring& copies, int index) {
  const auto& bars = copies.bars;
  const int lane = threadIdx.x % 32;
  const ConvertedPlace<T> place = ConvertedPlace<T>::of(threadIdx.x % 128);
  const bool is_int8 = a.cache_type == CacheType::kInt8, scaled = a.has_slot_factors();
  PipelineState<T::kRawStages> raw_ring;
  PipelineState<T::kKvStages> ring;
  PipelineState<T::kWorkStages> work_ring;
  ring.phase = 1;
  for (int i = 0; i < index; ++i) raw_ring.advance(), ring.advance();
#pragma unroll 1
  while (true) {
    const WorkTile& work = wait_for_work<T>(work_tiles, bars, work_ring);
    if (work.w.block < 0) return;
    work_ring.advance();
    // Two tiles a step, one of K and one of V.
#pragma unroll 1
    for (int left = 2 / T::kConverterGroups * (work.blocks.end - work.blocks.begin); left > 0; --left) {
      wait(bars.raw_full(raw_ring.stage), raw_ring.phase);
      if (scaled) wait(bars.factors_full(raw_ring.stage), raw_ring.phase);
      wait(bars.kv_empty(ring.stage), ring.phase);
      const uint32_t raw = copies.tile(raw_ring.stage) + place.from;
      const uint32_t factors = copies.factors(raw_ring.stage) + place.row * 4;
      const uint32_t to = copies.smem + ring.stage * T::kStageBytes + place.to;
      if constexpr (T::kSlotFactors) {
        if (scaled && is_int8) convert_share<T, true, true>(raw, factors, to);
        if (scaled && !is_int8) convert_share<T, false, true>(raw, factors, to);
      }
      if (!scaled && is_int8) convert_share<T, true, false>(raw, factors, to);
      if (!scaled && !is_int8) convert_share<T, false, false>(raw, factors, to);
      ptx::fence_proxy_async();
      __syncwarp();
      ptx::mbarrier_arrive_for_warp(bars.raw_empty(raw_ring.stage), lane == 0);
      ptx::mbarrier_arrive_for_warp(bars.kv_full(ring.stage), lane == 0);
#pragma unroll
      for (int i = 0; i < T::kConverterGroups; ++i) raw_ring.advance(), ring.advance();
    }
  }
}

}  // namespace flash_ext::sm90
