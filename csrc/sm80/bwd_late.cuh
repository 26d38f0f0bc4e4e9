// What a CTA of the backward over keys does for a pass behind it that begins while it still runs: a trial of
// bench/standalone, in no kernel that calls reach. Dense calls only.
#pragma once

#include "../common/seqlen.cuh"
#include "../params.h"

namespace flash_ext::sm80 {

__device__ __forceinline__ void allow_late_pass() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;\n" ::: "memory");
#endif
}

// Words behind the row statistics: CTAs of the backward that are done with dQ, for each key head.
__host__ __device__ inline uint32_t* finished_ctas(const BwdParams& p) {
  return reinterpret_cast<uint32_t*>(p.row_stats + 2 * p.problem.total_q * p.problem.num_heads);
}

// Behind those: the order of items, where a trial has one (item_order.cuh).
__host__ __device__ inline uint32_t* item_order(const BwdParams& p) {
  return finished_ctas(p) + p.problem.batch * p.problem.num_heads_k;
}

// By one thread, behind a barrier that all threads reach after their additions.
__device__ __forceinline__ void count_finished(const BwdParams& p, const Work& w) {
  __threadfence();
  atomicAdd(finished_ctas(p) + w.b * p.problem.num_heads_k + w.h, 1u);
}

}  // namespace flash_ext::sm80
