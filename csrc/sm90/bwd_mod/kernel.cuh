// The backward of bwd/kernel.cuh with everything of common/modifiers.cuh: masks, biases, softcap, sinks, dropout.
//
// What differs: the scheduler finds the tiles of queries to visit, and what their scores are tested for, and hands
// these steps on by way of the loader of Q; loaders make the bits of hidden and dropped scores; consumers change scores
// while the product of dP runs.
//
// Shared memory, 128-byte swizzled tiles first:
//   K, V     [kBlockN rows]
//   Q, dO    [kStages][64 rows]
//   dS       [3][64 queries x 128 keys]; of each independent warpgroup [2]
//   bias     [kBlockN / 64][64 queries x 64 keys] of 16 bits, [4][64 x 32] in fp32, in kernels that add one; else mask words [kMaskStages][2][consumer threads]
//   staging  [consumer warps][4 KB]   dQ, or rows of gradients, on their way out; not of independent warpgroups
//   stats    [kStages][-lse * log2 e of 64 queries, -delta]
//   ModKeyShared, barriers
#pragma once

#include "../core/roles.cuh"
#include "consume.cuh"
#include "consume_independent.cuh"
#include "produce.cuh"

namespace flash_ext::sm90 {

template <typename T>
__global__ void __launch_bounds__(T::kThreads, 1)
    bwd_mod_sm90_kernel(const __grid_constant__ BwdModArgs a, const __grid_constant__ BwdModMaps maps) {
  const auto produce = [&](const auto& cta, int warp) {
    if (warp == 0) {
      schedule_bwd_work<T>(a, *cta.shared, cta.bars);
    } else {
      load_mod_steps<T>(a, maps, cta.smem, *cta.shared, cta.bars, warp - 1);
    }
  };
  run_cta<T, ModKeyShared<T>, ModKeyBarriers<T>>(
      T::kSharedAt, 0, [](const auto&) { ptx::allow_next_kernel(), ptx::wait_for_kernel_before(); }, produce,
      [&](const auto& cta, int group) {
        if constexpr (T::kIndependent) {
          consume_mod_independent<T>(a, cta.smem, cta.bytes, *cta.shared, cta.bars, group - 1);
        } else {
          consume_mod_keys<T>(a, cta.smem, cta.bytes, *cta.shared, cta.bars);
        }
      });
}

}  // namespace flash_ext::sm90
