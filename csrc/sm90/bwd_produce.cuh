// The producers of the sm90 backward: four warps with a job each, because one would spill in 24 registers.
#pragma once

#include "bwd_ring.cuh"

namespace flash_ext::sm90 {

// K and V of an item.
template <typename T>
__device__ __forceinline__ void load_keys_of(const BwdArgs& a, const BwdMaps& maps, uint32_t smem, const BwdItem& item,
                                             BwdBarriers<T> bars, uint32_t& parity) {
  if (item.steps == 0) return;
  const RowCoordinates at = row_coordinates(a.p.problem, item.w.k, item.w.b, item.w.block * T::kBlockN);
  const auto load = [&](const CUtensorMap& map, const Steps& steps, uint32_t to, uint32_t full, uint32_t empty) {
    constexpr int kRows = T::kPartRows;
    wait(empty, parity);
    if (threadIdx.x % 32 != 0) return;
#pragma unroll
    for (int part = 0; part < T::kKeyParts; ++part) {
      copy_tile<T::kChunks, kRows>(map, steps, to + part * T::kChunks * kRows * 128, full,
                                   {at.row + kRows * part, at.outer, at.outermost}, item.w.h);
    }
  };
  if constexpr (T::kPlacesSwap) {
    const int k_place = parity ^ 1, v_place = parity;
    load(maps.k, a.k, smem + k_place * T::kVAt, bars.place_full(k_place), bars.place_empty(k_place));
    load(maps.v, a.v, smem + v_place * T::kVAt, bars.place_full(v_place), bars.place_empty(v_place));
  } else {
    load(maps.k, a.k, smem, bars.k_full(), bars.k_empty());
    load(maps.v, a.v, smem + T::kVAt, bars.v_full(), bars.v_empty());
  }
  parity ^= 1;
}

// Whether every item is drawn, the first of a CTA too.
template <typename T>
__device__ __forceinline__ bool draws_in_order(const BwdArgs& a) {
  return T::kOrdered || (T::kRing && a.ring.words != nullptr);
}

// First warp: decides what is next. In the kernel of bwd.cuh it loads K and V as well.
template <typename T, typename Bars>
__device__ __forceinline__ void schedule_items(const BwdArgs& a, const BwdMaps& maps, uint32_t smem, BwdItem* items,
                                               Bars bars) {
  const Problem& p = a.p.problem;
  const int lane = threadIdx.x % 32;
  const bool in_order = draws_in_order<T>(a), draws = in_order || a.draw.counter != nullptr;
  if (draws && lane == 0) own_counter(a.draw);
  RingPosition<T::kItems> place;
  place.parity = 1;  // the first wait for an empty place passes
  [[maybe_unused]] uint32_t kv_parity = 1;
  const auto draw = [&] {
    uint32_t next = 0;
    if (lane == 0) next = in_order ? draw_in_order(a.draw) : draw_item(a.draw);
    return __shfl_sync(ptx::kFullWarp, next, 0);
  };
  uint32_t index = blockIdx.x;
  if (in_order) index = draw();
#pragma unroll 1
  while (index < a.draw.num_items) {
    int b = 0;
    const Work w = decode_index<T::kOwnRows, T::kByQueries, T::kByQueries>(index, p, a.grid, &b);
    if (w.active) {
      wait(bars.item_empty(place.slot), place.parity);
      debug_delay();
      if (lane == 0) {
        BwdItem& item = items[place.slot];
        item.w = w;
        const int first_head = T::kByQueries ? w.h : w.h * static_cast<int>(a.grid.shared.divisor);
        item.tile = static_cast<int>(first_tile<T::kStatRows>(p, w, b, first_head, a.tiles_per_head));
        if constexpr (T::kRing) put_in_ring(a.ring, item);
        asm volatile("" ::: "memory");  // reads it again below: not enough registers to keep it
        const AttnMod mod{p, item.w.q.length, item.w.k.length};
        if constexpr (T::kByQueries) {
          item.blocks = mod.template kv_blocks<T::kBlockM, T::kBlockN>(item.w.block);
        } else {
          item.blocks = mod.template q_blocks<T::kBlockM, T::kBlockN>(item.w.block);
        }
        const uint32_t count = max(item.blocks.end - item.blocks.begin, 0);
        const bool rotates = !T::kByQueries && count != 0;
        const uint32_t late = rotates ? static_cast<uint32_t>(item.w.block * a.rotate) % count : 0;
        item.first = T::kOrdered ? item.blocks.end - 1 : item.blocks.begin + static_cast<int>(late);
        item.steps = static_cast<int>(T::kByQueries ? count : count * a.grid.shared.divisor);
        if constexpr (T::kRing) wait_for_round(a.ring, item);
        ptx::mbarrier_arrive(bars.item_full(place.slot));
        if (draws && count == 0) ptx::mbarrier_arrive(bars.item_ending());
      }
      if constexpr (T::kSchedulerLoadsKeys) {
        __syncwarp();
        load_keys_of<T>(a, maps, smem, items[place.slot], bars, kv_parity);
      }
      static_assert(T::kItems % 2 == 0);  // places then tell the parity of item_ending
      if (draws) wait(bars.item_ending(), place.slot % 2);
      place.advance();
    }
    index = draws ? draw() : index + gridDim.x;
  }
  wait(bars.item_empty(place.slot), place.parity);
  if (lane == 0) {
    items[place.slot].w.block = -1;
    ptx::mbarrier_arrive(bars.item_full(place.slot));
  }
}

// What the other producers do for every item.
template <typename T, typename Bars, typename Use>
__device__ __forceinline__ void for_items(const BwdItem* items, Bars bars, const Use& use) {
  RingPosition<T::kItems> place;
#pragma unroll 1
  while (true) {
    wait(bars.item_full(place.slot), place.parity);
    const BwdItem& item = items[place.slot];
    if (item.w.block < 0) break;
    use(item);
    __syncwarp();
    ptx::mbarrier_arrive_for_warp(bars.item_empty(place.slot), threadIdx.x % 32 == 0);
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
    for (Walk<T> walk(item); walk.left > 0; walk.advance(item, static_cast<int>(a.grid.shared.divisor))) {
      use(item, walk, ring);
      ring.advance();
    }
  });
}

// Second and fourth warp, with additions in order: adds the tiles of dQ that the consumers leave, each in its turn, or
// (not staged) passes on the turns that a warpgroup has used. All that orders the additions of different CTAs waits
// here, where nobody waits for it: a fence of the device takes 700 clocks, and would cost a consumer 400 to 800 in each
// step. Without it gradients do differ from run to run. Turns are passed on at once when the next tile is not there
// yet, else several by one fence.
template <typename T>
__device__ __forceinline__ void pass_turns(const BwdArgs& a, uint32_t smem, const BwdItem* items, BwdBarriers<T> bars,
                                           int group) {
  constexpr int kBytes = T::kBlockM * T::kHeadDim * 4;
  const int lane = threadIdx.x % 32;
  uint32_t parity = 0;
  for_items<T>(items, bars, [&](const BwdItem& item) {
    const int turn = item.w.block * T::kDqStages + group;
    BlockRange tiles = item.blocks;
    if constexpr (T::kApart) {
      const AttnMod mod{a.p.problem, item.w.q.length, item.w.k.length};
      tiles = mod.template q_blocks<T::kBlockM, BwdTile::kOrderedKeys>(turn);
      if (turn * BwdTile::kOrderedKeys >= item.w.k.length) return;
    }
#pragma unroll 1
    for (int head = 0; head < static_cast<int>(a.grid.shared.divisor); ++head) {
      uint32_t* word = a.turns + item.tile + head * a.tiles_per_head + tiles.end - 1;
      int held = 0;  // turns not yet passed on, of the tiles before `word`
      [[maybe_unused]] int come = 0;  // turns of the tiles from `word` on
      [[maybe_unused]] uint32_t firsts = 0;
      const auto pass_on = [&] {
        if (lane == 0) {
          if constexpr (T::kStaged) ptx::bulk_wait();
          ptx::fence_gpu();
#pragma unroll 1
          for (int i = 1; i <= held; ++i) ptx::store_relaxed(word + i, turn + 1);
        }
        __syncwarp();
        held = 0;
      };
#pragma unroll 1
      for (int left = tiles.end - tiles.begin; left > 0; --left, --word) {
        const bool here = __any_sync(ptx::kFullWarp, ptx::mbarrier_test_wait(bars.dq_full(group), parity));
        if (held > 0 && (!here || (T::kStaged && come == 0))) pass_on();
        if constexpr (T::kStaged) {
          if (come == 0) come = wait_for_turns(word, turn, min(T::kTurnsAtOnce, left), &firsts);
          ptx::fence_proxy_async_global();
        }
        wait(bars.dq_full(group), parity);
        parity ^= 1;
        if (lane == 0) {
          if constexpr (T::kStaged) {
            float* to = a.p.dq_accum + (word - a.turns) * (T::kBlockM * T::kHeadDim);
            const uint32_t from = smem + T::kStageAt + group * kBytes;
            if (firsts & 1) {
              ptx::bulk_store(to, from, kBytes);
            } else {
              ptx::bulk_add_f32(to, from, kBytes);
            }
            ptx::bulk_commit();
            ptx::bulk_wait_read();
          }
          ptx::mbarrier_arrive(bars.dq_empty(group));
        }
        __syncwarp();
        --come;
        firsts >>= 1;
        ++held;
      }
      if (held > 0) pass_on();
    }
  });
}

// Third warp: streams Q, with lse and delta.
template <typename T>
__device__ __forceinline__ void load_queries(const BwdArgs& a, const BwdMaps& maps, uint32_t smem, const BwdItem* items,
                                             BwdBarriers<T> bars) {
  for_tiles<T>(a, items, bars, [&](const BwdItem& item, const Walk<T>& walk, const RingPosition<T::kSlots>& ring) {
    wait(bars.q_empty(ring.slot), ring.parity);
    if constexpr (T::kQueriesLoadDouts) wait(bars.dout_empty(ring.slot), ring.parity);
    if (threadIdx.x % 32 != 0) return;
    const int h = item.w.h * static_cast<int>(a.grid.shared.divisor) + walk.head;
    const int64_t tile = item.tile + static_cast<int64_t>(walk.head) * a.tiles_per_head + walk.block;
    const uint32_t full = bars.q_full(ring.slot);
    copy_tile<T::kChunks, T::kBlockM>(maps.q, a.q, smem + T::kQAt + ring.slot * T::kQBytes, full,
                                      row_coordinates(a.p.problem, item.w.q, item.w.b, walk.block * T::kBlockM), h);
    ptx::mbarrier_arrive_expect_tx(full, T::kStatsBytes);
    ptx::bulk_load(smem + T::kStatsAt + ring.slot * T::kStatsBytes, a.p.row_stats + tile * (2 * T::kBlockM),
                   T::kStatsBytes, full);
    if constexpr (T::kQueriesLoadDouts) {
      copy_tile<T::kChunks, T::kBlockM>(maps.dout, a.dout, smem + T::kDoutAt + ring.slot * T::kQBytes,
                                        bars.dout_full(ring.slot),
                                        row_coordinates(a.p.problem, item.w.q, item.w.b, walk.block * T::kBlockM), h);
    }
    const bool draws = draws_in_order<T>(a) || a.draw.counter != nullptr;  // else nobody waits for that
    if (draws && walk.left == min(T::kDrawAhead, item.steps)) {
      ptx::mbarrier_arrive(bars.item_ending());
    }
  });
}

// Fourth warp: streams dO.
template <typename T>
__device__ __forceinline__ void load_douts(const BwdArgs& a, const BwdMaps& maps, uint32_t smem, const BwdItem* items,
                                           BwdBarriers<T> bars) {
  for_tiles<T>(a, items, bars, [&](const BwdItem& item, const Walk<T>& walk, const RingPosition<T::kSlots>& ring) {
    wait(bars.dout_empty(ring.slot), ring.parity);
    if (threadIdx.x % 32 != 0) return;
    copy_tile<T::kChunks, T::kBlockM>(maps.dout, a.dout, smem + T::kDoutAt + ring.slot * T::kQBytes,
                                      bars.dout_full(ring.slot),
                                      row_coordinates(a.p.problem, item.w.q, item.w.b, walk.block * T::kBlockM),
                                      item.w.h * static_cast<int>(a.grid.shared.divisor) + walk.head);
  });
}

}  // namespace flash_ext::sm90
