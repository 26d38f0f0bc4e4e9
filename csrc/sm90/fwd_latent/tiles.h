// The tile of the Hopper forward over a cache of latents, for the host and the kernel alike. No CUDA, no torch.
#pragma once

#include "../fwd/tiles.h"

namespace flash_ext::sm90 {

// Multi-head latent attention, absorbed (DeepSeek-V2, arXiv 2405.04434): one key head of 576 columns, whose first 512 are the
// value as well.
//
// 64 rows, which are query heads of a query and then of the next one. Two tiles of 64 keys are all that shared memory holds
// beside them, so one comes while the other is multiplied. Two warpgroups have the same rows: they form the scores of every
// second tile each, and have half of the columns of the output.
struct LatentTile {
  static constexpr int kHeadDim = 576, kHeadDimV = 512, kRows = 64, kKeys = 64, kThreads = 384, kKvStages = 2;
  static constexpr int kTileBytes = tile_bytes(64, kHeadDim);
  // From one warpgroup to the other: weights of 16 bits, maxima, and sums by turns.
  static constexpr int kWeightBytes = 2 * kRows * kKeys, kMaximaBytes = 4 * kRows, kSumBytes = 2 * 2 * 4 * kRows;
  static constexpr int kControlBytes = 1024;  // work tiles, the scheduler's place, barriers
  static constexpr int kSmemBytes =
      (kKvStages + 1) * kTileBytes + kWeightBytes + kMaximaBytes + kSumBytes + kControlBytes;
};
static_assert(LatentTile::kSmemBytes <= kSmemLimitLarge);

}  // namespace flash_ext::sm90
