// The producers of the kernel of dQ: four warps with a job each, as in bwd_produce.cuh.
#pragma once

#include "bwd_wide_parts.cuh"

namespace flash_ext::sm90 {

// First warp: decides what is next, as late as that costs nothing: CTAs that have drawn long before they are free leave
// the end of the grid to others (2k to 4k rows, causal: 1.10 to 1.20 of an even share each with two drawn ahead).
template <typename T>
__device__ __forceinline__ void schedule_queries(const WideQueryArgs& a, QueryItem* items, WideQueryBarriers<T> bars) {
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
    const Work w = decode_index<T::kBlockM, true, true>(index, p, a.grid, &b);
    if (w.active) {
      wait(bars.item_empty(place.slot), place.parity);
      if (lane == 0) {
        QueryItem& item = items[place.slot];
        item.w = w;
        item.tile = static_cast<int>(first_tile<T::kStatRows>(p, w, b, w.h, a.tiles_per_head));
        asm volatile("" ::: "memory");  // reads it again below: not enough registers to keep it
        const AttnMod mod{p, item.w.q.length, item.w.k.length};
        item.blocks = mod.template kv_blocks<T::kBlockM, T::kBlockN>(item.w.block);
        item.steps = max(item.blocks.end - item.blocks.begin, 0);
        ptx::mbarrier_arrive(bars.item_full(place.slot));
        if (draws && item.steps == 0) ptx::mbarrier_arrive(bars.item_ending());
      }
      static_assert(T::kItems % 2 == 0);  // places then tell the parity of item_ending
      if (draws) wait(bars.item_ending(), place.slot % 2);
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

// What the other producers do for every item that has tiles of keys.
template <typename T, typename Use>
__device__ __forceinline__ void for_query_items(const QueryItem* items, WideQueryBarriers<T> bars, const Use& use) {
  RingPosition<T::kItems> place;
#pragma unroll 1
  while (true) {
    wait(bars.item_full(place.slot), place.parity);
    const QueryItem& item = items[place.slot];
    if (item.w.block < 0) break;
    if (item.steps > 0) use(item);
    __syncwarp();
    ptx::mbarrier_arrive_for_warp(bars.item_empty(place.slot), threadIdx.x % 32 == 0);
    place.advance();
  }
}

// Second warp: Q and dO of an item.
template <typename T>
__device__ __forceinline__ void load_query_rows(const WideQueryArgs& a, const BwdMaps& maps, uint32_t smem,
                                                const QueryItem* items, WideQueryBarriers<T> bars) {
  uint32_t parity = 1;
  for_query_items<T>(items, bars, [&](const QueryItem& item) {
    const auto rows = [&](int group) {
      return row_coordinates(a.p.problem, item.w.q, item.w.b, item.w.block * T::kBlockM + group * T::kGroupRows);
    };
#pragma unroll 1
    for (int group = 0; group < 2; ++group) {
      wait(bars.q_empty(group), parity);
      if (threadIdx.x % 32 != 0) continue;
      copy_tile<T::kChunks, T::kGroupRows>(maps.q, a.q, smem + group * T::kQBytes, bars.q_full(group), rows(group),
                                           item.w.h);
    }
#pragma unroll 1
    for (int group = 0; group < 2; ++group) {
      wait(bars.dout_empty(group), parity);
      if (threadIdx.x % 32 != 0) continue;
      copy_tile<T::kChunksV, T::kGroupRows>(maps.dout, a.dout, smem + T::kDoutAt + group * T::kDoutBytes,
                                            bars.dout_full(group), rows(group), item.w.h);
    }
    parity ^= 1;
  });
}

// Third and fourth warp: each streams one of K and V.
template <typename T, bool kIsV>
__device__ __forceinline__ void load_key_tiles(const WideQueryArgs& a, const BwdMaps& maps, uint32_t smem,
                                               const QueryItem* items, WideQueryBarriers<T> bars) {
  constexpr int kChunks = kIsV ? T::kChunksV : T::kChunks, kBytes = kIsV ? T::kVBytes : T::kKBytes;
  RingPosition<kIsV ? T::kVSlots : T::kKSlots> ring;
  ring.parity = 1;
  for_query_items<T>(items, bars, [&](const QueryItem& item) {
    const int head = static_cast<int>(divide(item.w.h, a.grid.shared));
#pragma unroll 1
    for (int block = item.blocks.begin; block < item.blocks.end; ++block) {
      wait(kIsV ? bars.v_empty(ring.slot) : bars.k_empty(ring.slot), ring.parity);
      if (threadIdx.x % 32 == 0) {
        copy_tile<kChunks, T::kBlockN>(kIsV ? maps.v : maps.k, kIsV ? a.v : a.k,
                                       smem + (kIsV ? T::kVAt : T::kKAt) + ring.slot * kBytes,
                                       kIsV ? bars.v_full(ring.slot) : bars.k_full(ring.slot),
                                       row_coordinates(a.p.problem, item.w.k, item.w.b, block * T::kBlockN), head);
        if (!kIsV && a.draw.counter != nullptr && block == item.blocks.end - 1) {
          ptx::mbarrier_arrive(bars.item_ending());  // without draws nobody waits for it
        }
      }
      ring.advance();
    }
  });
}

}  // namespace flash_ext::sm90
