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

// Zeros in `rows` rows from `first` on, whatever their type, by one warp. `columns` is a multiple of 8; they are at
// most 1024 bytes.
__device__ __forceinline__ void zero_rows(const StridedView& x, int b, int64_t first, int h, int rows, int columns,
                                          int lane) {
  const int size = x.is_float ? 4 : 2, left = columns * size - 16 * lane;  // bytes
  char* to = reinterpret_cast<char*>(row_pointer(x, b, first, h));
  if (x.is_float) to = reinterpret_cast<char*>(float_row_pointer(x, b, first, h));
  to += 16 * lane;
#pragma unroll 1
  for (int row = 0; row < rows; ++row, to += x.row_stride * size) {
    if (left > 0) *reinterpret_cast<uint4*>(to) = make_uint4(0, 0, 0, 0);
    if (left > 512) *reinterpret_cast<uint4*>(to + 512) = make_uint4(0, 0, 0, 0);
  }
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
// A quad writes a whole sector of 32 bytes. kEven: `columns` is known to be even.
template <int kBlocks, bool kEven, typename Value>
__device__ __forceinline__ void store_float_rows(const StridedView& view, int b, const Span& span, int h, int row,
                                                 int columns, int lane, const Value& value) {
  // Results are contiguous: with an even number of columns every pair lies on 8 bytes.
  const bool in_pairs = kEven || columns % 2 == 0;
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
