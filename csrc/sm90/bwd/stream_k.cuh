// The sums of dK and dV that one CTA leaves to the next (StreamK, config.cuh). The producer of the next one waits for
// them.
#pragma once

#include "config.cuh"

namespace flash_ext::sm90 {

// Those of a thread: in memory four floats of each thread stand together.
template <typename T>
struct SharedSums {
  static constexpr int kThreads = 32 * T::kConsumerWarps, kFloats = 2 * T::kBlockN * T::kHeadDim / kThreads;
  float* first;
  __device__ SharedSums(const StreamK& s, uint32_t cta)
      : first(s.sums + static_cast<int64_t>(cta) * kThreads * kFloats + (ptx::fresh_thread_idx() - 128) * 4) {}
  __device__ float4* at(int i) const { return reinterpret_cast<float4*>(first + i * kThreads * 4); }

  // kBefore: floats of other sums that stand before these.
  template <int kBefore, int kCount>
  __device__ __forceinline__ void store(const float (&x)[kCount]) const {
#pragma unroll
    for (int i = 0; i < kCount / 4; ++i) {
      *at(kBefore / 4 + i) = make_float4(x[4 * i], x[4 * i + 1], x[4 * i + 2], x[4 * i + 3]);
    }
  }
  template <int kBefore, int kCount>
  __device__ __forceinline__ void load(float (&x)[kCount]) const {
#pragma unroll
    for (int i = 0; i < kCount / 4; ++i) {
      const float4 y = __ldcg(at(kBefore / 4 + i));
      x[4 * i] = y.x, x[4 * i + 1] = y.y, x[4 * i + 2] = y.z, x[4 * i + 3] = y.w;
    }
  }
};

// By a warp that has stored its sums.
__device__ __forceinline__ void tell_sums(const StreamK& s, const BwdWorkTile& work) {
  __syncwarp();
  if (ptx::fresh_lane() != 0) return;
  ptx::fence_gpu();
  atomicAdd(s.words + (work.index - s.first), 1u);
}

}  // namespace flash_ext::sm90
