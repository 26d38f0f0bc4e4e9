// The one-dimensional grid of a kernel that walks (tile, head, sequence); decode_work() is its inverse.
// No CUDA, no torch.
#pragma once

#include "divisor.h"
#include "heuristics.h"
#include "paths.h"

namespace flash_ext {

// Whether the portable forward takes the keys in stretches. Packed sequences it takes whole.
inline bool takes_stretches_sm80(const Problem& p) {
  return p.seqlen_k > kStretchesSm80.above && p.total_q * p.num_heads <= kStretchRowsSm80;
}

// Heads are taken in groups of heads_in_group (batch * heads counted together) whose shared rows fit the L2
// cache; inside a group the tile index is the slow dimension, so that causal tiles of all heads are started
// longest first.
struct Grid {
  uint32_t blocks = 0;      // tiles of one head
  uint32_t first_block = 0;  // where the order of tiles is open: the last one, from which they go down, or 0
  uint32_t head_slots = 0;  // heads, times the batch when dense
  Divisor group_tiles;      // blocks * heads_in_group
  Divisor heads_in_group;
  Divisor heads;   // of the tensor whose tiles are walked
  Divisor shared;  // query heads per key/value head
  int64_t ctas = 0;
};

inline Grid make_grid(const Problem& p, const DeviceInfo& d, bool over_queries, int block) {
  const int heads = over_queries ? p.num_heads : p.num_heads_k;
  const int group_size = p.num_heads / p.num_heads_k;
  const int64_t rows = over_queries ? p.seqlen_q : p.seqlen_k;
  const int64_t total = over_queries ? p.total_q : p.total_k;
  const int64_t blocks = p.is_varlen() ? packed_slots(total, p.batch, block) : (rows + block - 1) / block;
  const int64_t head_slots = p.is_varlen() ? heads : static_cast<int64_t>(p.batch) * heads;
  Grid g;
  g.ctas = blocks * head_slots;
  if (g.ctas <= 0 || g.ctas > INT32_MAX) return g;  // nothing to launch, or refused by launch()
  // What the tiles of one head share: K and V of its key head, or Q and dO of the query heads of a key head.
  const int64_t shared_rows =
      over_queries ? (p.is_varlen() ? p.total_k : p.seqlen_k) : (p.is_varlen() ? p.total_q : p.seqlen_q) * group_size;
  const int64_t bytes = 2 * shared_rows * (p.head_dim + p.head_dim_v);
  const int in_group = heads_per_group(head_slots, bytes, d.l2_bytes);
  g.blocks = static_cast<uint32_t>(blocks);
  g.first_block = g.blocks - 1;
  g.head_slots = static_cast<uint32_t>(head_slots);
  g.group_tiles = Divisor(static_cast<uint32_t>(blocks * in_group));
  g.heads_in_group = Divisor(static_cast<uint32_t>(in_group));
  g.heads = Divisor(static_cast<uint32_t>(heads));
  g.shared = Divisor(static_cast<uint32_t>(group_size));
  return g;
}

}  // namespace flash_ext
