// From a forward of short sequences to a launch, for one compiled head dim. Included by the instantiation file only.
#pragma once

#include "../launch.h"
#include "fwd_short.cuh"
#include "instances.h"

namespace flash_ext::sm80 {

template <int D>
std::string run_fwd_short_hd(const FwdParams& p, const Modifiers& m, const ShortGrid& g) {
  const auto run = [&](auto kernel) {
    return launch_at(early_if(m.follows_pass), "fwd_short", kernel, g.ctas, ShortTile::kThreads,
                     ShortTile::fwd_smem_bytes(D), p.stream, p, with_own_bias(m), g);
  };
  return p.problem.dtype == DType::kFloat16 ? run(fwd_short_kernel<ShortTraits<__half, D>>)
                                            : run(fwd_short_kernel<ShortTraits<__nv_bfloat16, D>>);
}

}  // namespace flash_ext::sm80
