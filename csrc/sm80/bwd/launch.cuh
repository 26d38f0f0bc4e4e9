// Launches of the portable backward, for one compiled head dim and class of tiles: row statistics, dK and dV, then dQ
// from its sums or from a kernel of its own. Included by the instantiation files only.
#pragma once

#include "../../launch.h"
#include "../../passes/bwd_passes.cuh"
#include "../bwd_dq/kernel.cuh"
#include "../instances.h"
#include "kernel.cuh"

namespace flash_ext::sm80 {

template <typename E, int D, SmemClass kClass>
std::string launch_bwd_as(const BwdParams& p, const Launch& l) {
  switch (l.kernel) {
    case KernelId::kRowStats80: return launch_planned(l, bwd_preprocess_kernel<E, D>, kPassThreads, 0, p.stream, p);
    case KernelId::kBwd80: {
      using T = BwdTraits<E, D, kClass>;
      return launch_planned(l, bwd_kernel<T>, T::kThreads, T::kSmemBytes, p.stream, p, l.grid);
    }
    case KernelId::kBwdDq80: {
      using T = BwdQTraits<E, D>;
      return launch_planned(l, bwd_q_kernel<T>, T::kThreads, T::kSmemBytes, p.stream, p, l.grid);
    }
    case KernelId::kDqConvert80: return launch_planned(l, bwd_postprocess_kernel<E, D>, kPassThreads, 0, p.stream, p);
    default: return not_compiled(l);
  }
}

template <int D, SmemClass kClass>
std::string launch_bwd(const BwdCall& c, const Launch& l) {
  const BwdParams p = c.portable(l);
  return dispatch_dtype(p.problem.dtype, [&]<typename E>() { return launch_bwd_as<E, D, kClass>(p, l); });
}

template <SmemClass kClass>
inline constexpr auto kBwdTable =
    instances_of<kHeadDims>([]<int D>(Constant<D>) { return BwdInstance{D, D, launch_bwd<D, kClass>}; });

}  // namespace flash_ext::sm80
