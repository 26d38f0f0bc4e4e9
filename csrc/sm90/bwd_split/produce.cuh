// The producers of the sm90 split backward, four warps. The first one finds out what is next: schedule_work() of
// bwd/produce.cuh, with modifiers schedule_bwd_work() of bwd_mod/produce.cuh. The others load, each its own, and make
// mask words where there are modifiers.
#pragma once

#include "../bwd/produce.cuh"
#include "../bwd_mod/produce.cuh"
#include "config.cuh"

namespace flash_ext::sm90 {

// As for_bwd_steps() of a work tile with modifiers; one without may have no steps, and is passed by then.
template <typename T, typename Begin, typename Use>
__device__ __forceinline__ void for_plain_steps(const BwdArgs& a, const SplitShared<T>& shared, SplitBarriers<T> bars,
                                                const Begin& begin, const Use& use) {
  static_assert(T::kFetchAhead == 1);
  for_work_tiles<T>(shared.work_tiles, bars, [&](const BwdWorkTile& work) {
    if (work.steps == 0) return;
    begin(work);
#pragma unroll 1
    for (Walk<T> walk(work); walk.left > 0; walk.advance(work, static_cast<int>(a.grid.shared.divisor))) {
      use(work, BwdStep{walk.block, static_cast<uint32_t>(walk.head) << kHeadAt}, walk.left == 1);
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

struct NoMaskWords {
  __device__ explicit NoMaskWords(int) {}
  template <typename... Any>
  __device__ __forceinline__ void leave(const Any&...) {}
};
template <typename T>
using SplitMaskWords = std::conditional_t<T::kPlain, NoMaskWords, MaskWordMaker<T>>;

// dK and dV: number 0 has K and V of a work tile; 1 streams Q, with lse and delta, and beside them the step; 2 streams
// dO.
template <typename T>
__device__ __forceinline__ void load_dkdv_steps(const typename T::Args& a, const BwdMaps& maps, uint32_t smem,
                                                SplitShared<T>& shared, SplitBarriers<T> bars, int loader) {
  const BwdArgs& plain = a.plain;
  const Problem& p = plain.p.problem;
  SplitMaskWords<T> mask_words(loader);
  PipelineState<T::kStages> ring;  // of Q or of dO
  ring.phase = 1;
  uint32_t work_phase = 1;
  int stale = 0, head_before = -1;  // stages whose keys of dropout are those of another head
  const auto is_first_lane = [] { return threadIdx.x % 32 == 0; };
  const auto begin = [&](const auto& work) {
    head_before = -1;
    if (loader != 0) return;
    const RowCoordinates at = row_coordinates(p, work.w.k, work.w.b, work.w.block * T::kBlockN);
    wait(bars.k_empty(), work_phase);
    if (is_first_lane()) copy_tile<T::kChunks, T::kBlockN>(maps.k, plain.k, smem, bars.k_full(), at, work.w.h);
    wait(bars.v_empty(), work_phase);
    if (is_first_lane()) {
      copy_tile<T::kChunksV, T::kBlockN>(maps.v, plain.v, smem + T::kVAt, bars.v_full(), at, work.w.h);
    }
    work_phase ^= 1;
  };
  const auto load_query = [&](const auto& work, const BwdStep& step, int head, RowCoordinates at, bool is_ending) {
    wait(bars.q_empty(ring.stage), ring.phase);
    if (T::kDrops && head != head_before) stale = T::kStages;
    head_before = head;
    --stale;
    if (!is_first_lane()) return;
    if constexpr (T::kDrops) {
      if (stale >= 0) shared.drop[ring.stage].make(a.m, work.seq.b, head);
    }
    const uint32_t full = bars.q_full(ring.stage);
    const int64_t tile = work.tile + static_cast<int64_t>(step.head()) * plain.tiles_per_head + step.block;
    copy_tile<T::kChunks, T::kBlockM>(maps.q, plain.q, smem + T::kQAt + ring.stage * T::kQBytes, full, at, head);
    ptx::mbarrier_arrive_expect_tx(full, T::kStatsBytes);
    ptx::bulk_load(smem + T::kStatsAt + ring.stage * T::kStatsBytes, plain.p.row_stats + tile * (2 * T::kBlockM),
                   T::kStatsBytes, full);
    if constexpr (!T::kPlain) {
      shared.steps[ring.stage] = step;
      ptx::mbarrier_arrive(full);
    }
    if (plain.scheduler.counter != nullptr && is_ending) ptx::mbarrier_arrive(bars.work_ending());
  };
  const auto load_dout = [&](int head, RowCoordinates at) {
    wait(bars.dout_empty(ring.stage), ring.phase);
    if (!is_first_lane()) return;
    copy_tile<T::kChunksV, T::kBlockM>(maps.dout, plain.dout, smem + T::kDoutAt + ring.stage * T::kDoutBytes,
                                       bars.dout_full(ring.stage), at, head);
  };
  for_split_steps<T>(plain, shared, bars, begin, [&](const auto& work, const BwdStep& step, bool is_ending) {
    // Before the wait for a place: mask words take longer than is left then.
    mask_words.leave(a, shared, bars, work, step);
    if (loader > 0) {
      const RowCoordinates at = row_coordinates(p, work.w.q, work.w.b, step.block * T::kBlockM);
      const int head = work.w.h * static_cast<int>(plain.grid.shared.divisor) + step.head();
      if (loader == 1) {
        load_query(work, step, head, at, is_ending);
      } else {
        load_dout(head, at);
      }
      __syncwarp();
      ring.advance();
    }
  });
}

// dQ: number 0 has Q and dO of a work tile; 1 streams K, and beside it the step; 2 streams V.
template <typename T>
__device__ __forceinline__ void load_dq_steps(const typename T::Args& a, const BwdMaps& maps, uint32_t smem,
                                              SplitShared<T>& shared, SplitBarriers<T> bars, int loader) {
  const BwdArgs& plain = a.plain;
  const Problem& p = plain.p.problem;
  SplitMaskWords<T> mask_words(loader);
  PipelineState<T::kKStages> k_ring;
  PipelineState<T::kVStages> v_ring;
  k_ring.phase = v_ring.phase = 1;
  uint32_t work_phase = 1;
  const auto is_first_lane = [] { return threadIdx.x % 32 == 0; };
  const auto begin = [&](const auto& work) {
    if (loader != 0) return;
    if constexpr (T::kDrops) {
      if (is_first_lane()) shared.drop[&work - shared.work_tiles].make(a.m, work.seq.b, work.first_head);
    }
    const auto load = [&](auto chunks, const CUtensorMap& map, const Steps& steps, uint32_t to, uint32_t full,
                          uint32_t empty, int group) {
      wait(empty, work_phase);
      if (!is_first_lane()) return;
      const RowCoordinates at =
          row_coordinates(p, work.w.q, work.w.b, work.w.block * T::kBlockM + group * T::kGroupRows);
      copy_tile<decltype(chunks)::value, T::kGroupRows>(map, steps, to, full, at, work.w.h);
    };
#pragma unroll 1
    for (int group = 0; group < 2; ++group) {
      load(std::integral_constant<int, T::kChunks>{}, maps.q, plain.q, smem + group * T::kQBytes, bars.q_full(group),
           bars.q_empty(group), group);
    }
#pragma unroll 1
    for (int group = 0; group < 2; ++group) {
      load(std::integral_constant<int, T::kChunksV>{}, maps.dout, plain.dout, smem + T::kDoutAt + group * T::kDoutBytes,
           bars.dout_full(group), bars.dout_empty(group), group);
    }
    work_phase ^= 1;
  };
  for_split_steps<T>(plain, shared, bars, begin, [&](const auto& work, const BwdStep& step, bool is_ending) {
    // Before the wait for a place: mask words take longer than is left then.
    mask_words.leave(a, shared, bars, work, step);
    if (loader > 0) {
      const RowCoordinates at = row_coordinates(p, work.w.k, work.w.b, step.block * T::kBlockN);
      const int head = static_cast<int>(divide(work.w.h, plain.grid.shared));
      if (loader == 1) {
        wait(bars.k_empty(k_ring.stage), k_ring.phase);
        if (is_first_lane()) {
          const uint32_t full = bars.k_full(k_ring.stage);
          copy_tile<T::kChunks, T::kBlockN>(maps.k, plain.k, smem + T::kKAt + k_ring.stage * T::kKBytes, full, at,
                                            head);
          if constexpr (!T::kPlain) {
            shared.steps[k_ring.stage] = step;
            ptx::mbarrier_arrive(full);
          }
          if (plain.scheduler.counter != nullptr && is_ending) ptx::mbarrier_arrive(bars.work_ending());
        }
        k_ring.advance();
      } else {
        wait(bars.v_empty(v_ring.stage), v_ring.phase);
        if (is_first_lane()) {
          copy_tile<T::kChunksV, T::kBlockN>(maps.v, plain.v, smem + T::kVAt + v_ring.stage * T::kVBytes,
                                             bars.v_full(v_ring.stage), at, head);
        }
        v_ring.advance();
      }
      __syncwarp();
    }
  });
}

}  // namespace flash_ext::sm90
