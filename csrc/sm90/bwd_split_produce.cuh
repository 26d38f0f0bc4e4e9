// The producers of the sm90 split backward, four warps. The first one finds out what is next: schedule_items() of
// bwd_produce.cuh, with modifiers schedule_bwd_items() of bwd_mod_produce.cuh. The others load, each its own, and make
// marks where there are modifiers.
#pragma once

#include "bwd_mod_produce.cuh"
#include "bwd_produce.cuh"
#include "bwd_split_config.cuh"

namespace flash_ext::sm90 {

// As for_bwd_steps() of an item with modifiers; one without may have no steps, and is passed by then.
template <typename T, typename Begin, typename Use>
__device__ __forceinline__ void for_plain_steps(const BwdArgs& a, const SplitShared<T>& shared, SplitBarriers<T> bars,
                                                const Begin& begin, const Use& use) {
  static_assert(T::kDrawAhead == 1);
  for_items<T>(shared.items, bars, [&](const BwdItem& item) {
    if (item.steps == 0) return;
    begin(item);
#pragma unroll 1
    for (Walk<T> walk(item); walk.left > 0; walk.advance(item, static_cast<int>(a.grid.shared.divisor))) {
      use(item, BwdStep{walk.block, static_cast<uint32_t>(walk.head) << kHeadAt}, walk.left == 1);
    }
  });
}
template <typename T, typename Begin, typename Use>
__device__ __forceinline__ void for_split_steps(const BwdArgs& a, const SplitShared<T>& shared, SplitBarriers<T> bars,
                                                const Begin& begin, const Use& use) {
  if constexpr (T::kPlain) {
    for_plain_steps<T>(a, shared, bars, begin, use);
  } else {
    for_bwd_steps<T>(shared, bars, begin, use);
  }
}

struct NoMarks {
  __device__ explicit NoMarks(int) {}
  template <typename... Any>
  __device__ __forceinline__ void leave(const Any&...) {}
};
template <typename T>
using SplitMarks = std::conditional_t<T::kPlain, NoMarks, MarkMaker<T>>;

// dK and dV: number 0 has K and V of an item; 1 streams Q, with lse and delta, and beside them the step; 2 streams dO.
template <typename T>
__device__ __forceinline__ void load_dkdv_steps(const typename T::Args& a, const BwdMaps& maps, uint32_t smem,
                                                SplitShared<T>& shared, SplitBarriers<T> bars, int loader) {
  const BwdArgs& plain = a.plain;
  const Problem& p = plain.p.problem;
  SplitMarks<T> marks(loader);
  RingPosition<T::kSlots> ring;  // of Q or of dO
  ring.parity = 1;
  uint32_t item_parity = 1;
  int stale = 0, head_before = -1;  // slots whose keys of dropout are those of another head
  const auto is_first_lane = [] { return threadIdx.x % 32 == 0; };
  const auto begin = [&](const auto& item) {
    head_before = -1;
    if (loader != 0) return;
    const RowCoordinates at = row_coordinates(p, item.w.k, item.w.b, item.w.block * T::kBlockN);
    wait(bars.k_empty(), item_parity);
    if (is_first_lane()) copy_tile<T::kChunks, T::kBlockN>(maps.k, plain.k, smem, bars.k_full(), at, item.w.h);
    wait(bars.v_empty(), item_parity);
    if (is_first_lane()) {
      copy_tile<T::kChunksV, T::kBlockN>(maps.v, plain.v, smem + T::kVAt, bars.v_full(), at, item.w.h);
    }
    item_parity ^= 1;
  };
  const auto load_query = [&](const auto& item, const BwdStep& step, int head, RowCoordinates at, bool is_ending) {
    wait(bars.q_empty(ring.slot), ring.parity);
    if (T::kDrops && head != head_before) stale = T::kSlots;
    head_before = head;
    --stale;
    if (!is_first_lane()) return;
    if constexpr (T::kDrops) {
      if (stale >= 0) shared.drop[ring.slot].make(a.m, item.seat.b, head);
    }
    const uint32_t full = bars.q_full(ring.slot);
    const int64_t tile = item.tile + static_cast<int64_t>(step.head()) * plain.tiles_per_head + step.block;
    copy_tile<T::kChunks, T::kBlockM>(maps.q, plain.q, smem + T::kQAt + ring.slot * T::kQBytes, full, at, head);
    ptx::mbarrier_arrive_expect_tx(full, T::kStatsBytes);
    ptx::bulk_load(smem + T::kStatsAt + ring.slot * T::kStatsBytes, plain.p.row_stats + tile * (2 * T::kBlockM),
                   T::kStatsBytes, full);
    if constexpr (!T::kPlain) {
      shared.steps[ring.slot] = step;
      ptx::mbarrier_arrive(full);
    }
    if (plain.draw.counter != nullptr && is_ending) ptx::mbarrier_arrive(bars.item_ending());
  };
  const auto load_dout = [&](int head, RowCoordinates at) {
    wait(bars.dout_empty(ring.slot), ring.parity);
    if (!is_first_lane()) return;
    copy_tile<T::kChunksV, T::kBlockM>(maps.dout, plain.dout, smem + T::kDoutAt + ring.slot * T::kDoutBytes,
                                       bars.dout_full(ring.slot), at, head);
  };
  for_split_steps<T>(plain, shared, bars, begin, [&](const auto& item, const BwdStep& step, bool is_ending) {
    marks.leave(a, shared, bars, item, step);  // before the wait for a place: marks take longer than is left then
    if (loader > 0) {
      const RowCoordinates at = row_coordinates(p, item.w.q, item.w.b, step.block * T::kBlockM);
      const int head = item.w.h * static_cast<int>(plain.grid.shared.divisor) + step.head();
      if (loader == 1) {
        load_query(item, step, head, at, is_ending);
      } else {
        load_dout(head, at);
      }
      __syncwarp();
      ring.advance();
    }
  });
}

// dQ: number 0 has Q and dO of an item; 1 streams K, and beside it the step; 2 streams V.
template <typename T>
__device__ __forceinline__ void load_dq_steps(const typename T::Args& a, const BwdMaps& maps, uint32_t smem,
                                              SplitShared<T>& shared, SplitBarriers<T> bars, int loader) {
  const BwdArgs& plain = a.plain;
  const Problem& p = plain.p.problem;
  SplitMarks<T> marks(loader);
  RingPosition<T::kKSlots> k_ring;
  RingPosition<T::kVSlots> v_ring;
  k_ring.parity = v_ring.parity = 1;
  uint32_t item_parity = 1;
  const auto is_first_lane = [] { return threadIdx.x % 32 == 0; };
  const auto begin = [&](const auto& item) {
    if (loader != 0) return;
    if constexpr (T::kDrops) {
      if (is_first_lane()) shared.drop[&item - shared.items].make(a.m, item.seat.b, item.first_head);
    }
    const auto load = [&](auto chunks, const CUtensorMap& map, const Steps& steps, uint32_t to, uint32_t full,
                          uint32_t empty, int group) {
      wait(empty, item_parity);
      if (!is_first_lane()) return;
      const RowCoordinates at =
          row_coordinates(p, item.w.q, item.w.b, item.w.block * T::kBlockM + group * T::kGroupRows);
      copy_tile<decltype(chunks)::value, T::kGroupRows>(map, steps, to, full, at, item.w.h);
    };
#pragma unroll 1
    for (int group = 0; group < 2; ++group) {
      load(std::integral_constant<int, T::kChunks>{}, maps.q, plain.q, smem + group * T::kQBytes, bars.q_full(group),
           bars.q_empty(group), group);
    }
#pragma unroll 1
    for (int group = 0; group < 2; ++group) {
      load(std::integral_constant<int, T::kChunksV>{}, maps.dout, plain.dout,
           smem + T::kDoutAt + group * T::kDoutBytes, bars.dout_full(group), bars.dout_empty(group), group);
    }
    item_parity ^= 1;
  };
  for_split_steps<T>(plain, shared, bars, begin, [&](const auto& item, const BwdStep& step, bool is_ending) {
    marks.leave(a, shared, bars, item, step);  // before the wait for a place: marks take longer than is left then
    if (loader > 0) {
      const RowCoordinates at = row_coordinates(p, item.w.k, item.w.b, step.block * T::kBlockN);
      const int head = static_cast<int>(divide(item.w.h, plain.grid.shared));
      if (loader == 1) {
        wait(bars.k_empty(k_ring.slot), k_ring.parity);
        if (is_first_lane()) {
          const uint32_t full = bars.k_full(k_ring.slot);
          copy_tile<T::kChunks, T::kBlockN>(maps.k, plain.k, smem + T::kKAt + k_ring.slot * T::kKBytes, full, at, head);
          if constexpr (!T::kPlain) {
            shared.steps[k_ring.slot] = step;
            ptx::mbarrier_arrive(full);
          }
          if (plain.draw.counter != nullptr && is_ending) ptx::mbarrier_arrive(bars.item_ending());
        }
        k_ring.advance();
      } else {
        wait(bars.v_empty(v_ring.slot), v_ring.parity);
        if (is_first_lane()) {
          copy_tile<T::kChunksV, T::kBlockN>(maps.v, plain.v, smem + T::kVAt + v_ring.slot * T::kVBytes,
                                             bars.v_full(v_ring.slot), at, head);
        }
        v_ring.advance();
      }
      __syncwarp();
    }
  });
}

}  // namespace flash_ext::sm90
