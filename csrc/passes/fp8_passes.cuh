// Quantisation of q, k and v to e4m3, in three launches: statistics of channels, what follows from them, and the numbers.
//
// k loses its mean over the keys, which changes all scores of a row alike, and v its mean, which every row of the output
// lacks then (sm90/fwd_fp8/store.cuh). Both leave e4m3 the part of a channel that varies. What rounding takes from v on
// average is lacking as well, and joins what the output gets back: numbers of 16 bits less a mean are rounded to one side more
// often than to the other, which 32768 values of N(0, 1) showed as 3 % of the output.
#pragma once

#include <cuda_fp8.h>

#include "fp8_stats.cuh"

namespace flash_ext {

// Before Ada there is no instruction for e4m3, and a conversion takes dozens of others. Called, and not inlined at 64 places,
// they compile in 34 s instead of 91.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 890
#define FLASH_EXT_INLINE_E4M3 __noinline__
#else
#define FLASH_EXT_INLINE_E4M3 __forceinline__
#endif
// The first in the lower byte.
__device__ FLASH_EXT_INLINE_E4M3 uint32_t pair_to_e4m3(float x, float y) {
  return __nv_cvt_float2_to_fp8x2(make_float2(x, y), __NV_SATFINITE, __NV_E4M3);
}
__device__ FLASH_EXT_INLINE_E4M3 float from_e4m3(uint8_t x) {
  return __half2float(__half(__nv_cvt_fp8_to_halfraw(x, __NV_E4M3)));
}
#undef FLASH_EXT_INLINE_E4M3
// The sum of both.
__device__ __forceinline__ float pair_from_e4m3(uint32_t pair) {
  return from_e4m3(static_cast<uint8_t>(pair)) + from_e4m3(static_cast<uint8_t>(pair >> 8));
}

struct RowsPass {
  TensorPass t;
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

template <typename E, int kLanes>
__device__ __forceinline__ void quantize_rows(const NumbersPass& n, bool queries, int64_t index) {
  constexpr int kAtOnce = kQuantizeThreads / kLanes, kTurns = kFp8Block / kAtOnce;
  const RowsPass& r = n.rows[queries ? 0 : 1];
  const TensorPass& t = r.t;
  const int64_t bh = index / r.tiles;
  const int h = static_cast<int>(bh % t.heads);
  const RowTile tile = row_tile(n, queries, static_cast<int>(bh / t.heads), static_cast<int>(index % r.tiles));
  if (tile.count <= 0) return;
  const int lane = threadIdx.x % kLanes, column = lane * 8, in_turn = threadIdx.x / kLanes;
  const bool valid = column < t.columns;
  float offset[8] = {};
  if (r.offset != nullptr && valid) {
    const int64_t head = (bh / t.heads) * (t.heads / r.group) + h / r.group;
#pragma unroll
    for (int i = 0; i < 8; ++i) offset[i] = r.offset[head * t.columns + column + i];
  }
  const auto is_there = [&](int turn) { return turn * kAtOnce + in_turn < tile.used && valid; };
  uint4 words_of[kTurns];
  load_rows(words_of, t.x, tile.b, h, column,
            [&](int turn) { return is_there(turn) ? tile.start + turn * kAtOnce + in_turn : int64_t{-1}; });
  float x[kTurns][8], amax = 0.f;
#pragma unroll
  for (int turn = 0; turn < kTurns; ++turn) {
    unpack_eight<E>(x[turn], words_of[turn]);
    if (!queries && is_there(turn)) {
#pragma unroll
      for (int i = 0; i < 8; ++i) x[turn][i] -= offset[i];
    }
  }
#pragma unroll
  for (int turn = 0; turn < kTurns; ++turn) {
    if (n.hadamard) rotate<kLanes>(x[turn], column, t.columns);
#pragma unroll
    for (int i = 0; i < 8; ++i) amax = fmaxf(amax, fabsf(x[turn][i]));
  }
  if (n.hadamard) rotate<kLanes>(offset, column, t.columns);
  float factor;
  if (n.by_block) {
    __shared__ float shared[kQuantizeThreads / 32];
#pragma unroll
    for (int step = 16; step > 0; step /= 2) amax = fmaxf(amax, __shfl_xor_sync(ptx::kFullWarp, amax, step));
    if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = amax;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kQuantizeThreads / 32; ++i) amax = fmaxf(amax, shared[i]);
    factor = factor_of_amax(amax);
    if (threadIdx.x == 0) r.factor[bh * r.blocks + tile.block] = factor;
  } else {
    factor = r.factor[bh];
  }
  const float inverse = 1.f / factor;
#pragma unroll
  for (int turn = 0; turn < kTurns; ++turn) {
    const int row = turn * kAtOnce + in_turn;
    uint32_t words[2] = {};
    float dot = 0.f;
#pragma unroll
    for (int i = 0; i < 8; i += 2) {
      words[i / 4] |= pair_to_e4m3(x[turn][i] * inverse, x[turn][i + 1] * inverse) << (8 * (i % 4));
    }
    if (r.row_offset != nullptr) {
#pragma unroll
      for (int i = 0; i < 8; ++i)
        dot = fmaf(from_e4m3(static_cast<uint8_t>(words[i / 4] >> (8 * (i % 4)))), offset[i], dot);
#pragma unroll
      for (int step = kLanes / 2; step > 0; step /= 2) dot += __shfl_xor_sync(ptx::kFullWarp, dot, step);
    }
    if (row >= tile.count) continue;
    const int64_t packed_row = tile.b * t.rows + tile.start + row;
    if (valid) {
      *reinterpret_cast<uint2*>(r.to + (packed_row * t.heads + h) * t.columns + column) =
          make_uint2(words[0], words[1]);
    }
    if (r.row_offset != nullptr && lane == 0) r.row_offset[bh * t.rows + tile.start + row] = dot * factor;
  }
}

// x of the threads whose columns are `lane * 8` and the next, summed over the CTA in a fixed order: thread c gets column c's.
template <int kLanes>
__device__ __forceinline__ float sum_of_columns(float (&x)[8]) {
  constexpr int kWarps = kQuantizeThreads / 32;
  __shared__ float of_warps[kWarps][8 * kLanes];
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

// Leaves what rounding took from a tile. The last CTA of the head adds the mean of all tiles to the offset.
template <int kLanes>
__device__ __forceinline__ void join_losses(const NumbersPass& n, int64_t index, float (&lost)[8]) {
  const int64_t bh = index / n.v_tiles;
  const int columns = n.v.columns, c = threadIdx.x;
  const float of_tile = sum_of_columns<kLanes>(lost);
  if (c < columns) n.loss.of_tiles[index * columns + c] = of_tile;
  __threadfence();
  __shared__ bool is_last;
  __syncthreads();
  if (c == 0) is_last = atomicAdd(n.loss.done + bh, 1u) + 1 == static_cast<uint32_t>(n.v_tiles);
  __syncthreads();
  if (!is_last) return;
  __threadfence();
  const int column = threadIdx.x % kLanes * 8;
  float sum[8] = {};
  if (column < columns) {
    const float* from = n.loss.of_tiles + bh * n.v_tiles * columns + column;
    for (int tile = threadIdx.x / kLanes; tile < n.v_tiles; tile += kQuantizeThreads / kLanes) {
#pragma unroll
      for (int i = 0; i < 8; ++i) sum[i] += __ldcg(from + static_cast<int64_t>(tile) * columns + i);
    }
  }
  const float all = sum_of_columns<kLanes>(sum);
  if (c < columns) n.v_offset[bh * columns + c] += all * n.loss.share[bh] * n.v_factor[bh * columns + c];
}

// Where four keys of a channel lie, rows of all keys of a tile. Pieces of 16 bytes change places by the channel's group of eight,
// whose threads would all store to the same bank.
__device__ __forceinline__ int place_of_v(int column, int four) {
  return column * kFp8Block + ((four / 4 ^ column / 8 % 8) * 4 + four % 4) * 4;
}

// A thread takes eight channels of four keys, whose bytes come to lie side by side. `lost`: what rounding took from them,
// in units of the factor.
template <typename E, int kLanes>
__device__ __forceinline__ void transpose_values(const NumbersPass& n, int64_t index, float (&lost)[8]) {
  extern __shared__ __align__(16) uint8_t tile_bytes_of_v[];
  const TensorPass& t = n.v;
  const int64_t bh = index / n.v_tiles;
  const int h = static_cast<int>(bh % t.heads);
  const RowTile tile = row_tile(n, false, static_cast<int>(bh / t.heads), static_cast<int>(index % n.v_tiles));
  if (tile.count <= 0) return;
  const int lane = threadIdx.x % kLanes, column = lane * 8;
  if (column < t.columns) {
    float inverse[8], offset[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      inverse[i] = 1.f / n.v_factor[bh * t.columns + column + i];
      offset[i] = n.v_offset != nullptr ? n.v_offset[bh * t.columns + column + i] : 0.f;
    }
    constexpr int kFours = kFp8Block / 4 * kLanes / kQuantizeThreads;  // of a thread
    const auto four_of = [&](int i) {
      return static_cast<int>(threadIdx.x) / kLanes + i * (kQuantizeThreads / kLanes);
    };
    const auto key_of = [&](int i) {  // kKeyOrder
      const int four = four_of(i / 4), j = i % 4;
      return four / 4 * kKeyGroup + four % 4 * 2 + j % 2 + j / 2 * 8;
    };
    constexpr int kAtOnce = kFours < 2 ? kFours : 2;  // as many as registers are there for
#pragma unroll
    for (int first = 0; first < kFours; first += kAtOnce) {
      uint4 words[4 * kAtOnce];
      load_rows(words, t.x, tile.b, h, column, [&](int i) {
        const int key = key_of(4 * first + i);
        return key < tile.used ? tile.start + key : int64_t{-1};
      });
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n) {
        float x[4][8];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          unpack_eight<E>(x[j], words[4 * n + j]);
          const bool is_there = key_of(4 * (first + n) + j) < tile.used;
#pragma unroll
          for (int i = 0; i < 8; ++i) x[j][i] = is_there ? (x[j][i] - offset[i]) * inverse[i] : 0.f;
        }
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const uint32_t low = pair_to_e4m3(x[0][i], x[1][i]), high = pair_to_e4m3(x[2][i], x[3][i]);
          *reinterpret_cast<uint32_t*>(tile_bytes_of_v + place_of_v(column + i, four_of(first + n))) = low | high << 16;
          // Keys that are not there are zeros, of which rounding takes nothing.
          lost[i] += (x[0][i] + x[1][i]) + (x[2][i] + x[3][i]) - (pair_from_e4m3(low) + pair_from_e4m3(high));
        }
      }
    }
  }
  __syncthreads();
  const int pieces = (tile.count + kKeyGroup - 1) / kKeyGroup;
  uint8_t* to = n.v8 + bh * t.columns * n.v_columns + tile.v_start;
  for (int i = threadIdx.x; i < t.columns * 8; i += kQuantizeThreads) {
    const int c = i / 8, piece = i % 8;
    if (piece >= pieces) continue;
    *reinterpret_cast<uint4*>(to + c * n.v_columns + piece * 16) =
        *reinterpret_cast<const uint4*>(tile_bytes_of_v + place_of_v(c, piece * 4));
  }
}

// A CTA takes a tile of q, k or v.
template <typename E, int kLanes>
__global__ void __launch_bounds__(kQuantizeThreads) fp8_numbers_kernel(const __grid_constant__ NumbersPass n) {
  if (blockIdx.x >= n.v.first) {
    float lost[8] = {};
    transpose_values<E, kLanes>(n, blockIdx.x - n.v.first, lost);
    if (n.v_offset != nullptr) join_losses<kLanes>(n, blockIdx.x - n.v.first, lost);
  } else if (blockIdx.x >= n.rows[1].t.first) {
    quantize_rows<E, kLanes>(n, false, blockIdx.x - n.rows[1].t.first);
  } else {
    quantize_rows<E, kLanes>(n, true, blockIdx.x);
  }
}

}  // namespace flash_ext
