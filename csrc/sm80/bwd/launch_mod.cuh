// Launches of the portable backward with modifiers, for one compiled head dim and class of tiles. Included by the
// instantiation files only.
#pragma once

#include "../../launch.h"
#include "../../passes/bwd_overlapped_pass.cuh"
#include "../bwd_dq/kernel.cuh"
#include "../instances.h"
#include "kernel.cuh"
#include "persistent.cuh"

namespace flash_ext::sm80 {

template <typename E, int D, SmemClass kClass>
std::string launch_bwd_mod_as(const BwdParams& p, const Modifiers& m, const Plan& plan, const Launch& l) {
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
  if constexpr (has_hiding_bwd_sm80(D, kClass)) {
    if (l.kernel == KernelId::kBwdModPersistent80) {
      using T = BwdPersistentTraits<E, D, kClass>;
      return launch_planned(l, bwd_persistent_kernel<T>, T::kThreads, T::kSmemBytes, p.stream, p, m, l.grid);
    }
    if (l.kernel == KernelId::kDqConvertOverlapped80) {
      const int tiles = (p.problem.seqlen_q + kOverlappedRows - 1) / kOverlappedRows;
      return launch_planned(l, bwd_overlapped_postprocess_kernel<E, D>, kPassThreads, 0, p.stream, p, tiles,
                            plan.main_launch().grid.blocks);
    }
  }
  return not_compiled(l);
}

template <int D, SmemClass kClass>
std::string launch_bwd_mod(const BwdCall& c, const Launch& l) {
  const BwdParams p = c.portable(l);
  return dispatch_dtype(p.problem.dtype, [&]<typename E>() {
    return launch_bwd_mod_as<E, D, kClass>(p, c.modifiers, c.plan, l);
  });
}

template <SmemClass kClass>
inline constexpr auto kBwdModTable =
    instances_of<kHeadDims>([]<int D>(Constant<D>) { return BwdInstance{D, D, launch_bwd_mod<D, kClass>}; });

}  // namespace flash_ext::sm80
