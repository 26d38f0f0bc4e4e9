// The one device file that knows which keys a query sees and what happens to a score.
//
// Order of operations: scale, then mask, then softmax. Alignment is bottom-right: query row i of a sequence
// sits at key position i + seqlen_k - seqlen_q.
#pragma once

#include "../params.h"

namespace flash_ext {

inline constexpr float kLn2 = 0.6931471805599453f;

// Rows whose lse is below count as rows that see nothing. A row whose every score holds finfo.min gets there: next to
// 1e38 its lse has no room for the logarithm of a sum, so its weights cannot be told from it.
inline constexpr float kLowestLse = -1e30f;

struct BlockRange {
  int begin;
  int end;  // exclusive; begin >= end means no tile
};

// What a tile asks of the inner loop.
enum class TileKind { kFull, kPartial };

// Keys one query row sees: [begin, begin + count).
struct VisibleKeys {
  int begin;
  unsigned count;
  __device__ bool contains(int col) const { return static_cast<unsigned>(col - begin) < count; }
};

// The transpose: queries that see one key, [begin, begin + count).
struct VisibleQueries {
  int begin;
  unsigned count;
  __device__ bool contains(int row) const { return static_cast<unsigned>(row - begin) < count; }
};

struct AttnMod {
  const Problem& p;  // a kernel parameter: its fields cost no registers
  int seqlen_q;
  int seqlen_k;

  __device__ int shift() const { return seqlen_k - seqlen_q; }

  // First and last key that rows up to some row, or from one on, may see; none where the last is before the first.
  __device__ int first_key_of(int first_row) const { return max(0, first_row + shift() - p.reach_left); }
  __device__ int last_key_of(int last_row) const { return min(seqlen_k - 1, last_row + shift() + p.reach_right); }

  // Tiles of keys that a tile of queries may see.
  template <int kBlockM, int kBlockN>
  __device__ BlockRange kv_blocks(int m_block) const {
    const int lo = first_key_of(m_block * kBlockM);
    const int hi = last_key<kBlockM>(m_block);
    if (hi < lo) return {0, 0};
    return {lo / kBlockN, hi / kBlockN + 1};
  }

  // The last key that a tile of queries may see; below the first one it sees where it sees none.
  template <int kBlockM>
  __device__ int last_key(int m_block) const {
    return last_key_of(min((m_block + 1) * kBlockM, seqlen_q) - 1);
  }

  // The transpose of the same rule: tiles of queries that see a tile of keys.
  template <int kBlockM, int kBlockN>
  __device__ BlockRange q_blocks(int n_block) const {
    const int first_col = n_block * kBlockN;
    const int last_col = min(first_col + kBlockN, seqlen_k) - 1;
    const int lo = max(0, first_col - shift() - p.reach_right);
    const int hi = min(seqlen_q - 1, last_col - shift() + p.reach_left);
    if (hi < lo) return {0, 0};
    return {lo / kBlockM, hi / kBlockM + 1};
  }

  // kFull when no element of the tile needs a test or a change: every row sees every key of it.
  template <int kBlockM, int kBlockN>
  __device__ TileKind kind(int m_block, int n_block) const {
    const int first_row = m_block * kBlockM;
    const int last_row = min(first_row + kBlockM, seqlen_q) - 1;
    const int first_col = n_block * kBlockN;
    const int last_col = first_col + kBlockN - 1;
    const bool full = last_col < seqlen_k && last_col <= first_row + shift() + p.reach_right &&
                      first_col >= last_row + shift() - p.reach_left && p.score_factor == 1.f;
    return full ? TileKind::kFull : TileKind::kPartial;
  }

  // The same for keys [first_col, end_col) and the rows from first_row to last_row.
  __device__ TileKind kind_of(int first_row, int last_row, int first_col, int end_col) const {
    const bool seen = end_col <= last_key_of(first_row) + 1 && first_col >= first_key_of(last_row);
    return seen && p.score_factor == 1.f ? TileKind::kFull : TileKind::kPartial;
  }

  // Raw dot product -> score in units of 1 / abs_scale_log2, -inf for a key the row does not see.
  __device__ float score(float qk, VisibleKeys keys, int col) const {
    return keys.contains(col) ? qk * p.score_factor : -INFINITY;
  }

  __device__ VisibleKeys visible(int row) const {
    const int lo = max(0, row + shift() - p.reach_left);
    const int hi = min(seqlen_k - 1, row + shift() + p.reach_right);
    return {lo, static_cast<unsigned>(max(0, hi - lo + 1))};
  }

  __device__ VisibleQueries visible_queries(int col) const {
    const int lo = max(0, col - shift() - p.reach_right);
    const int hi = min(seqlen_q - 1, col - shift() + p.reach_left);
    return {lo, col < seqlen_k ? static_cast<unsigned>(max(0, hi - lo + 1)) : 0u};
  }
};

}  // namespace flash_ext
