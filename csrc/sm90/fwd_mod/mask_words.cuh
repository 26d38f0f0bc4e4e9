// Which scores of a warp's 16 rows and 64 or 128 keys masks hide, a bit for each score of a thread. They are made while
// the products run, so that the chain from scores to weights only applies them.
#pragma once

#include "../../common/mask_words.cuh"
#include "config.cuh"

namespace flash_ext::sm90 {

// Bit 8 j + c of of[half][w] is the score of key 32 w + 8 j + 2 (lane % 4) + c with row lane / 4 + 8 half, a row's word
// as it comes but for a shift: eight words in place of two spare what gathering the bits costs. Other bits say nothing.
template <int kKeys>
struct ScoreBits {
  bool hide;  // any; else the words are not there
  uint32_t of[2][kKeys / 32];
};

// Bits 8 j + c from bits 2 j + c.
__device__ __forceinline__ uint32_t spread_pairs(uint32_t x) {
  return (x & 3) | (x & 0xc) << 6 | (x & 0x30) << 12 | (x & 0xc0) << 18;
}

// What a lane has of rows of bits: row lane / 2, half of the keys.
template <int kKeys>
struct OwnWords {
  static constexpr int kCount = kKeys / 64;
  static_assert(kKeys == 64 || kKeys == 128);
  uint32_t of[kCount];
};

template <int kKeys>
__device__ __forceinline__ OwnWords<kKeys> fetch_own_words(const ScoreMod& score_mod, const ModWorkTile& work, int row0,
                                                           int col0, TileTests tests) {
  constexpr int kCount = OwnWords<kKeys>::kCount;
  const Modifiers& m = score_mod.m;
  OwnWords<kKeys> own{};
  if (m.mask.words == nullptr || !(tests & kTestRows)) return own;
  const int lane = ptx::fresh_lane(), row = row0 + lane / 2, first = col0 / 32 + lane % 2 * kCount;
  if (row >= min(m.mask.rows, score_mod.seq.seqlen_q)) return own;
  const uint32_t* at = work.mask + row * m.mask.row_stride + first * m.mask.word_stride;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if (first + i < m.mask.num_words) own.of[i] = at[i * m.mask.word_stride];
  }
  return own;
}

// The keys from col0 on that a row sees by what is known from the rows' side. Rows behind the last one see what it
// sees: a row that saw nothing would have its warp take the maximum of every tile.
template <int kKeys>
__device__ __forceinline__ OwnWords<kKeys> seen_by_row(const ScoreMod& score_mod, const OwnWords<kKeys>& mask, int row,
                                                       int col0, TileTests tests) {
  constexpr int kCount = OwnWords<kKeys>::kCount;
  const Modifiers& m = score_mod.m;
  const bool has_mask = m.mask.words != nullptr && (tests & kTestRows);
  OwnWords<kKeys> bits;
#pragma unroll
  for (int i = 0; i < kCount; ++i) bits.of[i] = has_mask ? mask.of[i] : ~0u;
  and_row_words(bits.of, score_mod, min(row, score_mod.seq.seqlen_q - 1), col0, tests);
  return bits;
}

// Word w of row lane / 4 + 8 half from the lane that made it, shifted so that this thread's keys are at constant bits.
template <int kKeys>
__device__ __forceinline__ uint32_t row_word(const OwnWords<kKeys>& own, int half, int w, int lane) {
  constexpr int kCount = OwnWords<kKeys>::kCount;
  return __shfl_sync(ptx::kFullWarp, own.of[w % kCount], 2 * (lane / 4 + 8 * half) + w / kCount) >> (2 * (lane % 4));
}

// Scores that no test known by rows hides: each row's half is made once and handed out.
template <int kKeys>
__device__ __forceinline__ void visible_by_rows(ScoreBits<kKeys>& visible, const ScoreMod& score_mod,
                                                const OwnWords<kKeys>& mask, int row0, int col0, TileTests tests) {
  constexpr int kCount = OwnWords<kKeys>::kCount;
  const int lane = ptx::fresh_lane();
  const auto own = seen_by_row<kKeys>(score_mod, mask, row0 + lane / 2, col0 + lane % 2 * 32 * kCount, tests);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int w = 0; w < 2 * kCount; ++w) {
      visible.of[half][w] = row_word(own, half, w, lane);
    }
  }
}

// Key 8 j + 2 (lane % 4) + c of 32, for i = 2 j + c: the i-th of a thread's 8.
__device__ __forceinline__ int own_key(int i, int lane) { return i / 2 * 8 + 2 * (lane % 4) + i % 2; }
__device__ __forceinline__ int bit_in_word(int i) { return i / 2 * 8 + i % 2; }

// Adds what 32 keys hide of a thread's two rows, for its i-th key at bit_of(i): keys of other documents than the rows'.
// Each lane has the document of one key.
template <typename BitOf>
__device__ __forceinline__ void add_other_documents(uint32_t (&hidden)[2], int key_id, const int (&row_ids)[2],
                                                    const BitOf& bit_of) {
  const int lane = ptx::fresh_lane();
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int id = __shfl_sync(ptx::kFullWarp, key_id, own_key(i, lane));
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (id != row_ids[half]) hidden[half] |= 1u << bit_of(i);
    }
  }
}

// The same for the intervals of rows that keys hide. Each lane has the word of one key, a bit for each of the 16 rows.
template <typename BitOf>
__device__ __forceinline__ void add_hidden_rows(uint32_t (&hidden)[2], uint32_t word, const BitOf& bit_of) {
  const int lane = ptx::fresh_lane();
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const uint32_t of_key = __shfl_sync(ptx::kFullWarp, word, own_key(i, lane)) >> (lane / 4);
#pragma unroll
    for (int half = 0; half < 2; ++half) hidden[half] |= (of_key >> 8 * half & 1) << bit_of(i);
  }
}

__device__ __forceinline__ void find_row_documents(int (&ids)[2], const Documents& documents, int row0) {
#pragma unroll
  for (int half = 0; half < 2; ++half) ids[half] = documents.row(row0 + ptx::fresh_lane() / 4 + 8 * half);
}

// Takes out of `visible` what keys hide: documents, hidden_rows. A lane has the keys lane, lane + 32, ...
template <int kKeys>
__device__ __forceinline__ void hide_by_keys(ScoreBits<kKeys>& visible, const ScoreMod& score_mod, int row0, int col0) {
  const Modifiers& m = score_mod.m;
  const int lane = ptx::fresh_lane();
  // Loops over words, whose pairs are spread at the end, spill at head_dim 256; all words in a row spill at 128.
  constexpr bool kInRow = kKeys == 64;
  constexpr int kAtOnce = kInRow ? kKeys / 32 : 1;
  uint32_t hidden_pairs[2] = {};  // of[half]: bit 2 j + c is key 8 j + 2 (lane % 4) + c
  const auto bit_of = [](int i) { return kInRow ? bit_in_word(i) : i; };
  const auto hide = [&](int w, const uint32_t (&bits)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if constexpr (kInRow) {
        visible.of[half][w] &= ~bits[half];
      } else {
        hidden_pairs[half] |= bits[half] << (8 * w);
      }
    }
  };
  if (has_documents(m)) {
    const Documents documents(score_mod);
    int row_ids[2];
    find_row_documents(row_ids, documents, row0);
#pragma unroll kAtOnce
    for (int w = 0; w < kKeys / 32; ++w) {
      uint32_t hidden[2] = {};
      add_other_documents(hidden, documents.key(col0 + 32 * w + lane), row_ids, bit_of);
      hide(w, hidden);
    }
  }
  if (kInRow && !has_key_words(m)) return;
#pragma unroll kAtOnce
  for (int w = 0; w < (kInRow || has_key_words(m) ? kKeys / 32 : 0); ++w) {
    uint32_t hidden[2] = {};
    add_hidden_rows(hidden, key_word(score_mod, col0 + 32 * w + lane, row0), bit_of);
    hide(w, hidden);
  }
  if constexpr (!kInRow) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int w = 0; w < kKeys / 32; ++w) visible.of[half][w] &= ~spread_pairs(hidden_pairs[half] >> (8 * w));
    }
  }
}

// The vote makes the exit warp-uniform; otherwise ptxas clones what follows, also between a product's issue and its
// wait. first_row(): asked for behind it, because steps that hide nothing would wait for it too.
template <int kKeys, typename FirstRow>
__device__ __forceinline__ ScoreBits<kKeys> visible_scores(const ScoreMod& score_mod, const OwnWords<kKeys>& mask,
                                                           const FirstRow& first_row, int col0, TileTests tests) {
  ScoreBits<kKeys> visible;
  visible.hide = __any_sync(ptx::kFullWarp, tests != 0);
  if (!visible.hide) return visible;
  const int row0 = first_row();
  visible_by_rows<kKeys>(visible, score_mod, mask, row0, col0, tests);
  if (__any_sync(ptx::kFullWarp, (tests & kTestKeys) != 0)) hide_by_keys<kKeys>(visible, score_mod, row0, col0);
  return visible;
}

// -inf where a bit is 0; s[4 j + 2 half + c] as above.
template <int kCount>
__device__ __forceinline__ void hide_scores(float (&s)[kCount], const ScoreBits<2 * kCount>& visible) {
  if (!visible.hide) return;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const uint32_t word = visible.of[i / 2 % 2][i / 16];
    s[i] = (word >> (i / 4 % 4 * 8 + i % 2) & 1) != 0 ? s[i] : -INFINITY;
  }
}

// The same of 16 scores. Both rows' bits lie side by side first, so that four become predicates at once (R2P).
__device__ __forceinline__ void hide_16(float* s, const uint32_t (&words)[2]) {
  const uint32_t bits = (words[0] & 0x03030303) | (words[1] << 2 & 0x0c0c0c0c);
#pragma unroll
  for (int i = 0; i < 16; ++i) s[i] = (bits >> (i / 4 * 8 + i % 4) & 1) != 0 ? s[i] : -INFINITY;
}

// Words of this lane's rows for 64 keys of a tile, 8 bytes a row in shared memory. The rows have no others.
struct BroughtWords {
  uint2 of_row[2];

  // `rows`: the address of those of the warp's first row.
  __device__ __forceinline__ void load(uint32_t rows) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      of_row[half] = ptx::load_shared_words(rows + (ptx::fresh_lane() / 4 + 8 * half) * 8);
    }
  }
  __device__ __forceinline__ void hide(float (&s)[32], TileTests tests) const {
    if (!__any_sync(ptx::kFullWarp, (tests & kTestRows) != 0)) return;
    const int shift = 2 * (ptx::fresh_lane() % 4);
    hide_16(s, {of_row[0].x >> shift, of_row[1].x >> shift});
    hide_16(s + 16, {of_row[0].y >> shift, of_row[1].y >> shift});
    ptx::warpgroup_fence_operand(s);
  }
};

// hide_scores() for a kernel that has no registers for the bits of a tile: 32 keys at a time, made where they are
// applied.
template <int kCount>
__device__ __forceinline__ void hide_tile(float (&s)[kCount], const ScoreMod& score_mod, const ModWorkTile& work,
                                          int row0, int col0, TileTests tests) {
  constexpr int kKeys = 2 * kCount, kWords = OwnWords<kKeys>::kCount;
  const int lane = ptx::fresh_lane(), own_col0 = col0 + lane % 2 * 32 * kWords;
  const auto mask = fetch_own_words<kKeys>(score_mod, work, row0, col0, tests);
  const auto own = seen_by_row<kKeys>(score_mod, mask, row0 + lane / 2, own_col0, tests);
#pragma unroll
  for (int w = 0; w < kKeys / 32; ++w) {
    uint32_t seen[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) seen[half] = row_word(own, half, w, lane);
    if (__any_sync(ptx::kFullWarp, (tests & kTestKeys) != 0)) {
      uint32_t hidden[2] = {};
      const int col = col0 + 32 * w + ptx::fresh_lane();
      if (has_documents(score_mod.m)) {
        const Documents documents(score_mod);
        int row_ids[2];
        find_row_documents(row_ids, documents, row0);
        add_other_documents(hidden, documents.key(col), row_ids, bit_in_word);
      }
      if (has_key_words(score_mod.m)) add_hidden_rows(hidden, key_word(score_mod, col, row0), bit_in_word);
#pragma unroll
      for (int half = 0; half < 2; ++half) seen[half] &= ~hidden[half];
    }
    hide_16(s + 16 * w, seen);
  }
}

}  // namespace flash_ext::sm90
