// Who does what in a CTA of the sm90 kernels: the first warpgroup produces, a warp a job; the others consume.
#pragma once

#include "../ptx/sm90.cuh"

namespace flash_ext::sm90 {

// Sets up the barriers and runs produce(warp) in the warps of the first warpgroup, consume(group) in the others, whose
// numbers begin with 1. Registers move from the first to the others.
template <typename T, typename Barriers, typename Produce, typename Consume>
__device__ __forceinline__ void play_roles(const Barriers& bars, const Produce& produce, const Consume& consume) {
  if (threadIdx.x == 0) bars.init();
  __syncthreads();
  const int group = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
  if (group == 0) {
    ptx::setmaxnreg_dec<T::kProducerRegs>();
    produce(__shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x / 32), 0));
  } else {
    ptx::setmaxnreg_inc<T::kConsumerRegs>();
    consume(group);
  }
}

}  // namespace flash_ext::sm90
