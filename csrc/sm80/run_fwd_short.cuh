// From a forward of short sequences to a launch, for one compiled head dim. Included by the instantiation file only.
#pragma once

#include "../launch.h"
#include "fwd_short.cuh"
#include "instances.h"

namespace flash_ext::sm80 {

template <int D>
std::string run_fwd_short_hd(const FwdParams& p, const Modifiers& m, const ShortGrid& g) {
  const ShortTile tile = short_tile(p.problem);
  const auto run = [&](auto kernel) {
    return launch_at(early_if(m.follows_pass), "fwd_short", kernel, g.ctas, tile.threads(), tile.fwd_smem(), p.stream, p,
                     with_own_bias(m), g);
  };
  const auto of_rows = [&]<int R>(std::integral_constant<int, R>) {
    return dispatch_dtype(p.problem.dtype, [&]<typename E>() { return run(fwd_short_kernel<ShortTraits<E, D, R>>); });
  };
  if (tile.rows == 16) return of_rows(std::integral_constant<int, 16>{});
  if (tile.rows == 32) return of_rows(std::integral_constant<int, 32>{});
  return of_rows(std::integral_constant<int, 64>{});
}

}  // namespace flash_ext::sm80
