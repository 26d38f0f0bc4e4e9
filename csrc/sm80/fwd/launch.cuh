// Launches of the portable forward, for one compiled head dim and class of tiles. Included by the instantiation files
// only.
#pragma once

#include "../../launch.h"
#include "../instances.h"
#include "kernel.cuh"

namespace flash_ext::sm80 {

template <typename T>
std::string launch_fwd_as(const FwdParams& p, const Launch& l) {
  return launch_planned(l, fwd_kernel<T>, T::kThreads, T::kTile.smem_bytes(T::kHeadDim), p.stream, p, l.grid);
}

template <int D, SmemClass kClass>
std::string launch_fwd(const FwdCall& c, const Launch& l) {
  FwdParams p = c.p;
  p.kept = part_of<void>(c.workspace, c.plan.workspace.kv_stretches);
  return dispatch_dtype(p.problem.dtype, [&]<typename E>() {
    return l.variant == ScoreVariant::kStretches ? launch_fwd_as<FwdTraits<E, D, kClass, true>>(p, l)
                                                 : launch_fwd_as<FwdTraits<E, D, kClass>>(p, l);
  });
}

template <SmemClass kClass>
inline constexpr auto kFwdTable =
    instances_of<kHeadDims>([]<int D>(Constant<D>) { return FwdInstance{D, D, launch_fwd<D, kClass>}; });

}  // namespace flash_ext::sm80
