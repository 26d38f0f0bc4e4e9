// The tiles a CTA visits, found a segment at a time by its first warp and kept in shared memory, so that a loop
// over them costs what it costs without masks: hidden tiles are neither loaded nor looked at again.
#pragma once

#include "modifiers.cuh"

namespace flash_ext {

struct VisitedTile {
  int block;       // tile index; of keys or of queries
  int head;        // query head inside the group of a key head; 0 where the CTA has one
  bool is_partial;  // needs tests per element
};

struct Visits {
  static constexpr int kCapacity = 256;  // tiles of a segment

  int count;    // of this segment
  int scanned;  // tiles looked at so far
  uint32_t tiles[kCapacity];  // head << 1 | is_partial, and the block
  int blocks[kCapacity];

  __device__ VisitedTile operator[](int i) const {
    return {blocks[i], static_cast<int>(tiles[i] >> 1), (tiles[i] & 1) != 0};
  }

  // Finds the next segment among `total` tiles; look(x) gives tile x and whether to visit it. All lanes of one warp.
  template <typename Look>
  __device__ void find(int first, int total, int lane, const Look& look) {
    int found = 0, x0 = first;
#pragma unroll 1
    for (; x0 < total && found <= kCapacity - 32; x0 += 32) {
      VisitedTile tile{0, 0, false};
      const Visit visit = x0 + lane < total ? look(x0 + lane, tile) : Visit::kSkip;
      const uint32_t visited = __ballot_sync(0xffffffffu, visit != Visit::kSkip);
      if (visit != Visit::kSkip) {
        const int at = found + __popc(visited & ((1u << lane) - 1));
        tiles[at] = static_cast<uint32_t>(tile.head) << 1 | (visit == Visit::kPartial ? 1u : 0u);
        blocks[at] = tile.block;
      }
      found += __popc(visited);
    }
    if (lane == 0) {
      count = found;
      scanned = x0;
    }
  }
};

}  // namespace flash_ext
