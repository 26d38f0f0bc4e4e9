// Rotary position embedding of rows of q and k that are quantised.
#pragma once

#include "../ptx/sm80.cuh"
#include "../quantize_fp8.h"

namespace flash_ext {

// kCount factors from element i on, a multiple of 4.
template <int kCount, typename E>
__device__ __forceinline__ void load_factors(float (&x)[8], const void* factors, bool is_float, int64_t i) {
#pragma unroll
  for (int j = 0; j < kCount; ++j) {
    x[j] =
        is_float ? static_cast<const float*>(factors)[i + j] : ptx::to_float<E>(static_cast<const E*>(factors)[i + j]);
  }
}

// Eight features of a row, a multiple of 8 on, in float32. All lanes of a row come here together.
template <typename E>
__device__ __forceinline__ void turn(float (&x)[8], const RotaryRows& r, int b, int64_t row, int column, bool there) {
  if (r.cos == nullptr) return;
  const int half = r.dim / 2;
  const bool turns = there && column < r.dim;
  const int64_t at_cos = b * r.cos_batch + row * r.cos_row, at_sin = b * r.sin_batch + row * r.sin_row;
  float c[8] = {}, s[8] = {};
  if (r.interleaved) {
    if (!turns) return;
    load_factors<4, E>(c, r.cos, r.is_float, at_cos + column / 2);
    load_factors<4, E>(s, r.sin, r.is_float, at_sin + column / 2);
#pragma unroll
    for (int i = 0; i < 8; i += 2) {
      const float low = x[i], high = x[i + 1];
      x[i] = low * c[i / 2] - high * s[i / 2];
      x[i + 1] = low * s[i / 2] + high * c[i / 2];
    }
    return;
  }
  if (turns) {
    const int pair = column < half ? column : column - half;
    load_factors<8, E>(c, r.cos, r.is_float, at_cos + pair);
    load_factors<8, E>(s, r.sin, r.is_float, at_sin + pair);
  }
  const int lane = static_cast<int>(threadIdx.x) % 32, step = half / 8;
  const int other = column < half ? lane + step : lane - step;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float y = __shfl_sync(ptx::kFullWarp, x[i], turns ? other : lane);
    if (turns) x[i] = column < half ? x[i] * c[i] - y * s[i] : x[i] * c[i] + y * s[i];
  }
}

}  // namespace flash_ext
