// Tiles in shared memory as TMA leaves them, their wgmma descriptors, and the two products of attention.
//
// A tile [rows][columns] of 16-bit elements lies in chunks of 64 columns: chunk c at c * rows * 128 bytes, a row of
// it 128 bytes, its 16-byte pieces permuted by the 128-byte swizzle (piece ^= row % 8).
#pragma once

#include <utility>

#include "../../ptx/sm90.cuh"
#include "../fwd/tiles.h"

namespace flash_ext::sm90 {

// Lower word of a matrix descriptor: the address, and the bytes between chunks, which matter where rows are the
// summed dimension (V).
__device__ __forceinline__ uint32_t descriptor_low(uint32_t address, int chunk_bytes) {
  return ((address & 0x3ffff) >> 4) | (static_cast<uint32_t>(chunk_bytes / 16) << 16);
}

template <int kStep, int kSteps, typename Use>
__device__ __forceinline__ void for_steps(const Use& use) {
  if constexpr (kStep < kSteps) {
    use(std::integral_constant<int, kStep>{});
    for_steps<kStep + 1, kSteps>(use);
  }
}

// s = Q K^T for the 64 rows of a warpgroup, all D columns, 16 a step. q and k: lower words of the descriptors.
template <typename E, int D, int kQTileRows, int kKTileRows, int kCount>
__device__ __forceinline__ void issue_qk(float (&s)[kCount], uint32_t q, uint32_t k) {
  for_steps<0, D / 16>([&](auto step) {
    constexpr int i = decltype(step)::value;
    constexpr int at = (i % 4) * 2, chunk = i / 4;
    ptx::wgmma_ss<E, (i > 0)>(s, q + at + chunk * kQTileRows * 8, k + at + chunk * kKTileRows * 8);
  });
}

// o += P V for the 64 rows of a warpgroup; p holds P as 16-bit pairs in the order of the scores' accumulator.
template <typename E, int kWords, int kCount>
__device__ __forceinline__ void issue_pv(float (&o)[kCount], const uint32_t (&p)[kWords], uint32_t v) {
#pragma unroll
  for (int i = 0; i < kWords / 4; ++i) {
    ptx::wgmma_rs<E>(o, p[4 * i], p[4 * i + 1], p[4 * i + 2], p[4 * i + 3], v + i * 128);
  }
}

}  // namespace flash_ext::sm90
