// The Hopper forward over a cache: many queries of keys whose number and places are on the device.
//
//   O_i = softmax(scale * Q_i K^T) V,  lse_i = log sum_j exp(scale * q_i . k_j)
//
// Consumers are those of fwd/kernel.cuh, shared memory and barriers but for those of rows that lanes copy (copies.cuh).
// Three warps of the first warpgroup produce, and the fourth passes such rows on.
#pragma once

#include "../fwd/consume.cuh"
#include "produce.cuh"
#include "tiles.h"

namespace flash_ext::sm90 {

// schedule(cta): the first warp.
template <typename T, typename Args, typename Schedule>
__device__ __forceinline__ void run_cached_cta(const Args& a, const FwdMaps& maps, const Schedule& schedule) {
  run_fwd_cta<T, CachedBarriers<T>>(a, maps, [&](const auto& cta, int warp) {
    if (warp == 0) {
      schedule(cta);
    } else if (warp == 1) {
      load_cached_tiles<T, false>(a, maps.k, cta.shared, cta.bars, CopiedRing<T>{cta.smem, cta.bars});
    } else if (warp == 2) {
      load_cached_tiles<T, true>(a, maps.v, cta.shared, cta.bars, CopiedRing<T>{cta.smem, cta.bars});
    } else if (a.by_rows) {
      pass_on_tiles<T>(cta.shared, cta.bars);
    }
  });
}

template <typename E, int D, int Dv>
struct CachedTraits : FwdTraits<E, D, Dv> {
  using Args = CachedFwdArgs;
  using Numbers = PlainNumbers<CachedTraits>;
  using Base = FwdTraits<E, D, Dv>;
  static constexpr int kSmemBytes = cached_smem_bytes(D, Dv);
  static_assert(Base::kBarriersAt + 8 * (3 * Base::kKvStages + 2 * Base::kQStages + Base::kWorkStages + 1) <=
                kSmemBytes);
};

template <typename T>
__global__ void __launch_bounds__(T::kThreads, 1)
    fwd_cached_sm90_kernel(const __grid_constant__ CachedFwdArgs a, const __grid_constant__ FwdMaps maps) {
  run_cached_cta<T>(a, maps,
                    [&](const auto& cta) { schedule_cached_work<T>(a, maps, cta.smem, cta.shared, cta.bars); });
}

}  // namespace flash_ext::sm90
