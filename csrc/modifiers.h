// What a call may ask of masks and scores beyond scale and window, as it crosses from the host to a kernel.
// No torch, no CUDA headers. Meaning and order: common/modifiers.cuh.
#pragma once

#include <cstdint>

#include "divisor.h"
#include "host_device.h"
#include "params.h"

namespace flash_ext {

// Rows of bits, 32 columns a word; bits past the last column are 0.
struct BitRows {
  static constexpr int32_t kAny = INT32_MAX;  // extent of a broadcast dimension

  const uint32_t* words = nullptr;  // null: no such mask
  int64_t batch_stride = 0;         // in words, 0: broadcast
  int64_t head_stride = 0;
  int64_t row_stride = 0;
  int32_t word_stride = 0;  // 1, or 0 when columns are broadcast
  int32_t rows = 0;         // what lies beyond is 0
  int32_t num_words = 0;
};

// Additive bias. Elements beyond rows or cols add 0.
struct BiasView {
  const void* ptr = nullptr;  // null: none
  int64_t batch_stride = 0;   // in elements, 0: broadcast
  int64_t head_stride = 0;
  int64_t row_stride = 0;
  int64_t col_stride = 0;
  int32_t rows = 0;  // BitRows::kAny when broadcast
  int32_t cols = 0;
  bool is_float = false;  // fp32; else the dtype of q
  bool aligned = false;   // every row starts on a 16-byte boundary, and its elements are neighbours
  bool staged = false;    // aligned, of 16 bits: what is there may be copied as it is
  bool has_room = false;  // memory of the tensor goes on to the end of the last pair of elements
  // Rows have an end, but do not begin on 16 bytes, as with 77 keys, or their elements are no neighbours. Kernels get a
  // copy (bias_rows.h), but for those that take it as it is: the plan says so.
  bool is_unaligned = false;
  bool is_loose = false;  // plan() plans with the copy's view: the bias behind it is_loose() (bias_rows.h)
};

// One value per position and its smallest and largest value over groups of 32 positions.
struct DocumentIds {
  static constexpr int kGroup = 32;

  const int32_t* ids = nullptr;
  const int32_t* groups = nullptr;  // (min, max) pairs
  int64_t batch_stride = 0;  // positions; 0 when packed
  int64_t group_batch_stride = 0;  // groups
};

// Per position, `count` half-open intervals on the other side that it may not see.
struct HiddenIntervals {
  const int32_t* bounds = nullptr;  // [position][count][2]
  const int32_t* groups = nullptr;  // [group][count][4]: smallest and largest start, smallest and largest end
  int64_t batch_stride = 0;  // in int32
  int64_t head_stride = 0;
  int64_t group_batch_stride = 0;
  int64_t group_head_stride = 0;
  int32_t count = 0;  // intervals a position
};

// What is added to a score by the distance of its row and its key; common/by_distance.cuh says how.
struct DistanceBias {
  const float* slopes = nullptr;  // ALiBi, (h) or (b, h)
  int32_t slopes_batch_stride = 0;
  const float* table = nullptr;  // 2 reach + 1 entries a head, by key - row from -reach on; the ends serve all beyond
  int32_t reach = 0, last_entry = 0;  // last_entry = 2 reach, an operand of kernels that are short of registers
  int32_t table_batch_stride = 0, table_head_stride = 0;  // 0: broadcast

  FLASH_EXT_HOST_DEVICE constexpr explicit operator bool() const { return slopes != nullptr || table != nullptr; }
  // Whether what rows behind the last one get may be NaN.
  FLASH_EXT_HOST_DEVICE constexpr bool may_be_nan() const { return table != nullptr; }
};

// Above it the tanh of a softcap is evaluated finely, which not every kernel can.
inline constexpr float kFineSoftcap = 100.f;

struct Modifiers {
  // Scores are kept in units of 1 / (unit_log2 ln 2): raw products where nothing is added to them, else natural ones.
  bool has_score_mod = false;  // softcap, or something is added
  float unit_log2 = 0.f;  // log2(e), or abs_scale_log2 of the problem
  float softcap = 0.f;  // 0: off
  float inv_softcap = 0.f;  // 1 / softcap
  BiasView bias;
  DistanceBias by_distance;
  const float* sinks = nullptr;  // (h)

  bool top_left = false;  // row i is level with key i, not with i + seqlen_k - seqlen_q
  int32_t chunk = 0;  // keys of the same chunk of so many positions only; 0: off
  Divisor chunk_divisor;
  int32_t sink_tokens = 0;  // first keys that no left bound hides
  const int32_t* prefix_lens = nullptr;  // (b): first keys that every row sees
  BitRows mask;
  const uint32_t* mask_any = nullptr;  // per 64 rows: columns that some row sees, as words laid out as `mask` is
  const uint32_t* mask_all = nullptr;  // and columns that all of them see
  const uint32_t* mask_tiles = nullptr;  // the same bits in another order (condensed.h); null: there are none
  int64_t mask_group_batch_stride = 0;
  int64_t mask_group_head_stride = 0;
  int64_t mask_group_stride = 0;
  BitRows blocks;  // one bit per 16 x 16 scores
  int32_t block_rows = 0;  // of a block as it was given
  DocumentIds document_q, document_k;
  HiddenIntervals hidden_rows;  // of each key
  HiddenIntervals hidden_keys;  // of each row

  const int64_t* rng = nullptr;  // (seed, offset); null: no dropout
  uint32_t drop_below = 0;  // 16-bit draws below this are dropped; 65536: all
  float keep_scale = 1.f;  // 65536 / (65536 - drop_below)

  // Heads whose batch entries share bias tiles run side by side: see common/seqlen.cuh.
  bool batch_fastest = false;
  // The kernel before the first launch is one of passes/mask_passes.cuh, which lets the next begin early.
  bool follows_pass = false;
  Divisor batches;

  FLASH_EXT_HOST_DEVICE constexpr bool adds() const { return bias.ptr != nullptr || static_cast<bool>(by_distance); }

  float* row_max = nullptr;  // forward: like lse, largest score of a row; null: not wanted

  // For each row of q, which of the newest keys of its sequence it sees: bit j is key j + seqlen_k - seqlen_q, and what
  // lies before key 0 of those is seen. No MaskKind: calls over a cache alone have one, and other kernels do not ask
  // for it.
  const uint64_t* tree = nullptr;

  static constexpr int kMaskGroup = 64;  // rows a summary word stands for
};

// What the gradient of a bias or of ALiBi slopes is summed into: a tensor (batch|1, h|1, rows|1, cols|1). That of a
// table by distance has its entries as columns, and begins as zeros.
struct BiasGradient {
  void* out = nullptr;  // [splits][batch][heads][rows][cols], contiguous
  int32_t batch = 1;  // 1: summed over
  int32_t heads = 1;
  int32_t rows = 1;  // 1 with sum_rows
  int32_t cols = 1;
  bool sum_rows = false;
  bool sum_cols = false;
  bool is_slope = false;  // weights every element by -|row + shift - col|
  int32_t reach = -1;  // of a table by distance; rows and columns of scores are summed; -1: none
  bool is_float = false;  // out is fp32; else the dtype of q. Always fp32 with splits > 1
  int32_t splits = 1;  // parts of what is summed over, which are added in order behind; the plan says how many

  // Whether a score adds to the element of its own row and column, or of those of them that are not summed over.
  bool is_of_places() const { return reach < 0; }

  // Tiles of the result, for each part.
  int64_t tiles(int block_m, int block_n) const {
    const auto tiles_of = [](int64_t n, int block) { return (n + block - 1) / block; };
    return (sum_rows ? 1 : tiles_of(rows, block_m)) * (sum_cols ? 1 : tiles_of(cols, block_n)) * heads * batch * splits;
  }
};

// A bool tensor (batch|1, h|1, rows|1, cols|1) with any strides.
struct BoolView {
  const bool* ptr = nullptr;
  int64_t strides[4] = {0, 0, 0, 0};
  int32_t sizes[4] = {1, 1, 1, 1};
};

}  // namespace flash_ext
