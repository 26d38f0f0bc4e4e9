// From a backward of short sequences to a launch, for one compiled head dim. Included by the instantiation file only.
#pragma once

#include "../launch.h"
#include "bwd_short.cuh"
#include "instances.h"

namespace flash_ext::sm80 {

template <int D>
std::string run_bwd_short_hd(const BwdParams& p, const Modifiers& m, const BiasGradient& bias, const ShortGrid& g) {
  const ShortTile tile = short_tile(p.problem);
  const auto run = [&](auto kernel) {
    return launch_at(early_if(m.follows_pass), "bwd_short", kernel, g.ctas, tile.threads(), tile.bwd_smem(), p.stream, p,
                     with_own_bias(m), bias, g);
  };
  const auto of_rows = [&]<int R>(std::integral_constant<int, R>) {
    return dispatch_dtype(p.problem.dtype, [&]<typename E>() { return run(bwd_short_kernel<ShortTraits<E, D, R>>); });
  };
  if (tile.rows == 16) return of_rows(std::integral_constant<int, 16>{});
  if (tile.rows == 32) return of_rows(std::integral_constant<int, 32>{});
  return of_rows(std::integral_constant<int, 64>{});
}

}  // namespace flash_ext::sm80
