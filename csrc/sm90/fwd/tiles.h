// Tile shapes of the sm90 path, for the host and the kernels alike. No CUDA, no torch.
#pragma once

#include <numeric>

#include "../../grid.h"
#include "../../heuristics.h"
#include "../../mask_kinds.h"
#include "../../modifiers.h"
#include "../../params.h"

namespace flash_ext::sm90 {

inline constexpr int kControlBytes = 512;  // work tiles and barriers
inline constexpr int kCounterBytes = 16;   // of core/scheduler.cuh, in global memory

// A chunk is 64 columns of a tile, 128 bytes a row; the last one may be half used.
constexpr int chunks_of(int columns) { return (columns + 63) / 64; }
constexpr int tile_bytes(int rows, int columns) { return rows * chunks_of(columns) * 128; }

struct FwdTile {
  int block_n;    // keys
  int consumers;  // warpgroups, 64 query rows each
  int kv_stages;  // tiles of K or V in the ring
  int q_stages;

  constexpr int block_m() const { return 64 * consumers; }
  constexpr int threads() const { return 128 * (consumers + 1); }
  // Output leaves through shared memory: two chunks of 16 rows for every consumer warp.
  constexpr int staging_chunks(int dv) const { return chunks_of(dv) < 2 ? chunks_of(dv) : 2; }
  constexpr int staging_bytes(int dv) const { return 4 * consumers * staging_chunks(dv) * 16 * 128; }
  constexpr int smem_bytes(int d, int dv) const {
    return kv_stages * tile_bytes(block_n, d > dv ? d : dv) + q_stages * tile_bytes(block_m(), d) + staging_bytes(dv) +
           kControlBytes;
  }
};

// Three warpgroups where 160 registers a thread hold output, scores and weights (dv / 2 + 3 / 4 block_n): more query
// rows for each tile that comes from the L2 cache, and three to take turns at the tensor cores. 64 keys divide the usual
// lengths, and leave room to stage the output. Evidence: m192.
//
// `m128`, up to 128 columns: where tiles of 192 queries are too few to go round (prefers_m128()).
constexpr FwdTile fwd_tile(int d, int dv, bool m128 = false) {
  if (m128) return {128, 2, d <= 64 ? 8 : 4, 2};
  if (d == 64) return {128, 3, 8, 2};
  if (d == 96) return {64, 3, 4, 2};
  if (d == 128) return {64, 3, 5, 2};
  if (d == 192 && dv == 128) return {64, 3, 4, 1};
  if (d == 192) return {64, 2, 4, 2};
  return {64, 2, 4, 1};
}

// The forward with modifiers: two warpgroups with more registers and wider tiles than the plain one, because what a
// step costs beside its scores must leave the issue slots to what changes scores.
struct FwdModTile {
  int block_n;
  int kv_stages;  // a power of 2 where two warpgroups consume, for their count
  int q_stages;
  bool staged;          // output leaves through shared memory, else from registers
  bool bias_has_place;  // tiles of a bias have their own place, else that of the second tile of Q and the staging
  int consumers = 2;
  int bias_stages = 2;

  constexpr int control_bytes() const { return kv_stages > 5 ? 4096 : 3072; }
  constexpr FwdTile plain() const { return {block_n, consumers, kv_stages, q_stages}; }
  constexpr int staging_bytes(int dv) const { return staged ? plain().staging_bytes(dv) : 0; }
  constexpr int bias_stage_size() const { return bias_stages == 0 ? 0 : tile_bytes(64 * consumers, block_n); }
  constexpr int smem_bytes(int d, int dv) const {
    return plain().smem_bytes(d, dv) - plain().staging_bytes(dv) + staging_bytes(dv) - kControlBytes +
           control_bytes() + (bias_has_place ? bias_stages * bias_stage_size() : 0);
  }
};

// Of head_dim, whatever head_dim_v is.
constexpr FwdModTile fwd_mod_tile(int d) {
  if (d == 64) return {128, 4, 2, true, true};
  if (d <= 128) return {128, 4, 2, true, false};
  if (d == 192) return {64, 4, 2, true, false};
  return {64, 4, 1, false, true};
}

// Tiles as high as those of the plain kernel, for masks that leave most of them whole: see prefers_m192().
constexpr bool has_m192(int d) { return d == 64 || d == 128; }
constexpr FwdModTile m192_mod_tile(int d) {
  const FwdTile t = fwd_tile(d, d);
  return {64, t.kv_stages, t.q_stages, true, false, t.consumers, 0};
}

constexpr bool tiles_fit() {
  for (int d : kHeadDims) {
    if (fwd_tile(d, d).smem_bytes(d, d) > kSmemLimitLarge) return false;
    if (fwd_mod_tile(d).smem_bytes(d, d) > kSmemLimitLarge) return false;
  }
  for (int d : {64, 128}) {
    if (m192_mod_tile(d).smem_bytes(d, d) > kSmemLimitLarge) return false;
  }
  for (int d : {64, 96, 128}) {
    if (fwd_tile(d, d, true).smem_bytes(d, d) > kSmemLimitLarge) return false;
  }
  return fwd_tile(192, 128).smem_bytes(192, 128) <= kSmemLimitLarge;
}
static_assert(tiles_fit());

// Whether work tiles differ in length so much that CTAs should fetch them one by one. Those of a window are shorter at
// one end or both, and how many heads go side by side counts for more (see bwd_grid()).
inline bool has_unequal_tiles(const Problem& p) { return p.is_varlen() || p.window_right >= 0 || p.window_left >= 0; }

// Each CTA, of which there are no more than multiprocessors, has a place for what it keeps between stretches of keys.
inline constexpr Stretches kStretches{1 << 16, 1 << 14};
inline int64_t kept_floats(const FwdTile& t, int head_dim_v) {  // of a CTA
  return int64_t{128} * t.consumers * (head_dim_v / 2 + 4);
}
inline bool has_long_keys(const Problem& p) { return (p.is_varlen() ? p.total_k : p.seqlen_k) > kStretches.above; }

// Whether forward tiles of equal keys should be fetched dynamically because the last tile of a head has fewer rows. With
// static scheduling 3, 6, 11 or 22 tiles a head, which 512 to 4096 rows make, put the short ones on the same CTAs of 132,
// and the others work as long as if all were whole. Fetched, and last in their group, they fill what is left of its
// rounds. Evidence: short-last-tiles.
inline bool prefers_dynamic(const Problem& p, const DeviceInfo& d, int block_m) {
  const int64_t whole = p.seqlen_q / block_m, rows = p.seqlen_q % block_m, heads = int64_t{p.batch} * p.num_heads;
  if (p.is_varlen() || d.num_sms <= 0 || whole == 0 || rows == 0) return false;
  if (heads > INT32_MAX / (whole + 1)) return false;  // refused
  const auto rounds = [&](int64_t tiles) { return (tiles + d.num_sms - 1) / d.num_sms; };
  // In tenths of a round: what a tile costs with fewer of its warpgroups at work, and three for an end that is not even.
  const int64_t groups = block_m / 64, last = 2 + 8 * ((rows + 63) / 64) / groups;
  if (last == 10) return false;
  const int64_t dynamic = std::max(10 * rounds(heads * whole), (10 * heads * whole + last * heads) / d.num_sms + 3);
  const bool in_step = std::gcd<int64_t>(whole + 1, d.num_sms) > 1;
  const int64_t round_robin = 10 * rounds(heads * (whole + 1)) - (in_step ? 0 : (10 - last) * heads / d.num_sms);
  return dynamic < round_robin;
}

inline bool has_unequal_tiles(const Problem& p, const Modifiers& m) {
  return has_unequal_tiles(p) || asks_any<kUnequalTiles>(m);
}

// Whether the forward should take tiles of 128 queries. Each multiprocessor computes one tile at a time, and one that
// has none waits: 1024 queries of 16 heads are 96 tiles of 192 and 128 of 128, on 132 multiprocessors. So where the
// rounds of higher tiles cover 1.2 times as many rows; causal tiles of a square are unequal and short, and gain less.
// Tiles of a window count as equal: most are. Results may differ in their last bits between the two, hence between batch
// sizes. Evidence: m128-rounds.
inline bool prefers_m128(const Problem& p, const DeviceInfo& d) {
  if (p.is_varlen() || d.num_sms <= 0) return false;
  const auto tiles = [&](int64_t rows) { return (p.seqlen_q + rows - 1) / rows * p.batch * p.num_heads; };
  const auto rows_of_rounds = [&](int64_t rows) { return (tiles(rows) + d.num_sms - 1) / d.num_sms * rows; };
  if (5 * rows_of_rounds(192) < 6 * rows_of_rounds(128)) return false;
  const bool alike = (p.window_left >= 0) == (p.window_right >= 0);
  if (alike) return p.seqlen_k >= 256;
  return p.seqlen_k >= 1024 || (p.seqlen_k >= 192 && tiles(128) >= 2 * d.num_sms);
}

inline bool takes_m128(const Problem& p, const DeviceInfo& d, const Constraints& c) {
  return c.fwd_block_m ? *c.fwd_block_m == 128 : !d.batch_invariant && prefers_m128(p, d);
}

// Rows of a tile of bias as TMA brings it: all, 1 where rows are broadcast, 0 where TMA cannot read the bias. One row
// for all knows no end, behind which a bias would add 0.
inline int staged_bias_rows(const BiasView& x, const Problem& p, int block_m) {
  if (x.ptr == nullptr || !x.staged) return 0;
  if (x.row_stride != 0) return block_m;
  return x.rows >= (p.is_varlen() ? p.total_q : p.seqlen_q) ? 1 : 0;
}

// Whether a call should take the tiles of the plain kernel: where masks are known by rows or by keys alone, so that
// they leave most tiles whole or hide them, and where there are enough tiles of 192 queries. Bool masks, which are
// mixed in all places, stay with lower and wider tiles, whose words are fetched ahead. So do maps of blocks of 128 or
// more, of which a tile of 192 rows meets two. Of blocks of 64, which a warpgroup's rows match, tiles of 192 visit
// fewer. Evidence: masked-m192.
inline bool has_mixed_tiles(const Modifiers& m) {
  const bool blocks_fit = m.block_rows >= 64 && m.block_rows < 128;
  return (m.mask.words != nullptr && m.mask.row_stride != 0) || (m.blocks.words != nullptr && !blocks_fit);
}
inline bool m192_fits(const Problem& p, const Modifiers& m, const DeviceInfo& d,
                           const Constraints& c) {
  return !has_mixed_tiles(m) && !takes_m128(p, d, c);
}
inline bool prefers_m192(const Problem& p, const Modifiers& m, const DeviceInfo& d,
                           const Constraints& c) {
  const bool adds = m.has_score_mod || !(p.softmax_scale > 0.f) || m.rng != nullptr;
  return !adds && m192_fits(p, m, d, c);
}

// The same of calls with one modifier of scores or weights beside what hides. With slopes, which are
// divided by the scale: from scales of 1e7 on fp32 rounds the exponents of ordinary scores by more than 1, and fp16
// weights overflowed, so those calls stay with the other kernel.
constexpr bool has_m192_changes(int d) { return has_m192(d); }
inline bool prefers_m192_slopes(const Problem& p, const Modifiers& m, const DeviceInfo& d,
                           const Constraints& c) {
  const bool alone = m.by_distance && m.softcap == 0.f && m.bias.ptr == nullptr && m.rng == nullptr;
  const bool divides = p.softmax_scale >= 0x1p-60f && p.softmax_scale <= 0x1p10f;
  return alone && divides && m192_fits(p, m, d, c);
}
inline bool prefers_m192_cap(const Problem& p, const Modifiers& m, const DeviceInfo& d,
                           const Constraints& c) {
  const bool alone = m.softcap > 0.f && !m.by_distance && m.bias.ptr == nullptr && m.rng == nullptr;
  return alone && m192_fits(p, m, d, c);
}
inline bool prefers_m192_drops(const Problem& p, const Modifiers& m, const DeviceInfo& d,
                           const Constraints& c) {
  return m.rng != nullptr && !m.has_score_mod && p.softmax_scale > 0.f && m192_fits(p, m, d, c);
}

// Heads whose tiles run side by side. Tiles of equal length: enough heads that no more than a quarter of the CTAs
// stream the same K and V at once; with one head all of them ask one place of the L2 cache, with many each tile comes
// once for every CTA. Tiles of different lengths run longest first in a group: groups whose K and V take half of the L2
// cache, or more for three and a half tiles a CTA as long as eight CTAs share a head, and equal ones, because the last
// group ends with what is left. Packed sequences, whose long ones may come last, have 20 tiles a CTA: the CTAs work on a
// few sequences at a time, and those fit the cache. Evidence: fwd-head-groups.
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
  g.group_tiles = Divisor(g.blocks * static_cast<uint32_t>(heads));
  g.heads_in_group = Divisor(static_cast<uint32_t>(heads));
  return g;
}

inline Grid fwd_grid(const Problem& p, const DeviceInfo& d, int block_m) {
  return fwd_grid(p, d, block_m, has_unequal_tiles(p));
}

}  // namespace flash_ext::sm90
