// Launches of the backward of short sequences, for one compiled head dim. Included by its instantiation file only.
#pragma once

#include "bwd.cuh"
#include "launch.cuh"

namespace flash_ext::sm80 {

template <int D>
std::string launch_bwd_short(const BwdCall& c, const Launch& l) {
  return at_short_rows<D, short_bwd_rows(D)>(c.p.problem.dtype, l, [&]<typename T>() {
    return launch_planned(l, bwd_short_kernel<T>, T::kThreads, T::kSizes.bwd_smem(), c.p.stream, c.portable(l),
                          c.modifiers, c.dbias, c.plan.short_heads);
  });
}

}  // namespace flash_ext::sm80
