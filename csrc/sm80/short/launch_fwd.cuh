// Launches of the forward of short sequences, for one compiled head dim. Included by its instantiation file only.
#pragma once

#include "fwd.cuh"
#include "launch.cuh"

namespace flash_ext::sm80 {

template <int D>
std::string launch_fwd_short(const FwdCall& c, const Launch& l) {
  return at_short_rows<D, short_rows(D)>(c.p.problem.dtype, l, [&]<typename T>() {
    return launch_planned(l, fwd_short_kernel<T>, T::kThreads, T::kSizes.fwd_smem(), c.p.stream, c.p, c.modifiers,
                          c.plan.short_heads);
  });
}

}  // namespace flash_ext::sm80
