// Tile shapes of the sm90 backward with modifiers, for the host and the kernels alike. No CUDA, no torch.
#pragma once

#include "../../mask_kinds.h"
#include "../../modifiers.h"
#include "../bwd/tiles.h"

namespace flash_ext::sm90 {

// As the plain backward: warpgroups cooperate on 128 keys, 64 each, or (`independent`) have 128 keys each.
struct BwdModTile {
  int stages;  // tiles of Q and of dO in the ring
  int ds_stages;
  int bias_bytes;  // of a tile of a bias, or of the mask words that stand in its place
  bool independent = false;

  static constexpr int kBlockM = 64, kThreads = 384;
  constexpr int block_n() const { return independent ? 256 : 128; }
  constexpr int control_bytes() const { return (stages > 2 ? 3072 : 2048) + (independent ? 2048 : 0); }
  constexpr BwdTile plain() const { return {independent, stages, !independent}; }
  constexpr int ds_bytes() const { return (independent ? 2 : 1) * ds_stages * BwdTile::kDsBytes; }
  constexpr int smem_bytes(int d) const {
    return plain().smem_bytes(d) - plain().converting_bytes() - plain().ds_bytes() - BwdTile::kControlBytes +
           ds_bytes() + bias_bytes + control_bytes();
  }
};

// `float_bias`: of kernels that take one in fp32. At head_dim 128 it has the place of the third dS.
constexpr BwdModTile bwd_mod_tile(int d, bool float_bias) {
  return {d <= 64 ? 4 : 2, float_bias && d > 64 ? 2 : 3, 64 * 128 * (float_bias ? 4 : 2)};
}
// Of independent warpgroups, with what is beside the scores.
inline constexpr int kWideModHeadDim = 64;
enum class BesideScores { kWords, kBias };
constexpr BwdModTile wide_bwd_mod_tile(BesideScores beside) {
  constexpr int kScores = 64 * 256;
  if (beside == BesideScores::kWords) return {4, 2, kScores, true};
  return {3, 2, 2 * kScores, true};
}

constexpr bool bwd_mod_tile_fits(int d, bool float_bias) {
  return bwd_mod_tile(d, float_bias).smem_bytes(d) <= kSmemLimitLarge;
}
static_assert(wide_bwd_mod_tile(BesideScores::kWords).smem_bytes(64) <= kSmemLimitLarge &&
              wide_bwd_mod_tile(BesideScores::kBias).smem_bytes(64) <= kSmemLimitLarge);
static_assert(bwd_mod_tile_fits(64, true) && bwd_mod_tile_fits(64, false) && bwd_mod_tile_fits(128, true) &&
              bwd_mod_tile_fits(128, false));

// Gradient of a bias: 128 x 128 scores, tiles of Q and K or of dO and V in pairs, of up to 128 columns. `owns_bias`:
// consumers keep a bias that TMA cannot read, in fp32; else TMA brings two chunks of it.
struct BwdBiasTile {
  int pairs;
  bool owns_bias;

  static constexpr int kBlock = 128, kThreads = 384;
  static constexpr int columns(int d) { return std::min(d, 128); }
  constexpr int bias_bytes() const { return owns_bias ? 4 * kBlock * kBlock : 2 * kBlock * 128; }
  constexpr int smem_bytes(int d) const { return 2 * pairs * tile_bytes(kBlock, columns(d)) + bias_bytes() + 1024; }
};
inline constexpr int kDbiasDims[] = {64, 128, 256};
constexpr BwdBiasTile bwd_bias_tile(int d, bool owns_bias) { return {d <= 64 ? 5 : owns_bias ? 2 : 3, owns_bias}; }

// The compiled head_dim that a problem of up to 128 runs in.
inline int bwd_mod_size(const Problem& p) { return std::max(p.head_dim, p.head_dim_v) <= 64 ? 64 : 128; }

// That of the gradient of a bias, of any problem.
inline int dbias_size(const Problem& p) {
  return *std::ranges::lower_bound(kDbiasDims, std::max(p.head_dim, p.head_dim_v));
}

// Whether TMA brings the words of a bit mask to steps that ask for no other test: whether the mask has tiles
// (condensed.h) and other kinds none of the words. Packed calls may have sequences that end behind the mask.
inline bool brings_mask_tiles(const Problem& p, const Modifiers& m) {
  const bool has_tiles = m.mask.words != nullptr && m.mask.row_stride != 0 && m.mask.word_stride != 0 &&
                         p.seqlen_q >= Modifiers::kMaskGroup;
  return has_tiles && !asks_any<kMadeRowWords>(m) && !p.is_varlen();
}

// Whether a step visits every tile of queries and keys.
inline bool visits_all_tiles(const Problem& p, const Modifiers& m) {
  return !asks_any<kHidingKinds>(m) && p.window_left < 0 && p.window_right < 0;
}

// Whether every tile of queries sees some key, so that a step visits it.
inline bool visits_all_queries(const Problem& p, const Modifiers& m) {
  const bool hides = asks_any<kHidingKinds>(m) || p.window_left >= 0;
  return !hides && (p.window_right < 0 || m.top_left || (!p.is_varlen() && p.seqlen_q <= p.seqlen_k));
}

}  // namespace flash_ext::sm90
