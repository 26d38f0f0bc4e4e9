// From a backward request with modifiers to launches. Included by the instantiation files only.
#pragma once

#include "../grid.h"
#include "../launch.h"
#include "../passes/bwd_late_pass.cuh"
#include "../passes/bwd_passes.cuh"
#include "bwd.cuh"
#include "bwd_onward.cuh"
#include "bwd_q.cuh"
#include "instances.h"

namespace flash_ext::sm80 {

// dQ from its sums, or in a kernel of its own.
template <typename E, int D>
std::string finish_bwd_mod(const BwdParams& p, const Modifiers& m, const DeviceInfo& d) {
  if (p.dq_accum == nullptr) {
    using T = BwdQTraits<E, D, true>;
    const Grid g = make_grid(p.problem, d, true, T::kBlockM);
    return launch("bwd_q_mod_sm80", bwd_q_mod_kernel<T>, g.ctas, T::kThreads, T::kSmemBytes, p.stream, p, m, g);
  }
  const int64_t ctas = (p.problem.total_q * p.problem.num_heads * kPassLanes<D> + kPassThreads - 1) / kPassThreads;
  return launch("bwd_postprocess", bwd_postprocess_kernel<E, D>, ctas, kPassThreads, 0, p.stream, p);
}

// `start`: the kernel before is the preprocess pass, which lets this one begin early.
template <typename E, int D, SmemClass kClass>
std::string launch_bwd_mod(const BwdParams& p, const Modifiers& m, const DeviceInfo& d, Start start) {
  using T = BwdTraits<E, D, kClass, true>;
  const Grid g = make_grid(p.problem, d, false, T::kBlockN);
  const std::string error = launch_at(start, "bwd_mod_sm80", bwd_mod_kernel<T>, g.ctas, T::kThreads, T::kSmemBytes,
                                      p.stream, p, m, g);
  return error.empty() ? finish_bwd_mod<E, D>(p, m, d) : error;
}

template <typename E, int D, SmemClass kClass>
std::string launch_bwd_onward(const BwdParams& p, const Modifiers& m, const DeviceInfo& d, Start start) {
  using T = BwdOnwardTraits<E, D, kClass>;
  const Problem& r = p.problem;
  const Grid g = make_grid(r, d, false, T::kBlockN);
  const int64_t ctas = g.ctas > INT32_MAX ? g.ctas : std::min<int64_t>(g.ctas, d.num_sms);
  const std::string error = launch_at(start, "bwd_onward_sm80", bwd_onward_kernel<T>, ctas, T::kThreads, T::kSmemBytes,
                                      p.stream, p, m, g);
  if (!error.empty()) return error;
  const auto late_pass = bwd_late_postprocess_kernel<E, D>;
  // With fewer items it would wait beside all of the backward.
  if (p.dq_accum == nullptr || r.is_varlen() || g.ctas < d.num_sms || !can_wait_itself(late_pass)) {
    return finish_bwd_mod<E, D>(p, m, d);
  }
  const int tiles = (r.seqlen_q + kLateRows - 1) / kLateRows;
  return launch_at(Start::kEarly, "bwd_late_postprocess", late_pass, int64_t{1} * tiles * r.batch * r.num_heads,
                   kPassThreads, 0, p.stream, p, tiles, g.blocks);
}

template <typename E, int D, SmemClass kClass>
std::string run_bwd_mod_as(const BwdParams& params, const BwdExtras& x, const DeviceInfo& d) {
  const Modifiers& m = *x.modifiers;
  const bool onward = has_hiding_bwd_sm80(D, kClass) && x.need_qkv && !m.is_natural;
  BwdParams p = params;
  if (onward) p.schedule_words = static_cast<int32_t>(bwd_schedule_words(p.problem));
  const int64_t rows = p.problem.total_q * p.problem.num_heads;
  const int64_t pass_ctas = (rows * kPassLanes<D> + kPassThreads - 1) / kPassThreads;
  std::string error = launch_at(early_if(m.follows_pass), "bwd_preprocess", bwd_preprocess_kernel<E, D>, pass_ctas,
                                kPassThreads, 0, p.stream, p);
  for (const BiasGradient* g : {x.bias, x.slopes}) {
    if (!error.empty() || g == nullptr) continue;
    error = kClass == SmemClass::kLarge ? run_bwd_bias_large(p, m, *g, d) : run_bwd_bias(p, m, *g, d);
  }
  if (!error.empty() || !x.need_qkv) return error;
  const Start start = early_if(x.bias == nullptr && x.slopes == nullptr);
  if constexpr (has_hiding_bwd_sm80(D, kClass)) {
    if (onward) return launch_bwd_onward<E, D, kClass>(p, m, d, start);
  }
  return launch_bwd_mod<E, D, kClass>(p, m, d, start);
}

template <int D, SmemClass kClass>
std::string run_bwd_mod_hd(const BwdParams& p, const BwdExtras& x, const DeviceInfo& d) {
  return dispatch_dtype(p.problem.dtype, [&]<typename E>() { return run_bwd_mod_as<E, D, kClass>(p, x, d); });
}

}  // namespace flash_ext::sm80
