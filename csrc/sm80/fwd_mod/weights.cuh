// Scores to weights in the forward with modifiers. The maximum of a tile costs a comparison a score and a trip around
// the quad, and after the first tiles it hardly ever changes the one that is kept. So weights are formed with the
// maxima there are, and their sums, which are needed anyway, tell whether that was right: a sum too large sends the
// warp back to the products, this time for the exact maxima.
#pragma once

#include "../../common/fragments.cuh"
#include "../../common/modifiers.cuh"
#include "../../common/sink.cuh"
#include "../../common/softmax.cuh"
#include "scores.cuh"

namespace flash_ext::sm80 {

// kMayBeLow: scores may lie near finfo.min, which only a bias does.
template <int kRows, bool kMayBeLow>
struct GuessedSoftmax : SoftmaxState<kRows> {
  bool exact = true;  // maxima first; the same in all lanes

  // Of all rows of a lane together. Weights of at most 2^8 a score, which raise() allows, stay below it; a single one
  // as large still is a number in fp16.
  static constexpr float kLargestSum = 16384.f;

  // Raises the maxima to those of the scores; the exact ones, which row_max only follows from a distance, are
  // told to `note`. A tile that raises them is likely to be followed by another one.
  template <int kA, int kN, int kD, typename Terms, typename Note>
  __device__ __forceinline__ bool raise_maxima(const float (&acc_s)[kA][kN][4], float (&acc_o)[kA][kD][4], float unit,
                                               const Terms& terms, const Note& note) {
    float tile_max[kRows], factor[kRows];
    own_maxima(acc_s, tile_max);
#pragma unroll
    for (int r = 0; r < kRows; ++r) tile_max[r] += terms(r);
    const bool rescale = this->raise(tile_max, unit, factor);
    note(tile_max);
    if (rescale) {
#pragma unroll
      for (int mb = 0; mb < kA; ++mb) {
#pragma unroll
        for (int db = 0; db < kD; ++db) scale_block(acc_o[mb][db], factor[2 * mb], factor[2 * mb + 1]);
      }
    }
    return rescale;
  }

  __device__ bool any_low() const {
    float lowest = this->row_max[0];
#pragma unroll
    for (int r = 1; r < kRows; ++r) lowest = fminf(lowest, this->row_max[r]);
    return __any_sync(ptx::kFullWarp, lowest < kLowMaximum);
  }

  // Weights of scores, packed by pairs of keys. False: the maxima were too low, and the scores are wanted once more.
  // `noted`: every tile's maxima are wanted.
  template <typename E, int kA, int kN, int kD, typename Terms, typename Note>
  __device__ __forceinline__ bool weigh(const float (&acc_s)[kA][kN][4], uint32_t (&packed)[kA][kN][2],
                                        float (&acc_o)[kA][kD][4], float unit, const Terms& terms, bool noted,
                                        const Note& note) {
    bool raised = false, low = false;
    if (exact) {
      raised = raise_maxima(acc_s, acc_o, unit, terms, note) || noted;
      if constexpr (kMayBeLow) low = any_low();
    }
    float sum[kRows];
    const auto weights = [&](const auto& exponent) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        sum[r] = 0.f;
#pragma unroll
        for (int nb = 0; nb < kN; ++nb) {
          const float (&x)[4] = acc_s[r / 2][nb];
          const float first = ptx::ex2(exponent(x[r % 2 * 2], r)), second = ptx::ex2(exponent(x[r % 2 * 2 + 1], r));
          sum[r] += first;
          sum[r] += second;
          packed[r / 2][nb][r % 2] = ptx::pack2<E>(first, second);
        }
      }
    };
    if (kMayBeLow && low) {
      // Next to finfo.min the product inside an fma and the rounded one it is compared with are 1e31 apart, and the
      // product with log2(e) is infinite.
      weights([&](float s, int r) { return (s - (this->shift(r) - terms(r))) * unit; });
    } else {
      // A row that has seen nothing has the largest offset: what it sees first becomes an infinite weight, hidden
      // scores become 0.
      float offset[kRows];
#pragma unroll
      for (int r = 0; r < kRows; ++r) offset[r] = fmaxf((this->row_max[r] - terms(r)) * unit, -3.4028234e38f);
      weights([&](float s, int r) { return fmaf(s, unit, -offset[r]); });
    }
    if (!exact) {
      float all = sum[0];
#pragma unroll
      for (int r = 1; r < kRows; ++r) all += sum[r];
      exact = __any_sync(ptx::kFullWarp, !(all <= kLargestSum));
      if (exact) return false;
    } else {
      exact = raised || low;
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) this->row_sum[r] += sum[r];
    return true;
  }
};

// Completes a row with its sink (-inf: none): returns the factor for the output, and the lse.
template <int kRows>
__device__ __forceinline__ float finish_row(SoftmaxState<kRows>& state, int r, const Modifiers& m, float sink,
                                            float& lse) {
  const float inverse = state.finish(r, m.unit_log2, lse);
  return sink == -INFINITY ? inverse : inverse * add_sink(lse, sink);
}

}  // namespace flash_ext::sm80
