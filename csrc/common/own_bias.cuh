// A bias in fp32 in shared memory, of any strides and type, for kernels that use a tile of it again and again. A thread
// keeps what belongs to its own scores and reads nothing else, so nobody waits for anybody.
#pragma once

#include "../modifiers.h"
#include "../ptx/sm80.cuh"

namespace flash_ext {

// For scores of two rows, 8 apart, and kBlocks pairs of columns, 8 apart, as mma and wgmma leave them: float4 n of a
// thread is pair n of the first row, then that of the second.
template <int kThreads, int kBlocks>
struct OwnBias {
  static constexpr int kBytes = 16 * kThreads * kBlocks;

  __device__ static uint32_t at(uint32_t stage, int thread, int n) { return stage + (n * kThreads + thread) * 16; }

  // `row`, `col`: of the first score. Beyond last_row and last_col a bias is 0.
  template <typename E>
  __device__ static void load(uint32_t stage, int thread, const BiasView& x, int b, int h, int row, int col, int last_row,
                              int last_col) {
    const int64_t head = b * x.batch_stride + h * x.head_stride;
#pragma unroll 8
    for (int n = 0; n < kBlocks; ++n) {
      float value[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int r = row + i / 2 * 8, c = col + n * 8 + i % 2;
        const int64_t element = head + r * x.row_stride + c * x.col_stride;
        value[i] = 0.f;
        if (r < last_row && c < last_col) {
          value[i] = x.is_float ? static_cast<const float*>(x.ptr)[element]
                                : ptx::to_float<E>(static_cast<const E*>(x.ptr)[element]);
        }
      }
      ptx::store_shared(at(stage, thread, n), make_float4(value[0], value[1], value[2], value[3]));
    }
  }
};

}  // namespace flash_ext
