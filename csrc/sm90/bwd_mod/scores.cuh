// From raw products to weights, with what modifiers do to scores, on the transposed scores that a warp of the sm90
// backward holds: 16 keys along its rows, 64 queries along the columns; s[4 j + 2 half + c] as in bwd/steps.cuh.
//
// Everything is kept in units of log2 and gathers around -lse, so that an addition costs one fma and the scale none.
#pragma once

#include "../../common/pieces.cuh"
#include "mask_words.cuh"

namespace flash_ext::sm90 {

// What a step adds to a warp's scores: one number for a key and something linear in the rows, or, where that bends, to
// each score its own.
struct KeyAdditions {
  float of_key[2];  // this thread's two keys
  float of_row;     // times the row's place in the tile
  bool bends;
};

// `distances`: of the head, in units of log2. `bias`: of the two keys, of a bias that all rows share.
__device__ __forceinline__ KeyAdditions additions_of(const ScoreMod& score_mod, int row0, int col0,
                                                     const HeadDistances& distances, const float (&bias)[2]) {
  const int centre0 = row0 + score_mod.shift();
  const TileDistances tile = distances.over(score_mod.m.by_distance, centre0, BwdModTile::kBlockM, col0, 16);
  KeyAdditions x;
  const int first = first_distance<true>(centre0, col0);
  x.of_row = tile.per_distance;
  x.bends = tile.bends;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    x.of_key[half] = fmaf(x.of_row, static_cast<float>(first - 8 * half), fmaf(bias[half], kLog2e, tile.constant));
  }
  return x;
}

// s = unit s - lse.
__device__ __forceinline__ void to_log2(float (&s)[32], const float* minus_lse, float unit) {
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const float2 lse = *reinterpret_cast<const float2*>(minus_lse + 8 * j);
#pragma unroll
    for (int i = 0; i < 4; ++i) s[4 * j + i] = fmaf(s[4 * j + i], unit, i % 2 == 0 ? lse.x : lse.y);
  }
}

// The same with what is added, but for a bias that TMA brings.
__device__ __forceinline__ void add_to_keys(float (&s)[32], const KeyAdditions& x, const float* minus_lse, float unit) {
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const float2 lse = *reinterpret_cast<const float2*>(minus_lse + 8 * j);
    const float rows[2] = {fmaf(x.of_row, static_cast<float>(8 * j), lse.x),
                           fmaf(x.of_row, static_cast<float>(8 * j + 1), lse.y)};
#pragma unroll
    for (int i = 0; i < 4; ++i) s[4 * j + i] = fmaf(s[4 * j + i], unit, rows[i % 2]) + x.of_key[i / 2];
  }
}

// s += bias log2(e), from a tile that TMA left in shared memory: queries are its rows, 64 keys a row. `keys` is the
// number of the warp's 16 keys.
template <typename E>
__device__ __forceinline__ void add_brought_bias(float (&s)[32], uint32_t tile, int keys) {
  const int lane = ptx::fresh_lane();
  const int query = lane / 16 * 8 + lane % 8, chunk = 2 * keys + lane / 8 % 2;
  const uint32_t at = tile + query * 128 + ((chunk ^ (lane % 8)) << 4);
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    uint32_t r[4];
    ptx::ldmatrix_x4_trans(r, at + n * 16 * 128);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 bias = ptx::unpack2<E>(r[i]);
      float* pair = &s[8 * n + 2 * i];
      pair[0] = fmaf(bias.x, kLog2e, pair[0]);
      pair[1] = fmaf(bias.y, kLog2e, pair[1]);
    }
  }
}

// The same from one in fp32, 32 keys a row: `tile` is that of the first 64 keys.
__device__ __forceinline__ void add_brought_float_bias(float (&s)[32], uint32_t tile, int keys) {
  const int lane = ptx::fresh_lane(), key = keys % 2 * 16 + lane / 4;
  const uint32_t chunk = tile + keys / 2 * (64 * 128) + key % 4 * 4;
#pragma unroll
  for (int c = 0; c < 2; ++c) {
    const int query = 2 * (lane % 4) + c;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t at = chunk + query * 128 + (((key / 4 + 2 * half) ^ query) << 4);
#pragma unroll
      for (int j = 0; j < 8; ++j) {  // queries 8 j + query
        float& x = s[4 * j + 2 * half + c];
        x = fmaf(__uint_as_float(ptx::load_shared_word(at + j * 8 * 128)), kLog2e, x);
      }
    }
  }
}

// A bias that all rows share, of this thread's keys.
template <typename E>
__device__ __forceinline__ void load_key_bias(float (&bias)[2], const ScoreMod& score_mod, int col0) {
  const BiasView& x = score_mod.m.bias;
  const int col = col0 + ptx::fresh_lane() / 4, last = min(x.cols, score_mod.seq.seqlen_k);
  const int64_t base = score_mod.seq.b * x.batch_stride + score_mod.h * x.head_stride;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int64_t at = base + (col + 8 * half) * x.col_stride;
    bias[half] = 0.f;
    if (col + 8 * half >= last) continue;
    bias[half] = x.is_float ? static_cast<const float*>(x.ptr)[at] : ptx::to_float<E>(static_cast<const E*>(x.ptr)[at]);
  }
}

// s = 2^s.
__device__ __forceinline__ void exponentiate(float (&s)[32]) {
#pragma unroll
  for (int i = 0; i < 32; ++i) s[i] = ptx::ex2(s[i]);
}

// tanh of what a softcap divides, from raw products. Small ones all by a series, which costs no more than other
// arithmetic; exponential and reciprocal wait for the unit that the weights need as well.
template <int kCount>
__device__ __forceinline__ void take_tanh(float (&s)[kCount], const KeyCap& cap) {
  float parts[4] = {};
#pragma unroll
  for (int i = 0; i < kCount; ++i) parts[i % 4] = fmaxf(parts[i % 4], fabsf(s[i]));
  const float largest = fmaxf(fmaxf(parts[0], parts[1]), fmaxf(parts[2], parts[3]));
  // NaN and infinity are not small.
  if (!__any_sync(ptx::kFullWarp, !(largest <= cap.limit))) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const float u = s[i] * s[i];
      s[i] *= fmaf(fmaf(cap.c[2], u, cap.c[1]), u, cap.c[0]);
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) s[i] = 1.f - ptx::reciprocal(ptx::ex2(fmaf(s[i], cap.factor_log2, -1.f)) + 0.5f);
}

// s = P, dp = dS, from s = tanh and dp = dP - delta; the derivative goes where the tanh was, before that is gone.
__device__ __forceinline__ void weights_of_tanh(float (&s)[32], float (&dp)[32], const float* minus_lse, float unit) {
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const float2 lse = *reinterpret_cast<const float2*>(minus_lse + 8 * j);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float t = s[4 * j + i], p = ptx::ex2(fmaf(t, unit, i % 2 == 0 ? lse.x : lse.y));
      dp[4 * j + i] *= p * fmaf(-t, t, 1.f);
      s[4 * j + i] = p;
    }
  }
}

// Stores a warp's dS, of 64 queries from row0 on and 16 keys from col0 on, as the gradient of a bias that has an entry
// for each score. A store of a warp has 8 keys of 4 queries: whole sectors of an fp32 gradient, halves of a 16-bit one,
// whatever the bytes its rows begin on.
template <typename E>
__device__ __forceinline__ void store_score_gradients(const BiasGradient& g, int b, int h, const float (&ds)[32],
                                                      int row0, int col0) {
  const int lane = ptx::fresh_lane(), row = row0 + 2 * (lane % 4), col = col0 + lane / 4;
  const int rows_left = g.rows - row, cols_left = g.cols - col;
  const int64_t first = ((static_cast<int64_t>(b) * g.heads + h) * g.rows + row) * g.cols + col;
  const auto store = [&](auto* to, const auto& element) {
    to += first;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        if (8 * j + c >= rows_left) continue;
        if (cols_left > 0) to[c * g.cols] = element(4 * j, c);
        if (cols_left > 8) to[c * g.cols + 8] = element(4 * j + 2, c);
      }
      to += 8 * static_cast<int64_t>(g.cols);
    }
  };
  if (g.is_float) {
    store(static_cast<float*>(g.out), [&](int pair, int c) { return ds[pair + c]; });
  } else {
    store(static_cast<uint16_t*>(g.out),
          [&](int pair, int c) { return static_cast<uint16_t>(ptx::pack2<E>(ds[pair], ds[pair + 1]) >> 16 * c); });
  }
}

// Stores eight rows of dS, from row `first` of its tile on, as rows of the gradient of a 16-bit bias that has an entry
// for each score. `ds`: the tile as store_ds() left it, which begins with query row0 and key col0 of 128.
//
// Half a warp has a row, each lane a piece of 16 bytes. Rows that do not begin on 16 bytes leave by the pieces that do
// in memory, each made of two in shared memory, and key by key before the first and behind the last one. Loads are as
// many for all lanes and rows: branches would keep those of a row behind the stores of the row before.
__device__ __forceinline__ void store_gradient_rows(const BiasGradient& g, int b, int h, uint32_t ds, int first,
                                                    int row0, int col0) {
  constexpr int kRows = 8, kKeys = 128, kPieces = kKeys / 8;
  const int lane = ptx::fresh_lane(), rows_left = g.rows - row0 - first, cols = min(g.cols - col0, kKeys);
  const int piece = lane % kPieces;
  uint16_t* const to = static_cast<uint16_t*>(g.out) +
                       ((static_cast<int64_t>(b) * g.heads + h) * g.rows + row0 + first + lane / kPieces) * g.cols +
                       col0;
  const auto row_of = [&](int i) { return 2 * i + lane / kPieces; };
  const auto load = [&](int i, int piece) {
    const int row = row_of(i);
    return ptx::load_shared(ds + piece / 8 * (64 * 128) + (first + row) * 128 + ((piece % 8 ^ row) << 4));
  };
  if (g.cols % 8 == 0) {
#pragma unroll
    for (int i = 0; i < kRows / 2; ++i) {
      if (row_of(i) >= rows_left || 8 * piece >= cols) continue;
      *reinterpret_cast<float4*>(to + 2 * i * static_cast<int64_t>(g.cols) + 8 * piece) = load(i, piece);
    }
    return;
  }
  const bool is_head = piece < 8;
#pragma unroll
  for (int i = 0; i < kRows / 2; ++i) {
    uint16_t* const out = to + 2 * i * static_cast<int64_t>(g.cols);
    const int before = static_cast<int>(-(reinterpret_cast<uintptr_t>(out) / 2) & 7), key = before + 8 * piece;
    const float4 low = load(i, piece), high = load(i, min(piece + 1, kPieces - 1));
    const uint4 x =
        shifted_piece(reinterpret_cast<const uint4&>(low), reinterpret_cast<const uint4&>(high), 2 * before);
    // Seven keys at most at either end. A row that ends before its first piece leaves some of them twice.
    const uint32_t alone = (is_head ? 0 : before + ((cols - before) & ~7)) + piece % 8, at = alone % kKeys;
    const uint16_t one = ptx::load_shared_half(ds + at / 64 * (64 * 128) + (first + row_of(i)) * 128 +
                                               ((at / 8 % 8 ^ row_of(i)) << 4) + at % 8 * 2);
    const bool is_row = row_of(i) < rows_left;
    if (is_row && key + 8 <= cols) __stwb(reinterpret_cast<uint4*>(out + key), x);
    if (is_row && alone < static_cast<uint32_t>(cols) && (!is_head || piece < before)) out[alone] = one;
  }
}

// Adds dS of a warp's 16 keys from col0 on, summed over its 64 queries, to `sums`. No other warp adds to these sums,
// and additions of one thread to one place keep their order: results repeat.
__device__ __forceinline__ void add_to_key_sums(float* sums, int cols, const float (&ds)[32], int col0) {
  const int lane = ptx::fresh_lane();
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float sum = 0.f;
#pragma unroll
    for (int j = 0; j < 8; ++j) sum += ds[4 * j + 2 * half] + ds[4 * j + 2 * half + 1];
    sum += __shfl_xor_sync(ptx::kFullWarp, sum, 1);
    sum += __shfl_xor_sync(ptx::kFullWarp, sum, 2);
    const int key = col0 + lane / 4 + 8 * half;
    if (lane % 4 == 0 && key < cols) atomicAdd(sums + key, sum);
  }
}

// 0 where a bit is 0. By bits: seven neighbours become predicates at once (R2P), 43 instructions for 32 scores and not
// 57.
template <int kCount>
__device__ __forceinline__ void hide_weights(float (&s)[kCount], uint32_t visible) {
#pragma unroll
  for (int bit = 0; bit < 32; ++bit) {
    const int i = score_of_bit(bit);
    if (i < kCount) s[i] = (visible >> bit & 1) != 0 ? s[i] : 0.f;
  }
}

// Where a step's scores are: what functions of it ask for when they need it, because registers are short.
template <typename ScoreModOf, typename Query, typename Key, typename Stats, typename Distances>
struct StepView {
  ScoreModOf score_mod;
  Query first_query;
  Key first_key;  // of the warp
  Stats stats;  // -lse of a thread's queries, -delta 64 further
  Distances distances;
};
template <typename... Parts>
StepView(Parts...) -> StepView<Parts...>;

// s = P; with a softcap its tanh, because weights wait for dP, where both have registers. add_brought(s): what TMA
// brings.
template <typename T, typename View, typename AddBrought>
__device__ __forceinline__ void weights_of_scores(float (&s)[32], const BwdModArgs& a, const View& at,
                                                  [[maybe_unused]] const float (&key_bias)[2], uint32_t visible,
                                                  [[maybe_unused]] const AddBrought& add_brought) {
  if constexpr (T::kCaps) {
    take_tanh(s, a.cap);
    return;
  } else if constexpr (T::kAdds) {
    if (T::kDrops || a.adds_to_keys) {  // both would not fit the registers
      const HeadDistances& distances = at.distances();
      const KeyAdditions additions =
          additions_of(at.score_mod(), at.first_query(), at.first_key(), distances, key_bias);
      add_to_keys(s, additions, at.stats(), a.unit);
      if (__any_sync(ptx::kFullWarp, additions.bends)) {
        auto& blocks = reinterpret_cast<float (&)[1][8][4]>(s);
        distances.template add_bent<true>(
            blocks, a.m.by_distance, at.score_mod().seq.b, at.score_mod().h,
            first_distance<true>(at.first_query() + at.score_mod().shift(), at.first_key()), kLog2e);
      }
    } else {
      to_log2(s, at.stats(), a.unit);
    }
    if (a.brings_bias) add_brought(s);
    exponentiate(s);
  } else {
    scores_to_weights(s, at.stats(), a.unit);
  }
  if (__any_sync(ptx::kFullWarp, visible != ~0u)) hide_weights(s, visible);
}

// dp = dS, s = P with 0 where dropout hit it.
template <typename T>
__device__ __forceinline__ void gradients_of_scores(float (&s)[32], float (&dp)[32], const BwdModArgs& a,
                                                    const float* stats, uint32_t visible, uint32_t dropped) {
  if constexpr (T::kCaps) {
    weights_of_tanh(s, dp, stats, a.unit);
    if (!__any_sync(ptx::kFullWarp, visible != ~0u)) return;
    hide_weights(s, visible);
    hide_weights(dp, visible);
  } else if constexpr (!T::kDrops) {
#pragma unroll
    for (int i = 0; i < 32; ++i) dp[i] *= s[i];
  } else {
    const float* minus_delta = stats + T::kBlockM;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float2 x = *reinterpret_cast<const float2*>(minus_delta + 8 * j);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t bit = 1u << (T::kLoadersDraw ? bit_of_score(4 * j + i) : 4 * j + i);
        const float minus = i % 2 == 0 ? x.x : x.y;
        float weight = s[4 * j + i], gradient = fmaf(dp[4 * j + i], a.m.keep_scale, minus);
        ptx::clear_and_replace_if(dropped & bit, weight, gradient, minus);
        dp[4 * j + i] = s[4 * j + i] * gradient;
        s[4 * j + i] = weight;
      }
    }
  }
}

}  // namespace flash_ext::sm90
