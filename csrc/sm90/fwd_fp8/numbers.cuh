// How the consumers of the sm90 forward (fwd/consume.cuh) compute with operands in e4m3.
//
// The tensor cores add e4m3 products into an accumulator of some 14 bits, and cut what is beyond: over 8192 keys whose
// values have something in common an eighth of it is lost. So the output has two: the product's own, of 1024 keys at
// most, and one in fp32 to which it goes wherever tiles pass a multiple of 1024. Those places belong to the keys, not
// to the tile of queries. Maxima, below which weights are rounded, do depend on the rows beside: the 16 rows of a warp
// raise theirs together.
#pragma once

#include "store.cuh"
#include "totals.cuh"
#include "weights.cuh"

namespace flash_ext::sm90 {

inline constexpr int kKeysOfAccumulator = 1024;
inline constexpr float kLeastScale = 0x1p-126f;

// The scale of a tile's scores from the product of its factors, which must be positive: a hidden score of -inf times 0
// would be NaN. What is smaller than the least normal number gives all weights alike. Negative products give NaN.
__device__ __forceinline__ float usable_scale(float product) {
  if (product < 0.f) return __int_as_float(0x7fffffff);
  return product < kLeastScale ? kLeastScale : product;  // NaN stays
}

template <typename T>
struct Fp8Numbers : FloatScores {
  using Output = float[T::kHeadDimV / 2];
  static constexpr int kScores = T::kBlockN / 2, kWords = T::kBlockN / 8;  // of the scores and weights of a tile
  static constexpr int kVChunkBytes = 16;  // a row of V transposed has all keys of a tile
  static constexpr uint32_t kVDescriptorHigh = T::kBlockN == 64 ? ptx::kDescriptorHigh64 : ptx::kDescriptorHigh;

  const Fp8Args& args;
  std::conditional_t<T::kSharedTotal, SharedTotal<T>, RegisterTotal<T>> total;
  float q_scale = 0.f;  // of the work tile whose scores are under way
  float scale = 0.f;  // of the step's tile
  const float* k_factors = nullptr;

  __device__ __forceinline__ explicit Fp8Numbers(const Fp8Args& a) : args(a) {}
  // Largest scores that are asked for are those of every tile: then no maximum is guessed, and none kept without a
  // look.
  __device__ __forceinline__ bool finds_maxima() const { return args.x.row_max != nullptr; }
  __device__ __forceinline__ void begin_work(const Fp8Args& a, const WorkTile& work, int rows_at) {
    q_scale = a.p.problem.abs_scale_log2;
    if constexpr (!T::kMixed) {
      const int h_k = static_cast<int>(divide(work.w.h, a.grid.shared));
      k_factors = block_factors(a.x.k_factor, a.p.problem, work.w.b, work.w.k.start, h_k);
      // A warpgroup behind the last row has none.
      const int row = work.w.block * T::kBlockM + rows_at * 64;
      if (row < work.w.q.length) {
        q_scale *= __ldg(block_factors(a.x.q_factor, a.p.problem, work.w.b, work.w.q.start, work.w.h) +
                         row / kFp8Block * a.x.q_factor.step);
      }
    }
  }
  // Called after a tile's products are issued. Its factor arrives while they run.
  __device__ __forceinline__ void begin_tile(const Fp8Args& a, int tile) {
    scale = q_scale;
    if constexpr (!T::kMixed)
      scale = usable_scale(scale * __ldg(k_factors + tile / (kFp8Block / T::kBlockN) * a.x.k_factor.step));
  }

  // s = Q K^T for the 64 rows of a warpgroup.
  template <int kCount>
  __device__ __forceinline__ static void issue_scores(float (&s)[kCount], uint32_t q, uint32_t k) {
    if constexpr (T::kMixed) {
      issue_qk<typename T::Element, T::kHeadDim, T::kBlockM, T::kBlockN>(s, q, k);
    } else {
      for_steps<0, T::kHeadDim / 32>([&](auto step) {
        constexpr int i = decltype(step)::value;
        constexpr int at = (i % 4) * 2, chunk = i / 4;
        ptx::wgmma_ss_e4m3<(i > 0)>(s, q + at + chunk * T::kBlockM * 8, k + at + chunk * T::kBlockN * 8);
      });
    }
  }
  // o += P V.
  template <int kCount>
  __device__ __forceinline__ static void issue_output(Output& o, const uint32_t (&p)[kCount], uint32_t v) {
#pragma unroll
    for (int i = 0; i < kCount / 4; ++i) {
      ptx::wgmma_rs_e4m3<kVDescriptorHigh>(o, p[4 * i], p[4 * i + 1], p[4 * i + 2], p[4 * i + 3], v + i * 2);
    }
  }

  template <int kCount>
  __device__ __forceinline__ void begin_state(const float (&s)[kCount], RowState& state) {
    total.begin();
    if (!finds_maxima()) guess_fp8_maximum(s, state, scale);
  }
  template <int kCount>
  __device__ __forceinline__ void prepare(float (&s)[kCount], uint32_t (&weights)[kCount / 4], RowState& state,
                                          Output& o) {
    if (!finds_maxima() && try_fp8_weights(s, weights, state, scale)) return;
    float factor[2];
    fp8_weights_by_maximum(s, weights, state, factor, scale);
    if (!__any_sync(ptx::kFullWarp, factor[0] != 1.f || factor[1] != 1.f)) return;
#pragma unroll
    for (int i = 0; i < T::kHeadDimV / 2; ++i) o[i] *= factor[(i / 2) % 2];
    total.rescale(factor);
  }

  __device__ __forceinline__ void end_tile(int tile, Output& o) {
    if ((tile + 1) % (kKeysOfAccumulator / T::kBlockN) == 0) total.take(o);
  }
  __device__ __forceinline__ Output& result(Output& o) { return total.finish(o); }

  __device__ __forceinline__ void store_rows(const Fp8Args& a, const FwdMaps& maps, const Work& w,
                                             const RowState& state, Output& o, int row, uint32_t staging, int warp_row,
                                             int lane) const {
    float inverse[2];
    finish_rows<(T::kHeadDim <= 128)>(a, w, state, row, lane, inverse);
    put_back_row_offset(a, w, state, row, lane);
    finish_output<T>(a, w, static_cast<int>(divide(w.h, a.grid.shared)), o, inverse, staging, lane);
    scale_by_sink(a, w, row, lane, o);
    constexpr float kOnes[2] = {1.f, 1.f};
    store_staged<T>(a, maps, w, o, kOnes, staging, warp_row, lane);
  }
};

}  // namespace flash_ext::sm90
