// A bias whose rows do not begin on 16 bytes: how it is copied so that they do, and which one is loose: Hopper kernels
// take it as it is. No CUDA, no torch.
#pragma once

#include <cstdint>
#include <string>

#include "modifiers.h"

namespace flash_ext {

struct BiasRows {
  const void* from;
  void* to;  // rows one behind the other, zeros behind their columns
  int64_t strides[4];  // of `from`, in elements: batch entries, heads, rows, columns
  int64_t sizes[4];
  int element_bytes;  // 2 or 4

  static constexpr int kPieceBytes = 16, kThreads = 256;  // of `to`, for a thread; of a CTA
  int64_t pieces() const { return (sizes[3] * element_bytes + kPieceBytes - 1) / kPieceBytes; }  // of a row of `to`
  // Behind the last element of `from`.
  const char* end() const {
    int64_t last = 0;
    for (int i = 0; i < 4; ++i) last += (sizes[i] - 1) * strides[i];
    return static_cast<const char*>(from) + (last + 1) * element_bytes;
  }
  int64_t threads() const { return pieces() * sizes[0] * sizes[1] * sizes[2]; }
  int64_t bytes() const { return kPieceBytes * threads(); }
  int64_t ctas() const { return (threads() + kThreads - 1) / kThreads; }
};

// csrc/inst/passes.cu; the error's text, empty where there is none.
std::string align_bias_rows(const BiasRows& rows, void* stream);

// How a bias is copied. What is broadcast has one entry.
inline BiasRows rows_of(const BiasView& x, const Problem& p) {
  const auto entries = [](int64_t stride, int64_t n) { return stride == 0 ? 1 : n; };
  return {
      x.ptr,
      nullptr,
      {x.batch_stride, x.head_stride, x.row_stride, x.col_stride},
      {entries(x.batch_stride, p.batch), entries(x.head_stride, p.num_heads), entries(x.row_stride, x.rows), x.cols},
      x.is_float ? 4 : 2};
}

// The copy, which stands at `to`.
inline BiasView copied(const BiasView& x, const BiasRows& rows, const void* to) {
  BiasView y = x;
  const int64_t row = BiasRows::kPieceBytes / rows.element_bytes * rows.pieces(), head = row * rows.sizes[2];
  y.ptr = to;
  y.batch_stride = x.batch_stride == 0 ? 0 : head * rows.sizes[1];
  y.head_stride = x.head_stride == 0 ? 0 : head;
  y.row_stride = x.row_stride == 0 ? 0 : row;
  y.col_stride = 1;
  y.aligned = y.has_room = true;
  y.staged = !x.is_float;
  y.is_unaligned = false;
  return y;
}

// Whether kernels that know how take it as it is: with an entry of 16 bits for each score, a copy would move twice the
// bytes that the kernel reads. Where heads or batch entries share one the copy is small.
inline bool is_loose(const BiasView& x, const Problem& p) {
  const bool is_whole = (x.head_stride > 0 || p.num_heads == 1) && (x.batch_stride > 0 || p.batch == 1) &&
                        x.rows == p.seqlen_q && x.cols == p.seqlen_k;
  return x.is_unaligned && !x.is_float && x.col_stride == 1 && !p.is_varlen() && is_whole;
}

}  // namespace flash_ext
