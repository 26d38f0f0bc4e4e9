// How output leaves the fp8 forward: what quantisation took away comes back.
#pragma once

#include "../fwd/store.cuh"
#include "config.cuh"

namespace flash_ext::sm90 {

// o = normalised output: by the sums of the weights, the factors of v's channels, and what every row of v lacks. The
// weights of a row add up to 1, so that a vector taken off each row of v is missing once from a row of the output.
template <typename T>
__device__ __forceinline__ void finish_output(const Fp8Args& a, const Work& w, int h_k, float (&o)[T::kHeadDimV / 2],
                                              const float (&inverse)[2], int lane) {
  const FactorView &factor = a.x.v_factor, &offset = a.x.v_offset;
  const float* factors = factor.ptr + w.b * factor.batch_stride + h_k * factor.head_stride;
  const float* offsets = offset.ptr + w.b * offset.batch_stride + h_k * offset.head_stride;
  const float present[2] = {inverse[0] == 0.f ? 0.f : 1.f, inverse[1] == 0.f ? 0.f : 1.f};
#pragma unroll
  for (int j = 0; j < T::kHeadDimV / 8; ++j) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const int column = 8 * j + 2 * (lane % 4) + c;
      const bool valid = column < a.p.problem.head_dim_v;
      const float by = valid ? __ldg(factors + column * factor.step) : 0.f;
      const float plus = valid && offset.ptr != nullptr ? __ldg(offsets + column * offset.step) : 0.f;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float& x = o[4 * j + 2 * half + c];
        x = fmaf(x * inverse[half], by, plus * present[half]);
      }
    }
  }
}

// lse of the scores as they were before a vector was taken off every key.
__device__ __forceinline__ void put_back_row_offset(const Fp8Args& a, const Work& w, int row, int lane) {
  if (a.x.row_offset == nullptr || lane % 4 != 0) return;
  const int64_t at = row_stat_offset(a.p.problem, w, w.h) + row;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (row + 8 * half < w.q.length)
      a.p.lse[at + 8 * half] += a.p.problem.softmax_scale * a.x.row_offset[at + 8 * half];
  }
}

}  // namespace flash_ext::sm90
