// What the kernels of the ladder compute, and where its parts lie.
#pragma once

#include "../../../csrc/common/fragments.cuh"

namespace flash_ext::ladder {

using Element = __nv_bfloat16;
inline constexpr float kLog2e = 1.4426950408889634f, kLn2 = 0.6931471805599453f;

// softmax(scale q k^T) v for `heads` pairs of a batch entry and a head. All tensors are contiguous, (heads, seqlen, D).
// scale is positive, and there is at least one key.
struct Problem {
  const uint16_t* q;
  const uint16_t* k;
  const uint16_t* v;
  uint16_t* out;
  int64_t heads;
  int seqlen_q, seqlen_k;
  float scale;
  // FlashAttention-2: (heads, seqlen_q) log of the sum of exponentials, or null where nobody asks for it.
  float* lse;
  int ctas_per_head;
  // FlashAttention: what lies in memory between key blocks, (heads, seqlen_q, D) and (heads, seqlen_q).
  float* acc;
  float* row_max;
  float* row_sum;
};

__device__ __forceinline__ int ceil_div(int a, int b) { return (a + b - 1) / b; }

// Rows first.. of a head's tensor with D columns.
template <int D>
__device__ __forceinline__ TileSource rows_of(const uint16_t* x, int64_t head, int seqlen, int first) {
  return {x + (head * seqlen + first) * D, D, D, true};
}

// Over the four lanes that hold a row of an accumulator.
__device__ __forceinline__ float quad_max(float x) {
  x = max(x, __shfl_xor_sync(ptx::kFullWarp, x, 1));
  return max(x, __shfl_xor_sync(ptx::kFullWarp, x, 2));
}
__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(ptx::kFullWarp, x, 1);
  return x + __shfl_xor_sync(ptx::kFullWarp, x, 2);
}

// Scores of keys at and beyond `keys` become -inf: a zero would weigh exp(0 - maximum).
template <int kA, int kN>
__device__ __forceinline__ void hide_tail(float (&s)[kA][kN][4], int keys, int lane) {
#pragma unroll
  for (int m = 0; m < kA; ++m) {
#pragma unroll
    for (int n = 0; n < kN; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (n * 8 + lane % 4 * 2 + i % 2 >= keys) s[m][n][i] = -INFINITY;
      }
    }
  }
}

// The largest of a thread's scores in row lane / 4 + 8 half of a block of 16.
template <int kN>
__device__ __forceinline__ float largest(const float (&s)[kN][4], int half) {
  float x = -INFINITY;
#pragma unroll
  for (int n = 0; n < kN; ++n) x = max(x, max(s[n][2 * half], s[n][2 * half + 1]));
  return x;
}

// s = exp2(scale s - shift) in such a row; returns their sum over this thread's keys.
template <int kN>
__device__ __forceinline__ float exponentials(float (&s)[kN][4], int half, float scale_log2, float shift) {
  float sum = 0.f;
#pragma unroll
  for (int n = 0; n < kN; ++n) {
#pragma unroll
    for (int i = 2 * half; i < 2 * half + 2; ++i) {
      s[n][i] = ptx::ex2(fmaf(s[n][i], scale_log2, -shift));
      sum += s[n][i];
    }
  }
  return sum;
}

}  // namespace flash_ext::ladder
