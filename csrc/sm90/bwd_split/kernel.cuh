// FlashAttention split backward for Hopper: one kernel for dK and dV, one for dQ. It serves head_dim above 128, the
// deterministic mode with modifiers also below, and dQ of few rows.
//
// dK and dV of 64 keys, or dQ of 128 queries, take all registers that are left, so that one kernel for all three would
// have to add dQ of every 64 keys to memory: 64 KB of additions for as much tensor work as they take. Computing scores
// and dP again costs 2 products in 5 and needs no memory, no order of additions, no pass after it.
//
// Both are compiled plain and for kinds of modifiers (common/modifiers.cuh: masks, biases, softcap, dropout). With
// these the scheduler classifies tiles, each step comes beside its Q or K, and loaders make mask words, as in
// bwd_mod/kernel.cuh.
//
// Shared memory, 128-byte swizzled tiles first:
//   dK, dV   K, V [64 rows] | Q, dO [stages][block_m rows] | P [weight_stages][query / 8][thread][4] | stats [stages] |
//            SplitShared, barriers
//   dQ       Q, dO [warpgroup][64 rows] | K [k_stages][block_n rows] | V [v_stages] | SplitShared, barriers
#pragma once

#include "../core/roles.cuh"
#include "dkdv.cuh"
#include "dq.cuh"
#include "produce.cuh"

namespace flash_ext::sm90 {

// Each plain loader has code of its own, because one for all would not fit 24 registers. With modifiers all share one:
// mask words are too much code to have three times.
template <typename T, typename Load>
__device__ __forceinline__ void load_as(int loader, const Load& load) {
  if constexpr (!T::kPlain) {
    load(loader);
  } else if (loader == 0) {
    load(0);
  } else if (loader == 1) {
    load(1);
  } else {
    load(2);
  }
}

template <typename T>
__device__ __forceinline__ void bwd_split_body(const typename T::Args& a, const BwdMaps& maps) {
  extern __shared__ __align__(1024) unsigned char smem_bytes[];
  const uint32_t smem = ptx::smem_address(smem_bytes);
  SplitShared<T>& shared = *reinterpret_cast<SplitShared<T>*>(smem_bytes + T::kSharedAt);
  const SplitBarriers<T> bars{smem};
  const auto produce = [&](int warp) {
    if (warp != 0) {
      load_as<T>(warp - 1, [&](int loader) {
        if constexpr (T::kByQueries) {
          load_dq_steps<T>(a, maps, smem, shared, bars, loader);
        } else {
          load_dkdv_steps<T>(a, maps, smem, shared, bars, loader);
        }
      });
    } else if constexpr (T::kPlain) {
      schedule_work<T>(a.plain, maps, smem, shared.work_tiles, bars);
    } else {
      schedule_bwd_work<T>(a, shared, bars);
    }
  };
  play_roles<T>(bars, produce, [&](int group) {
    if constexpr (T::kByQueries) {
      consume_dq<T>(a, smem, shared, bars, group - 1);
    } else if (group == 1) {
      consume_dv<T>(a, smem, smem_bytes, shared, bars);
    } else {
      consume_dk<T>(a, smem, smem_bytes, shared, bars);
    }
  });
}

template <typename T>
__global__ void __launch_bounds__(T::kThreads, 1)
    bwd_split_sm90_kernel(const __grid_constant__ typename T::Args a, const __grid_constant__ BwdMaps maps) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  if constexpr (!T::kByQueries) {
    ptx::wait_for_kernel_before();
    ptx::allow_next_kernel();  // which reads what the kernel before this one has left, hence not earlier
  }
  bwd_split_body<T>(a, maps);
  // That of dQ needs nothing of that one, but who waits for this one wants both.
  if constexpr (T::kByQueries) ptx::wait_for_kernel_before();
#else
  __trap();  // wgmma exists in sm_90a machine code only
#endif
}

}  // namespace flash_ext::sm90
