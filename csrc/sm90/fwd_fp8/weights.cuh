// Softmax of the scores a thread holds, with weights in e4m3.
//
// As fwd/weights.cuh, with two changes. A row's largest score gets the weight 26, and not 1: e4m3 has its best relative
// precision from 2^-6 on, so weights down to 2^-11 of the largest keep it. And the limit of a sum is 448, the largest
// number of e4m3, because conversion clamps what is larger and says nothing: weights are positive, so no weight of a
// sum up to 448 exceeds it. A thread has two sums of 16 weights for each row. 26 because all 16 may be as large (416),
// and because e4m3 has it: a key that rules a row from its first tile on has a weight that no rounding changes.
//
// Row sums are those of the weights before rounding. Sums of rounded ones would be no better on average, and far off
// where most of a row is so small that e4m3 has zeros for it.
#pragma once

#include "../../fp8.h"
#include "../../ptx/sm90_fp8.cuh"
#include "../fwd/weights.cuh"

namespace flash_ext::sm90 {

inline constexpr float kTopWeight = 26.f, kTopWeightLog2 = 4.70043972f;
// Below the top weight by so much begins a row that sees few keys of its first tile: what comes is likely larger, and
// would have the second tile done again.
inline constexpr float kFewKeysLog2 = 4.f;

// Weights of the thread's eight scores of 16 keys, in the order of kKeyOrder: the first row's, the second row's.
template <typename Weight, int kCount>
__device__ __forceinline__ void form_weights(uint32_t (&p)[kCount / 4], const float (&)[kCount], const Weight& weight) {
#pragma unroll
  for (int g = 0; g < kCount / 8; ++g) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int at = 8 * g + 2 * r;
      const float x0 = weight(at, r), x1 = weight(at + 1, r), x2 = weight(at + 4, r), x3 = weight(at + 5, r);
      p[2 * g + r] = ptx::pack4_e4m3(x0, x1, x2, x3);
    }
  }
}

// p = weights of s by the maxima there are. False when they must not be used.
template <int kCount>
__device__ __forceinline__ bool try_fp8_weights(const float (&s)[kCount], uint32_t (&p)[kCount / 4], RowState& state,
                                                float scale) {
  static_assert(kCount / 4 * kTopWeight <= kFp8Max);
  float sum[2][2] = {};
  form_weights(p, s, [&](int at, int r) {
    const float x = ptx::ex2(fmaf(s[at], scale, state.minus_max[r]));
    sum[r][at % 2] += x;
    return x;
  });
  // NaN compares false.
  const bool fine =
      sum[0][0] <= state.limit && sum[0][1] <= state.limit && sum[1][0] <= state.limit && sum[1][1] <= state.limit;
  if (__any_sync(ptx::kFullWarp, !fine)) return false;
  state.sum[0] += sum[0][0] + sum[0][1];
  state.sum[1] += sum[1][0] + sum[1][1];
  return true;
}

// The maximum of the first tile, as a first guess, which try_fp8_weights() checks.
template <int kCount>
__device__ __forceinline__ void guess_fp8_maximum(const float (&s)[kCount], RowState& state, float scale) {
  constexpr int kLast = 4 * (kCount / 16 - 1) + 1;  // of the first quarter, in the first row
  const bool few = __any_sync(ptx::kFullWarp, s[kLast] == -INFINITY || s[kLast + 2] == -INFINITY);
  const float top = few ? kTopWeightLog2 - kFewKeysLog2 : kTopWeightLog2;
  state.limit = kFp8Max;
  float largest[2];
  quad_maxima(s, largest);
#pragma unroll
  for (int r = 0; r < 2; ++r) state.minus_max[r] = fmaf(-largest[r], scale, top);
  if (__any_sync(ptx::kFullWarp, is_far(state.minus_max[0], state.minus_max[1]))) state.limit = -1.f;
}

// p = weights of s by the larger of the maxima there are and the tile's; factor is what the output so far is worth.
template <int kCount>
__device__ __forceinline__ void fp8_weights_by_maximum(const float (&s)[kCount], uint32_t (&p)[kCount / 4],
                                                       RowState& state, float (&factor)[2], float scale) {
  NewMaxima maxima{scale};
  float largest[2];
  quad_maxima(s, largest);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    // Of far rows in two roundings, as their weights.
    const float product = __fmul_rn(-largest[r], scale);
    maxima.take(state, r, fminf(state.minus_max[r], product + kTopWeightLog2), factor[r]);
  }
  state.limit = maxima.limit(kFp8Max);
  form_weights(p, s, [&](int at, int r) {
    const float x = maxima.weight(s[at], r);
    state.sum[r] += x;
    return x;
  });
}

}  // namespace flash_ext::sm90
