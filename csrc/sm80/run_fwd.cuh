// From a forward request to launches, for one compiled head dim and class of tiles. Included by the
// instantiation files only.
#pragma once

#include "../grid.h"
#include "../launch.h"
#include "fwd.cuh"
#include "instances.h"

namespace flash_ext::sm80 {

template <typename E, int D, SmemClass kClass, bool kStretched = false>
std::string launch_fwd(const FwdParams& p, const DeviceInfo& d) {
  using T = FwdTraits<E, D, kClass, kStretched>;
  const Grid g = make_grid(p.problem, d, true, T::kBlockM);
  return launch("fwd_sm80", fwd_kernel<T>, g.ctas, T::kThreads, T::kTile.smem_bytes(D), p.stream, p, g);
}

template <int D, SmemClass kClass>
std::string run_fwd_hd(const FwdParams& p, const DeviceInfo& d) {
  return dispatch_dtype(p.problem.dtype, [&]<typename E>() {
    return takes_stretches_sm80(p.problem) ? launch_fwd<E, D, kClass, true>(p, d) : launch_fwd<E, D, kClass>(p, d);
  });
}

}  // namespace flash_ext::sm80
