// From a backward of short sequences to a launch, for one compiled head dim. Included by the instantiation file only.
#pragma once

#include "../launch.h"
#include "bwd_short.cuh"
#include "instances.h"

namespace flash_ext::sm80 {

template <int D>
std::string run_bwd_short_hd(const BwdParams& p, const Modifiers& m, const BiasGradient& bias, const ShortGrid& g) {
  const auto run = [&](auto kernel) {
    return launch_at(early_if(m.follows_pass), "bwd_short", kernel, g.ctas, ShortTile::kThreads,
                     ShortTile::bwd_smem_bytes(D), p.stream, p, with_own_bias(m), bias, g);
  };
  return p.problem.dtype == DType::kFloat16 ? run(bwd_short_kernel<ShortTraits<__half, D>>)
                                            : run(bwd_short_kernel<ShortTraits<__nv_bfloat16, D>>);
}

}  // namespace flash_ext::sm80
