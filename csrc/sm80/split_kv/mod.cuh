// The forward for few queries with everything of common/modifiers.cuh but dropout.
//
// Query heads of a key head are rows of one tile, so each row has a head of its own, and a lane works out what its two
// rows see and add. That costs about 30 instructions a score; a key of 512 bytes takes a multiprocessor of an H100 about
// 35 clocks of memory. Tiles that all rows see whole ask for no words: with them a tree of 8 tokens over 8192 keys takes
// 47 us, without them 35 (H100).
//
// A window beside sink tokens or a prefix leaves out keys in the middle: blocks are numbered without them.
#pragma once

#include "../../common/mask_words.cuh"
#include "merge.cuh"

namespace flash_ext::sm80 {

// What all threads of a CTA know of its rows. In shared memory: at head_dim 256 registers are short.
struct ModTile {
  SplitWork w;
  SeqInfo seq;
  bool inside;  // a sequence
  BlockRange keys;  // that some row may see
  int always;  // keys from 0 on that rows see beside them; 0 where those are among `keys`
  BlockRange whole;  // keys that every row sees

  __device__ void find(const Problem& p, const Modifiers& m, const SplitGrid& g, int count) {
    inside = w.sequence >= 0 && w.sequence < p.batch;
    const bool has_prefix = inside && m.prefix_lens != nullptr;
    const int prefix = has_prefix ? min(max(m.prefix_lens[w.sequence], 0), w.k.length) : 0;
    seq = {w.sequence, w.q.length, w.k.length, w.q.start, w.k.start, prefix};
    const SplitRows rows{g, w, count};
    const ScoreMod any{p, m, seq, 0};
    const RowKeys first = any.row_keys(rows.query(0)), last = any.row_keys(rows.query(rows.last()));
    keys = first.begin < last.end ? BlockRange{first.begin, last.end} : BlockRange{0, 0};
    always = last.always;
    if (always >= keys.begin) keys = {always > 0 ? 0 : keys.begin, max(keys.end, always)}, always = 0;
    whole = {last.begin, asks_any<kKnownByRows | kKnownByKeys>(m) ? 0 : first.end};
    if (m.tree != nullptr) whole.end = min(whole.end, w.k.length - w.q.length);
  }
};

// What the rules know beside windows, softcap, slopes and sinks.
enum class Knows {
  kEverything,  // without a cache
  kTree,  // over a cache: the tree of new tokens
  kMasks  // over a cache: a bit mask, documents and biases, for up to 39 more registers
};

// The ids of the keys of a sequence in a cache, by their positions. Sequences lie side by side, so the stride of one is how
// many of its keys have an id; the others have none. A negative id is none, which no row has.
struct CachedIds {
  const int32_t* ids;
  int count;

  __device__ explicit CachedIds(const ScoreMod& s)
      : ids(s.m.document_k.ids + s.seq.b * s.m.document_k.batch_stride),
        count(static_cast<int>(min(s.m.document_k.batch_stride, int64_t{s.seq.seqlen_k}))) {}
  __device__ int key(int i) const { return i < count ? max(ids[i], -1) : -1; }
};

template <typename T, Knows kKnows = Knows::kEverything>
struct ModRules {
  static constexpr bool kTree = kKnows == Knows::kTree, kCached = kKnows != Knows::kEverything;

  const Problem& p;
  const Modifiers& m;
  const ModTile& tile;
  const SplitRows rows;

  __device__ void begin(const SplitRows&, int) {}
  // Of the thread's two rows; made where they are used.
  __device__ static int own_row(int half) {
    const int thread = ptx::fresh_thread_idx();
    return thread / 32 % T::kRowWarps * 16 + thread % 32 / 4 + 8 * half;
  }
  // In blocks that leave out those between the first keys and the others.
  template <int kBlockN>
  __device__ int left_out() const {
    return tile.always == 0 ? 0 : max(tile.keys.begin / kBlockN - (tile.always + kBlockN - 1) / kBlockN, 0);
  }
  template <int kBlockN>
  __device__ BlockRange range() const {
    return {tile.always > 0 ? 0 : tile.keys.begin, tile.keys.end - left_out<kBlockN>() * kBlockN};
  }
  template <int kBlockN>
  __device__ int first_key(int block) const {
    const bool is_behind = tile.always > 0 && block * kBlockN >= tile.always;
    return (block + (is_behind ? left_out<kBlockN>() : 0)) * kBlockN;
  }
  __device__ float unit_log2() const { return m.unit_log2; }
  __device__ float slack_log2() const { return m.row_max != nullptr ? 0.f : SoftmaxState<2>::kSlackLog2; }
  // The difference first: scores of finfo.min are not finite in units of log2.
  __device__ static float exponent(float x, float scale, float shift) { return (x - shift) * scale; }
  __device__ float finish(const FwdParams& params, const RowState& state, const RowPlace& at, bool stores) const {
    return RowEnding::of(m).finish(params, state, at, tile.inside, stores);
  }

  template <typename E, int kN>
  __device__ void score(float (&s)[1][kN][4], int first) const {
    // Most tiles are, and no score of theirs is hidden.
    const bool is_whole = first >= tile.whole.begin && first + 8 * kN <= tile.whole.end;
    if (is_whole && !m.has_score_mod && p.score_factor == 1.f) return;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      // The query heads of one key head and a single new token often fill the first half alone.
      if (T::kRows == 16 && half == 1 && tile.w.rows <= 8) break;
      const ScoreMod mod{p, m, tile.seq, rows.place(own_row(half)).h};
      const int row = rows.query(own_row(half));
      if (m.has_score_mod) {
        change<E>(s, half, mod, row, first);
      } else if (p.score_factor != 1.f) {
        for_row(s, half, [&](float& x, int) { x *= p.score_factor; });
      }
      if (!is_whole) hide(s, half, mod, row, first);
    }
  }

 private:
  __device__ static int own_col(int first) { return first + ptx::fresh_lane() % 4 * 2; }

  template <typename E, int kN>
  __device__ void change(float (&s)[1][kN][4], int half, const ScoreMod& mod, int row, int first) const {
    float scale = p.softmax_scale;
    if (m.softcap > 0.f) {
      const float factor = p.softmax_scale * m.inv_softcap;
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
        if (!kTree && by.table != nullptr) x += table[min(max(by.reach - distance, 0), by.last_entry)];
      });
      scale = 1.f;
    }
    const BiasView& bias = m.bias;
    if (kTree || bias.ptr == nullptr) return;
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
  __device__ void add_bias(float (&s)[1][kN][4], int half, const Element* from, int left, float scale,
                           const ToFloat& to_float) const {
    float added[2 * kN];  // all on their way at a time
    const auto load = [&](const auto& place_of_key) {
#pragma unroll
      for (int n = 0; n < 2 * kN; ++n) {
        const int i = n / 2 * 8 + n % 2;
        added[n] = i < left ? to_float(from[place_of_key(i)]) : 0.f;
      }
    };
    if (m.bias.col_stride == 1) {
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

  template <int kN>
  __device__ void hide(float (&s)[1][kN][4], int half, const ScoreMod& mod, int row, int first) const {
    const int col = own_col(first), lane = ptx::fresh_lane();
#pragma unroll
    for (int n4 = 0; n4 < (kN + 3) / 4; ++n4) {
      const int col0 = first + 32 * n4;
      uint32_t word = ~0u;
      if (!kTree && m.mask.words != nullptr) {
        word = ScoreMod::word(m.mask, mod.seq.b, mod.h, row, col0 / 32) >> col0 % 32;
      }
      if (kTree && m.tree != nullptr) word = tree_word(mod, row, col0);
      word = row_word(word, mod, row, col0, kTestInterval | kTestRows) >> (2 * (lane % 4));
#pragma unroll
      for (int i = 0; i < 2 * min(4, kN - 4 * n4); ++i) {
        if ((word >> (i / 2 * 8 + i % 2) & 1) == 0) s[0][4 * n4 + i / 2][2 * half + i % 2] = -INFINITY;
      }
    }
    if (kTree) return;
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

template <typename T>
__global__ void __launch_bounds__(T::kThreads, 2)
    fwd_split_mod_kernel(const __grid_constant__ FwdParams p, const __grid_constant__ SplitGrid g,
                         const __grid_constant__ Modifiers m) {
  __shared__ RowState states[T::kKeyWarps][T::kRows];
  __shared__ ModTile tile;
  ptx::
      wait_for_kernel_before();  // which may make words of masks; who waits for this kernel wants that one over as well
  if (threadIdx.x == 0) {
    tile.w = split_work<T::kRows>(p.problem, g);
    if (tile.w.rows > 0) tile.find(p.problem, m, g, T::kRows);
  }
  __syncthreads();
  const SplitWork& w = tile.w;
  if (w.rows <= 0) return;
  const SplitRows rows{g, w, T::kRows};
  ModRules<T> rules{p.problem, m, tile, rows};
  attend<T>(p, g, w, rules, rows, blocks_of_part<T::kBlockN>(rules.template range<T::kBlockN>(), w.part, g.splits),
            row_pointer(p.k, w.b, w.k.start, w.h_k), row_pointer(p.v, w.b, w.k.start, w.h_k), states, g.splits == 1,
            SequenceRows<T>{w.k.length}, [&](const RowPlace& at, int) { return at.number(p.problem); });
}

}  // namespace flash_ext::sm80
