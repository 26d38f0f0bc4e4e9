// The dQ pool: accumulators of dq that stay in the L2 cache, and dq made of them while the backward runs.
//
// Zeroed by a pass before and converted by a pass behind, accumulators go through memory four times: those of 16384
// rows and 2048 columns are 134 MB, and few keys hide no pass (evidence: dq-pool). Here heads go in rounds of about
// one work tile for each CTA, and only some rounds have accumulators at a time. When all work tiles of a round are
// added, two producer warps of each CTA fetch its tiles of queries, convert them and put zeros in their place
// (bwd/dq_pool_convert.cuh). When all tiles of a round are given back, work tiles of the round that comes to its place
// may begin.
//
// Work tiles and tiles of queries are fetched in ascending order by CTAs that run. A work tile waits for tiles of an
// earlier round, a tile for work tiles of its own: the first of all that is not done can go on, whatever the number of
// CTAs.
//
// Words in global memory, zeroed by the pass before:
//   [0] tiles fetched     [4 + 2 r] work tiles of round r added     [5 + 2 r] tiles of round r given back
#pragma once

#include "config.cuh"

namespace flash_ext::sm90 {

__device__ __forceinline__ uint32_t* work_tiles_added(const DqPoolView& pool, uint32_t round) {
  return pool.words + 4 + 2 * round;
}
__device__ __forceinline__ uint32_t* tiles_given_back(const DqPoolView& pool, uint32_t round) {
  return pool.words + 5 + 2 * round;
}

// Where the accumulators of a work tile are, and which round it is of.
__device__ __forceinline__ void place_in_pool(const DqPoolView& pool, BwdWorkTile& work) {
  work.dq_tile = work.tile;
  if (pool.words == nullptr) return;
  const uint32_t tile = static_cast<uint32_t>(work.tile);
  work.dq_tile = static_cast<int>(tile - divide(tile, pool.pool_tiles) * pool.pool_tiles.divisor);
  work.round = static_cast<int>(divide(tile, pool.round_tiles));
}

// What says that the accumulators of a work tile are free and zero, by the count of its round's tiles; null: they are.
__device__ __forceinline__ const uint32_t* round_before(const DqPoolView& pool, const BwdWorkTile& work) {
  if (pool.words == nullptr || static_cast<uint32_t>(work.round) < pool.rounds) return nullptr;
  return tiles_given_back(pool, work.round - pool.rounds);
}

__device__ __forceinline__ void wait_for_count(const uint32_t* word, uint32_t count) {
#if FLASH_EXT_DEBUG
  int tries = 0;
#endif
  while (ptx::load_acquire(word) != count) {
#if FLASH_EXT_DEBUG
    if (++tries > 50'000'000) __trap();  // an error instead of a hang
#endif
  }
}

// Consumers of staged dQ tell that a work tile is added in the first step of the next one, or before they wait for
// that, because to wait for the last addition takes a thousand clocks. The word is the work tile's stage, plus 1; 0:
// none.
template <typename T>
__device__ __forceinline__ void arrive_deferred(unsigned char* smem_bytes, BwdBarriers<T> bars, int warp, int lane) {
  if (lane != 0) return;
  uint32_t& deferred = reinterpret_cast<uint32_t*>(smem_bytes + T::kDeferredAt)[warp];
  if (deferred == 0) return;
  ptx::bulk_wait();
  ptx::mbarrier_arrive(bars.added(static_cast<int>(deferred) - 1));
  deferred = 0;
}

}  // namespace flash_ext::sm90
