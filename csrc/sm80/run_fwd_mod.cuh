// From a forward request with modifiers to launches. Included by the instantiation files only.
#pragma once

#include "../grid.h"
#include "../launch.h"
#include "fwd_mod.cuh"
#include "instances.h"

namespace flash_ext::sm80 {

template <typename E, int D, SmemClass kClass>
std::string launch_fwd_mod(const FwdParams& p, const Modifiers& m, const DeviceInfo& d) {
  using T = FwdModTraits<E, D, kClass>;
  const Grid g = make_grid(p.problem, d, true, T::kBlockM);
  return launch("fwd_mod_sm80", fwd_mod_kernel<T>, g.ctas, T::kThreads, T::kSmemBytes, p.stream, p, m, g);
}

template <int D, SmemClass kClass>
std::string run_fwd_mod_hd(const FwdParams& p, const Modifiers& m, const DeviceInfo& d) {
  return p.problem.dtype == DType::kFloat16 ? launch_fwd_mod<__half, D, kClass>(p, m, d)
                                            : launch_fwd_mod<__nv_bfloat16, D, kClass>(p, m, d);
}

}  // namespace flash_ext::sm80
