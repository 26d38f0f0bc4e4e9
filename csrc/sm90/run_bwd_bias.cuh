// From the gradient of a bias to a launch, for one compiled head dim. Included by the instantiation files only.
#pragma once

#include "bwd_bias.cuh"
#include "run_bwd.cuh"
#include "run_fwd_mod.cuh"

namespace flash_ext::sm90 {

// p.row_stats begins with the portable kernels' statistics.
template <typename E, int D, bool kOwnsBias>
std::string launch_bwd_bias(const BwdParams& p, const Modifiers& m, const BiasGradient& g, const DeviceInfo& d) {
  using T = BwdBiasTraits<E, D, kOwnsBias>;
  const Problem& r = p.problem;
  const auto steps = [](const StridedView& x) { return Steps{x.head_stride != 0, x.batch_stride != 0}; };
  BwdBiasArgs a{};
  a.p = p;
  a.m = m;
  a.g = g;
  a.q = steps(p.q), a.k = steps(p.k), a.v = steps(p.v), a.dout = steps(p.dout);
  a.bias_steps = {m.bias.head_stride != 0, m.bias.batch_stride != 0};
  a.unit = r.softmax_scale * kLog2e;
  a.tiles_m = (g.rows + T::kBlock - 1) / T::kBlock;
  a.tiles_n = (g.cols + T::kBlock - 1) / T::kBlock;
  a.tiles = int64_t{1} * g.splits * g.batch * g.heads * a.tiles_m * a.tiles_n;
  BwdBiasMaps maps{};
  std::string error = encode_bwd_maps(maps.plain, p, T::kBlock, T::kBlock);
  if (!kOwnsBias && error.empty()) error = encode_bias_map(maps.bias, m.bias, r, T::kBlock);
  if (!error.empty()) return "bwd_bias_sm90: " + error;
  return launch("bwd_bias_sm90", bwd_bias_sm90_kernel<T>, std::min<int64_t>(a.tiles, d.num_sms), T::kThreads,
                T::kSmemBytes, p.stream, a, maps);
}

template <int D>
std::string run_bwd_bias_hd(const BwdParams& p, const Modifiers& m, const BiasGradient& g, const DeviceInfo& d) {
  return dispatch_dtype(p.problem.dtype, [&]<typename E>() {
    return m.bias.staged ? launch_bwd_bias<E, D, false>(p, m, g, d) : launch_bwd_bias<E, D, true>(p, m, g, d);
  });
}

}  // namespace flash_ext::sm90
