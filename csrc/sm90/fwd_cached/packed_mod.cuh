// Packed tiles in calls with modifiers: what common/mod_scores.cuh makes of scores, on the way from the products to the
// weights. Keys in parts, masks and all, are those of packed.cuh. Masks and biases belong to tiles in which a warpgroup
// has half of the keys: with all of them there are no registers. What a tile wants of them is on its way a tile before.
//
// Maxima are kept in the units of the scores, as in fwd_mod/weights.cuh and as the tiles of 16 rows leave them.
#pragma once

#include "../../common/mod_scores.cuh"
#include "../fwd_mod/weights.cuh"
#include "packed.cuh"

namespace flash_ext::sm90 {

template <typename T, typename Base>
struct ModifiedNumbers : Base {
  using E = typename T::Element;
  using typename Base::Args, typename Base::Output;

  static constexpr bool kHasMasks = T::kKeys < T::kBlockN;
  using Scores = ModScores<kHasMasks ? Knows::kAnyOfCache : Knows::kTree, true>;
  static constexpr int kMaskWords = T::kKeys / 32;  // of the bit mask, of a row
  const Modifiers& m;
  BlockRange whole = {0, 0};  // keys that every row of the warpgroup sees but for masks
  uint32_t words[2][kMaskWords], ahead[2][kMaskWords];  // of the tile under way, and of that at key_ahead
  int key_ahead = -1;

  __device__ __forceinline__ explicit ModifiedNumbers(const Args& a) : Base(a), m(a.m) {}

  __device__ __forceinline__ float unit() const { return m.unit_log2; }

  __device__ __forceinline__ void begin_work(const Args& a, const WorkTile& work, int rows_at) {
    Base::begin_work(a, work, rows_at);
    const SeqInfo seq = make_seq_info(a.p.problem, m, work.w, work.w.b);
    const ScoreMod any{a.p.problem, m, seq, 0};
    const QueryRange rows = queries_of_rows<T>(a, work, rows_at);
    whole = {any.row_keys(rows.last).begin, any.row_keys(rows.first).end};
    if (m.tree != nullptr) whole.end = min(whole.end, seq.seqlen_k - seq.seqlen_q);
    key_ahead = -1;
  }

  // Behind the products that were issued, of a tile whose keys begin at `first`; `row`: the thread's first one. What
  // the next tile wants is on its way then.
  __device__ __forceinline__ void expect(const Args& a, const WorkTile& work, int first, int row) {
    if (!kHasMasks || !has_rows(a, work, row)) return;
    const int next = first - T::kBlockN;
    if (m.mask.words != nullptr) {
      if (key_ahead != first) load_words(a, work, first, row);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int i = 0; i < kMaskWords; ++i) words[half][i] = ahead[half][i];
      }
      key_ahead = next;
      if (next >= 0) load_words(a, work, next, row);
    }
    if (next < 0) return;
    const int lane = ptx::fresh_lane();
    if (m.document_k.ids != nullptr &&
        next + lane * 32 < min(next + T::kKeys, static_cast<int>(m.document_k.batch_stride))) {
      ptx::prefetch(m.document_k.ids + work.w.b * m.document_k.batch_stride + next + lane * 32);
    }
    if (m.bias.ptr == nullptr || m.bias.col_stride != 1) return;
    const int bytes = m.bias.is_float ? 4 : 2;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const PackedRow at = place(a, work, row + 8 * half);
      const int64_t from = work.w.b * m.bias.batch_stride + at.head * m.bias.head_stride +
                           min(at.query, m.bias.rows - 1) * m.bias.row_stride;
      for (int key = next + lane % 4 * (128 / bytes); key < min(next + T::kKeys, m.bias.cols); key += 512 / bytes) {
        ptx::prefetch(static_cast<const char*>(m.bias.ptr) + (from + key) * bytes);
      }
    }
  }

  // Scores of that tile in place.
  template <int kCount>
  __device__ __forceinline__ void change_scores(const Args& a, const WorkTile& work, float (&s)[kCount], int first,
                                                int row) const {
    constexpr int kBlocks = kCount / 4;
    const bool in_interval = first >= whole.begin && first + T::kKeys <= whole.end;
    const bool is_masked = kHasMasks && (m.mask.words != nullptr || m.document_k.ids != nullptr);
    const bool is_whole = in_interval && !is_masked;
    if (is_whole && !m.has_score_mod && a.p.problem.score_factor == 1.f) return;
    if (!has_rows(a, work, row)) return;
    const SeqInfo seq = make_seq_info(a.p.problem, m, work.w, work.w.b);
    const Scores scores{a.p.problem, m};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const PackedRow at = place(a, work, row + 8 * half);
      const ScoreMod mod{a.p.problem, m, seq, at.head};
      scores.template apply<E>(reinterpret_cast<float (&)[1][kBlocks][4]>(s), half, mod, at.query, first, is_whole,
                               in_interval, [&](int i) { return words[half][i]; });
    }
  }

  // No guess: the first tile takes its maximum.
  template <int kCount>
  __device__ __forceinline__ void begin_state(const float (&)[kCount], RowState&) {}
  template <int kCount>
  __device__ __forceinline__ void prepare(float (&s)[kCount], uint32_t (&weights)[kCount / 2], RowState& state,
                                          Output& o) {
    ModRowState rows{{-state.minus_max[0], -state.minus_max[1]}, {state.sum[0], state.sum[1]}};
    float factor[2];
    const bool fits = try_mod_weights<E>(s, weights, rows, unit());
    if (!fits) mod_weights_by_maximum<E>(s, weights, rows, factor, unit());
#pragma unroll
    for (int half = 0; half < 2; ++half) state.minus_max[half] = -rows.max[half], state.sum[half] = rows.sum[half];
    if (fits) return;
#pragma unroll
    for (int i = 0; i < T::kHeadDimV / 2; ++i) o[i] *= factor[(i / 2) % 2];
  }

 private:
  // Where a row of the tile lies; one behind the last row stands for it.
  __device__ __forceinline__ static PackedRow place(const Args& a, const WorkTile& work, int row) {
    PackedRow at = PackedRow::of<T>(a, work.w, row);
    at.query = min(at.query, work.w.q.length - 1);
    return at;
  }
  // Often a warp has none: 4 queries of 8 heads are half of a tile.
  __device__ __forceinline__ static bool has_rows(const Args& a, const WorkTile& work, int row) {
    const int of_warp = row - ptx::fresh_lane() / 4;
    return PackedRow::of<T>(a, work.w, of_warp).is_there(a, work.w, of_warp);
  }
  __device__ __forceinline__ void load_words(const Args& a, const WorkTile& work, int first, int row) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const PackedRow at = place(a, work, row + 8 * half);
#pragma unroll
      for (int i = 0; i < kMaskWords; ++i) {
        ahead[half][i] = ScoreMod::word(m.mask, work.w.b, at.head, at.query, first / 32 + i);
      }
    }
  }
};

}  // namespace flash_ext::sm90
