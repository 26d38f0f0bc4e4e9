// From a backward request with modifiers to the launches of two kernels, for one compiled head dim. Included by the
// instantiation files only.
#pragma once

#include "bwd_split.cuh"
#include "run_bwd_mod.cuh"
#include "run_bwd_wide.cuh"

namespace flash_ext::sm90 {

// p.row_stats begins with this path's statistics, behind which the two counters are.
template <typename T>
std::string launch_wide_mod(const BwdParams& p, const Modifiers& m, const DeviceInfo& d) {
  const Problem& r = p.problem;
  const bool drawn = draws_items(r, m);
  const Grid grid = T::kByQueries ? wide_queries_grid(r, d, drawn) : wide_keys_grid(r, d, drawn);
  if (grid.ctas > INT32_MAX) return "bwd_mod_sm90: the problem needs more than 2^31 - 1 tiles";
  SplitModArgs a{};
  a.plain = wide_args(p, grid, T::kStatRows, T::kByQueries, drawn);
  a.m = m;
  if (T::kCaps) a.cap = key_cap(r, m);
  a.unit = T::kCaps ? m.softcap * kLog2e : m.is_natural ? kLog2e : r.softmax_scale * kLog2e;
  BwdMaps maps;
  const std::string error = encode_bwd_maps(maps, p, T::kByQueries ? 64 : T::kBlockM, T::kBlockN);
  if (!error.empty()) return "bwd_mod_sm90: " + error;
  return launch_at(early_if(begins_early(r)), "bwd_wide_mod_sm90", bwd_split_sm90_kernel<T>,
                   std::min<int64_t>(grid.ctas, d.num_sms), T::kThreads, T::kSmemBytes, p.stream, a, maps);
}

template <typename E, int D, ScoreKind kKind>
std::string launch_both_wide_mod(const BwdParams& p, const Modifiers& m, const DeviceInfo& d) {
  const std::string error = launch_wide_mod<DkdvTraits<E, D, D, kKind>>(p, m, d);
  return error.empty() ? launch_wide_mod<DqTraits<E, D, D, kKind>>(p, m, d) : error;
}

template <typename E, int D>
std::string run_bwd_wide_mod_as(const BwdParams& p, const Modifiers& m, const DeviceInfo& d) {
  const std::string error = launch_wide_begin<E, D, wide_mod_tile(D).block_m>(p, d);
  if (!error.empty()) return error;
  const bool adds = m.slopes != nullptr || m.bias.ptr != nullptr;
  if (m.softcap > 0.f) return launch_both_wide_mod<E, D, ScoreKind::kCapping>(p, m, d);
  if (m.rng != nullptr) return launch_both_wide_mod<E, D, ScoreKind::kAddingDropping>(p, m, d);
  if (adds) return launch_both_wide_mod<E, D, ScoreKind::kAdding>(p, m, d);
  return launch_both_wide_mod<E, D, ScoreKind::kHiding>(p, m, d);
}

template <int D>
std::string run_bwd_wide_mod_hd(const BwdParams& p, const Modifiers& m, const DeviceInfo& d) {
  return dispatch_dtype(p.problem.dtype, [&]<typename E>() { return run_bwd_wide_mod_as<E, D>(p, m, d); });
}

}  // namespace flash_ext::sm90
