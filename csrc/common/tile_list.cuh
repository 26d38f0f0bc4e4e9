// The tiles a CTA visits, found a segment at a time by its first warp and kept in shared memory, so that a loop
// over them costs what it costs without masks: hidden tiles are neither loaded nor looked at again.
#pragma once

#include "modifiers.cuh"

namespace flash_ext {

struct ListedTile {
  int block;       // tile index; of keys or of queries
  int head;        // query head inside the group of a key head; 0 where the CTA has one
  TileTests tests;  // per element
};

struct TileList {
  static constexpr int kCapacity = 256;  // tiles of a segment

  int count;    // of this segment
  int scanned;  // tiles looked at so far
  uint32_t tiles[kCapacity];  // head << 3 | tests, and the block
  int blocks[kCapacity];

  __device__ ListedTile operator[](int i) const {
    return {blocks[i], static_cast<int>(tiles[i] >> 3), static_cast<TileTests>(tiles[i] & 7)};
  }

  // Finds the next segment among `total` tiles; look(x) gives tile x and its tests. All lanes of one warp.
  template <typename Look>
  __device__ void find(int first, int total, int lane, const Look& look) {
    int found = 0, x0 = first;
#pragma unroll 1
    for (; x0 < total && found <= kCapacity - 32; x0 += 32) {
      ListedTile tile{0, 0, 0};
      const TileTests tests = x0 + lane < total ? look(x0 + lane, tile) : kSkipTile;
      const uint32_t listed = __ballot_sync(ptx::kFullWarp, tests != kSkipTile);
      if (tests != kSkipTile) {
        const int at = found + __popc(listed & ((1u << lane) - 1));
        tiles[at] = static_cast<uint32_t>(tile.head) << 3 | static_cast<uint32_t>(tests);
        blocks[at] = tile.block;
      }
      found += __popc(listed);
    }
    if (lane == 0) {
      count = found;
      scanned = x0;
    }
  }

  // The same by all threads of a CTA, a tile each, so that the loads of short lists are in flight together. The
  // caller has a barrier before; there is one behind.
  template <int kThreads, typename Look>
  __device__ void find_by_cta(int first, int total, int thread_idx, uint32_t (&ballots)[kThreads / 32],
                              const Look& look) {
    static_assert(kThreads <= kCapacity);
    int found = 0, x0 = first;
#pragma unroll 1
    do {
      ListedTile tile{0, 0, 0};
      const TileTests tests = x0 + thread_idx < total ? look(x0 + thread_idx, tile) : kSkipTile;
      const uint32_t listed = __ballot_sync(ptx::kFullWarp, tests != kSkipTile);
      if (x0 != first) __syncthreads();  // everybody has read the last ballots
      if (thread_idx % 32 == 0) ballots[thread_idx / 32] = listed;
      __syncthreads();
      int at = found + __popc(listed & ((1u << thread_idx % 32) - 1));
#pragma unroll
      for (int i = 0; i < kThreads / 32; ++i) {
        const int of_warp = __popc(ballots[i]);
        at += i < thread_idx / 32 ? of_warp : 0;
        found += of_warp;
      }
      if (tests != kSkipTile) {
        tiles[at] = static_cast<uint32_t>(tile.head) << 3 | static_cast<uint32_t>(tests);
        blocks[at] = tile.block;
      }
      x0 += kThreads;
    } while (x0 < total && found <= kCapacity - kThreads);
    if (thread_idx == 0) {
      count = found;
      scanned = min(x0, total);
    }
    __syncthreads();
  }
};

}  // namespace flash_ext
