// Packed rows: the query heads of a key head, query after query, which a CTA of the forwards for few queries has as the
// rows of one tile.
#pragma once

#include "../../common/seqlen.cuh"
#include "../../kv_splits.h"
#include "../../ptx/sm80.cuh"

namespace flash_ext::sm80 {

struct SplitWork {
  int b;  // of strides
  int sequence;  // -1 or batch of rows outside every one
  int h_k;
  int part;
  int first;  // packed row of the sequence
  int rows;  // packed rows of the sequence from there on
  Span q;
  Span k;
};

template <int kRows>
__device__ __forceinline__ SplitWork split_work(const Problem& p, const SplitGrid& g) {
  SplitWork w;
  const uint32_t rest = divide(blockIdx.x, g.heads_k);
  const uint32_t slot = divide(rest, g.parts);
  const int group = static_cast<int>(g.group.divisor);
  w.h_k = static_cast<int>(blockIdx.x - rest * g.heads_k.divisor);
  w.part = static_cast<int>(rest - slot * g.parts.divisor);
  if (p.cu_seqlens_q != nullptr) {
    const TileSlot found = find_slot<kRows, true>(p.cu_seqlens_q, p.total_q, p.cu_seqlens_k, p.total_k, p.batch,
                                                  static_cast<int>(slot), g.group.divisor);
    w.b = 0;
    w.sequence = found.b;
    w.first = found.block * kRows;
    w.q = found.rows;
    w.k = found.others;
  } else {
    const uint32_t b = divide(slot, g.tiles);
    w.b = w.sequence = static_cast<int>(b);
    w.first = static_cast<int>(slot - b * g.tiles.divisor) * kRows;
    w.q = {0, p.seqlen_q};
    w.k = {0, p.seqlen_k};
  }
  w.rows = w.q.length * group - w.first;
  return w;
}

// Where a packed row lies in q, out and lse.
struct RowPlace {
  int b;
  int64_t row;
  int h;

  __device__ int64_t lse_offset(const Problem& p) const {
    if (p.cu_seqlens_q != nullptr) return h * p.total_q + row;
    return (static_cast<int64_t>(b) * p.num_heads + h) * p.seqlen_q + row;
  }
  // Its number among all rows of the call, which fwd_merge_kernel goes by.
  __device__ int64_t number(const Problem& p) const {
    return (static_cast<int64_t>(b) * p.seqlen_q + row) * p.num_heads + h;
  }
};

__device__ __forceinline__ RowPlace place_of(const SplitWork& w, const SplitGrid& g, int packed_row) {
  const int query = static_cast<int>(divide(packed_row, g.group));
  return {w.b, w.q.start + query,
          w.h_k * static_cast<int>(g.group.divisor) + packed_row - query * static_cast<int>(g.group.divisor)};
}

// Packed rows of a tile of a CTA, and where they lie.
struct SplitRows {
  const SplitGrid& g;
  const SplitWork& w;
  int count;  // of a full tile

  __device__ int last() const { return min(count, w.rows) - 1; }
  __device__ RowPlace place(int r) const { return place_of(w, g, w.first + min(r, w.rows - 1)); }
  // Inside the sequence.
  __device__ int query(int r) const { return static_cast<int>(divide(w.first + min(r, last()), g.group)); }
};

}  // namespace flash_ext::sm80
