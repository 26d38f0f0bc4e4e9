// The wait of loops whose tiles all threads of a CTA copy.
#pragma once

#include "../../common/debug_delay.cuh"

namespace flash_ext::sm80 {

// What all threads of the CTA have copied is there for each of them, and everybody has left what was read before.
__device__ __forceinline__ void wait_for_copies() {
  debug_delay();
  ptx::cp_async_wait<0>();
  __syncthreads();
  debug_delay();
}

}  // namespace flash_ext::sm80
