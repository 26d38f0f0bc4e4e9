// Tile shapes of the sm90 backward in two kernels: head_dim above 128, and dQ of few rows (prefers_split_bwd()). For
// the host and the kernels alike. No CUDA, no torch.
#pragma once

#include "../bwd/tiles.h"

namespace flash_ext::sm90 {

// Two kernels. That of dK and dV owns 64 keys and streams tiles of block_m queries; one warpgroup has dV, the other dK,
// because the registers of both together hold no more. That of dQ owns 128 queries, 64 a warpgroup, and streams block_n
// keys.
struct SplitBwdTile {
  int block_m, stages;  // tiles of Q and of dO in the ring
  int rs_columns;       // columns of K and V whose operands stay in registers for a whole work tile
  int weight_stages;    // tiles of P on their way to the warpgroup of dK
  int block_n, k_stages, v_stages;

  static constexpr int kKeys = 64, kQueries = 128, kThreads = 384;
  // In fp32: dS of rounded weights would be rounded twice, which makes the error of dK 1.22 times as large. That kernel
  // would be a little faster with weights of 16 bits.
  constexpr int weight_bytes() const { return block_m * kKeys * 4; }
  constexpr int stats_bytes() const { return stages * block_m * 8; }
  constexpr int dkv_smem_bytes(int d, int dv) const {
    return tile_bytes(kKeys, d) + tile_bytes(kKeys, dv) + stages * (tile_bytes(block_m, d) + tile_bytes(block_m, dv)) +
           weight_stages * weight_bytes() + stats_bytes() + kBwdControlBytes;
  }
  constexpr int dq_smem_bytes(int d, int dv) const {
    return tile_bytes(kQueries, d) + tile_bytes(kQueries, dv) + k_stages * tile_bytes(block_n, d) +
           v_stages * tile_bytes(block_n, dv) + kBwdControlBytes;
  }
};

// Three tiles of Q and dO, whatever their size: with two a warpgroup waits for what it has just let go. Operands in
// registers leave shared memory, whose bandwidth is the next limit after the tensor cores, to the other ones: 104 bytes
// a clock of 128 at head_dim 192 instead of 136. More than 128 columns of 256 would spill.
constexpr SplitBwdTile split_bwd_tile(int d, int dv) {
  if (d <= 128)
    return {BwdTile::kBlockM, 0, 0, 0, 128, d == 64 ? 3 : 2, d == 64 ? 3 : 2};  // of dQ only, see kShortKeysTile
  if (d == 192 && dv == 128) return {64, 4, 192, 1, 64, 3, 3};
  if (d == 192) return {64, 3, 192, 2, 80, 2, 2};
  return {48, 3, 128, 1, 64, 2, 1};
}

constexpr bool split_bwd_tile_fits(int d, int dv) {
  const SplitBwdTile t = split_bwd_tile(d, dv);
  return t.dkv_smem_bytes(d, dv) <= kSmemLimitLarge && t.dq_smem_bytes(d, dv) <= kSmemLimitLarge;
}
static_assert(split_bwd_tile_fits(64, 64) && split_bwd_tile_fits(kShortHeadDim, kShortHeadDim) &&
              split_bwd_tile_fits(192, 128) && split_bwd_tile_fits(192, 192) && split_bwd_tile_fits(256, 256));

}  // namespace flash_ext::sm90
