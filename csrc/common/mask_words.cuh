// The mask rule, said once: which keys a row sees, 32 at a time.
//
//   row word of (row, col0)   bit j: the row sees key col0 + j by all that is known from the row's side, which is its
//                             interval, the bit mask, the block map, hidden_keys and, over a cache, the tree
//   key word of (key, row0)   bit i: the key hides row row0 + i by hidden_rows
//   document ids              a row sees a key when they are equal
//
// A row sees a key that all three let it see. Kernels differ in which lane makes a word and in where its bits go. Those
// are layouts, and they decide nothing about masks:
//
//   common/hide.cuh                               a lane makes the words of its own scores' rows, and compares rows
//                                                 with what their keys hide one by one
//   sm80/fwd_mod/mask_words.cuh, sm90/fwd_mod/mask_words.cuh  a lane makes the words of one row, or of a half of one
//   sm80/bwd/mask_words.cuh, sm90/bwd_mod/mask_words.cuh     a lane makes the word of one row, and that of one key
//   passes/mask_passes.cuh                        mask tiles (condensed.h): a bit mask's words in the latter's layout
//   sm80/bwd_bias/steps.cuh                       light tiles: intervals and the bit mask only
#pragma once

#include "modifiers.cuh"

namespace flash_ext {

// What causal, window, chunk, prefix, sink tokens and ends of sequences leave of the keys [col0, col0 + 32).
__device__ __forceinline__ uint32_t interval_word(const RowKeys& keys, int col0) {
  return ScoreMod::bits_between(keys.begin, keys.end, col0) | ScoreMod::bits_between(0, keys.always, col0);
}

// Reads the word of the block map from memory. A kernel that has fetched it ahead passes its own function.
struct BlockWordFromMemory {
  const ScoreMod& score_mod;
  __device__ uint32_t operator()(int row, int col0) const {
    return ScoreMod::word(score_mod.m.blocks, score_mod.seq.b, score_mod.h, row / 16, col0 / 512);
  }
};

// words[r][i] &= row word of (row_of(r), col0 + 32 i). col0 is a multiple of 16, and all words of a row lie in one word
// of the block map. On entry words are those of the bit mask, ~0 where there is none or the tile does not ask for it.
// A thread's rows lie inside the tests and not around them, so that their loads are in flight together.
template <int kRows, int kCount, typename RowOf, typename BlockWord>
__device__ __forceinline__ void and_words_of_rows(uint32_t (&words)[kRows][kCount], const ScoreMod& score_mod,
                                                  const RowOf& row_of, int col0, TileTests tests,
                                                  const BlockWord& block_word) {
  const Modifiers& m = score_mod.m;
  const SeqInfo& seq = score_mod.seq;
  if (tests & kTestInterval) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const RowKeys keys = score_mod.row_keys(row_of(r));
#pragma unroll
      for (int i = 0; i < kCount; ++i) words[r][i] &= interval_word(keys, col0 + 32 * i);
    }
  }
  if (!(tests & kTestRows)) return;
  if (m.blocks.words != nullptr) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const uint32_t squares = block_word(row_of(r), col0) >> (col0 / 16 % 32);
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        words[r][i] &= (squares >> 2 * i & 1) * 0xffffu | (squares >> (2 * i + 1) & 1) * 0xffff0000u;
      }
    }
  }
  const int64_t base = score_mod.seq_batch() * m.hidden_keys.batch_stride + score_mod.h * m.hidden_keys.head_stride;
#pragma unroll 1
  for (int k = 0; k < m.hidden_keys.count; ++k) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int64_t position = seq.q_start + min(row_of(r), seq.seqlen_q - 1);
      const int2 keys = ScoreMod::interval(m.hidden_keys, base, position, k);
#pragma unroll
      for (int i = 0; i < kCount; ++i) words[r][i] &= ~ScoreMod::bits_between(keys.x, keys.y, col0 + 32 * i);
    }
  }
}

// The same for one row.
template <int kCount, typename BlockWord>
__device__ __forceinline__ void and_row_words(uint32_t (&words)[kCount], const ScoreMod& score_mod, int row, int col0,
                                              TileTests tests, const BlockWord& block_word) {
  and_words_of_rows(
      reinterpret_cast<uint32_t (&)[1][kCount]>(words), score_mod, [&](int) { return row; }, col0, tests, block_word);
}

template <int kCount>
__device__ __forceinline__ void and_row_words(uint32_t (&words)[kCount], const ScoreMod& score_mod, int row, int col0,
                                              TileTests tests) {
  and_row_words(words, score_mod, row, col0, tests, BlockWordFromMemory{score_mod});
}

// One row word, made of the bit mask's.
__device__ __forceinline__ uint32_t row_word(uint32_t mask_word, const ScoreMod& score_mod, int row, int col0,
                                             TileTests tests) {
  uint32_t words[1] = {mask_word};
  and_row_words(words, score_mod, row, col0, tests);
  return words[0];
}

// What the tree leaves of the keys [col0, col0 + 32). Only kernels over a cache AND it to their row words. Most keys
// are older than the tree, and ask for no memory.
__device__ __forceinline__ uint32_t tree_word(const ScoreMod& score_mod, int row, int col0) {
  const SeqInfo& seq = score_mod.seq;
  const int at = col0 - score_mod.shift();  // the bit of key col0; below 0: keys that every row sees
  if (at <= -32) return ~0u;
  if (at >= 64) return 0;
  const int64_t first_row = int64_t{score_mod.seq_batch()} * score_mod.p.seqlen_q + seq.q_start;
  const uint64_t bits = score_mod.m.tree[first_row + min(row, seq.seqlen_q - 1)];
  return at < 0 ? static_cast<uint32_t>(bits << -at) | ScoreMod::low_bits(-at) : static_cast<uint32_t>(bits >> at);
}

// The intervals of rows that keys hide. Keys past the end stand for the last one. An object for the same reason as
// Documents below: a thread that asks for several keys finds the base once.
struct HiddenRows {
  const ScoreMod& score_mod;
  int64_t base;

  __device__ explicit HiddenRows(const ScoreMod& s)
      : score_mod(s), base(s.seq_batch() * s.m.hidden_rows.batch_stride + s.h * s.m.hidden_rows.head_stride) {}
  template <typename Use>
  __device__ __forceinline__ void for_each(int key, const Use& use) const {
    const HiddenIntervals& x = score_mod.m.hidden_rows;
    const int64_t position = score_mod.seq.k_start + min(key, score_mod.seq.seqlen_k - 1);
#pragma unroll 1
    for (int k = 0; k < x.count; ++k) use(ScoreMod::interval(x, base, position, k));
  }
};

// Are there key words at all? Layouts ask this and not what words are made of.
__device__ __forceinline__ bool has_key_words(const Modifiers& m) { return m.hidden_rows.count > 0; }

// Which of the rows [row0, row0 + 32) a key hides.
__device__ __forceinline__ uint32_t key_word(const ScoreMod& score_mod, int key, int row0) {
  uint32_t hidden = 0;
  HiddenRows(score_mod).for_each(key, [&](int2 rows) { hidden |= ScoreMod::bits_between(rows.x, rows.y, row0); });
  return hidden;
}

__device__ __forceinline__ bool has_documents(const Modifiers& m) { return m.document_k.ids != nullptr; }

// Ids that are equal exactly where a row sees a key by its document: a negative one becomes -2 for a row and -1 for a
// key. An object, since functions of each id formed the addresses anew and spilled.
struct Documents {
  const int32_t *rows, *keys;
  int last_row, last_key;

  __device__ explicit Documents(const ScoreMod& s)
      : rows(s.m.document_q.ids + s.seq_batch() * s.m.document_q.batch_stride + s.seq.q_start),
        keys(s.m.document_k.ids + s.seq_batch() * s.m.document_k.batch_stride + s.seq.k_start),
        last_row(s.seq.seqlen_q - 1),
        last_key(s.seq.seqlen_k - 1) {}
  __device__ int row(int i) const {
    const int id = rows[min(i, last_row)];
    return id < 0 ? -2 : id;
  }
  __device__ int key(int i) const { return max(keys[min(i, last_key)], -1); }
};

}  // namespace flash_ext
