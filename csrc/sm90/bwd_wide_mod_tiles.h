// Tile shapes of the sm90 backward with modifiers above head_dim 128, for the host and the kernels alike. No CUDA, no
// torch.
#pragma once

#include "bwd_mod_tiles.h"
#include "bwd_wide_tiles.h"

namespace flash_ext::sm90 {

// Items, steps, marks and barriers. Beside a tile of V in the kernel of dQ no more is left at head_dim 256.
inline constexpr int kWideModControlBytes = 4096;
constexpr int wide_mod_query_control_bytes(int d) { return d <= 192 ? 6144 : 3072; }

// As the plain ones, but for what 16 registers less a consumer thread allow: fewer columns held, tiles of 64 keys.
constexpr WideBwdTile wide_mod_tile(int d) {
  if (d <= 128) return {64, 4, d, 1, 64, 4, 4};
  if (d == 192) return {64, 3, 64, 1, 64, 2, 2};
  return {48, 3, 32, 1, 64, 2, 1};
}

constexpr int wide_mod_keys_bytes(int d) {
  return wide_mod_tile(d).dkv_smem_bytes(d, d) - kBwdControlBytes + kWideModControlBytes;
}
constexpr int wide_mod_queries_bytes(int d) {
  return wide_mod_tile(d).dq_smem_bytes(d, d) - kBwdControlBytes + wide_mod_query_control_bytes(d);
}
static_assert(wide_mod_keys_bytes(192) <= kSmemLimitLarge && wide_mod_queries_bytes(192) <= kSmemLimitLarge);
static_assert(wide_mod_keys_bytes(256) <= kSmemLimitLarge && wide_mod_queries_bytes(256) <= kSmemLimitLarge);

// The compiled head_dim that a problem of more than 128 runs in.
inline int wide_mod_size(const Problem& p) { return std::max(p.head_dim, p.head_dim_v) <= 192 ? 192 : 256; }

// A softcap together with dropout or with anything that is added to scores is for the portable kernels.
inline bool is_wide_mod_taken(const Modifiers& m) {
  return m.softcap == 0.f || (m.slopes == nullptr && m.bias.ptr == nullptr && m.rng == nullptr);
}

// fp32 elements of the workspace: as mod_stats_elements(), with a counter for each kernel.
inline int64_t wide_mod_stats_elements(const Problem& p) {
  const int block_m = wide_mod_tile(wide_mod_size(p)).block_m;
  return portable_stats_elements(p) + query_tiles(p, block_m) * 2 * block_m + 2 * kCounterBytes / 4;
}

}  // namespace flash_ext::sm90
