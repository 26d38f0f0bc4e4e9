// Launches of the gradient of a bias on Hopper, for one compiled head dim. Included by the instantiation files only.
#pragma once

#include "../bwd/launch.cuh"
#include "../fwd_mod/launch.cuh"
#include "kernel.cuh"

namespace flash_ext::sm90 {

template <typename T>
std::string launch_dbias_as(const BwdCall& c, const Launch& l) {
  const BwdParams p = T::kSharesStats ? c.hopper() : c.portable(l);
  const Problem& r = p.problem;
  const Modifiers& m = c.modifiers;
  const BiasGradient& g = c.dbias;
  const auto steps = [](const StridedView& x) { return Steps{x.head_stride != 0, x.batch_stride != 0}; };
  BwdBiasArgs a{};
  a.p = p;
  a.m = m;
  a.g = g;
  a.q = steps(p.q), a.k = steps(p.k), a.v = steps(p.v), a.dout = steps(p.dout);
  a.bias_steps = {m.bias.head_stride != 0, m.bias.batch_stride != 0};
  a.unit = r.scale * kLog2e;
  a.tiles_m = (g.rows + T::kBlock - 1) / T::kBlock;
  a.tiles_n = (g.cols + T::kBlock - 1) / T::kBlock;
  a.tiles = l.tiles;
  if constexpr (T::kSharesStats) {
    a.stat_rows = c.plan.main_launch().block_m;
    a.stat_tiles = (r.seqlen_q + a.stat_rows - 1) / a.stat_rows;
  }
  BwdBiasMaps maps{};
  std::string error = encode_bwd_maps(maps.plain, p, T::kBlock, T::kBlock);
  if (!T::kOwn && error.empty()) error = encode_bias_map(maps.bias, m.bias, r, T::kBlock);
  if (!error.empty()) return "bwd_bias_sm90: " + error;
  return launch_planned(l, bwd_bias_sm90_kernel<T>, T::kThreads, T::kSmemBytes, p.stream, a, maps);
}

template <int D>
std::string launch_dbias(const BwdCall& c, const Launch& l) {
  return dispatch_dtype(c.p.problem.dtype, [&]<typename E>() {
    if constexpr (D > 128) {
      if (!c.plan.workspace.stats_portable) return launch_dbias_as<BwdBiasTraits<E, D, false, true>>(c, l);
    }
    return l.variant == ScoreVariant::kBias ? launch_dbias_as<BwdBiasTraits<E, D, false>>(c, l)
                                            : launch_dbias_as<BwdBiasTraits<E, D, true>>(c, l);
  });
}

}  // namespace flash_ext::sm90
