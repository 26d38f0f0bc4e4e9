// The forward of fwd.cuh with everything of common/modifiers.cuh: masks, biases, softcap, sinks, dropout.
//
// What differs: the scheduler finds the tiles of keys to visit, and what their scores are tested for, and hands these
// steps on by way of the loader; consumers change scores while the product of the tile before runs.
//
// Shared memory, 128-byte swizzled tiles first:
//   ring  [kKvSlots][64 rows of K or V]
//   Q     [kQSlots][kBlockM rows]           a 16-bit bias takes the second slot, or
//   stage [consumer warps][16 rows x 128 columns]   output on its way out, if T::kStaged
//   bias  [2][kBlockM rows x 64 keys]       has its own place
//   numbers of keys [8 rows x 64], for slopes in the product
//   ModShared, barriers
#pragma once

#include "fwd_mod_consume.cuh"
#include "fwd_mod_produce.cuh"
#include "roles.cuh"

namespace flash_ext::sm90 {

template <typename T>
__device__ __forceinline__ void fwd_mod_body(const FwdModArgs& a, const FwdModMaps& maps) {
  extern __shared__ __align__(1024) unsigned char smem_bytes[];
  const uint32_t smem = ptx::smem_address(smem_bytes);
  ModShared<T>& shared = *reinterpret_cast<ModShared<T>*>(smem_bytes + T::kSharedAt);
  const ModBarriers<T> bars{smem};
  if constexpr (T::kSlopesInProduct) write_key_numbers(smem_bytes + T::kNumbersAt);
  const auto produce = [&](int warp) {
    if (warp == 0) {
      schedule_mod_items<T>(a, maps, smem, shared, bars);
    } else if (warp == 1) {
      load_mod_tiles<T>(a, maps, smem, shared, bars);
    }
  };
  const auto consume = [&](int group) {
    consume_masked<T>(a, maps, smem, shared, bars, group - 1);
  };
  play_roles<T>(bars, produce, consume);
}

template <typename T>
__global__ void __launch_bounds__(T::kThreads, 1)
    fwd_mod_sm90_kernel(const __grid_constant__ FwdModArgs a, const __grid_constant__ FwdModMaps maps) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  fwd_mod_body<T>(a, maps);
#else
  __trap();  // wgmma exists in sm_90a machine code only
#endif
}

}  // namespace flash_ext::sm90
