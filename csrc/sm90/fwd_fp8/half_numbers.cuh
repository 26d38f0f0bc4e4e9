// Fp8Numbers with scores in fp16, for q and k whose numbers are at most kSmallMax in size, so that no score overflows.
// Pairs of scores halve what is multiplied and added for weights, and the registers of scores. Exponents of weights
// have 11 bits, and so have weights before e4m3 rounds them to 4. What that does: docs/fp8.md.
#pragma once

#include "numbers.cuh"

namespace flash_ext::sm90 {

// Scales of fp16: the least number, below which all scores count as alike, and the largest.
inline constexpr float kLeastHalfScale = 0x1p-24f, kMostHalfScale = 65504.f;
// From here on fp16 rounds maxima by 1/2 and more; such rows go the way of fp32.
inline constexpr float kFarHalfMaximum = 1024.f;

__device__ __forceinline__ uint32_t half_pair(float x) {
  const __half2 pair = __float2half2_rn(x);
  return *reinterpret_cast<const uint32_t*>(&pair);
}
__device__ __forceinline__ float2 floats_of_pair(uint32_t x) { return __half22float2(*reinterpret_cast<__half2*>(&x)); }

// A thread's scores as floats, in the order of fp32 ones.
template <int kCount>
struct HalfScores {
  const uint32_t (&pairs)[kCount];
  __device__ __forceinline__ float operator[](int i) const {
    const float2 pair = floats_of_pair(pairs[i / 2]);
    return i % 2 == 0 ? pair.x : pair.y;
  }
};

// p = weights of s by the maxima there are. False when they must not be used. A sum of numbers that are not negative is
// never rounded below one of them, so that sums in fp16 bound weights as those in fp32 do. The scale is rounded to 11
// bits here, and not where a tile is done again: two such tiles differ by up to 2^-12 of a score.
template <int kCount>
__device__ __forceinline__ bool try_half_weights(const uint32_t (&s)[kCount], uint32_t (&p)[kCount / 2],
                                                 RowState& state, float scale) {
  static_assert(kCount / 2 * kTopWeight <= kFp8Max);
  if (!(scale <= kMostHalfScale)) return false;  // NaN as well: both would hide what they multiply
  const uint32_t by = half_pair(fmaxf(scale, kLeastHalfScale));
  const uint32_t minus_max[2] = {half_pair(state.minus_max[0]), half_pair(state.minus_max[1])};
  uint32_t sum[2] = {};
#pragma unroll
  for (int g = 0; g < kCount / 4; ++g) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const uint32_t x = ptx::ex2_pair(ptx::fma_pair(s[4 * g + r], by, minus_max[r]));
      const uint32_t y = ptx::ex2_pair(ptx::fma_pair(s[4 * g + 2 + r], by, minus_max[r]));
      sum[r] = ptx::add_pair(ptx::add_pair(sum[r], x), y);
      p[2 * g + r] = ptx::pack4_e4m3(x, y);
    }
  }
  const float2 first = floats_of_pair(sum[0]), second = floats_of_pair(sum[1]);
  // NaN compares false.
  const bool fine =
      first.x <= state.limit && first.y <= state.limit && second.x <= state.limit && second.y <= state.limit;
  if (__any_sync(ptx::kFullWarp, !fine)) return false;
  state.sum[0] += first.x + first.y;
  state.sum[1] += second.x + second.y;
  return true;
}

template <int kCount>
__device__ __forceinline__ void half_maxima(const uint32_t (&s)[kCount], float (&largest)[2]) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    uint32_t both = s[r];
#pragma unroll
    for (int i = 2 + r; i < kCount; i += 2) both = ptx::max_pair(both, s[i]);
    const float2 x = floats_of_pair(both);
    largest[r] = fmaxf(x.x, x.y);
    largest[r] = fmaxf(largest[r], __shfl_xor_sync(ptx::kFullWarp, largest[r], 1));
    largest[r] = fmaxf(largest[r], __shfl_xor_sync(ptx::kFullWarp, largest[r], 2));
  }
}

// Down to a number that fp16 has: weights by it are no larger.
__device__ __forceinline__ float round_maximum(float minus_max) {
  return fabsf(minus_max) < kFarHalfMaximum ? __half2float(__float2half_rd(minus_max)) : minus_max;
}
__device__ __forceinline__ float half_limit(const RowState& state) {
  const bool far = !(fmaxf(fabsf(state.minus_max[0]), fabsf(state.minus_max[1])) < kFarHalfMaximum);
  return __any_sync(ptx::kFullWarp, far) ? -1.f : kFp8Max;
}

template <typename T>
struct Fp8HalfNumbers : Fp8Numbers<T> {
  using Base = Fp8Numbers<T>;
  using Score = uint32_t;
  using Base::scale, Base::total;
  using typename Base::Output;
  static constexpr int kScores = T::kBlockN / 4;

  __device__ __forceinline__ explicit Fp8HalfNumbers(const Fp8Args& a) : Base(a) {}

  // As FloatScores has it, but for the factor of scores, which is a matter of few calls. Bits of 32 keys are shifted so
  // that the byte of a pair begins with its first key's, or with its second key's; PRMT spreads that bit.
  __device__ __forceinline__ static void hide(uint32_t (&s)[kScores], int half, const AttnMod&, VisibleKeys keys,
                                              int first_col) {
    constexpr uint32_t kHidden = 0xfc00fc00;  // -inf
    const int own = first_col % 8, begin = keys.begin - (first_col - own), end = begin + static_cast<int>(keys.count);
#pragma unroll
    for (int w = 0; w < T::kBlockN / 32; ++w) {
      const uint32_t bits = ptx::low_bits(max(end - 32 * w, 0)) & ~ptx::low_bits(max(begin - 32 * w, 0));
      const uint32_t first = bits << (7 - own), second = bits << (6 - own);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        uint32_t& pair = s[2 * (4 * w + j) + half];
        const uint32_t mask = ptx::spread_signs(first, second, j);
        pair = (pair & mask) | (kHidden & ~mask);
      }
    }
  }
  __device__ __forceinline__ void scale_scores(uint32_t (&s)[kScores]) const {
    const float factor = this->args.p.problem.score_factor;
    if (factor == 1.f) return;
#pragma unroll
    for (uint32_t& x : s) x = ptx::fma_pair(x, half_pair(factor), 0);
  }
  __device__ __forceinline__ static void issue_scores(uint32_t (&s)[kScores], uint32_t q, uint32_t k) {
    for_steps<0, T::kHeadDim / 32>([&](auto step) {
      constexpr int i = decltype(step)::value;
      constexpr int at = (i % 4) * 2, chunk = i / 4;
      ptx::wgmma_ss_e4m3<(i > 0)>(s, q + at + chunk * T::kBlockM * 8, k + at + chunk * T::kBlockN * 8);
    });
  }
  __device__ __forceinline__ void begin_state(const uint32_t (&s)[kScores], RowState& state) {
    total.begin();
    constexpr int kLast = 2 * (kScores / 8 - 1);  // the pair with the last key of the first quarter, in the first row
    const bool few = __any_sync(ptx::kFullWarp, s[kLast] >> 16 == 0xfc00 || s[kLast + 1] >> 16 == 0xfc00);
    const float top = few ? kTopWeightLog2 - kFewKeysLog2 : kTopWeightLog2;
    float largest[2];
    half_maxima(s, largest);
#pragma unroll
    for (int r = 0; r < 2; ++r) state.minus_max[r] = round_maximum(fmaf(-largest[r], scale, top));
    state.limit = half_limit(state);
  }
  __device__ __forceinline__ void prepare(const uint32_t (&s)[kScores], uint32_t (&weights)[kScores / 2],
                                          RowState& state, Output& o) {
    if (try_half_weights(s, weights, state, scale)) return;
    NewMaxima maxima{scale};
    float largest[2], factor[2];
    half_maxima(s, largest);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float own = round_maximum(__fmul_rn(-largest[r], scale) + kTopWeightLog2);
      maxima.take(state, r, fminf(state.minus_max[r], own), factor[r]);
    }
    state.limit = half_limit(state);
    const HalfScores<kScores> scores{s};
#pragma unroll
    for (int g = 0; g < kScores / 4; ++g) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float x[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          x[i] = maxima.weight(scores[8 * g + 2 * r + i / 2 * 4 + i % 2], r);
          state.sum[r] += x[i];
        }
        weights[2 * g + r] = ptx::pack4_e4m3(x[0], x[1], x[2], x[3]);
      }
    }
    if (!__any_sync(ptx::kFullWarp, factor[0] != 1.f || factor[1] != 1.f)) return;
#pragma unroll
    for (int i = 0; i < T::kHeadDimV / 2; ++i) o[i] *= factor[(i / 2) % 2];
    total.rescale(factor);
  }
};

}  // namespace flash_ext::sm90
