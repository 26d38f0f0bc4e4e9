// The list of tiles made by all warps of a CTA, 32 tiles each: a search is then one trip to memory deep where the list
// is short, and the backward's CTAs have nothing else to do meanwhile.
#pragma once

#include "../../common/debug_delay.cuh"
#include "../../common/tile_list.cuh"

namespace flash_ext::sm80 {

// What TileList::find() does from tile_list.scanned on, for all threads, with barriers before and after. `counts` is
// shared memory.
template <int kWarps, typename Look>
__device__ __forceinline__ void find_by_cta(TileList& tile_list, int (&counts)[kWarps], int total, const Look& look) {
  const int thread_idx = ptx::fresh_thread_idx(), warp = thread_idx / 32, lane = thread_idx % 32;
  int found = 0, x0 = tile_list.scanned;
  bool full = false;
#pragma unroll 1
  do {
    ListedTile tile{0, 0, 0};
    const TileTests tests = x0 + thread_idx < total ? look(x0 + thread_idx, tile) : kSkipTile;
    const uint32_t listed = __ballot_sync(ptx::kFullWarp, tests != kSkipTile);
    if (lane == 0) counts[warp] = __popc(listed);
    debug_delay();
    __syncthreads();
    debug_delay();
    // The first warp whose tiles have no room, and those after it, look again in the next segment.
    int at = TileList::kCapacity;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      full |= found + counts[w] > TileList::kCapacity;
      if (full) continue;
      if (w == warp) at = found + __popc(listed & ((1u << lane) - 1));
      found += counts[w];
      x0 += 32;
    }
    if (tests != kSkipTile && at < TileList::kCapacity) {
      tile_list.tiles[at] = static_cast<uint32_t>(tile.head) << 3 | static_cast<uint32_t>(tests);
      tile_list.blocks[at] = tile.block;
    }
    if (thread_idx == 0) {
      tile_list.count = found;
      tile_list.scanned = x0;
    }
    debug_delay();
    __syncthreads();
    debug_delay();
  } while (x0 < total && !full);
}

}  // namespace flash_ext::sm80
