// Quantisation of q, k and v to e4m3 (passes/fp8_passes.cuh). No torch, no CUDA headers.
#pragma once

#include <cstdint>
#include <string>

#include "fp8.h"

namespace flash_ext {

inline constexpr float kLeastAmax = 1e-30f;  // what is smaller counts as 0, whose factor is 1
inline constexpr int kStatRows = 256;  // rows of a part of the statistics

// The rotation's signs of columns c to c + 7, c a multiple of 8: bits 24 to 31 of c times this.
inline constexpr uint32_t kSignsOfEight = 0x9e3779b1;

// Factors by which the first `dim` features of each row are turned: rotary position embedding (Su et al. 2021).
struct RotaryRows {
  // (rows, dim / 2) of each batch entry, of the type of the rows or fp32; null: rows stay as they are
  const void* cos = nullptr;
  const void* sin = nullptr;
  int64_t cos_batch = 0, cos_row = 0, sin_batch = 0, sin_row = 0;  // strides in elements
  bool is_float = false;
  bool interleaved = false;  // pairs are neighbours, else the halves of the first `dim` features
  int32_t dim = 0;  // a multiple of 16
};

// From 16-bit q, k and v to what FwdParams and Fp8Operands point to, all contiguous. Packed sequences have one mean,
// and one factor for each channel of v, for all of them; parts of the tensors outside sequences do not count.
struct QuantizeFp8 {
  Problem problem;
  StridedView q, k, v;
  uint8_t *q8 = nullptr, *k8 = nullptr;  // null in mixed mode
  uint8_t* v8 = nullptr;  // transposed
  float *q_factor = nullptr, *k_factor = nullptr;  // (b, h, blocks or 1); packed: without b, as all below
  float *v_factor = nullptr, *v_offset = nullptr;  // (b, h_k, dv); v_offset null: v is not shifted
  float* k_offset = nullptr;  // (b, h_k, d); null: k is not shifted
  float* row_offset = nullptr;  // as lse, where k is shifted
  float* partials = nullptr;  // quantize_floats()
  // (b): the first keys of each sequence, which it has. The others count nowhere, and become zeros. Null: it has all.
  const int32_t* seqused_k = nullptr;
  RotaryRows rotary[2];  // of q and k
  bool by_block = true;  // factors of q and k belong to blocks, else to heads
  bool hadamard = false;  // q and k rotated, before factors are taken; by_block only
  void* stream = nullptr;

  bool needs_q() const { return q8 != nullptr && !by_block; }
  bool needs_k() const { return k8 != nullptr && (!by_block || k_offset != nullptr); }
};

// Sums, minima and maxima of channels of each part.
struct ChannelStats {
  static constexpr int kSums = 0, kMinima = 1, kMaxima = 2, kCount = 3;
};
inline int64_t stat_parts(int64_t rows) { return (rows + kStatRows - 1) / kStatRows; }
inline int64_t quantize_floats(const Problem& p) {
  const int64_t b = p.is_varlen() ? 1 : p.batch, rows_q = p.is_varlen() ? p.total_q : p.seqlen_q;
  const int64_t rows_k = p.is_varlen() ? p.total_k : p.seqlen_k;
  return ChannelStats::kCount * b *
         (stat_parts(rows_q) * p.num_heads * p.head_dim +
          stat_parts(rows_k) * p.num_heads_k * (p.head_dim + int64_t{p.head_dim_v}));
}
// Errors in words, or empty (inst/fp8_passes.cu).
std::string quantize_fp8(const QuantizeFp8& x);

}  // namespace flash_ext
