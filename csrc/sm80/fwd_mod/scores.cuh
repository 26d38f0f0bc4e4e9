// What the forward adds to the scores of calls whose kernel has no room for everything modifiers.cuh knows: softcap,
// a bias by distance, one that can be staged. Terms that a whole row shares stay out of the scores.
#pragma once

#include "../../common/bias_stage.cuh"
#include "../../common/modifiers.cuh"

namespace flash_ext::sm80 {

// What is still to be added to the scores of a thread's r-th row: the same for all keys of a tile.
struct RowTerms {
  float first = 0.f, step = 0.f;
  __device__ float operator()(int r) const { return fmaf(static_cast<float>(r), step, first); }
};
struct NoRowTerms {
  __device__ float operator()(int) const { return 0.f; }
};

// acc = acc * scale + what is added by distance, less the terms returned.
template <int kA, int kN>
__device__ __forceinline__ RowTerms add_by_distance(float (&acc)[kA][kN][4], const ScoreMod& s, int row0, int col0,
                                                    float scale) {
  const HeadDistances x = HeadDistances::of(s.m.by_distance, s.seq.b, s.h, 1.f);
  const int centre0 = row0 + s.shift(), first = first_distance<false>(centre0, col0);
  const TileDistances tile = x.over(s.m.by_distance, centre0, 16 * kA, col0, 8 * kN);
  if (tile.bends) {
    ScoreMod::scale_all(acc, scale);
    x.add_bent<false>(acc, s.m.by_distance, s.seq.b, s.h, first, 1.f);
    return {};
  }
  // Linear in the key and in the row: the key's part is made once for all rows of a thread.
#pragma unroll
  for (int n = 0; n < kN; ++n) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const float of_key = -tile.per_distance * static_cast<float>(8 * n + c);
#pragma unroll
      for (int r = 0; r < 2 * kA; ++r) {
        float& x = acc[r / 2][n][r % 2 * 2 + c];
        x = fmaf(x, scale, of_key);
      }
    }
  }
  return {fmaf(tile.per_distance, static_cast<float>(first), tile.constant), 8.f * tile.per_distance};
}

// acc = cap tanh(factor acc). Where all are below a fifth, or three
// quarters, of the cap a polynomial, good to 1.3e-7 of them, does with multiply-adds what takes two trips to the unit
// for exponentials, on which the softmax waits as well. The quotient's error is 2e-7 of the cap.
template <int kA, int kN>
__device__ __forceinline__ void cap_scores(float (&acc)[kA][kN][4], float factor, const Modifiers& m) {
  const auto each = [&](const auto& capped) {
#pragma unroll
    for (int a = 0; a < kA; ++a) {
#pragma unroll
      for (int n = 0; n < kN; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) acc[a][n][i] = capped(acc[a][n][i]);
      }
    }
  };
  float largest[4] = {};
#pragma unroll
  for (int a = 0; a < kA; ++a) {
#pragma unroll
    for (int n = 0; n < kN; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) largest[i] = fmaxf(largest[i], fabsf(acc[a][n][i]));
    }
  }
  const float magnitude = fmaxf(fmaxf(largest[0], largest[1]), fmaxf(largest[2], largest[3]));
  // Factors so small that their fifth power is none take another way.
  const bool is_small = magnitude * factor <= 0.2f && factor > 1e-6f;
  if (__all_sync(ptx::kFullWarp, is_small)) {
    const float last = m.softcap * factor, square = factor * factor;
    const float c1 = last * square * -0.33329646f, c2 = last * square * square * 0.1303653f;
    each([&](float x) {
      const float u = x * x;
      return x * fmaf(u, fmaf(u, c2, c1), last);
    });
    return;
  }
  if (__all_sync(ptx::kFullWarp, magnitude * fabsf(factor) <= 0.75f)) {
    each([&](float x) {
      const float t = x * factor, u = t * t;
      float sum = fmaf(u, -0.004716257f, 0.019582908f);
      sum = fmaf(u, sum, -0.05334443f);
      sum = fmaf(u, sum, 0.13325406f);
      sum = fmaf(u, sum, -0.33332959f);
      sum = m.softcap * t * fmaf(u, sum, 1.f);
      asm volatile("" : "+f"(sum));  // at once: those of all scores side by side would not fit the registers
      return sum;
    });
    return;
  }
  const float exponent = 2.f * kLog2e * factor;
  const auto quotient = [&](float x) { return ptx::reciprocal(-1.f - ptx::ex2(x * exponent)); };
  each([&](float x) { return fmaf(2.f * m.softcap, quotient(x), m.softcap); });
}

// Raw products to natural scores.
template <typename E, typename Stage, int kA, int kN>
__device__ __forceinline__ RowTerms change_scores(float (&acc)[kA][kN][4], const ScoreMod& s, int row0, int col0,
                                                  uint32_t stage) {
  const Modifiers& m = s.m;
  float scale = s.p.scale;
  if (m.softcap > 0.f) {
    cap_scores(acc, s.p.scale * m.inv_softcap, m);
    scale = 1.f;
  }
  RowTerms terms;
  if (m.by_distance) {
    terms = add_by_distance(acc, s, row0, col0, scale);
    scale = 1.f;
  }
  if (m.bias.ptr != nullptr) Stage::template add<E, false>(acc, scale, stage);
  return terms;
}

}  // namespace flash_ext::sm80
