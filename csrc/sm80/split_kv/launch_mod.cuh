// Launches of the forwards for few queries with modifiers. Included by their instantiation files only.
#pragma once

#include "../../launch.h"
#include "../instances.h"
#include "cached_mod.cuh"
#include "launch_parts.cuh"

namespace flash_ext::sm80 {

template <int D, bool kCached>
std::string launch_fwd_split_mod(const FwdCall& c, const Launch& l) {
  const FwdParams p = params_of(c);
  const SplitGrid& g = c.plan.split_kv;
  return dispatch_dtype(p.problem.dtype, [&]<typename E>() {
    return with_tile<E, D>(l.block_m, [&]<typename T>() {
      constexpr int kThreads = T::kThreads, kSmem = T::kTile.smem_bytes(D);
      if constexpr (kCached) {
        const auto kernel = l.variant == ScoreVariant::kAll ? fwd_split_cached_mod_kernel<T, Knows::kMasks>
                                                            : fwd_split_cached_mod_kernel<T, Knows::kTree>;
        return launch_planned(l, kernel, kThreads, kSmem, p.stream, p, g, c.cache, c.plan.kv_cache, l.rows,
                              c.modifiers);
      } else {
        return launch_planned(l, fwd_split_mod_kernel<T>, kThreads, kSmem, p.stream, p, g, c.modifiers);
      }
    });
  });
}

}  // namespace flash_ext::sm80
