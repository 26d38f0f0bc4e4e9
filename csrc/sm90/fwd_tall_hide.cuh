// Hiding scores 32 keys at a time: fwd_mod_bits.cuh for a kernel that makes bits where a tile asks for them only, and
// has no registers to keep those of a tile.
#pragma once

#include "fwd_mod_bits.cuh"

namespace flash_ext::sm90 {

// Bit 8 j + c of [half] is the score of key col0 + 8 j + 2 (lane % 4) + c with row row0 + lane / 4 + 8 half.
using SeenKeys = uint32_t[2];

// Key 8 j + 2 (lane % 4) + c of 32, for i = 2 j + c, and its bit.
__device__ __forceinline__ int key_of_bit(int i, int lane) { return i / 2 * 8 + 2 * (lane % 4) + i % 2; }
__device__ __forceinline__ uint32_t bit_of_key(int i) { return 1u << (i / 2 * 8 + i % 2); }

// Takes out keys of other documents, each lane with the key col0 + lane.
__device__ __forceinline__ void keep_own_document(SeenKeys& seen, const Scores& scores, int row0, int col0) {
  const int lane = ptx::fresh_lane();
  const Documents documents(scores);
  const int key_id = documents.key(col0 + lane);
  int row_ids[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    row_ids[half] = documents.row(row0 + lane / 4 + 8 * half);
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int id = __shfl_sync(0xffffffffu, key_id, key_of_bit(i, lane));
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (id != row_ids[half]) seen[half] &= ~bit_of_key(i);
    }
  }
}

// Takes out rows that the intervals of keys hide, each lane with the key col0 + lane.
__device__ __forceinline__ void leave_hidden_rows(SeenKeys& seen, const Scores& scores, int row0, int col0) {
  const int lane = ptx::fresh_lane();
  const uint32_t hidden = key_word(scores, col0 + lane, row0);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const uint32_t of_key = __shfl_sync(0xffffffffu, hidden, key_of_bit(i, lane)) >> (lane / 4);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (of_key >> 8 * half & 1) seen[half] &= ~bit_of_key(i);
    }
  }
}

// -inf for what a warp's rows do not see of a tile; s[4 j + 2 half + c] as above.
template <int kCount>
__device__ __forceinline__ void hide_tile(float (&s)[kCount], const Scores& scores, const ModItem& item, int row0,
                                          int col0, TileTests tests) {
  constexpr int kKeys = 2 * kCount, kWords = OwnWords<kKeys>::kCount;
  const int lane = ptx::fresh_lane(), own_col0 = col0 + lane % 2 * 32 * kWords;
  const auto mask = fetch_own_words<kKeys>(scores, item, row0, col0, tests);
  const auto own = seen_by_row<kKeys>(scores, mask, row0 + lane / 2, own_col0, tests);
#pragma unroll
  for (int w = 0; w < kKeys / 32; ++w) {
    SeenKeys seen;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t word = __shfl_sync(0xffffffffu, own.of[w % kWords], 2 * (lane / 4 + 8 * half) + w / kWords);
      seen[half] = word >> (2 * (lane % 4));
    }
    if (__any_sync(0xffffffffu, (tests & kTestKeys) != 0)) {
      if (has_documents(scores.m)) keep_own_document(seen, scores, row0, col0 + 32 * w);
      if (has_key_words(scores.m)) leave_hidden_rows(seen, scores, row0, col0 + 32 * w);
    }
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      float& x = s[16 * w + i];
      x = (seen[i / 2 % 2] & bit_of_key(i / 4 * 2 + i % 2)) != 0 ? x : -INFINITY;
    }
  }
}

}  // namespace flash_ext::sm90
