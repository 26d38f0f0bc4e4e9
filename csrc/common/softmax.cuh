// Online softmax of the rows a thread holds in m16n8 accumulators (Milakov and Gimelshein 2018; the
// unnormalised running output is FlashAttention-2's). Maxima are kept in raw score units, exponentials are
// taken base 2: p = 2^(scale_log2 * (s - max)).
#pragma once

#include "../ptx/sm80.cuh"
#include "attn_mod.cuh"

namespace flash_ext {

// The largest score of each row among those of a thread.
template <int kA, int kN>
__device__ __forceinline__ void own_maxima(const float (&acc)[kA][kN][4], float (&largest)[2 * kA]) {
#pragma unroll
  for (int r = 0; r < 2 * kA; ++r) {
    largest[r] = -INFINITY;
#pragma unroll
    for (int nb = 0; nb < kN; ++nb) {
      largest[r] = fmaxf(largest[r], fmaxf(acc[r / 2][nb][(r % 2) * 2], acc[r / 2][nb][(r % 2) * 2 + 1]));
    }
  }
}

// kRows rows per thread; each row is spread over the four lanes of a quad.
template <int kRows>
struct SoftmaxState {
  float row_max[kRows];  // shared by the quad
  float row_sum[kRows];  // this lane's share; reduced over the quad in finish()

  __device__ SoftmaxState() {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      row_max[r] = -INFINITY;
      row_sum[r] = 0.f;
    }
  }

  // Raises the maxima to those of a new tile. Returns true, with the factors for the running output, when
  // the warp has to rescale it. A row is left alone while its scores exceed the kept maximum by less than
  // 2^kSlack: the weights then stay below 2^8, far inside fp16, bf16 and fp32 range, and the result is the
  // same softmax. On random data almost every tile after the first skips the rescale.
  static constexpr float kSlackLog2 = 8.f;
  __device__ bool raise(float (&tile_max)[kRows], float scale_log2, float (&factor)[kRows],
                        float slack_log2 = kSlackLog2) {
    bool need = false;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      tile_max[r] = fmaxf(tile_max[r], __shfl_xor_sync(ptx::kFullWarp, tile_max[r], 1));
      tile_max[r] = fmaxf(tile_max[r], __shfl_xor_sync(ptx::kFullWarp, tile_max[r], 2));
      // False while both are -inf: (-inf) - (-inf) is NaN and compares false.
      need |= (tile_max[r] - row_max[r]) * scale_log2 > slack_log2;
    }
    if (!__any_sync(ptx::kFullWarp, need)) return false;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const float higher = fmaxf(row_max[r], tile_max[r]);
      factor[r] = higher == -INFINITY ? 1.f : ptx::ex2((row_max[r] - higher) * scale_log2);
      row_sum[r] *= factor[r];
      row_max[r] = higher;
    }
    return true;
  }

  // What to subtract from s, and from scale_log2 * s; 0 for a row that has seen nothing, whose scores are all -inf.
  __device__ float shift(int r) const { return row_max[r] == -INFINITY ? 0.f : row_max[r]; }
  __device__ float offset(int r, float scale_log2) const { return shift(r) * scale_log2; }

  // Completes the sum over the quad; returns the factor for the output and the natural-log lse.
  __device__ float finish(int r, float scale_log2, float& lse) {
    row_sum[r] += __shfl_xor_sync(ptx::kFullWarp, row_sum[r], 1);
    row_sum[r] += __shfl_xor_sync(ptx::kFullWarp, row_sum[r], 2);
    const bool empty = row_max[r] == -INFINITY && row_sum[r] == 0.f;
    lse = empty ? -INFINITY : shift(r) * (scale_log2 * kLn2) + logf(row_sum[r]);
    return empty ? 0.f : 1.f / row_sum[r];
  }
};

}  // namespace flash_ext
