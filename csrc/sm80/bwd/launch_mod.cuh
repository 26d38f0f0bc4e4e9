// Launches of the portable backward with modifiers, for one compiled head dim and class of tiles. Included by the
// instantiation files only.
#pragma once

#include "../../launch.h"
#include "../bwd_dq/kernel.cuh"
#include "../instances.h"
#include "kernel.cuh"

namespace flash_ext::sm80 {

template <typename E, int D, SmemClass kClass>
std::string launch_bwd_mod_as(const BwdParams& p, const Modifiers& m, const Launch& l) {
  switch (l.kernel) {
    case KernelId::kBwdMod80: {
      using T = BwdTraits<E, D, kClass, true>;
      return launch_planned(l, bwd_mod_kernel<T>, T::kThreads, T::kSmemBytes, p.stream, p, m, l.grid);
    }
    case KernelId::kBwdDqMod80: {
      using T = BwdQTraits<E, D, true>;
      return launch_planned(l, bwd_q_mod_kernel<T>, T::kThreads, T::kSmemBytes, p.stream, p, m, l.grid);
    }
    default: break;
  }
  return not_compiled(l);
}

template <int D, SmemClass kClass>
std::string launch_bwd_mod(const BwdCall& c, const Launch& l) {
  const BwdParams p = c.portable(l);
  return dispatch_dtype(p.problem.dtype,
                        [&]<typename E>() { return launch_bwd_mod_as<E, D, kClass>(p, c.modifiers, l); });
}

template <SmemClass kClass>
inline constexpr auto kBwdModTable =
    instances_of<kHeadDims>([]<int D>(Constant<D>) { return BwdInstance{D, D, launch_bwd_mod<D, kClass>}; });

}  // namespace flash_ext::sm80
