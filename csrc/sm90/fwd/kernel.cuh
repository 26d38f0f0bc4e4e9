// FlashAttention forward for Hopper: TMA loads, wgmma products, specialised warpgroups, a persistent grid.
//
//   O_i = softmax(scale * Q_i K^T) V,  lse_i = log sum_j exp(scale * q_i . k_j)
//
// One CTA per multiprocessor, or as many as FwdTile says, takes work tiles (kBlockM query rows of one head) until none
// is left. Its first warpgroup is the producer (two warps of it work), the others are consumers with 64 rows each.
//
// Shared memory, 128-byte swizzled tiles first:
//   ring  [kKvStages][kBlockN rows of K or V]
//   Q     [kQStages][kBlockM rows]
//   staging [consumer warps][16 rows x 128 columns]   output on its way out
//   work tiles [kWorkStages], barriers
#pragma once

#include "consume.cuh"
#include "produce.cuh"

namespace flash_ext::sm90 {

template <typename T>
__global__ void __launch_bounds__(T::kThreads, T::kTile.ctas)
    fwd_sm90_kernel(const __grid_constant__ typename T::Args a, const __grid_constant__ FwdMaps maps) {
  run_fwd_cta<T>(a, maps, [&](const auto& cta, int warp) {
    if (warp == 0) {
      schedule_work<T>(a, maps, cta.smem, cta.shared, cta.bars);
    } else if (warp == 1) {
      load_tiles<T>(a, maps, cta.smem, cta.shared, cta.bars);
    }
  });
}

}  // namespace flash_ext::sm90
