// What the fp8 forward takes beside FwdParams. No torch, no CUDA headers.
//
// q, k and v hold e4m3 (in mixed mode only v, and q and k have the problem's dtype). FwdParams::v then is transposed: its
// rows are channels, and its columns keys, each sequence from a multiple of 16 on, in groups of 16 whose order is
// kKeyOrder, with zeros behind the last key.
#pragma once

#include <cstdint>
#include <string>

#include "params.h"

namespace flash_ext {

inline constexpr int kFp8Block = 128;  // rows of q or k that share a factor
inline constexpr int kKeyGroup = 16;  // keys that change places with each other
// Key kKeyOrder[i] of a group stands at place i: a thread's four weights of a group, as wgmma leaves them, are then the
// four bytes it hands in for the next product.
inline constexpr int kKeyOrder[kKeyGroup] = {0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15};

enum class Operands : uint8_t { k16Bit, kFp8, kMixed };

// Floats by which a block of rows or a channel is multiplied. Strides count floats, and may be 0.
struct FactorView {
  const float* ptr = nullptr;
  int64_t batch_stride = 0, head_stride = 0, step = 0;
};

struct Fp8Operands {
  FactorView q_factor, k_factor;  // of blocks of kFp8Block rows; packed: block i of sequence b is start / 128 + b + i
  FactorView v_factor;  // of channels
  FactorView v_offset;  // of channels: what every row of v lacks; null where nothing
  const float* row_offset = nullptr;  // as lse: what all scores of a row lack, before the scale; null where nothing
  const int32_t* seqused_k = nullptr;  // (b): the first keys of each sequence, which it has; null: all
  const float* sinks = nullptr;  // (h), as Modifiers has them
  float* row_max = nullptr;  // as lse: the largest score of each row; null: not wanted
};

// Columns of a transposed v for so many keys.
constexpr int64_t transposed_columns(int64_t total_k, int batch, bool packed) {
  return packed ? (total_k / kKeyGroup + batch) * kKeyGroup : (total_k + kKeyGroup - 1) / kKeyGroup * kKeyGroup;
}
// Blocks of rows for which there are factors.
constexpr int64_t factor_blocks(int64_t total, int batch, bool packed) {
  return packed ? total / kFp8Block + batch : (total + kFp8Block - 1) / kFp8Block;
}

// ---- quantisation ----------------------------------------------------------------------------------

inline constexpr float kFp8Max = 448.f;
inline constexpr float kLeastAmax = 1e-30f;  // what is smaller counts as 0, whose factor is 1
inline constexpr int kStatRows = 256;  // rows of a part of the statistics

// The rotation's signs of columns c to c + 7, c a multiple of 8: bits 24 to 31 of c times this.
inline constexpr uint32_t kSignsOfEight = 0x9e3779b1;

// From 16-bit q, k and v to what FwdParams and Fp8Operands point to, all contiguous. Packed sequences have one mean, and
// one factor for each channel of v, for all of them; parts of the tensors outside sequences do not count.
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
