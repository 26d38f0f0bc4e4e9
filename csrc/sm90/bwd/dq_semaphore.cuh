// Additions to dQ in a fixed order, which makes them the same bits in every run.
//
// All blocks of 128 keys that see a tile of queries add to it, in ascending order. The tile's word in global memory
// holds the number of the block whose turn it is, with kFirst as long as nobody has written the tile, and whoever has
// added passes it on. Nobody waits for long: work tiles are fetched in ascending order and all walk their tiles
// downwards, so that a block follows the one before it by a step or more. A work tile waits only for work tiles fetched
// before it, by CTAs that run: whatever the number of CTAs, the first work tile not finished can go on.
#pragma once

#include "../fwd/consume.cuh"
#include "tiles.h"

namespace flash_ext::sm90 {

inline constexpr uint32_t kFirst = 1u << 31;

// What the pass before leaves for a tile of queries: the turn of the first block of keys that sees it, if one does.
__device__ __forceinline__ bool init_dq_semaphore(uint32_t* words, const AttnMod& mod, int64_t index, int tile) {
  const BlockRange keys = mod.kv_blocks<BwdTile::kBlockM, BwdTile::kOrderedKeys>(tile);
  if (keys.begin >= keys.end) return false;
  if (threadIdx.x == 0) words[index] = keys.begin | kFirst;
  return true;
}

// By a whole warp: waits for the turn of `block`; true when nobody has added before. `seen` is what load_acquire() said
// of the word a while ago: whoever goes on has acquired, each lane by a load of its own. The vote makes the exit
// warp-uniform; otherwise ptxas clones what follows.
__device__ __forceinline__ bool wait_dq_semaphore(const uint32_t* word, uint32_t block, uint32_t seen) {
  debug_delay();
#if FLASH_EXT_DEBUG
  int tries = 0;
#endif
  while (__any_sync(ptx::kFullWarp, (seen & ~kFirst) != block)) {
    seen = ptx::load_acquire(word);
#if FLASH_EXT_DEBUG
    if (++tries > 50'000'000) __trap();  // an error instead of a hang
#endif
  }
  return __any_sync(ptx::kFullWarp, (seen & kFirst) != 0);
}

// The same for the turns of up to `count` tiles downwards from a word: how many have come, at least one. Bit i of
// `firsts`: nobody has added to the i-th. Each lane acquires another word, and votes order no memory: __syncwarp does,
// before one lane adds to all of these tiles.
__device__ __forceinline__ int wait_dq_semaphores(const uint32_t* word, uint32_t block, int count, uint32_t* firsts) {
  debug_delay();
  const int lane = threadIdx.x % 32;
  uint32_t seen, come;
#if FLASH_EXT_DEBUG
  int tries = 0;
#endif
  do {
    seen = lane < count ? ptx::load_acquire(word - lane) : ~0u;
    come = __ballot_sync(ptx::kFullWarp, (seen & ~kFirst) == block);
#if FLASH_EXT_DEBUG
    if (++tries > 50'000'000) __trap();  // an error instead of a hang
#endif
  } while ((come & 1) == 0);
  *firsts = __ballot_sync(ptx::kFullWarp, (seen & kFirst) != 0);
  __syncwarp();
  return __ffs(~come) - 1;
}

// As fetch_work_tile(), but every work tile is fetched, the first of a CTA too: one that is fetched has a CTA that
// runs.
__device__ __forceinline__ uint32_t fetch_in_order(const TileScheduler& d) {
  const uint32_t fetched = atomicAdd(&d.counter->next, 1u);
  if (fetched == d.num_work_tiles + gridDim.x - 1) atomicExch(&d.counter->owner, 0ull);
  return fetched;
}

}  // namespace flash_ext::sm90
