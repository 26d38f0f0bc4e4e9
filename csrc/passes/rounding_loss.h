// What rounding takes from v when it is quantised (fp8_passes.cuh): where that is kept, behind the quantize_floats() of
// the statistics. No CUDA, no torch.
#pragma once

#include "../heuristics.h"
#include "../quantize_fp8.h"

namespace flash_ext {

// Tile by tile of each channel. The CTA that ends a head adds its tiles up.
struct RoundingLoss {
  float* share = nullptr;  // of a key in the mean of its head
  uint32_t* done = nullptr;  // tiles of the head
  float* of_tiles = nullptr;  // (heads, tiles, columns), in units of the factor

  static int64_t heads(const Problem& p) { return int64_t{p.is_varlen() ? 1 : p.batch} * p.num_heads_k; }
  static int64_t tiles(const Problem& p) {
    return p.is_varlen() ? packed_slots(p.total_k, p.batch, kFp8Block) : factor_blocks(p.seqlen_k, p.batch, false);
  }
  static int64_t floats(const Problem& p) { return heads(p) * (2 + tiles(p) * p.head_dim_v); }
  static RoundingLoss behind_statistics(float* partials, const Problem& p) {
    float* const from = partials + quantize_floats(p);
    return {from, reinterpret_cast<uint32_t*>(from + heads(p)), from + 2 * heads(p)};
  }
};

}  // namespace flash_ext
