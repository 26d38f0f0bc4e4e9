// Words by which the CTAs of the backward that goes on from work tile to work tile (sm80/bwd/persistent.cuh) share out
// its work tiles and tell the pass behind it (passes/bwd_overlapped_pass.cuh) how far they are. BwdParams::schedule
// points to them, heuristics.h knows how many there are, and the preprocess pass clears them:
//   fetched                          work tiles beyond the first of each CTA
//   finished  [batch][num_heads_k]   work tiles whose additions to dQ are there; of dense calls
#pragma once

#include "../heuristics.h"
#include "../ptx/sm80.cuh"
#include "seqlen.cuh"

namespace flash_ext {

__device__ __forceinline__ uint32_t* finished_work_tiles(const BwdParams& p, int b, int h_k) {
  return p.schedule + 1 + b * p.problem.num_heads_k + h_k;
}

__device__ __forceinline__ uint32_t fetch_work_tile(const BwdParams& p) {
  return gridDim.x + atomicAdd(p.schedule, 1u);
}

// By one thread, behind a barrier that all threads reach after their additions.
__device__ __forceinline__ void count_finished(const BwdParams& p, const Work& w) {
  if (p.problem.cu_seqlens_q != nullptr) return;
  __threadfence();
  atomicAdd(finished_work_tiles(p, w.b, w.h), 1u);
}

}  // namespace flash_ext
