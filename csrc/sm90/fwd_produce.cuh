// The producers of the sm90 forward: two warps, because one would spill in its 24 registers a thread.
#pragma once

#include "../common/float_results.cuh"
#include "fwd_parts.cuh"

namespace flash_ext::sm90 {

// Rows that no key is visited for: output 0, their lse, and maxima where those are wanted. Consumers meet items with
// tiles only.
template <typename T>
__device__ __forceinline__ void store_empty(const FwdParams& p, const Work& w, float lse, float* row_max, int lane) {
  const int first_row = w.block * T::kBlockM, rows = min(T::kBlockM, w.q.length - first_row);
  const int64_t stat = row_stat_offset(p.problem, w, w.h) + first_row;
#pragma unroll 1
  for (int row = lane; row < rows; row += 32) {
    p.lse[stat + row] = lse;
    if (row_max != nullptr) row_max[stat + row] = -INFINITY;
  }
  // In a loop of its own: there are no registers for one loop over both.
  zero_rows(p.out, w.b, w.q.start + first_row, w.h, rows, p.problem.head_dim_v, lane);
}

template <int kChunks, int kRows>
__device__ __forceinline__ void copy_tile(const CUtensorMap& map, const Steps& steps, uint32_t to, uint32_t bar,
                                          RowCoordinates at, int h) {
  h *= steps.head;
  at.outer *= steps.batch;
  ptx::mbarrier_arrive_expect_tx(bar, kChunks * kRows * 128);
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
    ptx::tma_load_5d(to + i * kRows * 128, &map, bar, 64 * i, at.row, h, at.outer, at.outermost);
  }
}

// Q of an item, by one lane.
template <typename T>
__device__ __forceinline__ void copy_q(const FwdArgs& a, const FwdMaps& maps, uint32_t smem, uint32_t bar, int slot,
                                       const Work& w) {
  copy_tile<T::kChunks, T::kBlockM>(maps.q, a.q_steps, smem + T::kQAt + slot * T::kQBytes, bar,
                                    row_coordinates(a.p.problem, w.q, w.b, w.block * T::kBlockM), w.h);
}

inline constexpr int kDrawAhead = 3;  // tiles of an item still to load when the next one is drawn

// First warp: decides what is next, loads its Q.
template <typename T>
__device__ __forceinline__ void schedule_items(const FwdArgs& a, const FwdMaps& maps, uint32_t smem, Item* items,
                                               Barriers<T> bars) {
  const Problem& p = a.p.problem;
  const int lane = threadIdx.x % 32;
  const bool draws = a.draw.counter != nullptr;
  if (draws && lane == 0) own_counter(a.draw);
  RingPosition<T::kQSlots> q_ring;
  RingPosition<T::kItems> place;
  q_ring.parity = 1;  // the first wait for an empty slot passes
  uint32_t index = blockIdx.x;
  int stretch_end = 0;  // of the tiles of the same item that are left; 0: none
#pragma unroll 1
  while (index < a.draw.num_items) {
    const Work w = decode_index<T::kBlockM, true, true, true, true>(index, p, a.grid, nullptr);
    if (w.active) {
      BlockRange blocks = AttnMod{p, w.q.length, w.k.length}.template kv_blocks<T::kBlockM, T::kBlockN>(w.block);
      if (blocks.begin < blocks.end) {
        if (w.k.length > kStretches.above) {
          // Stretches of one tile of queries are items of their own, from the last one on.
          constexpr int kStretch = kStretches.keys / T::kBlockN;
          if (stretch_end > 0) blocks.end = stretch_end;
          const int begin = (blocks.end - 1) / kStretch * kStretch;
          stretch_end = begin > blocks.begin ? begin : 0;
          blocks.begin = max(blocks.begin, begin);
        }
        wait(bars.q_empty(q_ring.slot), q_ring.parity);
        if (lane == 0) {
          items[place.slot] = {w, blocks};
          ptx::mbarrier_arrive(bars.item_full(place.slot));
          copy_q<T>(a, maps, smem, bars.q_full(q_ring.slot), q_ring.slot, w);
        }
        q_ring.advance();
        static_assert(T::kItems % 2 == 0);  // places then tell the parity of item_ending
        if (draws) wait(bars.item_ending(), place.slot % 2);
        place.advance();
        if (stretch_end > 0) continue;
      } else {
        store_empty<T>(a.p, w, -INFINITY, nullptr, lane);
      }
    }
    uint32_t next = index + gridDim.x;
    if (draws && lane == 0) next = draw_item(a.draw);
    index = draws ? __shfl_sync(ptx::kFullWarp, next, 0) : next;
  }
  wait(bars.q_empty(q_ring.slot), q_ring.parity);
  if (lane == 0) {
    items[place.slot].w.block = -1;
    ptx::mbarrier_arrive(bars.item_full(place.slot));
    ptx::mbarrier_arrive(bars.q_full(q_ring.slot));
  }
}

// Second warp: streams K and V through the ring in the order of use, K0, K1, V0, K2, V1, ... without a seam between
// items. As fwd_mod_produce.cuh has it, in a struct, it makes ptxas order the code of the consumers otherwise: 0.98 of the
// speed at head sizes (192, 128).
template <typename T>
__device__ __forceinline__ void load_tiles(const FwdArgs& a, const FwdMaps& maps, uint32_t smem, const Item* items,
                                           Barriers<T> bars) {
  const Problem& p = a.p.problem;
  const int lane = threadIdx.x % 32;
  RingPosition<T::kKvSlots> ring;
  RingPosition<T::kItems> place;
  ring.parity = 1;
  const auto load_k = [&](RowCoordinates at, int h) {
    wait(bars.kv_empty(ring.slot), ring.parity);
    const uint32_t to = smem + ring.slot * T::kSlotBytes;
    if (lane == 0) copy_tile<T::kChunks, T::kBlockN>(maps.k, a.k_steps, to, bars.kv_full(ring.slot), at, h);
    ring.advance();
  };
  const auto load_v = [&](RowCoordinates at, int h) {
    wait(bars.kv_empty(ring.slot), ring.parity);
    const uint32_t to = smem + ring.slot * T::kSlotBytes;
    if (lane == 0) copy_tile<T::kChunksV, T::kBlockN>(maps.v, a.v_steps, to, bars.kv_full(ring.slot), at, h);
    ring.advance();
  };
  int v_h = -1;  // head of the V tile that is still to load
  RowCoordinates v_at{};
#pragma unroll 1
  while (true) {
    wait(bars.item_full(place.slot), place.parity);
    const Item& item = items[place.slot];
    if (item.w.block < 0) break;
    place.advance();
    const int h = static_cast<int>(divide(item.w.h, a.grid.shared));
    const int tiles = item.blocks.end - item.blocks.begin;
    RowCoordinates at = row_coordinates(p, item.w.k, item.w.b, item.blocks.end * T::kBlockN);
#pragma unroll 1
    for (int left = tiles; left > 0; --left) {
      // The next item is drawn as late as its Q can wait: one drawn early is kept from a CTA that is free before.
      const bool draws = a.draw.counter != nullptr;  // else nobody waits for that
      if (draws && left == min(kDrawAhead, tiles) && lane == 0) ptx::mbarrier_arrive(bars.item_ending());
      at.row -= T::kBlockN;
      load_k(at, h);
      if (v_h >= 0) load_v(v_at, v_h);
      v_at = at;
      v_h = h;
    }
  }
  if (v_h >= 0) load_v(v_at, v_h);
}

}  // namespace flash_ext::sm90
