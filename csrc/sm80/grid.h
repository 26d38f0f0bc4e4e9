// The one-dimensional grid of a kernel that walks (tile, head, sequence); decode_work() is its inverse.
// No CUDA, no torch.
#pragma once

#include "../heuristics.h"
#include "../paths.h"

namespace flash_ext::sm80 {

// Tiles of one head and heads side by side: the one-dimensional grid of decode_work().
struct Grid {
  int64_t blocks;
  int heads_in_group;
  int64_t ctas;
};

inline Grid make_grid(const Problem& p, const DeviceInfo& d, bool over_queries, int block) {
  const int heads = over_queries ? p.num_heads : p.num_heads_k;
  const int64_t rows = over_queries ? p.seqlen_q : p.seqlen_k;
  const int64_t total = over_queries ? p.total_q : p.total_k;
  const int64_t blocks = p.is_varlen() ? packed_slots(total, p.batch, block) : (rows + block - 1) / block;
  const int64_t head_slots = p.is_varlen() ? heads : static_cast<int64_t>(p.batch) * heads;
  // What the tiles of one head share: K and V of its key head, or Q and dO of the query heads of a key head.
  const int64_t shared_rows = over_queries ? (p.is_varlen() ? p.total_k : p.seqlen_k)
                                           : (p.is_varlen() ? p.total_q : p.seqlen_q) * (p.num_heads / p.num_heads_k);
  const int64_t bytes = 2 * shared_rows * (p.head_dim + p.head_dim_v);
  return {blocks, heads_per_group(head_slots, bytes, d.l2_bytes), blocks * head_slots};
}

}  // namespace flash_ext::sm80
