// Gradients of keys and values of which several CTAs have made a part each (gqa_splits.h): their sum, in the order of
// the queries and their heads, rounded once.
#pragma once

#include "../heuristics.h"
#include "../params.h"
#include "../ptx/sm80.cuh"

namespace flash_ext {

struct HeadSums {
  const float* parts = nullptr;  // (batch, rows, heads, num_parts, columns), contiguous
  StridedView to;                // (batch, rows, heads, columns)
  int num_parts = 1, heads = 1;
  int columns = 0;
  int64_t rows = 0, all_rows = 0;    // of a batch entry; of all, counted for each head
  bool in_fours = false;             // four neighbours can be read and written together
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
  const int fours = (s.columns + 3) / 4;
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kHeadSumThreads + threadIdx.x;
  const int64_t row = index / fours;
  if (row >= s.all_rows) return;
  const int column = static_cast<int>(index - row * fours) * 4, valid = s.columns - column;
  const float* from = s.parts + row * s.num_parts * s.columns + column;
  float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 4
  for (int part = 0; part < s.num_parts; ++part, from += s.columns) {
    const float4 x = load_four(from, valid, s.in_fours);
    sum.x += x.x, sum.y += x.y, sum.z += x.z, sum.w += x.w;
  }
  const int64_t row_of_batch = row / s.heads, b = row_of_batch / s.rows;
  const int64_t at = b * s.to.batch_stride + (row_of_batch - b * s.rows) * s.to.row_stride +
                     (row - row_of_batch * s.heads) * s.to.head_stride + column;
  const float x[4] = {sum.x, sum.y, sum.z, sum.w};
  if (s.to.is_float) {
    float* to = static_cast<float*>(s.to.ptr) + at;
    if (s.in_fours) {
      *reinterpret_cast<float4*>(to) = sum;
      return;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i < valid) to[i] = x[i];
    }
    return;
  }
  uint16_t* to = static_cast<uint16_t*>(s.to.ptr) + at;
  const uint32_t low = ptx::pack2<E>(x[0], x[1]), high = ptx::pack2<E>(x[2], x[3]);
  if (s.in_fours) {
    *reinterpret_cast<uint2*>(to) = make_uint2(low, high);
    return;
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (i < valid) to[i] = static_cast<uint16_t>((i < 2 ? low : high) >> (16 * (i % 2)));
  }
}

}  // namespace flash_ext
