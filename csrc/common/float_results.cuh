// Results in fp32 (StridedView::is_float), straight from accumulators to global memory.
//
// For calls whose results are parts of a larger sum, such as those of ring attention: rounding is left to the caller.
// In a kernel it is a branch of the epilogue that all threads take alike.
#pragma once

#include "seqlen.cuh"

namespace flash_ext {

__device__ __forceinline__ float* float_row_pointer(const StridedView& x, int b, int64_t row, int h) {
  return static_cast<float*>(x.ptr) + b * x.batch_stride + row * x.row_stride + h * x.head_stride;
}

// Stores 8 consecutive elements of a row, or the `valid` first of them.
__device__ __forceinline__ void store_floats(float* to, const float (&x)[8], int valid, bool aligned) {
  if (aligned && valid >= 8) {
    reinterpret_cast<float4*>(to)[0] = make_float4(x[0], x[1], x[2], x[3]);
    reinterpret_cast<float4*>(to)[1] = make_float4(x[4], x[5], x[6], x[7]);
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (i < valid) to[i] = x[i];
    }
  }
}

// Stores a warp's 16 rows. value(j, i) is element i of the accumulator of columns 8 j to 8 j + 7, as mma and wgmma
// leave it: elements 0 and 1 belong to this lane's first row, `row` of the sequence, 2 and 3 to the row 8 further on.
// A quad writes a whole sector of 32 bytes.
template <int kBlocks, typename Value>
__device__ __forceinline__ void store_float_rows(const StridedView& view, int b, const Span& span, int h, int row,
                                                 int columns, int lane, const Value& value) {
  // Results are contiguous: with an even number of columns every pair lies on 8 bytes.
  const bool in_pairs = columns % 2 == 0;
  const int first = 2 * (lane % 4);
  float* to = float_row_pointer(view, b, span.start + row, h) + first;
#pragma unroll
  for (int half = 0; half < 2; ++half, to += 8 * view.row_stride) {
    const int left = row + 8 * half < span.length ? columns - first : 0;  // columns from this lane's first one on
#pragma unroll
    for (int j = 0; j < kBlocks; ++j) {
      const float x = value(j, 2 * half), y = value(j, 2 * half + 1);
      if (in_pairs) {
        if (8 * j < left) *reinterpret_cast<float2*>(to + 8 * j) = make_float2(x, y);
      } else {
        if (8 * j < left) to[8 * j] = x;
        if (8 * j + 1 < left) to[8 * j + 1] = y;
      }
    }
  }
}

}  // namespace flash_ext
