// Gradients of keys and values of which several CTAs have made a part each (gqa_splits.h): their sums, in the order of
// the queries and their heads, rounded once. One launch has both: its last CTAs have the values.
#pragma once

#include "../heuristics.h"
#include "../params.h"
#include "../ptx/sm80.cuh"

namespace flash_ext {

struct HeadSums {
  struct Gradient {
    const float* parts = nullptr;  // (batch, rows, heads, num_parts, columns), contiguous
    StridedView to;                // (batch, rows, heads, columns)
    int columns = 0;
    bool in_fours = false;  // four neighbours can be read and written together

    FLASH_EXT_HOST_DEVICE int fours() const { return (columns + 3) / 4; }
  };
  Gradient dk, dv;
  int num_parts = 1, heads = 1;
  int64_t rows = 0, all_rows = 0;  // of a batch entry; of all, counted for each head
};

__device__ __forceinline__ float4 load_four(const float* from, int valid, bool together) {
  if (together) return *reinterpret_cast<const float4*>(from);
  float x[4] = {};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (i < valid) x[i] = from[i];
  }
  return make_float4(x[0], x[1], x[2], x[3]);
}

// A thread takes four columns of a row.
template <typename E>
__global__ void __launch_bounds__(kHeadSumThreads) sum_heads_kernel(const __grid_constant__ HeadSums s) {
  ptx::wait_for_kernel_before();
  const int64_t of_dk = s.all_rows * s.dk.fours();
  int64_t index = static_cast<int64_t>(blockIdx.x) * kHeadSumThreads + threadIdx.x;
  const HeadSums::Gradient& g = index < of_dk ? s.dk : s.dv;
  if (index >= of_dk) index -= of_dk;
  const int64_t row = index / g.fours();
  if (row >= s.all_rows) return;
  const int column = static_cast<int>(index - row * g.fours()) * 4, valid = g.columns - column;
  const float* from = g.parts + row * s.num_parts * g.columns + column;
  float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 4
  for (int part = 0; part < s.num_parts; ++part, from += g.columns) {
    const float4 x = load_four(from, valid, g.in_fours);
    sum.x += x.x, sum.y += x.y, sum.z += x.z, sum.w += x.w;
  }
  const int64_t row_of_batch = row / s.heads, b = row_of_batch / s.rows;
  const int64_t at = b * g.to.batch_stride + (row_of_batch - b * s.rows) * g.to.row_stride +
                     (row - row_of_batch * s.heads) * g.to.head_stride + column;
  const float x[4] = {sum.x, sum.y, sum.z, sum.w};
  if (g.to.is_float) {
    float* to = static_cast<float*>(g.to.ptr) + at;
    if (g.in_fours) {
      *reinterpret_cast<float4*>(to) = sum;
      return;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i < valid) to[i] = x[i];
    }
    return;
  }
  uint16_t* to = static_cast<uint16_t*>(g.to.ptr) + at;
  const uint32_t low = ptx::pack2<E>(x[0], x[1]), high = ptx::pack2<E>(x[2], x[3]);
  if (g.in_fours) {
    *reinterpret_cast<uint2*>(to) = make_uint2(low, high);
    return;
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (i < valid) to[i] = static_cast<uint16_t>((i < 2 ? low : high) >> (16 * (i % 2)));
  }
}

}  // namespace flash_ext
