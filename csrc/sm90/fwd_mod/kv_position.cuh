// Where the consumers of the sm90 forward with modifiers are in the ring of K and V.
#pragma once

#include "config.cuh"

namespace flash_ext::sm90 {

// Registers are short: m128 keeps a count alone, which serves the tiles of bias as well. A ring of m192 may have five
// stages, which a count would have to be divided by, so there the count is for what stands beside the scores alone.
template <typename T>
struct KvPosition {
  PipelineState<T::kKvStages> ring;
  int used = 0;  // stages so far

  __device__ __forceinline__ int stage() const { return T::kM192 ? ring.stage : stage_of(used, T::kKvStages); }
  __device__ __forceinline__ uint32_t phase() const { return T::kM192 ? ring.phase : phase_of(used, T::kKvStages); }
  // The stage used so many stages ago.
  __device__ __forceinline__ int stage_ago(int ago) const {
    return T::kM192 ? ring.stage - ago + (ring.stage < ago ? T::kKvStages : 0) : stage_of(used - ago, T::kKvStages);
  }
  __device__ __forceinline__ void advance() {
    if constexpr (T::kM192) ring.advance();
    if constexpr (!T::kM192 || T::kBrings) ++used;
  }
};

}  // namespace flash_ext::sm90
