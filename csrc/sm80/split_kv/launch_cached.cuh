// Launches of the forward for few queries over a cache. Included by its instantiation file only.
#pragma once

#include "../../launch.h"
#include "../instances.h"
#include "cached.cuh"
#include "launch_parts.cuh"

namespace flash_ext::sm80 {

template <int D>
std::string launch_fwd_split_cached(const FwdCall& c, const Launch& l) {
  const FwdParams p = params_of(c);
  const SplitGrid& g = c.plan.split_kv;
  return dispatch_dtype(p.problem.dtype, [&]<typename E>() {
    if (l.kernel == KernelId::kFwdMergeCached80) {
      const auto kernel = l.variant == ScoreVariant::kLatents ? fwd_merge_cached_kernel<E, kLatentMergePasses>
                                                              : fwd_merge_cached_kernel<E, kMergePasses>;
      return launch_planned(l, kernel, SplitTile::kThreads, 0, p.stream, p, g, c.cache, c.plan.kv_cache, ending_of(c),
                            l.rows.above, c.plan.kv_cache.narrow_block_n);
    }
    return with_tile<E, D>(l.block_m, [&]<typename T>() {
      return launch_planned(l, fwd_split_cached_kernel<T>, T::kThreads, T::kTile.smem_bytes(D), p.stream, p, g, c.cache,
                            c.plan.kv_cache, l.rows, c.modifiers.sinks);
    });
  });
}

}  // namespace flash_ext::sm80
