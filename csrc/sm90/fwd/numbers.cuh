// How the consumers of the sm90 forward (consume.cuh) compute with operands of 16 bits. fwd_fp8/numbers.cuh has the
// same for operands in e4m3.
#pragma once

#include "parts.cuh"
#include "store.cuh"

namespace flash_ext::sm90 {

template <typename T>
struct PlainNumbers : FloatScores {
  using E = typename T::Element;
  using Args = typename T::Args;
  static constexpr int kScores = T::kKeys / 2, kWords = T::kKeys / 4;  // of the scores and weights of a tile
  static constexpr int kVChunkBytes = T::kBlockN * 128;  // between chunks of V
  using Output = float[T::kHeadDimV / 2];

  float scale;

  __device__ __forceinline__ explicit PlainNumbers(const Args& a) : scale(a.p.problem.abs_scale_log2) {}
  __device__ __forceinline__ void begin_work(const Args&, const WorkTile&, int) {}
  __device__ __forceinline__ void begin_tile(const Args&, int) {}
  __device__ __forceinline__ static constexpr float unit() { return 1.f; }  // of maxima, in log2

  template <int kCount>
  __device__ __forceinline__ static void issue_scores(float (&s)[kCount], uint32_t q, uint32_t k) {
    issue_qk<E, T::kHeadDim, T::kBlockM, T::kBlockN>(s, q, k);
  }
  template <int kCount>
  __device__ __forceinline__ static void issue_output(Output& o, const uint32_t (&weights)[kCount], uint32_t v) {
    issue_pv<E>(o, weights, v);
  }

  // The first tile of a work tile starts from a guess.
  template <int kCount>
  __device__ __forceinline__ void begin_state(const float (&s)[kCount], RowState& state) {
    guess_maximum(s, state, scale);
  }
  template <int kCount>
  __device__ __forceinline__ void prepare(const float (&s)[kCount], uint32_t (&weights)[kCount / 2], RowState& state,
                                          Output& o) {
    if (try_weights<E>(s, weights, state, scale)) return;
    float factor[2];
    weights_by_maximum<E>(s, weights, state, factor, scale);
#pragma unroll
    for (int i = 0; i < T::kHeadDimV / 2; ++i) o[i] *= factor[(i / 2) % 2];
  }

  // Behind the product of a tile that is not the last one of its work tile.
  __device__ __forceinline__ void end_tile(int, Output&) {}
  // Behind the last product: the sums of all tiles.
  __device__ __forceinline__ Output& result(Output& o) { return o; }

  // Stores a warp's 16 rows, of which a thread has `row` and `row` + 8.
  __device__ __forceinline__ void store_rows(const Args& a, const FwdMaps& maps, const Work& w, const RowState& state,
                                             const Output& o, int row, uint32_t staging, int warp_row, int lane) const {
    float inverse[2];
    finish_rows<(T::kHeadDim <= 128)>(a, w, state, row, lane, inverse);
    store_staged<T>(a, maps, w, o, inverse, staging, warp_row, lane);
  }
};

}  // namespace flash_ext::sm90
