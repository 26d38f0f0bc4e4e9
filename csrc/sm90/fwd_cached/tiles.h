// Tiles of the packed Hopper forward over a cache, for the host and the kernels alike. No CUDA, no torch.
#pragma once

#include "../fwd/tiles.h"

namespace flash_ext::sm90 {

// Of tiles of one head: those of the forward, with barriers of rows that lanes copy.
constexpr int cached_smem_bytes(int d, int dv) {
  const FwdTile t = fwd_tile(d, dv);
  return t.smem_bytes(d, dv) + 8 * t.kv_stages;
}

// Up to 64 packed rows one warpgroup would have no rows. Both have them all then, and half of the keys of every tile
// each. Evidence: paged.
constexpr bool can_share_keys(int d) { return d <= 128; }
constexpr FwdTile packed_tile(int d, bool shares_keys) {
  if (shares_keys) return {128, 2, d == 64 ? 8 : 5, 2, true};
  return fwd_tile(d, d, d <= 128 ? 128 : 192);
}
inline constexpr int kPackedControlBytes = 1024;  // work tiles, the scheduler's place, barriers
constexpr int packed_smem_bytes(int d, bool shares_keys) {
  const FwdTile t = packed_tile(d, shares_keys);
  return t.kv_stages * tile_bytes(t.block_n, d) + t.q_stages * tile_bytes(t.block_m(), d) + t.handover_bytes(d) +
         kPackedControlBytes;
}

// Of a cache of 8 bits. Copies bring bytes to a ring of their own, from which other warpgroups turn them into elements
// of the ring that is multiplied. Bytes on their way hide the latency of memory, so the larger part of what shared
// memory has is theirs.
struct ConvertedTile {
  FwdTile plain;   // of the elements
  int raw_stages;  // tiles of bytes
  int converters;  // warpgroups, which take tiles in turn

  constexpr int threads() const { return plain.threads() + 128 * converters; }
  // Of a tile of bytes, and of the factors of its slots behind it.
  constexpr int raw_bytes(int d) const { return plain.block_n * d; }
  constexpr int factor_bytes() const { return plain.block_n * 4; }
  // Output leaves from registers.
  constexpr int smem_bytes(int d) const {
    return plain.kv_stages * tile_bytes(plain.block_n, d) + plain.q_stages * tile_bytes(plain.block_m(), d) +
           raw_stages * (raw_bytes(d) + factor_bytes()) + plain.handover_bytes(d) + kPackedControlBytes;
  }
};

// Of head dims 64 and 128. Four warpgroups have 128 registers a thread when they are compiled, five have 96, and a
// product of 256 columns wants 158. A second converter takes 0.83 to 0.9 of the time up to 64 rows, and 1.02 beyond.
// Evidence: paged. Modifiers spill beside two at head_dim 128.
constexpr ConvertedTile converted_tile(int d, bool shares_keys, bool modified) {
  const int converters = shares_keys && !(modified && d == 128) ? 2 : 1;
  if (d == 64) return {{128, 2, 6, 2, shares_keys}, 8, converters};
  return {{128, 2, 3, shares_keys ? 1 : 2, shares_keys}, 4, converters};
}

constexpr bool packed_tiles_fit() {
  for (int d : {64, 128}) {
    for (bool shares_keys : {false, true}) {
      if (packed_smem_bytes(d, shares_keys) > kSmemLimitLarge) return false;
      for (bool modified : {false, true}) {
        if (converted_tile(d, shares_keys, modified).smem_bytes(d) > kSmemLimitLarge) return false;
      }
    }
  }
  return true;
}
static_assert(packed_tiles_fit());

}  // namespace flash_ext::sm90
