// From a backward request to launches, for one compiled head dim and class of tiles. Included by the
// instantiation files only.
#pragma once

#include "../grid.h"
#include "../launch.h"
#include "../passes/bwd_passes.cuh"
#include "bwd.cuh"
#include "bwd_q.cuh"
#include "instances.h"

namespace flash_ext::sm80 {

template <typename E, int D, SmemClass kClass>
std::string launch_bwd(const BwdParams& p, const DeviceInfo& d) {
  using T = BwdTraits<E, D, kClass>;
  const Grid g = make_grid(p.problem, d, false, T::kBlockN);
  return launch("bwd_sm80", bwd_kernel<T>, g.ctas, T::kThreads, T::kSmemBytes, p.stream, p, g);
}

template <typename E, int D>
std::string launch_bwd_q(const BwdParams& p, const DeviceInfo& d) {
  using T = BwdQTraits<E, D>;
  const Grid g = make_grid(p.problem, d, true, T::kBlockM);
  return launch("bwd_q_sm80", bwd_q_kernel<T>, g.ctas, T::kThreads, T::kSmemBytes, p.stream, p, g);
}

template <typename E, int D, SmemClass kClass>
std::string run_bwd_as(const BwdParams& p, const DeviceInfo& d) {
  const int64_t rows = p.problem.total_q * p.problem.num_heads;
  const int64_t pass_ctas = (rows * kPassLanes<D> + kPassThreads - 1) / kPassThreads;
  std::string error =
      launch("bwd_preprocess", bwd_preprocess_kernel<E, D>, pass_ctas, kPassThreads, 0, p.stream, p);
  if (!error.empty()) return error;
  error = launch_bwd<E, D, kClass>(p, d);
  if (!error.empty()) return error;
  if (p.dq_accum == nullptr) return launch_bwd_q<E, D>(p, d);
  return launch("bwd_postprocess", bwd_postprocess_kernel<E, D>, pass_ctas, kPassThreads, 0, p.stream, p);
}

template <int D, SmemClass kClass>
std::string run_bwd_hd(const BwdParams& p, const DeviceInfo& d) {
  return dispatch_dtype(p.problem.dtype, [&]<typename E>() { return run_bwd_as<E, D, kClass>(p, d); });
}

}  // namespace flash_ext::sm80
