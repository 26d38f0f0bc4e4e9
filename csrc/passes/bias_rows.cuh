// Copies a bias so that its rows begin on 16 bytes: a thread makes 16 bytes of a row. As many of the source lie in two
// aligned pieces, of which it takes what is its own: loads and stores have 16 bytes whatever the length of a row.
#pragma once

#include "../bias_rows.h"
#include "../common/pieces.cuh"
#include "../common/seqlen.cuh"

namespace flash_ext {

struct BiasRowsGrid {
  Divisor pieces, rows, heads;
  uint32_t threads;
  const char* end;  // of what may be read
};

// 16 bytes from `at` on, of which `valid` bytes may be read; zeros behind them.
__device__ __forceinline__ uint4 unaligned_piece(const char* at, int valid) {
  const int shift = static_cast<int>(reinterpret_cast<uintptr_t>(at) % 16);
  const uint4* const from = reinterpret_cast<const uint4*>(at - shift);
  const uint4 low = from[0], high = shift + valid > 16 ? from[1] : uint4{};
  const uint4 piece = shifted_piece(low, high, shift);
  uint32_t w[4] = {piece.x, piece.y, piece.z, piece.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int bytes = valid - 4 * i;  // of this word
    w[i] = bytes >= 4 ? w[i] : bytes == 2 ? w[i] & 0xffffu : 0u;
  }
  return {w[0], w[1], w[2], w[3]};
}

template <typename Element>
__global__ void __launch_bounds__(BiasRows::kThreads)
    align_bias_rows_kernel(const __grid_constant__ BiasRows x, const __grid_constant__ BiasRowsGrid g) {
  constexpr int kElements = BiasRows::kPieceBytes / sizeof(Element);
  const uint32_t thread = blockIdx.x * BiasRows::kThreads + threadIdx.x;
  if (thread >= g.threads) return;
  const uint32_t row = divide(thread, g.pieces), head = divide(row, g.rows), batch = divide(head, g.heads);
  const uint32_t column = (thread - row * g.pieces.divisor) * kElements;
  const Element* const from = static_cast<const Element*>(x.from) + batch * x.strides[0] +
                              (head - batch * g.heads.divisor) * x.strides[1] +
                              (row - head * g.rows.divisor) * x.strides[2] + column * x.strides[3];
  const int count = static_cast<int>(min(x.sizes[3] - column, int64_t{kElements}));
  uint4 piece;
  // A piece at the end of the bias is made of elements: what lies behind them is not read.
  const uintptr_t read_to = (reinterpret_cast<uintptr_t>(from + count) + 15) / 16 * 16;
  if (x.strides[3] == 1 && read_to <= reinterpret_cast<uintptr_t>(g.end)) {
    piece = unaligned_piece(reinterpret_cast<const char*>(from), count * static_cast<int>(sizeof(Element)));
  } else {
    Element elements[kElements] = {};
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      if (i < count) elements[i] = from[i * x.strides[3]];
    }
    memcpy(&piece, elements, sizeof(piece));
  }
  static_cast<uint4*>(x.to)[thread] = piece;
}

}  // namespace flash_ext
