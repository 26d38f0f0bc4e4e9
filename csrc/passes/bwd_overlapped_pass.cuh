// postprocess of passes/bwd_passes.cuh, begun while the backward over keys still runs: behind sm80/bwd/persistent.cuh,
// for dense calls with at least a work tile for every multiprocessor.
//
// The last CTAs of the backward leave multiprocessors idle, and dq of all heads but the last few is complete by then. So
// every work tile is counted once its additions to dQ are there, and a CTA here waits for the count of its own head
// only.
//
// The wait ends. A programmatic dependent launch begins this grid when all CTAs of the backward have begun, each of them
// behind the pass that clears the counts. None of those then waits for room that CTAs here take, nor for anything else
// that they do, and those that run fetch all work tiles there are.
#pragma once

#include "../common/debug_delay.cuh"
#include "bwd_passes.cuh"

namespace flash_ext {

// By one thread: waits until all work tiles of a head have added to dQ.
__device__ __forceinline__ void wait_for_work_tiles(const uint32_t* finished, uint32_t work_tiles) {
#if FLASH_EXT_DEBUG
  int tries = 0;
#endif
  while (ptx::load_acquire(finished) < work_tiles) {
    __nanosleep(500);
#if FLASH_EXT_DEBUG
    if (++tries > 20'000'000) __trap();  // an error instead of a hang
#endif
  }
}

// A CTA takes rows of one head, heads in the order in which the backward takes them.
template <typename E, int D>
__global__ void __launch_bounds__(kPassThreads)
    bwd_overlapped_postprocess_kernel(const __grid_constant__ BwdParams p, int tiles_per_head,
                                      uint32_t work_tiles_per_head) {
  constexpr int kLanes = kPassLanes<D>, kRows = kPassThreads / kLanes;
  // The kernel behind this one may begin when this grid is over, and reads dk and dv: the backward's end comes first.
  if (blockIdx.x + 1 == gridDim.x) ptx::wait_for_kernel_before();
  const Problem& r = p.problem;
  const int bh = static_cast<int>(blockIdx.x) / tiles_per_head, b = bh / r.num_heads, h = bh - b * r.num_heads;
  if (threadIdx.x == 0)
    wait_for_work_tiles(finished_work_tiles(p, b, h / (r.num_heads / r.num_heads_k)), work_tiles_per_head);
  __syncthreads();
  const int first = (static_cast<int>(blockIdx.x) - bh * tiles_per_head) * kOverlappedRows;
  const int chunk = threadIdx.x % kLanes, valid = r.head_dim - chunk * 8;
  if (valid <= 0) return;
  float4 lo[kOverlappedRows / kRows], hi[kOverlappedRows / kRows];
#pragma unroll
  for (int i = 0; i < kOverlappedRows / kRows; ++i) {
    const int row = min(first + i * kRows + static_cast<int>(threadIdx.x) / kLanes, r.seqlen_q - 1);
    const float4* at = reinterpret_cast<const float4*>(p.dq_accum + (int64_t{bh} * r.seqlen_q + row) * D + chunk * 8);
    lo[i] = __ldcg(at), hi[i] = __ldcg(at + 1);
  }
#pragma unroll
  for (int i = 0; i < kOverlappedRows / kRows; ++i) {
    const int row = first + i * kRows + static_cast<int>(threadIdx.x) / kLanes;
    if (row < r.seqlen_q) store_dq<E>(p, {b, row, h, 0, true}, chunk, valid, lo[i], hi[i]);
  }
}

}  // namespace flash_ext
