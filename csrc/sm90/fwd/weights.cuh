// Softmax of the scores a thread holds in a wgmma accumulator: two rows, s[4 j + 2 half + c].
//
// Weights are 2^(scale s - m) with a maximum m that may be stale. What must hold is that weights neither overflow nor
// all vanish, not that m is the largest score seen: the result is the same softmax. So a tile's weights are formed
// with the m that is there, and their sum, needed anyway, tells whether that was right: weights are positive, so a
// sum of at most 64 bounds every one of them, inside fp16's range. Otherwise the tile is done again with its own
// maximum. A row that has seen no key has m = -inf, which makes the sum infinite or NaN: it needs no test of its own.
//
// 64 and not 2^14, which fp16 would allow: a weight that outweighs its row is then its row's maximum, 1 without
// rounding. With outliers in q and k the error of the output is 1.1 times that of exact maxima, and 1.25 to 1.35 times
// with 2^14, for 3 to 10 % of tiles done again; on normal data, whose lanes have sums around 10, none is.
#pragma once

#include <cmath>

#include "../../common/attn_mod.cuh"
#include "../../ptx/sm80.cuh"

namespace flash_ext::sm90 {

// Scores in fp32.
struct FloatScores {
  using Score = float;

  // Hides those of one of a thread's two rows. first_col: its first key of the tile.
  template <int kCount>
  __device__ __forceinline__ static void hide(float (&s)[kCount], int half, const AttnMod& mod, VisibleKeys keys,
                                              int first_col) {
#pragma unroll
    for (int j = 0; j < kCount / 4; ++j) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        float& x = s[4 * j + 2 * half + c];
        x = mod.score(x, keys, first_col + 8 * j + c);
      }
    }
  }
};

inline constexpr float kSumLimit = 64.f;

// From here on fp32 rounds scale * m by more than 1/4, which 2^(fma(scale, s, -m)) shows: where all scores are 1e9,
// weights were 2^32 or 2^-32, neither of which fp16 has. Such rows always go the way that rounds each product as m was
// rounded.
inline constexpr float kFarMaximum = 0x1p22f;
__device__ __forceinline__ bool is_far(float a, float b) { return !(fmaxf(fabsf(a), fabsf(b)) < kFarMaximum); }

struct RowState {
  float minus_max[2] = {INFINITY, INFINITY};  // -m, in units of log2
  float sum[2] = {0.f, 0.f};                  // this lane's share of the row sum
  float limit = kSumLimit;                    // of a tile's share; the same in all lanes; below 0: none is tried
};

// p = weights of s by the maxima there are. False when they must not be used.
template <typename E, int kCount>
__device__ __forceinline__ bool try_weights(const float (&s)[kCount], uint32_t (&p)[kCount / 2], RowState& state,
                                            float scale) {
  float sum[2][2] = {};
#pragma unroll
  for (int i = 0; i < kCount / 2; ++i) {
    const int r = i % 2;
    const float x = ptx::ex2(fmaf(s[2 * i], scale, state.minus_max[r]));
    const float y = ptx::ex2(fmaf(s[2 * i + 1], scale, state.minus_max[r]));
    sum[r][0] += x;
    sum[r][1] += y;
    p[i] = ptx::pack2<E>(x, y);
  }
  const float sum0 = sum[0][0] + sum[0][1], sum1 = sum[1][0] + sum[1][1];
  // NaN compares false.
  const bool fine = sum0 <= state.limit && sum1 <= state.limit;
  if (__any_sync(ptx::kFullWarp, !fine)) return false;
  state.sum[0] += sum0;
  state.sum[1] += sum1;
  return true;
}

// The largest scores of two rows in the first 1 / kParts of a tile, over their quads.
template <int kParts = 1, int kCount>
__device__ __forceinline__ void quad_maxima(const float (&s)[kCount], float (&largest)[2]) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    largest[r] = -INFINITY;
#pragma unroll
    for (int i = r; i < kCount / 2 / kParts; i += 2) largest[r] = fmaxf(largest[r], fmaxf(s[2 * i], s[2 * i + 1]));
    largest[r] = fmaxf(largest[r], __shfl_xor_sync(ptx::kFullWarp, largest[r], 1));
    largest[r] = fmaxf(largest[r], __shfl_xor_sync(ptx::kFullWarp, largest[r], 2));
  }
}

// The maximum of a quarter of the first tile, as a first guess, which try_weights() checks. A warp some of whose rows
// do not see the end of that quarter has a limit that is 2^5 times as high, sums up to 2^11: a row that sees a key or
// two there guesses far below what the next tile holds, which would then be done again. A guess that is 2^5 higher
// would do the same in bf16, but in fp16 it takes 5 bits of weights below 2^-14.
template <int kCount>
__device__ __forceinline__ void guess_maximum(const float (&s)[kCount], RowState& state, float scale) {
  constexpr int kLast = 4 * (kCount / 16 - 1) + 1;  // of the quarter, in the first row
  if (__any_sync(ptx::kFullWarp, s[kLast] == -INFINITY || s[kLast + 2] == -INFINITY)) state.limit = 32.f * kSumLimit;
  float largest[2];
  quad_maxima<4>(s, largest);
#pragma unroll
  for (int r = 0; r < 2; ++r) state.minus_max[r] = -largest[r] * scale;
  if (__any_sync(ptx::kFullWarp, is_far(state.minus_max[0], state.minus_max[1]))) state.limit = -1.f;
}

// What weights by new maxima are formed with.
struct NewMaxima {
  float scale, offset[2], unit[2];
  bool far[2];

  // -m of row r becomes `lower`; factor is what sums so far are worth.
  __device__ __forceinline__ void take(RowState& state, int r, float lower, float& factor) {
    // Nothing seen yet: the scores are all -inf and need an offset that is a number.
    factor = lower == INFINITY ? 1.f : ptx::ex2(lower - state.minus_max[r]);
    offset[r] = lower == INFINITY ? 0.f : lower;
    state.minus_max[r] = lower;
    state.sum[r] *= factor;
    far[r] = is_far(lower, lower);
    unit[r] = far[r] ? 1.f : scale;
  }
  // The limit of the tiles that follow: `near` where no row is far.
  __device__ __forceinline__ float limit(float near) const {
    return __any_sync(ptx::kFullWarp, far[0] || far[1]) ? -1.f : near;
  }
  // Of near rows in one rounding, as try_weights() has it: tiles of one row must agree.
  __device__ __forceinline__ float weight(float score, int r) const {
    return ptx::ex2(fmaf(far[r] ? __fmul_rn(score, scale) : score, unit[r], offset[r]));
  }
};

// p = weights of s by the larger of the maxima there are and the tile's; factor is what the output so far is worth.
template <typename E, int kCount>
__device__ __forceinline__ void weights_by_maximum(const float (&s)[kCount], uint32_t (&p)[kCount / 2], RowState& state,
                                                   float (&factor)[2], float scale) {
  NewMaxima maxima{scale};
  float largest[2];
  quad_maxima(s, largest);
#pragma unroll
  for (int r = 0; r < 2; ++r) maxima.take(state, r, fminf(state.minus_max[r], -largest[r] * scale), factor[r]);
  state.limit = maxima.limit(kSumLimit);
#pragma unroll
  for (int i = 0; i < kCount / 2; ++i) {
    const int r = i % 2;
    const float x = maxima.weight(s[2 * i], r), y = maxima.weight(s[2 * i + 1], r);
    state.sum[r] += x + y;
    p[i] = ptx::pack2<E>(x, y);
  }
}

// Sums of two rows over their quad. Rows are completed both at once: one behind the other are 250 clocks more, which
// short sequences wait for.
__device__ __forceinline__ void sum_over_quad(float (&sum)[2], const float (&shares)[2]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) sum[half] = shares[half] + __shfl_xor_sync(ptx::kFullWarp, shares[half], 1);
#pragma unroll
  for (int half = 0; half < 2; ++half) sum[half] += __shfl_xor_sync(ptx::kFullWarp, sum[half], 2);
}

}  // namespace flash_ext::sm90
