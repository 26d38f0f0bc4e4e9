// From a backward request to launches, for one compiled head dim. Included by the instantiation files only.
#pragma once

#include "bwd.cuh"
#include "bwd_passes.cuh"
#include "run_fwd.cuh"

namespace flash_ext::sm90 {

inline uint32_t* turns_of(const BwdParams& p) {
  return reinterpret_cast<uint32_t*>(p.row_stats + query_tiles(p.problem) * 2 * BwdTile::kBlockM);
}

// `rotate`: of items dealt out, tiles by which a block of keys starts its walk later than the block before. Where
// warpgroups work together it gains nothing, and costs 1 % at 512 rows.
inline std::string make_bwd_args(BwdArgs& a, const BwdParams& p, const Grid& grid, Counter* counter, int rotate) {
  const Problem& r = p.problem;
  const auto steps = [&](const StridedView& x) {
    return Steps{x.head_stride != 0, r.is_varlen() || x.batch_stride != 0};
  };
  a.p = p;
  a.grid = grid;
  a.q = steps(p.q), a.k = steps(p.k), a.v = steps(p.v), a.dout = steps(p.dout);
  a.tiles_per_head = static_cast<int>(query_tiles_per_head(r));
  if (grid.ctas > INT32_MAX) return "the problem needs more than 2^31 - 1 tiles";
  a.draw.num_items = static_cast<uint32_t>(grid.ctas);
  if (counter != nullptr) {
    a.draw.counter = counter;
    a.draw.launch = next_launch();
  } else {
    a.rotate = rotate;
  }
  return {};
}

inline Ring ring_of(const BwdParams& p, const DqRing& r) {
  Ring ring;
  const int64_t per_head = query_tiles_per_head(p.problem), shared = p.problem.num_heads / p.problem.num_heads_k;
  ring.words = turns_of(p);
  ring.round_tiles = Divisor(static_cast<uint32_t>(r.round_heads * shared * per_head));
  ring.ring_tiles = Divisor(static_cast<uint32_t>(r.tiles(p.problem)));
  ring.tiles_per_head = Divisor(static_cast<uint32_t>(per_head));
  ring.heads = Divisor(static_cast<uint32_t>(p.problem.num_heads));
  ring.all_tiles = static_cast<uint32_t>(query_tiles(p.problem));
  ring.all_rounds = static_cast<uint32_t>(r.all_rounds);
  ring.rounds = static_cast<uint32_t>(r.rounds);
  ring.round_heads = static_cast<uint32_t>(r.round_heads);
  return ring;
}

template <typename E, int D, bool kOrdered = false>
std::string launch_bwd(const BwdParams& p, const DeviceInfo& d) {
  using T = BwdTraits<E, D, kOrdered ? DqKind::kInOrder : DqKind::kAnyOrder>;
  const Problem& r = p.problem;
  const DqRing ring = dq_ring(r, d, kOrdered);
  const bool drawn = kOrdered || ring || draws_items(r);
  float* const counter = p.row_stats + row_stats_elements(r, kOrdered, ring) - kCounterBytes / 4;
  BwdArgs a{};
  BwdMaps maps{};
  const Grid grid = ring ? ring_grid(r, d, T::kBlockN, ring) : bwd_grid(r, d, T::kBlockN, kOrdered);
  std::string error = make_bwd_args(a, p, grid,
                                    drawn ? reinterpret_cast<Counter*>(counter) : nullptr,
                                    T::kApart ? T::kBlockN / T::kBlockM : 0);
  if (kOrdered) a.turns = turns_of(p);
  if (ring) {
    a.ring = ring_of(p, ring);
    a.rotate = T::kApart && !draws_items(r) ? T::kBlockN / T::kBlockM : 0;
  }
  if (error.empty()) error = encode_bwd_maps(maps, p, T::kBlockM, T::kPartRows);
  if (error.empty() && ring && !p.dq.is_float) {
    error = encode_map(maps.dq, p.dq, r, r.head_dim, r.seqlen_q, r.num_heads, 16, 32);
  }
  if (!error.empty()) return "bwd_sm90: " + error;
  return launch_at(early_if(begins_early(r)), "bwd_sm90", bwd_sm90_kernel<T>, std::min<int64_t>(a.grid.ctas, d.num_sms),
                   T::kThreads, T::kSmemBytes, p.stream, a, maps);
}

template <typename E, int D, bool kOrdered>
std::string run_bwd_as(const BwdParams& p, const DeviceInfo& d) {
  const Grid g = make_grid(p.problem, d, true, BwdTile::kBlockM);
  const int tiles = static_cast<int>(query_tiles_per_head(p.problem));
  uint32_t* turns = kOrdered ? turns_of(p) : nullptr;
  const DqRing ring = dq_ring(p.problem, d, kOrdered);
  Zeroed zeroed;
  if (ring) zeroed = {ring.tiles(p.problem), turns_of(p), static_cast<int>(ring.words())};
  std::string error =
      launch("bwd_begin", bwd_begin_kernel<E, D>, g.ctas, kPassThreads, 0, p.stream, p, g, tiles, turns, zeroed);
  if (error.empty()) error = launch_bwd<E, D, kOrdered>(p, d);
  if (!error.empty() || ring) return error;
  return launch_at(early_if(begins_early(p.problem)), "bwd_finish", bwd_finish_kernel<E, D>, g.ctas, 128, 0, p.stream,
                   p, g, tiles);
}

template <int D>
std::string run_bwd_hd(const BwdParams& p, const DeviceInfo& d) {
  const auto run = [&](auto ordered) {
    constexpr bool kOrdered = decltype(ordered)::value;
    return dispatch_dtype(p.problem.dtype, [&]<typename E>() { return run_bwd_as<E, D, kOrdered>(p, d); });
  };
  return p.deterministic ? run(std::true_type{}) : run(std::false_type{});
}

}  // namespace flash_ext::sm90
