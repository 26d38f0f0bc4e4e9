// Tile shapes of the sm90 backward, for the host and the kernels alike. No CUDA, no torch.
#pragma once

#include "../../grid.h"
#include "../fwd/tiles.h"

namespace flash_ext::sm90 {

inline constexpr int kBwdControlBytes = 1024;  // work tiles and barriers, above head_dim 128
inline constexpr int kDqConvertThreads = 128;  // a warp for 16 of the 64 rows of a tile of queries

// A CTA owns block_n keys and streams tiles of 64 queries. Its two consumer warpgroups share one block of 128 keys, 64
// each, or (`independent`) have 128 keys each and nothing in common but the stream; or there is one, and two CTAs a
// multiprocessor.
struct BwdTile {
  bool independent;
  int stages;  // tiles of Q and of dO in the ring
  bool staged;  // added dQ, and dK and dV of cooperating warpgroups, leave through shared memory, else from registers
  bool makes_dq = true;
  bool stores_dq = false;  // a block has all keys; independent warpgroups add their parts of dQ in shared memory
  int groups = 2;  // consumer warpgroups
  int key_blocks = 2;  // of 64 keys, that an independent warpgroup has

  static constexpr int kBlockM = 64, kDsBytes = kBlockM * 128 * 2;  // dS of 128 keys
  constexpr int ds_stage_bytes() const { return kBlockM * std::min(block_n(), 128) * 2; }
  static constexpr int kOrderedKeys = 128;  // a turn, where additions to dQ have an order
  constexpr int threads() const { return 128 * (1 + groups); }
  constexpr int ctas() const { return groups == 1 ? 2 : 1; }  // a multiprocessor
  constexpr int block_n() const { return independent ? 64 * key_blocks * groups : 128; }
  // Tiles by which, with static scheduling, a block of keys starts its walk later than the block before. Where
  // warpgroups cooperate that gains nothing, and few rows lose by it.
  constexpr int rotation() const { return independent ? block_n() / kBlockM : 0; }
  constexpr int kv_bytes(int d) const { return tile_bytes(block_n(), d); }
  constexpr int stage_bytes(int d) const { return 2 * tile_bytes(kBlockM, d); }
  constexpr int ds_stages() const { return !makes_dq ? 0 : key_blocks == 1 ? 1 : independent ? 2 : 3; }
  constexpr int ds_bytes() const { return (independent ? groups * ds_stages() : ds_stages()) * ds_stage_bytes(); }
  constexpr int stats_bytes() const { return stages * kBlockM * 8; }
  constexpr int staging_bytes() const { return staged ? 8 * 4096 : 0; }
  static constexpr int kControlBytes = 896;  // work tiles and barriers
  // Of bwd/dq_pool_convert.cuh: each of two warps has stages for pieces of dQ; zeros for both.
  constexpr bool adds_dq() const { return makes_dq && !stores_dq; }  // to sums in memory
  constexpr int exchange_bytes() const { return stores_dq && independent && groups == 2 ? kBlockM * 64 * 4 : 0; }
  static constexpr int kPieceBytes = 2048, kConverters = 2, kZeroBytes = kPieceBytes / 2;
  constexpr int piece_stages() const { return !adds_dq() ? 0 : independent ? 3 : 4; }
  constexpr int converter_bytes() const { return piece_stages() * kPieceBytes; }
  constexpr int zero_bytes() const { return adds_dq() ? kZeroBytes : 0; }
  constexpr int converting_bytes() const { return kConverters * converter_bytes() + zero_bytes(); }
  constexpr int smem_bytes(int d) const {
    return 2 * kv_bytes(d) + stages * stage_bytes(d) + ds_bytes() + stats_bytes() + staging_bytes() +
           converting_bytes() + exchange_bytes() + kControlBytes;
  }
};

// dQ is staged with 128 columns and leaves from registers with 64. Evidence: dq-staging.
constexpr BwdTile bwd_tile(int d) { return d <= 64 ? BwdTile{true, 5, false} : BwdTile{false, 2, true}; }
// Of the kernel that leaves dQ to another one, for few rows (prefers_split_bwd()): what it does not need holds two more
// tiles of Q and dO. That one has 128 keys a tile, and the tiles of queries of this one in the workspace.
inline constexpr int kShortHeadDim = 128;
inline constexpr BwdTile kShortKeysTile = {false, 4, true, false};

// Of the kernel whose blocks have all keys of a sequence. Up to head_dim 64 five stages would need 384 bytes more than
// there are.
constexpr bool has_stored_tile(int d) { return d <= 96; }
inline constexpr int kStoredTiles = 1 << 24;  // tiles of queries of a head are fewer
constexpr BwdTile stored_tile(int d) {
  return d <= 64 ? BwdTile{true, 4, false, true, true} : BwdTile{false, 2, true, true, true};
}
// The same for sequences that one warpgroup has, of at most 128 keys, or 64 above head_dim 64. Packed ones that have
// more add to sums in memory.
constexpr BwdTile stored_short_tile(int d) { return {true, 2, false, true, true, 1, d <= 64 ? 2 : 1}; }
// Dense calls up to this head_dim need no launch for delta: `out` fits the place of dS in that tile.
inline constexpr int kOwnStatsHeadDim = 64;

// The hardware keeps 1 KB for each CTA.
static_assert(stored_tile(64).smem_bytes(64) <= kSmemLimitLarge && stored_tile(96).smem_bytes(96) <= kSmemLimitLarge &&
              2 * stored_short_tile(64).smem_bytes(64) <= kSmemLimitLarge - 2048 &&
              2 * stored_short_tile(128).smem_bytes(128) <= kSmemLimitLarge - 2048 &&
              bwd_tile(64).smem_bytes(64) <= kSmemLimitLarge && bwd_tile(128).smem_bytes(128) <= kSmemLimitLarge &&
              kShortKeysTile.smem_bytes(kShortHeadDim) <= kSmemLimitLarge);

// Tiles of queries of one head in the workspace; packed sequences as in packed_slots().
inline int64_t query_tiles_per_head(const Problem& p, int block_m = BwdTile::kBlockM) {
  return p.is_varlen() ? p.total_q / block_m + p.batch + 1 : (p.seqlen_q + block_m - 1) / block_m;
}
inline int64_t query_tiles(const Problem& p, int block_m = BwdTile::kBlockM) {
  return query_tiles_per_head(p, block_m) * p.num_heads * (p.is_varlen() ? 1 : p.batch);
}

// What CTAs divide of a launch (StreamK, config.cuh): the work tiles of the last one to two rounds.
struct DividedTiles {
  int64_t tiles, all, share;  // work tiles; their steps; steps of a CTA, the last ones have what is left
};
inline DividedTiles divided_tiles(const Problem& p, int64_t tiles, int64_t ctas) {
  const int64_t divided = tiles % ctas + ctas, all = divided * query_tiles_per_head(p);
  return {divided, all, (all + ctas - 1) / ctas};
}

// Accumulators of dq in a pool (bwd/dq_pool.cuh): heads, counted with the batch, go in rounds, and only so many rounds
// have accumulators at a time.
struct DqPool {
  static constexpr int kRounds = 4;

  int round_heads = 0;  // key heads; 0: no pool, every head has its own accumulators
  int rounds = 0;  // that have a place
  int all_rounds = 0;
  int heads_in_group = 0;  // of the grid

  explicit operator bool() const { return round_heads > 0; }
  // What CTAs tell each other: the tile to convert next, then for each round the work tiles added and the tiles given
  // back.
  int64_t words() const { return round_heads > 0 ? 4 + (2 * int64_t{all_rounds} + 3) / 4 * 4 : 0; }
  int64_t round_tiles(const Problem& p) const {
    return int64_t{round_heads} * (p.num_heads / p.num_heads_k) * query_tiles_per_head(p);
  }
  int64_t tiles(const Problem& p) const { return rounds * round_tiles(p); }
};

}  // namespace flash_ext::sm90
