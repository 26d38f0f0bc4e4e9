// Which scores of the sm90 backward with modifiers are hidden or dropped: one bit for each score of a consumer thread,
// s[4 j + 2 half + c] is bit 4 j + 2 half + c.
#pragma once

#include "bwd_mod_parts.cuh"

namespace flash_ext::sm90 {

// Those of the thread's first key.
inline constexpr uint32_t kFirstKey = 0x33333333u;

// Which of the keys [col0, col0 + 16) a row sees by what is known from the rows' side.
__device__ __forceinline__ uint32_t bits_of_row(const Scores& scores, int row, int col0, TileTests tests) {
  const Modifiers& m = scores.m;
  const Seat& seat = scores.seat;
  uint32_t bits = 0xffff;
  if (tests & kTestInterval) {
    const RowKeys keys = scores.row_keys(row);
    bits = Scores::bits_between(keys.begin, keys.end, col0) | Scores::bits_between(0, keys.always, col0);
  }
  if (!(tests & kTestRows)) return bits;
  if (m.mask.words != nullptr) bits &= Scores::word(m.mask, seat.b, scores.h, row, col0 / 32) >> (col0 % 32);
  if (m.blocks.words != nullptr) {
    bits &= 0u - (Scores::word(m.blocks, seat.b, scores.h, row / 16, col0 / 512) >> (col0 / 16 % 32) & 1);
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

// use(i, x) for the i-th of a thread's rows 8 j + 2 (lane % 4) + c of 32, x as the lane has it that owns the row.
template <typename Use>
__device__ __forceinline__ void hand_out(uint32_t x, const Use& use) {
  const int lane = ptx::fresh_lane();
#pragma unroll
  for (int i = 0; i < 8; ++i) use(i, __shfl_sync(0xffffffffu, x, i / 2 * 8 + 2 * (lane % 4) + i % 2));
}

// Scores that no test known by rows hides. It is made once for a row, two rows a lane, and handed out.
__device__ __forceinline__ uint32_t bits_by_rows(const Scores& scores, int row0, int col0, TileTests tests) {
  const int lane = ptx::fresh_lane();
  uint32_t of_rows = 0, visible = 0;
#pragma unroll 1
  for (int part = 1; part >= 0; --part) {
    of_rows = of_rows << 16 | (bits_of_row(scores, row0 + 32 * part + lane, col0, tests) & 0xffff);
  }
  hand_out(of_rows, [&](int i, uint32_t of_two) {
    const uint32_t seen = of_two >> (lane / 4);
    const int bit = i / 2 * 4 + i % 2;
    visible |= (seen & 1) << bit | (seen >> 8 & 1) << (bit + 2);
    visible |= (seen >> 16 & 1) << (bit + 16) | (seen >> 24 & 1) << (bit + 18);
  });
  return visible;
}

// Scores that no test of the key hides: documents, hidden_rows.
__device__ __forceinline__ uint32_t bits_by_keys(const Scores& scores, int row0, int col0) {
  const Modifiers& m = scores.m;
  const Seat& seat = scores.seat;
  const int lane = ptx::fresh_lane(), last_row = seat.seqlen_q - 1, last_key = seat.seqlen_k - 1;
  const auto key = [&](int half) { return min(col0 + lane / 4 + 8 * half, last_key); };
  uint32_t visible = ~0u;
  if (m.document_k.ids != nullptr) {
    const int32_t* q = m.document_q.ids + scores.seat_batch() * m.document_q.batch_stride + seat.q_start;
    const int32_t* k = m.document_k.ids + scores.seat_batch() * m.document_k.batch_stride + seat.k_start;
    const int ids[2] = {k[key(0)], k[key(1)]};
    if (ids[0] < 0) visible &= ~kFirstKey;
    if (ids[1] < 0) visible &= kFirstKey;
#pragma unroll 1
    for (int part = 0; part < 2; ++part) {
      const int of_row = q[min(row0 + 32 * part + lane, last_row)];
      uint32_t differ = 0;
      hand_out(static_cast<uint32_t>(of_row), [&](int i, uint32_t row_id) {
        const int bit = i / 2 * 4 + i % 2;
        if (static_cast<int>(row_id) != ids[0]) differ |= 1u << bit;
        if (static_cast<int>(row_id) != ids[1]) differ |= 4u << bit;
      });
      visible &= ~(differ << (16 * part));
    }
  }
  const int64_t base = scores.seat_batch() * m.hidden_rows.batch_stride + scores.h * m.hidden_rows.head_stride;
  const int row = row0 + 2 * (lane % 4);
#pragma unroll 1
  for (int k = 0; k < 2 * m.hidden_rows.count; ++k) {
    const int half = k % 2;
    const int2 rows = Scores::interval(m.hidden_rows, base, seat.k_start + key(half), k / 2);
    uint32_t hidden = 0;
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const int at = row + i / 2 * 8 + i % 2;
      if (at >= rows.x && at < rows.y) hidden |= 1u << (i / 2 * 4 + i % 2);
    }
    visible &= ~(hidden << (2 * half));
  }
  return visible;
}

// Scores that dropout hits: the draws of common/dropout.cuh. One Philox block serves 32 keys, hence two warps: each
// draws 32 of the 64 queries for both, and they meet at a named barrier.
template <typename T>
__device__ __forceinline__ uint32_t draw_dropped(const Modifiers& m, int row0, int col0, const DropKeys& keys,
                                                 uint16_t* drawn) {
  constexpr int kQueries = T::kBlockM / 2;
  const uint32_t lane = ptx::fresh_lane();
  const uint32_t warp = static_cast<uint32_t>(ptx::fresh_thread_idx()) / 32 % T::kConsumerWarps;
  const uint32_t odd = warp % 2;
  const auto key_of = [&](int round) { return keys.rounds[round]; };
  const uint32_t highest = (m.drop_below << 16) - 1;
  const uint32_t col_id = static_cast<uint32_t>(col0) / 32 * 8 + lane / 4;
  const uint32_t row_id = (static_cast<uint32_t>(row0) + odd * kQueries) / 16 * 8 + 2 * (lane % 4);
  uint32_t bits[2] = {};  // of the first 16 keys, of the others
#pragma unroll
  for (int n = 0; n < kQueries / 16; ++n) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const uint4 draws = philox(make_uint4(row_id + n * 8 + c, col_id, keys.counter.x, keys.counter.y), key_of);
      const uint32_t words[4] = {draws.x, draws.y, draws.z, draws.w};
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const int bit = 8 * n + 2 * (r % 2) + c;
        if ((words[r] << 16) <= highest) bits[r / 2] |= 1u << bit;
        if (words[r] <= highest) bits[r / 2] |= 1u << (bit + 4);
      }
    }
  }
  const uint32_t mine = odd ? bits[1] : bits[0], others = odd ? bits[0] : bits[1];
  drawn[(warp ^ 1) * 32 + lane] = static_cast<uint16_t>(others);
  debug_delay();
  ptx::bar_sync(1 + warp / 2, 64);
  const uint32_t theirs = drawn[warp * 32 + lane];
  return odd ? mine << 16 | theirs : theirs << 16 | mine;
}

}  // namespace flash_ext::sm90
