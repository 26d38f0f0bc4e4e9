// Where the keys of a sequence lie in a cache, and tiles of them.
#pragma once

#include <type_traits>

#include "../kv_cache.h"
#include "seqlen.cuh"
#include "tiles.cuh"

namespace flash_ext {

// Of one sequence. Values of the device are kept inside what there is: a length in the room of the sequence, a page in
// the pool. Entries of the table behind the length are never read.
struct CachedKeys {
  const int32_t* table;  // pages of the sequence; null: one page
  int64_t start;         // first row; 0 in pages
  int32_t page;          // without a table
  int32_t length;

  // b: -1 or batch for no sequence, which has no keys.
  __device__ static __forceinline__ CachedKeys of(const Problem& p, const KvCache& c, int b) {
    CachedKeys keys{nullptr, 0, 0, 0};
    if (b < 0 || b >= p.batch) return keys;
    int32_t room = c.max_keys;
    if (c.block_table != nullptr) {
      keys.table = c.block_table + b * c.table_stride;
    } else if (c.num_pages > 0) {
      keys.page = b;
    } else {
      const Span span = any_span(p.cu_seqlens_k, b, p.total_k);
      keys.start = span.start, room = span.length;
    }
    keys.length = c.seqused_k == nullptr ? room : min(max(c.seqused_k[b], 0), room);
    return keys;
  }

  // Elements from the first one of a head to row `row` < length.
  __device__ __forceinline__ int64_t offset(const KvCache& c, const StridedView& x, int row) const {
    return offset(c, x.batch_stride, x.row_stride, row);
  }
  __device__ __forceinline__ int64_t offset(const KvCache& c, int64_t page_stride, int64_t row_stride, int row) const {
    return offset_in(c, page_stride, row_stride, row, entry(c, row));
  }
  // Its halves: the entry of the table, and what follows from it.
  __device__ __forceinline__ int32_t entry(const KvCache& c, int row) const {
    return table != nullptr ? table[divide(row, c.page_size)] : page;
  }
  __device__ __forceinline__ int64_t offset_in(const KvCache& c, int64_t page_stride, int64_t row_stride, int row,
                                               int32_t entry) const {
    const uint32_t in_page = row - divide(row, c.page_size) * c.page_size.divisor;
    if (table != nullptr) entry = min(max(entry, 0), c.num_pages - 1);
    return entry * page_stride + (start + in_page) * row_stride;
  }
};

// load_tile() of rows from `first` on; some row of the sequence must be there. `head`: first element of the head.
template <int kRows, int kCols, int kThreads>
__device__ __forceinline__ void load_cached_tile(uint32_t tile, const CachedKeys& keys, const KvCache& c,
                                                 const StridedView& view, const uint16_t* head, int cols, int first,
                                                 int thread_idx) {
  using Tile = SmemTile<kCols>;
  if (!view.aligned) {
#pragma unroll 1
    for (int index = thread_idx; index < kRows * Tile::kChunks; index += kThreads) {
      const int chunk = index % Tile::kChunks, r = index / Tile::kChunks;
      const bool in = first + r < keys.length;
      const uint16_t* p = head + keys.offset(c, view, in ? first + r : keys.length - 1) + chunk * 8;
      copy_elements(tile + Tile::offset(r, chunk), p, in ? cols - chunk * 8 : 0);
    }
    return;
  }
  // A lane looks up one row of 32; the lanes that copy a row ask the one that has it.
  constexpr int kRowStep = kFloorPowerOfTwo<kThreads / Tile::kChunks>, kHeld = kRows < 32 ? kRows : 32;
  static_assert(kRows % kHeld == 0 && kHeld % kRowStep == 0 && kThreads % 32 == 0);
  const int chunk = thread_idx % Tile::kChunks, row = thread_idx / Tile::kChunks;
  const int col_bytes = min(16, max(0, (cols - chunk * 8) * 2));
  const uint16_t* p = head + (col_bytes > 0 ? chunk * 8 : 0);
  // Copies of as many bytes in all rows are five instructions fewer each, 0.92 of the time over 8 bits. At head_dim
  // 256, whose tiles have 16 rows, both ways would spill 8 bytes.
  const auto load = [&]<bool kWhole>(std::bool_constant<kWhole>) {
#pragma unroll
    for (int held = 0; held < kRows; held += kHeld) {
      const int64_t at = keys.offset(c, view, min(first + held + thread_idx % kHeld, keys.length - 1));
#pragma unroll(kWhole || kRows <= 16 ? kHeld / kRowStep : 2)
      for (int i = 0; i < kHeld / kRowStep; ++i) {
        const int r = row + i * kRowStep;  // of those held
        const int64_t from = __shfl_sync(ptx::kFullWarp, at, r % kHeld);
        if (kThreads == kRowStep * Tile::kChunks || row < kRowStep) {
          const bool in = kWhole || first + held + r < keys.length;
          ptx::cp_async_16(tile + Tile::offset(held + r, chunk), p + from, in ? col_bytes : 0);
        }
      }
    }
  };
  if (kRows > 16 && first + kRows <= keys.length) load(std::true_type{});
  else load(std::false_type{});
}

}  // namespace flash_ext
