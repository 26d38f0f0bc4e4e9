// FlashAttention forward for Hopper: TMA loads, wgmma products, specialised warpgroups, a persistent grid.
//
//   O_i = softmax(scale * Q_i K^T) V,  lse_i = log sum_j exp(scale * q_i . k_j)
//
// One CTA per multiprocessor takes items (kBlockM query rows of one head) until none is left. Its first warpgroup is
// the producer (two warps of it work), the others are consumers with 64 rows each.
//
// Shared memory, 128-byte swizzled tiles first:
//   ring  [kKvSlots][kBlockN rows of K or V]
//   Q     [kQSlots][kBlockM rows]
//   stage [consumer warps][16 rows x 128 columns]   output on its way out
//   items [kItems], barriers
#pragma once

#include "fwd_consume.cuh"
#include "fwd_produce.cuh"
#include "roles.cuh"

namespace flash_ext::sm90 {

template <typename T>
__device__ __forceinline__ void fwd_body(const FwdArgs& a, const FwdMaps& maps) {
  extern __shared__ __align__(1024) unsigned char smem_bytes[];
  const uint32_t smem = ptx::smem_address(smem_bytes);
  Item* items = reinterpret_cast<Item*>(smem_bytes + T::kItemsAt);
  const Barriers<T> bars{smem + T::kBarriersAt};
  const auto produce = [&](int warp) {
    if (warp == 0) {
      schedule_items<T>(a, maps, smem, items, bars);
    } else if (warp == 1) {
      load_tiles<T>(a, maps, smem, items, bars);
    }
  };
  play_roles<T>(bars, produce, [&](int group) { consume<T>(a, maps, smem, items, bars, group - 1); });
}

template <typename T>
__global__ void __launch_bounds__(T::kThreads, 1)
    fwd_sm90_kernel(const __grid_constant__ FwdArgs a, const __grid_constant__ FwdMaps maps) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  fwd_body<T>(a, maps);
#else
  __trap();  // wgmma exists in sm_90a machine code only
#endif
}

}  // namespace flash_ext::sm90
