// Shared-memory tiles of 16-bit elements: swizzle, global <-> shared copies, fragment addresses.
//
// A tile is row-major with rows of kCols elements. The 16-byte chunks of a row are permuted by XOR so that
// the eight rows of one ldmatrix phase fall into eight different bank groups:
//   kCols % 64 == 0:  chunk ^= row & 7         (row pitch a multiple of 128 bytes)
//   kCols % 64 == 32: chunk ^= (row >> 1) & 3  (row pitch an odd multiple of 64 bytes)
//   kCols % 32 == 16: chunk ^= (row >> 2) & 1  (row pitch an odd multiple of 32 bytes)
#pragma once

#include "../ptx/sm80.cuh"

namespace flash_ext {

template <int kCols>
struct SmemTile {
  static_assert(kCols % 16 == 0, "a row is a whole number of swizzle spans");
  static constexpr int kRowBytes = kCols * 2;
  static constexpr int kChunks = kCols / 8;
  static constexpr int kSpan = kCols % 64 == 0 ? 8 : kCols % 32 == 0 ? 4 : 2;  // chunks that change places

  __device__ static uint32_t offset(int row, int chunk) {
    const int x = kSpan == 8 ? (row & 7) : kSpan == 4 ? ((row >> 1) & 3) : ((row >> 2) & 1);
    return static_cast<uint32_t>(row * kRowBytes + ((chunk ^ x) << 4));
  }

  // Address of this lane's ldmatrix row in the 16x16 block at (0, 0). The four 8x8 matrices arrive in the
  // order the operand wants them, since an mma takes consecutive registers (any other order costs moves):
  //   by_rows: (rows 0-7, left), (rows 8-15, left), (rows 0-7, right), (rows 8-15, right)
  //            A operands; with .trans, B operands whose rows are the summed dimension
  //   by_cols: (rows 0-7, left), (rows 0-7, right), (rows 8-15, left), (rows 8-15, right)
  //            B operands whose columns are the summed dimension; with .trans, A operands stored transposed
  __device__ static uint32_t by_rows(uint32_t tile, int lane) { return tile + offset(lane & 15, lane >> 4); }
  __device__ static uint32_t by_cols(uint32_t tile, int lane) {
    return tile + offset((lane & 7) + ((lane >> 4) << 3), (lane >> 3) & 1);
  }

  // The same for the block at (row0, 16 * col16), row0 a multiple of 16. The swizzle of a lane does not
  // depend on row0, so a block costs at most one XOR and one addition of constants.
  __device__ static uint32_t block(uint32_t lane_base, int row0, int col16) {
    if constexpr (kSpan == 8) {
      return (lane_base ^ ((col16 & 3) << 5)) + (col16 >> 2) * 128 + row0 * kRowBytes;
    } else if constexpr (kSpan == 4) {
      return (lane_base ^ ((col16 & 1) << 5)) + (col16 >> 1) * 64 + row0 * kRowBytes;
    } else {
      return lane_base + col16 * 32 + row0 * kRowBytes;
    }
  }
};

template <int kN>
inline constexpr int kFloorPowerOfTwo = kN < 2 ? 1 : 2 * kFloorPowerOfTwo<kN / 2>;
template <>
inline constexpr int kFloorPowerOfTwo<0> = 1;

// Where the rows of one tile live in global memory.
struct TileSource {
  const uint16_t* ptr;  // first element of row 0
  int64_t row_stride;   // elements
  int cols;             // valid elements of a row; the rest of the tile's row is zero-filled
  bool aligned;         // every row starts on a 16-byte boundary
};

// Copies the first `valid` of 8 elements one by one, zeros for the others.
__device__ __forceinline__ void copy_elements(uint32_t to, const uint16_t* p, int valid) {
  uint32_t w[4];
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const uint32_t lo = 2 * j < valid ? p[2 * j] : 0;
    const uint32_t hi = 2 * j + 1 < valid ? p[2 * j + 1] : 0;
    w[j] = lo | (hi << 16);
  }
  asm volatile("st.shared.v4.b32 [%0], {%1,%2,%3,%4};\n" ::"r"(to), "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3])
               : "memory");
}

// Copies kRows x kCols into shared memory, rows at or beyond `rows` and columns beyond `src.cols` as zeros.
// Asynchronous when rows are 16-byte aligned (the caller commits and waits); otherwise element by element.
template <int kRows, int kCols, int kThreads>
__device__ __forceinline__ void load_tile(uint32_t tile, const TileSource& src, int rows, int thread_idx) {
  using Tile = SmemTile<kCols>;
  if (src.aligned) {
    // A thread keeps its chunk and steps down the rows: one 64-bit addition a copy. A power of two of rows a
    // step that divides them keeps the swizzle cheap; with 10, 12 or 24 chunks some threads may have nothing to do.
    constexpr int kDivides = kRows & -kRows, kFits = kFloorPowerOfTwo<kThreads / Tile::kChunks>;
    constexpr int kRowStep = kFits < kDivides ? kFits : kDivides;
    static_assert(kRows % kRowStep == 0);
    const int chunk = thread_idx % Tile::kChunks;
    const int row = thread_idx / Tile::kChunks;
    if (kThreads == kRowStep * Tile::kChunks || row < kRowStep) {
      const int col_bytes = min(16, max(0, (src.cols - chunk * 8) * 2));
      const uint16_t* p = src.ptr + row * src.row_stride + (col_bytes > 0 ? chunk * 8 : 0);
      if (rows >= kRows) {
#pragma unroll
        for (int i = 0; i < kRows / kRowStep; ++i) {
          ptx::cp_async_16(tile + Tile::offset(row + i * kRowStep, chunk), p, col_bytes);
          p += kRowStep * src.row_stride;
        }
      } else {
#pragma unroll
        for (int i = 0; i < kRows / kRowStep; ++i) {
          const int r = row + i * kRowStep;
          const bool in = r < rows;
          ptx::cp_async_16(tile + Tile::offset(r, chunk), in ? p : src.ptr, in ? col_bytes : 0);
          p += kRowStep * src.row_stride;
        }
      }
    }
  } else {
#pragma unroll 1
    for (int index = thread_idx; index < kRows * Tile::kChunks; index += kThreads) {
      const int chunk = index % Tile::kChunks;
      const int r = index / Tile::kChunks;
      const int valid = r < rows ? src.cols - chunk * 8 : 0;
      copy_elements(tile + Tile::offset(r, chunk), src.ptr + r * src.row_stride + chunk * 8, valid);
    }
  }
}

struct TileDestination {
  uint16_t* ptr;
  int64_t row_stride;
  int cols;
  bool aligned;
};

// Writes kRows rows of a shared tile from row0 on, as far as they are below `rows`; for kThreads threads together.
template <int kRows, int kCols, int kThreads>
__device__ __forceinline__ void store_tile(const TileDestination& dst, uint32_t tile, int row0, int rows,
                                           int thread_idx) {
  using Tile = SmemTile<kCols>;
  const auto load = [&](int index, uint32_t (&w)[4]) {
    const uint32_t at = tile + Tile::offset(row0 + index / Tile::kChunks, index % Tile::kChunks);
    asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];\n" : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3]) : "r"(at));
  };
  if (dst.aligned && dst.cols % 8 == 0) {
    // Four rows in flight hide the latency of shared memory.
#pragma unroll 4
    for (int index = thread_idx; index < kRows * Tile::kChunks; index += kThreads) {
      const int chunk = index % Tile::kChunks, r = row0 + index / Tile::kChunks;
      if (r >= rows || chunk * 8 >= dst.cols) continue;
      uint32_t w[4];
      load(index, w);
      *reinterpret_cast<uint4*>(dst.ptr + r * dst.row_stride + chunk * 8) = make_uint4(w[0], w[1], w[2], w[3]);
    }
  } else {
#pragma unroll 1
    for (int index = thread_idx; index < kRows * Tile::kChunks; index += kThreads) {
      const int chunk = index % Tile::kChunks, r = row0 + index / Tile::kChunks;
      const int valid = r < rows ? dst.cols - chunk * 8 : 0;
      if (valid <= 0) continue;
      uint32_t w[4];
      load(index, w);
      uint16_t* p = dst.ptr + r * dst.row_stride + chunk * 8;
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        if (j < valid) p[j] = static_cast<uint16_t>(w[j / 2] >> (16 * (j & 1)));
      }
    }
  }
}

// Puts a 16x16 block, held as two 16x8 accumulators side by side, into a tile, rounded to E.
// `address` is SmemTile::block of by_rows: lane l's row of the 8x8 matrix that stmatrix writes for it.
template <typename E>
__device__ __forceinline__ void put_block(uint32_t address, const float (&left)[4], const float (&right)[4], int lane) {
  const uint32_t r[4] = {ptx::pack2<E>(left[0], left[1]), ptx::pack2<E>(left[2], left[3]),
                         ptx::pack2<E>(right[0], right[1]), ptx::pack2<E>(right[2], right[3])};
#if __CUDA_ARCH__ >= 900
  ptx::stmatrix_x4(address, r);
#else
  // Lane 8 i + j names row j of matrix i; this lane's words belong to row lane / 4 of each.
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t row = __shfl_sync(ptx::kFullWarp, address, 8 * i + lane / 4);
    asm volatile("st.shared.b32 [%0], %1;\n" ::"r"(row + (lane % 4) * 4), "r"(r[i]) : "memory");
  }
#endif
}

// Multiplies the two rows an accumulator block holds per thread.
__device__ __forceinline__ void scale_block(float (&d)[4], float upper, float lower) {
  d[0] *= upper, d[1] *= upper, d[2] *= lower, d[3] *= lower;
}

}  // namespace flash_ext
