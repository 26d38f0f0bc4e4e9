// From a backward request to launches, for one compiled pair of head dims above 128. Included by the instantiation
// files only.
#pragma once

#include "bwd_passes.cuh"
#include "bwd_split.cuh"
#include "run_fwd.cuh"

namespace flash_ext::sm90 {

// lse and delta; nothing is added to memory, so there is nothing else to prepare.
template <typename E, int Dv, int kBlockM>
__global__ void __launch_bounds__(kPassThreads)
    bwd_wide_begin_kernel(const __grid_constant__ BwdParams p, const __grid_constant__ Grid grid, int tiles_per_head) {
  ptx::allow_next_kernel();
  const QueryTile tile = locate_tile<kBlockM>(p, grid, tiles_per_head);
  if (tile.w.active && !tile.outside) store_row_stats<E, Dv, kBlockM>(p, tile);
}

// What both kernels get; `which` of the two counters behind the statistics is the launch's.
inline BwdArgs wide_args(const BwdParams& p, const Grid& grid, int block_m, int which, bool drawn) {
  const Problem& r = p.problem;
  const auto steps = [&](const StridedView& x) {
    return Steps{x.head_stride != 0, r.is_varlen() || x.batch_stride != 0};
  };
  BwdArgs a{};
  a.p = p;
  a.grid = grid;
  a.q = steps(p.q), a.k = steps(p.k), a.v = steps(p.v), a.dout = steps(p.dout);
  a.tiles_per_head = static_cast<int>(query_tiles_per_head(r, block_m));
  a.draw.num_items = static_cast<uint32_t>(grid.ctas);
  if (drawn) {
    a.draw.counter = reinterpret_cast<Counter*>(p.row_stats + query_tiles(r, block_m) * 2 * block_m) + which;
    a.draw.launch = next_launch();
  }
  return a;
}

template <typename E, int D, int Dv>
std::string launch_wide_keys(const BwdParams& p, const DeviceInfo& d) {
  using T = DkdvTraits<E, D, Dv, ScoreKind::kPlain>;
  const Grid grid = wide_keys_grid(p.problem, d, draws_items(p.problem));
  if (grid.ctas > INT32_MAX) return "bwd_sm90: the problem needs more than 2^31 - 1 tiles";
  const SplitArgs a{wide_args(p, grid, T::kStatRows, 0, draws_items(p.problem)), p.problem.scale_log2};
  BwdMaps maps;
  const std::string error = encode_bwd_maps(maps, p, T::kBlockM, T::kBlockN);
  if (!error.empty()) return "bwd_sm90: " + error;
  return launch_at(early_if(begins_early(p.problem)), "bwd_sm90_wide_keys", bwd_split_sm90_kernel<T>,
                   std::min<int64_t>(grid.ctas, d.num_sms), T::kThreads, T::kSmemBytes, p.stream, a, maps);
}

template <typename E, int D, int Dv>
std::string launch_wide_queries(const BwdParams& p, const DeviceInfo& d) {
  using T = DqTraits<E, D, Dv, ScoreKind::kPlain>;
  const Grid grid = wide_queries_grid(p.problem, d, draws_items(p.problem));
  if (grid.ctas > INT32_MAX) return "bwd_sm90: the problem needs more than 2^31 - 1 tiles";
  const SplitArgs a{wide_args(p, grid, T::kStatRows, 1, draws_items(p.problem)), p.problem.scale_log2};
  BwdMaps maps;
  const std::string error = encode_bwd_maps(maps, p, T::kGroupRows, T::kBlockN);
  if (!error.empty()) return "bwd_sm90: " + error;
  return launch_at(early_if(begins_early(p.problem)), "bwd_sm90_wide_queries", bwd_split_sm90_kernel<T>,
                   std::min<int64_t>(grid.ctas, d.num_sms), T::kThreads, T::kSmemBytes, p.stream, a, maps);
}

template <typename E, int Dv, int kBlockM>
std::string launch_wide_begin(const BwdParams& p, const DeviceInfo& d) {
  const Grid g = make_grid(p.problem, d, true, kBlockM);
  const int tiles = static_cast<int>(query_tiles_per_head(p.problem, kBlockM));
  return launch("bwd_wide_begin", bwd_wide_begin_kernel<E, Dv, kBlockM>, g.ctas, kPassThreads, 0, p.stream, p, g,
                tiles);
}

template <typename E, int D, int Dv>
std::string run_bwd_wide_as(const BwdParams& p, const DeviceInfo& d) {
  std::string error = launch_wide_begin<E, Dv, wide_bwd_tile(D, Dv).block_m>(p, d);
  if (error.empty()) error = launch_wide_keys<E, D, Dv>(p, d);
  if (error.empty()) error = launch_wide_queries<E, D, Dv>(p, d);
  return error;
}

template <int D, int Dv>
std::string run_bwd_wide_hd(const BwdParams& p, const DeviceInfo& d) {
  return dispatch_dtype(p.problem.dtype, [&]<typename E>() { return run_bwd_wide_as<E, D, Dv>(p, d); });
}

}  // namespace flash_ext::sm90
