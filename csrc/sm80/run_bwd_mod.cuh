// From a backward request with modifiers to launches. Included by the instantiation files only.
#pragma once

#include "../grid.h"
#include "../launch.h"
#include "../passes/bwd_passes.cuh"
#include "bwd.cuh"
#include "bwd_q.cuh"
#include "instances.h"

namespace flash_ext::sm80 {

template <typename E, int D, SmemClass kClass, bool kAdds = true>
std::string launch_bwd_mod(const BwdParams& p, const Modifiers& m, const DeviceInfo& d) {
  if constexpr (kAdds && has_hiding_bwd_sm80(D, kClass)) {
    if (!m.is_natural) return launch_bwd_mod<E, D, kClass, false>(p, m, d);
  }
  using T = BwdTraits<E, D, kClass, true, kAdds>;
  const Grid g = make_grid(p.problem, d, false, T::kBlockN);
  return launch("bwd_mod_sm80", bwd_mod_kernel<T>, g.ctas, T::kThreads, T::kSmemBytes, p.stream, p, m, g);
}

template <typename E, int D, SmemClass kClass>
std::string run_bwd_mod_as(const BwdParams& p, const BwdExtras& x, const DeviceInfo& d) {
  const Modifiers& m = *x.modifiers;
  const int64_t rows = p.problem.total_q * p.problem.num_heads;
  const int64_t pass_ctas = (rows * kPassLanes<D> + kPassThreads - 1) / kPassThreads;
  std::string error =
      launch("bwd_preprocess", bwd_preprocess_kernel<E, D>, pass_ctas, kPassThreads, 0, p.stream, p);
  for (const BiasGradient* g : {x.bias, x.slopes}) {
    if (!error.empty() || g == nullptr) continue;
    error = kClass == SmemClass::kLarge ? run_bwd_bias_large(p, m, *g, d) : run_bwd_bias(p, m, *g, d);
  }
  if (!error.empty() || !x.need_qkv) return error;
  error = launch_bwd_mod<E, D, kClass>(p, m, d);
  if (!error.empty()) return error;
  if (p.dq_accum == nullptr) {
    using T = BwdQTraits<E, D, true>;
    const Grid g = make_grid(p.problem, d, true, T::kBlockM);
    return launch("bwd_q_mod_sm80", bwd_q_mod_kernel<T>, g.ctas, T::kThreads, T::kSmemBytes, p.stream, p, m, g);
  }
  return launch("bwd_postprocess", bwd_postprocess_kernel<E, D>, pass_ctas, kPassThreads, 0, p.stream, p);
}

template <int D, SmemClass kClass>
std::string run_bwd_mod_hd(const BwdParams& p, const BwdExtras& x, const DeviceInfo& d) {
  return p.problem.dtype == DType::kFloat16 ? run_bwd_mod_as<__half, D, kClass>(p, x, d)
                                            : run_bwd_mod_as<__nv_bfloat16, D, kClass>(p, x, d);
}

}  // namespace flash_ext::sm80
