// The backward of bwd_wide.cuh with everything of common/modifiers.cuh: masks, biases, softcap, sinks, dropout, in two
// kernels as there. What differs is what bwd_mod.cuh says of the one below head_dim 128.
//
// Shared memory, 128-byte swizzled tiles first:
//   dK, dV   K, V [64 rows] | Q, dO [slots][block_m rows] | P [query / 8][thread][4] | stats [slots] | WideModShared, barriers
//   dQ       Q, dO [warpgroup][64 rows] | K [k_slots][64 rows] | V [v_slots][64 rows] | WideModShared, barriers
#pragma once

#include "bwd_wide_mod_consume.cuh"
#include "bwd_wide_mod_produce.cuh"
#include "roles.cuh"

namespace flash_ext::sm90 {

template <typename T>
__device__ __forceinline__ void bwd_wide_mod_body(const WideModArgs& a, const BwdMaps& maps) {
  extern __shared__ __align__(1024) unsigned char smem_bytes[];
  const uint32_t smem = ptx::smem_address(smem_bytes);
  WideModShared<T>& shared = *reinterpret_cast<WideModShared<T>*>(smem_bytes + T::kSharedAt);
  const WideModBarriers<T> bars{smem};
  const auto produce = [&](int warp) {
    if (warp == 0) {
      schedule_bwd_items<T>(a, shared, bars);
    } else if constexpr (T::kByQueries) {
      load_wide_query_steps<T>(a, maps, smem, shared, bars, warp - 1);
    } else {
      load_wide_key_steps<T>(a, maps, smem, shared, bars, warp - 1);
    }
  };
  play_roles<T>(bars, produce, [&](int group) {
    if constexpr (T::kByQueries) {
      consume_mod_queries<T>(a, smem, shared, bars, group - 1);
    } else if (group == 1) {
      consume_mod_weights<T>(a, smem, smem_bytes, shared, bars);
    } else {
      consume_mod_gradients<T>(a, smem, smem_bytes, shared, bars);
    }
  });
}

template <typename T>
__global__ void __launch_bounds__(T::kThreads, 1)
    bwd_wide_mod_sm90_kernel(const __grid_constant__ WideModArgs a, const __grid_constant__ BwdMaps maps) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  if constexpr (!T::kByQueries) {
    ptx::wait_for_kernel_before();
    ptx::allow_next_kernel();  // which reads what the kernel before this one has left, hence not earlier
  }
  bwd_wide_mod_body<T>(a, maps);
  if constexpr (T::kByQueries) ptx::wait_for_kernel_before();  // who waits for this one wants both
#else
  __trap();  // wgmma exists in sm_90a machine code only
#endif
}

}  // namespace flash_ext::sm90
