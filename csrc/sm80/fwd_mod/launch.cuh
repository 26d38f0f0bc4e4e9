// Launches of the portable forward with modifiers, for one compiled head dim and class of tiles. Included by the
// instantiation files only.
#pragma once

#include "../../launch.h"
#include "../instances.h"
#include "kernel.cuh"

namespace flash_ext::sm80 {

template <typename T>
std::string launch_fwd_mod_as(const FwdCall& c, const Launch& l) {
  return launch_planned(l, fwd_mod_kernel<T>, T::kThreads, T::kSmemBytes, c.p.stream, c.p, c.modifiers, l.grid);
}

template <int D, SmemClass kClass>
std::string launch_fwd_mod(const FwdCall& c, const Launch& l) {
  return dispatch_dtype(c.p.problem.dtype, [&]<typename E>() {
    if constexpr (has_fwd_mod_kinds(D, kClass)) {
      if (l.variant == ScoreVariant::kHide)
        return launch_fwd_mod_as<FwdModTraits<E, D, kClass, FwdModKind::kHides>>(c, l);
      if (l.variant == ScoreVariant::kDrop)
        return launch_fwd_mod_as<FwdModTraits<E, D, kClass, FwdModKind::kDrops>>(c, l);
      if (l.variant == ScoreVariant::kChange) {
        return launch_fwd_mod_as<FwdModTraits<E, D, kClass, FwdModKind::kChanges>>(c, l);
      }
    }
    return launch_fwd_mod_as<FwdModTraits<E, D, kClass, FwdModKind::kEverything>>(c, l);
  });
}

template <SmemClass kClass>
inline constexpr auto kFwdModTable =
    instances_of<kHeadDims>([]<int D>(Constant<D>) { return FwdInstance{D, D, launch_fwd_mod<D, kClass>}; });

}  // namespace flash_ext::sm80
