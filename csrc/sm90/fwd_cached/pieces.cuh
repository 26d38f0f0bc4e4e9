// Where TMA finds rows of a cache, which come in pieces of one copy each.
#pragma once

#include "../../common/kv_rows.cuh"

namespace flash_ext::sm90 {

// Maps of K and V have dimensions (columns, 2^30 rows, 2^30 steps of 2^34 bytes, 2^30 steps of 16 bytes). The last two
// coordinates reach any address modulo 2^64.
inline constexpr int kMapRows = 1 << 30, kFarShift = 34, kNearShift = 4;

// Coordinates of a piece. Its rows that are there have the last numbers below 2^30, so those behind them lie outside
// and come as zeros, whatever memory holds.
struct PiecePlace {
  int row, far, near;

  // Rows of key head h_k from position `first` on, where none may be there any more. row_bytes: from row to row.
  __device__ static __forceinline__ PiecePlace of(const CachedKeys& keys, const KvCache& c, const StridedView& x,
                                                  int64_t row_bytes, int h_k, int first, int rows) {
    const int there = min(max(keys.length - first, 0), rows);
    const int64_t at = there > 0 ? 2 * (keys.offset(c, x, first) + h_k * x.head_stride) : 0;
    const uint64_t from = static_cast<uint64_t>(at) - static_cast<uint64_t>(kMapRows - there) * row_bytes;
    return {kMapRows - there, static_cast<int>(from >> kFarShift),
            static_cast<int>(from >> kNearShift) & ((1 << (kFarShift - kNearShift)) - 1)};
  }
};

}  // namespace flash_ext::sm90
