// ALiBi in tiles of 192 queries (m192), at no cost per score. Where all rows of a warp lie behind a tile's keys, or all
// before them, -slope * |row - key| is linear in the key. What the key's number within the tile contributes then comes
// from the tensor cores, as one more step of 16 columns of Q K^T, 1/16 of the work of both products; the rest is a
// row's, and joins the offset of its exponents. Tiles that the diagonal crosses, one or two of a warp's, take an fma a
// score.
#pragma once

#include "weights.cuh"

namespace flash_ext::sm90 {

// The keys of a tile are numbered, 0 in the middle, exact in bf16, the same in 8 rows of the swizzled layout of V.
// Behind them the tensor cores find the same 8 rows again, for columns of A that are 0.
inline constexpr int kNumberRows = 8, kNumberBytes = kNumberRows * 128;  // of 64 keys

template <int kKeys>
__device__ __forceinline__ void write_key_numbers(unsigned char* to) {
  constexpr int kMiddleKey = kKeys / 2;
  const int row = threadIdx.x / 8 % kNumberRows, piece = threadIdx.x % 8, chunk = threadIdx.x / (8 * kNumberRows);
  if (chunk >= kKeys / 64) return;
  uint32_t pairs[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float first = static_cast<float>(64 * chunk + 8 * piece + 2 * i - kMiddleKey);
    pairs[i] = ptx::pack2<__nv_bfloat16>(first, first + 1.f);
  }
  *reinterpret_cast<uint4*>(to + chunk * kNumberBytes + row * 128 + ((piece ^ row) << 4)) =
      make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
  ptx::fence_proxy_async();
}

// A lane's part of the rows of A: the slope in three terms, those of bf16 that sum up to 24 bits, less where rows lie
// before the keys. `ahead`: of the warp's first row's place to the tile's first key's.
template <int kKeys>
__device__ __forceinline__ uint32_t own_terms(const SlopeWorkTile& work, int ahead) {
  const int place = ptx::fresh_lane() % 4;
  const uint32_t terms = place < 2 ? work.terms[place] : 0;
  const int side = work.distances.side(ahead, 16, 0, kKeys);
  return side > 0 ? terms : side < 0 && place < 2 ? terms ^ 0x80008000u : 0;
}

// What two rows add to all scores of a tile, in units of log2. Where the tile bends, each score has its own instead.
struct RowBias {
  float of[2];
  bool bends;
};

// Made while products run: behind them it would lengthen the chain from scores to scores.
template <int kKeys>
__device__ __forceinline__ RowBias bias_of_rows(const Modifiers& m, const SlopeWorkTile& work, int ahead) {
  const TileDistances tile = work.distances.over(m.by_distance, ahead, 16, 0, kKeys);
  const float first = static_cast<float>(ahead + ptx::fresh_lane() / 4 - kKeys / 2);
  RowBias bias{{fmaf(tile.per_distance, first, tile.constant), fmaf(tile.per_distance, first + 8.f, tile.constant)},
               __any_sync(ptx::kFullWarp, tile.bends) != 0};
  ptx::warpgroup_fence_operand(bias.of);
  return bias;
}

// try_weights() of scores that lack their rows' bias.
template <typename E, int kCount>
__device__ __forceinline__ bool try_biased_weights(const float (&s)[kCount], uint32_t (&p)[kCount / 2], RowState& state,
                                                   float scale, const RowBias& bias) {
  RowState biased = state;
#pragma unroll
  for (int r = 0; r < 2; ++r) biased.minus_max[r] += bias.of[r];
  if (!try_weights<E>(s, p, biased, scale)) return false;
#pragma unroll
  for (int r = 0; r < 2; ++r) state.sum[r] = biased.sum[r];
  return true;
}

// weights_by_maximum() of the same. A maximum that stays must not move by a rounding error in each tile.
template <typename E, int kCount>
__device__ __forceinline__ void biased_weights_by_maximum(const float (&s)[kCount], uint32_t (&p)[kCount / 2],
                                                          RowState& state, float (&factor)[2], float scale,
                                                          const RowBias& bias) {
  RowState biased = state;
#pragma unroll
  for (int r = 0; r < 2; ++r) biased.minus_max[r] += bias.of[r];
  const float before[2] = {biased.minus_max[0], biased.minus_max[1]};
  weights_by_maximum<E>(s, p, biased, factor, scale);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    if (biased.minus_max[r] < before[r]) state.minus_max[r] = biased.minus_max[r] - bias.of[r];
    state.sum[r] = biased.sum[r];
  }
  state.limit = biased.limit;
}

}  // namespace flash_ext::sm90
