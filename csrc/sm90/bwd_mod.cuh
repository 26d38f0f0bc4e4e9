// The backward of bwd.cuh with everything of common/modifiers.cuh: masks, biases, softcap, sinks, dropout.
//
// What differs: the scheduler finds the tiles of queries to visit, and what their scores are tested for, and hands
// these steps on by way of the loader of Q; loaders make the bits of hidden and dropped scores; consumers change scores
// while the product of dP runs.
//
// Shared memory, 128-byte swizzled tiles first:
//   K, V     [128 rows]
//   Q, dO    [kSlots][64 rows]
//   dS       [3][64 queries x 128 keys]
//   bias     [2][64 queries x 64 keys] of 16 bits, [4][64 x 32] in fp32, in kernels that add one; else marks [kMarkSlots][2][consumer threads]
//   stage    [consumer warps][4 KB]   dQ, or rows of gradients, on their way out
//   stats    [kSlots][-lse * log2 e of 64 queries, -delta]
//   ModKeyShared, barriers
#pragma once

#include "bwd_mod_consume.cuh"
#include "bwd_mod_produce.cuh"
#include "roles.cuh"

namespace flash_ext::sm90 {

template <typename T>
__device__ __forceinline__ void bwd_mod_body(const BwdModArgs& a, const BwdModMaps& maps) {
  extern __shared__ __align__(1024) unsigned char smem_bytes[];
  const uint32_t smem = ptx::smem_address(smem_bytes);
  ModKeyShared<T>& shared = *reinterpret_cast<ModKeyShared<T>*>(smem_bytes + T::kSharedAt);
  const ModKeyBarriers<T> bars{smem};
  const auto produce = [&](int warp) {
    if (warp == 0) {
      schedule_bwd_items<T>(a, shared, bars);
    } else {
      load_mod_steps<T>(a, maps, smem, shared, bars, warp - 1);
    }
  };
  play_roles<T>(bars, produce,
                [&](int) { consume_mod_keys<T>(a, smem, smem_bytes, shared, bars); });
}

template <typename T>
__global__ void __launch_bounds__(T::kThreads, 1)
    bwd_mod_sm90_kernel(const __grid_constant__ BwdModArgs a, const __grid_constant__ BwdModMaps maps) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  ptx::allow_next_kernel();
  ptx::wait_for_kernel_before();
  bwd_mod_body<T>(a, maps);
#else
  __trap();  // wgmma exists in sm_90a machine code only
#endif
}

}  // namespace flash_ext::sm90
