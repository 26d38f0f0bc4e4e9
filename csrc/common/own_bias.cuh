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

  // `row`, `col`: of the first score. From last_row and last_col on, both above 0, a bias is 0.
  template <typename E>
  __device__ static void load(uint32_t stage, int thread, const BiasView& x, int b, int h, int row, int col,
                              int last_row, int last_col) {
    const int64_t head = b * x.batch_stride + h * x.head_stride;
    // Loads without branches, many at a time: what lies beyond reads the last element there is.
    const auto load_as = [&](const auto* first, const auto& to_float) {
      const auto* const upper = first + head + min(row, last_row - 1) * x.row_stride;
      const auto* const lower = first + head + min(row + 8, last_row - 1) * x.row_stride;
#pragma unroll 8
      for (int n = 0; n < kBlocks; ++n) {
        float value[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int c = col + n * 8 + i % 2;
          const float element = to_float((i < 2 ? upper : lower)[min(c, last_col - 1) * x.col_stride]);
          value[i] = row + i / 2 * 8 < last_row && c < last_col ? element : 0.f;
        }
        ptx::store_shared(at(stage, thread, n), make_float4(value[0], value[1], value[2], value[3]));
      }
    };
    if (x.is_float) {
      load_as(static_cast<const float*>(x.ptr), [](float value) { return value; });
    } else {
      load_as(static_cast<const E*>(x.ptr), [](E value) { return ptx::to_float<E>(value); });
    }
  }
};

}  // namespace flash_ext
