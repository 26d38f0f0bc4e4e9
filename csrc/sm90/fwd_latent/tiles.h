// The tile of the Hopper forward over a cache of latents, for the host and the kernel alike. No CUDA, no torch.
#pragma once

#include "../fwd/tiles.h"

namespace flash_ext::sm90 {

// Multi-head latent attention, absorbed (DeepSeek-V2, arXiv 2405.04434): one key head of 576 columns, whose first 512
// are the value as well.
//
// A tile has 64 rows: the query heads of a query, then those of the next one. Shared memory holds two tiles of 64 keys
// beside them. One comes while the other is multiplied. Two warpgroups have the same rows. Each forms the scores of
// every second tile, and has half of the columns of the output.
struct LatentTile {
  static constexpr int kHeadDim = 576, kHeadDimV = 512, kRows = 64, kKeys = 64, kThreads = 384, kKvStages = 2;
  static constexpr int kTileBytes = tile_bytes(64, kHeadDim);
  // From one warpgroup to the other: weights in 16 bits, maxima of rows, sums of rows. Sums have two places, used by
  // turns.
  static constexpr int kWeightBytes = 2 * kRows * kKeys, kMaximaBytes = 4 * kRows, kSumBytes = 2 * 2 * 4 * kRows;
  static constexpr int kControlBytes = 1024;  // work tiles, the scheduler's place, barriers
  static constexpr int kSmemBytes =
      (kKvStages + 1) * kTileBytes + kWeightBytes + kMaximaBytes + kSumBytes + kControlBytes;
};
static_assert(LatentTile::kSmemBytes <= kSmemLimitLarge);

}  // namespace flash_ext::sm90
