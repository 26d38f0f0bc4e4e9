// What the tables of plan/fwd.cpp and plan/bwd.cpp share.
#pragma once

#include <algorithm>

#include "../grid.h"
#include "../heuristics.h"
#include "../plan.h"
#include "../short_tiles.h"
#include "hopper_bwd.h"

namespace flash_ext::plans {

using Req = const Request&;
using Dev = const DeviceInfo&;

enum class Family : uint8_t { kFwd, kFwdFp8, kFwdMod, kFwdCached, kBwd, kBwdMod };

struct Row {
  Family family;
  std::string_view name;
  bool (*supports)(Req, Dev);   // computes it, correctly and within bounds
  bool (*preferred)(Req, Dev);  // by measurement, asked only where it supports; null: always
  void (*build)(Req, Dev, Plan&);
  Evidence evidence;
};

// Whether each row with a preference names the measurement behind it.
constexpr bool have_evidence(std::span<const Row> rows) {
  return std::ranges::all_of(
      rows, [](const Row& row) { return row.preferred == nullptr || row.evidence != Evidence::kNone; });
}

std::span<const Row> fwd_rows(Arch arch);
std::span<const Row> bwd_rows(Arch arch);

// ---- what both ask ---------------------------------------------------------------------------------

inline int padded(const Problem& p) { return padded_head_dim(p.head_dim, p.head_dim_v); }
inline int split_padded(const Problem& p) { return padded_split_head_dim(p.head_dim, p.head_dim_v); }
inline SmemClass class_of(Dev d) { return smem_class(d.cc_major, d.smem_per_block); }
// Problem::score_factor, which a request does not have yet.
inline float factor_of(const Problem& p) { return p.scale > 0.f ? 1.f : p.scale < 0.f ? -1.f : 0.f; }
// What TMA reads and stores. Rows of contiguous results begin on 16 bytes where head sizes are multiples of 8.
inline bool tma_fwd(Req r) { return r.problem.tma_ready && r.problem.head_dim_v % 8 == 0; }
inline bool always(Req, Dev) { return true; }
// What the Hopper forward without modifiers is compiled for.
inline sm90::HeadDims hopper_dims(const Problem& p) {
  for (const sm90::HeadDims x : {sm90::HeadDims{64, 64}, {96, 96}, {128, 128}, {192, 128}, {192, 192}}) {
    if (p.head_dim <= x.d && p.head_dim_v <= x.dv) return x;
  }
  return {256, 256};
}

// ---- launches --------------------------------------------------------------------------------------

inline Launch pass(KernelId k, int d, int dv, int64_t ctas, int threads, bool pdl = false) {
  Launch l;
  l.kernel = k, l.head_dim = static_cast<int16_t>(d), l.head_dim_v = static_cast<int16_t>(dv);
  l.ctas = l.tiles = ctas, l.threads = threads, l.pdl = pdl;
  return l;
}
// CTAs that put `rows` together, each of up to so many parts: sm80/split_kv/merge.cuh.
inline int64_t merge_ctas(int64_t rows, int splits) {
  return splits <= SplitTile::kWarps ? (rows + SplitTile::kWarps - 1) / SplitTile::kWarps : rows;
}
// Work tiles are fetched where that is wanted and CTAs have more than one.
inline void set_dynamic(Launch& l, bool wanted) { l.dynamic = wanted && l.tiles > l.ctas; }
// The same of the one launch of a plan that has a counter.
inline void set_dynamic(Plan& p, Launch& l, bool wanted) {
  set_dynamic(l, wanted);
  p.workspace.tile_counters = p.workspace.add(l.dynamic ? sm90::kCounterBytes : 0);
}
// Statistics of rows in backwards: by tiles of queries, and as portable kernels want them.
inline void add_row_stats(const Problem& p, Plan& plan, int block_m) {
  plan.workspace.row_stats = plan.workspace.add(4 * 2 * sm90::query_tiles(p, block_m) * block_m);
}
inline void add_portable_stats(const Problem& p, Plan& plan) {
  plan.workspace.stats_portable = plan.workspace.add(8 * p.total_q * p.num_heads);
}
// Each of `ctas` keeps what it has between two stretches of keys.
inline void add_stretches(Plan& p, bool wanted, int64_t ctas, const sm90::FwdTile& t, int head_dim_v) {
  p.workspace.kv_stretches = p.workspace.add(wanted ? 4 * ctas * sm90::kept_floats(t, head_dim_v) : 0);
}
// Keys in so many parts of `rows` rows each, query heads times queries, with the place of what parts leave.
inline void add_kv_partials(const Problem& x, Plan& p, int parts, int64_t rows) {
  SplitGrid& g = p.split_kv;
  g.splits = p.kv_splits = parts;
  g.total_rows = rows;
  g.pitch = (x.head_dim_v + 3) / 4 * 4;
  g.stats_bytes = (8 * g.splits * g.total_rows + 15) / 16 * 16;
  g.parts = Divisor(static_cast<uint32_t>(parts));
  g.heads = Divisor(static_cast<uint32_t>(x.num_heads));
  p.workspace.kv_partials = p.workspace.add(g.workspace_bytes());
}
// at_most: CTAs of a persistent kernel, 0 where each has one tile.
inline Launch main_of(KernelId k, int d, int dv, int m, int n, int stages, int threads, int smem, int64_t tiles,
                      int at_most) {
  Launch l = pass(k, d, dv, at_most > 0 ? std::min<int64_t>(tiles, at_most) : tiles, threads);
  l.block_m = m, l.block_n = n, l.stages = stages, l.smem_bytes = smem;
  l.tiles = tiles;
  return l;
}
inline Launch main_of(KernelId k, int d, int dv, int m, int n, int stages, int threads, int smem, const Grid& grid,
                      int at_most) {
  Launch l = main_of(k, d, dv, m, n, stages, threads, smem, grid.ctas, at_most);
  l.grid = grid;
  return l;
}
// The sums of gradients of keys and values that are made in so many parts a key head.
inline void push_head_sums(const Problem& x, Plan& p, int parts) {
  const int64_t rows = x.num_heads_k * x.total_k;
  p.workspace.dk_partials = p.workspace.add(4 * parts * rows * x.head_dim);
  p.workspace.dv_partials = p.workspace.add(4 * parts * rows * x.head_dim_v);
  const int64_t threads = rows * ((x.head_dim + 3) / 4 + (x.head_dim_v + 3) / 4);
  p.push(pass(KernelId::kSumParts, x.head_dim, x.head_dim_v, (threads + kHeadSumThreads - 1) / kHeadSumThreads,
              kHeadSumThreads, p.arch == Arch::kSm90));
}

inline void push_short(Plan& p, KernelId k, const ShortTile& t, int smem, const ShortGrid& g, bool pdl) {
  p.push(main_of(k, t.head_dim, t.head_dim, t.rows, t.rows, 1, t.threads(), smem, g.ctas, 0)).pdl = pdl;
  p.short_heads = g;
}

}  // namespace flash_ext::plans
