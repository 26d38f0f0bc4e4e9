// Statistics of channels, and the means and factors that follow from them: the first two launches of fp8_passes.cuh.
#pragma once

#include <cmath>

#include "../common/seqlen.cuh"
#include "../ptx/sm80.cuh"
#include "fp8_rotary.cuh"
#include "rounding_loss.h"

namespace flash_ext {

inline constexpr int kQuantizeThreads = 256, kMeansThreads = 512;
// CTAs of 256 threads that a multiprocessor is to hold. Without instructions for e4m3 three of them would spill.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 890
inline constexpr int kQuantizeCtas = 2;
#else
inline constexpr int kQuantizeCtas = 3;
#endif

// What a launch does with one tensor.
struct TensorPass {
  StridedView x;
  int heads = 0, columns = 0;
  int64_t rows = 0;  // of a batch entry, or packed ones
  int64_t first = 0;  // CTA
  float* partials = nullptr;
  float most = kFp8Max;  // how large its numbers may be
};
struct StatsPass {
  TensorPass of[3];  // q, k, v; heads 0: not asked for
  const int32_t* bounds[3];  // cu_seqlens, null where dense
  const int32_t* used[3];  // the first rows of each sequence, which count; null: all
  RotaryRows rotary[3];  // q, k; none of v
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

// Eight columns, a multiple of 8 on, of kCount rows behind row `start`: those of which row_of(i) is below `count`, else
// zeros. All rows are asked for before one is used, so that the loads are under way together.
template <int kCount, typename RowOf>
__device__ __forceinline__ void load_rows(uint4 (&x)[kCount], const StridedView& view, int b, int64_t start, int h,
                                          int column, int count, const RowOf& row_of) {
  const uint16_t* from = row_pointer(view, b, start, h) + column;
  if (view.aligned) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int row = row_of(i);
      x[i] = make_uint4(0, 0, 0, 0);
      if (row < count) x[i] = *reinterpret_cast<const uint4*>(from + row * view.row_stride);
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const int row = row_of(i);
    uint32_t words[4] = {};
    if (row < count) {
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

__half2 pair_of(__half);
__nv_bfloat162 pair_of(__nv_bfloat16);

// The least and the largest of each of eight columns, two by two as they are stored, which takes half of the
// instructions that floats would. NaN does not count.
template <typename E>
struct Extrema {
  using Pair = decltype(pair_of(E{}));
  alignas(16) Pair lowest[4];
  alignas(16) Pair highest[4];

  __device__ __forceinline__ Extrema() {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t infinity = ptx::pack2<E>(INFINITY, INFINITY), other = ptx::pack2<E>(-INFINITY, -INFINITY);
      lowest[i] = reinterpret_cast<const Pair&>(infinity), highest[i] = reinterpret_cast<const Pair&>(other);
    }
  }
  __device__ __forceinline__ void add(const uint4& words) {
    const uint32_t w[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const Pair x = reinterpret_cast<const Pair&>(w[i]);
      lowest[i] = __hmin2(lowest[i], x), highest[i] = __hmax2(highest[i], x);
    }
  }
  __device__ __forceinline__ static void unpack(float (&x)[8], const Pair (&of)[4]) {
    unpack_eight<E>(x, reinterpret_cast<const uint4&>(of));
  }
};

__device__ __forceinline__ float factor_of_amax(float amax, float most) {
  return amax < kLeastAmax ? 1.f : amax / most;
}

// ---- statistics ------------------------------------------------------------------------------------

// A thread's part of the statistics of `count` rows behind row `begin`, of eight columns.
template <typename E>
struct OwnStats {
  float sum[8] = {}, lowest[8], highest[8];

  // Rows as they are, all of which count.
  __device__ __forceinline__ void add_rows(const TensorPass& t, int b, int h, int64_t begin, int count, int column,
                                           int lanes) {
    constexpr int kAhead = 8;
    const int at_once = kQuantizeThreads / lanes;
    Extrema<E> extrema;
    for (int first = threadIdx.x / lanes; first < count; first += kAhead * at_once) {
      uint4 words[kAhead];
      load_rows(words, t.x, b, begin, h, column, count, [&](int i) { return first + i * at_once; });
#pragma unroll
      for (int j = 0; j < kAhead; ++j) {
        float x[8];
        unpack_eight<E>(x, words[j]);
#pragma unroll
        for (int i = 0; i < 8; ++i) sum[i] += x[i];  // 0 of rows that are not there
        if (first + j * at_once < count) extrema.add(words[j]);
      }
    }
    Extrema<E>::unpack(lowest, extrema.lowest), Extrema<E>::unpack(highest, extrema.highest);
  }

  // Rows that are turned before, or those of them that is_used(row).
  template <typename IsUsed>
  __device__ __forceinline__ void add_rows_one_by_one(const TensorPass& t, const RotaryRows& rotary, int b, int h,
                                                      int64_t begin, int count, int column, int lanes,
                                                      const IsUsed& is_used) {
    const int at_once = kQuantizeThreads / lanes;
#pragma unroll
    for (int i = 0; i < 8; ++i) lowest[i] = INFINITY, highest[i] = -INFINITY;
    for (int first = 0; first < count; first += at_once) {
      const int row = first + static_cast<int>(threadIdx.x) / lanes;
      const bool is_there = row < count && column < t.columns;
      uint4 words[1];
      load_rows(words, t.x, b, begin, h, column, is_there ? count : 0, [&](int) { return row; });
      float x[8];
      unpack_eight<E>(x, words[0]);
      turn<E>(x, rotary, b, begin + row, column, is_there);
      if (!is_there || !is_used(begin + row)) continue;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        sum[i] += x[i];
        lowest[i] = fminf(lowest[i], x[i]);
        highest[i] = fmaxf(highest[i], x[i]);
      }
    }
  }
};

// A CTA takes kStatRows rows of a head.
template <typename E>
__global__ void __launch_bounds__(kQuantizeThreads, kQuantizeCtas)
    fp8_stats_kernel(const __grid_constant__ StatsPass s) {
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
  const int lanes = lanes_of_row(t.columns), column = threadIdx.x % lanes * 8;
  const int count = static_cast<int>(max(end - begin, int64_t{0}));
  const bool is_scattered = bounds != nullptr && used != nullptr;
  OwnStats<E> own;
  if (is_scattered || s.rotary[which].cos != nullptr) {
    own.add_rows_one_by_one(t, s.rotary[which], b, h, begin, count, column, lanes,
                            [&](int64_t row) { return !is_scattered || is_used(used, bounds, s.batch, t.rows, row); });
  } else {
    own.add_rows(t, b, h, begin, column < t.columns ? count : 0, column, lanes);
  }
  // Rows of a warp, and then warps, in a fixed order.
  constexpr int kWarps = kQuantizeThreads / 32;
  __shared__ float of_warps[kWarps][ChannelStats::kCount][256];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    for (int step = 16; step >= lanes; step /= 2) {
      own.sum[i] += __shfl_xor_sync(ptx::kFullWarp, own.sum[i], step);
      own.lowest[i] = fminf(own.lowest[i], __shfl_xor_sync(ptx::kFullWarp, own.lowest[i], step));
      own.highest[i] = fmaxf(own.highest[i], __shfl_xor_sync(ptx::kFullWarp, own.highest[i], step));
    }
  }
  if (threadIdx.x % 32 < lanes) {
    float (&to)[ChannelStats::kCount][256] = of_warps[threadIdx.x / 32];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      to[ChannelStats::kSums][column + i] = own.sum[i];
      to[ChannelStats::kMinima][column + i] = own.lowest[i];
      to[ChannelStats::kMaxima][column + i] = own.highest[i];
    }
  }
  __syncthreads();
  const int c = threadIdx.x;
  if (c >= t.columns) return;
  float sum = 0.f, lowest = INFINITY, highest = -INFINITY;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    sum += of_warps[w][ChannelStats::kSums][c];
    lowest = fminf(lowest, of_warps[w][ChannelStats::kMinima][c]);
    highest = fmaxf(highest, of_warps[w][ChannelStats::kMaxima][c]);
  }
  float* to = t.partials + (bh * s.parts[which] + part) * ChannelStats::kCount * t.columns + c;
  to[ChannelStats::kSums * t.columns] = sum;
  to[ChannelStats::kMinima * t.columns] = lowest;
  to[ChannelStats::kMaxima * t.columns] = highest;
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
  // A thread has four channels of some parts, eight of which it asks for at a time; threads add up in a fixed order.
  const int fours = t.columns / 4, threads = kMeansThreads / fours, pitch = ChannelStats::kCount * t.columns;
  __shared__ float4 shared[ChannelStats::kCount][kMeansThreads];
  float* const found[] = {&shared[0][0].x, &shared[1][0].x, &shared[2][0].x};
  if (c < threads * fours) {
    float4 of[ChannelStats::kCount] = {
        {0.f, 0.f, 0.f, 0.f}, {INFINITY, INFINITY, INFINITY, INFINITY}, {-INFINITY, -INFINITY, -INFINITY, -INFINITY}};
    const float* from = t.partials + bh * s.parts[which] * pitch + c % fours * 4;
#pragma unroll 8
    for (int part = c / fours; part < s.parts[which]; part += threads) {
      const auto of_part = [&](int kind) {
        return *reinterpret_cast<const float4*>(from + static_cast<int64_t>(part) * pitch + kind * t.columns);
      };
      const float4 sum = of_part(ChannelStats::kSums), low = of_part(ChannelStats::kMinima),
                   high = of_part(ChannelStats::kMaxima);
      of[0] = {of[0].x + sum.x, of[0].y + sum.y, of[0].z + sum.z, of[0].w + sum.w};
      of[1] = {fminf(of[1].x, low.x), fminf(of[1].y, low.y), fminf(of[1].z, low.z), fminf(of[1].w, low.w)};
      of[2] = {fmaxf(of[2].x, high.x), fmaxf(of[2].y, high.y), fmaxf(of[2].z, high.z), fmaxf(of[2].w, high.w)};
    }
#pragma unroll
    for (int kind = 0; kind < ChannelStats::kCount; ++kind) {
      *reinterpret_cast<float4*>(found[kind] + c / fours * t.columns + c % fours * 4) = of[kind];
    }
  }
  __syncthreads();
  float amax = 0.f;
  if (c < t.columns) {
    float sum = 0.f, lowest = INFINITY, highest = -INFINITY;
    for (int i = 0; i < threads; ++i) {
      sum += found[ChannelStats::kSums][i * t.columns + c];
      lowest = fminf(lowest, found[ChannelStats::kMinima][i * t.columns + c]);
      highest = fmaxf(highest, found[ChannelStats::kMaxima][i * t.columns + c]);
    }
    const float mean = m.offset[which] != nullptr && count > 0 ? sum / static_cast<float>(count) : 0.f;
    if (m.offset[which] != nullptr) m.offset[which][bh * t.columns + c] = mean;
    amax = count > 0 ? fmaxf(highest - mean, mean - lowest) : 0.f;
    if (which == 2) m.channel_factor[bh * t.columns + c] = factor_of_amax(amax, t.most);
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
  m.head_factor[which][bh] = factor_of_amax(amax, t.most);
}

}  // namespace flash_ext
