// The producers of the sm90 backward: four warps with a job each, because one would spill in 24 registers.
#pragma once

#include "dq_pool.cuh"

namespace flash_ext::sm90 {

// K and V of a work tile.
template <typename T>
__device__ __forceinline__ void load_keys_of(const BwdArgs& a, const BwdMaps& maps, uint32_t smem,
                                             const BwdWorkTile& work, BwdBarriers<T> bars, uint32_t& phase) {
  if (work.steps == 0) return;
  const RowCoordinates at = row_coordinates(a.p.problem, work.w.k, work.w.b, work.w.block * T::kBlockN);
  const auto load = [&](const CUtensorMap& map, const Steps& steps, uint32_t to, uint32_t full, uint32_t empty) {
    constexpr int kRows = T::kPartRows;
    wait(empty, phase);
    if (threadIdx.x % 32 != 0) return;
#pragma unroll
    for (int part = 0; part < T::kKeyParts; ++part) {
      copy_tile<T::kChunks, kRows>(map, steps, to + part * T::kChunks * kRows * 128, full,
                                   {at.row + kRows * part, at.outer, at.outermost}, work.w.h);
    }
  };
  if constexpr (T::kPlacesSwap) {
    const int k_place = phase ^ 1, v_place = phase;
    load(maps.k, a.k, smem + k_place * T::kVAt, bars.place_full(k_place), bars.place_empty(k_place));
    load(maps.v, a.v, smem + v_place * T::kVAt, bars.place_full(v_place), bars.place_empty(v_place));
  } else {
    load(maps.k, a.k, smem, bars.k_full(), bars.k_empty());
    load(maps.v, a.v, smem + T::kVAt, bars.v_full(), bars.v_empty());
  }
  phase ^= 1;
}

// Whether every work tile is fetched, the first of a CTA too.
template <typename T>
__device__ __forceinline__ bool fetches_in_order(const BwdArgs& a) {
  return T::kOrdered || (T::kPool && !T::kDivides && a.pool.words != nullptr);
}

// The work tile behind `present`, or the first one where `present` is below 0; where nothing is left, one that is too
// large. Of those that a CTA has a part of the last one comes first, whose sums another CTA waits for: that one needs
// them for its last one. CTAs wait for those before them alone, which have begun.
__device__ __forceinline__ uint32_t next_static_tile(const StreamK& s, const TileScheduler& d, int present) {
  const uint32_t next = present < 0 ? blockIdx.x : present + gridDim.x;
  if (s.sums == nullptr || next < s.first) return next;
  const uint32_t begin = ptx::fresh_block_idx() * s.share;
  if (begin >= s.all) return d.num_work_tiles;
  if (present < static_cast<int>(s.first)) return s.first + divide(min(begin + s.share, s.all) - 1, s.steps);
  return (present - s.first) * s.steps.divisor > begin ? present - 1 : d.num_work_tiles;
}

// The steps of a work tile that are this CTA's. Each query head has a key head, and each tile of queries is a step.
__device__ __forceinline__ void take_share(const StreamK& s, BwdWorkTile& work) {
  if (s.sums == nullptr || work.index < s.first) return;
  const int at = blockIdx.x * s.share - (work.index - s.first) * s.steps.divisor, steps = s.steps.divisor;
  const int begin = max(at, 0), end = min(at + static_cast<int>(s.share), steps);
  work.share = end < steps ? BwdWorkTile::kGives : begin > 0 ? BwdWorkTile::kTakes : BwdWorkTile::kWhole;
  work.steps = end - begin;
  work.first += work.first + begin < steps ? begin : begin - steps;
}

// The steps of a work tile of one query head that are a split's.
__device__ __forceinline__ void take_query_split(const BwdArgs& a, int split, BwdWorkTile& work) {
  if (a.query_splits.divisor == 1) return;
  const int begin = static_cast<int>(divide(static_cast<uint32_t>(work.steps * split), a.query_splits));
  const int end = static_cast<int>(divide(static_cast<uint32_t>(work.steps * (split + 1)), a.query_splits));
  work.first += begin;
  work.steps = end - begin;
  work.round = split;
}

// First warp: decides what is next. In the kernel of bwd/kernel.cuh it loads K and V as well.
template <typename T, typename Bars>
__device__ __forceinline__ void schedule_work(const BwdArgs& a, const BwdMaps& maps, uint32_t smem,
                                              BwdWorkTile* work_tiles, Bars bars) {
  const Problem& p = a.p.problem;
  const int lane = threadIdx.x % 32;
  const bool in_order = fetches_in_order<T>(a);
  const bool dynamic = in_order || (!T::kDivides && a.scheduler.counter != nullptr);
  if (in_order && lane == 0) claim_counter(a.scheduler);
  PipelineState<T::kWorkStages> work_ring;
  work_ring.phase = 1;  // the first wait for an empty stage passes
  [[maybe_unused]] uint32_t kv_phase = 1;
  const auto fetch = [&] {
    uint32_t next = 0;
    if (lane == 0) {
      next = in_order ? fetch_in_order(a.scheduler) : claim_and_fetch(a.scheduler, work_tiles[0].index);
    }
    return __shfl_sync(ptx::kFullWarp, next, 0);
  };
  uint32_t index = blockIdx.x;
  if constexpr (T::kDivides) index = next_static_tile(a.stream_k, a.scheduler, -1);
  if (in_order) index = fetch();
#pragma unroll 1
  while (index < a.scheduler.num_work_tiles) {
    // Until the next one is fetched.
    if (!T::kDivides && dynamic && ptx::fresh_lane() == 0) work_tiles[0].index = index;
    int b = 0;
    uint32_t tile_index = index;
    if constexpr (T::kUnits) tile_index = divide(index, a.query_splits);
    Work w = decode_index<T::kOwnRows, T::kByQueries, T::kByQueries>(tile_index, p, a.grid, &b);
    if constexpr (T::kUnits) w.h *= a.unit_heads;
    if (w.active) {
      wait(bars.work_empty(work_ring.stage), work_ring.phase);
      debug_delay();
      if ((T::kDivides || T::kUnits ? ptx::fresh_lane() : lane) == 0) {
        BwdWorkTile& work = work_tiles[work_ring.stage];
        work.w = w;
        if constexpr (T::kDivides) work.index = index;
        const int first_head = T::kByQueries ? w.h : w.h * static_cast<int>(a.grid.shared.divisor);
        work.tile = static_cast<int>(first_tile<T::kStatRows>(p, w, b, first_head, a.tiles_per_head));
        if constexpr (T::kPool) place_in_pool(a.pool, work);
        asm volatile("" ::: "memory");  // reads it again below: not enough registers to keep it
        const AttnMod mod{p, work.w.q.length, work.w.k.length};
        if constexpr (T::kByQueries) {
          work.blocks = mod.template kv_blocks<T::kBlockM, T::kBlockN>(work.w.block);
        } else {
          work.blocks = mod.template q_blocks<T::kBlockM, T::kBlockN>(work.w.block);
        }
        const uint32_t count = max(work.blocks.end - work.blocks.begin, 0);
        const bool rotates = !T::kByQueries && count != 0;
        const uint32_t late = rotates ? static_cast<uint32_t>(work.w.block * a.rotate) % count : 0;
        work.first = T::kOrdered ? work.blocks.end - 1 : work.blocks.begin + static_cast<int>(late);
        work.steps = static_cast<int>(T::kByQueries ? count : count * a.grid.shared.divisor);
        if constexpr (T::kDivides) {
          work.share = BwdWorkTile::kWhole;
          take_share(a.stream_k, work);
        }
        if constexpr (T::kUnits) take_query_split(a, index - tile_index * a.query_splits.divisor, work);
        if constexpr (T::kPool) {
          const uint32_t* word = round_before(a.pool, work);
          uint32_t awaited = a.pool.round_tiles.divisor;
          if (T::kDivides && work.share == BwdWorkTile::kTakes) {
            word = a.stream_k.words + (work.index - a.stream_k.first);
            awaited = T::kConsumerWarps;
          }
          if (word != nullptr) wait_for_count(word, awaited);
        }
        ptx::mbarrier_arrive(bars.work_full(work_ring.stage));
        const bool is_empty = T::kUnits ? work.steps == 0 : count == 0;
        if (dynamic && is_empty) ptx::mbarrier_arrive(bars.work_ending());
      }
      if constexpr (T::kSchedulerLoadsKeys) {
        __syncwarp();
        load_keys_of<T>(a, maps, smem, work_tiles[work_ring.stage], bars, kv_phase);
      }
      static_assert(T::kWorkStages % 2 == 0);  // stages then tell the phase of work_ending
      if (dynamic) wait(bars.work_ending(), work_ring.stage % 2);
      if constexpr (T::kDivides) index = work_tiles[work_ring.stage].index;
      work_ring.advance();
      if constexpr (T::kUnits) {
#pragma unroll 1
        for (int left = a.unit_heads; --left > 0;) {
          wait(bars.work_empty(work_ring.stage), work_ring.phase);
          // A lane copies a word of the work tile before, but of the last one, which is the scheduler's: registers are
          // short.
          static_assert(sizeof(BwdWorkTile) <= 4 * 32 && T::kWorkStages == 2);
          static_assert(offsetof(BwdWorkTile, round) + 8 == sizeof(BwdWorkTile), "share and index are the last word");
          if (const int word = ptx::fresh_lane(); word + 1 < static_cast<int>(sizeof(BwdWorkTile) / 4)) {
            reinterpret_cast<uint32_t*>(&work_tiles[work_ring.stage])[word] =
                reinterpret_cast<const uint32_t*>(&work_tiles[work_ring.stage ^ 1])[word];
          }
          __syncwarp();
          if (ptx::fresh_lane() == 0) {
            BwdWorkTile& work = work_tiles[work_ring.stage];
            ++work.w.h;
            work.tile += static_cast<int>(a.grid.shared.divisor) * a.tiles_per_head;
            ptx::mbarrier_arrive(bars.work_full(work_ring.stage));
            if (dynamic && work.steps == 0) ptx::mbarrier_arrive(bars.work_ending());
          }
          __syncwarp();
          load_keys_of<T>(a, maps, smem, work_tiles[work_ring.stage], bars, kv_phase);
          if (dynamic) wait(bars.work_ending(), work_ring.stage % 2);
          work_ring.advance();
        }
      }
    }
    if (dynamic) index = fetch();
    else if constexpr (T::kDivides) index = next_static_tile(a.stream_k, a.scheduler, static_cast<int>(index));
    else index += gridDim.x;
  }
  wait(bars.work_empty(work_ring.stage), work_ring.phase);
  if (lane == 0) {
    work_tiles[work_ring.stage].w.block = -1;
    ptx::mbarrier_arrive(bars.work_full(work_ring.stage));
  }
}

// What the other producers do for every work tile.
template <typename T, typename Bars, typename Use>
__device__ __forceinline__ void for_work_tiles(const BwdWorkTile* work_tiles, Bars bars, const Use& use) {
  PipelineState<T::kWorkStages> work_ring;
#pragma unroll 1
  while (true) {
    wait(bars.work_full(work_ring.stage), work_ring.phase);
    const BwdWorkTile& work = work_tiles[work_ring.stage];
    if (work.w.block < 0) break;
    use(work);
    __syncwarp();
    ptx::mbarrier_arrive_for_warp(bars.work_empty(work_ring.stage), threadIdx.x % 32 == 0);
    work_ring.advance();
  }
}

// What they do for every tile of queries of every work tile: use(work, walk, stage of the ring).
template <typename T, typename Use>
__device__ __forceinline__ void for_tiles(const BwdArgs& a, const BwdWorkTile* work_tiles, BwdBarriers<T> bars,
                                          const Use& use) {
  PipelineState<T::kStages> ring;
  ring.phase = 1;
  for_work_tiles<T>(work_tiles, bars, [&](const BwdWorkTile& work) {
#pragma unroll 1
    for (Walk<T> walk(work); walk.left > 0; walk.advance(work, static_cast<int>(a.grid.shared.divisor))) {
      use(work, walk, ring);
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
__device__ __forceinline__ void pass_dq_semaphores(const BwdArgs& a, uint32_t smem, const BwdWorkTile* work_tiles,
                                                   BwdBarriers<T> bars, int group) {
  constexpr int kBytes = T::kBlockM * T::kHeadDim * 4;
  const int lane = threadIdx.x % 32;
  uint32_t phase = 0;
  for_work_tiles<T>(work_tiles, bars, [&](const BwdWorkTile& work) {
    const int turn = work.w.block * T::kDqStages + group;
    BlockRange tiles = work.blocks;
    if constexpr (T::kIndependent) {
      const AttnMod mod{a.p.problem, work.w.q.length, work.w.k.length};
      tiles = mod.template q_blocks<T::kBlockM, BwdTile::kOrderedKeys>(turn);
      if (turn * BwdTile::kOrderedKeys >= work.w.k.length) return;
    }
#pragma unroll 1
    for (int head = 0; head < static_cast<int>(a.grid.shared.divisor); ++head) {
      uint32_t* word = a.dq_semaphore + work.tile + head * a.tiles_per_head + tiles.end - 1;
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
        const bool here = __any_sync(ptx::kFullWarp, ptx::mbarrier_test_wait(bars.dq_full(group), phase));
        if (held > 0 && (!here || (T::kStaged && come == 0))) pass_on();
        if constexpr (T::kStaged) {
          if (come == 0) come = wait_dq_semaphores(word, turn, min(T::kSemaphoresAtOnce, left), &firsts);
          ptx::fence_proxy_async_global();
        }
        wait(bars.dq_full(group), phase);
        phase ^= 1;
        if (lane == 0) {
          if constexpr (T::kStaged) {
            float* to = a.p.dq_accum + (word - a.dq_semaphore) * (T::kBlockM * T::kHeadDim);
            const uint32_t from = smem + T::kStagingAt + group * kBytes;
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
__device__ __forceinline__ void load_queries(const BwdArgs& a, const BwdMaps& maps, uint32_t smem,
                                             const BwdWorkTile* work_tiles, BwdBarriers<T> bars) {
  for_tiles<T>(
      a, work_tiles, bars, [&](const BwdWorkTile& work, const Walk<T>& walk, const PipelineState<T::kStages>& ring) {
        wait(bars.q_empty(ring.stage), ring.phase);
        if constexpr (T::kQueriesLoadDouts) wait(bars.dout_empty(ring.stage), ring.phase);
        if (threadIdx.x % 32 != 0) return;
        const int h = work.w.h * static_cast<int>(a.grid.shared.divisor) + walk.head;
        const int64_t tile = work.tile + static_cast<int64_t>(walk.head) * a.tiles_per_head + walk.block;
        const uint32_t full = bars.q_full(ring.stage);
        const RowCoordinates at = row_coordinates(a.p.problem, work.w.q, work.w.b, walk.block * T::kBlockM);
        copy_tile<T::kChunks, T::kBlockM>(maps.q, a.q, smem + T::kQAt + ring.stage * T::kQBytes, full, at, h);
        if (T::kMayMakeStats && a.makes_stats) {
          copy_tile<T::kChunks, T::kBlockM>(maps.out, a.out, smem + T::kDsAt + ring.stage * T::kDsBytes, full, at, h);
        } else {
          ptx::mbarrier_arrive_expect_tx(full, T::kStatsBytes);
          ptx::bulk_load(smem + T::kStatsAt + ring.stage * T::kStatsBytes, a.p.row_stats + tile * (2 * T::kBlockM),
                         T::kStatsBytes, full);
        }
        if constexpr (T::kQueriesLoadDouts) {
          copy_tile<T::kChunks, T::kBlockM>(maps.dout, a.dout, smem + T::kDoutAt + ring.stage * T::kQBytes,
                                            bars.dout_full(ring.stage), at, h);
        }
        const bool dynamic = fetches_in_order<T>(a) || a.scheduler.counter != nullptr;  // else nobody waits for that
        if (dynamic && walk.left == min(T::kFetchAhead, work.steps)) {
          ptx::mbarrier_arrive(bars.work_ending());
        }
      });
}

// Fourth warp where consumers may make the statistics of rows: brings lse and its gradient.
template <typename T>
__device__ __forceinline__ void load_lse(const BwdArgs& a, uint32_t smem, const BwdWorkTile* work_tiles,
                                         BwdBarriers<T> bars) {
  const int lane = threadIdx.x % 32;
  for_tiles<T>(a, work_tiles, bars,
               [&](const BwdWorkTile& work, const Walk<T>& walk, const PipelineState<T::kStages>& ring) {
                 wait(bars.q_empty(ring.stage), ring.phase);
                 if (a.makes_stats) {
                   const int h = work.w.h * static_cast<int>(a.grid.shared.divisor) + walk.head;
                   const int64_t first = row_stat_offset(a.p.problem, work.w, h);
#pragma unroll
                   for (int i = 0; i < 2 * T::kBlockM; i += 32) {
                     const int row = walk.block * T::kBlockM + i % T::kBlockM + lane;
                     const float* const from = i < T::kBlockM ? a.p.lse : a.p.dlse;
                     const bool is_there = row < work.w.q.length && from != nullptr;
                     ptx::cp_async_4(smem + T::kStatsAt + ring.stage * T::kStatsBytes + 4 * (i + lane),
                                     is_there ? from + first + row : a.p.lse, is_there ? 4 : 0);
                   }
                   ptx::cp_async_mbarrier_arrive(bars.q_full(ring.stage));
                 }
                 __syncwarp();
                 if (lane == 0) ptx::mbarrier_arrive(bars.q_full(ring.stage));
               });
}

// Fourth warp: streams dO.
template <typename T>
__device__ __forceinline__ void load_douts(const BwdArgs& a, const BwdMaps& maps, uint32_t smem,
                                           const BwdWorkTile* work_tiles, BwdBarriers<T> bars) {
  for_tiles<T>(
      a, work_tiles, bars, [&](const BwdWorkTile& work, const Walk<T>& walk, const PipelineState<T::kStages>& ring) {
        wait(bars.dout_empty(ring.stage), ring.phase);
        if (threadIdx.x % 32 != 0) return;
        copy_tile<T::kChunks, T::kBlockM>(maps.dout, a.dout, smem + T::kDoutAt + ring.stage * T::kQBytes,
                                          bars.dout_full(ring.stage),
                                          row_coordinates(a.p.problem, work.w.q, work.w.b, walk.block * T::kBlockM),
                                          work.w.h * static_cast<int>(a.grid.shared.divisor) + walk.head);
      });
}

}  // namespace flash_ext::sm90
