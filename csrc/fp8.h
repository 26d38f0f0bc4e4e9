// What the fp8 forward takes beside FwdParams. No torch, no CUDA headers.
//
// q, k and v hold e4m3 (in mixed mode only v, and q and k have the problem's dtype). FwdParams::v then is transposed:
// its rows are channels, and its columns keys, each sequence from a multiple of 16 on, in groups of 16 whose order is
// kKeyOrder, with zeros behind the last key.
#pragma once

#include <cstdint>
#include <string>

#include "params.h"

namespace flash_ext {

inline constexpr int kFp8Block = 128;  // rows of q or k that share a factor
inline constexpr float kFp8Max = 448.f;
// The largest number of q and k, so that no score of raw numbers of 256 columns exceeds fp16's 65504.
inline constexpr float kSmallMax = 15.f;
static_assert(kSmallMax * kSmallMax * 256 <= 65504.f);
inline constexpr int kKeyGroup = 16;  // keys that change places with each other
// Key kKeyOrder[i] of a group stands at place i: a thread's four weights of a group, as wgmma leaves them, are then the
// four bytes it hands in for the next product.
inline constexpr int kKeyOrder[kKeyGroup] = {0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15};

// What q and k are in: e4m3 numbers, those of at most kSmallMax in size, or 16 bits beside v in e4m3.
enum class Operands : uint8_t { k16Bit, kFp8, kSmallFp8, kMixed };

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

}  // namespace flash_ext
