// Tile shapes of the sm90 backward, for the host and the kernels alike. No CUDA, no torch.
#pragma once

#include "../../grid.h"
#include "../fwd/tiles.h"

namespace flash_ext::sm90 {

inline constexpr int kBwdControlBytes = 1024;  // work tiles and barriers, above head_dim 128

// A CTA owns block_n keys and streams tiles of 64 queries. Its two consumer warpgroups share one block of 128 keys, 64
// each, or (`independent`) have 128 keys each and nothing in common but the stream.
struct BwdTile {
  bool independent;
  int stages;   // tiles of Q and of dO in the ring
  bool staged;  // dQ leaves through shared memory, else from registers
  bool makes_dq = true;

  static constexpr int kBlockM = 64, kThreads = 384, kDsBytes = kBlockM * 128 * 2;  // dS of 128 keys
  static constexpr int kOrderedKeys = 128;  // a turn, where additions to dQ have an order
  constexpr int block_n() const { return independent ? 256 : 128; }
  constexpr int kv_bytes(int d) const { return tile_bytes(block_n(), d); }
  constexpr int stage_bytes(int d) const { return 2 * tile_bytes(kBlockM, d); }
  constexpr int ds_stages() const { return !makes_dq ? 0 : independent ? 2 : 3; }
  constexpr int ds_bytes() const { return (independent ? 2 * ds_stages() : ds_stages()) * kDsBytes; }
  constexpr int stats_bytes() const { return stages * kBlockM * 8; }
  constexpr int staging_bytes() const { return staged ? 8 * 4096 : 0; }
  static constexpr int kControlBytes = 896;  // work tiles and barriers
  // Of bwd/dq_pool_convert.cuh: each of two warps has stages for pieces of dQ; zeros for both.
  static constexpr int kPieceBytes = 2048, kConverters = 2, kZeroBytes = kPieceBytes / 2;
  constexpr int piece_stages() const { return !makes_dq ? 0 : independent ? 3 : 4; }
  constexpr int converter_bytes() const { return piece_stages() * kPieceBytes; }
  constexpr int zero_bytes() const { return makes_dq ? kZeroBytes : 0; }
  constexpr int converting_bytes() const { return kConverters * converter_bytes() + zero_bytes(); }
  constexpr int smem_bytes(int d) const {
    return 2 * kv_bytes(d) + stages * stage_bytes(d) + ds_bytes() + stats_bytes() + staging_bytes() +
           converting_bytes() + kControlBytes;
  }
};

// dQ is staged with 128 columns and leaves from registers with 64. Evidence: dq-staging.
constexpr BwdTile bwd_tile(int d) { return d <= 64 ? BwdTile{true, 5, false} : BwdTile{false, 2, true}; }
// Of the kernel that leaves dQ to another one, for few rows (prefers_split_bwd()): what it does not need holds two more
// tiles of Q and dO. That one has 128 keys a tile, and the tiles of queries of this one in the workspace.
inline constexpr int kShortHeadDim = 128;
inline constexpr BwdTile kShortKeysTile = {false, 4, true, false};

static_assert(bwd_tile(64).smem_bytes(64) <= kSmemLimitLarge && bwd_tile(128).smem_bytes(128) <= kSmemLimitLarge &&
              kShortKeysTile.smem_bytes(kShortHeadDim) <= kSmemLimitLarge);

// Heads whose dynamic tiles run side by side, longest first, where `fit` of them stay in the L2 cache. At least 8, for
// the order to even out the end, and as many as have a tile for every CTA; no more than 16 beyond that. In groups of one
// size, because the last one ends with what is left. Evidence: bwd-head-groups.
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
// groups whose dQ, in fp32, stays in the L2 cache with Q and dO: additions to it run at 3.6 TB/s up to 40 MB, at 1.5
// TB/s beyond.
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
  g.group_tiles = Divisor(g.blocks * static_cast<uint32_t>(heads));
  g.heads_in_group = Divisor(static_cast<uint32_t>(heads));
  return g;
}

inline Grid bwd_grid(const Problem& p, const DeviceInfo& d, int block_n, bool ordered) {
  return bwd_grid(p, d, block_n, ordered, has_unequal_tiles(p));
}

// Whether additions to dQ in a fixed order are faster than others, so that calls get them that did not ask: their first
// one needs no zeros, and where few blocks of keys see a tile of queries they hardly wait for each other. Fewer blocks of
// keys lose, and so do grouped heads and head_dim 64. Evidence: ordered-short.
inline bool prefers_order(const Problem& p, const DeviceInfo& d, const Constraints& c) {
  const int size = padded_head_dim(p.head_dim, p.head_dim_v);
  if (p.is_varlen() || p.num_heads != p.num_heads_k || (size != 96 && size != 128) || c.dq_pool == true) return false;
  const auto is_short = [&] {
    if (p.window_left >= 0 && p.window_right >= 0) return int64_t{p.window_left} + p.window_right <= 384;
    if (p.window_left < 0 && p.window_right == 0) return p.seqlen_k <= std::min(640, p.seqlen_q);
    return p.seqlen_k <= 384;
  };
  return is_short() && make_grid(p, d, false, bwd_tile(size).block_n()).ctas >= 3 * d.num_sms;
}

// Whether dK and dV on the one hand and dQ on the other are faster in kernels of their own, with 7 products instead of 5
// but without a dQ in fp32 that one pass zeroes and another one converts, 0.4 of the time at 256 rows. The
// batch-invariant mode does not take it, because it depends on the number of heads. Evidence: split-bwd-short.
inline bool prefers_split_bwd(const Problem& p, const DeviceInfo& d, const Constraints& c) {
  if (p.is_varlen() || p.num_heads != p.num_heads_k || c.dq_pool || d.batch_invariant) return false;
  if (padded_head_dim(p.head_dim, p.head_dim_v) != kShortHeadDim || p.window_left >= 0) return false;
  if (p.window_right > 0 || std::max(p.seqlen_q, p.seqlen_k) > 512) return false;
  return make_grid(p, d, false, kShortKeysTile.block_n()).ctas >= 3 * d.num_sms;
}

// Whether the kernels of a backward behind its first begin before the one before them is over, which saves a few
// microseconds: that counts up to 1k rows. Where tiles are long they take multiprocessors from the kernel before them.
// Evidence: pdl-short.
inline bool prefers_pdl(const Problem& p) { return p.total_q <= 1024 * static_cast<int64_t>(p.batch); }

// Tiles of queries of one head in the workspace; packed sequences as in packed_slots().
inline int64_t query_tiles_per_head(const Problem& p, int block_m = BwdTile::kBlockM) {
  return p.is_varlen() ? p.total_q / block_m + p.batch + 1 : (p.seqlen_q + block_m - 1) / block_m;
}
inline int64_t query_tiles(const Problem& p, int block_m = BwdTile::kBlockM) {
  return query_tiles_per_head(p, block_m) * p.num_heads * (p.is_varlen() ? 1 : p.batch);
}

// Accumulators of dq in a pool (bwd/dq_pool.cuh): heads, counted with the batch, go in rounds, and only so many rounds
// have accumulators at a time.
struct DqPool {
  static constexpr int kRounds = 4;

  int round_heads = 0;  // key heads; 0: no pool, every head has its own accumulators
  int rounds = 0;       // that have a place
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

// Where a pool pays: not where short causal tiles leave no time to convert. Evidence: dq-pool.
inline bool prefers_dq_pool(const Problem& p, int size) {
  if (p.seqlen_k > 4096) return false;
  const bool causal = p.window_left < 0 && p.window_right == 0;
  return !has_unequal_tiles(p) || (causal && size == 128 && p.seqlen_k >= 1536 && p.seqlen_k < 4096);
}

// A round has a tile for each CTA. All rounds that have a place have to fit the L2 cache. Evidence: dq-pool.
inline DqPool dq_pool_of(const Problem& p, const DeviceInfo& d, const Constraints& c) {
  const int size = padded_head_dim(p.head_dim, p.head_dim_v);
  const bool asked = c.dq_pool == true;
  if (c.dq_pool == false || p.is_varlen() || size > 128 || d.num_sms <= 0) return {};
  if (!asked && !prefers_dq_pool(p, size)) return {};
  const Grid g = make_grid(p, d, false, bwd_tile(size).block_n());
  if (g.ctas <= 0 || g.ctas > INT32_MAX || query_tiles(p) > INT32_MAX) return {};
  const auto quotient = [](int64_t x, int64_t y) { return (x + y - 1) / y; };
  DqPool pool;
  pool.heads_in_group = heads_in_group(false, g.head_slots, g.blocks, 1, d.num_sms);
  const int64_t in_a_group = int64_t{g.blocks} * pool.heads_in_group;
  pool.round_heads = static_cast<int>(pool.heads_in_group * quotient(d.num_sms, in_a_group));
  pool.all_rounds = static_cast<int>(quotient(g.head_slots, pool.round_heads));
  const int64_t l2 = d.l2_bytes > 0 ? d.l2_bytes : int64_t{50} << 20;
  const int64_t round_bytes = pool.round_tiles(p) * BwdTile::kBlockM * size * 4;
  pool.rounds = DqPool::kRounds;
  if (!asked && 5 * pool.rounds * round_bytes > 4 * l2) --pool.rounds;
  if (!asked && 5 * pool.rounds * round_bytes > 4 * l2) return {};
  return pool.all_rounds > pool.rounds ? pool : DqPool{};
}

// Work tiles as bwd_grid() has them, for a pool.
inline Grid pool_grid(const Problem& p, const DeviceInfo& d, int block_n, const DqPool& pool) {
  Grid g = make_grid(p, d, false, block_n);
  g.group_tiles = Divisor(g.blocks * static_cast<uint32_t>(pool.heads_in_group));
  g.heads_in_group = Divisor(static_cast<uint32_t>(pool.heads_in_group));
  return g;
}

}  // namespace flash_ext::sm90
