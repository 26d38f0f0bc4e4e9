// Masks on accumulators of S whose every lane works out the words of its own rows: sm80/bwd_dq/kernel.cuh,
// sm80/bwd_bias/kernel.cuh, sm80/short/config.cuh.
#pragma once

#include "mask_words.cuh"

namespace flash_ext {

// Words of a bit mask that a warp has fetched together; see fetch_mask().
template <int kRows, int kCols>
struct MaskWords {
  // A power of two of words a row, so that eight rows are in one register of the lanes.
  static constexpr int kARow = kCols <= 32 ? 1 : kCols <= 64 ? 2 : 4, kALane = (kRows * kARow + 31) / 32;
  static_assert(kCols <= 128);
  uint32_t of[kALane];

  // Word w of row 8 block + row, row below 8, whichever lane has it; all lanes ask for the same block and w.
  __device__ uint32_t word(int block, int row, int w) const {
    return __shfl_sync(ptx::kFullWarp, of[8 * block * kARow / 32], (8 * block + row) * kARow % 32 + w);
  }
};

// The words of a bit mask that a warp needs for its part of a tile, spread over its lanes: rows [row0, row0 + kRows)
// and keys [col0, col0 + kCols). Asked for before the products, handed out by hide().
template <int kRows, int kCols>
__device__ __forceinline__ MaskWords<kRows, kCols> fetch_mask(const ScoreMod& score_mod, int row0, int col0,
                                                              TileTests tests) {
  using Words = MaskWords<kRows, kCols>;
  const Modifiers& m = score_mod.m;
  Words result{};
  if (m.mask.words == nullptr || !(tests & kTestRows)) return result;
  const int lane = ptx::fresh_lane(), w = col0 / 32 + lane % Words::kARow;
  const int last_row = min(m.mask.rows, score_mod.seq.seqlen_q);
  const uint32_t* at =
      m.mask.words + score_mod.seq.b * m.mask.batch_stride + score_mod.h * m.mask.head_stride + w * m.mask.word_stride;
#pragma unroll
  for (int i = 0; i < Words::kALane; ++i) {
    const int in_part = i * 32 / Words::kARow + lane / Words::kARow, row = row0 + in_part;
    if (in_part < kRows && row < last_row && w < m.mask.num_words) result.of[i] = at[row * m.mask.row_stride];
  }
  return result;
}

// -inf for every key a row does not see, by the tests that classify() named. mask.word(block, row, w): the bit mask's
// word.
template <int kA, int kN, typename Words>
__device__ __forceinline__ void hide(float (&acc)[kA][kN][4], const ScoreMod& score_mod, int row0, int col0,
                                     TileTests tests, const Words& mask) {
  const Modifiers& m = score_mod.m;
  const int lane = ptx::fresh_lane();
  const auto place = [&](int r) { return r / 2 * 16 + r % 2 * 8 + lane / 4; };
  if (tests & (kTestInterval | kTestRows)) {
#pragma unroll
    for (int n4 = 0; n4 < (kN + 3) / 4; ++n4) {
      uint32_t words[2 * kA][1];
#pragma unroll
      for (int r = 0; r < 2 * kA; ++r) words[r][0] = mask.word(r, lane / 4, n4);
      if (!(tests & kTestRows) || m.mask.words == nullptr) {
#pragma unroll
        for (int r = 0; r < 2 * kA; ++r) words[r][0] = ~0u;
      }
      and_words_of_rows(
          words, score_mod, [&](int r) { return row0 + place(r); }, col0 + 32 * n4, tests,
          BlockWordFromMemory{score_mod});
#pragma unroll
      for (int r = 0; r < 2 * kA; ++r) {
        const uint32_t mine = words[r][0] >> (2 * (lane % 4));
#pragma unroll
        for (int i = 0; i < 2 * min(4, kN - 4 * n4); ++i) {
          if ((mine & (1u << (i / 2 * 8 + i % 2))) == 0) acc[r / 2][n4 * 4 + i / 2][r % 2 * 2 + i % 2] = -INFINITY;
        }
      }
    }
  }
  if (!(tests & kTestKeys)) return;
  const auto key_of = [&](int at) { return col0 + at / 2 * 8 + 2 * (lane % 4) + at % 2; };
  if (has_documents(m)) {
    const Documents documents(score_mod);
    int rows[2 * kA];
#pragma unroll
    for (int r = 0; r < 2 * kA; ++r) rows[r] = documents.row(row0 + place(r));
#pragma unroll
    for (int at = 0; at < 2 * kN; ++at) {
      const int key = documents.key(key_of(at));
#pragma unroll
      for (int r = 0; r < 2 * kA; ++r) {
        if (rows[r] != key) acc[r / 2][at / 2][r % 2 * 2 + at % 2] = -INFINITY;
      }
    }
  }
  if (has_key_words(m)) {
    const HiddenRows hidden(score_mod);
    // Key by key: addresses of all keys at once would not fit the registers. Each row is compared with the bounds,
    // since key words spill here (sm80/bwd_dq/kernel.cuh at head_dim 96) and take more instructions.
#pragma unroll
    for (int at = 0; at < 2 * kN; ++at) {
      hidden.for_each(key_of(at), [&](int2 rows) {
#pragma unroll
        for (int r = 0; r < 2 * kA; ++r) {
          const int row = row0 + place(r);
          if (row >= rows.x && row < rows.y) acc[r / 2][at / 2][r % 2 * 2 + at % 2] = -INFINITY;
        }
      });
    }
  }
}

}  // namespace flash_ext
