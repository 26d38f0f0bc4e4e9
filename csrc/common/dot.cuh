// Products of rows for statistics: delta = rowsum(dout * out).
#pragma once

#include "../ptx/sm80.cuh"

namespace flash_ext {

// The sum over eight elements of 16 bits.
template <typename E>
__device__ __forceinline__ float dot_8(const uint4& x, const uint4& y) {
  const uint32_t xs[4] = {x.x, x.y, x.z, x.w}, ys[4] = {y.x, y.y, y.z, y.w};
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 a = ptx::unpack2<E>(xs[i]), b = ptx::unpack2<E>(ys[i]);
    sum = fmaf(a.y, b.y, fmaf(a.x, b.x, sum));
  }
  return sum;
}

}  // namespace flash_ext
