// The consumers of the sm90 forward: warpgroups that own 64 query rows of every work tile.
//
// All work tiles make one sequence of steps. In the step of a tile a warpgroup issues the scores of that tile, then the
// product of the previous tile's weights with its V; while that runs, it prepares the weights of the tile. A step may
// lead from one work tile to the next (a seam), so the tensor cores see no gap. Tiles that none of a warpgroup's rows
// sees (above the diagonal, left of a window) are skipped by it alone.
//
// Where a sequence's last tile of keys holds kNarrow or fewer, weights are made of, and multiplied by, the first
// kNarrow alone, which few keys notice. Its scores have the usual width, because wgmma of two widths on the same
// registers would be serialised.
#pragma once

#include "../core/roles.cuh"
#include "numbers.cuh"

namespace flash_ext::sm90 {

// The same value, known to the compiler to be the same in all lanes.
__device__ __forceinline__ uint32_t uniform(uint32_t x) { return __shfl_sync(ptx::kFullWarp, x, 0); }

template <int kCount>
__device__ __forceinline__ void clear(float (&x)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) x[i] = 0.f;
}

// The first of an array of registers.
template <int kCount, typename X, int kAll>
__device__ __forceinline__ X (&first_of(X (&x)[kAll])) [kCount] {
  static_assert(kCount <= kAll);
  return reinterpret_cast<X(&)[kCount]>(x);
}

// The query of a row of a work tile, and those of a warpgroup's rows; last < first where it has none.
template <typename T>
__device__ __forceinline__ int query_of(const typename T::Args& a, const WorkTile& work, int row) {
  if constexpr (T::kPacked) return work.w.block * a.tile_queries + static_cast<int>(divide(row, a.grid.shared));
  return work.w.block * T::kBlockM + row;
}
struct QueryRange {
  int first, last;
};
template <typename T>
__device__ __forceinline__ QueryRange queries_of_rows(const typename T::Args& a, const WorkTile& work, int rows_at) {
  if constexpr (T::kPacked) {
    const int first = rows_at * 64, last = min(first + 64, a.tile_rows) - 1;
    if (first > last) return {1, 0};
    return {query_of<T>(a, work, first), min(query_of<T>(a, work, last), work.w.q.length - 1)};
  }
  const int first_row = work.w.block * T::kBlockM + rows_at * 64;
  return {first_row, min(first_row + 64, work.w.q.length) - 1};
}

// Tiles of which any row of a warpgroup sees anything. Rows without keys go through a tile that they do not see, rows
// outside the sequence through none.
template <typename T>
__device__ __forceinline__ BlockRange seen_tiles(const typename T::Args& a, const WorkTile& work, int rows_at) {
  const AttnMod mod{a.p.problem, work.w.q.length, work.w.k.length};
  const auto [first_row, last_row] = queries_of_rows<T>(a, work, rows_at);
  const int lo = max(0, first_row + mod.shift() - a.p.problem.reach_left);
  const int hi = min(work.w.k.length, last_row + mod.shift() + a.p.problem.reach_right + 1);
  const int begin = lo < hi ? lo / T::kBlockN : work.blocks.begin;
  return {begin, first_row > last_row ? 0 : lo < hi ? (hi + T::kBlockN - 1) / T::kBlockN : begin + 1};
}

template <typename T>
__device__ __forceinline__ void consume(const typename T::Args& a, const FwdMaps& maps, uint32_t smem,
                                        const typename T::Tile* work_tiles, Barriers<T> bars, int group) {
  using Numbers = typename T::Numbers;
  constexpr int Dv = T::kHeadDimV, kN = T::kKeys, kWords = Numbers::kWords;
  constexpr int kNarrow = T::kNarrow;
  constexpr bool kSharesKeys = kN < T::kBlockN;
  constexpr int kPingpongThreads = 256;  // of the warpgroup whose turn it is and of the one before
  const int lane = threadIdx.x % 32, warp = (threadIdx.x / 32) % 4;
  // Of two warpgroups the second one has the first rows: the other one, whose turn is the first, may have few rows, and
  // then goes on to the next tile sooner. Of three that is slower: docs/benchmarks.md.
  const int rows_at = kSharesKeys ? 0 : T::kConsumers == 2 ? 1 - group : group;  // in 64 rows
  const int own_keys = kSharesKeys ? group * kN : 0;  // where they begin in a tile
  const int warp_row = rows_at * 64 + warp * 16, row_in_tile = warp_row + lane / 4;
  const uint32_t q_base = descriptor_low(smem + T::kQAt + rows_at * 64 * 128, 16);
  const uint32_t k_base = descriptor_low(smem + own_keys * 128, 16);
  const uint32_t v_base = descriptor_low(smem + own_keys * 128, Numbers::kVChunkBytes);

  float o[Dv / 2];
  typename Numbers::Score s[Numbers::kScores];  // of a thread: in fp32, or pairs of neighbours in fp16
  uint32_t weights[kWords];
  RowState state;
  Numbers numbers(a);
  PipelineState<T::kKvStages> ring;
  PipelineState<T::kQStages> q_ring;
  int count = 0;  // work tiles begun
  int work_at = 0;  // place of the work tile whose output is under way
  int tile = 0, tiles_left = 0;  // the step's tile of keys, steps after it in its work tile
  int seen_begin = 0, seen_end = 0;  // tiles of which any row of this warpgroup sees anything
  int whole_begin = 0, whole_end = 0;  // tiles that every row of this warpgroup sees whole
  bool new_work = false;
  bool narrow = false;  // whether the weights under way are of kNarrow keys

  const auto arrive = [&](uint32_t bar) { ptx::mbarrier_arrive_for_warp(bar, lane == 0); };
  // Warpgroups take turns in issuing the products of a step, so that one computes weights while another's products run.
  const auto pingpong_wait = [&] {
    debug_delay();
    if constexpr (T::kConsumers > 1) ptx::bar_sync(ptx::kPingpongBarrier + group, kPingpongThreads);
  };
  const auto pingpong_arrive = [&] {
    if constexpr (T::kConsumers > 1) {
      ptx::bar_arrive_only(ptx::kPingpongBarrier + (group + 1) % T::kConsumers, kPingpongThreads);
    }
  };
  const auto begin_work = [&]() -> bool {
    wait(bars.q_full(q_ring.stage), q_ring.phase);
    const WorkTile& work = work_tiles[count % T::kWorkStages];
    if (work.w.block < 0) return false;
    ++count;
    const AttnMod mod{a.p.problem, work.w.q.length, work.w.k.length};
    tile = work.blocks.end;
    tiles_left = work.blocks.end - work.blocks.begin;
    const auto [first_row, last_row] = queries_of_rows<T>(a, work, rows_at);
    BlockRange seen = seen_tiles<T>(a, work, rows_at);
    if constexpr (T::kParts) {
      if (seen.end > 0) seen = seen_in_part(seen, work.blocks);
    }
    seen_begin = seen.begin;
    seen_end = seen.end;
    const int whole_lo = max(0, last_row + mod.shift() - a.p.problem.reach_left);
    const int whole_hi = min(work.w.k.length, first_row + mod.shift() + a.p.problem.reach_right + 1);
    whole_begin = (whole_lo + T::kBlockN - 1) / T::kBlockN;
    whole_end = a.p.problem.score_factor == 1.f ? max(whole_hi, 0) / T::kBlockN : 0;
    numbers.begin_work(a, work, rows_at);
    return true;
  };
  // On to the next step; false after the last one of all work tiles.
  const auto next_step = [&]() -> bool {
    new_work = tiles_left == 0;
    if (new_work && !begin_work()) return false;
    --tile;
    --tiles_left;
    return true;
  };
  const auto is_seen = [&] { return tile >= seen_begin && tile < seen_end; };
  const auto skip_stage = [&] {
    wait(bars.kv_full(ring.stage), ring.phase);
    arrive(bars.kv_empty(ring.stage));
    ring.advance();
  };
  const auto finish_q = [&] {
    if (tiles_left > 0) return;
    arrive(bars.q_empty(q_ring.stage));
    q_ring.advance();
  };
  // Of the first tile of a work tile.
  const auto is_narrow = [&] {
    if constexpr (kNarrow == kN) return false;
    return work_tiles[(count - 1) % T::kWorkStages].w.k.length - tile * kN <= kNarrow;
  };
  const auto mask = [&] {
    if constexpr (T::kModified) {
      const WorkTile& changed = work_tiles[(count - 1) % T::kWorkStages];
      return numbers.change_scores(a, changed, s, tile * T::kBlockN + own_keys, row_in_tile);
    }
    if (tile >= whole_begin && tile < whole_end) return;
    const WorkTile& work = work_tiles[(count - 1) % T::kWorkStages];
    const AttnMod mod{a.p.problem, work.w.q.length, work.w.k.length};
    const int first_col = tile * T::kBlockN + own_keys + (lane % 4) * 2;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      Numbers::hide(s, half, mod, mod.visible(query_of<T>(a, work, row_in_tile + 8 * half)), first_col);
    }
  };
  const auto issue_scores = [&] {
    wait(bars.kv_full(ring.stage), ring.phase);
    const uint32_t q_low = uniform(q_base + q_ring.stage * (T::kQBytes / 16));
    const uint32_t k_low = uniform(k_base + ring.stage * (T::kStageBytes / 16));
    ptx::warpgroup_fence_operand(s);
    ptx::wgmma_fence();
    Numbers::issue_scores(s, q_low, k_low);
    ptx::wgmma_commit();
  };
  const auto begin_tile = [&] {
    if constexpr (T::kModified) {
      numbers.expect(a, work_tiles[(count - 1) % T::kWorkStages], tile * T::kBlockN + own_keys, row_in_tile);
    } else {
      numbers.begin_tile(a, tile);
    }
  };
  const auto finish_scores = [&](int k_stage) {
    ptx::warpgroup_fence_operand(s);
    arrive(bars.kv_empty(k_stage));
    finish_q();
    if constexpr (requires { numbers.scale_scores(s); }) numbers.scale_scores(s);
    mask();
  };
  const auto issue_output = [&] {
    wait(bars.kv_full(ring.stage), ring.phase);
    const uint32_t v_low = uniform(v_base + ring.stage * (T::kStageBytes / 16));
    if (narrow) {
      ptx::wgmma_fence();
      Numbers::issue_output(o, first_of<kWords * kNarrow / kN>(weights), v_low);
      ptx::wgmma_commit();
    } else {
      ptx::wgmma_fence();
      Numbers::issue_output(o, weights, v_low);
      ptx::wgmma_commit();
    }
  };
  const auto prepare_weights = [&](bool first) {
    narrow = first && is_narrow();
    if (narrow) {
      constexpr int kScores = Numbers::kScores * kNarrow / kN;
      numbers.prepare(first_of<kScores>(s), first_of<kWords * kNarrow / kN>(weights), state, o);
    } else {
      numbers.prepare(s, weights, state, o);
    }
  };
  const auto store = [&] {
    const auto& work = work_tiles[work_at];
    const Work& w = work.w;
    auto& result = numbers.result(o);
    if constexpr (kSharesKeys) {
      if (!join_halves<T>(smem, group, result, state, numbers.unit())) return;
    }
    if constexpr (T::kPacked) return store_packed<T>(a, work, result, state, row_in_tile, lane, numbers.unit());
    if constexpr (T::kParts && !T::kPacked)
      return store_part<T>(a, work, result, state, w.block * T::kBlockM + row_in_tile, lane);
    if (work.w.k.length > kStretches.above) {
      const BlockRange seen = seen_tiles<T>(a, work, rows_at);
      float* own = kept_place<T>(a, group);
      if (seen.end > work.blocks.end) join_kept<T>(own, result, state);
      if (seen.begin < work.blocks.begin) return keep<T>(own, result, state);
    }
    const uint32_t staging = smem + T::kStagingAt + (group * 4 + warp) * T::kStagingChunks * 16 * 128;
    numbers.store_rows(a, maps, w, state, result, w.block * T::kBlockM + row_in_tile, staging, warp_row, lane);
  };
  const auto begin_state = [&] {
    clear(o);
    work_at = (count - 1) % T::kWorkStages;
    state = RowState{};
    numbers.begin_state(s, state);
  };
  const auto step = [&](bool seam) {
    ptx::warpgroup_fence_operand(o);
    ptx::warpgroup_fence_operand(weights);
    pingpong_wait();
    issue_scores();
    const int k_stage = ring.stage;
    ring.advance();
    issue_output();
    const int v_stage = ring.stage;
    ring.advance();
    pingpong_arrive();
    begin_tile();
    ptx::wgmma_wait<1>();
    finish_scores(k_stage);
    ptx::wgmma_wait<0>();
    ptx::warpgroup_fence_operand(o);
    ptx::warpgroup_fence_operand(weights);
    arrive(bars.kv_empty(v_stage));
    if (seam) {
      store();
      begin_state();
    } else {
      numbers.end_tile(tile, o);
    }
    prepare_weights(seam);
  };

  if (T::kConsumers > 1 && group == T::kConsumers - 1) ptx::bar_arrive_only(ptx::kPingpongBarrier, kPingpongThreads);
  bool started = false;  // from the second step on a V comes with it
  bool has_step = next_step();
#pragma unroll 1
  while (has_step) {
    // No weights wait for their V here.
    pingpong_wait();
    if (!is_seen()) {
      skip_stage();
      if (started) skip_stage();
      pingpong_arrive();
      finish_q();
      started = true;
      has_step = next_step();
      continue;
    }
    issue_scores();
    const int k_stage = ring.stage;
    ring.advance();
    pingpong_arrive();
    begin_tile();
    if (started) skip_stage();
    started = true;
    ptx::wgmma_wait<0>();
    finish_scores(k_stage);
    begin_state();
    prepare_weights(true);
#pragma unroll 1
    while ((has_step = next_step()) && is_seen()) {
      if constexpr (T::kModified) {  // one copy, as what becomes of scores takes the compiler seconds
        step(new_work);
      } else if (new_work) {
        step(true);
      } else {
        step(false);
      }
    }
    // The last product, which no scores accompany: the step's tile is not seen, or there is none.
    if (has_step) {
      pingpong_wait();
      skip_stage();
    }
    ptx::warpgroup_fence_operand(o);
    ptx::warpgroup_fence_operand(weights);
    issue_output();
    const int v_stage = ring.stage;
    ring.advance();
    if (has_step) pingpong_arrive();
    ptx::wgmma_wait<0>();
    ptx::warpgroup_fence_operand(o);
    arrive(bars.kv_empty(v_stage));
    store();
    if (has_step) {
      finish_q();
      has_step = next_step();
    }
  }
  if (lane == 0) ptx::bulk_wait_read();
}

// The body of a kernel whose consumers are these. produce(cta, warp): in warps of the first warpgroup.
template <typename T, typename OwnBarriers = Barriers<T>, typename Args, typename Produce>
__device__ __forceinline__ void run_fwd_cta(const Args& a, const FwdMaps& maps, const Produce& produce) {
  run_cta<T, typename T::Tile, OwnBarriers>(
      produce, [&](const auto& cta, int group) { consume<T>(a, maps, cta.smem, cta.shared, cta.bars, group - 1); });
}

}  // namespace flash_ext::sm90
