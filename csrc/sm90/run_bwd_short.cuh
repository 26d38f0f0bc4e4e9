// From a backward of few rows to launches: dK and dV, then dQ (prefers_two_kernels()). Included by the instantiation
// files only.
#pragma once

#include "run_bwd.cuh"
#include "run_bwd_wide.cuh"

namespace flash_ext::sm90 {

template <typename E, int D>
std::string launch_short_keys(const BwdParams& p, const DeviceInfo& d) {
  using T = BwdTraits<E, D, DqKind::kElsewhere>;
  const bool drawn = draws_items(p.problem);
  const Grid grid = bwd_grid(p.problem, d, T::kBlockN, false);
  if (grid.ctas > INT32_MAX) return "bwd_sm90: the problem needs more than 2^31 - 1 tiles";
  const BwdArgs a = wide_args(p, grid, T::kBlockM, 0, drawn);
  BwdMaps maps{};
  const std::string error = encode_bwd_maps(maps, p, T::kBlockM, T::kPartRows);
  if (!error.empty()) return "bwd_sm90: " + error;
  return launch_at(early_if(begins_early(p.problem)), "bwd_sm90_short_keys", bwd_sm90_kernel<T>,
                   std::min<int64_t>(grid.ctas, d.num_sms), T::kThreads, T::kSmemBytes, p.stream, a, maps);
}

template <typename E, int D>
std::string run_bwd_short_as(const BwdParams& p, const DeviceInfo& d) {
  std::string error = launch_wide_begin<E, D, BwdTile::kBlockM>(p, d);
  if (error.empty()) error = launch_short_keys<E, D>(p, d);
  if (error.empty()) error = launch_wide_queries<E, D, D>(p, d);
  return error;
}

inline std::string run_bwd_short(const BwdParams& p, const DeviceInfo& d) {
  return dispatch_dtype(p.problem.dtype, [&]<typename E>() { return run_bwd_short_as<E, kShortHeadDim>(p, d); });
}

}  // namespace flash_ext::sm90
