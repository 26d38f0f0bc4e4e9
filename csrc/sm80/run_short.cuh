// From a request of short sequences to a launch, for one compiled head dim. Included by the instantiation files only.
#pragma once

#include "../launch.h"
#include "bwd_short.cuh"
#include "fwd_short.cuh"
#include "instances.h"

namespace flash_ext::sm80 {

// ShortBias takes a bias of any type and strides.
inline Modifiers with_own_bias(Modifiers m) {
  m.bias.staged = m.bias.ptr != nullptr;
  return m;
}

template <int D>
std::string run_fwd_short_hd(const FwdParams& p, const Modifiers& m, const ShortGrid& g) {
  const auto run = [&](auto kernel) {
    return launch_at(early_if(m.follows_pass), "fwd_short", kernel, g.ctas, ShortTile::kThreads,
                     ShortTile::fwd_smem_bytes(D), p.stream, p, with_own_bias(m), g);
  };
  return p.problem.dtype == DType::kFloat16 ? run(fwd_short_kernel<ShortTraits<__half, D>>)
                                            : run(fwd_short_kernel<ShortTraits<__nv_bfloat16, D>>);
}

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
