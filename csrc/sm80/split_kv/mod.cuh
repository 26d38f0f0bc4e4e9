// The forward for few queries with everything of common/modifiers.cuh but dropout.
//
// Query heads of a key head are rows of one tile, so each row has a head of its own, and a lane works out what its two
// rows see and add, about 30 instructions a score. Tiles that all rows see whole ask for no words.
//
// A window beside sink tokens or a prefix leaves out keys in the middle: blocks are numbered without them.
#pragma once

#include "../../common/mod_scores.cuh"
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

template <typename T, Knows kKnows = Knows::kEverything>
struct ModRules {
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
    const ModScores<kKnows> scores{p, m};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      // The query heads of one key head and a single new token often fill the first half alone.
      if (T::kRows == 16 && half == 1 && tile.w.rows <= 8) break;
      const ScoreMod mod{p, m, tile.seq, rows.place(own_row(half)).h};
      const int row = rows.query(own_row(half));
      scores.template apply<E>(s, half, mod, row, first, is_whole, false, [&](int i) {
        const int key = first + 32 * i;
        return ScoreMod::word(m.mask, mod.seq.b, mod.h, row, key / 32) >> key % 32;
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
