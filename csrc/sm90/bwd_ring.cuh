// Accumulators of dq in a ring, so that they stay in the L2 cache, and dq made of them while the backward runs.
//
// Zeroed by a pass before and converted by a pass behind, accumulators go through memory four times: those of 16384
// rows and 2048 columns are 134 MB, and the passes a quarter of the time at 512 keys. Here heads go in rounds of about
// one item for each CTA, and only some rounds have accumulators at a time. When all items of a round are added, two
// producer warps of each CTA draw its tiles of queries, convert them and put zeros in their place (bwd_finish.cuh).
// When all tiles of a round are given back, items of the round that comes to its place may begin.
//
// Items and tiles are drawn in ascending order by CTAs that run. An item waits for tiles of an earlier round, a tile
// for items of its own: the first of all that is not done can go on, whatever the number of CTAs.
//
// Words in global memory, zeroed by the pass before:
//   [0] tiles drawn     [4 + 2 r] items of round r added     [5 + 2 r] tiles of round r given back
#pragma once

#include "bwd_parts.cuh"

namespace flash_ext::sm90 {

__device__ __forceinline__ uint32_t* items_added(const Ring& ring, uint32_t round) {
  return ring.words + 4 + 2 * round;
}
__device__ __forceinline__ uint32_t* tiles_given_back(const Ring& ring, uint32_t round) {
  return ring.words + 5 + 2 * round;
}

// Where the accumulators of an item are, and which round it is of.
__device__ __forceinline__ void put_in_ring(const Ring& ring, BwdItem& item) {
  item.dq_tile = item.tile;
  if (ring.words == nullptr) return;
  const uint32_t tile = static_cast<uint32_t>(item.tile);
  item.dq_tile = static_cast<int>(tile - divide(tile, ring.ring_tiles) * ring.ring_tiles.divisor);
  item.round = static_cast<int>(divide(tile, ring.round_tiles));
}

// Before an item begins, by one lane: its accumulators are free and zero.
__device__ __forceinline__ void wait_for_round(const Ring& ring, const BwdItem& item) {
  if (ring.words == nullptr || static_cast<uint32_t>(item.round) < ring.rounds) return;
  const uint32_t* word = tiles_given_back(ring, item.round - ring.rounds);
#if FLASH_EXT_DEBUG
  int tries = 0;
#endif
  while (ptx::load_acquire(word) != ring.round_tiles.divisor) {
#if FLASH_EXT_DEBUG
    if (++tries > 50'000'000) __trap();  // an error instead of a hang
#endif
  }
}

// Consumers of staged dQ tell that an item is added in the first step of the next one, or before they wait for that,
// because to wait for the last addition takes a thousand clocks. What a warp owes is the item's place, plus 1.
template <typename T>
__device__ __forceinline__ void settle(unsigned char* smem_bytes, BwdBarriers<T> bars, int warp, int lane) {
  if (lane != 0) return;
  uint32_t& owed = reinterpret_cast<uint32_t*>(smem_bytes + T::kOwedAt)[warp];
  if (owed == 0) return;
  ptx::bulk_wait();
  ptx::mbarrier_arrive(bars.added(static_cast<int>(owed) - 1));
  owed = 0;
}

}  // namespace flash_ext::sm90
