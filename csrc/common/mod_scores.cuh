// What becomes of the scores of packed rows in calls with modifiers. Query heads of a key head are rows of one tile, so
// each row has a head of its own, and a lane works out what its two rows see and add.
#pragma once

#include "mask_words.cuh"

namespace flash_ext {

// What the rules know beside windows, softcap, slopes and sinks.
enum class Knows {
  kEverything,  // without a cache
  kTree,  // over a cache: the tree of new tokens
  kMasks,  // over a cache: a bit mask, documents and biases, for up to 39 more registers
  kAnyOfCache  // over a cache: both of these
};

// The ids of the keys of a sequence in a cache, by their positions. Sequences lie side by side, so the stride of one is
// how many of its keys have an id; the others have none. A negative id is none, which no row has.
struct CachedIds {
  const int32_t* ids;
  int count;

  __device__ explicit CachedIds(const ScoreMod& s)
      : ids(s.m.document_k.ids + s.seq.b * s.m.document_k.batch_stride),
        count(static_cast<int>(min(s.m.document_k.batch_stride, int64_t{s.seq.seqlen_k}))) {}
  __device__ int key(int i) const { return i < count ? max(ids[i], -1) : -1; }
};

// Of one of a thread's two rows, in place: scores lie as mma and wgmma leave them, four of two rows for 8 keys. kPairs:
// a bias of two keys is loaded at once where that is aligned.
template <Knows kKnows, bool kPairs = false>
struct ModScores {
  static constexpr bool kTree = kKnows == Knows::kTree || kKnows == Knows::kAnyOfCache;
  static constexpr bool kMasks = kKnows != Knows::kTree, kCached = kKnows != Knows::kEverything;

  const Problem& p;
  const Modifiers& m;

  // Keys begin at `first`. is_whole: the row sees all of them, in_interval: it does but for masks. mask_word(i): of the
  // bit mask, for keys from first + 32 i on.
  template <typename E, int kN, typename MaskWord>
  __device__ __forceinline__ void apply(float (&s)[1][kN][4], int half, const ScoreMod& mod, int row, int first,
                                        bool is_whole, bool in_interval, const MaskWord& mask_word) const {
    if (m.has_score_mod) {
      change<E>(s, half, mod, row, first);
    } else if (p.score_factor != 1.f) {
      for_row(s, half, [&](float& x, int) { x *= p.score_factor; });
    }
    if (!is_whole) hide(s, half, mod, row, first, in_interval, mask_word);
  }

 private:
  __device__ static int own_col(int first) { return first + ptx::fresh_lane() % 4 * 2; }

  template <typename E, int kN>
  __device__ __forceinline__ void change(float (&s)[1][kN][4], int half, const ScoreMod& mod, int row,
                                         int first) const {
    float scale = p.scale;
    if (m.softcap > 0.f) {
      const float factor = p.scale * m.inv_softcap;
      if (m.softcap > kFineSoftcap) {
        for_row(s, half, [&](float& x, int) { x = m.softcap * ScoreMod::fine_tanh_of(x * factor); });
      } else {
        for_row(s, half, [&](float& x, int) { x = ScoreMod::capped(x, 2.f * kLog2e * factor, m.softcap); });
      }
      scale = 1.f;
    }
    const int col = own_col(first);
    if (m.by_distance) {
      const DistanceBias& by = m.by_distance;
      const float slope = by.slopes == nullptr ? 0.f : by.slopes[mod.seq.b * by.slopes_batch_stride + mod.h];
      const float* const table = by.table + (mod.seq.b * by.table_batch_stride + mod.h * by.table_head_stride);
      for_row(s, half, [&](float& x, int i) {
        const int distance = row + mod.shift() - (col + i);
        x = fmaf(-slope, fabsf(static_cast<float>(distance)), x * scale);
        if (kMasks && by.table != nullptr) x += table[min(max(by.reach - distance, 0), by.last_entry)];
      });
      scale = 1.f;
    }
    const BiasView& bias = m.bias;
    if (!kMasks || bias.ptr == nullptr) return;
    const int64_t at =
        mod.seq.b * bias.batch_stride + mod.h * bias.head_stride + row * bias.row_stride + col * bias.col_stride;
    const int left = row < min(bias.rows, mod.seq.seqlen_q) ? min(bias.cols, mod.seq.seqlen_k) - col : 0;
    if (bias.is_float) {
      add_bias(s, half, static_cast<const float*>(bias.ptr) + at, left, scale, [](float x) { return x; });
    } else {
      add_bias(s, half, static_cast<const E*>(bias.ptr) + at, left, scale, [](E x) { return ptx::to_float<E>(x); });
    }
  }

  // `left`: keys from the first own one on that have a bias.
  template <int kN, typename Element, typename ToFloat>
  __device__ __forceinline__ void add_bias(float (&s)[1][kN][4], int half, const Element* from, int left, float scale,
                                           const ToFloat& to_float) const {
    float added[2 * kN];  // all on their way at a time
    const auto load = [&](const auto& place_of_key) {
#pragma unroll
      for (int n = 0; n < 2 * kN; ++n) {
        const int i = n / 2 * 8 + n % 2;
        added[n] = i < left ? to_float(from[place_of_key(i)]) : 0.f;
      }
    };
    struct alignas(2 * sizeof(Element)) Pair {
      Element keys[2];
    };
    if (kPairs && m.bias.col_stride == 1 && left >= 8 * kN && reinterpret_cast<uintptr_t>(from) % sizeof(Pair) == 0) {
#pragma unroll
      for (int n = 0; n < kN; ++n) {
        const Pair x = *reinterpret_cast<const Pair*>(from + 8 * n);
        added[2 * n] = to_float(x.keys[0]), added[2 * n + 1] = to_float(x.keys[1]);
      }
    } else if (m.bias.col_stride == 1) {
      load([](int i) { return i; });
    } else {
      load([&](int i) { return i * m.bias.col_stride; });
    }
    for_row(s, half, [&](float& x, int i) { x = fmaf(x, scale, added[i / 8 * 2 + i % 8]); });
  }

  // use(score, key - first own key) of one of the two rows.
  template <int kN, typename Use>
  __device__ static void for_row(float (&s)[1][kN][4], int half, const Use& use) {
#pragma unroll
    for (int n = 0; n < kN; ++n) {
#pragma unroll
      for (int c = 0; c < 2; ++c) use(s[0][n][2 * half + c], 8 * n + c);
    }
  }

  template <int kN, typename MaskWord>
  __device__ __forceinline__ void hide(float (&s)[1][kN][4], int half, const ScoreMod& mod, int row, int first,
                                       bool in_interval, const MaskWord& mask_word) const {
    const int col = own_col(first), lane = ptx::fresh_lane();
#pragma unroll
    for (int n4 = 0; n4 < (kN + 3) / 4; ++n4) {
      const int col0 = first + 32 * n4;
      uint32_t word = ~0u;
      if (kMasks && m.mask.words != nullptr) word = mask_word(n4);
      if (!in_interval) {
        if (kTree && m.tree != nullptr) word &= tree_word(mod, row, col0);
        word = row_word(word, mod, row, col0, kCached ? kTestInterval : kTestInterval | kTestRows);
      }
      word >>= 2 * (lane % 4);
#pragma unroll
      for (int i = 0; i < 2 * min(4, kN - 4 * n4); ++i) {
        if ((word >> (i / 2 * 8 + i % 2) & 1) == 0) s[0][4 * n4 + i / 2][2 * half + i % 2] = -INFINITY;
      }
    }
    if (!kMasks) return;
    if (has_documents(m)) {
      const Documents documents(mod);
      const int id = documents.row(row);
      const auto keep = [&](const auto& ids) {
        for_row(s, half, [&](float& x, int i) { x = ids.key(col + i) == id ? x : -INFINITY; });
      };
      if constexpr (kCached) {
        keep(CachedIds(mod));
      } else {
        keep(documents);
      }
    }
    if (!kCached && has_key_words(m)) {
      const HiddenRows hidden(mod);
      for_row(s, half, [&](float& x, int i) {
        hidden.for_each(col + i, [&](int2 rows) { x = row >= rows.x && row < rows.y ? -INFINITY : x; });
      });
    }
  }
};

}  // namespace flash_ext
