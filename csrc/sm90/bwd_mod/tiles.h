// Tile shapes of the sm90 backward with modifiers, for the host and the kernels alike. No CUDA, no torch.
#pragma once

#include "../../mask_kinds.h"
#include "../../modifiers.h"
#include "../bwd/tiles.h"

namespace flash_ext::sm90 {

// As the plain backward whose warpgroups cooperate: 128 keys, 64 each. A tile of a bias has its own place: of 16 bits,
// and where there is room of 32.
struct BwdModTile {
  int stages;  // tiles of Q and of dO in the ring

  static constexpr int kBlockM = 64, kBlockN = 128, kThreads = 384, kDsStages = 3;
  static constexpr bool has_float_bias(int d) { return d <= 64; }
  static constexpr int bias_bytes(int d) { return kBlockM * kBlockN * (has_float_bias(d) ? 4 : 2); }
  static constexpr int kStagingBytes = 8 * 4096;  // for each consumer warp 32 floats a lane
  constexpr int control_bytes() const { return stages > 2 ? 3072 : 2048; }
  constexpr BwdTile plain() const { return {false, stages, true}; }
  constexpr int smem_bytes(int d) const {
    return plain().smem_bytes(d) - plain().converting_bytes() - BwdTile::kControlBytes + bias_bytes(d) +
           control_bytes();
  }
};

constexpr BwdModTile bwd_mod_tile(int d) { return {d <= 64 ? 4 : 2}; }

static_assert(bwd_mod_tile(64).smem_bytes(64) <= kSmemLimitLarge &&
              bwd_mod_tile(128).smem_bytes(128) <= kSmemLimitLarge);

// Gradient of a bias: 128 x 128 scores, tiles of Q and K or of dO and V in pairs. `owns_bias`: consumers keep a bias that
// TMA cannot read, in fp32; else TMA brings two chunks of it.
struct BwdBiasTile {
  int pairs;
  bool owns_bias;

  static constexpr int kBlock = 128, kThreads = 384;
  constexpr int bias_bytes() const { return owns_bias ? 4 * kBlock * kBlock : 2 * kBlock * 128; }
  constexpr int smem_bytes(int d) const { return 2 * pairs * tile_bytes(kBlock, d) + bias_bytes() + 1024; }
};
constexpr BwdBiasTile bwd_bias_tile(int d, bool owns_bias) { return {d <= 64 ? 5 : owns_bias ? 2 : 3, owns_bias}; }

// The compiled head_dim that a problem of up to 128 runs in.
inline int bwd_mod_size(const Problem& p) { return std::max(p.head_dim, p.head_dim_v) <= 64 ? 64 : 128; }

// Whether a step visits every tile of queries and keys.
inline bool visits_all_tiles(const Problem& p, const Modifiers& m) {
  return !asks_any<kHidingKinds>(m) && p.window_left < 0 && p.window_right < 0;
}

// Whether every tile of queries sees some key, so that a step visits it.
inline bool visits_all_queries(const Problem& p, const Modifiers& m) {
  const bool hides = asks_any<kHidingKinds>(m) || p.window_left >= 0;
  return !hides && (p.window_right < 0 || m.top_left || p.seqlen_q <= p.seqlen_k);
}

}  // namespace flash_ext::sm90
