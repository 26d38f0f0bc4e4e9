// From a backward request with modifiers to launches, for one compiled head dim. Included by the instantiation files
// only.
#pragma once

#include "bwd_mod.cuh"
#include "run_bwd.cuh"
#include "run_fwd_mod.cuh"

namespace flash_ext::sm90 {

// tanh(t) / t in t^2, fitted for the smallest relative error (4e-7) on |t| <= 1/4.
inline KeyCap key_cap(const Problem& p, const Modifiers& m) {
  constexpr double kTerms[KeyCap::kTerms] = {0.9999996043, -0.3332190823, 0.1284161343};
  KeyCap cap{};
  const double factor = static_cast<double>(p.softmax_scale) * m.inv_softcap;
  cap.factor_log2 = static_cast<float>(2. * kLog2e * factor);
  cap.limit = -1.f;
  double power = factor;
  for (int k = 0; k < KeyCap::kTerms; ++k) {
    const double c = kTerms[k] * power;
    if (std::fabs(c) > FLT_MAX) return cap;  // the largest x such a factor is made for are next to 0
    cap.c[k] = static_cast<float>(c);
    power *= factor * factor;
  }
  cap.limit = static_cast<float>(std::fmin(0.25 / std::fabs(factor), FLT_MAX));
  return cap;
}

// p.row_stats begins with this path's statistics, behind which the counter is.
template <typename E, int D, ScoreKind kKind>
std::string launch_bwd_mod_as(const BwdParams& p, const Modifiers& m, const DeviceInfo& d) {
  using T = BwdModTraits<E, D, kKind>;
  const Problem& r = p.problem;
  const bool drawn = draws_items(r, m);
  float* const counter = p.row_stats + query_tiles(r) * 2 * BwdTile::kBlockM;
  BwdModArgs a{};
  std::string error =
      make_bwd_args(a.plain, p, bwd_grid(r, d, T::kBlockN, false, drawn),
                    drawn ? reinterpret_cast<Counter*>(counter) : nullptr, T::kBlockN / T::kBlockM);
  a.m = m;
  if (T::kCaps) a.cap = key_cap(r, m);
  a.unit = T::kCaps ? m.softcap * kLog2e : r.softmax_scale * kLog2e;
  a.brings_bias = m.bias.ptr != nullptr && m.bias.row_stride != 0;
  a.stores_dq = has_whole_keys(r, d);
  a.adds_to_keys = m.slopes != nullptr || (m.bias.ptr != nullptr && !a.brings_bias);
  a.bias_steps = {m.bias.head_stride != 0, m.bias.batch_stride != 0};
  BwdModMaps maps{};
  if (error.empty()) error = encode_bwd_maps(maps.plain, p, T::kBlockM, T::kBlockN);
  if (error.empty() && a.brings_bias) error = encode_bias_map(maps.bias, m.bias, r, T::kBlockM);
  if (!error.empty()) return "bwd_mod_sm90: " + error;
  const int64_t ctas = std::min<int64_t>(a.plain.grid.ctas, d.num_sms);
  return launch_at(early_if(begins_early(r)), "bwd_mod_sm90", bwd_mod_sm90_kernel<T>, ctas, T::kThreads, T::kSmemBytes,
                   p.stream, a, maps);
}

template <typename E, int D>
std::string launch_bwd_mod(const BwdParams& p, const Modifiers& m, const DeviceInfo& d) {
  const bool adds = m.slopes != nullptr || m.bias.ptr != nullptr;
  if (m.softcap > 0.f) return launch_bwd_mod_as<E, D, ScoreKind::kCapping>(p, m, d);
  if (m.rng != nullptr && adds) return launch_bwd_mod_as<E, D, ScoreKind::kAddingDropping>(p, m, d);
  if (m.rng != nullptr) return launch_bwd_mod_as<E, D, ScoreKind::kDropping>(p, m, d);
  if (adds) return launch_bwd_mod_as<E, D, ScoreKind::kAdding>(p, m, d);
  return launch_bwd_mod_as<E, D, ScoreKind::kHiding>(p, m, d);
}

template <typename E, int D>
std::string run_bwd_mod_as(const BwdParams& p, const Modifiers& m, const DeviceInfo& d) {
  const Grid g = make_grid(p.problem, d, true, BwdTile::kBlockM);
  const int tiles = static_cast<int>(query_tiles_per_head(p.problem));
  uint32_t* const no_turns = nullptr;
  const bool stores_dq = has_whole_keys(p.problem, d);
  Zeroed zeroed;
  if (stores_dq) zeroed = {.tiles = 0, .dq_rows = !visits_all_queries(p.problem, m)};
  std::string error =
      launch("bwd_begin", bwd_begin_kernel<E, D>, g.ctas, kPassThreads, 0, p.stream, p, g, tiles, no_turns, zeroed);
  if (error.empty()) error = launch_bwd_mod<E, D>(p, m, d);
  if (!error.empty() || stores_dq) return error;
  return launch_at(early_if(begins_early(p.problem)), "bwd_finish", bwd_finish_kernel<E, D>, g.ctas, 128, 0, p.stream,
                   p, g, tiles);
}

template <int D>
std::string run_bwd_mod_hd(const BwdParams& p, const Modifiers& m, const DeviceInfo& d) {
  return dispatch_dtype(p.problem.dtype, [&]<typename E>() { return run_bwd_mod_as<E, D>(p, m, d); });
}

}  // namespace flash_ext::sm90
