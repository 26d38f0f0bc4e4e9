// The tables of the backwards.
#include "gradient_splits.h"
#include "table.h"

namespace flash_ext::plans {
namespace {

using sm90::kCounterBytes;
using enum ScoreVariant;

// ---- what is asked ---------------------------------------------------------------------------------

bool is_wide(Req r) { return padded(r.problem) > 128; }
bool tma_bwd(Req r, Dev) { return tma_fwd(r) && r.problem.head_dim % 8 == 0; }
bool tma_bwd_mod(Req r, Dev d) { return tma_bwd(r, d) && r.problem.total_k > 0; }
bool has_whole_keys(Req r) { return sm90::has_whole_keys(r.problem, r.constraints); }
bool stores_dq(Req r, Dev d) { return sm90::stores_dq(r.problem, d, r.constraints, r.deterministic); }
// dQ has no place in the kernel over keys: too wide, or to be summed in a fixed order without being stored at once.
bool wants_split(Req r) { return is_wide(r) || (r.deterministic && !has_whole_keys(r)); }

// ---- without modifiers -----------------------------------------------------------------------------

bool supports_short(Req r, Dev d) { return is_short_bwd(r.problem, d, r.constraints); }
bool supports_split(Req r, Dev d) { return tma_bwd(r, d) && is_wide(r); }
bool supports_fused(Req r, Dev d) { return tma_bwd(r, d) && !is_wide(r); }
bool supports_whole_keys(Req r, Dev d) { return supports_fused(r, d) && r.problem.total_k > 0 && stores_dq(r, d); }
bool supports_stored_short(Req r, Dev d) { return supports_whole_keys(r, d) && sm90::has_stored_short(r.problem); }
bool supports_stored(Req r, Dev d) {
  return supports_fused(r, d) && sm90::has_stored_dq(r.problem, r.constraints, r.wide);
}
bool supports_atomic(Req r, Dev d) { return supports_fused(r, d) && !r.deterministic; }
bool supports_pool(Req r, Dev d) {
  return supports_atomic(r, d) && !r.problem.is_varlen() && sm90::dq_pool_of(r.problem, d, r.constraints);
}

bool prefers_whole_keys(Req r, Dev d) { return sm90::prefers_whole_keys(r.problem, d, r.constraints, r.wide); }
bool prefers_short(Req r, Dev d) { return !tma_bwd(r, d) || sm90::prefers_short_sm80(r.problem, d); }
bool prefers_stored_short(Req r, Dev d) { return sm90::prefers_stored_short(r.problem, d, r.constraints); }
bool prefers_stored(Req r, Dev d) { return !r.constraints.dq_pool && !sm90::has_few_tiles(r.problem, d); }
bool prefers_split_short(Req r, Dev d) { return sm90::prefers_split_bwd(r.problem, d, r.constraints); }
bool prefers_ordered(Req r, Dev d) { return r.deterministic || sm90::prefers_order(r.problem, d, r.constraints); }

// Passes of the Hopper backwards. The first makes statistics of rows, and what the kernel behind it adds to.
Launch& push_tile_pass(Req r, Dev d, Plan& p, Launch l, int block_m, DqMode dq) {
  l.unit_heads = sm90::unit_heads_of(r.problem, r.problem.num_heads, int64_t{2} * d.num_sms);
  l.grid = sm90::unit_grid(r.problem, d, true, block_m, l.unit_heads);
  l.ctas = l.tiles = l.grid.ctas, l.dq = dq;
  return p.push(l);
}
Launch& push_row_stats(Req r, Dev d, Plan& p, KernelId k, int head_dim, int head_dim_v, int block_m, DqMode dq) {
  return push_tile_pass(r, d, p, pass(k, head_dim, head_dim_v, 0, kPassThreads), block_m, dq);
}
void push_dq_convert(Req r, Dev d, Plan& p, int head_dim, bool pdl, DqMode dq) {
  push_tile_pass(r, d, p, pass(KernelId::kDqConvert90, head_dim, head_dim, 0, sm90::kDqConvertThreads, pdl),
                 sm90::BwdTile::kBlockM, dq);
}
// The same of the portable ones, a row of a head for pass_lanes() lanes.
void push_portable_pass(Req r, Dev d, Plan& p, KernelId k, DqMode dq, bool pdl) {
  const int size = padded(r.problem);
  const int64_t rows = r.problem.total_q * r.problem.num_heads;
  Launch& l =
      p.push(pass(k, size, size, (rows * pass_lanes(size) + kPassThreads - 1) / kPassThreads, kPassThreads, pdl));
  l.smem_class = class_of(d);
  l.dq = dq;
}
void push_dq80(Req r, Dev d, Plan& p, KernelId k, const BwdQTile& q, int smem) {
  const int size = padded(r.problem);
  Launch& l = p.push(main_of(k, size, size, q.block_m(), q.block_n, q.stages, q.threads(), smem,
                             make_grid(r.problem, d, true, q.block_m()), 0));
  l.smem_class = class_of(d);
}

void build_short(Req r, Dev d, Plan& p) {
  const ShortTile t = short_tile(r.problem);
  push_short(p, KernelId::kBwdShort80, t, t.bwd_smem(), short_bwd_grid(r.problem, {}, nullptr, d), false);
  add_portable_stats(r.problem, p);
}

// dK and dV, then dQ.
template <bool kShort>
void build_split(Req r, Dev d, Plan& p) {
  const Problem& x = r.problem;
  const bool dynamic = sm90::has_unequal_tiles(x);
  const sm90::HeadDims f = kShort ? sm90::split_short_dims(x) : sm90::split_dims(x);
  const sm90::SplitBwdTile t = sm90::split_bwd_tile(f.d, f.dv);
  const int stat_rows = kShort ? sm90::BwdTile::kBlockM : t.block_m;
  push_row_stats(r, d, p, KernelId::kRowStats90, f.d, f.dv, stat_rows, DqMode::kElsewhere);
  p.main = 1;
  if (kShort) {
    const sm90::BwdTile k = sm90::kShortKeysTile;
    p.push(main_of(KernelId::kBwdDkdvShort90, f.d, f.dv, sm90::BwdTile::kBlockM, k.block_n(), k.stages, k.threads(),
                   k.smem_bytes(f.d), sm90::bwd_grid(x, d, k.block_n(), false), d.num_sms));
  } else {
    p.push(main_of(KernelId::kBwdDkdv90, f.d, f.dv, t.block_m, sm90::SplitBwdTile::kKeys, t.stages,
                   sm90::SplitBwdTile::kThreads, t.dkv_smem_bytes(f.d, f.dv), sm90::dkdv_grid(x, d, dynamic),
                   d.num_sms));
  }
  p.launches[1].dq = DqMode::kElsewhere;
  p.push(main_of(KernelId::kBwdDq90, f.d, f.dv, sm90::SplitBwdTile::kQueries, t.block_n, t.k_stages,
                 sm90::SplitBwdTile::kThreads, t.dq_smem_bytes(f.d, f.dv), sm90::dq_grid(x, d, dynamic), d.num_sms));
  for (const int j : {1, 2}) set_dynamic(p.launches[j], dynamic), p.launches[j].pdl = sm90::prefers_pdl(x);
  add_row_stats(x, p, stat_rows);
  p.workspace.tile_counters = p.workspace.add(dynamic ? 2 * kCounterBytes : 0);
}

template <DqMode kDq, bool kShort = false>
void build_fused(Req r, Dev d, Plan& p) {
  const Problem& x = r.problem;
  const int size = padded(x);
  constexpr bool kOrdered = kDq == DqMode::kOrdered, kStored = kDq == DqMode::kStored;
  const sm90::BwdTile t = kShort    ? sm90::stored_short_tile(size)
                          : kStored ? sm90::stored_tile(size)
                                    : sm90::bwd_tile(size);
  const sm90::DqPool pool = kDq == DqMode::kPool ? sm90::dq_pool_of(x, d, r.constraints) : sm90::DqPool{};
  const int ctas = d.num_sms * t.ctas(), unit_heads = kShort ? sm90::unit_heads_of(x, x.num_heads_k, ctas) : 1;
  const Grid g = pool             ? sm90::pool_grid(x, d, t.block_n(), pool)
                 : unit_heads > 1 ? sm90::unit_grid(x, d, false, t.block_n(), unit_heads)
                                  : sm90::bwd_grid(x, d, t.block_n(), kOrdered);
  p.dq_pool = pool;
  const bool unvisited = kStored && !sm90::visits_all_queries(x, {});
  const bool own_stats = kShort && size <= sm90::kOwnStatsHeadDim && !x.is_varlen() && !unvisited && r.has_tma_out;
  if (!own_stats) push_row_stats(r, d, p, KernelId::kRowStatsAndZero90, size, size, sm90::BwdTile::kBlockM, kDq);
  p.main = p.num_launches;
  Launch& l = p.push(main_of(KernelId::kBwdFused90, size, size, sm90::BwdTile::kBlockM, t.block_n(), t.stages,
                             t.threads(), t.smem_bytes(size), g, ctas));
  l.dq = kDq, l.unit_heads = unit_heads, l.makes_stats = own_stats;
  const bool unequal = sm90::has_unequal_tiles(x);
  if (kShort) {
    p.q_splits = sm90::q_splits_of_short(x, d, r.constraints, l.tiles);
    l.tiles *= p.q_splits, l.ctas = std::min<int64_t>(l.tiles, ctas);
  }
  set_dynamic(l, unequal);
  if (kOrdered || pool) l.dynamic = true;
  if (!unequal && !kOrdered) l.rotate = t.rotation();
  p.zeroes_dq = unvisited;
  l.pdl = !own_stats && sm90::prefers_pdl(x);
  const bool adds = !kStored || x.is_varlen();
  if (!pool && adds) push_dq_convert(r, d, p, size, l.pdl, kDq);
  Workspace& w = p.workspace;
  if (!own_stats) add_row_stats(x, p, sm90::BwdTile::kBlockM);
  if (kOrdered) w.dq_semaphore = w.add(4 * ((sm90::query_tiles(x) + 3) / 4 * 4));
  w.pool_words = w.add(4 * pool.words());
  w.tile_counters = w.add(l.dynamic ? kCounterBytes : 0);
  if (kDq == DqMode::kAtomic && sm90::prefers_stream_k(x, d, l.tiles)) {
    l.dq = DqMode::kDivided;
    w.stream_k_words = w.add(4 * sm90::divided_tiles(x, l.tiles, l.ctas).tiles);
    w.stream_k_sums = w.add(4 * 2 * l.ctas * t.block_n() * size);
  }
  const int64_t dq_tiles = !adds ? 0 : pool ? pool.tiles(x) : sm90::query_tiles(x);
  w.dq_accum = w.add(4 * dq_tiles * sm90::BwdTile::kBlockM * size);
  if (p.q_splits > 1) push_head_sums(x, p, p.q_splits);
}

void build_portable(Req r, Dev d, Plan& p) {
  const Problem& x = r.problem;
  const int size = padded(x);
  const BwdTile t = bwd_tile_sm80(size, class_of(d));
  const DqMode dq = r.deterministic ? DqMode::kElsewhere : DqMode::kAtomic;
  push_portable_pass(r, d, p, KernelId::kRowStats80, dq, false);
  p.main = 1;
  Launch& l = p.push(main_of(KernelId::kBwd80, size, size, t.block_m, t.block_n(), t.stages, t.threads(),
                             t.smem_bytes(size), make_grid(x, d, false, t.block_n()), 0));
  l.smem_class = class_of(d);
  l.dq = dq;
  add_portable_stats(x, p);
  if (r.deterministic) {
    const BwdQTile q = bwd_q_tile_sm80(size);
    push_dq80(r, d, p, KernelId::kBwdDq80, q, q.smem_bytes(size));
  } else {
    push_portable_pass(r, d, p, KernelId::kDqConvert80, dq, false);
    p.workspace.dq_accum = p.workspace.add(4 * x.total_q * x.num_heads * size);
  }
}

// ---- with modifiers --------------------------------------------------------------------------------

bool drops(Req r) { return r.modifiers->rng != nullptr; }
// One kernel for dk, dv, dq and the gradient of a bias.
bool supports_short_mod(Req r, Dev d) {
  return is_short_bwd(r.problem, d, r.constraints) && (r.need_qkv || r.dbias != nullptr) &&
         (r.dbias == nullptr || r.dbias->is_of_places());
}
bool supports_others(Req r, Dev) { return !r.need_qkv; }
bool supports_fused_mod(Req r, Dev d) {
  return tma_bwd_mod(r, d) && !wants_split(r) && sm90::is_bwd_mod_taken(r.problem, *r.modifiers);
}
bool supports_split_mod(Req r, Dev d) {
  return tma_bwd_mod(r, d) && sm90::is_split_mod_taken(r.problem, *r.modifiers, r.deterministic);
}
// Masks of grouped heads, few rows: as prefers_split_bwd(). Evidence: grid.
bool prefers_fused_mod(Req r, Dev d) {
  const Problem& p = r.problem;
  const bool is_short = !p.is_varlen() && p.seqlen_k > 128 && std::max(p.seqlen_q, p.seqlen_k) <= 768;
  const bool hides_alone = !r.modifiers->has_score_mod && r.modifiers->rng == nullptr && r.dbias == nullptr;
  const bool gains = p.num_heads != p.num_heads_k && padded(p) == 128 && is_short && hides_alone;
  return !gains || d.batch_invariant || !supports_split_mod(r, d);
}
bool has_hopper_dbias(Req r, Dev d, Arch arch) {
  return arch == Arch::kSm90 && r.dbias != nullptr && tma_bwd_mod(r, d) &&
         sm90::is_bias_gradient_taken(r.problem, *r.modifiers, *r.dbias);
}

// A bias with an entry for each score has dS as its gradient, which the kernel that makes dK holds.
bool stores_dbias(Req r) {
  const Problem& x = r.problem;
  const BiasGradient* g = r.dbias;
  return g != nullptr && !x.is_varlen() && !g->sum_rows && !g->sum_cols && g->batch == x.batch &&
         g->heads == x.num_heads && g->rows == x.seqlen_q && g->cols == x.seqlen_k;
}

// The gradient of a bias that all rows share is dS summed over rows: that kernel has whole columns. Packed, its parts
// would grow with the number of sequences times the longest one.
bool sums_keys(Req r) {
  const BiasGradient* g = r.dbias;
  return g != nullptr && g->sum_rows && !g->sum_cols && !g->is_slope && !drops(r) && !r.problem.is_varlen();
}

ScoreVariant fused_variant(Req r) {
  const bool adds = r.modifiers->adds();
  if (r.modifiers->softcap > 0.f) return kCap;
  const bool is_float = r.modifiers->bias.ptr != nullptr && r.modifiers->bias.is_float;
  return drops(r) ? (adds ? kAddDrop : kDrop) : is_float ? kAddFloat : adds ? kAdd : kHide;
}
ScoreVariant split_variant(Req r) {
  const ScoreVariant v = fused_variant(r);
  return v == kDrop ? kAddDrop : v == kAddFloat ? kAdd : v;
}

bool supports_fused_wide(Req r, Dev d) {
  const ScoreVariant v = fused_variant(r);
  return supports_fused_mod(r, d) && !stores_dq(r, d) && sm90::bwd_mod_size(r.problem) == sm90::kWideModHeadDim &&
         (v == kHide || v == kAdd || v == kDrop || v == kCap);
}
bool prefers_fused_wide(Req r, Dev d) {
  return prefers_fused_mod(r, d) && sm90::prefers_wide_mod(r.problem, *r.modifiers, d, r.constraints);
}

// The gradient with its splits, for which it gets a part of the workspace.
BiasGradient in_splits(BiasGradient g, int splits, int& of_plan, Part& part, Workspace& w) {
  of_plan = g.splits = splits;
  if (splits > 1) part = w.add(int64_t{4} * splits * g.batch * g.heads * g.rows * g.cols);
  return g;
}
BiasGradient dbias_of(Req r, Dev d, Plan& p) {
  const int splits = splits_of_gradient(*r.dbias, r.problem, d);
  return in_splits(*r.dbias, splits, p.dbias_splits, p.workspace.dbias_partials, p.workspace);
}
BiasGradient dslopes_of(Req r, Dev d, Plan& p) {
  const int splits = splits_of_gradient(*r.dslopes, r.problem, d);
  return in_splits(*r.dslopes, splits, p.dslopes_splits, p.workspace.dslopes_partials, p.workspace);
}

// The portable statistics of rows, and the gradients that read them. dq: of the kernel behind, if it is portable.
void push_dbias80(Req r, Dev d, Plan& p, const BiasGradient& g, ScoreVariant of) {
  const int size = padded(r.problem);
  const BwdBiasTile t = bwd_bias_tile_sm80(class_of(d));
  const int64_t tiles = g.tiles(t.block_m(), t.block_n());
  // As many CTAs as run at a time.
  const int resident = std::max(d.num_sms, 1) * t.ctas_per_sm;
  Launch& l = p.push(main_of(KernelId::kDbias80, size, size, t.block_m(), t.block_n(), t.stages, t.threads(),
                             t.smem_bytes(), tiles, tiles > INT32_MAX ? 0 : resident));
  l.smem_class = class_of(d);
  l.variant = of;
}
void push_other_gradients(Req r, Dev d, Plan& p, bool dbias80, DqMode dq) {
  add_portable_stats(r.problem, p);
  push_portable_pass(r, d, p, KernelId::kRowStats80, dq, r.modifiers->follows_pass);
  if (dbias80) push_dbias80(r, d, p, dbias_of(r, d, p), kBias);
  if (r.dslopes != nullptr) push_dbias80(r, d, p, dslopes_of(r, d, p), kSlopes);
}
void push_hopper_dbias(Req r, Dev d, Plan& p) {
  const int size = sm90::dbias_size(r.problem);
  constexpr int kBlock = sm90::BwdBiasTile::kBlock;
  const bool staged = r.modifiers->bias.staged;
  p.push(main_of(KernelId::kDbias90, size, size, kBlock, kBlock, 0, sm90::BwdBiasTile::kThreads,
                 sm90::bwd_bias_tile(size, !staged).smem_bytes(size), dbias_of(r, d, p).tiles(kBlock, kBlock),
                 d.num_sms))
      .variant = staged ? kBias : kAll;
}

void build_short_mod(Req r, Dev d, Plan& p) {
  const ShortTile t = short_tile(r.problem);
  const ShortGrid g = short_bwd_grid(r.problem, r.modifiers->bias, r.dbias, d);
  push_short(p, KernelId::kBwdShort80, t, t.bwd_smem(), g, r.modifiers->follows_pass);
  if (r.dbias != nullptr) in_splits(*r.dbias, g.parts, p.dbias_splits, p.workspace.dbias_partials, p.workspace);
  if (r.dslopes != nullptr) push_dbias80(r, d, p, dslopes_of(r, d, p), kSlopes);
  add_portable_stats(r.problem, p);
}

void build_others(Req r, Dev d, Plan& p) {
  const bool dbias90 = has_hopper_dbias(r, d, p.arch);
  push_other_gradients(r, d, p, r.dbias != nullptr && !dbias90, DqMode::kNone);
  if (dbias90) push_hopper_dbias(r, d, p);
}

// shares_stats: with the kernels behind, for which they have been made.
void begin_hopper(Req r, Dev d, Plan& p, bool shares_stats = false) {
  const bool makes_dbias = r.dbias != nullptr && !p.dbias_with_dk;
  const bool dbias90 = makes_dbias && has_hopper_dbias(r, d, p.arch);
  if (!shares_stats && (makes_dbias || r.dslopes != nullptr || r.modifiers->sinks != nullptr)) {
    push_other_gradients(r, d, p, makes_dbias && !dbias90, DqMode::kNone);
  }
  if (dbias90) push_hopper_dbias(r, d, p);
}

void push_fused_mod(Req r, Dev d, Plan& p, const Modifiers& m, ScoreVariant v, bool wide = false) {
  const Problem& x = r.problem;
  const int size = sm90::bwd_mod_size(x);
  const auto beside = v == kAdd ? sm90::BesideScores::kBias : sm90::BesideScores::kWords;
  const sm90::BwdModTile t =
      wide ? sm90::wide_bwd_mod_tile(beside) : sm90::bwd_mod_tile(size, v == kAddFloat || v == kAddDrop);
  const bool unequal = sm90::has_unequal_tiles(x, m);
  const int block_n = t.block_n();
  Launch l =
      main_of(KernelId::kBwdFusedMod90, size, size, sm90::BwdModTile::kBlockM, block_n, t.stages,
              sm90::BwdModTile::kThreads, t.smem_bytes(size), sm90::bwd_grid(x, d, block_n, false, unequal), d.num_sms);
  l.variant = v, l.pdl = sm90::prefers_pdl(x);
  l.rotate = unequal ? 0 : block_n / sm90::BwdModTile::kBlockM;
  l.dq = stores_dq(r, d) ? DqMode::kStored : DqMode::kAtomic;
  p.zeroes_dq = l.dq == DqMode::kStored && !sm90::visits_all_queries(x, m);
  p.q_splits = sm90::q_splits_of(x, d, r.constraints, l.tiles, unequal);
  l.tiles *= p.q_splits, l.ctas = std::min<int64_t>(l.tiles, d.num_sms);
  set_dynamic(l, unequal);
  push_row_stats(r, d, p, KernelId::kRowStatsAndZero90, l.head_dim, l.head_dim, sm90::BwdTile::kBlockM, l.dq)
      .zeroes_half = l.dq == DqMode::kAtomic && l.head_dim == 64 && x.head_dim <= 32;
  p.main = p.num_launches;
  p.push(l);
  Workspace& w = p.workspace;
  add_row_stats(x, p, sm90::BwdTile::kBlockM);
  w.tile_counters = w.add(l.dynamic ? kCounterBytes : 0);
  if (!has_whole_keys(r)) {
    push_dq_convert(r, d, p, l.head_dim, l.pdl, l.dq);
    w.dq_accum = w.add(4 * sm90::query_tiles(r.problem) * sm90::BwdTile::kBlockM * l.head_dim);
  }
  if (p.q_splits > 1) push_head_sums(r.problem, p, p.q_splits);
}
void build_whole_keys(Req r, Dev d, Plan& p) { push_fused_mod(r, d, p, {}, kHide); }
template <bool kWide>
void build_fused_mod(Req r, Dev d, Plan& p) {
  const bool stores = stores_dbias(r), sums = sums_keys(r);
  p.dbias_with_dk = stores || sums;
  p.zeroes_dbias = sums || (stores && !sm90::visits_all_tiles(r.problem, *r.modifiers));
  begin_hopper(r, d, p);
  push_fused_mod(r, d, p, *r.modifiers, fused_variant(r), kWide);
  if (!sums) return;
  // In fp32, for each batch entry and head.
  const BiasGradient& g = *r.dbias;
  const Problem& x = r.problem;
  p.dbias_splits = p.q_splits * (g.batch == 1 ? x.batch : 1) * (g.heads == 1 ? x.num_heads : 1);
  p.workspace.dbias_partials = p.workspace.add(int64_t{4} * p.dbias_splits * g.batch * g.heads * g.cols);
}

void build_split_mod(Req r, Dev d, Plan& p) {
  const Problem& x = r.problem;
  const int size = sm90::split_mod_size(x);
  const sm90::SplitBwdTile t = sm90::split_mod_tile(size);
  const bool dynamic = sm90::has_unequal_tiles(x, *r.modifiers);
  const Modifiers& m = *r.modifiers;
  const bool shares_stats =
      size > 128 && r.dslopes == nullptr && m.sinks == nullptr && m.bias.staged && has_hopper_dbias(r, d, p.arch);
  if (!shares_stats) begin_hopper(r, d, p);
  push_row_stats(r, d, p, KernelId::kRowStats90, size, size, t.block_m, DqMode::kElsewhere);
  if (shares_stats) begin_hopper(r, d, p, true);
  p.main = p.num_launches;
  p.push(main_of(KernelId::kBwdDkdvMod90, size, size, t.block_m, sm90::SplitBwdTile::kKeys, t.stages,
                 sm90::SplitBwdTile::kThreads, sm90::dkdv_mod_bytes(size), sm90::dkdv_grid(x, d, dynamic), d.num_sms))
      .dq = DqMode::kElsewhere;
  p.push(main_of(KernelId::kBwdDqMod90, size, size, sm90::SplitBwdTile::kQueries, t.block_n, t.k_stages,
                 sm90::SplitBwdTile::kThreads, sm90::dq_mod_bytes(size), sm90::dq_grid(x, d, dynamic), d.num_sms));
  for (const int j : {0, 1}) {
    Launch& l = p.launches[p.main + j];
    set_dynamic(l, dynamic), l.variant = split_variant(r), l.pdl = sm90::prefers_pdl(x);
  }
  add_row_stats(x, p, t.block_m);
  p.workspace.tile_counters = p.workspace.add(dynamic ? 2 * kCounterBytes : 0);
}

void build_portable_mod(Req r, Dev d, Plan& p) {
  const Problem& x = r.problem;
  const bool dbias90 = has_hopper_dbias(r, d, p.arch), dbias80 = r.dbias != nullptr && !dbias90;
  const DqMode dq = r.deterministic ? DqMode::kElsewhere : DqMode::kAtomic;
  push_other_gradients(r, d, p, dbias80, dq);
  const int size = padded(x);
  const SmemClass c = class_of(d);
  const BwdTile t = bwd_mod_tile_sm80(size, c);
  p.main = p.num_launches;
  Launch& l = p.push(main_of(KernelId::kBwdMod80, size, size, t.block_m, t.block_n(), t.stages, t.threads(),
                             t.smem_bytes(size) + bwd_mod_extra_sm80(size, c), make_grid(x, d, false, t.block_n()), 0));
  l.smem_class = c;
  l.pdl = !dbias80 && r.dslopes == nullptr;
  l.dq = dq;
  Workspace& w = p.workspace;
  if (r.deterministic) {
    const BwdQTile q = bwd_q_mod_tile_sm80(size);
    const int smem = q.smem_bytes(size);
    push_dq80(r, d, p, KernelId::kBwdDqMod80, q,
              smem + bias_stage_bytes(q.warps, 16, q.block_n, smem, kSmemLimitSmall));
  } else {
    push_portable_pass(r, d, p, KernelId::kDqConvert80, dq, false);
  }
  w.dq_accum = w.add(r.deterministic ? 0 : 4 * x.total_q * x.num_heads * size);
  if (dbias90) push_hopper_dbias(r, d, p);
}

// ---- the tables ------------------------------------------------------------------------------------

using F = Family;
using E = Evidence;

constexpr Row kHopper[] = {
    {F::kBwd, "sm80.bwd.short", supports_short, prefers_short, build_short, E::kShort},
    {F::kBwd, "sm90.bwd.dq_stored_short", supports_stored_short, prefers_stored_short,
     build_fused<DqMode::kStored, true>, E::kWholeKeys},
    {F::kBwd, "sm90.bwd.split", supports_split, nullptr, build_split<false>, E::kSplitBwdWide},
    {F::kBwd, "sm90.bwd.whole_keys", supports_whole_keys, prefers_whole_keys, build_whole_keys, E::kWholeKeys},
    {F::kBwd, "sm90.bwd.dq_stored", supports_stored, prefers_stored, build_fused<DqMode::kStored>, E::kWholeKeys},
    {F::kBwd, "sm90.bwd.split_short", supports_fused, prefers_split_short, build_split<true>, E::kSplitBwdShort},
    {F::kBwd, "sm90.bwd.dq_ordered", supports_fused, prefers_ordered, build_fused<DqMode::kOrdered>, E::kOrderedShort},
    {F::kBwd, "sm90.bwd.dq_pool", supports_pool, nullptr, build_fused<DqMode::kPool>, E::kDqPool},
    {F::kBwd, "sm90.bwd.dq_atomic", supports_atomic, nullptr, build_fused<DqMode::kAtomic>, E::kGrid},
    {F::kBwd, "sm80.bwd", always, nullptr, build_portable, E::kNone},

    {F::kBwdMod, "sm80.bwd_mod.short", supports_short_mod, nullptr, build_short_mod, E::kShort},
    {F::kBwdMod, "bwd_mod.other_gradients", supports_others, nullptr, build_others, E::kNone},
    {F::kBwdMod, "sm90.bwd_mod.fused_wide", supports_fused_wide, prefers_fused_wide, build_fused_mod<true>,
     E::kFusedBwdMod},
    {F::kBwdMod, "sm90.bwd_mod.fused", supports_fused_mod, prefers_fused_mod, build_fused_mod<false>, E::kFusedBwdMod},
    {F::kBwdMod, "sm90.bwd_mod.split", supports_split_mod, nullptr, build_split_mod, E::kSplitBwdMod},
    {F::kBwdMod, "sm80.bwd_mod", always, nullptr, build_portable_mod, E::kNone},
};

constexpr Row kPortable[] = {
    {F::kBwd, "sm80.bwd.short", supports_short, nullptr, build_short, E::kShort},
    {F::kBwd, "sm80.bwd", always, nullptr, build_portable, E::kNone},
    {F::kBwdMod, "sm80.bwd_mod.short", supports_short_mod, nullptr, build_short_mod, E::kShort},
    {F::kBwdMod, "bwd_mod.other_gradients", supports_others, nullptr, build_others, E::kNone},
    {F::kBwdMod, "sm80.bwd_mod", always, nullptr, build_portable_mod, E::kNone},
};

static_assert(have_evidence(kHopper) && have_evidence(kPortable));

}  // namespace

std::span<const Row> bwd_rows(Arch arch) {
  return arch == Arch::kSm90 ? std::span<const Row>(kHopper) : std::span<const Row>(kPortable);
}

}  // namespace flash_ext::plans
