// The tables of the forwards.
#include "../sm90/fwd_fp8/tiles.h"
#include "cached.h"
#include "split_kv.h"

namespace flash_ext::plans {
namespace {

using sm90::HeadDims;
using enum ScoreVariant;

// ---- without modifiers -----------------------------------------------------------------------------

// Above 64 rows of head_dim 128 biases in fp32 and those that heads share are left to other kernels. Whether batch
// entries share one does not decide: a batch of one would be rounded otherwise than a larger one. Evidence: short.
bool supports_short(Req r, Dev d) {
  if (!is_short_mod(r.problem, d, r.constraints)) return false;
  const ShortTile t = short_tile(r.problem);
  const bool is_large = t.rows > 64 && t.head_dim > 80;
  if (!is_large || r.modifiers == nullptr) return true;
  const BiasView& bias = r.modifiers->bias;
  return bias.ptr == nullptr || (!bias.is_float && bias.head_stride != 0);
}
bool prefers_short(Req r, Dev d) { return is_short(r.problem, d, r.constraints); }
bool supports_m64(Req r, Dev) { return tma_fwd(r) && hopper_dims(r.problem).d == 64; }
bool prefers_m64(Req r, Dev d) { return sm90::prefers_m64(r.problem, d, r.constraints); }
bool takes_m64(Req r, Dev d) { return supports_m64(r, d) && prefers_m64(r, d); }
// Sequences that fit a tile of 128 queries and keys are faster in one of 192, but for many causal ones of more than 64.
// Evidence: grid.
bool takes_one_tall_tile(Req r, Dev d) {
  const Problem& p = r.problem;
  if (!r.constraints.short_kernels || r.constraints.fwd_block_m || hopper_dims(p).d <= 64) return false;
  const int longer = std::max(p.seqlen_q, p.seqlen_k);
  const bool causal = p.window_left < 0 && p.window_right == 0;
  const bool few = int64_t{p.batch} * p.num_heads <= 8 * d.num_sms;
  return !p.is_varlen() && longer <= 128 && (longer <= 64 || !causal || few);
}
bool prefers_short_on_hopper(Req r, Dev d) {
  const int size = hopper_dims(r.problem).d;
  const bool is_tall = size > 64 && size <= 128 && std::max(r.problem.seqlen_q, r.problem.seqlen_k) > 32;
  return prefers_short(r, d) && !takes_m64(r, d) && !(is_tall && tma_fwd(r));
}
bool supports_m128(Req r, Dev) { return tma_fwd(r) && hopper_dims(r.problem).d <= 128; }
bool prefers_m128(Req r, Dev d) {
  return !takes_one_tall_tile(r, d) && sm90::takes_m128(r.problem, d, r.constraints, sm90::M128Cost::plain(r.problem));
}
bool supports_m192(Req r, Dev) {
  const HeadDims x = hopper_dims(r.problem);
  return tma_fwd(r) && sm90::fwd_tile(x.d, x.dv).block_m() == 192;
}
bool supports_tma(Req r, Dev) { return tma_fwd(r); }

bool prefers_split_kv(Req r, Dev d) {
  const bool is_long = r.constraints.short_kernels || few_queries(r.problem).keys >= kLeastKeysOfLong;
  if (!is_long && !r.constraints.kv_splits) return false;
  return make_split_grid(r.problem, d, r.constraints.kv_splits).rows > 0;
}
// What it gains is counted beside tiles of 192 queries, which are slower there than those of 128. Tiles of 64 are as
// fast where they have all keys, and beside more than 16 rows.
bool prefers_split_kv_on_hopper(Req r, Dev d) {
  const Problem& p = r.problem;
  const bool small = !r.constraints.kv_splits && takes_m64(r, d);
  const SplitGrid g = make_split_grid(p, d, r.constraints.kv_splits, small ? kStartOfSmall : kStart);
  if (small && (g.rows > 16 || (p.num_heads == p.num_heads_k && p.seqlen_k <= 64))) return false;
  return g.rows > 0 && (g.gain >= 1.25 || !(supports_m128(r, d) && prefers_m128(r, d)));
}

// Where keys are to be split, and rows are more than the smallest tile of that has; and where up to 64 queries of each
// head would leave tiles of one head half empty, and those are more than go at once. With few key heads of 64 columns
// the split-KV kernel is faster. Evidence: split-kv.
bool prefers_packed(Req r, Dev d) {
  const Problem& p = r.problem;
  const FewQueries few = few_queries(p);
  const bool is_small =
      std::max(p.head_dim, p.head_dim_v) <= 64 && 4 * p.batch * p.num_heads_k < d.num_sms && few.rows <= 128;
  if (d.batch_invariant || is_small) return false;
  const SplitGrid g = make_split_grid(p, d, r.constraints.kv_splits);
  if (g.rows > 16 && prefers_split_kv_on_hopper(r, d)) return true;
  const int group = p.num_heads / p.num_heads_k;
  return group > 1 && r.constraints.kv_splits != 0 && few.keys >= 1024 && few.rows <= 64 * group &&
         few.tiles > d.num_sms;
}

void build_short(Req r, Dev d, Plan& p) {
  const ShortTile t = short_tile(r.problem);
  const BiasView bias = r.modifiers == nullptr ? BiasView{} : r.modifiers->bias;
  push_short(p, KernelId::kFwdShort80, t, t.fwd_smem(), short_fwd_grid(r.problem, bias, d),
             r.modifiers != nullptr && r.modifiers->follows_pass);
}

void build_split_kv(Req r, Dev d, Plan& p) {
  const SplitGrid g = make_split_grid(r.problem, d, r.constraints.kv_splits);
  const int size = split_padded(r.problem);
  const SplitTile t = split_tile(size, g.rows);
  const KernelId kernel = r.modifiers == nullptr ? KernelId::kFwdSplitKv80 : KernelId::kFwdSplitMod80;
  p.push(main_of(kernel, size, size, t.rows, t.block_n(), t.stages / 2, SplitTile::kThreads, t.smem_bytes(size), g.ctas,
                 0))
      .pdl = r.modifiers != nullptr && r.modifiers->follows_pass;
  p.split_kv = g;
  p.kv_splits = g.splits;
  if (g.splits > 1) {
    // The machine code for Hopper waits for the kernel before by itself.
    p.push(pass(KernelId::kFwdCombine80, size, size, merge_ctas(g.total_rows, g.splits), SplitTile::kThreads,
                p.arch == Arch::kSm90));
  }
  p.workspace.kv_partials = p.workspace.add(g.workspace_bytes());
}

template <int kMostRows>
void build_hopper(Req r, Dev d, Plan& p) {
  const HeadDims x = hopper_dims(r.problem);
  const sm90::FwdTile t = sm90::fwd_tile(x.d, x.dv, kMostRows);
  const int ctas = d.num_sms * t.ctas, heads = r.problem.num_heads;
  const int unit_heads = x.d <= 128 ? sm90::unit_heads_of(r.problem, heads, ctas) : 1;
  const Grid grid = unit_heads > 1 ? sm90::unit_grid(r.problem, d, true, t.block_m(), unit_heads)
                                   : sm90::fwd_grid(r.problem, d, t.block_m());
  Launch& l = p.push(main_of(KernelId::kFwd90, x.d, x.dv, t.block_m(), t.block_n, t.kv_stages / 2, t.threads(),
                             t.smem_bytes(x.d, x.dv), grid, ctas));
  l.unit_heads = unit_heads;
  set_dynamic(p, l, sm90::has_unequal_tiles(r.problem) || sm90::prefers_dynamic(r.problem, d, t.block_m()));
  add_stretches(p, sm90::has_long_keys(r.problem), l.ctas, t, x.dv);
}

bool supports_parts(Req r, Dev d) {
  return supports_m128(r, d) && sm90::parts_of_tiles(r.problem, d, r.constraints) > 1;
}
bool prefers_parts(Req r, Dev d) { return !r.constraints.kv_splits && !r.constraints.fwd_block_m && !takes_m64(r, d); }

void build_parts(Req r, Dev d, Plan& p) {
  const Problem& x = r.problem;
  const int size = hopper_dims(x).d, merge_size = split_padded(x);
  const sm90::FwdTile t = sm90::fwd_tile(size, size, 128);
  Launch& l = p.push(main_of(KernelId::kFwdParts90, size, size, t.block_m(), t.block_n, t.kv_stages / 2, t.threads(),
                             t.smem_bytes(size, size), sm90::fwd_grid(x, d, t.block_m()), 0));
  const int64_t rows = x.total_q * x.num_heads;
  add_kv_partials(x, p, sm90::parts_of_tiles(x, d, r.constraints), rows);
  p.split_kv.queries = Divisor(static_cast<uint32_t>(x.seqlen_q));
  l.tiles = l.grid.ctas * p.kv_splits;
  l.ctas = std::min<int64_t>(l.tiles, d.num_sms);
  set_dynamic(p, l, sm90::has_unequal_tiles(x) || sm90::prefers_dynamic(x, d, t.block_m()));
  p.push(
      pass(KernelId::kFwdCombine80, merge_size, merge_size, merge_ctas(rows, p.kv_splits), SplitTile::kThreads, true));
}

// ---- with operands in e4m3 ---------------------------------------------------------------------------

bool is_mixed(Req r) { return r.operands == Operands::kMixed; }
// Of its instances the smallest; d is 0 where there is none.
HeadDims fp8_dims(Req r) {
  using sm90::kFp8Dims, sm90::kMixedDims;
  for (const HeadDims x : is_mixed(r) ? std::span<const HeadDims>(kMixedDims) : std::span<const HeadDims>(kFp8Dims)) {
    if (r.problem.head_dim <= x.d && r.problem.head_dim_v <= x.dv) return {x.d, x.dv};
  }
  return {0, 0};
}
bool supports_fp8(Req r, Dev) { return tma_fwd(r) && fp8_dims(r).d > 0; }

// What the kernel for these sizes takes the operands for.
Operands fp8_operands(Req r, HeadDims x) {
  const auto is_x = [&](HeadDims y) { return y.d == x.d && y.dv == x.dv; };
  return r.operands == Operands::kSmallFp8 && std::ranges::none_of(sm90::kSmallFp8Dims, is_x) ? Operands::kFp8
                                                                                              : r.operands;
}

void build_fp8(Req r, Dev d, Plan& p) {
  const HeadDims x = fp8_dims(r);
  const Operands operands = fp8_operands(r, x);
  const sm90::Fp8Tile t = sm90::fp8_tile(x.d, x.dv, operands);
  const sm90::FwdTile f = t.plain();
  Launch& l =
      p.push(main_of(KernelId::kFwdFp890, x.d, x.dv, f.block_m(), f.block_n, t.kv_stages / 2, f.threads(),
                     t.smem_bytes(x.d, x.dv, is_mixed(r)), sm90::fwd_grid(r.problem, d, f.block_m()), d.num_sms));
  l.variant = is_mixed(r) ? kMixed : operands == Operands::kSmallFp8 ? kHalf : kPlain;
  const bool unequal = r.has_own_lengths || sm90::has_unequal_tiles(r.problem);
  set_dynamic(p, l, unequal || sm90::prefers_dynamic(r.problem, d, f.block_m()));
  add_stretches(p, sm90::has_long_keys(r.problem), d.num_sms, f, x.dv);
}

void build_portable(Req r, Dev d, Plan& p) {
  const int size = padded(r.problem);
  const bool in_stretches = takes_stretches_sm80(r.problem);
  const SmemClass c = class_of(d);
  const FwdTile t = fwd_tile_sm80(size, c, in_stretches);
  Launch& l = p.push(main_of(KernelId::kFwd80, size, size, t.block_m, t.block_n, t.stages, t.threads(),
                             t.smem_bytes(size), make_grid(r.problem, d, true, t.block_m), 0));
  l.smem_class = c;
  if (in_stretches) l.variant = ScoreVariant::kStretches;
  p.workspace.kv_stretches = p.workspace.add(in_stretches ? 4 * l.ctas * kept_floats_sm80(t, size) : 0);
}

// ---- with modifiers --------------------------------------------------------------------------------

int masked_dim(const Problem& p) {
  const int x = std::max(p.head_dim, p.head_dim_v);
  return x <= 64 ? 64 : x <= 128 ? 128 : x <= 192 ? 192 : 256;
}
// TMA wants an address, which keys that are not there do not have.
bool supports_mod(Req r, Dev) { return tma_fwd(r) && r.problem.total_k > 0; }
bool supports_mod_128(Req r, Dev d) { return supports_mod(r, d) && masked_dim(r.problem) == 128; }
bool changes(Req r) { return r.modifiers->has_score_mod || factor_of(r.problem) != 1.f; }
bool drops(Req r) { return r.modifiers->rng != nullptr; }
bool supports_split_mod(Req r, Dev d) { return !drops(r) && prefers_split_kv(r, d); }
// Modifiers cost 64 rows about as much as their products.
bool prefers_split_mod(Req r, Dev d) {
  const SplitGrid g = make_split_grid(r.problem, d, r.constraints.kv_splits);
  return g.rows <= 16 || g.gain >= 2.;
}
bool has_one_change(Req r) {
  const Modifiers& m = *r.modifiers;
  return (m.softcap > 0.f) + static_cast<bool>(m.by_distance) + (m.bias.ptr != nullptr) == 1 && m.rng == nullptr;
}
bool supports_hide(Req r, Dev d) { return supports_mod(r, d) && !changes(r) && !drops(r); }
bool supports_hide_m192(Req r, Dev d) { return supports_hide(r, d) && sm90::has_m192(masked_dim(r.problem)); }
bool changes_exponents(Req r) { return has_one_change(r) && r.modifiers->bias.ptr == nullptr; }
bool supports_exponents(Req r, Dev d) { return supports_mod_128(r, d) && changes_exponents(r); }
bool supports_bias_alone(Req r, Dev d) {
  return supports_mod(r, d) && sm90::has_bias_kinds(masked_dim(r.problem)) && has_one_change(r) &&
         r.modifiers->bias.ptr != nullptr;
}
bool supports_bias(Req r, Dev d) {
  const int block_m = sm90::fwd_mod_tile(masked_dim(r.problem)).plain().block_m();
  return supports_bias_alone(r, d) && sm90::staged_bias_rows(r.modifiers->bias, r.problem, block_m) > 0;
}
bool supports_bias_m192(Req r, Dev d) {
  return supports_bias(r, d) && sm90::has_m192(masked_dim(r.problem)) && !r.modifiers->bias.is_loose;
}
// Rows have no other words there.
bool supports_words_m192(Req r, Dev d) {
  const Modifiers& m = *r.modifiers;
  return supports_hide_m192(r, d) && m.mask.words != nullptr && !asks_any<kMadeRowWords>(m);
}
bool supports_loose_bias(Req r, Dev d) { return supports_bias_alone(r, d) && r.modifiers->bias.is_loose; }
bool supports_float_bias(Req r, Dev d) {
  const BiasView& x = r.modifiers->bias;
  return supports_bias_alone(r, d) && x.is_float && x.aligned && x.row_stride != 0;
}
bool supports_drop(Req r, Dev d) { return supports_mod_128(r, d) && drops(r) && !changes(r); }
bool supports_m192_changes(Req r, Dev d) { return supports_mod(r, d) && sm90::has_m192(masked_dim(r.problem)); }
bool supports_slopes_m192(Req r, Dev d) {
  return supports_m192_changes(r, d) && changes_exponents(r) && r.modifiers->by_distance;
}
bool supports_cap_m192(Req r, Dev d) {
  return supports_m192_changes(r, d) && changes_exponents(r) && r.modifiers->softcap > 0.f;
}
bool supports_drop_m192(Req r, Dev d) { return supports_m192_changes(r, d) && drops(r) && !changes(r); }

bool prefers_slopes_m192(Req r, Dev d) { return sm90::prefers_m192_slopes(r.problem, *r.modifiers, d, r.constraints); }
bool prefers_cap_m192(Req r, Dev d) { return sm90::prefers_m192_cap(r.problem, *r.modifiers, d, r.constraints); }
bool prefers_drop_m192(Req r, Dev d) { return sm90::prefers_m192_drops(r.problem, *r.modifiers, d, r.constraints); }
bool supports_float_bias_m192(Req r, Dev d) {
  return supports_float_bias(r, d) && sm90::has_m192_float_bias(masked_dim(r.problem));
}
bool prefers_bias_m192(Req r, Dev d) {
  return sm90::prefers_m192_bias(r.problem, *r.modifiers, d, r.constraints, sm90::M128Cost::beside(r.problem));
}
bool prefers_loose_bias_m192(Req r, Dev d) {
  return sm90::prefers_m192_bias(r.problem, *r.modifiers, d, r.constraints, sm90::M128Cost::loose_bias(r.problem));
}
bool prefers_float_bias_m192(Req r, Dev d) {
  return sm90::prefers_m192_bias(r.problem, *r.modifiers, d, r.constraints, sm90::M128Cost::float_bias(r.problem));
}
bool prefers_words_m192(Req r, Dev d) { return sm90::prefers_m192_words(r.problem, *r.modifiers, d, r.constraints); }
bool prefers_hide_m192(Req r, Dev d) { return sm90::prefers_m192(r.problem, *r.modifiers, d, r.constraints); }

// The same rows with tiles of 128 keys.
template <bool (*kOfOthers)(Req, Dev)>
bool supports_wide(Req r, Dev d) {
  return kOfOthers(r, d) && sm90::has_wide_m192(masked_dim(r.problem));
}
template <bool (*kOfOthers)(Req, Dev)>
bool prefers_wide(Req r, Dev d) {
  return kOfOthers(r, d) && sm90::prefers_wide_tiles(r.problem, *r.modifiers, d, r.constraints);
}

template <bool kM192, ScoreVariant kVariant, bool kWide>
constexpr sm90::FwdModTile mod_tile(int size) {
  if (kVariant == kWords) return sm90::m192_words_tile(size);
  if (kVariant == kLooseBias) return kM192 ? sm90::m192_loose_bias_tile(size) : sm90::loose_bias_tile(size);
  if (kVariant == kFloatBias) return kM192 ? sm90::m192_float_bias_tile(size) : sm90::float_bias_tile(size);
  if (kVariant == kDrop && kM192) return sm90::m192_mod_tile(size, sm90::has_wide_m192(size));
  if (kM192) return kVariant == kBias ? sm90::m192_bias_tile(size, kWide) : sm90::m192_mod_tile(size, kWide);
  return sm90::fwd_mod_tile(size);
}

template <bool kM192, ScoreVariant kVariant, bool kWide = false>
void build_hopper_mod(Req r, Dev d, Plan& p) {
  const int size = masked_dim(r.problem);
  const sm90::FwdModTile t = mod_tile<kM192, kVariant, kWide>(size);
  const sm90::FwdTile f = t.plain();
  const bool unequal = sm90::has_unequal_tiles(r.problem, *r.modifiers);
  Launch& l = p.push(main_of(KernelId::kFwdMod90, size, size, f.block_m(), f.block_n, t.kv_stages / 2, f.threads(),
                             t.smem_bytes(size, size), sm90::fwd_grid(r.problem, d, f.block_m(), unequal), d.num_sms));
  l.variant = kVariant;
  l.bias_rows =
      kVariant == kFloatBias ? f.block_m() : sm90::staged_bias_rows(r.modifiers->bias, r.problem, f.block_m());
  set_dynamic(p, l, unequal || sm90::prefers_dynamic(r.problem, d, f.block_m()));
}

ScoreVariant portable_variant(Req r, Dev d) {
  if (!has_fwd_mod_kinds(padded(r.problem), class_of(d))) return kAll;
  const Modifiers& m = *r.modifiers;
  if (!m.has_score_mod) return factor_of(r.problem) != 1.f ? kAll : drops(r) ? kDrop : kHide;
  const bool far_bias = m.bias.ptr != nullptr && !m.bias.staged;
  return drops(r) || far_bias || m.softcap > kFineSoftcap ? kAll : kChange;
}
FwdModKind kind_of(ScoreVariant v) {
  return v == kHide     ? FwdModKind::kHides
         : v == kDrop   ? FwdModKind::kDrops
         : v == kChange ? FwdModKind::kChanges
                        : FwdModKind::kEverything;
}
void build_portable_mod(Req r, Dev d, Plan& p) {
  const int size = padded(r.problem);
  const SmemClass c = class_of(d);
  const ScoreVariant v = portable_variant(r, d);
  const FwdTile t = fwd_mod_tile_sm80(size, c, kind_of(v));
  const bool stages_bias = v == kChange || v == kAll;
  const int bias =
      stages_bias ? bias_stage_bytes(t.warps, 16 * t.m_blocks(), t.part_n(), t.smem_bytes(size), smem_limit(c)) : 0;
  Launch& l = p.push(main_of(KernelId::kFwdMod80, size, size, t.block_m, t.block_n, t.stages, t.threads(),
                             t.smem_bytes(size) + bias, make_grid(r.problem, d, true, t.block_m), 0));
  l.variant = v;
  l.smem_class = c;
  l.pdl = r.modifiers->follows_pass;
}

// ---- the tables ------------------------------------------------------------------------------------

using F = Family;
using E = Evidence;

constexpr Row kHopper[] = {
    {F::kFwd, "sm90.fwd.parts", supports_parts, prefers_parts, build_parts, E::kFwdParts},
    {F::kFwd, "sm90.fwd.packed", supports_packed_dense, prefers_packed, build_packed_dense, E::kSplitKv},
    {F::kFwd, "sm80.fwd.split_kv", prefers_split_kv, prefers_split_kv_on_hopper, build_split_kv, E::kSplitKv},
    {F::kFwd, "sm80.fwd.short", supports_short, prefers_short_on_hopper, build_short, E::kShort},
    {F::kFwd, "sm90.fwd.m64", supports_m64, prefers_m64, build_hopper<64>, E::kM64},
    {F::kFwd, "sm90.fwd.m128", supports_m128, prefers_m128, build_hopper<128>, E::kGrid},
    {F::kFwd, "sm90.fwd.m192", supports_m192, nullptr, build_hopper<192>, E::kM192},
    {F::kFwd, "sm90.fwd.m128_wide", supports_tma, nullptr, build_hopper<192>, E::kNone},
    {F::kFwd, "sm80.fwd", always, nullptr, build_portable, E::kNone},
    {F::kFwdCached, "sm90.fwd_cached.latent", supports_latents, nullptr, build_latents, E::kNone},
    {F::kFwdCached, "sm90.fwd_cached.packed_quantized", supports_packed_quantized, prefers_packed_cached, build_packed,
     E::kPaged},
    {F::kFwdCached, "sm80.fwd_cached.quantized", supports_quantized, nullptr, build_quantized, E::kNone},
    {F::kFwdCached, "sm90.fwd_cached.packed_mod", supports_packed_mod, prefers_packed_cached, build_packed, E::kPaged},
    {F::kFwdCached, "sm80.fwd_cached.mod", supports_cached_mod, nullptr, build_cached_mod, E::kNone},
    {F::kFwdCached, "sm90.fwd_cached.packed", supports_packed, prefers_packed_cached, build_packed, E::kPaged},
    {F::kFwdCached, "sm90.fwd_cached", supports_cached_tma, nullptr, build_cached_hopper, E::kPaged},
    {F::kFwdCached, "sm80.fwd_cached", supports_cached, nullptr, build_cached_portable, E::kNone},

    {F::kFwdFp8, "sm90.fwd_fp8", supports_fp8, nullptr, build_fp8, E::kNone},

    {F::kFwdMod, "sm80.fwd_mod.split_kv", supports_split_mod, prefers_split_mod, build_split_kv, E::kSplitKv},
    {F::kFwdMod, "sm80.fwd_mod.short", supports_short, nullptr, build_short, E::kShort},
    {F::kFwdMod, "sm90.fwd_mod.m192_wide.slopes", supports_wide<supports_slopes_m192>,
     prefers_wide<prefers_slopes_m192>, build_hopper_mod<true, kSlopes, true>, E::kMaskedM192},
    {F::kFwdMod, "sm90.fwd_mod.m192_wide.cap", supports_wide<supports_cap_m192>, prefers_wide<prefers_cap_m192>,
     build_hopper_mod<true, kCap, true>, E::kMaskedM192},
    {F::kFwdMod, "sm90.fwd_mod.m192_wide.bias", supports_wide<supports_bias_m192>, prefers_wide<prefers_bias_m192>,
     build_hopper_mod<true, kBias, true>, E::kMaskedM192},
    {F::kFwdMod, "sm90.fwd_mod.m192_wide.hide", supports_wide<supports_hide_m192>, prefers_wide<prefers_hide_m192>,
     build_hopper_mod<true, kHide, true>, E::kMaskedM192},
    {F::kFwdMod, "sm90.fwd_mod.m192.slopes", supports_slopes_m192, prefers_slopes_m192, build_hopper_mod<true, kSlopes>,
     E::kMaskedM192},
    {F::kFwdMod, "sm90.fwd_mod.m192.cap", supports_cap_m192, prefers_cap_m192, build_hopper_mod<true, kCap>,
     E::kMaskedM192},
    {F::kFwdMod, "sm90.fwd_mod.m192.drop", supports_drop_m192, prefers_drop_m192, build_hopper_mod<true, kDrop>,
     E::kMaskedM192},
    {F::kFwdMod, "sm90.fwd_mod.m192.loose_bias", supports_loose_bias, prefers_loose_bias_m192,
     build_hopper_mod<true, kLooseBias>, E::kMaskedM192},
    {F::kFwdMod, "sm90.fwd_mod.m192.bias", supports_bias_m192, prefers_bias_m192, build_hopper_mod<true, kBias>,
     E::kMaskedM192},
    {F::kFwdMod, "sm90.fwd_mod.m192.float_bias", supports_float_bias_m192, prefers_float_bias_m192,
     build_hopper_mod<true, kFloatBias>, E::kMaskedM192},
    {F::kFwdMod, "sm90.fwd_mod.m192.words", supports_words_m192, prefers_words_m192, build_hopper_mod<true, kWords>,
     E::kMaskedM192},
    {F::kFwdMod, "sm90.fwd_mod.m192.hide", supports_hide_m192, prefers_hide_m192, build_hopper_mod<true, kHide>,
     E::kMaskedM192},
    {F::kFwdMod, "sm90.fwd_mod.m128.exponents", supports_exponents, nullptr, build_hopper_mod<false, kExponents>,
     E::kMaskedVariants},
    {F::kFwdMod, "sm90.fwd_mod.m128.loose_bias", supports_loose_bias, nullptr, build_hopper_mod<false, kLooseBias>,
     E::kMaskedVariants},
    {F::kFwdMod, "sm90.fwd_mod.m128.float_bias", supports_float_bias, nullptr, build_hopper_mod<false, kFloatBias>,
     E::kMaskedVariants},
    {F::kFwdMod, "sm90.fwd_mod.m128.bias", supports_bias, nullptr, build_hopper_mod<false, kBias>, E::kMaskedVariants},
    {F::kFwdMod, "sm90.fwd_mod.m128.drop", supports_drop, nullptr, build_hopper_mod<false, kDrop>, E::kMaskedVariants},
    {F::kFwdMod, "sm90.fwd_mod.m128.hide", supports_hide, nullptr, build_hopper_mod<false, kHide>, E::kMaskedVariants},
    {F::kFwdMod, "sm90.fwd_mod.m128.all", supports_mod, nullptr, build_hopper_mod<false, kAll>, E::kNone},
    {F::kFwdMod, "sm80.fwd_mod", always, nullptr, build_portable_mod, E::kNone},
};

constexpr Row kPortable[] = {
    {F::kFwd, "sm80.fwd.short", supports_short, prefers_short, build_short, E::kShort},
    {F::kFwd, "sm80.fwd.split_kv", prefers_split_kv, nullptr, build_split_kv, E::kSplitKv},
    {F::kFwd, "sm80.fwd", always, nullptr, build_portable, E::kNone},
    {F::kFwdCached, "sm80.fwd_cached.quantized", supports_quantized, nullptr, build_quantized, E::kNone},
    {F::kFwdCached, "sm80.fwd_cached.mod", supports_cached_mod, nullptr, build_cached_mod, E::kNone},
    {F::kFwdCached, "sm80.fwd_cached", supports_cached, nullptr, build_cached_portable, E::kNone},
    {F::kFwdMod, "sm80.fwd_mod.short", supports_short, nullptr, build_short, E::kShort},
    {F::kFwdMod, "sm80.fwd_mod.split_kv", supports_split_mod, prefers_split_mod, build_split_kv, E::kSplitKv},
    {F::kFwdMod, "sm80.fwd_mod", always, nullptr, build_portable_mod, E::kNone},
};

static_assert(have_evidence(kHopper) && have_evidence(kPortable));

}  // namespace

std::span<const Row> fwd_rows(Arch arch) {
  return arch == Arch::kSm90 ? std::span<const Row>(kHopper) : std::span<const Row>(kPortable);
}

}  // namespace flash_ext::plans
