// Which scores of the sm90 backward with modifiers are hidden or dropped: one bit for each score of a consumer thread.
// Loaders make them, 32 keys at a time, which two consumer warps share, and leave them beside the step.
#pragma once

#include "bwd_mod_parts.cuh"

namespace flash_ext::sm90 {

// Bits of a thread's scores with 32 keys: byte b of of[part] is key lane / 4 + 8 b, bit 2 j + c of it query
// 32 part + 8 j + 2 (lane % 4) + c.
struct KeyBits {
  uint32_t of[2];

  // Those of the first or the second of the two consumer warps: bit mark_of(i) is its score i.
  __device__ __forceinline__ uint32_t of_warp(int odd) const {
    return __byte_perm(of[0], of[1], odd == 0 ? 0x5410 : 0x7632);
  }
};
// Of the score s[4 j + 2 half + c].
__host__ __device__ constexpr int mark_of(int i) { return i / 16 * 16 + i / 2 % 2 * 8 + i / 4 % 4 * 2 + i % 2; }

// use(i, x) for the i-th of a thread's rows 8 j + 2 (lane % 4) + c of 32, x as the lane has it that owns the row.
template <typename Use>
__device__ __forceinline__ void hand_out(uint32_t x, const Use& use) {
  const int lane = ptx::fresh_lane();
#pragma unroll
  for (int i = 0; i < 8; ++i) use(i, __shfl_sync(0xffffffffu, x, i / 2 * 8 + 2 * (lane % 4) + i % 2));
}

// Which of the keys [col0, col0 + 32) a row sees by what is known from the rows' side.
__device__ __forceinline__ uint32_t bits_of_row(const Scores& scores, int row, int col0, TileTests tests) {
  const Modifiers& m = scores.m;
  const Seat& seat = scores.seat;
  uint32_t bits = ~0u;
  if (tests & kTestInterval) {
    const RowKeys keys = scores.row_keys(row);
    bits = Scores::bits_between(keys.begin, keys.end, col0) | Scores::bits_between(0, keys.always, col0);
  }
  if (!(tests & kTestRows)) return bits;
  if (m.mask.words != nullptr) bits &= Scores::word(m.mask, seat.b, scores.h, row, col0 / 32);
  if (m.blocks.words != nullptr) {
    const uint32_t two = Scores::word(m.blocks, seat.b, scores.h, row / 16, col0 / 512) >> (col0 / 16 % 32);
    bits &= (two & 1) * 0xffffu | (two >> 1 & 1) * 0xffff0000u;
  }
  const int64_t base = scores.seat_batch() * m.hidden_keys.batch_stride + scores.h * m.hidden_keys.head_stride;
  const int64_t position = seat.q_start + min(row, seat.seqlen_q - 1);
#pragma unroll 1
  for (int k = 0; k < m.hidden_keys.count; ++k) {
    const int2 keys = Scores::interval(m.hidden_keys, base, position, k);
    bits &= ~Scores::bits_between(keys.x, keys.y, col0);
  }
  return bits;
}

// Scores that no test known by rows hides: each row's is made once, by one lane, and handed out.
__device__ __forceinline__ KeyBits bits_by_rows(const Scores& scores, int row0, int col0, TileTests tests) {
  const int lane = ptx::fresh_lane();
  KeyBits visible;
#pragma unroll
  for (int part = 0; part < 2; ++part) {
    visible.of[part] = 0;
    hand_out(bits_of_row(scores, row0 + 32 * part + lane, col0, tests), [&](int i, uint32_t of_row) {
      visible.of[part] |= __funnelshift_r(of_row, of_row, lane / 4 - i) & (0x01010101u << i);
    });
  }
  return visible;
}

// Takes out of `visible` what keys hide: documents, hidden_rows.
__device__ __forceinline__ void hide_by_keys(KeyBits& visible, const Scores& scores, int row0, int col0) {
  const Modifiers& m = scores.m;
  const Seat& seat = scores.seat;
  const int lane = ptx::fresh_lane(), last_row = seat.seqlen_q - 1, last_key = seat.seqlen_k - 1;
  if (m.document_k.ids != nullptr) {
    const int32_t* q = m.document_q.ids + scores.seat_batch() * m.document_q.batch_stride + seat.q_start;
    const int32_t* k = m.document_k.ids + scores.seat_batch() * m.document_k.batch_stride + seat.k_start;
    int key_ids[4];
#pragma unroll
    for (int b = 0; b < 4; ++b) {
      key_ids[b] = k[min(col0 + lane / 4 + 8 * b, last_key)];
      if (key_ids[b] < 0) key_ids[b] = -2;  // like no row
    }
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      const int of_row = max(q[min(row0 + 32 * part + lane, last_row)], -1);
      uint32_t same = 0;
      hand_out(static_cast<uint32_t>(of_row), [&](int i, uint32_t row_id) {
#pragma unroll
        for (int b = 0; b < 4; ++b) {
          if (static_cast<int>(row_id) == key_ids[b]) same |= 1u << (8 * b + i);
        }
      });
      visible.of[part] &= same;
    }
  }
  if (m.hidden_rows.count == 0) return;
  const int64_t base = scores.seat_batch() * m.hidden_rows.batch_stride + scores.h * m.hidden_rows.head_stride;
  const int64_t position = seat.k_start + min(col0 + lane, last_key);
#pragma unroll
  for (int part = 0; part < 2; ++part) {
    uint32_t hidden = 0;  // rows, of this lane's key
#pragma unroll 1
    for (int k = 0; k < m.hidden_rows.count; ++k) {
      const int2 rows = Scores::interval(m.hidden_rows, base, position, k);
      hidden |= Scores::bits_between(rows.x, rows.y, row0 + 32 * part);
    }
#pragma unroll
    for (int b = 0; b < 4; ++b) {
      uint32_t pairs = __shfl_sync(0xffffffffu, hidden, lane / 4 + 8 * b) >> (2 * (lane % 4)) & 0x03030303u;
      pairs |= pairs >> 6;
      visible.of[part] &= ~(((pairs & 0xf) | (pairs >> 12 & 0xf0)) << (8 * b));
    }
  }
}

// Votes tell ptxas that the warp stays together.
__device__ __forceinline__ KeyBits visible_bits(const Scores& scores, int row0, int col0, TileTests tests) {
  KeyBits visible{{~0u, ~0u}};
  if (__any_sync(0xffffffffu, (tests & (kTestInterval | kTestRows)) != 0)) {
    visible = bits_by_rows(scores, row0, col0, tests);
  }
  if (__any_sync(0xffffffffu, (tests & kTestKeys) != 0)) hide_by_keys(visible, scores, row0, col0);
  return visible;
}

// Scores that dropout hits: the draws of common/dropout.cuh. One Philox block serves the rows r, r + 8 and the keys c,
// c + 8, c + 16, c + 24: what a thread has.
__device__ __forceinline__ KeyBits dropped_bits(const Modifiers& m, int row0, int col0, const DropKeys& keys) {
  const uint32_t lane = ptx::fresh_lane();
  const auto key_of = [&](int round) { return keys.rounds[round]; };
  const uint32_t highest = (m.drop_below << 16) - 1;
  const uint32_t col_id = static_cast<uint32_t>(col0) / 32 * 8 + lane / 4;
  uint32_t row_id = static_cast<uint32_t>(row0) / 16 * 8 + 2 * (lane % 4);
  KeyBits dropped{};
#pragma unroll 1
  for (int part = 0; part < 2; ++part) {
    uint32_t bits = 0;
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const uint4 draws = philox(make_uint4(row_id + 8 * n + c, col_id, keys.counter.x, keys.counter.y), key_of);
        const uint32_t words[4] = {draws.x, draws.y, draws.z, draws.w};
#pragma unroll
        for (int b = 0; b < 4; ++b) {
          if ((words[b] << 16) <= highest) bits |= 1u << (8 * b + 4 * n + c);
          if (words[b] <= highest) bits |= 4u << (8 * b + 4 * n + c);
        }
      }
    }
    dropped.of[0] = dropped.of[1];
    dropped.of[1] = bits;
    row_id += 16;
  }
  return dropped;
}

}  // namespace flash_ext::sm90
