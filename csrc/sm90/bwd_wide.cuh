// FlashAttention backward for Hopper with head_dim above 128: one kernel for dK and dV, one for dQ.
//
// dK and dV of 64 keys, or dQ of 128 queries, take all registers that are left, so that one kernel for all three would
// have to add dQ of every 64 keys to memory: 64 KB of additions for as much tensor work as they take. Computing scores
// and dP again costs 2 products in 5 and needs no memory, no order of additions, no pass after it.
//
// Shared memory, 128-byte swizzled tiles first:
//   dK, dV   K, V [64 rows] | Q, dO [slots][block_m rows] | P [weight_slots][query / 8][thread][4] | stats [slots] | control
//   dQ       Q, dO [warpgroup][64 rows] | K [k_slots][block_n rows] | V [v_slots] | control (items, barriers)
#pragma once

#include "bwd_wide_consume.cuh"
#include "roles.cuh"

namespace flash_ext::sm90 {

template <typename T>
__device__ __forceinline__ void bwd_wide_keys_body(const BwdArgs& a, const BwdMaps& maps) {
  extern __shared__ __align__(1024) unsigned char smem_bytes[];
  const uint32_t smem = ptx::smem_address(smem_bytes);
  BwdItem* items = reinterpret_cast<BwdItem*>(smem_bytes + T::kItemsAt);
  const BwdBarriers<T> bars{smem + T::kBarriersAt};
  const auto produce = [&](int warp) {
    if (warp == 0) {
      schedule_keys<T>(a, maps, smem, items, bars);
    } else if (warp == 1) {
      load_keys<T>(a, maps, smem, items, bars);
    } else if (warp == 2) {
      load_queries<T>(a, maps, smem, items, bars);
    } else {
      load_douts<T>(a, maps, smem, items, bars);
    }
  };
  play_roles<T>(bars, produce, [&](int group) {
    if (group == 1) {
      consume_weights<T>(a, smem, smem_bytes, items, bars);
    } else {
      consume_gradients<T>(a, smem, smem_bytes, items, bars);
    }
  });
}

template <typename T>
__device__ __forceinline__ void bwd_wide_queries_body(const WideQueryArgs& a, const BwdMaps& maps) {
  extern __shared__ __align__(1024) unsigned char smem_bytes[];
  const uint32_t smem = ptx::smem_address(smem_bytes);
  QueryItem* items = reinterpret_cast<QueryItem*>(smem_bytes + T::kItemsAt);
  const WideQueryBarriers<T> bars{smem + T::kBarriersAt};
  const auto produce = [&](int warp) {
    if (warp == 0) {
      schedule_queries<T>(a, items, bars);
    } else if (warp == 1) {
      load_query_rows<T>(a, maps, smem, items, bars);
    } else if (warp == 2) {
      load_key_tiles<T, false>(a, maps, smem, items, bars);
    } else {
      load_key_tiles<T, true>(a, maps, smem, items, bars);
    }
  };
  play_roles<T>(bars, produce, [&](int group) { consume_keys<T>(a, smem, items, bars, group - 1); });
}

template <typename T>
__global__ void __launch_bounds__(T::kThreads, 1)
    bwd_sm90_wide_keys_kernel(const __grid_constant__ BwdArgs a, const __grid_constant__ BwdMaps maps) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  ptx::wait_for_kernel_before();
  ptx::allow_next_kernel();  // which reads what the kernel before this one has left, hence not earlier
  bwd_wide_keys_body<T>(a, maps);
#else
  __trap();  // wgmma exists in sm_90a machine code only
#endif
}

template <typename T>
__global__ void __launch_bounds__(T::kThreads, 1)
    bwd_sm90_wide_queries_kernel(const __grid_constant__ WideQueryArgs a, const __grid_constant__ BwdMaps maps) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  bwd_wide_queries_body<T>(a, maps);
  ptx::wait_for_kernel_before();  // it needs nothing of that one, but who waits for this one wants both
#else
  __trap();
#endif
}

}  // namespace flash_ext::sm90
