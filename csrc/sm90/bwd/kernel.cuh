// FlashAttention backward over keys for Hopper: TMA loads, wgmma products, specialised warpgroups, a persistent grid.
//
//   P = exp(scale * Q K^T - lse)        dV = P^T dO
//   dP = dO V^T                         dK = scale * dS^T Q
//   dS = P * (dP - delta)               dQ = scale * dS K
//
// Shared memory, 128-byte swizzled tiles first:
//   K, V     [block_n rows], in parts of 128
//   Q, dO    [kStages][64 rows]
//   dS       [kDsStages][64 queries x 128 keys], for each warpgroup where they are independent; not without dQ (DqKind::kElsewhere).
//            Tiles of `out` come there, where consumers make the statistics of rows
//   pieces   [2][piece stages][16 queries x 32 columns of dQ in fp32], zeros; only where dQ is added to memory
//   exchange [64 queries x 64 columns of dQ in fp32], DqKind::kStored of independent warpgroups only
//   stats    [kStages][-lse * log2 e of 64 queries, -delta]; before consumers make them lse and its gradient
//   staging  [consumer warps][16 queries x 64 columns of dQ], if T::kStaged
//   work tiles [kWorkStages], deferred arrivals, barriers
#pragma once

#include "../core/roles.cuh"
#include "consume.cuh"
#include "consume_independent.cuh"
#include "dq_pool_convert.cuh"

namespace flash_ext::sm90 {

template <typename T>
__global__ void __launch_bounds__(T::kThreads, T::kCtas)
    bwd_sm90_kernel(const __grid_constant__ BwdArgs a, const __grid_constant__ BwdMaps maps) {
  const auto wait_before = [](const auto&) {
    if constexpr (T::kMakesDq) ptx::allow_next_kernel();
    ptx::wait_for_kernel_before();
    if constexpr (!T::kMakesDq) ptx::allow_next_kernel();  // which reads what the kernel before this one has left
  };
  const auto produce = [&](const auto& cta, int warp) {
    if (warp == 0) {
      schedule_work<T>(a, maps, cta.smem, cta.shared, cta.bars);
    } else if (T::kOrdered && warp == 1) {
      pass_dq_semaphores<T>(a, cta.smem, cta.shared, cta.bars, 0);
    } else if (T::kPool && warp % 2 == 1) {
      convert_dq<T>(a, maps, cta.smem, cta.shared, cta.bars, warp / 2);
    } else if (warp == 2) {
      load_queries<T>(a, maps, cta.smem, cta.shared, cta.bars);
    } else if (T::kOrdered && T::kQueriesLoadDouts) {
      pass_dq_semaphores<T>(a, cta.smem, cta.shared, cta.bars, 1);
    } else if (T::kMayMakeStats && warp == 3) {
      load_lse<T>(a, cta.smem, cta.shared, cta.bars);
    } else if (warp == 3 && !T::kQueriesLoadDouts) {
      load_douts<T>(a, maps, cta.smem, cta.shared, cta.bars);
    }
  };
  const auto consume = [&](const auto& cta, int group) {
    if constexpr (T::kIndependent) {
      consume_independent<T>(a, cta.smem, cta.bytes, cta.shared, cta.bars, group - 1);
    } else if constexpr (T::kHeadDim == 128 || !T::kMakesDq) {
      consume_cooperative<T, -1>(a, cta.smem, cta.bytes, cta.shared, cta.bars, group - 1);
    } else if (group == 1) {
      consume_cooperative<T, 0>(a, cta.smem, cta.bytes, cta.shared, cta.bars, 0);
    } else {
      consume_cooperative<T, 1>(a, cta.smem, cta.bytes, cta.shared, cta.bars, 1);
    }
  };
  run_cta<T, BwdWorkTile, BwdBarriers<T>>(T::kWorkAt, T::kBarriersAt, wait_before, produce, consume);
}

}  // namespace flash_ext::sm90
