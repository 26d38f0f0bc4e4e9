// Launches of the fused Hopper backward, for one compiled head dim: row statistics, dQ, dK and dV, then dQ from its
// sums where it has any. Included by the instantiation files only.
#pragma once

#include "../fwd/launch.cuh"
#include "kernel.cuh"
#include "passes.cuh"

namespace flash_ext::sm90 {

// `which` of the two counters of the plan is the launch's.
inline BwdArgs make_bwd_args(const BwdCall& c, const Launch& l, int block_m, int which = 0) {
  const BwdParams p = c.hopper();
  const Problem& r = p.problem;
  const auto steps = [&](const StridedView& x) {
    return Steps{x.head_stride != 0, r.is_varlen() || x.batch_stride != 0};
  };
  BwdArgs a{};
  a.p = p;
  a.grid = l.grid;
  a.q = steps(p.q), a.k = steps(p.k), a.v = steps(p.v), a.dout = steps(p.dout), a.out = steps(p.out);
  a.tiles_per_head = static_cast<int>(query_tiles_per_head(r, block_m));
  a.rotate = l.rotate;
  a.unit_heads = l.unit_heads;
  a.scheduler.num_work_tiles = static_cast<uint32_t>(l.tiles);
  if (l.dynamic) {
    a.scheduler.counter = part_of<Counter>(c.workspace, c.plan.workspace.tile_counters) + which;
    a.scheduler.launch = next_launch();
  }
  return a;
}

inline StreamK stream_k_of(const BwdCall& c, const Launch& l) {
  const Workspace& w = c.plan.workspace;
  if (l.dq != DqMode::kDivided) return {};
  const DividedTiles divided = divided_tiles(c.p.problem, l.tiles, l.ctas);
  return {.first = static_cast<uint32_t>(l.tiles - divided.tiles),
          .all = static_cast<uint32_t>(divided.all),
          .share = static_cast<uint32_t>(divided.share),
          .steps = Divisor(static_cast<uint32_t>(query_tiles_per_head(c.p.problem))),
          .sums = part_of<float>(c.workspace, w.stream_k_sums),
          .words = part_of<uint32_t>(c.workspace, w.stream_k_words)};
}

inline DqPoolView pool_of(const BwdCall& c) {
  const DqPool& r = c.plan.dq_pool;
  const Problem& p = c.p.problem;
  DqPoolView pool;
  const int64_t per_head = query_tiles_per_head(p), shared = p.num_heads / p.num_heads_k;
  pool.words = part_of<uint32_t>(c.workspace, c.plan.workspace.pool_words);
  pool.round_tiles = Divisor(static_cast<uint32_t>(r.round_heads * shared * per_head));
  pool.pool_tiles = Divisor(static_cast<uint32_t>(r.tiles(p)));
  pool.tiles_per_head = Divisor(static_cast<uint32_t>(per_head));
  pool.heads = Divisor(static_cast<uint32_t>(p.num_heads));
  pool.all_tiles = static_cast<uint32_t>(query_tiles(p));
  pool.all_rounds = static_cast<uint32_t>(r.all_rounds);
  pool.rounds = static_cast<uint32_t>(r.rounds);
  pool.round_heads = static_cast<uint32_t>(r.round_heads);
  return pool;
}

template <typename T>
std::string launch_bwd_as(const BwdCall& c, const Launch& l) {
  const Problem& r = c.p.problem;
  BwdArgs a = make_bwd_args(c, l, T::kBlockM);
  BwdMaps maps{};
  std::string error = encode_bwd_maps(maps, c.p, T::kBlockM, T::kPartRows);
  if (l.dq == DqMode::kOrdered) a.dq_semaphore = part_of<uint32_t>(c.workspace, c.plan.workspace.dq_semaphore);
  a.stream_k = stream_k_of(c, l);
  if (l.dq == DqMode::kPool) {
    a.pool = pool_of(c);
    if (error.empty() && !c.p.dq.is_float) {
      error = encode_map(maps.dq, c.p.dq, r, r.head_dim, r.seqlen_q, r.num_heads, 16, 32);
    }
  }
  if (T::kUnits) a.query_splits = Divisor(static_cast<uint32_t>(c.plan.q_splits));
  if (T::kMayMakeStats && l.makes_stats) {
    a.makes_stats = true;
    if (error.empty()) error = encode_map(maps.out, c.p.out, r, r.head_dim_v, r.seqlen_q, r.num_heads, T::kBlockM);
  }
  if (!error.empty()) return "bwd_sm90: " + error;
  return launch_planned(l, bwd_sm90_kernel<T>, T::kThreads, T::kSmemBytes, c.p.stream, a, maps);
}

inline TileGrid tile_grid(const BwdCall& c, const Launch& l, int block_m) {
  return {l.grid, static_cast<int>(query_tiles_per_head(c.p.problem, block_m)), l.unit_heads};
}

template <typename E, int D>
std::string launch_row_stats_and_zero(const BwdCall& c, const Launch& l) {
  const Problem& r = c.p.problem;
  const Workspace& w = c.plan.workspace;
  Zeroed zeroed;
  if (l.dq == DqMode::kPool) {
    zeroed = {.tiles = c.plan.dq_pool.tiles(r),
              .words = part_of<uint32_t>(c.workspace, w.pool_words),
              .num_words = static_cast<int>(c.plan.dq_pool.words())};
  } else if (w.stream_k_words) {
    zeroed.words = part_of<uint32_t>(c.workspace, w.stream_k_words);
    zeroed.num_words = static_cast<int>(w.stream_k_words.bytes / 4);
  } else if (l.dq == DqMode::kStored) {
    zeroed = {.stored_keys = c.plan.main_launch().block_n, .dq_rows = c.plan.zeroes_dq};
  }
  zeroed.half = l.zeroes_half;
  return launch_planned(l, row_stats_and_zero_kernel<E, D>, kPassThreads, 0, c.p.stream, c.hopper(),
                        tile_grid(c, l, BwdTile::kBlockM), part_of<uint32_t>(c.workspace, w.dq_semaphore), zeroed);
}

template <int D>
std::string launch_bwd_fused(const BwdCall& c, const Launch& l) {
  return dispatch_dtype(c.p.problem.dtype, [&]<typename E>() {
    if (l.kernel == KernelId::kRowStatsAndZero90) return launch_row_stats_and_zero<E, D>(c, l);
    if (l.kernel == KernelId::kDqConvert90) {
      return launch_planned(l, dq_convert_kernel<E, D>, kDqConvertThreads, 0, c.p.stream, c.hopper(),
                            tile_grid(c, l, BwdTile::kBlockM),
                            l.dq == DqMode::kStored ? c.plan.main_launch().block_n : -1);
    }
    if (l.dq == DqMode::kStored && l.block_n == stored_short_tile(D).block_n()) {
      return launch_bwd_as<BwdTraits<E, D, DqKind::kStoredShort>>(c, l);
    }
    if constexpr (has_stored_tile(D)) {
      if (l.dq == DqMode::kStored) return launch_bwd_as<BwdTraits<E, D, DqKind::kStored>>(c, l);
    }
    if (l.dq == DqMode::kOrdered) return launch_bwd_as<BwdTraits<E, D, DqKind::kOrdered>>(c, l);
    if (l.dq == DqMode::kDivided) return launch_bwd_as<BwdTraits<E, D, DqKind::kDivided>>(c, l);
    return launch_bwd_as<BwdTraits<E, D, DqKind::kUnordered>>(c, l);
  });
}

}  // namespace flash_ext::sm90
