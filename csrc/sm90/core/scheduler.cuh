// Dynamic scheduling: a counter in global memory that needs no preparation.
//
// Work tiles of different lengths are given out one by one to the CTA that is free. The 16 bytes of the counter hold
// anything at launch: the first CTA to come makes it this launch's own, and the last fetch gives it up, so that the
// same launch repeated from a CUDA graph finds it as if for the first time. A launch fetches as often as it has work
// tiles.
#pragma once

#include <cstdint>

#include "../../ptx/sm80.cuh"
#include "../fwd/tiles.h"

namespace flash_ext::sm90 {

struct Counter {
  unsigned long long owner;  // a launch, or that + 1 while its counter is being set to 0
  unsigned int next;
};
static_assert(sizeof(Counter) == kCounterBytes);

struct TileScheduler {
  Counter* counter = nullptr;  // null: work tile i belongs to CTA i modulo their number
  unsigned long long launch = 0;  // even, different for each launch of a process, never 0
  uint32_t num_work_tiles = 0;
};

// Before a CTA's first fetch.
__device__ __forceinline__ void claim_counter(const TileScheduler& d) {
  Counter* c = d.counter;
  while (true) {
    unsigned long long seen;
    asm volatile("ld.acquire.gpu.global.u64 %0, [%1];\n" : "=l"(seen) : "l"(&c->owner) : "memory");
    if (seen == d.launch) return;
    if (seen == d.launch + 1 || atomicCAS(&c->owner, seen, d.launch + 1) != seen) continue;
    c->next = 0;
    asm volatile("st.release.gpu.global.u64 [%0], %1;\n" ::"l"(&c->owner), "l"(d.launch) : "memory");
    return;
  }
}

// The work tile after the gridDim.x ones that CTAs begin with and those fetched so far; too large when none is left.
__device__ __forceinline__ uint32_t fetch_work_tile(const TileScheduler& d) {
  const uint32_t fetched = atomicAdd(&d.counter->next, 1u);
  if (fetched == d.num_work_tiles - 1) atomicExch(&d.counter->owner, 0ull);
  return gridDim.x + fetched;
}

// The same behind `present`; a CTA claims the counter when it first fetches. In front of its first work tile, the loads
// of that one would wait for the claim, about 1.5 us where the cache is cold.
__device__ __forceinline__ uint32_t claim_and_fetch(const TileScheduler& d, uint32_t present) {
  if (present < gridDim.x) claim_counter(d);
  return fetch_work_tile(d);
}

// The work tile that follows `present`, for a whole warp.
__device__ __forceinline__ uint32_t next_work_tile(const TileScheduler& d, uint32_t present) {
  uint32_t next = 0;
  if (ptx::fresh_lane() == 0) next = d.counter != nullptr ? claim_and_fetch(d, present) : present + gridDim.x;
  return __shfl_sync(ptx::kFullWarp, next, 0);
}

}  // namespace flash_ext::sm90
