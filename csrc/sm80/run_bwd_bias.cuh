// From the gradient of a bias to a launch. Included by its instantiation file only.
#pragma once

#include "../launch.h"
#include "bwd_bias.cuh"
#include "instances.h"

namespace flash_ext::sm80 {

template <typename E, SmemClass kClass>
std::string launch_bwd_bias(const BwdParams& p, const Modifiers& m, const BiasGradient& g, const DeviceInfo& d) {
  using T = BwdBiasTraits<E, kClass>;
  const BiasGrid grid = BiasGrid::of<T>(p, g);
  // As many CTAs as run at a time; launch() refuses more tiles than their 31-bit numbers can count.
  const int64_t resident = int64_t{1} * std::max(d.num_sms, 1) * T::kTile.ctas_per_sm;
  const int64_t ctas = grid.tiles > INT32_MAX ? grid.tiles : std::min(grid.tiles, resident);
  return launch("bwd_bias_sm80", bwd_bias_kernel<T>, ctas, T::kThreads, T::kSmemBytes, p.stream, p, m, g, grid);
}

template <SmemClass kClass>
std::string launch_bwd_bias_as(const BwdParams& p, const Modifiers& m, const BiasGradient& g, const DeviceInfo& d) {
  return dispatch_dtype(p.problem.dtype, [&]<typename E>() { return launch_bwd_bias<E, kClass>(p, m, g, d); });
}

}  // namespace flash_ext::sm80
