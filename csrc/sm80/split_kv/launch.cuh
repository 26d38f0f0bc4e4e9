// Launches of the forward for few queries: the parts of the keys, then what adds them up. Included by its instantiation
// file only.
#pragma once

#include "../../launch.h"
#include "../instances.h"
#include "launch_parts.cuh"

namespace flash_ext::sm80 {

template <int D>
std::string launch_fwd_split(const FwdCall& c, const Launch& l) {
  const FwdParams p = params_of(c);
  const SplitGrid& g = c.plan.split_kv;
  return dispatch_dtype(p.problem.dtype, [&]<typename E>() {
    if (l.kernel == KernelId::kFwdCombine80) {
      return launch_planned(l, fwd_merge_kernel<E>, SplitTile::kThreads, 0, p.stream, p, g, ending_of(c));
    }
    return with_tile<E, D>(l.block_m, [&]<typename T>() {
      return launch_planned(l, fwd_split_kernel<T>, T::kThreads, T::kTile.smem_bytes(D), p.stream, p, g);
    });
  });
}

}  // namespace flash_ext::sm80
