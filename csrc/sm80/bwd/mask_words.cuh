// Which of a warp's keys each of 32 queries sees, for kernels that hold keys along the rows: bwd/kernel.cuh. A lane
// makes the word of one query, so that what is known by rows is worked out once and not by all lanes that hold scores
// of the row; the scores' lanes then get it by a shuffle. What is known by keys is made by the lane of the key and
// turned around.
#pragma once

#include "../../common/mask_words.cuh"

namespace flash_ext::sm80 {

// Bit j of lane i becomes bit i of lane j.
__device__ __forceinline__ uint32_t transposed(uint32_t x) {
  const int lane = ptx::fresh_lane();
  uint32_t low = 0xffffu;
#pragma unroll
  for (int step = 16; step > 0; step /= 2, low ^= low << step) {
    const uint32_t other = __shfl_xor_sync(ptx::kFullWarp, x, step);
    x = (lane & step) ? (x & ~low) | (other >> step & low) : (x & low) | (other << step & ~low);
  }
  return x;
}

// Keys whose document is that of the row. Documents of neighbours are mostly the same: one turn for each of them.
__device__ __forceinline__ uint32_t keys_of_document(int of_row, int of_key) {
  uint32_t bits = 0, left = ~0u;
#pragma unroll 1
  do {
    const int id = __shfl_sync(ptx::kFullWarp, of_row, __ffs(left) - 1);
    const uint32_t keys = __ballot_sync(ptx::kFullWarp, of_key == id);
    if (of_row == id) bits = keys;
    left &= ~__ballot_sync(ptx::kFullWarp, of_row == id);
  } while (left != 0);
  return bits;
}

__device__ __forceinline__ uint32_t seen_by_keys(const ScoreMod& score_mod, int row0, int col0) {
  const Modifiers& m = score_mod.m;
  const int lane = ptx::fresh_lane();
  uint32_t bits = ~0u;
  if (has_documents(m)) {
    const Documents documents(score_mod);
    bits = keys_of_document(documents.row(row0 + lane), documents.key(col0 + lane));
  }
  if (has_key_words(m)) bits &= ~transposed(key_word(score_mod, col0 + lane, row0));
  return bits;
}

// Bit j: query row0 + lane sees key col0 + j, by the tests that classify() named. Word of a bit mask: that of this
// query and the 32 keys around col0.
template <int kKeys>
__device__ __forceinline__ uint32_t seen_keys(const ScoreMod& score_mod, uint32_t mask_word, int row0, int col0,
                                              TileTests tests) {
  static_assert(kKeys == 16 || kKeys == 32);
  const int row = row0 + ptx::fresh_lane();
  uint32_t bits = mask_word;
  if constexpr (kKeys == 16) bits = bits >> (col0 % 32) & 0xffffu;  // bits of keys behind these 16 mean nothing
  bits = row_word(bits, score_mod, row, col0, tests);
  if (tests & kTestKeys) bits &= seen_by_keys(score_mod, row0, col0);
  return bits;
}

// Leaves the words of kQueries queries in shared memory, kPitch bytes apart, where hide_unseen() of this warp finds
// them; false where they see all keys. `mask` is where the mask's words of these queries lie, kMaskPitch bytes apart,
// if the call has one and the tile needs it.
template <int kQueries, int kKeys, int kMaskPitch, int kPitch>
__device__ __forceinline__ bool leave_seen_keys(uint32_t to, const ScoreMod& score_mod, uint32_t mask, int row0,
                                                int col0, TileTests tests) {
  const int lane = ptx::fresh_lane();
  const bool has_mask = (tests & kTestRows) && score_mod.m.mask.words != nullptr;
  uint32_t all = ~0u;
#pragma unroll
  for (int first = 0; first < kQueries; first += 32) {
    const uint32_t word = has_mask ? ptx::load_shared_word(mask + (first + lane) * kMaskPitch) : ~0u;
    const uint32_t seen = seen_keys<kKeys>(score_mod, word, row0 + first, col0, tests);
    ptx::store_shared_word(to + (first + lane) * kPitch, seen);
    all &= seen;
  }
  __syncwarp();  // the vote would not order it: before others read the words, or fill their place with something else
  return !__all_sync(ptx::kFullWarp, (all | ~ScoreMod::low_bits(kKeys)) == ~0u);
}

// -inf for every key a query does not see, in S^T of 16 kA keys and 8 kN queries.
template <int kPitch, int kA, int kN>
__device__ __forceinline__ void hide_unseen(float (&acc)[kA][kN][4], uint32_t seen) {
  const int lane = ptx::fresh_lane();
#pragma unroll
  for (int n = 0; n < kN; ++n) {
    const uint32_t at = seen + (8 * n + 2 * (lane % 4)) * kPitch;
    uint2 words;
    if constexpr (kPitch == 4) {
      words = ptx::load_shared_words(at);
    } else {
      words = make_uint2(ptx::load_shared_word(at), ptx::load_shared_word(at + kPitch));
    }
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const uint32_t mine = (c == 0 ? words.x : words.y) << (7 - lane / 4);
#pragma unroll
      for (int r = 0; r < 2 * kA; ++r) {
        if ((mine & (0x80u << (r * 8))) == 0) acc[r / 2][n][r % 2 * 2 + c] = -INFINITY;
      }
    }
  }
  __syncwarp();  // the words' place is free
}

}  // namespace flash_ext::sm80
