// The pass behind the backward over keys, begun while that one still runs: a trial. Dense calls only, whose heads have
// as many CTAs as blocks of keys.
//
// The last CTAs of the backward leave multiprocessors idle, 64 of 132 for a whole CTA's time at 2048 CTAs, and dq of
// all heads but the last few is complete by then. So every CTA counts itself once its additions to dQ are there, and a
// CTA of the pass waits for the count of its head only. They are launched when all CTAs of the backward have begun
// (programmatic dependent launch): none of those can then wait for the room that they take.
#pragma once

#include "passes/bwd_passes.cuh"
#include "sm80/bwd_late.cuh"

namespace flash_ext::sm80 {

// Until the backward is over. Without programmatic launches it is, before the pass begins.
__device__ __forceinline__ void wait_for_backward() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;\n" ::: "memory");
#endif
}

__device__ __forceinline__ uint32_t load_acquire(const uint32_t* from) {
  uint32_t x;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];\n" : "=r"(x) : "l"(from) : "memory");
  return x;
}

inline constexpr int kLateRows = 64;  // of a CTA

// A CTA takes rows of one head, heads in the order in which the backward takes them.
template <typename E, int D>
__global__ void __launch_bounds__(kPassThreads)
    bwd_late_postprocess_kernel(const __grid_constant__ BwdParams p, int tiles_per_head, uint32_t ctas_per_head) {
  constexpr int kLanes = kPassLanes<D>, kRows = kPassThreads / kLanes;
  // The kernel behind this one may begin when this grid is over, and reads dk and dv: the backward's end comes first.
  if (blockIdx.x + 1 == gridDim.x) wait_for_backward();
  const Problem& r = p.problem;
  const int bh = static_cast<int>(blockIdx.x) / tiles_per_head, b = bh / r.num_heads, h = bh - b * r.num_heads;
  if (threadIdx.x == 0) {
    const uint32_t* finished = finished_ctas(p) + b * r.num_heads_k + h / (r.num_heads / r.num_heads_k);
    while (load_acquire(finished) < ctas_per_head) __nanosleep(500);
  }
  __syncthreads();
  const int first = (static_cast<int>(blockIdx.x) - bh * tiles_per_head) * kLateRows;
  const int chunk = threadIdx.x % kLanes, valid = r.head_dim - chunk * 8;
  if (valid <= 0) return;
  float4 lo[kLateRows / kRows], hi[kLateRows / kRows];
#pragma unroll
  for (int i = 0; i < kLateRows / kRows; ++i) {
    const int row = min(first + i * kRows + static_cast<int>(threadIdx.x) / kLanes, r.seqlen_q - 1);
    const float4* at =
        reinterpret_cast<const float4*>(p.dq_accum + (int64_t{bh} * r.seqlen_q + row) * D + chunk * 8);
    lo[i] = __ldcg(at), hi[i] = __ldcg(at + 1);
  }
#pragma unroll
  for (int i = 0; i < kLateRows / kRows; ++i) {
    const int row = first + i * kRows + static_cast<int>(threadIdx.x) / kLanes;
    if (row < r.seqlen_q) store_dq<E>(p, {b, row, h, 0, true}, chunk, valid, lo[i], hi[i]);
  }
}

}  // namespace flash_ext::sm80
