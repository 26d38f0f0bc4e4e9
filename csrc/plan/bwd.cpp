// The tables of the backwards.
#include "table.h"

namespace flash_ext::plans {
namespace {

using sm90::kCounterBytes;
using enum ScoreVariant;

// ---- what is asked ---------------------------------------------------------------------------------

bool is_wide(Req r) { return padded(r.problem) > 128; }
bool tma_bwd(Req r, Dev d) { return tma_fwd(r) && r.problem.head_dim % 8 == 0 && !is_short_bwd(r.problem, d); }
bool tma_bwd_mod(Req r, Dev d) { return tma_bwd(r, d) && r.problem.total_k > 0; }
bool has_whole_keys(Req r, Dev d) { return sm90::has_whole_keys(r.problem, d); }
// dQ has no place in the kernel over keys: too wide, or to be summed in a fixed order without being stored at once.
bool wants_split(Req r, Dev d, bool deterministic) { return is_wide(r) || (deterministic && !has_whole_keys(r, d)); }
// Whether dq is summed in memory, in whichever kernel.
bool sums_dq(Req r, Dev d, bool deterministic) { return !wants_split(r, d, deterministic) && !has_whole_keys(r, d); }

// ---- without modifiers -----------------------------------------------------------------------------

bool supports_short(Req r, Dev d) { return is_short_bwd(r.problem, d); }
bool supports_split(Req r, Dev d) { return tma_bwd(r, d) && is_wide(r); }
bool supports_fused(Req r, Dev d) { return tma_bwd(r, d) && !is_wide(r); }
bool supports_whole_keys(Req r, Dev d) { return supports_fused(r, d) && r.problem.total_k > 0 && has_whole_keys(r, d); }
bool supports_split_short(Req r, Dev d) { return supports_fused(r, d) && padded(r.problem) == 128; }
bool supports_atomic(Req r, Dev d) { return supports_fused(r, d) && !r.deterministic; }
bool supports_pool(Req r, Dev d) {
  return supports_atomic(r, d) && !r.problem.is_varlen() && sm90::dq_ring(r.problem, d, false);
}

bool prefers_whole_keys(Req r, Dev d) { return sm90::prefers_whole_keys(r.problem, d); }
bool prefers_split_short(Req r, Dev d) { return sm90::prefers_two_kernels(r.problem, d); }
bool prefers_ordered(Req r, Dev d) { return r.deterministic || sm90::prefers_order(r.problem, d); }

void add_row_stats(const Problem& p, Plan& plan, int block_m) {
  plan.workspace.row_stats = plan.workspace.add(4 * 2 * sm90::query_tiles(p, block_m) * block_m);
}
void add_portable_stats(const Problem& p, Plan& plan) {
  plan.workspace.stats_portable = plan.workspace.add(8 * p.total_q * p.num_heads);
}

void build_short(Req r, Dev d, Plan& p) {
  const ShortTile t = short_tile(r.problem);
  p.push(short_launch(KernelId::kBwdShort80, t, t.bwd_smem(), short_bwd_grid(r.problem, {}, nullptr, d), false));
  add_portable_stats(r.problem, p);
}

// dK and dV, then dQ.
template <bool kShort>
void build_split(Req r, Dev d, Plan& p) {
  struct Dims {
    int d, dv;
  };
  const Problem& x = r.problem;
  const bool dynamic = sm90::draws_items(x);
  const Dims f = kShort                                          ? Dims{128, 128}
                 : x.head_dim <= 192 && x.head_dim_v <= 128 ? Dims{192, 128}
                 : x.head_dim <= 192 && x.head_dim_v <= 192 ? Dims{192, 192}
                                                            : Dims{256, 256};
  const sm90::WideBwdTile t = sm90::wide_bwd_tile(f.d, f.dv);
  p.push(pass(KernelId::kRowStats90, f.d, f.dv));
  p.main = 1;
  if (kShort) {
    const sm90::BwdTile k = sm90::kShortKeysTile;
    p.push(main_of(KernelId::kBwdDkdvShort90, f.d, f.dv, sm90::BwdTile::kBlockM, k.block_n(), k.slots,
                   sm90::BwdTile::kThreads, k.smem_bytes(f.d), sm90::bwd_grid(x, d, k.block_n(), false).ctas, d.num_sms));
  } else {
    p.push(main_of(KernelId::kBwdDkdv90, f.d, f.dv, t.block_m, sm90::WideBwdTile::kKeys, t.slots,
                   sm90::WideBwdTile::kThreads, t.dkv_smem_bytes(f.d, f.dv), sm90::wide_keys_grid(x, d, dynamic).ctas,
                   d.num_sms));
  }
  p.launches[1].dq = DqMode::kElsewhere;
  p.push(main_of(KernelId::kBwdDq90, f.d, f.dv, 128, t.block_n, t.k_slots, sm90::WideBwdTile::kThreads,
                 t.dq_smem_bytes(f.d, f.dv), sm90::wide_queries_grid(x, d, dynamic).ctas, d.num_sms));
  for (const int j : {1, 2}) p.launches[j].dynamic = dynamic, p.launches[j].early = sm90::begins_early(x);
  add_row_stats(x, p, kShort ? sm90::BwdTile::kBlockM : t.block_m);
  p.workspace.tile_counters = p.workspace.add(dynamic ? 2 * kCounterBytes : 0);
}

template <DqMode kDq>
void build_fused(Req r, Dev d, Plan& p) {
  const Problem& x = r.problem;
  const int size = padded(x);
  constexpr bool kOrdered = kDq == DqMode::kOrdered;
  const sm90::BwdTile t = sm90::bwd_tile(size);
  const sm90::DqRing pool = kDq == DqMode::kPool ? sm90::dq_ring(x, d, false) : sm90::DqRing{};
  const Grid g = pool ? sm90::ring_grid(x, d, t.block_n(), pool) : sm90::bwd_grid(x, d, t.block_n(), kOrdered);
  p.push(pass(KernelId::kRowStatsAndZero90, size));
  p.main = 1;
  Launch& l = p.push(main_of(KernelId::kBwdFused90, size, size, sm90::BwdTile::kBlockM, t.block_n(), t.slots,
                             sm90::BwdTile::kThreads, t.smem_bytes(size), g.ctas, d.num_sms));
  l.dq = kDq;
  l.dynamic = kDq != DqMode::kAtomic || sm90::draws_items(x);
  l.early = sm90::begins_early(x);
  if (!pool) p.push(pass(KernelId::kDqConvert90, size, 0, l.early));
  Workspace& w = p.workspace;
  add_row_stats(x, p, sm90::BwdTile::kBlockM);
  if (kOrdered) w.dq_semaphore = w.add(4 * ((sm90::query_tiles(x) + 3) / 4 * 4));
  w.pool_words = w.add(4 * pool.words());
  w.tile_counters = w.add(l.dynamic ? kCounterBytes : 0);
  w.dq_accum = w.add(4 * (pool ? pool.tiles(x) : sm90::query_tiles(x)) * sm90::BwdTile::kBlockM * size);
}

void build_portable(Req r, Dev d, Plan& p) {
  const Problem& x = r.problem;
  const int size = padded(x);
  const BwdTile t = bwd_tile_sm80(size, class_of(d));
  p.push(pass(KernelId::kRowStats80, size));
  p.main = 1;
  p.push(main_of(KernelId::kBwd80, size, size, t.block_m, t.block_n(), t.stages, t.threads(), t.smem_bytes(size),
                 make_grid(x, d, false, t.block_n()).ctas, 0));
  add_portable_stats(x, p);
  if (r.deterministic) {
    const BwdQTile q = bwd_q_tile_sm80(size);
    p.push(main_of(KernelId::kBwdDq80, size, size, q.block_m(), q.block_n, q.stages, q.threads(), q.smem_bytes(size),
                   make_grid(x, d, true, q.block_m()).ctas, 0));
  } else {
    p.push(pass(KernelId::kDqConvert80, size));
    p.workspace.dq_accum = p.workspace.add(4 * x.total_q * x.num_heads * size);
  }
}

// ---- with modifiers --------------------------------------------------------------------------------

bool drops(Req r) { return r.modifiers->rng != nullptr; }
// One kernel for dk, dv, dq and the gradient of a bias.
bool supports_short_mod(Req r, Dev d) { return is_short_bwd(r.problem, d) && (r.need_qkv || r.dbias != nullptr); }
bool supports_others(Req r, Dev) { return !r.need_qkv; }
bool supports_fused_mod(Req r, Dev d) {
  return tma_bwd_mod(r, d) && !wants_split(r, d, r.deterministic) && sm90::is_bwd_mod_taken(r.problem, *r.modifiers);
}
bool supports_split_mod(Req r, Dev d) {
  return tma_bwd_mod(r, d) && sm90::is_wide_mod_taken(r.problem, *r.modifiers, r.deterministic);
}
bool supports_persistent(Req r, Dev d) {
  return has_hiding_bwd_sm80(padded(r.problem), class_of(d)) && !r.modifiers->is_natural;
}
bool has_hopper_dbias(Req r, Dev d, Arch arch) {
  return arch == Arch::kSm90 && r.dbias != nullptr && tma_bwd_mod(r, d) && !is_wide(r) &&
         sm90::is_bias_gradient_taken(r.problem, *r.modifiers, *r.dbias);
}

ScoreVariant fused_variant(Req r) {
  const bool adds = r.modifiers->slopes != nullptr || r.modifiers->bias.ptr != nullptr;
  if (r.modifiers->softcap > 0.f) return kCap;
  return drops(r) ? (adds ? kAddDrop : kDrop) : adds ? kAdd : kHide;
}
ScoreVariant split_variant(Req r) {
  const ScoreVariant v = fused_variant(r);
  return v == kDrop ? kAddDrop : v;
}

void add_workspace(Req r, Dev d, Plan& p) {
  const Problem& x = r.problem;
  Workspace& w = p.workspace;
  const bool no_sums = r.deterministic || !r.need_qkv;
  const int64_t schedule = has_hiding_bwd_sm80(padded(x), class_of(d)) ? 4 * bwd_schedule_words(x) : 0;
  if (p.arch == Arch::kSm80 || !tma_bwd_mod(r, d)) {
    add_portable_stats(x, p);
    w.schedule_words = w.add(schedule);
    w.dq_accum = w.add(no_sums || is_short_bwd(x, d) ? 0 : 4 * x.total_q * x.num_heads * padded(x));
    return;
  }
  // Enough for the portable kernels as well, which run what modifiers keep from those for Hopper: the words of their
  // schedule lie where the Hopper statistics, 128 a head or more, are then not needed.
  w.stats_portable = w.add(4 * sm90::portable_stats_elements(x));
  const bool sums = sums_dq(r, d, no_sums);
  add_row_stats(x, p, sums ? sm90::BwdTile::kBlockM : sm90::wide_mod_tile(sm90::wide_mod_size(x)).block_m);
  w.tile_counters = w.add(2 * kCounterBytes);
  w.dq_accum = w.add(sums ? 4 * sm90::query_tiles(x) * sm90::BwdTile::kBlockM * sm90::bwd_mod_size(x) : 0);
}

// The portable statistics of rows, and the gradients that read them.
void push_other_gradients(Req r, Plan& p, bool dbias80) {
  p.push(pass(KernelId::kRowStats80, padded(r.problem), 0, r.modifiers->follows_pass));
  if (dbias80) p.push(pass(KernelId::kDbias80, padded(r.problem)));
  if (r.dslopes != nullptr) p.push(pass(KernelId::kDbias80, padded(r.problem)));
}
void push_hopper_dbias(Req r, Plan& p) { p.push(pass(KernelId::kDbias90, sm90::bwd_mod_size(r.problem))); }

void build_short_mod(Req r, Dev d, Plan& p) {
  const ShortTile t = short_tile(r.problem);
  p.push(short_launch(KernelId::kBwdShort80, t, t.bwd_smem(), short_bwd_grid(r.problem, r.modifiers->bias, r.dbias, d),
                      r.modifiers->follows_pass));
  if (r.dslopes != nullptr) p.push(pass(KernelId::kDbias80, padded(r.problem)));
  add_workspace(r, d, p);
}

void build_others(Req r, Dev d, Plan& p) {
  add_workspace(r, d, p);
  const bool dbias90 = has_hopper_dbias(r, d, p.arch);
  push_other_gradients(r, p, r.dbias != nullptr && !dbias90);
  if (dbias90) push_hopper_dbias(r, p);
}

void begin_hopper(Req r, Dev d, Plan& p) {
  add_workspace(r, d, p);
  const bool dbias90 = has_hopper_dbias(r, d, p.arch);
  if (r.dbias != nullptr || r.dslopes != nullptr || r.modifiers->sinks != nullptr) {
    push_other_gradients(r, p, r.dbias != nullptr && !dbias90);
  }
  if (dbias90) push_hopper_dbias(r, p);
}

Launch fused_mod_launch(Req r, Dev d, const Modifiers& m, ScoreVariant v) {
  const Problem& x = r.problem;
  const int size = sm90::bwd_mod_size(x);
  const sm90::BwdModTile t = sm90::bwd_mod_tile(size);
  const bool dynamic = sm90::draws_items(x, m);
  constexpr int kBlockN = sm90::BwdModTile::kBlockN;
  Launch l = main_of(KernelId::kBwdFusedMod90, size, size, sm90::BwdModTile::kBlockM, kBlockN, t.slots,
                     sm90::BwdModTile::kThreads, t.smem_bytes(size), sm90::bwd_grid(x, d, kBlockN, false, dynamic).ctas,
                     d.num_sms);
  l.dynamic = dynamic, l.variant = v, l.early = sm90::begins_early(x);
  l.dq = has_whole_keys(r, d) ? DqMode::kStored : DqMode::kAtomic;
  return l;
}
void push_fused_mod(const Launch& l, Plan& p) {
  p.push(pass(KernelId::kRowStatsAndZero90, l.head_dim));
  p.main = p.num_launches;
  p.push(l);
  if (l.dq == DqMode::kAtomic) p.push(pass(KernelId::kDqConvert90, l.head_dim, 0, l.early));
}
void build_whole_keys(Req r, Dev d, Plan& p) {
  push_fused_mod(fused_mod_launch(r, d, {}, kHide), p);
  Workspace& w = p.workspace;
  add_row_stats(r.problem, p, sm90::BwdTile::kBlockM);
  w.tile_counters = w.add(2 * kCounterBytes);
  w.stats_portable = w.add(4 * sm90::portable_stats_elements(r.problem));
}
void build_fused_mod(Req r, Dev d, Plan& p) {
  begin_hopper(r, d, p);
  push_fused_mod(fused_mod_launch(r, d, *r.modifiers, fused_variant(r)), p);
}

void build_split_mod(Req r, Dev d, Plan& p) {
  begin_hopper(r, d, p);
  const Problem& x = r.problem;
  const int size = sm90::wide_mod_size(x);
  const sm90::WideBwdTile t = sm90::wide_mod_tile(size);
  const bool dynamic = sm90::draws_items(x, *r.modifiers);
  p.push(pass(KernelId::kRowStats90, size, size));
  p.main = p.num_launches;
  p.push(main_of(KernelId::kBwdDkdvMod90, size, size, t.block_m, sm90::WideBwdTile::kKeys, t.slots,
                 sm90::WideBwdTile::kThreads, sm90::wide_mod_keys_bytes(size), sm90::wide_keys_grid(x, d, dynamic).ctas,
                 d.num_sms)).dq = DqMode::kElsewhere;
  p.push(main_of(KernelId::kBwdDqMod90, size, size, 128, t.block_n, t.k_slots, sm90::WideBwdTile::kThreads,
                 sm90::wide_mod_queries_bytes(size), sm90::wide_queries_grid(x, d, dynamic).ctas, d.num_sms));
  for (const int j : {0, 1}) {
    Launch& l = p.launches[p.main + j];
    l.dynamic = dynamic, l.variant = split_variant(r), l.early = sm90::begins_early(x);
  }
}

template <bool kPersistent>
void build_portable_mod(Req r, Dev d, Plan& p) {
  const Problem& x = r.problem;
  add_workspace(r, d, p);
  const bool dbias90 = has_hopper_dbias(r, d, p.arch), dbias80 = r.dbias != nullptr && !dbias90;
  push_other_gradients(r, p, dbias80);
  const int size = padded(x);
  const SmemClass c = class_of(d);
  const BwdTile t = bwd_mod_tile_sm80(size, c, !kPersistent);
  p.main = p.num_launches;
  Launch& l = p.push(main_of(kPersistent ? KernelId::kBwdModPersistent80 : KernelId::kBwdMod80, size, size, t.block_m,
                             t.block_n(), t.stages, t.threads(),
                             t.smem_bytes(size) + bwd_mod_extra_sm80(size, c, !kPersistent),
                             make_grid(x, d, false, t.block_n()).ctas, kPersistent ? d.num_sms : 0));
  l.dynamic = kPersistent;
  l.early = !dbias80 && r.dslopes == nullptr;
  if (!p.workspace.dq_accum) {
    const BwdQTile q = bwd_q_mod_tile_sm80(size);
    p.push(main_of(KernelId::kBwdDqMod80, size, size, q.block_m(), q.block_n, q.stages, q.threads(),
                   q.smem_bytes(size) + bias_stage_bytes(q.warps, 16, q.block_n, q.smem_bytes(size), kSmemLimitSmall),
                   make_grid(x, d, true, q.block_m()).ctas, 0));
  } else if (kPersistent && !x.is_varlen() && l.tiles >= d.num_sms) {
    p.push(pass(KernelId::kDqConvertOverlapped80, size, 0, true));
  } else {
    p.push(pass(KernelId::kDqConvert80, size));
  }
  if (dbias90) push_hopper_dbias(r, p);
}

// ---- the tables ------------------------------------------------------------------------------------

using F = Family;
using E = Evidence;

constexpr Row kHopper[] = {
    {F::kBwd, "sm80.bwd.short", supports_short, nullptr, build_short, E::kShort},
    {F::kBwd, "sm90.bwd.split", supports_split, nullptr, build_split<false>, E::kSplitBwdWide},
    {F::kBwd, "sm90.bwd.whole_keys", supports_whole_keys, prefers_whole_keys, build_whole_keys, E::kWholeKeys},
    {F::kBwd, "sm90.bwd.split_short", supports_split_short, prefers_split_short, build_split<true>, E::kSplitBwdShort},
    {F::kBwd, "sm90.bwd.dq_ordered", supports_fused, prefers_ordered, build_fused<DqMode::kOrdered>, E::kOrderedShort},
    {F::kBwd, "sm90.bwd.dq_pool", supports_pool, nullptr, build_fused<DqMode::kPool>, E::kDqPool},
    {F::kBwd, "sm90.bwd.dq_atomic", supports_atomic, nullptr, build_fused<DqMode::kAtomic>, E::kNone},
    {F::kBwd, "sm80.bwd", always, nullptr, build_portable, E::kNone},

    {F::kBwdMod, "sm80.bwd_mod.short", supports_short_mod, nullptr, build_short_mod, E::kShort},
    {F::kBwdMod, "bwd_mod.other_gradients", supports_others, nullptr, build_others, E::kNone},
    {F::kBwdMod, "sm90.bwd_mod.fused", supports_fused_mod, nullptr, build_fused_mod, E::kFusedBwdMod},
    {F::kBwdMod, "sm90.bwd_mod.split", supports_split_mod, nullptr, build_split_mod, E::kSplitBwdMod},
    {F::kBwdMod, "sm80.bwd_mod.persistent", supports_persistent, nullptr, build_portable_mod<true>, E::kPersistentBwd},
    {F::kBwdMod, "sm80.bwd_mod", always, nullptr, build_portable_mod<false>, E::kNone},
};

constexpr Row kPortable[] = {
    {F::kBwd, "sm80.bwd.short", supports_short, nullptr, build_short, E::kShort},
    {F::kBwd, "sm80.bwd", always, nullptr, build_portable, E::kNone},
    {F::kBwdMod, "sm80.bwd_mod.short", supports_short_mod, nullptr, build_short_mod, E::kShort},
    {F::kBwdMod, "bwd_mod.other_gradients", supports_others, nullptr, build_others, E::kNone},
    {F::kBwdMod, "sm80.bwd_mod.persistent", supports_persistent, nullptr, build_portable_mod<true>, E::kPersistentBwd},
    {F::kBwdMod, "sm80.bwd_mod", always, nullptr, build_portable_mod<false>, E::kNone},
};

}  // namespace

std::span<const Row> bwd_rows(Arch arch) {
  return arch == Arch::kSm90 ? std::span<const Row>(kHopper) : std::span<const Row>(kPortable);
}

}  // namespace flash_ext::plans
