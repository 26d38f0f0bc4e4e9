// The second accumulator of the fp8 forward's output, in fp32: in registers, or in shared memory where they are too
// few.
//
// Both have begin() of a work tile, rescale() where maxima rise, take(), which moves the product's own accumulator
// here, and finish(), the sum of both.
#pragma once

#include "config.cuh"

namespace flash_ext::sm90 {

template <typename T>
struct RegisterTotal {
  static constexpr int kCount = T::kHeadDimV / 2;
  float total[kCount];

  __device__ __forceinline__ void begin() {
#pragma unroll
    for (float& x : total) x = 0.f;
  }
  __device__ __forceinline__ void rescale(const float (&factor)[2]) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) total[i] *= factor[i / 2 % 2];
  }
  __device__ __forceinline__ void take(float (&o)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      total[i] += o[i];
      o[i] = 0.f;
    }
  }
  __device__ __forceinline__ float (&finish(float (&o)[kCount])) [kCount] {
    take(o);
    return total;
  }
};

// Each thread has places of its own, of 16 bytes at a time beside those of the other lanes. What is there is worth
// `factor`, so that rising maxima touch registers alone. It is there from the first take() on: up to 1024 keys never.
template <typename T>
struct SharedTotal {
  static constexpr int kCount = T::kHeadDimV / 2, kStep = 32 * 16;
  static constexpr int kAtOnce = 4;  // places on their way, which hides most of the wait and needs 16 registers
  static_assert(kCount % (4 * kAtOnce) == 0 && kCount / 4 * kStep == T::kStagingChunks * 16 * 128);
  float factor[2];
  bool begun;

  __device__ __forceinline__ void begin() {
    factor[0] = factor[1] = 1.f;
    begun = false;
  }
  __device__ __forceinline__ void rescale(const float (&by)[2]) {
    factor[0] *= by[0];
    factor[1] *= by[1];
  }
  __device__ __forceinline__ static uint32_t places() {
    extern __shared__ __align__(1024) unsigned char smem_bytes[];
    const int thread = ptx::fresh_thread_idx() - 128;
    return ptx::smem_address(smem_bytes) + T::kStagingAt + thread / 32 * (kCount / 4 * kStep) + thread % 32 * 16;
  }
  __device__ __forceinline__ void add(float (&o)[kCount], int first, uint32_t from) const {
    float4 x[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) x[i] = ptx::load_shared(from + i * kStep);
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      float* to = o + first + 4 * i;
      to[0] = fmaf(x[i].x, factor[0], to[0]);
      to[1] = fmaf(x[i].y, factor[0], to[1]);
      to[2] = fmaf(x[i].z, factor[1], to[2]);
      to[3] = fmaf(x[i].w, factor[1], to[3]);
    }
  }
  __device__ __forceinline__ void take(float (&o)[kCount]) {
    const uint32_t own = places();
    if (!begun) {
      // The output before left through here.
      ptx::bulk_wait_read();
      __syncwarp();
    }
#pragma unroll
    for (int at = 0; at < kCount; at += 4 * kAtOnce) {
      if (begun) add(o, at, own + at / 4 * kStep);
#pragma unroll
      for (int i = at; i < at + 4 * kAtOnce; i += 4) {
        ptx::store_shared(own + i / 4 * kStep, make_float4(o[i], o[i + 1], o[i + 2], o[i + 3]));
        o[i] = o[i + 1] = o[i + 2] = o[i + 3] = 0.f;
      }
    }
    begin();
    begun = true;
  }
  __device__ __forceinline__ float (&finish(float (&o)[kCount])) [kCount] {
    if (begun) {
      const uint32_t own = places();
#pragma unroll
      for (int at = 0; at < kCount; at += 4 * kAtOnce) add(o, at, own + at / 4 * kStep);
    }
    return o;
  }
};

}  // namespace flash_ext::sm90
