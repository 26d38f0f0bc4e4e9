// Which keys of a tile the rows of a warp see, as bits. A lane makes the words of one row, so that a test known by rows
// is done once a row and not once in every lane that holds some of its scores; hide_scores() hands them out.
#pragma once

#include <algorithm>

#include "../../common/mask_words.cuh"

namespace flash_ext::sm80 {

// The words of kRows rows and kCols keys: lane l has row l % kRows, and kALane words of it from first_word() on.
template <int kRows, int kCols>
struct RowWords {
  static constexpr int kWords = kCols / 32, kALane = std::max(1, (kRows * kWords) / 32);
  static_assert(kCols % 32 == 0 && (kRows == 16 || kRows == 32));
  uint32_t of[kALane];

  __device__ static int row(int lane) { return lane % kRows; }
  __device__ static int first_word(int lane) { return lane / kRows * kALane % kWords; }

  // Leaves them where all lanes of the warp find them, row after row; `at` is the warp's.
  __device__ void put(uint32_t at) const {
    const int lane = ptx::fresh_lane();
#pragma unroll
    for (int i = 0; i < kALane; ++i) ptx::store_shared_word(address(at, row(lane), first_word(lane) + i), of[i]);
    __syncwarp();
  }
  __device__ static uint32_t address(uint32_t at, int row, int w) { return at + 4 * (row * kWords + w); }
  static constexpr int kBytes = 4 * kRows * kWords;
};

// A thread's letter box for what the next tile's tests read of memory: words of its row in the mask, a word of blocks.
// Nobody else reads it, so that waiting for one's own copies is all it takes.
template <int kRows, int kCols>
struct FetchedWords {
  using Words = RowWords<kRows, kCols>;
  static constexpr int kCount = Words::kALane + 1;

  // mask and blocks: where those of the CTA's sequence and head begin.
  __device__ static void fetch(uint32_t box, const ScoreMod& s, const uint32_t* mask, const uint32_t* blocks, int row0,
                               int col0, TileTests tests) {
    if (!(tests & kTestRows)) return;
    const int lane = ptx::fresh_lane(), row = row0 + Words::row(lane);
    if (s.m.mask.words != nullptr) {
      const BitRows& x = s.m.mask;
      const int w = col0 / 32 + Words::first_word(lane);
      const uint32_t* from = mask + at(x, row, w);
#pragma unroll
      for (int i = 0; i < Words::kALane; ++i) {
        const bool in = row < x.rows && w + i < x.num_words;
        ptx::cp_async_4(box + 4 * i, in ? from + i * x.word_stride : mask, in ? 4 : 0);
      }
    }
    if (s.m.blocks.words != nullptr) {
      const BitRows& x = s.m.blocks;
      const bool in = row / 16 < x.rows && col0 / 512 < x.num_words;
      ptx::cp_async_4(box + 4 * Words::kALane, in ? blocks + at(x, row / 16, col0 / 512) : blocks, in ? 4 : 0);
    }
  }
  __device__ static const uint32_t* of_head(const BitRows& x, int b, int h) {
    return x.words + b * x.batch_stride + h * x.head_stride;
  }

 private:
  __device__ static uint64_t at(const BitRows& x, int row, int w) {
    return uint64_t{static_cast<uint32_t>(row)} * static_cast<uint32_t>(x.row_stride) +
           static_cast<uint32_t>(w * x.word_stride);
  }
};

// Bit (i, j) of a 32 x 32 matrix whose row i is in lane i becomes bit (j, i).
__device__ __forceinline__ uint32_t transpose_bits(uint32_t x) {
  const int lane = ptx::fresh_lane();
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    const uint32_t low = step == 16  ? 0x0000ffffu
                         : step == 8 ? 0x00ff00ffu
                         : step == 4 ? 0x0f0f0f0fu
                         : step == 2 ? 0x33333333u
                                     : 0x55555555u;
    const uint32_t other = __shfl_xor_sync(ptx::kFullWarp, x, step);
    x = lane & step ? (x & ~low) | (other & ~low) >> step : (x & low) | (other & low) << step;
  }
  return x;
}

// Hides what needs the key: a lane reads that of one key of every 32.
template <int kRows, int kCols>
__device__ __forceinline__ void hide_by_keys(RowWords<kRows, kCols>& seen, const ScoreMod& s, int row0, int col0) {
  using Words = RowWords<kRows, kCols>;
  const Modifiers& m = s.m;
  const int lane = ptx::fresh_lane();
  // The word that a lane with all rows of word w gives to its own words.
  const auto take = [&](int w, uint32_t hidden) {
    if constexpr (kRows < 32) hidden = __shfl_sync(ptx::kFullWarp, hidden, Words::row(lane));
#pragma unroll
    for (int i = 0; i < Words::kALane; ++i) {
      if (Words::first_word(lane) + i == w) seen.of[i] &= ~hidden;
    }
  };
  if (has_documents(m)) {
    const Documents documents(s);
    const int row_id = documents.row(row0 + Words::row(lane));
    int key_ids[Words::kWords];
#pragma unroll
    for (int w = 0; w < Words::kWords; ++w) key_ids[w] = documents.key(col0 + 32 * w + lane);
#pragma unroll
    for (int w = 0; w < Words::kWords; ++w) {
      uint32_t hidden = 0;
#pragma unroll
      for (int i = 0; i < 32; ++i) {
        if (__shfl_sync(ptx::kFullWarp, key_ids[w], i) != row_id) hidden |= 1u << i;
      }
      take(w, hidden);
    }
  }
  if (!has_key_words(m)) return;
#pragma unroll 1
  for (int w = 0; w < Words::kWords; ++w) {
    const uint32_t rows_hidden = key_word(s, col0 + 32 * w + lane, row0);
    take(w, transpose_bits(rows_hidden));
  }
}

// Which of the keys [col0, col0 + kCols) the rows [row0, row0 + kRows) see, by the tests that classify() named; `box`
// holds what FetchedWords has fetched for them.
template <int kRows, int kCols>
__device__ __forceinline__ RowWords<kRows, kCols> seen_keys(const ScoreMod& s, int row0, int col0, TileTests tests,
                                                            uint32_t box) {
  using Words = RowWords<kRows, kCols>;
  const Modifiers& m = s.m;
  const int lane = ptx::fresh_lane(), row = row0 + Words::row(lane), own_col0 = col0 + 32 * Words::first_word(lane);
  Words seen;
#pragma unroll
  for (int i = 0; i < Words::kALane; ++i) seen.of[i] = ~0u;
  if ((tests & kTestRows) && m.mask.words != nullptr) {
#pragma unroll
    for (int i = 0; i < Words::kALane; ++i) seen.of[i] = ptx::load_shared_word(box + 4 * i);
  }
  and_row_words(seen.of, s, row, own_col0, tests,
                [&](int, int) { return ptx::load_shared_word(box + 4 * Words::kALane); });
  if (tests & kTestKeys) hide_by_keys(seen, s, row0, col0);
  return seen;
}

enum class Seen { kNothing, kSome, kAll };

template <int kRows, int kCols>
__device__ __forceinline__ Seen how_much(const RowWords<kRows, kCols>& seen) {
  uint32_t any = 0, all = ~0u;
#pragma unroll
  for (uint32_t word : seen.of) {
    any |= word;
    all &= word;
  }
  if (!__any_sync(ptx::kFullWarp, any != 0)) return Seen::kNothing;
  return __any_sync(ptx::kFullWarp, all != ~0u) ? Seen::kSome : Seen::kAll;
}

// -inf for the scores of keys from word0 on that their row does not see, by what put() has left.
template <typename Words, int kA, int kN>
__device__ __forceinline__ void hide_scores(float (&acc)[kA][kN][4], uint32_t at, int word0) {
  const int lane = ptx::fresh_lane();
#pragma unroll
  for (int w = 0; w < kN / 4; ++w) {
#pragma unroll
    for (int r = 0; r < 2 * kA; ++r) {
      const uint32_t word = ptx::load_shared_word(Words::address(at, r / 2 * 16 + r % 2 * 8 + lane / 4, word0 + w));
      const uint32_t mine = word >> (2 * (lane % 4));
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        if ((mine & (1u << (i / 2 * 8 + i % 2))) == 0) acc[r / 2][w * 4 + i / 2][r % 2 * 2 + i % 2] = -INFINITY;
      }
    }
  }
}

}  // namespace flash_ext::sm80
