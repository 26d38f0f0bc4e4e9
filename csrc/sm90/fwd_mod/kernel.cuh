// The forward of fwd/kernel.cuh with everything of common/modifiers.cuh: masks, biases, softcap, sinks, dropout.
//
// What differs: the scheduler finds the tiles of keys to visit, and what their scores are tested for, and hands these
// steps on by way of the loader; consumers change scores while the product of the tile before runs.
//
// Shared memory, 128-byte swizzled tiles first:
//   ring  [kKvStages][kBlockN rows of K or V]
//   Q     [kQStages][kBlockM rows]           a 16-bit bias takes the second stage, or
//   staging [consumer warps][16 rows x 128 columns]   output on its way out, if T::kStaged
//   bias  [2][kBlockM rows x kBlockN keys]  has its own place; one in parts [kBiasPlaces][kBlockM rows x 64 keys]
//   numbers of keys [8 rows x kBlockN], for slopes in the product
//   ModShared, barriers
#pragma once

#include "../core/roles.cuh"
#include "consume.cuh"
#include "produce.cuh"

namespace flash_ext::sm90 {

template <typename T>
__global__ void __launch_bounds__(T::kThreads, 1)
    fwd_mod_sm90_kernel(const __grid_constant__ FwdModArgs a, const __grid_constant__ FwdModMaps maps) {
  run_cta<T, ModShared<T>, ModBarriers<T>>(
      T::kSharedAt, 0,
      [](const auto& cta) {
        if constexpr (T::kSlopesInProduct) write_key_numbers<T::kBlockN>(cta.bytes + T::kNumbersAt);
      },
      [&](const auto& cta, int warp) {
        if (warp == 0) {
          schedule_mod_work<T>(a, maps, cta.smem, *cta.shared, cta.bars);
        } else if (warp == 1) {
          load_mod_tiles<T>(a, maps, cta.smem, *cta.shared, cta.bars);
        } else if (T::kLoadsBeside && warp == 2) {
          load_beside<T>(a, maps, cta.smem, *cta.shared, cta.bars);
        }
      },
      [&](const auto& cta, int group) { consume_masked<T>(a, maps, cta.smem, *cta.shared, cta.bars, group - 1); });
}

}  // namespace flash_ext::sm90
