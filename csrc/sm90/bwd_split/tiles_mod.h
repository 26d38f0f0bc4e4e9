// Tile shapes of the sm90 backward with modifiers in two kernels, for the host and the kernels alike: above head_dim
// 128, and in a fixed order also below. No CUDA, no torch.
#pragma once

#include "../bwd_mod/tiles.h"
#include "tiles.h"

namespace flash_ext::sm90 {

// Work tiles, steps, mask words and barriers. Beside a tile of V in the kernel of dQ no more is left at head_dim 256.
inline constexpr int kDkdvModControlBytes = 4096;
constexpr int dq_mod_control_bytes(int d) { return d <= 192 ? 6144 : 3072; }

// As the plain ones, but for what 16 registers less a consumer thread allow: fewer columns in registers, tiles of 64
// keys.
constexpr SplitBwdTile split_mod_tile(int d) {
  if (d <= 128) return {64, 4, d, 1, 64, 4, 4};
  if (d == 192) return {64, 3, 64, 1, 64, 2, 2};
  return {48, 3, 32, 1, 64, 2, 1};
}

constexpr int dkdv_mod_bytes(int d) {
  return split_mod_tile(d).dkv_smem_bytes(d, d) - kBwdControlBytes + kDkdvModControlBytes;
}
constexpr int dq_mod_bytes(int d) {
  return split_mod_tile(d).dq_smem_bytes(d, d) - kBwdControlBytes + dq_mod_control_bytes(d);
}
constexpr bool split_mod_tile_fits(int d) {
  return dkdv_mod_bytes(d) <= kSmemLimitLarge && dq_mod_bytes(d) <= kSmemLimitLarge;
}
static_assert(split_mod_tile_fits(64) && split_mod_tile_fits(128) && split_mod_tile_fits(192) &&
              split_mod_tile_fits(256));

// The compiled head_dim that a problem runs in.
inline int split_mod_size(const Problem& p) {
  const int size = std::max(p.head_dim, p.head_dim_v);
  return size <= 128 ? bwd_mod_size(p) : size <= 192 ? 192 : 256;
}

}  // namespace flash_ext::sm90
