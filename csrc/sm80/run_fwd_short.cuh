// Launches of the forward of short sequences, for one compiled head dim. Included by its instantiation file only.
#pragma once

#include "../launch.h"
#include "fwd_short.cuh"
#include "instances.h"

namespace flash_ext::sm80 {

template <typename T>
std::string launch_fwd_short_as(const FwdCall& c, const Launch& l) {
  return launch_planned(l, fwd_short_kernel<T>, T::kThreads, T::kSizes.fwd_smem(), c.p.stream, c.p,
                        with_own_bias(c.modifiers), c.plan.short_heads);
}

template <int D>
std::string launch_fwd_short(const FwdCall& c, const Launch& l) {
  return dispatch_dtype(c.p.problem.dtype, [&]<typename E>() {
    if (l.block_m == 16) return launch_fwd_short_as<ShortTraits<E, D, 16>>(c, l);
    if (l.block_m == 32) return launch_fwd_short_as<ShortTraits<E, D, 32>>(c, l);
    return launch_fwd_short_as<ShortTraits<E, D, 64>>(c, l);
  });
}

}  // namespace flash_ext::sm80
