// Softmax of scores to which anything may have been added. Unlike weights.cuh it finds the maximum of a tile first:
// exponentials then replace scores in place while the product with the weights before still runs, nothing is done twice
// where scores rise from tile to tile (ALiBi), the maxima are there when they are wanted, and a tile whose scores are
// all hidden changes no bit, so that results do not depend on which of these were visited.
//
// Maxima are kept in the units of the scores: those near finfo.min would no longer be finite times log2(e), so rows as
// low as that subtract their maximum first.
#pragma once

#include "fwd_mod_parts.cuh"
#include "weights.cuh"

namespace flash_ext::sm90 {

struct ModRowState {
  float max[2] = {-INFINITY, -INFINITY};
  float sum[2] = {0.f, 0.f};  // this lane's share of the row sum
};

template <int kCount>
__device__ __forceinline__ void quad_maxima(const float (&s)[kCount], float (&largest)[2]) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float parts[2] = {-INFINITY, -INFINITY};
#pragma unroll
    for (int i = r; i < kCount / 2; i += 2) parts[i / 2 % 2] = fmaxf(parts[i / 2 % 2], fmaxf(s[2 * i], s[2 * i + 1]));
    largest[r] = fmaxf(parts[0], parts[1]);
    largest[r] = fmaxf(largest[r], __shfl_xor_sync(0xffffffffu, largest[r], 1));
    largest[r] = fmaxf(largest[r], __shfl_xor_sync(0xffffffffu, largest[r], 2));
  }
}

// Scores to weights in place. Maxima rise when they must, as in common/softmax.cuh, or whenever they can: then true is
// returned, and the output so far is worth `factor`.
template <int kCount>
__device__ __forceinline__ bool weigh(float (&s)[kCount], ModRowState& state, float (&factor)[2], const Modifiers& m) {
  constexpr float kSlackLog2 = 8.f;
  const float unit = m.unit_log2, slack = m.row_max != nullptr ? 0.f : kSlackLog2;
  float largest[2], shift[2];
  quad_maxima(s, largest);
  // False while both are -inf: (-inf) - (-inf) is NaN and compares false.
  const bool must = (largest[0] - state.max[0]) * unit > slack || (largest[1] - state.max[1]) * unit > slack;
  const bool rises = __any_sync(0xffffffffu, must);
  if (rises) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float higher = fmaxf(state.max[r], largest[r]);
      factor[r] = higher == -INFINITY ? 1.f : ptx::ex2((state.max[r] - higher) * unit);
      state.max[r] = higher;
      state.sum[r] *= factor[r];
    }
  }
  // Rows that have seen nothing have scores of -inf only and need an offset that is a number.
#pragma unroll
  for (int r = 0; r < 2; ++r) shift[r] = state.max[r] == -INFINITY ? 0.f : state.max[r];
  if (m.bias.ptr != nullptr && __any_sync(0xffffffffu, fminf(shift[0], shift[1]) < kLowMaximum)) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) s[i] -= shift[i / 2 % 2];
    shift[0] = shift[1] = 0.f;
  }
  const float offset[2] = {-shift[0] * unit, -shift[1] * unit};
  float sum[2][2] = {};
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    s[i] = ptx::ex2(fmaf(s[i], unit, offset[i / 2 % 2]));
    sum[i / 2 % 2][i % 2] += s[i];
  }
  const float sum0 = sum[0][0] + sum[0][1], sum1 = sum[1][0] + sum[1][1];
  // Never so, but it must be known here: ptxas would move the exponentials behind the wait for the product that runs.
  if (sum0 + sum1 < 0.f) __trap();
  state.sum[0] += sum0;
  state.sum[1] += sum1;
  return rises;
}

// Completes two rows with the item's sink: stores lse and what is wanted of the maxima, returns the factors for the
// output, 0 for rows without keys.
__device__ __forceinline__ void finish_mod_rows(const FwdModArgs& a, const ModItem& item, const ModRowState& state,
                                                int row, int lane, float (&inverse)[2]) {
  const Modifiers& m = a.m;
  const int64_t stat = row_stat_offset(a.plain.p.problem, item.w, item.w.h);
  const float sink = item.sink;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float sum = state.sum[half];
    sum += __shfl_xor_sync(0xffffffffu, sum, 1);
    sum += __shfl_xor_sync(0xffffffffu, sum, 2);
    const float largest = state.max[half];
    const bool unseen = largest == -INFINITY, empty = unseen && sum == 0.f;
    float lse = empty ? -INFINITY : (unseen ? 0.f : largest) * (m.unit_log2 * kLn2) + logf(sum);
    inverse[half] = empty ? 0.f : m.keep_scale / sum;
    if (sink != -INFINITY) {
      // Both denominators, e^lse and e^sink, over the larger of the two.
      const float top = fmaxf(lse, sink);
      const float share = ptx::ex2((lse - top) * kLog2e), both = share + ptx::ex2((sink - top) * kLog2e);
      lse = top + logf(both);
      inverse[half] *= share / both;
    }
    if (lane % 4 == 0 && row + 8 * half < item.w.q.length) {
      a.plain.p.lse[stat + row + 8 * half] = lse;
      if (m.row_max != nullptr) m.row_max[stat + row + 8 * half] = largest * (m.unit_log2 * kLn2);
    }
  }
}

}  // namespace flash_ext::sm90
