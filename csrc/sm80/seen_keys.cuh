// Which of a warp's keys each of 32 queries sees, for kernels that hold keys along the rows: bwd.cuh. A lane makes the
// word of one query, so that what is known by rows is worked out once and not by all lanes that hold scores of the row;
// the scores' lanes then get it by a shuffle. What is known by keys is made by the lane of the key and turned around.
#pragma once

#include "../common/modifiers.cuh"

namespace flash_ext::sm80 {

// Bit j of lane i becomes bit i of lane j.
__device__ __forceinline__ uint32_t transposed(uint32_t x) {
  const int lane = ptx::fresh_lane();
  uint32_t low = 0xffffu;
#pragma unroll
  for (int step = 16; step > 0; step /= 2, low ^= low << step) {
    const uint32_t other = __shfl_xor_sync(0xffffffffu, x, step);
    x = (lane & step) ? (x & ~low) | (other >> step & low) : (x & low) | (other << step & ~low);
  }
  return x;
}

// Keys whose document is that of the row. Documents of neighbours are mostly the same: one turn for each of them.
__device__ __forceinline__ uint32_t keys_of_document(int of_row, int of_key) {
  uint32_t bits = 0, left = ~0u;
#pragma unroll 1
  do {
    const int id = __shfl_sync(0xffffffffu, of_row, __ffs(left) - 1);
    const uint32_t keys = __ballot_sync(0xffffffffu, of_key == id && id >= 0);
    if (of_row == id) bits = keys;
    left &= ~__ballot_sync(0xffffffffu, of_row == id);
  } while (left != 0);
  return bits;
}

__device__ __forceinline__ uint32_t seen_by_keys(const Scores& scores, int row0, int col0) {
  const Modifiers& m = scores.m;
  const Seat& seat = scores.seat;
  const int lane = ptx::fresh_lane();
  const int64_t q = seat.q_start + min(row0 + lane, seat.seqlen_q - 1);
  const int64_t k = seat.k_start + min(col0 + lane, seat.seqlen_k - 1);
  uint32_t bits = ~0u;
  if (m.document_k.ids != nullptr) {
    bits = keys_of_document(m.document_q.ids[scores.seat_batch() * m.document_q.batch_stride + q],
                            m.document_k.ids[scores.seat_batch() * m.document_k.batch_stride + k]);
  }
  if (m.hidden_rows.count > 0) {
    const int64_t base = scores.seat_batch() * m.hidden_rows.batch_stride + scores.h * m.hidden_rows.head_stride;
    uint32_t hidden = 0;
#pragma unroll 1
    for (int i = 0; i < m.hidden_rows.count; ++i) {
      const int2 rows = Scores::interval(m.hidden_rows, base, k, i);
      hidden |= Scores::bits_between(rows.x, rows.y, row0);
    }
    bits &= ~transposed(hidden);
  }
  return bits;
}

// Bit j: query row0 + lane sees key col0 + j, by the tests that visit() named. Word of a bit mask: that of this query
// and the 32 keys around col0.
template <int kKeys>
__device__ __forceinline__ uint32_t seen_keys(const Scores& scores, uint32_t mask_word, int row0, int col0,
                                              TileTests tests) {
  static_assert(kKeys == 16 || kKeys == 32);
  const Modifiers& m = scores.m;
  const int row = row0 + ptx::fresh_lane();
  uint32_t bits = mask_word;
  if constexpr (kKeys == 16) bits = bits >> (col0 % 32) & 0xffffu;
  if (tests & kTestInterval) {
    const RowKeys keys = scores.row_keys(row);
    bits &= Scores::bits_between(keys.begin, keys.end, col0) | Scores::bits_between(0, keys.always, col0);
  }
  if (tests & kTestRows) {
    if (m.blocks.words != nullptr) {
      const uint32_t two = Scores::word(m.blocks, scores.seat.b, scores.h, row / 16, col0 / 512) >> (col0 / 16 % 32);
      bits &= ((two & 1) * 0xffffu) | ((two >> 1 & 1) * 0xffff0000u);
    }
    const int64_t base = scores.seat_batch() * m.hidden_keys.batch_stride + scores.h * m.hidden_keys.head_stride;
#pragma unroll 1
    for (int i = 0; i < m.hidden_keys.count; ++i) {
      const int2 keys =
          Scores::interval(m.hidden_keys, base, scores.seat.q_start + min(row, scores.seat.seqlen_q - 1), i);
      bits &= ~Scores::bits_between(keys.x, keys.y, col0);
    }
  }
  if (tests & kTestKeys) bits &= seen_by_keys(scores, row0, col0);
  return bits;
}

// Leaves the words of kQueries queries in shared memory, kPitch bytes apart, where hide_unseen() of this warp finds them;
// false where they see all keys. `mask` is where the mask's words of these queries lie, kMaskPitch bytes apart, if the call has one and
// the tile needs it.
template <int kQueries, int kKeys, int kMaskPitch, int kPitch>
__device__ __forceinline__ bool leave_seen_keys(uint32_t to, const Scores& scores, uint32_t mask, int row0, int col0,
                                                TileTests tests) {
  const int lane = ptx::fresh_lane();
  const bool has_mask = (tests & kTestRows) && scores.m.mask.words != nullptr;
  uint32_t all = ~0u;
#pragma unroll
  for (int first = 0; first < kQueries; first += 32) {
    const uint32_t word = has_mask ? ptx::load_shared_word(mask + (first + lane) * kMaskPitch) : ~0u;
    const uint32_t seen = seen_keys<kKeys>(scores, word, row0 + first, col0, tests);
    ptx::store_shared_word(to + (first + lane) * kPitch, seen);
    all &= seen;
  }
  __syncwarp();  // the vote would not order it: before others read the words, or fill their place with something else
  return !__all_sync(0xffffffffu, (all | ~Scores::low_bits(kKeys)) == ~0u);
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
