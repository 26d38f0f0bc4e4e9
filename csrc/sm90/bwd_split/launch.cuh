// Launches of the split Hopper backward, for one compiled pair of head dims: row statistics, dK and dV, dQ. Included by
// the instantiation files only.
#pragma once

#include "../bwd/launch.cuh"
#include "../bwd/passes.cuh"
#include "kernel.cuh"
#include "tiles_mod.h"

namespace flash_ext::sm90 {

// lse and delta; nothing is added to memory, so there is nothing else to prepare.
template <typename E, int Dv, int kBlockM>
__global__ void __launch_bounds__(kPassThreads)
    row_stats_kernel(const __grid_constant__ BwdParams p, const __grid_constant__ TileGrid grid) {
  ptx::allow_next_kernel();
  for_query_tiles<kBlockM>(p, grid, [&](const QueryTile& tile) {
    if (!tile.outside) store_row_stats<E, Dv, kBlockM>(p, tile);
  });
}

template <int D, int Dv>
std::string launch_row_stats(const BwdCall& c, const Launch& l) {
  constexpr int kBlockM = D <= 128 ? BwdTile::kBlockM : split_bwd_tile(D, Dv).block_m;
  static_assert(D != Dv || split_mod_tile(D).block_m == kBlockM);
  return dispatch_dtype(c.p.problem.dtype, [&]<typename E>() {
    return launch_planned(l, row_stats_kernel<E, Dv, kBlockM>, kPassThreads, 0, c.p.stream, c.hopper(),
                          tile_grid(c, l, kBlockM));
  });
}

// Either kernel; that of dQ has the queries of a warpgroup in a box.
template <typename T>
std::string launch_bwd_split_as(const BwdCall& c, const Launch& l) {
  const SplitArgs a{make_bwd_args(c, l, T::kStatRows, T::kByQueries), c.p.problem.scale_log2};
  BwdMaps maps{};
  const std::string error = encode_bwd_maps(maps, c.p, T::kByQueries ? 64 : T::kBlockM, T::kBlockN);
  if (!error.empty()) return "bwd_sm90: " + error;
  return launch_planned(l, bwd_split_sm90_kernel<T>, T::kThreads, T::kSmemBytes, c.p.stream, a, maps);
}

template <int D, int Dv>
std::string launch_bwd_split(const BwdCall& c, const Launch& l) {
  return dispatch_dtype(c.p.problem.dtype, [&]<typename E>() {
    if (l.kernel == KernelId::kBwdDq90) return launch_bwd_split_as<DqTraits<E, D, Dv, ScoreKind::kPlain>>(c, l);
    if constexpr (D <= 128) {
      return launch_bwd_as<BwdTraits<E, D, DqKind::kElsewhere>>(c, l);
    } else {
      return launch_bwd_split_as<DkdvTraits<E, D, Dv, ScoreKind::kPlain>>(c, l);
    }
  });
}

}  // namespace flash_ext::sm90
