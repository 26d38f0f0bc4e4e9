// How output leaves the fp8 forward: what quantisation took away comes back.
#pragma once

#include "../../common/sink.cuh"
#include "../fwd/store.cuh"
#include "config.cuh"
#include "weights.cuh"

namespace flash_ext::sm90 {

// o = normalised output: by the sums of the weights, the factors of v's channels, and what every row of v lacks. The
// weights of a row add up to 1, so that a vector taken off each row of v is missing once from a row of the output.
//
// Factors come through the warp's part of shared memory at `staging`: asked for where they are used, some after the
// others, they took a fifth of the time of 1024 keys at head_dim 256, of a causal call a third.
template <typename T>
__device__ __forceinline__ void finish_output(const Fp8Args& a, const Work& w, int h_k, float (&o)[T::kHeadDimV / 2],
                                              const float (&inverse)[2], uint32_t staging, int lane) {
  constexpr int kOwn = T::kHeadDimV / 32;  // columns of a lane
  const FactorView &factor = a.x.v_factor, &offset = a.x.v_offset;
  const float* factors = factor.ptr + w.b * factor.batch_stride + h_k * factor.head_stride;
  const float* offsets = offset.ptr + w.b * offset.batch_stride + h_k * offset.head_stride;
  const float present[2] = {inverse[0] == 0.f ? 0.f : 1.f, inverse[1] == 0.f ? 0.f : 1.f};
  float by[kOwn], plus[kOwn];
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    const int column = lane + 32 * i;
    const bool valid = column < a.p.problem.head_dim_v;
    by[i] = valid ? __ldg(factors + column * factor.step) : 0.f;
    plus[i] = valid && offset.ptr != nullptr ? __ldg(offsets + column * offset.step) : 0.f;
  }
  if (lane == 0) ptx::bulk_wait_read();  // the output before left through here
  __syncwarp();
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    ptx::store_shared_word(staging + (lane + 32 * i) * 4, __float_as_uint(by[i]));
    ptx::store_shared_word(staging + (T::kHeadDimV + lane + 32 * i) * 4, __float_as_uint(plus[i]));
  }
  __syncwarp();
  // Nothing is done to o before its factor is there: the compiler would do it to all of o early, and spill.
#pragma unroll
  for (int j = 0; j < T::kHeadDimV / 8; ++j) {
    const uint32_t at = staging + (8 * j + 2 * (lane % 4)) * 4;
    const float2 factor_pair = ptx::load_shared_pair(at), offset_pair = ptx::load_shared_pair(at + 4 * T::kHeadDimV);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float* const pair = &o[4 * j + 2 * half];
      pair[0] = fmaf(pair[0], inverse[half] * factor_pair.x, offset_pair.x * present[half]);
      pair[1] = fmaf(pair[1], inverse[half] * factor_pair.y, offset_pair.y * present[half]);
    }
  }
}

// What of two rows is wanted of the scores as they were before a vector was taken off every key: their lse, behind
// finish_rows(), and the largest one.
__device__ __forceinline__ void put_back_row_offset(const Fp8Args& a, const Work& w, const RowState& state, int row,
                                                    int lane) {
  if (lane % 4 != 0) return;
  const int64_t at = row_stat_offset(a.p.problem, w, w.h) + row;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (row + 8 * half >= w.q.length) continue;
    const bool unseen = state.minus_max[half] == INFINITY;
    float offset = 0.f;
    if (a.x.row_offset != nullptr && !unseen) {
      offset = a.p.problem.scale * a.x.row_offset[at + 8 * half];
      if (a.p.lse != nullptr) a.p.lse[at + 8 * half] += offset;
    }
    if (a.x.row_max != nullptr) {
      a.x.row_max[at + 8 * half] = unseen ? -INFINITY : (kTopWeightLog2 - state.minus_max[half]) * kLn2 + offset;
    }
  }
}

// The sink joins two rows: their lse, which is there where sinks are, and their output. It begins with the lse that
// this lane has stored, because registers are short: they hold the scores of the next tile as well.
template <int kCount>
__device__ __forceinline__ void scale_by_sink(const Fp8Args& a, const Work& w, int row, int lane, float (&o)[kCount]) {
  if (a.x.sinks == nullptr) return;
  const float sink = __ldg(a.x.sinks + w.h);
  if (sink == -INFINITY) return;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float share = 1.f;  // of the keys' weights in all
    if (lane % 4 == 0 && row + 8 * half < w.q.length) {
      share = add_sink(a.p.lse[row_stat_offset(a.p.problem, w, w.h) + row + 8 * half], sink);
    }
    share = __shfl_sync(ptx::kFullWarp, share, lane / 4 * 4);
#pragma unroll
    for (int i = 0; i < kCount / 4; ++i) {
      o[4 * i + 2 * half] *= share;
      o[4 * i + 2 * half + 1] *= share;
    }
  }
}

}  // namespace flash_ext::sm90
