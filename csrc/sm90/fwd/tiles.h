// Tile shapes of the sm90 path, for the host and the kernels alike. No CUDA, no torch.
#pragma once

#include <algorithm>

#include "../../grid.h"
#include "../../heuristics.h"
#include "../../mask_kinds.h"
#include "../../modifiers.h"
#include "../../params.h"

namespace flash_ext::sm90 {

inline constexpr int kControlBytes = 512;  // work tiles and barriers
inline constexpr int kCounterBytes = 16;   // of core/scheduler.cuh, in global memory

// Of q and k, and of v, as a kernel is compiled for them.
struct HeadDims {
  int d, dv;
};

// A chunk is 64 columns of a tile, 128 bytes a row; the last one may be half used.
constexpr int chunks_of(int columns) { return (columns + 63) / 64; }
constexpr int tile_bytes(int rows, int columns) { return rows * chunks_of(columns) * 128; }

struct FwdTile {
  int block_n;    // keys
  int consumers;  // warpgroups, 64 query rows each
  int kv_stages;  // tiles of K or V in the ring
  int q_stages;
  bool shares_keys = false;  // two warpgroups have the same rows, and half of each tile's keys (fwd_cached/packed.cuh)
  int ctas = 1;  // a multiprocessor

  constexpr int block_m() const { return shares_keys ? 64 : 64 * consumers; }
  constexpr int threads() const { return 128 * (consumers + 1); }
  // Output leaves through shared memory: two chunks of 16 rows for every consumer warp.
  constexpr int staging_chunks(int dv) const { return chunks_of(dv) < 2 ? chunks_of(dv) : 2; }
  constexpr int staging_bytes(int dv) const { return 4 * consumers * staging_chunks(dv) * 16 * 128; }
  // What one warpgroup hands to the other: output, and 16 bytes of each thread's rows.
  constexpr int handover_bytes(int dv) const { return shares_keys ? 64 * 4 * dv + 128 * 16 : 0; }
  constexpr int smem_bytes(int d, int dv) const {
    return kv_stages * tile_bytes(block_n, d > dv ? d : dv) + q_stages * tile_bytes(block_m(), d) + staging_bytes(dv) +
           kControlBytes;
  }
};

// Three warpgroups where 160 registers a thread hold output, scores and weights (dv / 2 + 3 / 4 block_n): more query
// rows for each tile that comes from the L2 cache, and three to take turns at the tensor cores. 64 keys divide the
// usual lengths, and leave room to stage the output. Evidence: m192.
//
// `most_rows`: 128, up to 128 columns, where tiles of 192 queries are too few to go round (prefers_m128()); 64, of 64
// columns, for short sequences (prefers_m64()). While one of three CTAs waits for what begins and ends a sequence, the
// others work.
constexpr FwdTile fwd_tile(int d, int dv, int most_rows = 192) {
  if (most_rows == 64) return {64, 1, 6, 2, false, 3};
  if (most_rows == 128) return {128, 2, d <= 64 ? 8 : 4, 2};
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
  bool staged;  // output leaves through shared memory, else from registers
  bool bias_has_place;  // tiles of a bias have their own place, else that of the second tile of Q and the staging
  int consumers = 2;
  int bias_places = 2;  // each for a tile of a bias, or for kPartKeys keys of one that comes in parts
  int part_pitch = 0;  // bytes of a row of a part; 0: tiles of 16 bits come whole

  static constexpr int kPartKeys = 64;

  constexpr int control_bytes() const { return kv_stages > 5 ? 5120 : 3072; }
  constexpr FwdTile plain() const { return {block_n, consumers, kv_stages, q_stages}; }
  constexpr int staging_bytes(int dv) const { return staged ? plain().staging_bytes(dv) : 0; }
  // Of a place.
  constexpr int bias_bytes() const { return 64 * consumers * (part_pitch > 0 ? part_pitch : 2 * block_n); }
  constexpr int smem_bytes(int d, int dv) const {
    return plain().smem_bytes(d, dv) - plain().staging_bytes(dv) + staging_bytes(dv) - kControlBytes + control_bytes() +
           (bias_has_place ? bias_places * bias_bytes() : 0);
  }
};

// Of head_dim, whatever head_dim_v is.
constexpr FwdModTile fwd_mod_tile(int d) {
  if (d == 64) return {128, 4, 2, true, true};
  if (d <= 128) return {128, 4, 2, true, false};
  if (d == 192) return {64, 4, 2, true, false};
  return {64, 4, 1, false, true};
}

// Whether kernels know that a bias is all that changes scores.
constexpr bool has_bias_kinds(int d) { return d == 64 || d == 128; }
// The same for one that comes in parts.
constexpr FwdModTile bias_in_parts_tile(int d, int places, int pitch) {
  FwdModTile t = fwd_mod_tile(d);
  t.bias_places = places, t.part_pitch = pitch;
  return t;
}
// Loose (bias_rows.h): a row is of nine pieces of 16 bytes, wherever behind 16 bytes it begins.
inline constexpr int kLoosePitch = 2 * FwdModTile::kPartKeys + 16;
constexpr FwdModTile loose_bias_tile(int d) { return bias_in_parts_tile(d, d <= 64 ? 4 : 3, kLoosePitch); }
constexpr FwdModTile float_bias_tile(int d) {
  return bias_in_parts_tile(d, d <= 64 ? 3 : 2, 4 * FwdModTile::kPartKeys);
}

// Tiles as high as those of the plain kernel, for masks that leave most of them whole: see prefers_m192(). `wide`: of
// 128 keys, as the plain kernel has them at head_dim 64 (prefers_wide_tiles()), else of 64.
constexpr bool has_m192(int d) { return d == 64 || d == 128; }
constexpr bool has_wide_m192(int d) { return d == 64; }
constexpr FwdModTile m192_mod_tile(int d, bool wide) {
  const FwdTile t = fwd_tile(d, d);
  return {wide ? 128 : 64, t.kv_stages, t.q_stages, true, false, t.consumers, 0};
}

// The same with places for what stands beside the scores of 64 keys, which take the room of one of Q or of K and V
// where that is short. Evidence: masked-m192.
constexpr FwdModTile m192_tile_beside(int d, bool wide, int places, int pitch) {
  FwdModTile t = m192_mod_tile(d, wide);
  t.bias_has_place = true, t.bias_places = places, t.part_pitch = pitch;
  return t;
}
constexpr FwdModTile m192_bias_tile(int d, bool wide) {
  FwdModTile t = m192_tile_beside(d, wide, d <= 64 ? 3 : 2, 2 * FwdModTile::kPartKeys);
  if (d > 64) t.q_stages = 1;
  if (wide) t.kv_stages = 4;
  return t;
}
constexpr FwdModTile m192_loose_bias_tile(int d) {
  FwdModTile t = m192_tile_beside(d, false, d <= 64 ? 3 : 2, kLoosePitch);
  if (d > 64) t.kv_stages = 4, t.q_stages = 1;
  return t;
}
// At head_dim 128 lower tiles are as fast.
constexpr bool has_m192_float_bias(int d) { return d == 64; }
constexpr FwdModTile m192_float_bias_tile(int d) {
  FwdModTile t = m192_tile_beside(d, false, 2, 4 * FwdModTile::kPartKeys);
  t.q_stages = 1;
  return t;
}
constexpr FwdModTile m192_words_tile(int d) {
  FwdModTile t = m192_tile_beside(d, has_wide_m192(d), 4, 8);
  if (d > 64) t.kv_stages = 4;
  return t;
}

constexpr bool tiles_fit() {
  for (int d : kHeadDims) {
    if (fwd_tile(d, d).smem_bytes(d, d) > kSmemLimitLarge) return false;
    if (fwd_mod_tile(d).smem_bytes(d, d) > kSmemLimitLarge) return false;
  }
  for (int d : {64, 128}) {
    for (bool wide : {false, has_wide_m192(d)}) {
      if (m192_mod_tile(d, wide).smem_bytes(d, d) > kSmemLimitLarge) return false;
      if (m192_bias_tile(d, wide).smem_bytes(d, d) > kSmemLimitLarge) return false;
    }
    if (m192_loose_bias_tile(d).smem_bytes(d, d) > kSmemLimitLarge) return false;
    if (m192_words_tile(d).smem_bytes(d, d) > kSmemLimitLarge) return false;
    if (has_m192_float_bias(d) && m192_float_bias_tile(d).smem_bytes(d, d) > kSmemLimitLarge) return false;
    if (loose_bias_tile(d).smem_bytes(d, d) > kSmemLimitLarge) return false;
    if (float_bias_tile(d).smem_bytes(d, d) > kSmemLimitLarge) return false;
  }
  for (int d : {64, 96, 128}) {
    if (fwd_tile(d, d, 128).smem_bytes(d, d) > kSmemLimitLarge) return false;
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

inline bool has_unequal_tiles(const Problem& p, const Modifiers& m) {
  return has_unequal_tiles(p) || asks_any<kUnequalTiles>(m);
}

// Rows of a tile of bias as TMA brings it: all, 1 where rows are broadcast, 0 where TMA cannot read the bias. One row
// for all knows no end, behind which a bias would add 0.
inline int staged_bias_rows(const BiasView& x, const Problem& p, int block_m) {
  if (x.ptr == nullptr || x.is_float || !(x.staged || x.is_unaligned)) return 0;
  if (x.row_stride != 0) return block_m;
  return x.rows >= (p.is_varlen() ? p.total_q : p.seqlen_q) ? 1 : 0;
}

}  // namespace flash_ext::sm90
