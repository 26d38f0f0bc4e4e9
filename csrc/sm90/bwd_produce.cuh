// The producers of the sm90 backward: four warps with a job each, because one would spill in 24 registers.
#pragma once

#include "bwd_parts.cuh"

namespace flash_ext::sm90 {

// First warp: decides what is next.
template <typename T>
__device__ __forceinline__ void schedule_keys(const BwdArgs& a, BwdItem* items, BwdBarriers<T> bars) {
  const Problem& p = a.p.problem;
  const int lane = threadIdx.x % 32;
  const bool draws = a.draw.counter != nullptr;
  if (draws && lane == 0) own_counter(a.draw);
  RingPosition<T::kItems> place;
  place.parity = 1;  // the first wait for an empty place passes
  uint32_t index = blockIdx.x;
#pragma unroll 1
  while (index < a.draw.num_items) {
    int b = 0;
    const Work w = decode_index<T::kBlockN, false, false>(index, p, a.grid, &b);
    if (w.active) {
      wait(bars.item_empty(place.slot), place.parity);
      if (lane == 0) {
        BwdItem& item = items[place.slot];
        item.w = w;
        const int first_head = w.h * static_cast<int>(a.grid.shared.divisor);
        item.tile = static_cast<int>(first_tile<T::kBlockM>(p, w, b, first_head, a.tiles_per_head));
        asm volatile("" ::: "memory");  // reads it again below: not enough registers to keep it
        const AttnMod mod{p, item.w.q.length, item.w.k.length};
        item.blocks = mod.template q_blocks<T::kBlockM, T::kBlockN>(item.w.block);
        const uint32_t count = max(item.blocks.end - item.blocks.begin, 0);
        const uint32_t late = count == 0 ? 0 : static_cast<uint32_t>(item.w.block * a.rotate) % count;
        item.first = item.blocks.begin + static_cast<int>(late);
        item.steps = static_cast<int>(count * a.grid.shared.divisor);
        ptx::mbarrier_arrive(bars.item_full(place.slot));
        if (T::kDrawsLate && item.steps == 0) ptx::mbarrier_arrive(bars.item_ending());
      }
      static_assert(T::kItems % 2 == 0);  // places then tell the parity of item_ending
      if (T::kDrawsLate && draws) wait(bars.item_ending(), place.slot % 2);
      place.advance();
    }
    if (draws) {
      uint32_t next = 0;
      if (lane == 0) next = draw_item(a.draw);
      index = __shfl_sync(0xffffffffu, next, 0);
    } else {
      index += gridDim.x;
    }
  }
  wait(bars.item_empty(place.slot), place.parity);
  if (lane == 0) {
    items[place.slot].w.block = -1;
    ptx::mbarrier_arrive(bars.item_full(place.slot));
  }
}

// What the other producers do for every item.
template <typename T, typename Use>
__device__ __forceinline__ void for_items(const BwdItem* items, BwdBarriers<T> bars, const Use& use) {
  RingPosition<T::kItems> place;
#pragma unroll 1
  while (true) {
    wait(bars.item_full(place.slot), place.parity);
    const BwdItem& item = items[place.slot];
    if (item.w.block < 0) break;
    use(item);
    __syncwarp();
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(bars.item_empty(place.slot));
    place.advance();
  }
}

// What they do for every tile of queries of every item: use(item, walk, place in the ring).
template <typename T, typename Use>
__device__ __forceinline__ void for_tiles(const BwdArgs& a, const BwdItem* items, BwdBarriers<T> bars, const Use& use) {
  RingPosition<T::kSlots> ring;
  ring.parity = 1;
  for_items<T>(items, bars, [&](const BwdItem& item) {
#pragma unroll 1
    for (QueryWalk walk(item); walk.left > 0; walk.advance(item, static_cast<int>(a.grid.shared.divisor))) {
      use(item, walk, ring);
      ring.advance();
    }
  });
}

// Second warp: K and V of an item.
template <typename T>
__device__ __forceinline__ void load_keys(const BwdArgs& a, const BwdMaps& maps, uint32_t smem, const BwdItem* items,
                                          BwdBarriers<T> bars) {
  uint32_t parity = 1;
  for_items<T>(items, bars, [&](const BwdItem& item) {
    if (item.steps == 0) return;
    const RowCoordinates at = row_coordinates(a.p.problem, item.w.k, item.w.b, item.w.block * T::kBlockN);
    const auto load = [&](auto chunks, const CUtensorMap& map, const Steps& steps, uint32_t to, uint32_t full,
                          uint32_t empty) {
      constexpr int kChunks = decltype(chunks)::value, kRows = T::kPartRows;
      wait(empty, parity);
      if (threadIdx.x % 32 != 0) return;
#pragma unroll
      for (int part = 0; part < T::kKeyParts; ++part) {
        copy_tile<kChunks, kRows>(map, steps, to + part * kChunks * kRows * 128, full,
                                  {at.row + kRows * part, at.outer, at.outermost}, item.w.h);
      }
    };
    load(std::integral_constant<int, T::kChunks>{}, maps.k, a.k, smem, bars.k_full(), bars.k_empty());
    load(std::integral_constant<int, T::kChunksV>{}, maps.v, a.v, smem + T::kVAt, bars.v_full(), bars.v_empty());
    parity ^= 1;
  });
}

// Third warp: streams Q, with lse and delta.
template <typename T>
__device__ __forceinline__ void load_queries(const BwdArgs& a, const BwdMaps& maps, uint32_t smem, const BwdItem* items,
                                             BwdBarriers<T> bars) {
  for_tiles<T>(a, items, bars, [&](const BwdItem& item, const QueryWalk& walk, const RingPosition<T::kSlots>& ring) {
    wait(bars.q_empty(ring.slot), ring.parity);
    if (threadIdx.x % 32 != 0) return;
    const int h = item.w.h * static_cast<int>(a.grid.shared.divisor) + walk.head;
    const int64_t tile = item.tile + static_cast<int64_t>(walk.head) * a.tiles_per_head + walk.block;
    const uint32_t full = bars.q_full(ring.slot);
    copy_tile<T::kChunks, T::kBlockM>(maps.q, a.q, smem + T::kQAt + ring.slot * T::kQBytes, full,
                                      row_coordinates(a.p.problem, item.w.q, item.w.b, walk.block * T::kBlockM), h);
    ptx::mbarrier_arrive_expect_tx(full, T::kStatsBytes);
    ptx::bulk_load(smem + T::kStatsAt + ring.slot * T::kStatsBytes, a.p.row_stats + tile * (2 * T::kBlockM),
                   T::kStatsBytes, full);
    if (T::kDrawsLate && walk.left == 1) ptx::mbarrier_arrive(bars.item_ending());
  });
}

// Fourth warp: streams dO.
template <typename T>
__device__ __forceinline__ void load_douts(const BwdArgs& a, const BwdMaps& maps, uint32_t smem, const BwdItem* items,
                                           BwdBarriers<T> bars) {
  for_tiles<T>(a, items, bars, [&](const BwdItem& item, const QueryWalk& walk, const RingPosition<T::kSlots>& ring) {
    wait(bars.dout_empty(ring.slot), ring.parity);
    if (threadIdx.x % 32 != 0) return;
    copy_tile<T::kChunksV, T::kBlockM>(maps.dout, a.dout, smem + T::kDoutAt + ring.slot * T::kDoutBytes,
                                       bars.dout_full(ring.slot),
                                       row_coordinates(a.p.problem, item.w.q, item.w.b, walk.block * T::kBlockM),
                                       item.w.h * static_cast<int>(a.grid.shared.divisor) + walk.head);
  });
}

}  // namespace flash_ext::sm90
