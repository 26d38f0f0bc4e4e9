// Brings masks into the form the kernels read (condensed.h): bits instead of bytes, and what a whole tile needs to know
// of them.
//
// All begin in turn and let the next kernel begin early, behind which portable kernels with modifiers are launched so:
// they may read whatever was there before the pass, and wait for it before they read what it makes.
#pragma once

#include <algorithm>

#include "../common/seqlen.cuh"
#include "../condensed.h"
#include "../modifiers.h"
#include "../ptx/sm80.cuh"

namespace flash_ext {

inline constexpr int kMaskThreads = 256;

// Bit i: byte i is not 0. The product moves the lowest bits of four bytes next to each other, no two on one place.
__device__ __forceinline__ uint32_t bits_of_bytes(uint32_t bytes) {
  const uint32_t ones = (((bytes & 0x7f7f7f7fu) + 0x7f7f7f7fu) | bytes) >> 7 & 0x01010101u;
  return ones * 0x01020408u >> 24;
}

// The same of 32 bytes that begin on 16.
__device__ __forceinline__ uint32_t bits_of_bytes(const bool* at) {
  const uint4* quads = reinterpret_cast<const uint4*>(at);
  const uint4 low = quads[0], high = quads[1];
  return bits_of_bytes(low.x) | bits_of_bytes(low.y) << 4 | bits_of_bytes(low.z) << 8 | bits_of_bytes(low.w) << 12 |
         bits_of_bytes(high.x) << 16 | bits_of_bytes(high.y) << 20 | bits_of_bytes(high.z) << 24 |
         bits_of_bytes(high.w) << 28;
}

// The words of the rows of a condensed mask: one warp a row of 32 words at a time, a word a lane where its bytes lie
// together, else a bit a lane by ballot.
__global__ void __launch_bounds__(kMaskThreads)
    pack_mask_kernel(const __grid_constant__ BoolView x, uint32_t* words, int num_words, bool fill) {
  ptx::allow_next_kernel();
  const int64_t warp = (static_cast<int64_t>(blockIdx.x) * kMaskThreads + threadIdx.x) / 32;
  const int lane = threadIdx.x % 32, pieces = (num_words + 31) / 32;
  const int64_t row = warp / pieces;
  const int piece = static_cast<int>(warp - row * pieces);
  if (row >= int64_t{1} * x.sizes[0] * x.sizes[1] * x.sizes[2]) return;
  const int64_t r = row % x.sizes[2], h = row / x.sizes[2] % x.sizes[1], b = row / x.sizes[2] / x.sizes[1];
  const bool* at = x.ptr + b * x.strides[0] + h * x.strides[1] + r * x.strides[2];
  const int word = piece * 32 + lane;
  uint32_t* to = words + (row / x.sizes[2] * condensed::mask_rows(int64_t{x.sizes[2]}, fill) + r) * num_words;
  const bool together = !fill && x.strides[3] == 1 && reinterpret_cast<uintptr_t>(at) % 16 == 0;
  if (together && (piece + 1) * 1024 <= x.sizes[3]) {
    to[word] = bits_of_bytes(at + word * 32);
    return;
  }
  uint32_t mine = 0;
  for (int i = 0; i < 32; ++i) {
    const int col = (piece * 32 + i) * 32 + lane;
    // With `fill` one column stands for all.
    const bool bit = fill ? *at : col < x.sizes[3] && at[col * x.strides[3]];
    const uint32_t bits = __ballot_sync(ptx::kFullWarp, bit);
    if (lane == i) mine = bits;
  }
  if (word < num_words) to[word] = mine;
}

// What a condensed mask has behind its rows: any and all of each word over groups of kMaskGroup rows, for which rows
// that are not there count neither, and the mask tiles. A warp has four words of a group, a lane two of its rows.
__global__ void __launch_bounds__(kMaskThreads)
    group_mask_kernel(uint32_t* words, int64_t heads, int rows, int num_words, bool fill) {
  ptx::allow_next_kernel();
  static_assert(Modifiers::kMaskGroup == 64);
  const int groups = (rows + 63) / 64, pieces = (num_words + 3) / 4;
  const int64_t warp = (static_cast<int64_t>(blockIdx.x) * kMaskThreads + threadIdx.x) / 32;
  const int lane = threadIdx.x % 32, first = static_cast<int>(warp % pieces) * 4;
  const int64_t group = warp / pieces % groups, head = warp / pieces / groups;
  if (head >= heads) return;
  uint32_t* const of_head = words + head * condensed::mask_rows(int64_t{rows}, fill) * num_words;
  uint32_t* const any = of_head + (rows + group) * num_words + first;
  uint32_t* const all = any + int64_t{1} * groups * num_words;
  uint32_t own[2][4] = {}, missing[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int64_t row = group * 64 + i * 32 + lane;
    missing[i] = row < rows ? 0 : ~0u;
    if (row >= rows) continue;
    const uint32_t* const at = of_head + row * num_words + first;
    if (fill) {
      own[i][0] = *at;
    } else {
      const uint4 x = *reinterpret_cast<const uint4*>(at);
      own[i][0] = x.x, own[i][1] = x.y, own[i][2] = x.z, own[i][3] = x.w;
    }
  }
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    const uint32_t some = __reduce_or_sync(ptx::kFullWarp, own[0][w] | own[1][w]);
    const uint32_t every = __reduce_and_sync(ptx::kFullWarp, (own[0][w] | missing[0]) & (own[1][w] | missing[1]));
    if (lane == w && first + w < num_words) any[w] = some, all[w] = every;
  }
  if (condensed::mask_rows(rows, fill) == condensed::summed_rows(rows)) return;
  uint32_t* const tiles = of_head + condensed::summed_rows(int64_t{rows}) * num_words + group * 64 * num_words;
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    uint32_t tile[2] = {};
#pragma unroll
    for (int n = 0; n < 16; ++n) {  // the rows of a lane's bits
      const int i = n / 8, j = n / 2 % 4, c = n % 2;
      const uint32_t row = __shfl_sync(ptx::kFullWarp, own[i][w], 8 * j + 2 * (lane % 4) + c) >> (lane / 4);
#pragma unroll
      for (int t = 0; t < 2; ++t) tile[t] |= (row >> (16 * t) & 0x101) << (16 * i + 2 * j + c);
    }
#pragma unroll
    for (int t = 0; t < 2; ++t) tiles[(2 * (first + w) + t) * 32 + lane] = tile[t];
  }
}

// How pack_blocks_kernel divides its work: by Divisors, as other divisions take as long as its one trip to memory.
struct PackedBlocks {
  PackedBlocks(const BoolView& x, int rows, int words, int rows_per_block, int cols_per_block)
      : granule_rows(rows),
        num_words(words),
        ctas((int64_t{1} * rows * words + kMaskThreads - 1) / kMaskThreads),
        ctas_of_head(by(ctas)),
        heads(by(x.sizes[1])),
        words_of_row(by(words)),
        rows_of_block(by(rows_per_block)),
        cols_of_block(by(cols_per_block)) {
    ctas *= int64_t{1} * x.sizes[0] * x.sizes[1];
  }
  // Of an empty map, and of one too large, nothing is launched.
  static Divisor by(int64_t n) { return Divisor(static_cast<uint32_t>(std::clamp<int64_t>(n, 1, INT32_MAX))); }

  int32_t granule_rows, num_words;
  int64_t ctas;
  Divisor ctas_of_head, heads, words_of_row, rows_of_block, cols_of_block;
};

// A block mask as one bit per 16 x 16 scores: words[batch][head][row of granules][word], a word a thread.
__global__ void __launch_bounds__(kMaskThreads)
    pack_blocks_kernel(const __grid_constant__ BoolView x, uint32_t* words, const __grid_constant__ PackedBlocks to) {
  ptx::allow_next_kernel();
  const uint32_t bh = divide(blockIdx.x, to.ctas_of_head);
  const int64_t count = int64_t{1} * to.granule_rows * to.num_words;
  const int64_t index = int64_t{1} * (blockIdx.x - bh * to.ctas_of_head.divisor) * kMaskThreads + threadIdx.x;
  if (index >= count) return;
  const uint32_t row = count <= INT32_MAX ? divide(static_cast<uint32_t>(index), to.words_of_row)
                                          : static_cast<uint32_t>(index / to.num_words);
  const uint32_t bit0 = static_cast<uint32_t>(index - int64_t{1} * row * to.num_words) * 32;
  const uint32_t b = divide(bh, to.heads), h = bh - b * to.heads.divisor;
  const bool* at = x.ptr + b * x.strides[0] + h * x.strides[1] + divide(row, to.rows_of_block) * x.strides[2];
  // The blocks that these 32 bits meet; the first may begin before them.
  const int first = static_cast<int>(divide(bit0, to.cols_of_block));
  const int last = min(static_cast<int>(divide(bit0 + 31, to.cols_of_block)), x.sizes[3] - 1);
  const int cols = static_cast<int>(to.cols_of_block.divisor);
  uint32_t word = 0;
#pragma unroll 4
  for (int c = first; c <= last; ++c) {
    const int begin = c * cols - static_cast<int>(bit0), end = begin + cols;
    const uint32_t bits = (end >= 32 ? ~0u : (1u << end) - 1) & ~0u << max(begin, 0);
    if (at[c * x.strides[3]]) word |= bits;
  }
  words[bh * count + index] = word;
}

// Smallest and largest id of each group of DocumentIds::kGroup positions, in the places that condensed ids have for
// them.
__global__ void __launch_bounds__(kMaskThreads)
    group_document_ids_kernel(const int32_t* ids, int32_t* groups, int64_t rows, int64_t length) {
  ptx::allow_next_kernel();
  const int64_t per_row = (length + DocumentIds::kGroup - 1) / DocumentIds::kGroup;
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kMaskThreads + threadIdx.x;
  if (index >= rows * per_row) return;
  const int64_t row = index / per_row, first = (index - row * per_row) * DocumentIds::kGroup;
  int lo = INT32_MAX, hi = INT32_MIN;
  for (int64_t i = first; i < min(first + DocumentIds::kGroup, length); ++i) {
    lo = min(lo, ids[row * length + i]);
    hi = max(hi, ids[row * length + i]);
  }
  int32_t* to = groups + row * condensed::ids_length(length) + 2 * (index - row * per_row);
  to[0] = lo;
  to[1] = hi;
}

// Bounds of the interval starts and ends of each group, (rows, length, count, 2), in the places that condensed
// intervals have for them.
__global__ void __launch_bounds__(kMaskThreads)
    group_intervals_kernel(const int32_t* bounds, int32_t* groups, int64_t rows, int64_t length, int count) {
  ptx::allow_next_kernel();
  const int64_t per_row = (length + DocumentIds::kGroup - 1) / DocumentIds::kGroup;
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kMaskThreads + threadIdx.x;
  if (index >= rows * per_row * count) return;
  const int k = static_cast<int>(index % count);
  const int64_t group = index / count, row = group / per_row, first = (group - row * per_row) * DocumentIds::kGroup;
  int4 g = make_int4(INT32_MAX, INT32_MIN, INT32_MAX, INT32_MIN);
  for (int64_t i = first; i < min(first + DocumentIds::kGroup, length); ++i) {
    const int2 x = *reinterpret_cast<const int2*>(bounds + ((row * length + i) * count + k) * 2);
    g = make_int4(min(g.x, x.x), max(g.y, x.x), min(g.z, x.y), max(g.w, x.y));
  }
  const int64_t of_row = index - row * per_row * count;
  *reinterpret_cast<int4*>(groups + row * condensed::interval_length(length, count) + of_row * 4) = g;
}

}  // namespace flash_ext
