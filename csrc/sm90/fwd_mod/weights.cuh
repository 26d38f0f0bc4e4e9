// fwd/weights.cuh for scores to which anything may have been added. Maxima are kept in the units of the scores: those
// near finfo.min would no longer be finite times log2(e), so rows as far from 0 as kFarMaximum subtract their maximum
// first. A work tile's first tile takes its maximum instead of a guess, so that no result depends on which hidden tiles
// were visited.
#pragma once

#include "../../common/sink.cuh"
#include "../fwd/weights.cuh"
#include "config.cuh"

namespace flash_ext::sm90 {

struct ModRowState {
  float max[2] = {-INFINITY, -INFINITY};
  float sum[2] = {0.f, 0.f};  // this lane's share of the row sum
};

// What a kernel keeps of its rows.
template <typename T>
using StateOf = std::conditional_t<T::kUnits == ScoreUnits::kRaw, RowState, ModRowState>;

__device__ __forceinline__ const ModRowState& mod_state(const ModRowState& state) { return state; }
__device__ __forceinline__ ModRowState mod_state(const RowState& state) {
  return {{-state.minus_max[0], -state.minus_max[1]}, {state.sum[0], state.sum[1]}};
}

// p = weights of s by the maxima there are. False when they must not be used.
template <typename E, int kCount>
__device__ __forceinline__ bool try_mod_weights(const float (&s)[kCount], uint32_t (&p)[kCount / 2], ModRowState& state,
                                                float unit) {
  RowState log2_state;
  log2_state.minus_max[0] = -state.max[0] * unit;
  log2_state.minus_max[1] = -state.max[1] * unit;
  if (is_far(log2_state.minus_max[0], log2_state.minus_max[1])) log2_state.limit = -1.f;
  if (!try_weights<E>(s, p, log2_state, unit)) return false;
  state.sum[0] += log2_state.sum[0];
  state.sum[1] += log2_state.sum[1];
  return true;
}

// The same of exponents, which are less the maxima there are already.
template <typename E, int kCount>
__device__ __forceinline__ bool try_exponents(const float (&s)[kCount], uint32_t (&p)[kCount / 2], ModRowState& state) {
  float sum[2][2] = {};
#pragma unroll
  for (int i = 0; i < kCount / 2; ++i) {
    const int r = i % 2;
    const float x = ptx::ex2(s[2 * i]), y = ptx::ex2(s[2 * i + 1]);
    sum[r][0] += x;
    sum[r][1] += y;
    p[i] = ptx::pack2<E>(x, y);
  }
  const float sum0 = sum[0][0] + sum[0][1], sum1 = sum[1][0] + sum[1][1];
  // NaN compares false. Rows that have seen nothing are less no maximum: theirs must be found.
  const bool seen = fminf(state.max[0], state.max[1]) > -INFINITY;
  const bool fine = seen && sum0 <= kSumLimit && sum1 <= kSumLimit;
  if (__any_sync(ptx::kFullWarp, !fine)) return false;
  state.sum[0] += sum0;
  state.sum[1] += sum1;
  return true;
}

// p = weights of s by the larger of the maxima there are and the tile's; factor is what the output so far is worth.
template <typename E, int kCount>
__device__ __forceinline__ void mod_weights_by_maximum(float (&s)[kCount], uint32_t (&p)[kCount / 2],
                                                       ModRowState& state, float (&factor)[2], float unit) {
  float largest[2], shift[2];
  quad_maxima(s, largest);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float higher = fmaxf(state.max[r], largest[r]);
    // Nothing seen yet: the scores are all -inf and need an offset that is a number.
    factor[r] = higher == -INFINITY ? 1.f : ptx::ex2((state.max[r] - higher) * unit);
    shift[r] = higher == -INFINITY ? 0.f : higher;
    state.max[r] = higher;
    state.sum[r] *= factor[r];
  }
  if (__any_sync(ptx::kFullWarp, is_far(shift[0] * unit, shift[1] * unit))) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) s[i] -= shift[i / 2 % 2];
    shift[0] = shift[1] = 0.f;
  }
#pragma unroll
  for (int i = 0; i < kCount / 2; ++i) {
    const int r = i % 2;
    const float x = ptx::ex2(fmaf(s[2 * i], unit, -shift[r] * unit));
    const float y = ptx::ex2(fmaf(s[2 * i + 1], unit, -shift[r] * unit));
    state.sum[r] += x + y;
    p[i] = ptx::pack2<E>(x, y);
  }
}

// The same of exponents; the state's maxima are in units of log2.
template <typename E, int kCount>
__device__ __forceinline__ void weights_by_maximum_of_exponents(const float (&s)[kCount], uint32_t (&p)[kCount / 2],
                                                                ModRowState& state, float (&factor)[2]) {
  float largest[2], rise[2];
  quad_maxima(s, largest);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const bool seen = state.max[r] != -INFINITY;
    const float higher = seen ? fmaxf(largest[r], 0.f) : largest[r];
    factor[r] = seen ? ptx::ex2(-higher) : 1.f;
    rise[r] = higher == -INFINITY ? 0.f : higher;
    state.max[r] = seen ? state.max[r] + higher : higher;
    state.sum[r] *= factor[r];
  }
#pragma unroll
  for (int i = 0; i < kCount / 2; ++i) {
    const int r = i % 2;
    const float x = ptx::ex2(s[2 * i] - rise[r]), y = ptx::ex2(s[2 * i + 1] - rise[r]);
    state.sum[r] += x + y;
    p[i] = ptx::pack2<E>(x, y);
  }
}

// Completes two rows with the work tile's sink: stores what is wanted of lse and the maxima, returns the factors for
// the output, 0 for rows without keys.
__device__ __forceinline__ void finish_mod_rows(const FwdModArgs& a, const ModWorkTile& work, const ModRowState& state,
                                                int row, int lane, float (&inverse)[2]) {
  const Modifiers& m = a.m;
  const float sink = work.sink, unit = m.unit_log2 * kLn2;
  float sum[2], lse[2];
  sum_over_quad(sum, state.sum);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const bool unseen = state.max[half] == -INFINITY, empty = unseen && sum[half] == 0.f;
    lse[half] = (unseen ? 0.f : state.max[half]) * unit + logf(sum[half]);
    inverse[half] = m.keep_scale * ptx::reciprocal(empty ? INFINITY : sum[half]);
  }
  if (sink != -INFINITY) {
#pragma unroll
    for (int half = 0; half < 2; ++half) inverse[half] *= add_sink(lse[half], sink);
  }
  if (lane % 4 != 0) return;
  const int64_t stat = row_stat_offset(a.plain.p.problem, work.w, work.w.h) + row;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (row + 8 * half >= work.w.q.length) continue;
    if (a.plain.p.lse != nullptr) a.plain.p.lse[stat + 8 * half] = lse[half];
    if (m.row_max != nullptr) m.row_max[stat + 8 * half] = state.max[half] * unit;
  }
}

}  // namespace flash_ext::sm90
