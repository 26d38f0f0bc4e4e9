// What a call may ask of masks and scores beyond scale and window; attn_mod.cuh is the same for calls that ask
// for nothing else, whose kernels must not pay for any of this.
//
//   s = softcap(scale * q k) - slope * |row + shift - key| + bias, -inf where a mask hides the key
//   out = (softmax(s) * keep) v
//
// Where nothing is added to the scaled products, scores stay raw products, as in the plain kernels; else they are in
// natural units. A mask made of finfo.min means what it says, a softmax over equals where a row holds nothing else;
// times log2(e) such scores are no longer finite, so rows whose maximum is below kLowMaximum subtract it first.
//
// Every function works on accumulators of S (queries along the 16 rows of a block, kT = false) and of S^T
// (keys along them, kT = true). In both a thread holds the rows lane / 4 and lane / 4 + 8 of a block ("few")
// and the columns 2 (lane % 4) and the next of every 8 ("many").
#pragma once

#include "../modifiers.h"
#include "../ptx/sm80.cuh"
#include "attn_mod.cuh"
#include "by_distance.cuh"
#include "seqlen.cuh"

namespace flash_ext {

inline constexpr float kLowMaximum = -1e30f;

// Stands in for the modifiers of a kernel that has none.
struct NoModifiers {};

// What a tile asks for: nothing at all, or a set of tests per element. 0 is a tile that every row sees in full.
using TileTests = int;
inline constexpr TileTests kSkipTile = -1;
inline constexpr TileTests kTestInterval = 1;  // causal, window, chunk, prefix, sink tokens, ends of sequences
inline constexpr TileTests kTestRows = 2;  // mask, blocks, hidden_keys: known row by row
inline constexpr TileTests kTestKeys = 4;  // documents, hidden_rows: need the key

// Keys one row sees by causal, window, chunk, prefix and sink rules: [begin, end) and [0, always).
struct RowKeys {
  int begin;
  int end;
  int always;
};

// What one head of one sequence needs. Made anew where it is used: all of it comes from the constant bank and
// from `seq`, which lies in shared memory.
struct SeqInfo {
  int b;  // sequence
  int seqlen_q, seqlen_k;
  int64_t q_start, k_start;  // packed rows before the sequence; 0 when dense
  int prefix;  // of this sequence, 0 without
};

__device__ __forceinline__ SeqInfo make_seq_info(const Problem& p, const Modifiers& m, const Work& w, int b) {
  const int prefix = m.prefix_lens == nullptr || b < 0 || b >= p.batch ? 0 : min(max(m.prefix_lens[b], 0), w.k.length);
  return {b, w.q.length, w.k.length, w.q.start, w.k.start, prefix};
}

// Neighbouring CTAs share the bias of one head among batch entries, where that is broadcast: its tiles then come
// from the L2 cache for all but one of them. Dense only.
__device__ __forceinline__ void reorder_batch(const Modifiers& m, Work& w, int heads, int& b) {
  if (!m.batch_fastest) return;
  const uint32_t bh = static_cast<uint32_t>(w.b * heads + w.h);
  w.h = static_cast<int>(divide(bh, m.batches));
  w.b = static_cast<int>(bh) - w.h * static_cast<int>(m.batches.divisor);
  b = w.b;
}

struct ScoreMod {
  const Problem& p;
  const Modifiers& m;
  const SeqInfo& seq;
  int h;  // query head

  __device__ int shift() const { return m.top_left ? 0 : seq.seqlen_k - seq.seqlen_q; }

  // ---- which keys a row sees -------------------------------------------------------------------

  __device__ RowKeys row_keys(int row) const {
    if (row >= seq.seqlen_q) return {0, 0, 0};
    const int centre = row + shift();
    int begin = max(0, centre - p.reach_left);
    int end = min(seq.seqlen_k, centre + p.reach_right + 1);
    const int always = max(seq.prefix, min(m.sink_tokens, end));
    if (m.chunk > 0) {
      if (centre < 0) {
        end = 0;
      } else {
        const int first = static_cast<int>(divide(static_cast<uint32_t>(centre), m.chunk_divisor)) * m.chunk;
        begin = max(begin, first);
        end = min(end, first + m.chunk);
      }
    }
    return {begin, end, always};
  }

  __device__ static uint32_t word(const BitRows& x, int b, int h, int row, int w) {
    if (row >= x.rows || w >= x.num_words) return 0;
    return x.words[b * x.batch_stride + h * x.head_stride + row * x.row_stride + w * x.word_stride];
  }

  // ---- which tiles matter ----------------------------------------------------------------------

  // Tiles of keys that may matter to a tile of queries; classify() decides.
  template <int kBlockM, int kBlockN>
  __device__ BlockRange kv_blocks(int m_block) const {
    const int first_row = m_block * kBlockM;
    const RowKeys first = row_keys(first_row), last = row_keys(min(first_row + kBlockM, seq.seqlen_q) - 1);
    const int lo = last.always > 0 ? 0 : first.begin, hi = max(last.end, last.always);
    if (hi <= lo) return {0, 0};
    return {lo / kBlockN, (hi - 1) / kBlockN + 1};
  }

  template <int kBlockM, int kBlockN>
  __device__ BlockRange q_blocks(int n_block) const {
    const int first_col = n_block * kBlockN, last_col = min(first_col + kBlockN, seq.seqlen_k) - 1;
    int lo = max(0, first_col - shift() - p.reach_right);
    int hi = min(seq.seqlen_q - 1, last_col - shift() + p.reach_left);
    if (first_col < m.sink_tokens) hi = seq.seqlen_q - 1;
    if (first_col < seq.prefix) lo = 0, hi = seq.seqlen_q - 1;
    if (hi < lo) return {0, 0};
    return {lo / kBlockM, hi / kBlockM + 1};
  }

  // Bounds of the ids of positions [first, last] (absolute), from groups that may reach beyond them. kAtOnce, here and
  // below: how many independent loads are in flight, bounded by registers.
  template <int kAtOnce = 1>
  __device__ int2 document_bounds(const DocumentIds& x, int first, int last, int64_t start) const {
    const int2* groups = reinterpret_cast<const int2*>(x.groups) + seq_batch() * x.group_batch_stride;
    const int64_t lo = (start + first) / DocumentIds::kGroup, hi = (start + last) / DocumentIds::kGroup;
    int2 bounds = groups[lo];
#pragma unroll kAtOnce
    for (int64_t i = lo + 1; i <= hi; ++i) {
      bounds.x = min(bounds.x, groups[i].x);
      bounds.y = max(bounds.y, groups[i].y);
    }
    return bounds;
  }
  __device__ int seq_batch() const { return p.cu_seqlens_q != nullptr ? 0 : seq.b; }

  // Do the intervals of positions [first, last] hide all (2), some (1) or none (0) of [other_first, other_last]?
  template <int kAtOnce = 1>
  __device__ int hidden(const HiddenIntervals& x, int first, int last, int64_t start, int other_first,
                        int other_last) const {
    int result = 0;
    const int4* groups =
        reinterpret_cast<const int4*>(x.groups) + seq_batch() * x.group_batch_stride + h * x.group_head_stride;
    const int64_t lo = (start + first) / DocumentIds::kGroup, hi = (start + last) / DocumentIds::kGroup;
#pragma unroll 1
    for (int k = 0; k < x.count; ++k) {
      int4 g = groups[lo * x.count + k];
#pragma unroll kAtOnce
      for (int64_t i = lo + 1; i <= hi; ++i) {
        const int4 next = groups[i * x.count + k];
        g = make_int4(min(g.x, next.x), max(g.y, next.y), min(g.z, next.z), max(g.w, next.w));
      }
      if (g.y <= other_first && g.z > other_last) return 2;
      if (g.x <= other_last && g.w > other_first) result = 1;
    }
    return result;
  }

  // What classify() finds out without memory about the rows [r0, r1] and the keys [c0, c1] of a tile. Takes the bounds
  // and not the tile: formed here as well, they spilled in a backward at head_dim 192.
  template <int kBlockM, int kBlockN, bool kRowsEnd, bool kKeysEnd>
  __device__ __forceinline__ TileTests tests_of_intervals(int r0, int r1, int c0, int c1) const {
    const RowKeys first = row_keys(r0), last = row_keys(r1);
    if (!((c0 < last.end && c1 >= first.begin) || c0 < last.always)) return kSkipTile;
    const bool inside = c1 < first.always || (c1 < first.end && (c0 >= last.begin || first.always >= last.begin));
    const bool whole = (!kKeysEnd || c0 + kBlockN <= seq.seqlen_k) && (!kRowsEnd || r0 + kBlockM <= seq.seqlen_q);
    return inside && whole ? 0 : kTestInterval;
  }

  // Is a tile worth a visit, and which tests does it need? Conservative: tests where it is not certain. kRowsEnd: rows
  // behind the sequence's last one must see nothing. kKeysEnd: keys behind its last one must be hidden.
  template <int kBlockM, int kBlockN, int kAtOnce = 1, bool kRowsEnd = true, bool kKeysEnd = true>
  __device__ TileTests classify(int m_block, int n_block) const {
    const int r0 = m_block * kBlockM, r1 = min(r0 + kBlockM, seq.seqlen_q) - 1;
    const int c0 = n_block * kBlockN, c1 = min(c0 + kBlockN, seq.seqlen_k) - 1;
    TileTests tests = tests_of_intervals<kBlockM, kBlockN, kRowsEnd, kKeysEnd>(r0, r1, c0, c1);
    if (tests == kSkipTile) return kSkipTile;
    if (m.document_k.ids != nullptr) {
      const int2 q = document_bounds<kAtOnce>(m.document_q, r0, r1, seq.q_start);
      const int2 k = document_bounds<kAtOnce>(m.document_k, c0, c1, seq.k_start);
      if (k.y < 0 || q.y < k.x || k.y < q.x) return kSkipTile;
      if (!(q.x == q.y && k.x == k.y && k.x >= 0)) tests |= kTestKeys;
    }
    if (m.hidden_rows.count > 0) {
      const int how = hidden<kAtOnce>(m.hidden_rows, c0, c1, seq.k_start, r0, r1);
      if (how == 2) return kSkipTile;
      if (how == 1) tests |= kTestKeys;
    }
    if (m.hidden_keys.count > 0) {
      const int how = hidden<kAtOnce>(m.hidden_keys, r0, r1, seq.q_start, c0, c1);
      if (how == 2) return kSkipTile;
      if (how == 1) tests |= kTestRows;
    }
    if (m.blocks.words != nullptr) {
      uint32_t any = 0;
      bool all = true;
      // The tile's columns fill kBlockN / 16 bits of one word, or a part of them at the end.
      const int bit = c0 / 16 % 32, bits = c1 / 16 - c0 / 16 + 1;
      const uint32_t wanted = (bits == 32 ? ~0u : (1u << bits) - 1) << bit;
#pragma unroll kAtOnce
      for (int i = 0; i < kBlockM / 16; ++i) {  // what lies beyond the sequence is the last row again
        const uint32_t seen = word(m.blocks, seq.b, h, min(r0 / 16 + i, r1 / 16), c0 / 512) & wanted;
        any |= seen;
        all &= seen == wanted;
      }
      if (any == 0) return kSkipTile;
      if (!all) tests |= kTestRows;
    }
    if (m.mask.words != nullptr) {
      uint32_t any = 0, all = ~0u;
#pragma unroll 1
      for (int w = c0 / 32; w <= c1 / 32; ++w) {
#pragma unroll kAtOnce == 1 ? 1 : 2
        for (int g = r0 / Modifiers::kMaskGroup; g <= r1 / Modifiers::kMaskGroup; ++g) {
          if (w >= m.mask.num_words || r0 >= m.mask.rows) {
            all = 0;
            continue;
          }
          const int64_t at = seq.b * m.mask_group_batch_stride + h * m.mask_group_head_stride +
                             min(g, (m.mask.rows - 1) / Modifiers::kMaskGroup) * m.mask_group_stride +
                             w * m.mask.word_stride;
          any |= m.mask_any[at];
          all &= m.mask_all[at];
        }
      }
      if (any == 0) return kSkipTile;
      if (all != ~0u || r1 >= m.mask.rows) tests |= kTestRows;
    }
    return tests;
  }

  // ---- scores ----------------------------------------------------------------------------------

  // cap * tanh(factor x) to 2e-7 of the cap, from factor_log2 = 2 log2(e) factor.
  __device__ static float capped(float x, float factor_log2, float cap) {
    return fmaf(-2.f * cap, ptx::reciprocal(1.f + ptx::ex2(x * factor_log2)), cap);
  }
  __device__ static float tanh_of(float x) { return capped(x, 2.f * kLog2e, 1.f); }
  // tanh with a series where the difference would cancel, for caps so large that it would show.
  __device__ static float fine_tanh_of(float x) {
    const float series = x * fmaf(x * x, fmaf(x * x, fmaf(x * x, -17.f / 315.f, 2.f / 15.f), -1.f / 3.f), 1.f);
    return fabsf(x) < 0.2f ? series : tanh_of(x);
  }

  template <int kA, int kN, typename F>
  __device__ static void for_each(float (&acc)[kA][kN][4], int row0, int col0, const F& f) {
    const int lane = ptx::fresh_lane();
#pragma unroll
    for (int n = 0; n < kN; ++n) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int col = col0 + n * 8 + 2 * (lane % 4) + c;
#pragma unroll
        for (int r = 0; r < 2 * kA; ++r) f(acc[r / 2][n][r % 2 * 2 + c], row0 + r / 2 * 16 + r % 2 * 8 + lane / 4, col);
      }
    }
  }

  // Raw products to scores, without masks. With a softcap put_slope(a, n, ...) receives d score / d (scale * q k).
  // `stage` is this warp's staged bias, where the call has one.
  template <typename E, bool kT, typename Stage, int kA, int kN, typename PutSlope>
  __device__ void modify(float (&acc)[kA][kN][4], int row0, int col0, uint32_t stage, const PutSlope& put_slope) const {
    if (m.has_score_mod) [[unlikely]] {
      modify_natural<E, kT, Stage>(acc, row0, col0, stage, put_slope);
    } else if (p.score_factor != 1.f) [[unlikely]] {
      scale_all(acc, p.score_factor);
    }
  }

  template <typename E, bool kT, typename Stage, int kA, int kN, typename PutSlope>
  __device__ __forceinline__ void modify_natural(float (&acc)[kA][kN][4], int row0, int col0, uint32_t stage,
                                                 const PutSlope& put_slope) const {
    if (m.softcap > 0.f) {
      // The choice lies outside the loops: inside, every element would pay for both.
      const float factor = p.scale * m.inv_softcap;
      if (m.softcap > kFineSoftcap) {
        cap(acc, [&](float x) { return m.softcap * fine_tanh_of(x * factor); }, put_slope);
      } else {
        cap(acc, [&](float x) { return capped(x, 2.f * kLog2e * factor, m.softcap); }, put_slope);
      }
    }
    // What is added takes the scale along, as the factor of its fma.
    float scale = m.softcap > 0.f ? 1.f : p.scale;
    if (m.by_distance) {
      add_by_distance<kT>(acc, row0, col0, scale);
      scale = 1.f;
    }
    if (m.bias.ptr == nullptr) return;
    if (Stage::kTakesAll || (Stage::kBytes > 0 && m.bias.staged)) {
      Stage::template add<E, kT>(acc, scale, stage);
    } else {
      add_bias<E, kT>(acc, row0, col0, scale);
    }
  }

  // acc = acc * scale + what is added by distance. Where that is linear, in both of two fma.
  template <bool kT, int kA, int kN>
  __device__ void add_by_distance(float (&acc)[kA][kN][4], int row0, int col0, float scale) const {
    const HeadDistances x = HeadDistances::of(m.by_distance, seq.b, h, 1.f);
    const int first = first_distance<kT>(row0 + shift(), col0);
    const TileDistances tile =
        x.over(m.by_distance, row0 + shift(), kT ? 8 * kN : 16 * kA, col0, kT ? 16 * kA : 8 * kN);
    if (tile.bends) {
      scale_all(acc, scale);
      x.add_bent<kT>(acc, m.by_distance, seq.b, h, first, 1.f);
      return;
    }
    const float per_step = kT ? tile.per_distance : -tile.per_distance;  // along the many side
#pragma unroll
    for (int r = 0; r < 2 * kA; ++r) {
      const float distance = static_cast<float>(first + (kT ? -8 * r : 8 * r));
      const float base = fmaf(tile.per_distance, distance, tile.constant);
#pragma unroll
      for (int n = 0; n < kN; ++n) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          float& s = acc[r / 2][n][r % 2 * 2 + c];
          s = fmaf(s, scale, fmaf(per_step, static_cast<float>(8 * n + c), base));
        }
      }
    }
  }

  template <int kA, int kN, typename Capped, typename PutSlope>
  __device__ void cap(float (&acc)[kA][kN][4], const Capped& capped_score, const PutSlope& put_slope) const {
#pragma unroll
    for (int a = 0; a < kA; ++a) {
#pragma unroll
      for (int n = 0; n < kN; ++n) {
        float slope[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          acc[a][n][i] = capped_score(acc[a][n][i]);
          const float t = acc[a][n][i] * m.inv_softcap;
          slope[i] = fmaf(-t, t, 1.f);
        }
        put_slope(a, n, slope);
      }
    }
  }

  template <int kA, int kN>
  __device__ static void scale_all(float (&acc)[kA][kN][4], float factor) {
#pragma unroll
    for (int a = 0; a < kA; ++a) {
#pragma unroll
      for (int n = 0; n < kN; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) acc[a][n][i] *= factor;
      }
    }
  }

  // acc = acc * scale + bias, for a bias of any strides, fp32 or the dtype of q.
  template <typename E, bool kT, int kA, int kN>
  __device__ void add_bias(float (&acc)[kA][kN][4], int row0, int col0, float scale) const {
    const BiasView& x = m.bias;
    const int lane = ptx::fresh_lane(), size = x.is_float ? 4 : 2;
    const int last_row = min(x.rows, seq.seqlen_q), last_col = min(x.cols, seq.seqlen_k);
    const int few0 = (kT ? col0 : row0) + lane / 4, many0 = (kT ? row0 : col0) + 2 * (lane % 4);
    const int last_few = kT ? last_col : last_row, last_many = kT ? last_row : last_col;
    const int64_t few_bytes = (kT ? x.col_stride : x.row_stride) * size;
    const int64_t many_bytes = (kT ? x.row_stride : x.col_stride) * size;
    const char* base = static_cast<const char*>(x.ptr) + (seq.b * x.batch_stride + h * x.head_stride) * size +
                       few0 * few_bytes + many0 * many_bytes;
    // Pairs of fp32 side by side inside the bias: one load each, at constant distances.
    const bool whole = (kT ? col0 + 16 * kA : row0 + 16 * kA) <= last_few && (kT ? row0 : col0) + 8 * kN <= last_many;
    const bool pairs = whole && x.is_float && many_bytes == 4 && reinterpret_cast<uintptr_t>(base) % 8 == 0;
    if (__all_sync(ptx::kFullWarp, pairs)) {
#pragma unroll
      for (int r = 0; r < 2 * kA; ++r) {
#pragma unroll
        for (int n = 0; n < kN; ++n) {
          const float2 pair = ptx::load_late<float2>(base + r * 8 * few_bytes + n * 32);
          float (&s)[4] = acc[r / 2][n];
          s[r % 2 * 2] = fmaf(s[r % 2 * 2], scale, pair.x);
          s[r % 2 * 2 + 1] = fmaf(s[r % 2 * 2 + 1], scale, pair.y);
        }
      }
      return;
    }
#pragma unroll
    for (int r = 0; r < 2 * kA; ++r) {
      const bool in = few0 + r * 8 < last_few;
      const char* at = base + r * 8 * few_bytes;
#pragma unroll
      for (int n = 0; n < kN; ++n) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          float bias = 0.f;
          if (in && many0 + 8 * n + c < last_many) {
            bias = x.is_float ? ptx::load_late<float>(at) : ptx::to_float<E>(ptx::load_late<E>(at));
          }
          at += c == 0 ? many_bytes : 7 * many_bytes;
          float& s = acc[r / 2][n][r % 2 * 2 + c];
          s = fmaf(s, scale, bias);
        }
      }
    }
  }

  // The lowest n bits, n in [0, 32].
  __device__ static uint32_t low_bits(int n) { return static_cast<uint32_t>((uint64_t{1} << n) - 1); }
  __device__ static uint32_t bits_between(int first, int end, int col0) {
    const int lo = min(max(first - col0, 0), 32), hi = min(max(end - col0, lo), 32);
    return low_bits(hi) & ~low_bits(lo);
  }

  __device__ static int2 interval(const HiddenIntervals& x, int64_t base, int64_t position, int k) {
    return *reinterpret_cast<const int2*>(x.bounds + base + (position * x.count + k) * 2);
  }
};

}  // namespace flash_ext
