// Launches of the portable forward over a cache. Included by the instantiation files only.
#pragma once

#include "../../launch.h"
#include "../instances.h"
#include "kernel.cuh"

namespace flash_ext::sm80 {

template <int D, SmemClass kClass>
std::string launch_fwd_cached(const FwdCall& c, const Launch& l) {
  return dispatch_dtype(c.p.problem.dtype, [&]<typename E>() {
    using T = FwdTraits<E, D, kClass, false, true>;
    return launch_planned(l, fwd_cached_kernel<T>, T::kThreads, T::kTile.smem_bytes(D), c.p.stream, c.p, l.grid,
                          FromCache{c.cache, l.rows, c.modifiers.sinks});
  });
}

template <SmemClass kClass>
inline constexpr auto kFwdCachedTable =
    instances_of<kSplitHeadDims>([]<int D>(Constant<D>) { return FwdInstance{D, D, launch_fwd_cached<D, kClass>}; });

}  // namespace flash_ext::sm80
