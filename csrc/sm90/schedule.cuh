// Drawing items: a counter in global memory that needs no preparation.
//
// Items of different lengths are given out one by one to the CTA that is free. The 16 bytes of the counter hold
// anything at launch: the first CTA to come makes it this launch's own, and the last draw gives it up, so that the same
// launch repeated from a CUDA graph finds it as if for the first time. A launch makes as many draws as it has items.
#pragma once

#include <cstdint>

#include "../ptx/sm80.cuh"
#include "tiles.h"

namespace flash_ext::sm90 {

struct Counter {
  unsigned long long owner;  // a launch, or that + 1 while its counter is being set to 0
  unsigned int next;
};
static_assert(sizeof(Counter) == kCounterBytes);

struct Draw {
  Counter* counter = nullptr;  // null: item i belongs to CTA i modulo their number
  unsigned long long launch = 0;  // even, different for each launch of a process, never 0
  uint32_t num_items = 0;
};

// Before a CTA's first draw.
__device__ __forceinline__ void own_counter(const Draw& d) {
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

// The item after the gridDim.x ones that CTAs begin with and those drawn so far; too large when none is left.
__device__ __forceinline__ uint32_t draw_item(const Draw& d) {
  const uint32_t drawn = atomicAdd(&d.counter->next, 1u);
  if (drawn == d.num_items - 1) atomicExch(&d.counter->owner, 0ull);
  return gridDim.x + drawn;
}

// The item that follows `present`, for a whole warp.
__device__ __forceinline__ uint32_t next_item(const Draw& d, uint32_t present) {
  uint32_t next = 0;
  if (ptx::fresh_lane() == 0) next = d.counter != nullptr ? draw_item(d) : present + gridDim.x;
  return __shfl_sync(ptx::kFullWarp, next, 0);
}

}  // namespace flash_ext::sm90
