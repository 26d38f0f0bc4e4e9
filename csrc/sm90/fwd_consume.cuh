// The consumers of the sm90 forward: warpgroups that own 64 query rows of every item.
//
// All items make one sequence of steps. In the step of a tile a warpgroup issues the scores of that tile, then the
// product of the previous tile's weights with its V; while that runs, it prepares the weights of the tile. A step may
// lead from one item to the next (a seam), so the tensor cores see no gap. Tiles that none of a warpgroup's rows sees
// (above the diagonal, left of a window) are skipped by it alone.
#pragma once

#include "fwd_store.cuh"

namespace flash_ext::sm90 {

// The same value, known to the compiler to be the same in all lanes.
__device__ __forceinline__ uint32_t uniform(uint32_t x) { return __shfl_sync(ptx::kFullWarp, x, 0); }

template <int kCount>
__device__ __forceinline__ void clear(float (&x)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) x[i] = 0.f;
}

// Tiles of which any row of a warpgroup sees anything. Rows without keys go through a tile that they do not see, rows
// outside the sequence through none.
template <typename T>
__device__ __forceinline__ BlockRange seen_tiles(const FwdArgs& a, const Item& item, int group) {
  const AttnMod mod{a.p.problem, item.w.q.length, item.w.k.length};
  const int first_row = item.w.block * T::kBlockM + group * 64;
  const int last_row = min(first_row + 64, item.w.q.length) - 1;
  const int lo = max(0, first_row + mod.shift() - a.p.problem.reach_left);
  const int hi = min(item.w.k.length, last_row + mod.shift() + a.p.problem.reach_right + 1);
  const int begin = lo < hi ? lo / T::kBlockN : item.blocks.begin;
  return {begin, first_row > last_row ? 0 : lo < hi ? (hi + T::kBlockN - 1) / T::kBlockN : begin + 1};
}

template <typename T>
__device__ __forceinline__ void consume(const FwdArgs& a, const FwdMaps& maps, uint32_t smem, const Item* items,
                                        Barriers<T> bars, int group) {
  using E = typename T::Element;
  constexpr int D = T::kHeadDim, Dv = T::kHeadDimV, kN = T::kBlockN;
  constexpr int kTurnThreads = 256;  // of the warpgroup whose turn it is and of the one before
  const int lane = threadIdx.x % 32, warp = (threadIdx.x / 32) % 4;
  const int warp_row = group * 64 + warp * 16, row_in_tile = warp_row + lane / 4;
  const float scale = a.p.problem.abs_scale_log2;
  const uint32_t q_base = descriptor_low(smem + T::kQAt + group * 64 * 128, 16);
  const uint32_t k_base = descriptor_low(smem, 16), v_base = descriptor_low(smem, kN * 128);

  float o[Dv / 2], s[kN / 2];
  uint32_t weights[kN / 4];
  RowState state;
  RingPosition<T::kKvSlots> ring;
  RingPosition<T::kQSlots> q_ring;
  int count = 0;                        // items begun
  int item_at = 0;                      // place of the item whose output is under way
  int tile = 0, tiles_left = 0;         // the step's tile of keys, steps after it in its item
  int seen_begin = 0, seen_end = 0;     // tiles of which any row of this warpgroup sees anything
  int whole_begin = 0, whole_end = 0;   // tiles that every row of this warpgroup sees whole
  bool new_item = false;

  const auto arrive = [&](uint32_t bar) {
    ptx::mbarrier_arrive_for_warp(bar, lane == 0);
  };
  // Warpgroups take turns in issuing the products of a step, so that one computes weights while another's products run.
  const auto take_turn = [&] {
    debug_delay();
    ptx::bar_sync(ptx::kTurnBarrier + group, kTurnThreads);
  };
  const auto pass_turn = [&] { ptx::bar_arrive_only(ptx::kTurnBarrier + (group + 1) % T::kConsumers, kTurnThreads); };
  const auto begin_item = [&]() -> bool {
    wait(bars.q_full(q_ring.slot), q_ring.parity);
    const Item& item = items[count % T::kItems];
    if (item.w.block < 0) return false;
    ++count;
    const AttnMod mod{a.p.problem, item.w.q.length, item.w.k.length};
    tile = item.blocks.end;
    tiles_left = item.blocks.end - item.blocks.begin;
    const int first_row = item.w.block * T::kBlockM + group * 64;
    const int last_row = min(first_row + 64, item.w.q.length) - 1;
    const BlockRange seen = seen_tiles<T>(a, item, group);
    seen_begin = seen.begin;
    seen_end = seen.end;
    const int whole_lo = max(0, last_row + mod.shift() - a.p.problem.reach_left);
    const int whole_hi = min(item.w.k.length, first_row + mod.shift() + a.p.problem.reach_right + 1);
    whole_begin = (whole_lo + kN - 1) / kN;
    whole_end = a.p.problem.score_factor == 1.f ? max(whole_hi, 0) / kN : 0;
    return true;
  };
  // On to the next step; false after the last one of all items.
  const auto next_step = [&]() -> bool {
    new_item = tiles_left == 0;
    if (new_item && !begin_item()) return false;
    --tile;
    --tiles_left;
    return true;
  };
  const auto is_seen = [&] { return tile >= seen_begin && tile < seen_end; };
  const auto skip_slot = [&] {
    wait(bars.kv_full(ring.slot), ring.parity);
    arrive(bars.kv_empty(ring.slot));
    ring.advance();
  };
  const auto finish_q = [&] {
    if (tiles_left > 0) return;
    arrive(bars.q_empty(q_ring.slot));
    q_ring.advance();
  };
  const auto mask = [&] {
    if (tile >= whole_begin && tile < whole_end) return;
    const Item& item = items[(count - 1) % T::kItems];
    const AttnMod mod{a.p.problem, item.w.q.length, item.w.k.length};
    const int first_col = tile * kN + (lane % 4) * 2;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const VisibleKeys keys = mod.visible(item.w.block * T::kBlockM + row_in_tile + 8 * half);
#pragma unroll
      for (int j = 0; j < kN / 8; ++j) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          float& x = s[4 * j + 2 * half + c];
          x = mod.score(x, keys, first_col + 8 * j + c);
        }
      }
    }
  };
  const auto issue_scores = [&] {
    wait(bars.kv_full(ring.slot), ring.parity);
    const uint32_t q_low = uniform(q_base + q_ring.slot * (T::kQBytes / 16));
    const uint32_t k_low = uniform(k_base + ring.slot * (T::kSlotBytes / 16));
    ptx::pin(s);
    ptx::wgmma_fence();
    issue_qk<E, D, T::kBlockM, kN>(s, q_low, k_low);
    ptx::wgmma_commit();
  };
  const auto finish_scores = [&](int k_slot) {
    ptx::pin(s);
    arrive(bars.kv_empty(k_slot));
    finish_q();
    mask();
  };
  const auto issue_output = [&] {
    wait(bars.kv_full(ring.slot), ring.parity);
    const uint32_t v_low = uniform(v_base + ring.slot * (T::kSlotBytes / 16));
    ptx::wgmma_fence();
    issue_pv<E>(o, weights, v_low);
    ptx::wgmma_commit();
  };
  const auto prepare_weights = [&] {
    if (try_weights<E>(s, weights, state, scale)) return;
    float factor[2];
    weights_by_maximum<E>(s, weights, state, factor, scale);
#pragma unroll
    for (int i = 0; i < Dv / 2; ++i) o[i] *= factor[(i / 2) % 2];
  };
  const auto store = [&] {
    const Item& item = items[item_at];
    const Work& w = item.w;
    if (item.w.k.length > kStretches.above) {
      const BlockRange seen = seen_tiles<T>(a, item, group);
      float* own = kept_place<T>(a, group);
      if (seen.end > item.blocks.end) join_kept<T>(own, o, state);
      if (seen.begin < item.blocks.begin) return keep<T>(own, o, state);
    }
    float inverse[2];
    finish_rows(a, w, state, w.block * T::kBlockM + row_in_tile, lane, inverse);
    const uint32_t stage = smem + T::kStageAt + (group * 4 + warp) * T::kStageChunks * 16 * 128;
    store_staged<T>(a, maps, w, o, inverse, stage, warp_row, lane);
  };
  // The first tile of an item starts from a guess.
  const auto begin_state = [&] {
    clear(o);
    item_at = (count - 1) % T::kItems;
    state = RowState{};
    guess_maximum(s, state, scale);
  };
  const auto step = [&](bool seam) {
    ptx::pin(o);
    ptx::pin(weights);
    take_turn();
    issue_scores();
    const int k_slot = ring.slot;
    ring.advance();
    issue_output();
    const int v_slot = ring.slot;
    ring.advance();
    pass_turn();
    ptx::wgmma_wait<1>();
    finish_scores(k_slot);
    ptx::wgmma_wait<0>();
    ptx::pin(o);
    ptx::pin(weights);
    arrive(bars.kv_empty(v_slot));
    if (seam) {
      store();
      begin_state();
    }
    prepare_weights();
  };

  if (group == T::kConsumers - 1) ptx::bar_arrive_only(ptx::kTurnBarrier, kTurnThreads);
  bool started = false;  // from the second step on a V comes with it
  bool has_step = next_step();
#pragma unroll 1
  while (has_step) {
    // No weights wait for their V here.
    take_turn();
    if (!is_seen()) {
      skip_slot();
      if (started) skip_slot();
      pass_turn();
      finish_q();
      started = true;
      has_step = next_step();
      continue;
    }
    issue_scores();
    const int k_slot = ring.slot;
    ring.advance();
    pass_turn();
    if (started) skip_slot();
    started = true;
    ptx::wgmma_wait<0>();
    finish_scores(k_slot);
    begin_state();
    prepare_weights();
#pragma unroll 1
    while ((has_step = next_step()) && is_seen()) {
      if (new_item) {
        step(true);
      } else {
        step(false);
      }
    }
    // The last product, which no scores accompany: the step's tile is not seen, or there is none.
    if (has_step) {
      take_turn();
      skip_slot();
    }
    ptx::pin(o);
    ptx::pin(weights);
    issue_output();
    const int v_slot = ring.slot;
    ring.advance();
    if (has_step) pass_turn();
    ptx::wgmma_wait<0>();
    ptx::pin(o);
    arrive(bars.kv_empty(v_slot));
    store();
    if (has_step) {
      finish_q();
      has_step = next_step();
    }
  }
  if (lane == 0) ptx::bulk_wait_read();
}

}  // namespace flash_ext::sm90
