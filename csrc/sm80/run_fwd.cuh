// From a forward request to launches, for one compiled head dim. Included by the instantiation files only.
#pragma once

#include "../grid.h"
#include "../launch.h"
#include "fwd.cuh"
#include "instances.h"

namespace flash_ext::sm80 {

template <typename E, int D, SmemClass kClass>
std::string launch_fwd(const FwdParams& p, const DeviceInfo& d) {
  using T = FwdTraits<E, D, kClass>;
  const Grid g = make_grid(p.problem, d, true, T::kBlockM);
  return launch("fwd_sm80", fwd_kernel<T>, g.ctas, T::kThreads, T::kTile.smem_bytes(D), p.stream, p, g);
}

template <typename E, int D>
std::string run_fwd_as(const FwdParams& p, SmemClass c, const DeviceInfo& d) {
  return c == SmemClass::kLarge ? launch_fwd<E, D, SmemClass::kLarge>(p, d)
                                : launch_fwd<E, D, SmemClass::kSmall>(p, d);
}

template <int D>
std::string run_fwd_hd(const FwdParams& p, SmemClass c, const DeviceInfo& d) {
  return p.problem.dtype == DType::kFloat16 ? run_fwd_as<__half, D>(p, c, d) : run_fwd_as<__nv_bfloat16, D>(p, c, d);
}

}  // namespace flash_ext::sm80
