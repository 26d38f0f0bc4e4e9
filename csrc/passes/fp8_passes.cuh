// Quantisation of q, k and v to e4m3, in three launches: statistics of channels, what follows from them, and the
// numbers.
//
// k loses its mean over the keys, which changes all scores of a row alike, and v its mean, which every row of the
// output lacks then (sm90/fwd_fp8/store.cuh). Both leave e4m3 the part of a channel that varies. What rounding takes
// from v on average is lacking as well, and joins what the output gets back: numbers of 16 bits less a mean are rounded
// to one side more often than to the other, which 32768 values of N(0, 1) showed as 3 % of the output.
#pragma once

#include <cuda_fp8.h>

#include "fp8_stats.cuh"

namespace flash_ext {

// Before Ada there is no instruction for e4m3, and a conversion takes dozens of others. Called, and not inlined at 64
// places, they compile in 34 s instead of 91.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 890
#define FLASH_EXT_INLINE_E4M3 __noinline__
#else
#define FLASH_EXT_INLINE_E4M3 __forceinline__
#endif
// The first in the lower byte.
__device__ FLASH_EXT_INLINE_E4M3 uint32_t pair_to_e4m3(float x, float y) {
  return __nv_cvt_float2_to_fp8x2(make_float2(x, y), __NV_SATFINITE, __NV_E4M3);
}
__device__ FLASH_EXT_INLINE_E4M3 float2 pair_from_e4m3(uint32_t pair) {
  return __half22float2(__half2(__nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(pair), __NV_E4M3)));
}
#undef FLASH_EXT_INLINE_E4M3

struct RowsPass {
  TensorPass t;
  RotaryRows rotary;
  uint8_t* to = nullptr;
  float* factor = nullptr;
  int64_t blocks = 0;  // of factors of a head; 1: one for all
  const float* offset = nullptr;  // k's, which q needs for row_offset
  float* row_offset = nullptr;  // of q
  int group = 1;  // heads of this tensor that share an offset
  int tiles = 0;  // of a head
};
struct NumbersPass {
  Problem p;
  RowsPass rows[2];  // q, k
  TensorPass v;
  uint8_t* v8 = nullptr;
  const float* v_factor = nullptr;
  float* v_offset = nullptr;
  RoundingLoss loss;  // where there is an offset
  int64_t v_columns = 0;
  int v_tiles = 0;
  const int32_t* used = nullptr;  // of k and v
  bool by_block = true, hadamard = false;
};

// Rows of a tile of kFp8Block: where they are, and which tile of factors it is.
struct RowTile {
  int b;
  int64_t start;  // row that in-tile row 0 is
  int count;  // rows that there are
  int used;  // the first ones of them, whose numbers count; the others become zeros
  int64_t block;  // among the factors of a head
  int64_t v_start;  // column of a transposed v
};
__device__ __forceinline__ RowTile row_tile(const NumbersPass& n, bool queries, int b, int tile) {
  const Problem& p = n.p;
  const int32_t* used = queries ? nullptr : n.used;
  if (p.cu_seqlens_q == nullptr) {
    const int start = tile * kFp8Block, rows = queries ? p.seqlen_q : p.seqlen_k;
    return {b, start, min(kFp8Block, rows - start), min(kFp8Block, used_rows(used, b, rows) - start), tile, start};
  }
  const TileSlot slot = queries
                            ? find_slot<kFp8Block>(p.cu_seqlens_q, p.total_q, p.cu_seqlens_k, p.total_k, p.batch, tile)
                            : find_slot<kFp8Block>(p.cu_seqlens_k, p.total_k, p.cu_seqlens_q, p.total_q, p.batch, tile);
  const int first = slot.block * kFp8Block;
  const int count = slot.outside ? 0 : min(kFp8Block, slot.rows.length - first);
  const int end = slot.outside ? 0 : used_rows(used, slot.b, slot.rows.length);
  return {0,
          slot.rows.start + first,
          count,
          min(kFp8Block, end - first),
          slot.rows.start / kFp8Block + slot.b + slot.block,
          (slot.rows.start / kKeyGroup + slot.b) * kKeyGroup + first};
}

// Threads of a CTA: each has 8 of the 128 rows of a tile, eight columns of them.
inline constexpr int kRowsAtOnce = 16;
template <int kLanes>
inline constexpr int kNumbersThreads = kRowsAtOnce * kLanes;
template <int kLanes>
inline constexpr int kNumbersWarps = kNumbersThreads<kLanes> / 32;

// The rotation of a row, whose columns, a power of two, the lanes of a part of a warp hold eight by eight: signs, then
// the Walsh-Hadamard transform, which is orthogonal with its factor 1 / sqrt(columns).
template <int kLanes>
__device__ __forceinline__ void rotate(float (&x)[8], int column, int columns) {
  const uint32_t signs = (column * kSignsOfEight) >> 24;
  const float norm = rsqrtf(static_cast<float>(columns));
#pragma unroll
  for (int i = 0; i < 8; ++i) x[i] = (signs >> i & 1) != 0 ? -x[i] : x[i];
#pragma unroll
  for (int step = 1; step < 8; step *= 2) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if ((i & step) != 0) continue;
      const float low = x[i], high = x[i | step];
      x[i] = low + high, x[i | step] = low - high;
    }
  }
#pragma unroll
  for (int step = 1; step < kLanes; step *= 2) {
    if (8 * step >= columns) break;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float other = __shfl_xor_sync(ptx::kFullWarp, x[i], step);
      x[i] = (column / 8 & step) != 0 ? other - x[i] : x[i] + other;
    }
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) x[i] *= norm;
}

// The sums over the lanes of a row of eight numbers each. Lanes take halves of them in turn, 8 shuffles instead of 32:
// the lanes of the row have one of them each in the end, kLanes / 8 lanes in turn the same.
template <int kLanes>
__device__ __forceinline__ float sum_of_rows(const float (&x)[8]) {
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  float y[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) y[i] = x[i];
#pragma unroll
  for (int step = kLanes / 2, left = 8; step > 0; step /= 2) {
    if (left > 1) left /= 2;
    const bool upper = (lane & step) != 0;
#pragma unroll
    for (int i = 0; i < left; ++i) {
      if (step >= kLanes / 8) {
        const float kept = upper ? y[left + i] : y[i], given = upper ? y[i] : y[left + i];
        y[i] = kept + __shfl_xor_sync(ptx::kFullWarp, given, step);
      } else {
        y[i] += __shfl_xor_sync(ptx::kFullWarp, y[i], step);
      }
    }
  }
  return y[0];
}

// kPlain: rows are neither turned nor rotated.
template <bool kPlain, bool kQueries, typename E, int kLanes>
__device__ __forceinline__ void quantize_rows(const NumbersPass& n, int64_t index) {
  constexpr int kAtOnce = kRowsAtOnce, kTurns = kFp8Block / kAtOnce;
  const RowsPass& r = n.rows[kQueries ? 0 : 1];
  const TensorPass& t = r.t;
  const int64_t bh = index / r.tiles;
  const int h = static_cast<int>(bh % t.heads);
  const RowTile tile = row_tile(n, kQueries, static_cast<int>(bh / t.heads), static_cast<int>(index % r.tiles));
  if (tile.count <= 0) return;
  const int lane = threadIdx.x % kLanes, column = lane * 8, in_turn = threadIdx.x / kLanes;
  const bool valid = column < t.columns;
  // Rows from here on count, or are there, for this thread.
  const int used = valid ? tile.used - in_turn : 0, stored = valid ? tile.count - in_turn : 0;
  uint4 words_of[kTurns];
  load_rows(words_of, t.x, tile.b, tile.start + in_turn, h, column, used, [](int turn) { return turn * kAtOnce; });
  float offset[8] = {};  // of k, which queries need for row_offset
  if (r.offset != nullptr && valid) {
    const int64_t head = (bh / t.heads) * (t.heads / r.group) + h / r.group;
#pragma unroll
    for (int i = 0; i < 8; ++i) offset[i] = r.offset[head * t.columns + column + i];
  }
  // What is not there is anything.
  const auto numbers_of = [&](float (&x)[8], int turn_of) {
    unpack_eight<E>(x, words_of[turn_of]);
    const bool is_there = turn_of * kAtOnce < used;
    if constexpr (!kPlain) {
      turn<E>(x, r.rotary, tile.b, tile.start + in_turn + turn_of * kAtOnce, column, is_there);
    }
    if constexpr (!kQueries) {
#pragma unroll
      for (int i = 0; i < 8; ++i) x[i] -= offset[i];
    }
    if constexpr (!kPlain) {
#pragma unroll
      for (int i = 0; i < 8; ++i) x[i] = is_there ? x[i] : 0.f;
      if (n.hadamard) rotate<kLanes>(x, column, t.columns);
    }
  };
  float factor, kept[kPlain ? 1 : kTurns][8];
  if (n.by_block || !kPlain) {
    float amax = 0.f;
    if constexpr (kPlain) {
      Extrema<E> extrema;
#pragma unroll
      for (int i = 0; i < kTurns; ++i) {
        if (i * kAtOnce < used) extrema.add(words_of[i]);
      }
      float lowest[8], highest[8];
      Extrema<E>::unpack(lowest, extrema.lowest), Extrema<E>::unpack(highest, extrema.highest);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const float taken_off = kQueries ? 0.f : offset[i];
        amax = fmaxf(amax, fmaxf(highest[i] - taken_off, taken_off - lowest[i]));
      }
    } else {
#pragma unroll
      for (int i = 0; i < kTurns; ++i) {
        numbers_of(kept[i], i);
#pragma unroll
        for (int j = 0; j < 8; ++j) amax = fmaxf(amax, fabsf(kept[i][j]));
      }
      if (n.hadamard) rotate<kLanes>(offset, column, t.columns);
    }
    if (n.by_block) {
      __shared__ float shared[kNumbersWarps<kLanes>];
#pragma unroll
      for (int step = 16; step > 0; step /= 2) amax = fmaxf(amax, __shfl_xor_sync(ptx::kFullWarp, amax, step));
      if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = amax;
      __syncthreads();
#pragma unroll
      for (int i = 0; i < kNumbersWarps<kLanes>; ++i) amax = fmaxf(amax, shared[i]);
      factor = factor_of_amax(amax, t.most);
      if (threadIdx.x == 0) r.factor[bh * r.blocks + tile.block] = factor;
    }
  }
  if (!n.by_block) factor = r.factor[bh];
  const float inverse = 1.f / factor;
  const bool makes_dots = r.row_offset != nullptr;
  const int64_t pitch = t.heads * t.columns;
  uint8_t* to = r.to + (tile.b * t.rows + tile.start + in_turn) * pitch + h * t.columns + column;
  float dots[kTurns];
#pragma unroll
  for (int i = 0; i < kTurns; ++i, to += kAtOnce * pitch) {
    float x[8];
    if constexpr (kPlain) {
      numbers_of(x, i);
    } else {
#pragma unroll
      for (int j = 0; j < 8; ++j) x[j] = kept[i][j];
    }
    uint32_t words[2] = {};
#pragma unroll
    for (int j = 0; j < 8; j += 2) {
      words[j / 4] |= pair_to_e4m3(x[j] * inverse, x[j + 1] * inverse) << (8 * (j % 4));
    }
    if (i * kAtOnce >= used) words[0] = words[1] = 0;
    if (i * kAtOnce < stored) *reinterpret_cast<uint2*>(to) = make_uint2(words[0], words[1]);
    if constexpr (kQueries) {
      dots[i] = 0.f;
      if (!makes_dots) continue;
#pragma unroll
      for (int j = 0; j < 8; j += 2) {
        const float2 pair = pair_from_e4m3(words[j / 4] >> (8 * (j % 4)) & 0xffff);
        dots[i] = fmaf(pair.x, offset[j], fmaf(pair.y, offset[j + 1], dots[i]));
      }
    }
  }
  if constexpr (!kQueries) return;
  if (!makes_dots) return;
  constexpr int kLanesOfSum = kLanes / kTurns;  // that have the same sum
  const float dot = sum_of_rows<kLanes>(dots);
  const int row = in_turn + lane / kLanesOfSum * kAtOnce;
  if (lane % kLanesOfSum == 0 && row < tile.count) r.row_offset[bh * t.rows + tile.start + row] = dot * factor;
}

// x of the threads whose columns are `lane * 8` and the next, summed over the CTA in a fixed order: thread c gets
// column c's. `room`: kSumsBytes of shared memory.
template <int kLanes>
inline constexpr int kSumsBytes = kNumbersWarps<kLanes> * 8 * kLanes * static_cast<int>(sizeof(float));
template <int kLanes>
__device__ __forceinline__ float sum_of_columns(float (&x)[8], uint8_t* room) {
  constexpr int kWarps = kNumbersWarps<kLanes>;
  float (*const of_warps)[8 * kLanes] = reinterpret_cast<float (*)[8 * kLanes]>(room);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
#pragma unroll
    for (int step = 16; step >= kLanes; step /= 2) x[i] += __shfl_xor_sync(ptx::kFullWarp, x[i], step);
    of_warps[threadIdx.x / 32][threadIdx.x % kLanes * 8 + i] = x[i];
  }
  __syncthreads();
  float sum = 0.f;
  if (threadIdx.x < 8 * kLanes) {
#pragma unroll
    for (int w = 0; w < kWarps; ++w) sum += of_warps[w][threadIdx.x];
  }
  __syncthreads();
  return sum;
}

// What rounding takes from v on average is the mean of its numbers, since its own mean is taken off before. `rounded`:
// their sums over a tile. The last CTA of the head takes the mean of all tiles off the offset.
template <int kLanes>
__device__ __forceinline__ void join_losses(const NumbersPass& n, int64_t index, float (&rounded)[8], uint8_t* room) {
  const int64_t bh = index / n.v_tiles;
  const int columns = n.v.columns, c = threadIdx.x;
  const float of_tile = sum_of_columns<kLanes>(rounded, room);
  if (c < columns) n.loss.of_tiles[index * columns + c] = of_tile;
  __shared__ bool is_last;
  __syncthreads();
  if (c == 0) {
    __threadfence();  // of what all have written, whom this thread has met
    is_last = atomicAdd(n.loss.done + bh, 1u) + 1 == static_cast<uint32_t>(n.v_tiles);
    __threadfence();
  }
  __syncthreads();
  if (!is_last) return;
  const int column = threadIdx.x % kLanes * 8;
  float sum[8] = {};
  if (column < columns) {
    const float* from = n.loss.of_tiles + bh * n.v_tiles * columns + column;
    for (int tile = threadIdx.x / kLanes; tile < n.v_tiles; tile += kRowsAtOnce) {
#pragma unroll
      for (int i = 0; i < 8; ++i) sum[i] += __ldcg(from + static_cast<int64_t>(tile) * columns + i);
    }
  }
  const float all = sum_of_columns<kLanes>(sum, room);
  if (c < columns) n.v_offset[bh * columns + c] -= all * n.loss.share[bh] * n.v_factor[bh * columns + c];
}

// Where four keys of a channel lie, rows of all keys of a tile. Pieces of 16 bytes change places by the channel's group
// of eight, whose threads would all store to the same bank.
__device__ __forceinline__ int place_of_v(int column, int four) {
  return column * kFp8Block + ((four / 4 ^ column / 8 % 8) * 4 + four % 4) * 4;
}

// A thread takes eight channels of four keys, twice; their bytes come to lie side by side. `rounded`: the sums of the
// numbers.
template <typename E, int kLanes>
__device__ __forceinline__ void transpose_values(const NumbersPass& n, int64_t index, float (&rounded)[8],
                                                 uint8_t* tile_bytes) {
  const TensorPass& t = n.v;
  const int64_t bh = index / n.v_tiles;
  const int h = static_cast<int>(bh % t.heads);
  const RowTile tile = row_tile(n, false, static_cast<int>(bh / t.heads), static_cast<int>(index % n.v_tiles));
  if (tile.count <= 0) return;
  const int lane = threadIdx.x % kLanes, column = lane * 8;
  if (column < t.columns) {
    const int four = static_cast<int>(threadIdx.x) / kLanes;  // and the one kRowsAtOnce behind
    const int own_key = four / 4 * kKeyGroup + four % 4 * 2;  // kKeyOrder
    const auto step_of = [](int i) { return i / 4 * kRowsAtOnce * 4 + i % 2 + i % 4 / 2 * 8; };
    uint4 words[8];
    load_rows(words, t.x, tile.b, tile.start + own_key, h, column, tile.used - own_key, step_of);
    float inverse[8], offset[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      inverse[i] = 1.f / n.v_factor[bh * t.columns + column + i];
      offset[i] = n.v_offset != nullptr ? n.v_offset[bh * t.columns + column + i] : 0.f;
    }
#pragma unroll
    for (int first = 0; first < 8; first += 4) {
      float x[4][8];
      uint32_t bytes = 0;  // of keys that are there; the numbers of others are zeros
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        unpack_eight<E>(x[j], words[first + j]);
        if (own_key + step_of(first + j) < tile.used) bytes |= 0xffu << (8 * j);
#pragma unroll
        for (int i = 0; i < 8; ++i) x[j][i] = (x[j][i] - offset[i]) * inverse[i];
      }
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const uint32_t numbers = (pair_to_e4m3(x[0][i], x[1][i]) | pair_to_e4m3(x[2][i], x[3][i]) << 16) & bytes;
        *reinterpret_cast<uint32_t*>(tile_bytes + place_of_v(column + i, four + first / 4 * kRowsAtOnce)) = numbers;
        const float2 low = pair_from_e4m3(numbers & 0xffff), high = pair_from_e4m3(numbers >> 16);
        rounded[i] += (low.x + low.y) + (high.x + high.y);
      }
    }
  }
  __syncthreads();
  const int pieces = (tile.count + kKeyGroup - 1) / kKeyGroup;
  uint8_t* to = n.v8 + bh * t.columns * n.v_columns + tile.v_start;
  for (int i = threadIdx.x; i < t.columns * 8; i += kNumbersThreads<kLanes>) {
    const int c = i / 8, piece = i % 8;
    if (piece >= pieces) continue;
    *reinterpret_cast<uint4*>(to + c * n.v_columns + piece * 16) =
        *reinterpret_cast<const uint4*>(tile_bytes + place_of_v(c, piece * 4));
  }
}

// A CTA takes a tile of q, k or v, the last ones first: those of the statistics' last reads are in the L2 cache then.
template <bool kPlain, typename E, int kLanes>
__global__ void __launch_bounds__(kNumbersThreads<kLanes>, 16 * (kPlain ? kQuantizeCtas : 2) / kLanes)
    fp8_numbers_kernel(const __grid_constant__ NumbersPass n) {
  extern __shared__ __align__(16) uint8_t tile_bytes_of_v[];
  const int64_t index = gridDim.x - 1 - blockIdx.x;
  if (index >= n.v.first) {
    float rounded[8] = {};
    transpose_values<E, kLanes>(n, index - n.v.first, rounded, tile_bytes_of_v);
    if (n.v_offset == nullptr) return;
    __syncthreads();  // the tile has left shared memory
    join_losses<kLanes>(n, index - n.v.first, rounded, tile_bytes_of_v);
  } else if (index >= n.rows[1].t.first) {
    quantize_rows<kPlain, false, E, kLanes>(n, index - n.rows[1].t.first);
  } else {
    quantize_rows<kPlain, true, E, kLanes>(n, index);
  }
}

}  // namespace flash_ext
