// FlashAttention backward over keys for Hopper: TMA loads, wgmma products, specialised warpgroups, a persistent grid.
//
//   P = exp(scale * Q K^T - lse)        dV = P^T dO
//   dP = dO V^T                         dK = scale * dS^T Q
//   dS = P * (dP - delta)               dQ = scale * dS K
//
// Shared memory, 128-byte swizzled tiles first:
//   K, V     [block_n rows], in parts of 128
//   Q, dO    [kSlots][64 rows]
//   dS       [2][64 queries x 128 keys], for each warpgroup where they work apart; not without dQ (DqKind::kElsewhere)
//   pieces   [2][piece slots][16 queries x 32 columns of dQ in fp32], zeros; not without dQ
//   stats    [kSlots][-lse * log2 e of 64 queries, -delta]
//   stage    [consumer warps][16 queries x 64 columns of dQ], if T::kStaged
//   items    [kItems], what consumer warps owe, barriers
#pragma once

#include "bwd_consume.cuh"
#include "bwd_finish.cuh"
#include "roles.cuh"

namespace flash_ext::sm90 {

template <typename T>
__device__ __forceinline__ void bwd_body(const BwdArgs& a, const BwdMaps& maps) {
  extern __shared__ __align__(1024) unsigned char smem_bytes[];
  const uint32_t smem = ptx::smem_address(smem_bytes);
  BwdItem* items = reinterpret_cast<BwdItem*>(smem_bytes + T::kItemsAt);
  const BwdBarriers<T> bars{smem + T::kBarriersAt};
  const auto produce = [&](int warp) {
    if (warp == 0) {
      schedule_items<T>(a, maps, smem, items, bars);
    } else if (T::kOrdered && warp == 1) {
      pass_turns<T>(a, smem, items, bars, 0);
    } else if (T::kRing && warp % 2 == 1) {
      finish_queries<T>(a, maps, smem, items, bars, warp / 2);
    } else if (warp == 2) {
      load_queries<T>(a, maps, smem, items, bars);
    } else if (T::kQueriesLoadDouts) {
      pass_turns<T>(a, smem, items, bars, 1);
    } else if (warp == 3) {
      load_douts<T>(a, maps, smem, items, bars);
    }
  };
  play_roles<T>(bars, produce, [&](int group) {
    if constexpr (T::kApart) {
      consume_apart<T>(a, smem, smem_bytes, items, bars, group - 1);
    } else if constexpr (T::kHeadDim == 128) {
      consume_together<T, -1>(a, smem, smem_bytes, items, bars, group - 1);
    } else if (group == 1) {
      consume_together<T, 0>(a, smem, smem_bytes, items, bars, 0);
    } else {
      consume_together<T, 1>(a, smem, smem_bytes, items, bars, 1);
    }
  });
}

template <typename T>
__global__ void __launch_bounds__(T::kThreads, 1)
    bwd_sm90_kernel(const __grid_constant__ BwdArgs a, const __grid_constant__ BwdMaps maps) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  if constexpr (T::kMakesDq) ptx::allow_next_kernel();
  ptx::wait_for_kernel_before();
  if constexpr (!T::kMakesDq) ptx::allow_next_kernel();  // which reads what the kernel before this one has left
  bwd_body<T>(a, maps);
#else
  __trap();  // wgmma exists in sm_90a machine code only
#endif
}

}  // namespace flash_ext::sm90
