// The two memory-bound passes around the backward over keys.
//
// preprocess: row_stats = (lse * log2 e, rowsum(dout * out) - dlse) for every query row, dq_accum = 0.
//   A row that sees nothing (lse = -inf) gets +inf, so that its weights come out as 2^(s - inf) = 0.
// postprocess: dq = scale * dq_accum, rounded to the output type unless that is fp32.
#pragma once

#include "../common/attn_mod.cuh"
#include "../common/dot.cuh"
#include "../common/float_results.cuh"
#include "../common/seqlen.cuh"
#include "../heuristics.h"
#include "../ptx/sm80.cuh"

namespace flash_ext {

template <int D>
inline constexpr int kPassLanes = pass_lanes(D);

struct RowHead {
  int b;  // batch index for strides; 0 when packed
  int64_t row;  // inside the batch entry; packed row otherwise
  int h;
  int64_t stat;  // offset of its lse
  bool valid;
};

// Heads vary fastest, as they do in memory.
template <int kLanes>
__device__ __forceinline__ RowHead locate_row(const Problem& p) {
  const int64_t index = (static_cast<int64_t>(blockIdx.x) * kPassThreads + threadIdx.x) / kLanes;
  RowHead r;
  const int64_t row = index / p.num_heads;
  r.h = static_cast<int>(index - row * p.num_heads);
  r.valid = row < p.total_q;
  if (p.cu_seqlens_q != nullptr) {
    r.b = 0;
    r.row = row;
    r.stat = r.h * p.total_q + row;
  } else {
    r.b = static_cast<int>(row / p.seqlen_q);
    r.row = row - static_cast<int64_t>(r.b) * p.seqlen_q;
    r.stat = (static_cast<int64_t>(r.b) * p.num_heads + r.h) * p.seqlen_q + r.row;
  }
  return r;
}

// Eight elements, of which `valid` are there; zeros behind them.
__device__ __forceinline__ uint4 load_8(const uint16_t* p, int valid, bool aligned) {
  if (aligned && valid >= 8) return *reinterpret_cast<const uint4*>(p);
  uint32_t w[4] = {0, 0, 0, 0};
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (i < valid) w[i / 2] |= static_cast<uint32_t>(p[i]) << (16 * (i % 2));
  }
  return make_uint4(w[0], w[1], w[2], w[3]);
}

template <typename E, int D>
__global__ void __launch_bounds__(kPassThreads) bwd_preprocess_kernel(const __grid_constant__ BwdParams p) {
  constexpr int kLanes = kPassLanes<D>;
  ptx::allow_next_kernel();
  const RowHead r = locate_row<kLanes>(p.problem);
  const int chunk = threadIdx.x % kLanes;
  float sum = 0.f;
  if (r.valid && chunk * 8 < p.problem.head_dim_v) {
    const int valid = p.problem.head_dim_v - chunk * 8;
    sum = dot_8<E>(load_8(row_pointer(p.out, r.b, r.row, r.h) + chunk * 8, valid, p.out.aligned),
                   load_8(row_pointer(p.dout, r.b, r.row, r.h) + chunk * 8, valid, p.dout.aligned));
  }
#pragma unroll
  for (int step = kLanes / 2; step > 0; step /= 2) sum += __shfl_xor_sync(ptx::kFullWarp, sum, step);
  ptx::wait_for_kernel_before();  // it needs nothing of that one, but who waits for this one wants both
  if (!r.valid) return;
  if (chunk == 0) {
    const float lse = p.lse[r.stat];
    reinterpret_cast<float2*>(p.row_stats)[r.stat] =
        make_float2(lse < kLowestLse ? INFINITY : lse * kLog2e, sum - (p.dlse == nullptr ? 0.f : p.dlse[r.stat]));
  }
  if (p.dq_accum != nullptr && chunk * 8 < D) {
    float4* at = reinterpret_cast<float4*>(p.dq_accum + r.stat * D + chunk * 8);
    at[0] = at[1] = make_float4(0.f, 0.f, 0.f, 0.f);
  }
}

// dq of one chunk of a row, `valid` elements of eight, from their sums.
template <typename E>
__device__ __forceinline__ void store_dq(const BwdParams& p, const RowHead& r, int chunk, int valid, float4 lo,
                                         float4 hi) {
  const float s = p.problem.scale;
  if (p.dq.is_float) {
    const float x[8] = {lo.x * s, lo.y * s, lo.z * s, lo.w * s, hi.x * s, hi.y * s, hi.z * s, hi.w * s};
    store_floats(float_row_pointer(p.dq, r.b, r.row, r.h) + chunk * 8, x, valid, p.dq.aligned);
    return;
  }
  const uint32_t w[4] = {ptx::pack2<E>(lo.x * s, lo.y * s), ptx::pack2<E>(lo.z * s, lo.w * s),
                         ptx::pack2<E>(hi.x * s, hi.y * s), ptx::pack2<E>(hi.z * s, hi.w * s)};
  uint16_t* dst = row_pointer(p.dq, r.b, r.row, r.h) + chunk * 8;
  if (p.dq.aligned && valid >= 8) {
    *reinterpret_cast<uint4*>(dst) = make_uint4(w[0], w[1], w[2], w[3]);
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (i < valid) dst[i] = static_cast<uint16_t>(w[i / 2] >> (16 * (i % 2)));
    }
  }
}

template <typename E, int D>
__global__ void __launch_bounds__(kPassThreads) bwd_postprocess_kernel(const __grid_constant__ BwdParams p) {
  constexpr int kLanes = kPassLanes<D>;
  const RowHead r = locate_row<kLanes>(p.problem);
  const int chunk = threadIdx.x % kLanes;
  const int valid = p.problem.head_dim - chunk * 8;
  if (!r.valid || valid <= 0) return;
  const float4* at = reinterpret_cast<const float4*>(p.dq_accum + r.stat * D + chunk * 8);
  store_dq<E>(p, r, chunk, valid, at[0], at[1]);
}

}  // namespace flash_ext
