// What modifiers do to the scores and weights that a warp holds in a wgmma accumulator: its 16 rows are laid out as
// those of mma.m16n8, so that the functions of common/modifiers.cuh apply.
#pragma once

#include "../../common/modifiers.cuh"
#include "config.cuh"

namespace flash_ext::sm90 {

// s[4 j + 2 half + c] as blocks of 8 keys.
template <int kCount>
__device__ __forceinline__ float (&as_blocks(float (&s)[kCount]))[1][kCount / 4][4] {
  return *reinterpret_cast<float (*)[1][kCount / 4][4]>(&s);
}

// Scores are changed 64 keys at a time: what all 128 need at once would not fit the registers.
inline constexpr int kPartKeys = FwdModTile::kPartKeys;
using ScorePart = float[kPartKeys / 2];
template <int kCount>
__device__ __forceinline__ ScorePart& part_of(float (&s)[kCount], int part) {
  return *reinterpret_cast<ScorePart*>(&s[part * kPartKeys / 2]);
}

// Exponents of a row are in units of log2 and less the row's maximum; rows that have seen nothing are less 0.
__device__ __forceinline__ float shift_of(float maximum) { return maximum == -INFINITY ? 0.f : maximum; }

// Raw products to exponents.
__device__ __forceinline__ void shift_scores(ScorePart& s, float unit, const float (&shift)[2]) {
#pragma unroll
  for (int i = 0; i < kPartKeys / 2; ++i) s[i] = fmaf(s[i], unit, -shift[i / 2 % 2]);
}

// Raw products to exponents with what is added by distance: where that is linear, one fma more than without.
__device__ __forceinline__ void add_distances(ScorePart& s, float unit, const HeadDistances& x,
                                              const ScoreMod& score_mod, int row0, int col0, const float (&shift)[2]) {
  const DistanceBias& bias = score_mod.m.by_distance;
  const int centre0 = row0 + score_mod.shift();
  const int first = first_distance<false>(centre0, col0);
  const TileDistances tile = x.over(bias, centre0, 16, col0, kPartKeys);
  if (__any_sync(ptx::kFullWarp, tile.bends)) {
    shift_scores(s, unit, shift);
    x.add_bent<false>(as_blocks(s), bias, score_mod.seq.b, score_mod.h, first, kLog2e);
    return;
  }
  const float base[2] = {fmaf(tile.per_distance, static_cast<float>(first), tile.constant - shift[0]),
                         fmaf(tile.per_distance, static_cast<float>(first + 8), tile.constant - shift[1])};
#pragma unroll
  for (int i = 0; i < kPartKeys / 2; ++i) {
    s[i] = fmaf(s[i], unit, fmaf(-tile.per_distance, static_cast<float>(i / 4 * 8 + i % 2), base[i / 2 % 2]));
  }
}

// c[0] + c[1] u + ...
template <int kTerms>
__device__ __forceinline__ float sum_series(const SeriesOf<kTerms>& series, float u) {
  float sum = series.c[kTerms - 1];
#pragma unroll
  for (int k = kTerms - 2; k >= 0; --k) sum = fmaf(sum, u, series.c[k]);
  return sum;
}

__device__ __forceinline__ float largest_magnitude(const ScorePart& s) {
  float parts[4] = {};
#pragma unroll
  for (int i = 0; i < kPartKeys / 2; ++i) parts[i % 4] = fmaxf(parts[i % 4], fabsf(s[i]));
  return fmaxf(fmaxf(parts[0], parts[1]), fmaxf(parts[2], parts[3]));
}

// Raw products to exponents with a softcap. Where all are below 3/4 of the cap by a series, whose last term takes the
// maximum along: its error is relative to a score. That of the quotient is 2e-7 of the cap.
__device__ __forceinline__ void cap_to_exponents(ScorePart& s, const FwdModArgs& a, const float (&shift)[2]) {
  constexpr int kCount = kPartKeys / 2;
  const float largest = largest_magnitude(s);
  const auto exceeds = [&](const auto& series) { return __any_sync(ptx::kFullWarp, !(largest <= series.limit)); };
  const auto sum_all = [&](const auto& series) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) s[i] = fmaf(s[i], sum_series(series, s[i] * s[i]), -shift[i / 2 % 2]);
  };
  // NaN and infinity exceed both.
  if (!exceeds(a.short_cap)) return sum_all(a.short_cap);
  if (!exceeds(a.cap)) return sum_all(a.cap);
  const float cap = a.m.softcap * kLog2e, factor = a.plain.p.problem.scale * a.m.inv_softcap;
  if (a.m.softcap > kFineSoftcap) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) s[i] = fmaf(cap, ScoreMod::fine_tanh_of(s[i] * factor), -shift[i / 2 % 2]);
  } else {
    const float top[2] = {cap - shift[0], cap - shift[1]}, factor_log2 = 2.f * kLog2e * factor;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      s[i] = fmaf(-2.f * cap, ptx::reciprocal(1.f + ptx::ex2(s[i] * factor_log2)), top[i / 2 % 2]);
    }
  }
}

// The series costs no more than the other arithmetic of a score; the exponential and the reciprocal of tanh wait for
// the unit that the weights need as well.
__device__ __forceinline__ void cap_scores(ScorePart& s, const FwdModArgs& a) {
  constexpr int kCount = kPartKeys / 2;
  const float largest = largest_magnitude(s);
  const CapSeries& series = a.cap;
  // NaN and infinity do not get here.
  if (!__any_sync(ptx::kFullWarp, !(largest <= series.limit))) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) s[i] *= sum_series(series, s[i] * s[i]);
    return;
  }
  const float cap = a.m.softcap, factor = a.plain.p.problem.scale * a.m.inv_softcap;
  if (cap > kFineSoftcap) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) s[i] = cap * ScoreMod::fine_tanh_of(s[i] * factor);
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) s[i] = ScoreMod::capped(s[i], 2.f * kLog2e * factor, cap);
  }
}

// s = s * scale + bias, from a part of a tile that TMA left in shared memory. This warp's rows begin at `warp_row`, or
// all share row 0.
template <typename E>
__device__ __forceinline__ void add_staged_bias(ScorePart& s, float scale, uint32_t tile, int warp_row,
                                                bool shares_row) {
  const int lane = ptx::fresh_lane();
  const int row = shares_row ? 0 : warp_row + lane % 16;
  const uint32_t at = tile + row * 128;
#pragma unroll
  for (int n = 0; n < kPartKeys / 16; ++n) {
    uint32_t r[4];
    ptx::ldmatrix_x4(r, at + (((2 * n + lane / 16) ^ (row % 8)) << 4));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 bias = ptx::unpack2<E>(r[i]);
      float* pair = &s[8 * n + 2 * i];
      pair[0] = fmaf(pair[0], scale, bias.x);
      pair[1] = fmaf(pair[1], scale, bias.y);
    }
  }
}

// The same from one in fp32, 32 keys a row; of a part's tile of kRows.
template <int kRows>
__device__ __forceinline__ void add_staged_float_bias(ScorePart& s, float scale, uint32_t tile, int warp_row) {
  const int lane = ptx::fresh_lane(), row = lane / 4, pair = lane % 4;
  const uint32_t at = tile + (warp_row + row) * 128 + pair % 2 * 8;
#pragma unroll
  for (int n = 0; n < kPartKeys / 8; ++n) {
    const uint32_t block = at + n / 4 * (kRows * 128) + (((n % 4 * 2 + pair / 2) ^ row) << 4);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float2 bias = ptx::load_shared_pair(block + half * 8 * 128);
      float* const keys = &s[4 * n + 2 * half];
      keys[0] = fmaf(keys[0], scale, bias.x);
      keys[1] = fmaf(keys[1], scale, bias.y);
    }
  }
}

// s = s * scale + bias for a bias that TMA cannot read: fp32, or of odd strides. As add_bias() of common/modifiers.cuh,
// a pair of keys after the other: tests of all of them would not fit the registers.
template <typename E>
__device__ __forceinline__ void add_far_bias(ScorePart& s, const ScoreMod& score_mod, int row0, int col0, float scale) {
  const BiasView& x = score_mod.m.bias;
  const int lane = ptx::fresh_lane(), size = x.is_float ? 4 : 2;
  const int row = row0 + lane / 4, col = col0 + 2 * (lane % 4);
  const int rows_left = min(x.rows, score_mod.seq.seqlen_q) - row,
            cols_left = min(x.cols, score_mod.seq.seqlen_k) - col;
  const char* at =
      static_cast<const char*>(x.ptr) +
      (score_mod.seq.b * x.batch_stride + score_mod.h * x.head_stride + row * x.row_stride + col * x.col_stride) * size;
  const int64_t down = 8 * x.row_stride * size;
  const auto add = [&](float& score, float bias) {
    score = fmaf(score, scale, bias);
    asm volatile("" : "+f"(score));  // at once: all that is loaded first would not fit the registers
  };
  if (x.is_float && x.aligned) {  // has_pairs()
#pragma unroll
    for (int n = 0; n < kPartKeys / 8; ++n) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float2 pair = ptx::load_pair_if(at + half * down + n * 32, 8 * half < rows_left && 8 * n < cols_left);
        add(s[4 * n + 2 * half], pair.x);
        add(s[4 * n + 2 * half + 1], pair.y);
      }
    }
    return;
  }
  const int64_t right = x.col_stride * size;
  const auto load = [&](int half) {
    const char* from = at + half * down;
    return x.is_float ? ptx::load_late<float>(from) : ptx::to_float<E>(ptx::load_late<E>(from));
  };
  if (right == 0 && x.cols >= score_mod.seq.seqlen_k) {  // loaded for each key, it took half of the time
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float bias = 8 * half < rows_left ? load(half) : 0.f;
#pragma unroll
      for (int i = 0; i < kPartKeys / 4; ++i) add(s[i / 2 * 4 + 2 * half + i % 2], bias);
    }
    return;
  }
#pragma unroll
  for (int n = 0; n < kPartKeys / 8; ++n) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        add(s[4 * n + 2 * half + c], 8 * half < rows_left && 8 * n + c < cols_left ? load(half) : 0.f);
      }
      at += c == 0 ? right : 7 * right;
    }
  }
}

// Raw products to scores, without masks. add_staged() adds a bias that TMA has brought.
template <typename T, typename AddStaged>
__device__ __forceinline__ void modify_scores(ScorePart& s, const FwdModArgs& a, const ScoreMod& score_mod, int row0,
                                              int col0, const AddStaged& add_staged) {
  using E = typename T::Element;
  constexpr bool kAll = T::kKind == FwdModKind::kAll;
  const Modifiers& m = a.m;
  if (kAll && !m.has_score_mod) {
    if (a.plain.p.problem.score_factor != 1.f) ScoreMod::scale_all(as_blocks(s), a.plain.p.problem.score_factor);
    return;
  }
  float scale = a.plain.p.problem.scale;
  if (kAll && m.softcap > 0.f) {
    cap_scores(s, a);
    scale = 1.f;
  }
  if (kAll && m.by_distance) [[unlikely]] {
    score_mod.add_by_distance<false>(as_blocks(s), row0, col0, scale);
    scale = 1.f;
  }
  if (kAll && m.bias.ptr == nullptr) return;
  if (has_bias<T>(a)) {
    add_staged(scale);
  } else if constexpr (kAll) {
    add_far_bias<E>(s, score_mod, row0, col0, scale);
  }
}

// drop() of common/dropout.cuh on weights that are packed already: p[2 j + half] holds the keys 2 (lane % 4) and the
// next of block j.
template <int kCount>
__device__ __forceinline__ void drop_packed(uint32_t (&p)[kCount], const Modifiers& m, int row0, int col0,
                                            const DropKeys& keys) {
  static_assert(kCount % 8 == 0);
  const int lane = ptx::fresh_lane();
  const uint32_t highest = (m.drop_below << 16) - 1;
  const uint32_t row_id = static_cast<uint32_t>(row0 / 16 * 8 + lane / 4);
#pragma unroll
  for (int n4 = 0; n4 < kCount / 8; ++n4) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const RowDraws draws(keys, row_id, col0 / 32 + n4, c, lane);
      const uint32_t others = c == 0 ? 0xffff0000u : 0xffffu;
#pragma unroll
      for (int q = 0; q < 4; ++q) {
        if ((draws.words[q] << 16) <= highest) p[2 * (4 * n4 + q)] &= others;
        if (draws.words[q] <= highest) p[2 * (4 * n4 + q) + 1] &= others;
      }
    }
  }
}

}  // namespace flash_ext::sm90
