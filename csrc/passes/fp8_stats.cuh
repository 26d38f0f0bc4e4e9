// Statistics of channels, and the means and factors that follow from them: the first two launches of fp8_passes.cuh.
#pragma once

#include <cmath>

#include "../common/seqlen.cuh"
#include "../fp8.h"
#include "../ptx/sm80.cuh"
#include "rounding_loss.h"

namespace flash_ext {

inline constexpr int kQuantizeThreads = 256, kMeansThreads = 1024;

// What a launch does with one tensor.
struct TensorPass {
  StridedView x;
  int heads = 0, columns = 0;
  int64_t rows = 0;  // of a batch entry, or packed ones
  int64_t first = 0;  // CTA
  float* partials = nullptr;
};
struct StatsPass {
  TensorPass of[3];  // q, k, v; heads 0: not asked for
  const int32_t* bounds[3];  // cu_seqlens, null where dense
  const int32_t* used[3];  // the first rows of each sequence, which count; null: all
  int batch, parts[3];
};

// How many of its rows a sequence has.
__device__ __forceinline__ int used_rows(const int32_t* used, int b, int rows) {
  return used != nullptr ? min(max(used[b], 0), rows) : rows;
}
// Whether a packed row is one of these.
__device__ __forceinline__ bool is_used(const int32_t* used, const int32_t* bounds, int batch, int64_t total,
                                        int64_t row) {
  BoundSearch found(bounds, total);
  int lo = -1, hi = batch;
  while (lo < hi) {
    const int mid = upper_half(lo, hi);
    const int32_t at = found.bound(mid);
    found.halve(at, at <= row);
    (at <= row ? lo : hi) = at <= row ? mid : mid - 1;
  }
  return lo >= 0 && lo < batch && row - found.start < used_rows(used, lo, found.end - found.start);
}

// Lanes of a row: a power of two, eight columns each.
__host__ __device__ constexpr int lanes_of_row(int columns) { return columns <= 64 ? 8 : columns <= 128 ? 16 : 32; }

// Eight columns, a multiple of 8 on, of kCount rows: those of which row_of(i) is 0 or more, else zeros. All rows are asked for
// before one is used: one after the other they took 2 to 3 times as long.
template <int kCount, typename RowOf>
__device__ __forceinline__ void load_rows(uint4 (&x)[kCount], const StridedView& view, int b, int h, int column,
                                          const RowOf& row_of) {
  const uint16_t* from = row_pointer(view, b, 0, h) + column;
  if (view.aligned) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int64_t row = row_of(i);
      x[i] = make_uint4(0, 0, 0, 0);
      if (row >= 0) x[i] = *reinterpret_cast<const uint4*>(from + row * view.row_stride);
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const int64_t row = row_of(i);
    uint32_t words[4] = {};
    if (row >= 0) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const uint16_t* pair = from + row * view.row_stride + 2 * j;
        words[j] = pair[0] | static_cast<uint32_t>(pair[1]) << 16;
      }
    }
    x[i] = make_uint4(words[0], words[1], words[2], words[3]);
  }
}
template <typename E>
__device__ __forceinline__ void unpack_eight(float (&x)[8], const uint4& words) {
  const uint32_t w[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 pair = ptx::unpack2<E>(w[i]);
    x[2 * i] = pair.x, x[2 * i + 1] = pair.y;
  }
}

__device__ __forceinline__ float factor_of_amax(float amax) { return amax < kLeastAmax ? 1.f : amax / kFp8Max; }

// ---- statistics ------------------------------------------------------------------------------------

// A CTA takes kStatRows rows of a head.
template <typename E>
__global__ void __launch_bounds__(kQuantizeThreads) fp8_stats_kernel(const __grid_constant__ StatsPass s) {
  const int which = blockIdx.x >= s.of[2].first ? 2 : blockIdx.x >= s.of[1].first ? 1 : 0;
  const TensorPass& t = s.of[which];
  const int64_t index = blockIdx.x - t.first;
  const int part = static_cast<int>(index % s.parts[which]);
  const int64_t bh = index / s.parts[which];
  const int b = static_cast<int>(bh / t.heads), h = static_cast<int>(bh % t.heads);
  int64_t begin = static_cast<int64_t>(part) * kStatRows, end = min(begin + kStatRows, t.rows);
  const int32_t *bounds = s.bounds[which], *used = s.used[which];
  if (bounds != nullptr) {
    begin = max(begin, static_cast<int64_t>(bounds[0]));
    end = min(end, static_cast<int64_t>(bounds[s.batch]));
  } else {
    end = min(end, static_cast<int64_t>(used_rows(used, b, static_cast<int>(t.rows))));
  }
  const int lanes = lanes_of_row(t.columns), lane = threadIdx.x % lanes, at_once = kQuantizeThreads / lanes;
  const int column = lane * 8;
  float sum[8] = {}, lowest[8], highest[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) lowest[i] = INFINITY, highest[i] = -INFINITY;
  if (column < t.columns) {
    constexpr int kAhead = 4;
    for (int64_t first = begin + threadIdx.x / lanes; first < end; first += kAhead * at_once) {
      int64_t rows[kAhead];
      uint4 words[kAhead];
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        rows[i] = first + i * at_once;
        if (rows[i] >= end) rows[i] = -1;
        if (bounds != nullptr && used != nullptr && rows[i] >= 0 && !is_used(used, bounds, s.batch, t.rows, rows[i]))
          rows[i] = -1;
      }
      load_rows(words, t.x, b, h, column, [&](int i) { return rows[i]; });
#pragma unroll
      for (int j = 0; j < kAhead; ++j) {
        if (rows[j] < 0) continue;
        float x[8];
        unpack_eight<E>(x, words[j]);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          sum[i] += x[i];
          lowest[i] = fminf(lowest[i], x[i]);
          highest[i] = fmaxf(highest[i], x[i]);
        }
      }
    }
  }
  __shared__ float shared[kQuantizeThreads][8];
  const auto reduce = [&](const float (&x)[8], int kind, auto join) {
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 8; ++i) shared[threadIdx.x][i] = x[i];
    __syncthreads();
    const int c = threadIdx.x;
    if (c >= t.columns) return;
    float all = shared[c / 8][c % 8];
    for (int r = 1; r < at_once; ++r) all = join(all, shared[r * lanes + c / 8][c % 8]);
    t.partials[((bh * s.parts[which] + part) * ChannelStats::kCount + kind) * t.columns + c] = all;
  };
  reduce(sum, ChannelStats::kSums, [](float x, float y) { return x + y; });
  reduce(lowest, ChannelStats::kMinima, [](float x, float y) { return fminf(x, y); });
  reduce(highest, ChannelStats::kMaxima, [](float x, float y) { return fmaxf(x, y); });
}

// ---- means and factors -----------------------------------------------------------------------------

struct MeansPass {
  StatsPass stats;
  float* offset[3];  // of channels; null: none is taken off
  float* channel_factor;  // of v
  float* head_factor[3];  // of q and k where a head has one
  RoundingLoss loss;
};

// A CTA takes a head.
__global__ void __launch_bounds__(kMeansThreads) fp8_means_kernel(const __grid_constant__ MeansPass m) {
  const StatsPass& s = m.stats;
  const int which = blockIdx.x >= s.of[2].first ? 2 : blockIdx.x >= s.of[1].first ? 1 : 0;
  const TensorPass& t = s.of[which];
  const int64_t bh = blockIdx.x - t.first;
  const int c = threadIdx.x;
  const int32_t *bounds = s.bounds[which], *used = s.used[which];
  int64_t count = t.rows;
  if (bounds == nullptr) {
    count = used_rows(used, static_cast<int>(bh / t.heads), static_cast<int>(t.rows));
  } else if (used == nullptr) {
    count = max(int64_t{0}, min(t.rows, static_cast<int64_t>(bounds[s.batch])) - max(0, bounds[0]));
  } else {
    count = 0;
    for (int b = 0; b < s.batch; ++b) count += used_rows(used, b, packed_span(bounds, s.batch, b, t.rows).length);
  }
  // Several threads a channel, which add up in a fixed order.
  const int threads = kMeansThreads / t.columns;
  float sum = 0.f, lowest = INFINITY, highest = -INFINITY;
  if (c < threads * t.columns) {
    const int pitch = ChannelStats::kCount * t.columns;
    const float* from = t.partials + bh * s.parts[which] * pitch + c % t.columns;
#pragma unroll 4
    for (int part = c / t.columns; part < s.parts[which]; part += threads) {
      const float* of_part = from + static_cast<int64_t>(part) * pitch;
      sum += of_part[0];
      lowest = fminf(lowest, of_part[t.columns]);
      highest = fmaxf(highest, of_part[2 * t.columns]);
    }
  }
  __shared__ float found[3][kMeansThreads];
  found[0][c] = sum, found[1][c] = lowest, found[2][c] = highest;
  __syncthreads();
  float amax = 0.f;
  if (c < t.columns) {
    for (int i = 1; i < threads; ++i) {
      sum += found[0][c + i * t.columns];
      lowest = fminf(lowest, found[1][c + i * t.columns]);
      highest = fmaxf(highest, found[2][c + i * t.columns]);
    }
    const float mean = m.offset[which] != nullptr && count > 0 ? sum / static_cast<float>(count) : 0.f;
    if (m.offset[which] != nullptr) m.offset[which][bh * t.columns + c] = mean;
    amax = count > 0 ? fmaxf(highest - mean, mean - lowest) : 0.f;
    if (which == 2) m.channel_factor[bh * t.columns + c] = factor_of_amax(amax);
  }
  if (which == 2 && c == 0) {
    m.loss.share[bh] = count > 0 ? 1.f / static_cast<float>(count) : 0.f;
    m.loss.done[bh] = 0;
  }
  if (which == 2 || m.head_factor[which] == nullptr) return;
  __syncthreads();
  found[0][c] = amax;
  __syncthreads();
  if (c != 0) return;
  for (int i = 1; i < t.columns; ++i) amax = fmaxf(amax, found[0][i]);
  m.head_factor[which][bh] = factor_of_amax(amax);
}

}  // namespace flash_ext
