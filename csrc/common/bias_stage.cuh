// A warp's own part of a bias tile in shared memory: queries x keys, 16-bit, rows padded by 16 bytes, so that the
// eight rows of an ldmatrix phase fall into different banks. Copied asynchronously by the warp that reads it.
#pragma once

#include "modifiers.cuh"

namespace flash_ext {

template <int kRows, int kCols>
struct BiasStage {
  static constexpr bool kTakesAll = false;  // biases of any type and strides
  static constexpr int kPitch = 2 * kCols + 16, kBytes = kRows * kPitch;

  // Rows [row0, row0 + kRows) and keys [col0, col0 + kCols); what lies beyond the bias or the sequence becomes 0.
  __device__ static void load(uint32_t stage, const ScoreMod& s, int row0, int col0) {
    const BiasView& x = s.m.bias;
    constexpr int kChunks = kCols / 8, kStep = 32 / kChunks;
    const int lane = ptx::fresh_lane(), chunk = lane % kChunks, first = lane / kChunks;
    const int row = row0 + first, col = col0 + chunk * 8;
    const int last_row = min(x.rows, s.seq.seqlen_q), last_col = min(x.cols, s.seq.seqlen_k);
    const uint16_t* base = static_cast<const uint16_t*>(x.ptr) + s.seq.b * x.batch_stride + s.h * x.head_stride;
    const uint16_t* from = base + row * x.row_stride + col;
    const uint32_t to = stage + first * kPitch + chunk * 16;
    if (row0 + kRows <= last_row && col0 + kCols <= last_col) {
#pragma unroll
      for (int i = 0; i < kRows / kStep; ++i) {
        ptx::cp_async_16(to + i * kStep * kPitch, from, 16);
        from += kStep * x.row_stride;
      }
    } else {
      const int bytes = min(16, max(0, 2 * (last_col - col)));
#pragma unroll
      for (int i = 0; i < kRows / kStep; ++i) {
        const bool in = bytes > 0 && row + i * kStep < last_row;
        ptx::cp_async_16(to + i * kStep * kPitch, in ? from : base, in ? bytes : 0);
        from += kStep * x.row_stride;
      }
    }
  }

  // acc = acc * scale + bias, for accumulators of S or (kT) of S^T.
  template <typename E, bool kT, int kA, int kN>
  __device__ static void add(float (&acc)[kA][kN][4], float scale, uint32_t stage) {
    const int lane = ptx::fresh_lane();
    const auto add_pair = [scale](float& lo, float& hi, uint32_t pair) {
      const float2 bias = ptx::unpack2<E>(pair);
      lo = fmaf(lo, scale, bias.x);
      hi = fmaf(hi, scale, bias.y);
    };
#pragma unroll
    for (int a = 0; a < kA; ++a) {
#pragma unroll
      for (int n = 0; n < kN / 2; ++n) {
        uint32_t r[4];
        if constexpr (kT) {
          const int query = n * 16 + (lane >> 4) * 8 + lane % 8, key = a * 16 + (lane >> 3 & 1) * 8;
          ptx::ldmatrix_x4_trans(r, stage + query * kPitch + key * 2);
        } else {
          const int query = a * 16 + lane % 16, key = n * 16 + (lane >> 4) * 8;
          ptx::ldmatrix_x4(r, stage + query * kPitch + key * 2);
        }
        add_pair(acc[a][2 * n][0], acc[a][2 * n][1], r[0]);
        add_pair(acc[a][2 * n][2], acc[a][2 * n][3], r[1]);
        add_pair(acc[a][2 * n + 1][0], acc[a][2 * n + 1][1], r[2]);
        add_pair(acc[a][2 * n + 1][2], acc[a][2 * n + 1][3], r[3]);
      }
    }
  }
};

// Where shared memory has no room for one.
struct NoBiasStage {
  static constexpr bool kTakesAll = false;
  static constexpr int kBytes = 0, kPitch = 0;
  __device__ static void load(uint32_t, const ScoreMod&, int, int) {}
  template <typename E, bool kT, int kA, int kN>
  __device__ static void add(float (&)[kA][kN][4], float, uint32_t) {}
};

}  // namespace flash_ext
