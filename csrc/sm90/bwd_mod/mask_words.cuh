// Which scores of the sm90 backward with modifiers are hidden or dropped: one bit for each score of a consumer thread.
// Loaders make them, 32 keys at a time, which two consumer warps share, and leave them beside the step.
#pragma once

#include "../../common/mask_words.cuh"
#include "config.cuh"

namespace flash_ext::sm90 {

// Of 32 queries and 32 keys, a part, a lane makes one word: byte b is key lane / 4 + 8 b, bit 2 j + c of it query
// 8 j + 2 (lane % 4) + c; the other way round (kByQueries) where accumulators have queries along their rows. Its halves
// are those of two consumer warps, whose words hold two such halves: score i is bit bit_of_score(i), s[4 j + 2 half +
// c].
__host__ __device__ constexpr int bit_of_score(int i) { return i / 16 * 16 + i / 2 % 2 * 8 + i / 4 % 4 * 2 + i % 2; }
__host__ __device__ constexpr int score_of_bit(int b) { return b / 16 * 16 + b / 2 % 4 * 4 + b / 8 % 2 * 2 + b % 2; }
static_assert(score_of_bit(bit_of_score(7)) == 7 && score_of_bit(bit_of_score(26)) == 26);
inline constexpr uint32_t kFirstKeyScores = 0x00ff00ff;  // of the first of the two keys that a thread has

// use(i, x) for the i-th of a thread's rows 8 j + 2 (lane % 4) + c of 32, x as the lane has it that owns the row.
template <typename Use>
__device__ __forceinline__ void hand_out(uint32_t x, const Use& use) {
  const int lane = ptx::fresh_lane();
#pragma unroll
  for (int i = 0; i < 8; ++i) use(i, __shfl_sync(ptx::kFullWarp, x, i / 2 * 8 + 2 * (lane % 4) + i % 2));
}

// The word of a mask for the keys [col0, col0 + 32) of a row, ahead of the rest: several are asked for at once.
__device__ __forceinline__ uint32_t mask_word(const ScoreMod& score_mod, int row, int col0, TileTests tests) {
  const BitRows& mask = score_mod.m.mask;
  if (mask.words == nullptr || !(tests & kTestRows)) return ~0u;
  return ScoreMod::word(mask, score_mod.seq.b, score_mod.h, row, col0 / 32);
}

// From the bits of each of 32 queries or keys, a word of 32 that its lane has made, to those of each thread's scores:
// of what lies along the bits of a byte, and of what bytes number.
__device__ __forceinline__ uint32_t hand_out_bits(uint32_t mine) {
  const int lane = ptx::fresh_lane();
  uint32_t bits = 0;
  hand_out(mine, [&](int i, uint32_t word) { bits |= __funnelshift_r(word, word, lane / 4 - i) & (0x01010101u << i); });
  return bits;
}
__device__ __forceinline__ uint32_t hand_out_bytes(uint32_t mine) {
  const int lane = ptx::fresh_lane();
  uint32_t bits = 0;
#pragma unroll
  for (int b = 0; b < 4; ++b) {
    uint32_t pairs = __shfl_sync(ptx::kFullWarp, mine, lane / 4 + 8 * b) >> (2 * (lane % 4)) & 0x03030303u;
    pairs |= pairs >> 6;
    bits |= ((pairs & 0xf) | (pairs >> 12 & 0xf0)) << (8 * b);
  }
  return bits;
}

template <bool kByQueries>
struct MaskWordLayout {
  __device__ static __forceinline__ uint32_t of_rows(uint32_t mine) {
    return kByQueries ? hand_out_bytes(mine) : hand_out_bits(mine);
  }
  __device__ static __forceinline__ uint32_t of_keys(uint32_t mine) {
    return kByQueries ? hand_out_bits(mine) : hand_out_bytes(mine);
  }
};

// Scores that no test of the key hides: documents, hidden_rows.
template <bool kByQueries>
__device__ __forceinline__ uint32_t bits_by_keys(const ScoreMod& score_mod, int row0, int col0) {
  const Modifiers& m = score_mod.m;
  const int lane = ptx::fresh_lane();
  uint32_t visible = ~0u;
  if (has_documents(m)) {
    const Documents documents(score_mod);
    const auto id_of_row = [&](int i) { return documents.row(row0 + i); };
    const auto id_of_key = [&](int i) { return documents.key(col0 + i); };
    const int along_bits = kByQueries ? id_of_key(lane) : id_of_row(lane);
    int along_bytes[4];
#pragma unroll
    for (int b = 0; b < 4; ++b) {
      along_bytes[b] = kByQueries ? id_of_row(lane / 4 + 8 * b) : id_of_key(lane / 4 + 8 * b);
    }
    visible = 0;
    hand_out(static_cast<uint32_t>(along_bits), [&](int i, uint32_t id) {
#pragma unroll
      for (int b = 0; b < 4; ++b) {
        if (static_cast<int>(id) == along_bytes[b]) visible |= 1u << (8 * b + i);
      }
    });
  }
  if (!has_key_words(m)) return visible;
  const uint32_t hidden = key_word(score_mod, col0 + lane, row0);
  return visible & ~MaskWordLayout<kByQueries>::of_keys(hidden);
}

// Scores that dropout hits: the draws of common/dropout.cuh. One Philox block serves the rows r, r + 8 and the keys c,
// c + 8, c + 16, c + 24: what a thread has. Each key's bits are shifted in from the highest on, in a chain of its own.
__device__ __forceinline__ uint32_t dropped_bits(const Modifiers& m, int row0, int col0, const DropKeys& keys) {
  const uint32_t lane = ptx::fresh_lane();
  const uint32_t minus_below = 0u - m.drop_below;
  const uint32_t col_id = static_cast<uint32_t>(col0) / 32 * 8 + lane / 4;
  const uint32_t row_id = static_cast<uint32_t>(row0) / 16 * 8 + 2 * (lane % 4);
  uint32_t of_key[4] = {};
#pragma unroll 1
  for (int n = 1; n >= 0; --n) {  // both at once would not fit the registers
    uint4 draws[2];
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      draws[c] = keys.draws(row_id + 8 * n + c, col_id);
    }
#pragma unroll
    for (int i = 3; i >= 0; --i) {  // bit 4 n + i of each key
      const uint4& x = draws[i % 2];
      const uint32_t words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
      for (int b = 0; b < 4; ++b) {
        const uint32_t draw = i < 2 ? words[b] & 0xffff : words[b] >> 16;
        of_key[b] = __funnelshift_l(draw + minus_below, of_key[b], 1);
      }
    }
  }
  return __byte_perm(__byte_perm(of_key[0], of_key[1], 0x0040), __byte_perm(of_key[2], of_key[3], 0x0040), 0x5410);
}

// The same by consumers, bit i is score i. One Philox block serves 32 keys, hence two warps: each draws 32 of the 64
// queries for both, and they meet at a named barrier.
template <typename T>
__device__ __forceinline__ uint32_t draw_dropped(const Modifiers& m, int row0, int col0, const DropKeys& keys,
                                                 uint16_t* drawn) {
  constexpr int kQueries = T::kBlockM / 2;
  const uint32_t lane = ptx::fresh_lane();
  const uint32_t warp = static_cast<uint32_t>(ptx::fresh_thread_idx()) / 32 % T::kConsumerWarps;
  const uint32_t odd = warp % 2;
  const uint32_t highest = (m.drop_below << 16) - 1;
  const uint32_t col_id = static_cast<uint32_t>(col0) / 32 * 8 + lane / 4;
  const uint32_t row_id = (static_cast<uint32_t>(row0) + odd * kQueries) / 16 * 8 + 2 * (lane % 4);
  uint32_t bits[2] = {};  // of the first 16 keys, of the others
#pragma unroll
  for (int n = 0; n < kQueries / 16; ++n) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const uint4 draws = keys.draws(row_id + n * 8 + c, col_id);
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
  ptx::bar_sync(ptx::kExchangeBarrier + warp / 2, 2 * ptx::kWarpThreads);
  const uint32_t theirs = drawn[warp * 32 + lane];
  return odd ? mine << 16 | theirs : theirs << 16 | mine;
}

// And by consumers for themselves, keys along the rows of the accumulators (kT) or queries. Of 16 keys half of each
// block is for another warp, which makes it as well: what it would take to exchange has no place at head_dim 192 and
// 256.
template <bool kT, int kCount>
__device__ __forceinline__ uint32_t draw_own(const Modifiers& m, int row0, int col0, const DropKeys& keys) {
  const uint32_t lane = ptx::fresh_lane();
  const uint32_t highest = (m.drop_below << 16) - 1;
  const uint32_t few = lane / 4, many = 2 * (lane % 4);
  const uint32_t row_id = static_cast<uint32_t>(row0) / 16 * 8 + (kT ? many : few);
  const uint32_t col_id = static_cast<uint32_t>(col0) / 32 * 8 + (kT ? few : many);
  const bool is_late = kT && col0 % 32 != 0;  // the other half of a block
  uint32_t bits = 0;
#pragma unroll
  for (int n = 0; n < (kT ? kCount / 8 : kCount / 16); ++n) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const uint4 x = keys.draws(row_id + (kT ? 8 * n + c : 0), col_id + (kT ? 0 : 8 * n + c));
      if constexpr (kT) {
        const uint32_t words[2] = {is_late ? x.z : x.x, is_late ? x.w : x.y};
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          if ((words[half] << 16) <= highest) bits |= 1u << (8 * n + 2 * half + c);
          if (words[half] <= highest) bits |= 1u << (8 * n + 4 + 2 * half + c);
        }
      } else {
        const uint32_t words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          if ((words[j] << 16) <= highest) bits |= 1u << (16 * n + 4 * j + c);
          if (words[j] <= highest) bits |= 1u << (16 * n + 4 * j + 2 + c);
        }
      }
    }
  }
  return bits;
}

}  // namespace flash_ext::sm90
