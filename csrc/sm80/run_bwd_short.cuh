// Launches of the backward of short sequences, for one compiled head dim. Included by its instantiation file only.
#pragma once

#include "../launch.h"
#include "bwd_short.cuh"
#include "instances.h"

namespace flash_ext::sm80 {

template <typename T>
std::string launch_bwd_short_as(const BwdCall& c, const Launch& l) {
  return launch_planned(l, bwd_short_kernel<T>, T::kThreads, T::kSizes.bwd_smem(), c.p.stream, c.portable(l),
                        with_own_bias(c.modifiers), c.dbias, c.plan.short_heads);
}

template <int D>
std::string launch_bwd_short(const BwdCall& c, const Launch& l) {
  return dispatch_dtype(c.p.problem.dtype, [&]<typename E>() {
    if (l.block_m == 16) return launch_bwd_short_as<ShortTraits<E, D, 16>>(c, l);
    if (l.block_m == 32) return launch_bwd_short_as<ShortTraits<E, D, 32>>(c, l);
    return launch_bwd_short_as<ShortTraits<E, D, 64>>(c, l);
  });
}

}  // namespace flash_ext::sm80
