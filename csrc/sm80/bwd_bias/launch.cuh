// Launches of the gradient of a bias or of slopes. Included by its instantiation files only.
#pragma once

#include "../../launch.h"
#include "../instances.h"
#include "kernel.cuh"

namespace flash_ext::sm80 {

template <SmemClass kClass>
std::string launch_dbias(const BwdCall& c, const Launch& l) {
  const BiasGradient& g = l.variant == ScoreVariant::kSlopes ? c.dslopes : c.dbias;
  const BwdParams p = c.portable(l);
  return dispatch_dtype(p.problem.dtype, [&]<typename E>() {
    using T = BwdBiasTraits<E, kClass>;
    return launch_planned(l, bwd_bias_kernel<T>, T::kThreads, T::kSmemBytes, p.stream, p, c.modifiers, g,
                          BiasGrid::of<T>(p, g));
  });
}

}  // namespace flash_ext::sm80
