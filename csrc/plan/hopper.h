// What the tables prefer on Hopper, by measurement: the order of work tiles, and which forward; hopper_bwd.h has the
// backward. No CUDA, no torch.
#pragma once

#include <numeric>

#include "../grid.h"
#include "../sm90/bwd_split/tiles.h"
#include "../sm90/bwd_split/tiles_mod.h"

namespace flash_ext::sm90 {

// ---- the order of work tiles -----------------------------------------------------------------------

// Time of forward tiles of equal keys, in hundredths of that of a whole tile: fixed (Launch::dynamic is false), and
// fetched by CTAs, whole ones first. A last tile of fewer rows has fewer warpgroups at work. Where tiles are fixed, 3,
// 6, 11 or 22 of them a head, which 512 to 4096 rows make, put the short ones on the same CTAs of 132, and the others
// work as long as if all were whole. Fetched, they fill what is left of a round; 40 for an end that is not even.
// Evidence: short-last-tiles, grid.
struct TileTimes {
  int64_t fixed = 0, fetched = 0;
  int64_t least() const { return std::min(fixed, fetched); }
};
inline TileTimes tile_times(const Problem& p, const DeviceInfo& d, int block_m) {
  const int64_t whole = p.seqlen_q / block_m, rows = p.seqlen_q % block_m, heads = int64_t{p.batch} * p.num_heads;
  if (heads > INT32_MAX / (whole + 1)) return {};  // refused
  const auto rounds = [&](int64_t tiles) { return (tiles + d.num_sms - 1) / d.num_sms; };
  const int64_t last = rows == 0 ? 100 : 20 + 80 * ((rows + 63) / 64) / (block_m / 64);
  const int64_t fixed = 100 * rounds(heads * (whole + (rows > 0)));
  if (last == 100) return {fixed, fixed};
  if (whole == 0) return {fixed * last / 100, fixed * last / 100};
  const bool in_step = std::gcd<int64_t>(whole + 1, d.num_sms) > 1;
  const int64_t fetched = std::max(100 * rounds(heads * whole), heads * (100 * whole + last) / d.num_sms + 40);
  return {fixed - (in_step ? 0 : (100 - last) * heads / d.num_sms), fetched};
}
inline bool prefers_dynamic(const Problem& p, const DeviceInfo& d, int block_m) {
  if (p.is_varlen() || d.num_sms <= 0) return false;
  const TileTimes t = tile_times(p, d, block_m);
  return t.fetched < t.fixed;
}

// Heads whose tiles run side by side. Tiles of equal length: enough heads that no more than a quarter of the CTAs
// stream the same K and V at once; with one head all of them ask one place of the L2 cache, with many each tile comes
// once for every CTA. Tiles of different lengths run longest first in a group: groups whose K and V take half of the L2
// cache, or more for three and a half tiles a CTA as long as eight CTAs share a head, and equal ones, because the last
// group ends with what is left. Packed sequences, whose long ones may come last, have 20 tiles a CTA: the CTAs work on
// a few sequences at a time, and those fit the cache. Evidence: fwd-head-groups.
constexpr int heads_in_group(bool dynamic, int64_t head_slots, int64_t blocks, int fit, int num_sms,
                             bool packed = false) {
  if (!dynamic) {
    const int64_t wanted = (4 * blocks + num_sms - 1) / std::max(1, num_sms);
    return static_cast<int>(std::clamp<int64_t>(wanted, 1, head_slots));
  }
  const int64_t work_tiles = (packed ? 40 : 7) * static_cast<int64_t>(num_sms) / 2;
  const int64_t shared_well = std::min<int64_t>((work_tiles + blocks - 1) / blocks, num_sms / 8);
  // Short heads, many of which the cache holds, go one and a half tiles a CTA side by side.
  const int64_t cached = blocks <= 4 ? std::min<int64_t>(fit, (3 * int64_t{num_sms} / 2 + blocks - 1) / blocks) : fit;
  const int64_t groups = std::max<int64_t>(1, head_slots / std::max<int64_t>({1, cached, shared_well}));
  return static_cast<int>((head_slots + groups - 1) / groups);
}

inline void set_heads_in_group(Grid& g, int heads) {
  g.group_tiles = Divisor(g.blocks * static_cast<uint32_t>(heads));
  g.heads_in_group = Divisor(static_cast<uint32_t>(heads));
}

// Work tiles in the order in which CTAs take them; `ctas` counts work tiles, of which a CTA takes many. `unequal`: in
// their keys.
inline Grid fwd_grid(const Problem& p, const DeviceInfo& d, int block_m, bool unequal) {
  Grid g = make_grid(p, d, true, block_m);
  if (g.ctas <= 0 || g.ctas > INT32_MAX) return g;
  int heads = heads_in_group(unequal, g.head_slots, g.blocks, g.heads_in_group.divisor, d.num_sms, p.is_varlen());
  if (!unequal && prefers_dynamic(p, d, block_m)) {
    // Few, so that their K and V come from memory once.
    heads = std::clamp(d.num_sms / static_cast<int>(4 * g.blocks), 1, static_cast<int>(g.head_slots));
    g.first_block = 0;
  }
  set_heads_in_group(g, heads);
  return g;
}

inline Grid fwd_grid(const Problem& p, const DeviceInfo& d, int block_m) {
  return fwd_grid(p, d, block_m, has_unequal_tiles(p));
}

// Packed sequences of one tile on average: how many of `heads` of a tile are given out together. Whoever fetches a work
// tile asks memory and searches cu_seqlens for it, 1.2 us, which is as long as such a tile takes. Evidence: unit-heads.
// None where CTAs would then have fewer than two units.
inline int unit_heads_of(const Problem& p, int heads, int64_t ctas) {
  if (!p.is_varlen() || p.total_q > int64_t{128} * p.batch) return 1;
  for (const int unit : {4, 2}) {
    if (heads % unit == 0 && int64_t{p.batch} * heads >= 2 * unit * ctas) return unit;
  }
  return 1;
}
// All heads side by side: keys are shared inside of a sequence alone.
inline Grid unit_grid(const Problem& p, const DeviceInfo& d, bool by_queries, int block, int unit_heads) {
  Grid g = make_grid(p, d, by_queries, block);
  if (unit_heads == 1 || g.ctas <= 0 || g.ctas > INT32_MAX) return g;
  g.head_slots /= static_cast<uint32_t>(unit_heads);
  g.ctas /= unit_heads;
  set_heads_in_group(g, static_cast<int>(g.head_slots));
  return g;
}

// Heads whose dynamic tiles run side by side, longest first, where `fit` of them stay in the L2 cache. At least 8, for
// the order to even out the end, and as many as have a tile for every CTA; no more than 16 beyond that. In groups of
// one size, because the last one ends with what is left. Evidence: bwd-head-groups.
constexpr int dynamic_heads(int64_t head_slots, int64_t blocks, int64_t fit, int num_sms) {
  const int64_t for_all = (num_sms + blocks - 1) / blocks, least = std::max<int64_t>(8, for_all);
  const int64_t most = std::min(head_slots, std::max(least, std::min<int64_t>(fit, std::max<int64_t>(16, for_all))));
  const int64_t groups = std::max<int64_t>(1, head_slots / most);
  for (int64_t g = groups; g < 2 * groups && 100 * (head_slots / g) >= 88 * least; ++g) {
    if (head_slots % g == 0) return static_cast<int>(head_slots / g);
  }
  return static_cast<int>((head_slots + groups - 1) / groups);
}

// Work tiles in the order in which CTAs take them; `ctas` counts work tiles, of which a CTA takes many. Heads go in
// groups whose dQ, in fp32, stays in the L2 cache with Q and dO: additions to it are fast there. Evidence:
// bwd-head-groups.
inline Grid bwd_grid(const Problem& p, const DeviceInfo& d, int block_n, bool ordered, bool dynamic) {
  Grid g = make_grid(p, d, false, block_n);
  if (g.ctas <= 0 || g.ctas > INT32_MAX) return g;
  const int64_t rows = (p.is_varlen() ? p.total_q : p.seqlen_q) * static_cast<int64_t>(p.num_heads / p.num_heads_k);
  const int64_t bytes = rows * (2 * (p.head_dim + p.head_dim_v) + 4 * padded_head_dim(p.head_dim, p.head_dim_v));
  const int fit = heads_per_group(g.head_slots, bytes, 2 * int64_t{40} << 20);
  int heads = heads_in_group(false, g.head_slots, g.blocks, 1, d.num_sms);
  if (ordered) {
    // In order, not so many that all CTAs hold different heads. Evidence: bwd-head-groups.
    const int at_least = std::min<int>(p.is_varlen() ? 16 : 8, static_cast<int>(g.head_slots));
    const int most = std::clamp(d.num_sms / 3, at_least, std::max(fit, at_least));
    const int groups = std::max<int>(1, static_cast<int>(g.head_slots) / most);
    heads = (static_cast<int>(g.head_slots) + groups - 1) / groups;
  } else if (dynamic) {
    heads = dynamic_heads(g.head_slots, g.blocks, fit, d.num_sms);
  }
  set_heads_in_group(g, heads);
  return g;
}

inline Grid bwd_grid(const Problem& p, const DeviceInfo& d, int block_n, bool ordered) {
  return bwd_grid(p, d, block_n, ordered, has_unequal_tiles(p));
}

// Tiles of either kernel in the order in which CTAs take them. Of equal length: one head after the other, because all
// CTAs then stream the same tiles at the same time. Else longest first in groups of heads whose streamed rows fit the
// L2 cache. Evidence: split-bwd-wide.
inline Grid dkdv_grid(const Problem& p, const DeviceInfo& d, bool dynamic) {
  Grid g = make_grid(p, d, false, SplitBwdTile::kKeys);
  if (g.ctas <= 0 || g.ctas > INT32_MAX) return g;
  if (!dynamic) {
    set_heads_in_group(g, 1);
    return g;
  }
  const int heads = static_cast<int>(g.head_slots), fit = static_cast<int>(g.heads_in_group.divisor);
  const int groups = std::max(1, heads / std::max(fit, std::min(8, heads)));  // at least 8 heads as in bwd_grid()
  set_heads_in_group(g, (heads + groups - 1) / groups);
  return g;
}

inline Grid dq_grid(const Problem& p, const DeviceInfo& d, bool dynamic) {
  Grid g = make_grid(p, d, true, SplitBwdTile::kQueries);
  if (g.ctas <= 0 || g.ctas > INT32_MAX) return g;
  const int fit = static_cast<int>(g.heads_in_group.divisor);
  set_heads_in_group(g, dynamic ? heads_in_group(true, g.head_slots, g.blocks, fit, d.num_sms) : 1);
  return g;
}

// ---- which forward ---------------------------------------------------------------------------------

// Time that 128 rows in a tile of their own take over that of 128 rows of a tile of 192, in hundredths, with as many
// keys. Where the kernel with tiles of 128 is that of every modifier, up to head_dim 64, and with a softcap, they never
// pay. Evidence: grid, masked-m192.
struct M128Cost {
  static constexpr int kNever = 1000;
  int hundredths;
  static M128Cost of(const Problem& p, int upto64, int above) {
    return {std::max(p.head_dim, p.head_dim_v) <= 64 ? upto64 : above};
  }
  static M128Cost plain(const Problem& p) { return of(p, 114, 106); }
  static M128Cost hides() { return {125}; }
  static M128Cost slopes(const Problem& p) { return of(p, kNever, 125); }
  static M128Cost beside(const Problem& p) { return of(p, 119, 108); }
  // Little: the last tile of a sequence copies all its rows, whether they are there or not.
  static M128Cost loose_bias(const Problem& p) { return of(p, 103, 101); }
  // The last of a few tiles takes as long as the others, too.
  static M128Cost float_bias(const Problem& p) { return p.seqlen_q <= 640 ? loose_bias(p) : beside(p); }
  static M128Cost caps() { return {kNever}; }
  static M128Cost drops(const Problem& p) { return of(p, kNever, 106); }
};

// Whether the forward should take tiles of 128 queries. Each multiprocessor computes one tile at a time, and one that
// has none waits: 1024 queries of 16 heads are 96 tiles of 192 and 128 of 128, on 132 multiprocessors. Causal tiles of
// a square are unequal and short, and gain less: there rounds of higher tiles have to cover 1.2 times as many rows, and
// a few short tiles are left as they are. Tiles of a window count as equal: most are. Results may differ in their last
// bits between the two, hence between batch sizes. Evidence: grid.
inline bool prefers_m128(const Problem& p, const DeviceInfo& d, M128Cost cost) {
  if (p.is_varlen() || d.num_sms <= 0) return false;
  // Of either height, where those of 128 are faster.
  const bool are_two = p.seqlen_q > 192 && p.seqlen_q <= 256 && cost.hundredths < 120;
  const bool alike = (p.window_left >= 0) == (p.window_right >= 0);
  if (alike) {
    return are_two || 100 * 192 * tile_times(p, d, 192).least() > cost.hundredths * 128 * tile_times(p, d, 128).least();
  }
  const auto tiles = [&](int64_t rows) { return (p.seqlen_q + rows - 1) / rows * p.batch * p.num_heads; };
  const auto rows_of_rounds = [&](int64_t rows) { return (tiles(rows) + d.num_sms - 1) / d.num_sms * rows; };
  if (p.seqlen_k < 1024 && tiles(128) < 2 * d.num_sms) return false;
  return are_two || 100 * rows_of_rounds(192) >= std::max(cost.hundredths, 120) * rows_of_rounds(128);
}

inline bool takes_m128(const Problem& p, const DeviceInfo& d, const Constraints& c, M128Cost cost) {
  return c.fwd_block_m ? *c.fwd_block_m == 128 : !d.batch_invariant && prefers_m128(p, d, cost);
}

// Whether short sequences take tiles of 64 queries, of which three are under way on a multiprocessor: where all tiles
// go at once, or where there are many, and few tiles of keys. The kernels for short sequences are faster for many
// sequences of up to 32 queries and keys, and for very many of head_dim 32, whose columns are half of what tiles have,
// where 65 to 80 would be two tiles. Evidence: m64.
inline bool prefers_m64(const Problem& p, const DeviceInfo& d, const Constraints& c) {
  if (c.fwd_block_m || d.batch_invariant || p.batch <= 0) return false;
  const bool causal = p.window_left < 0 && p.window_right == 0;
  const int64_t most = causal ? 512 : 256;
  if (p.is_varlen()) return std::max(p.total_q, p.total_k) <= most * p.batch;
  const int64_t tiles = (int64_t{p.seqlen_q} + 63) / 64 * p.num_heads * p.batch;
  const int longer = std::max(p.seqlen_q, p.seqlen_k), head_dim = std::max(p.head_dim, p.head_dim_v);
  if (!c.short_kernels) return false;
  if (tiles <= fwd_tile(64, 64, 64).ctas * d.num_sms && longer <= 512) return longer > 16;
  if (longer <= 32) return false;
  if (head_dim <= 32 && !causal && p.seqlen_q > 64 && longer <= 80) return p.seqlen_k <= 64 || tiles <= 64 * d.num_sms;
  return longer <= most || p.seqlen_k <= 64 || (!causal && p.seqlen_k <= 256 && p.seqlen_q <= 1024);
}

// Into how many parts CTAs share out the keys of each tile of 128 queries, where tiles are too few to go round: 4096
// queries of one head are 32 tiles. Time in microseconds: of a step of 128 keys, of a tile that begins and ends, and of
// adding up, 1 / 16 a part and the traffic of partial results. The multiprocessors take the parts of a causal square,
// half as long on average, in turn. Evidence: fwd-parts.
inline int parts_of_tiles(const Problem& p, const DeviceInfo& d, const Constraints& c) {
  constexpr double kEnds = 1.5, kSum = 3., kPerPart = 1. / 16, kBytesPerUs = 4e6, kLeastGain = 1.05;
  if (p.is_varlen() || has_long_keys(p) || d.num_sms <= 0 || p.total_q <= 0 || p.total_k <= 0) return 1;
  if (c.kv_splits) return std::clamp(*c.kv_splits, 1, kMaxSplits);
  // Queries of less than half a tile are for the split-KV kernel, which packs the heads of a group.
  if (d.batch_invariant || p.seqlen_q <= 64) return 1;
  const int64_t tiles = (int64_t{p.seqlen_q} + 127) / 128 * p.batch * p.num_heads;
  int64_t keys = p.seqlen_k;
  if (p.window_left >= 0 && p.window_right >= 0) keys = std::min(keys, int64_t{128} + p.window_left + p.window_right);
  const int64_t steps = (keys + 127) / 128;
  const bool is_triangle = p.window_right >= 0 && p.window_left < 0 && p.seqlen_q >= p.seqlen_k;
  const double width = (p.head_dim + p.head_dim_v) / 256., step = 0.85 + 0.5 * width;
  const double bytes = 4. * static_cast<double>(p.total_q * p.num_heads) * (p.head_dim_v + 2);
  const auto time_of = [&](int64_t parts) {
    const auto rounds = static_cast<double>((tiles * parts + d.num_sms - 1) / d.num_sms);
    const double longest = static_cast<double>((steps + parts - 1) / parts) * step;
    const double all = is_triangle ? std::max(longest, rounds * longest / 2) : rounds * longest;
    const double sums = kSum + static_cast<double>(parts) * (kPerPart + 2 * bytes / kBytesPerUs);
    return all + rounds * kEnds + (parts > 1 ? sums : 0.);
  };
  const int64_t most = std::min({steps, int64_t{kMaxSplits}, 2 * d.num_sms / std::max<int64_t>(tiles, 1)});
  int best = 1;
  double best_time = time_of(1) / kLeastGain;
  for (int parts = 2; parts <= most; ++parts) {
    if (const double time = time_of(parts); time < best_time) best = parts, best_time = time;
  }
  return best;
}

// Whether a call should take the tiles of the plain kernel: where masks are known by rows or by keys alone, so that
// they leave most tiles whole or hide them, and where there are enough tiles of 192 queries. The words of bool masks
// are mixed in all places, and have a kernel to which a warp brings them. Maps of blocks of 128 or more, of which a
// tile of 192 rows meets two, stay with lower tiles. Of blocks of 64, which a warpgroup's rows match, tiles of 192
// visit fewer. Evidence: masked-m192.
inline bool has_row_words(const Modifiers& m) { return m.mask.words != nullptr && m.mask.row_stride != 0; }
inline bool has_mixed_tiles(const Modifiers& m) {
  const bool blocks_fit = m.block_rows >= 64 && m.block_rows < 128;
  return has_row_words(m) || (m.blocks.words != nullptr && !blocks_fit);
}
inline bool m192_fits(const Problem& p, const Modifiers& m, const DeviceInfo& d, const Constraints& c, M128Cost cost) {
  return !has_mixed_tiles(m) && !takes_m128(p, d, c, cost);
}
inline bool prefers_m192(const Problem& p, const Modifiers& m, const DeviceInfo& d, const Constraints& c) {
  const bool adds = m.has_score_mod || !(p.scale > 0.f) || m.rng != nullptr;
  return !adds && m192_fits(p, m, d, c, M128Cost::hides());
}

// Whether tiles of 192 queries have 128 keys at head_dim 64. They pay where most tiles are whole: masks cut more of the
// wider ones and hide fewer of them, and a bound cuts a tile of every row of tiles. Documents under a causal mask are
// cut at both ends. Evidence: masked-m192.
inline constexpr int kLeastCutKeys = 1024;
inline int64_t average_keys(const Problem& p) {
  return p.is_varlen() ? p.total_k / std::max(p.batch, 1) : int64_t{p.seqlen_k};
}
inline bool has_short_window(const Problem& p) {
  return p.window_left >= 0 && p.window_right >= 0 && int64_t{p.window_left} + p.window_right < kLeastCutKeys;
}
inline bool prefers_wide_tiles(const Problem& p, const Modifiers& m, const DeviceInfo& d, const Constraints& c) {
  constexpr int kLeastKeys = 256, kLeastBoundKeys = 2048, kLeastDocuments = 8192;
  if (c.wide_tiles) return *c.wide_tiles;
  if (d.batch_invariant || m.blocks.words != nullptr || has_short_window(p)) return false;
  if (p.window_left >= 0 || p.window_right >= 0) {
    return average_keys(p) >= (m.document_k.ids != nullptr ? kLeastDocuments : kLeastBoundKeys);
  }
  return average_keys(p) >= (asks_any<kHidingKinds>(m) ? kLeastCutKeys : kLeastKeys);
}

// Of up to 128 rows the tile is one of either height.
inline bool takes_m192_beside(const Problem& p, const DeviceInfo& d, const Constraints& c, M128Cost cost) {
  const bool is_low = !p.is_varlen() && p.seqlen_q <= 128 && !c.fwd_block_m;
  return !is_low && !takes_m128(p, d, c, cost);
}
inline bool prefers_m192_words(const Problem& p, const Modifiers& m, const DeviceInfo& d, const Constraints& c) {
  const bool adds = m.has_score_mod || !(p.scale > 0.f) || m.rng != nullptr;
  return !adds && has_row_words(m) && takes_m192_beside(p, d, c, M128Cost::beside(p));
}
inline bool prefers_m192_bias(const Problem& p, const Modifiers& m, const DeviceInfo& d, const Constraints& c,
                              M128Cost cost) {
  return !has_mixed_tiles(m) && takes_m192_beside(p, d, c, cost);
}

// The same of calls with one modifier of scores or weights beside what hides. With slopes, which are
// divided by the scale: from scales of 1e7 on fp32 rounds the exponents of ordinary scores by more than 1, and fp16
// weights overflowed, so those calls stay with the other kernel.
inline bool prefers_m192_slopes(const Problem& p, const Modifiers& m, const DeviceInfo& d, const Constraints& c) {
  const bool alone = m.by_distance && m.softcap == 0.f && m.bias.ptr == nullptr && m.rng == nullptr;
  const bool divides = p.scale >= 0x1p-60f && p.scale <= 0x1p10f;
  return alone && divides && m192_fits(p, m, d, c, M128Cost::slopes(p));
}
inline bool prefers_m192_cap(const Problem& p, const Modifiers& m, const DeviceInfo& d, const Constraints& c) {
  const bool alone = m.softcap > 0.f && !m.by_distance && m.bias.ptr == nullptr && m.rng == nullptr;
  return alone && m192_fits(p, m, d, c, M128Cost::caps());
}
inline bool prefers_m192_drops(const Problem& p, const Modifiers& m, const DeviceInfo& d, const Constraints& c) {
  return m.rng != nullptr && !m.has_score_mod && p.scale > 0.f && m192_fits(p, m, d, c, M128Cost::drops(p));
}

}  // namespace flash_ext::sm90
