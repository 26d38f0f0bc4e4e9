// The producers of the sm90 forward with modifiers. The first warp finds out which tiles of keys an item visits and
// what their scores are tested for; the second one loads them.
#pragma once

#include "fwd_mod_parts.cuh"
#include "fwd_produce.cuh"

namespace flash_ext::sm90 {

// The ring of K and V as the warp sees it that fills it, in the order of use: K0, K1, V0, K2, V1, ... without a seam
// between items.
template <typename T, typename Barriers>
struct KvLoader {
  const FwdArgs& a;
  const FwdMaps& maps;
  uint32_t smem;
  Barriers bars;
  int lane;
  RingPosition<T::kKvSlots> ring{0, 1};
  RowCoordinates v_at{};
  int v_h = -1;  // head of the V tile that is still to load

  // `beside(slot)` is called by the lane that copies.
  template <int kChunks, typename Beside>
  __device__ __forceinline__ void load(const CUtensorMap& map, const Steps& steps, RowCoordinates at, int h,
                                       const Beside& beside) {
    wait(bars.kv_empty(ring.slot), ring.parity);
    if (lane == 0) {
      beside(ring.slot);
      copy_tile<kChunks, T::kBlockN>(map, steps, smem + ring.slot * T::kSlotBytes, bars.kv_full(ring.slot), at, h);
    }
    ring.advance();
  }
  // K of a step, then V of the one before.
  template <typename Beside>
  __device__ __forceinline__ void load_step(RowCoordinates at, int h, const Beside& beside) {
    load<T::kChunks>(maps.k, a.k_steps, at, h, beside);
    load_v();
    v_at = at;
    v_h = h;
  }
  __device__ __forceinline__ void load_v() {
    if (v_h >= 0) load<T::kChunksV>(maps.v, a.v_steps, v_at, v_h, [](int) {});
  }
};

inline constexpr int kModDrawAhead = 6;  // tiles of an item still to load; the next one's are to be judged as well

// T::kJudges lanes judge a tile of keys, one for each warpgroup's 64 rows: all get the tests of all, or 0 where all
// skip the tile. `tile` may lie outside the sequence.
template <typename T>
__device__ __forceinline__ uint32_t judge_tile(const Scores& scores, int m_block, int tile, int lane) {
  constexpr int kLanes = T::kJudges;
  constexpr uint32_t kAllSkip = (kSkipped * (T::kConsumers == 2 ? 0x11 : 0x111)) << kTestsAt;
  const int group = lane % kLanes, rows = m_block * T::kConsumers + group;
  TileTests tests = kSkipTile;
  const bool judges = kLanes == T::kConsumers || group < T::kConsumers;
  if (judges && tile >= 0 && rows * 64 < scores.seat.seqlen_q) {
    tests = scores.template visit<64, T::kBlockN>(rows, tile);
  }
  uint32_t flags = (tests == kSkipTile ? kSkipped : static_cast<uint32_t>(tests)) << (kTestsAt + 4 * group);
  if (!judges) flags = 0;
#pragma unroll
  for (int step = 1; step < kLanes; step *= 2) flags |= __shfl_xor_sync(ptx::kFullWarp, flags, step);
  return flags == kAllSkip ? 0 : flags | kVisited;
}

// The slope of an item in units of raw products, as three terms of bf16. A larger slope than 2^20 (7e5, in units of the
// scores) counts as that: rows see their nearest keys alone either way, and fp32 rounds the exponent of a tile's
// largest score, 32 keys away, by 2^-19 slopes, which overflowed fp16 from 1e7 on. Infinity and NaN stay, and make NaN.
__device__ __forceinline__ void split_slope(SlopeItem& item, float scale_log2) {
  constexpr float kHighest = 0x1p20f;
  float& slope = item.distances.slope;
  const float size = fabsf(slope);
  if (size > kHighest && size < INFINITY) slope = copysignf(kHighest, slope);
  const float raw = slope / scale_log2;
  const auto rounded = [](float x) { return __bfloat162float(__float2bfloat16_rn(x)); };
  const float first = rounded(raw), second = rounded(raw - first);
  item.terms[0] = ptx::pack2<__nv_bfloat16>(first, second);
  item.terms[1] = ptx::pack2<__nv_bfloat16>(raw - first - second, 0.f);
  item.terms[2] = item.terms[3] = 0;
}

// Writes item `index` to shared memory; false if there is nothing to compute or write.
template <typename T>
__device__ __forceinline__ bool make_item(const FwdModArgs& a, uint32_t index, typename T::Item& item) {
  const Problem& p = a.plain.p.problem;
  int b = 0;
  Work w = decode_index<T::kBlockM, true, true, true, true>(index, p, a.plain.grid, &b);
  if (!w.active) return false;
  reorder_batch(a.m, w, p.num_heads, b);
  if (ptx::fresh_lane() == 0) {
    item.w = w;
    item.seat = make_seat(p, a.m, w, b);
    item.blocks = Scores{p, a.m, item.seat, w.h}.template kv_blocks<T::kBlockM, T::kBlockN>(w.block);
    item.sink = a.m.sinks != nullptr && b >= 0 && b < p.batch ? a.m.sinks[w.h] : -INFINITY;
    item.turn = 0;
    if constexpr (T::kMaySlope) {
      item.distances = {};
      if (a.m.by_distance) {
        const int diagonal = ((w.block + 1) * T::kBlockM - 1 + Scores{p, a.m, item.seat, w.h}.shift()) / T::kBlockN;
        item.turn = max(0, item.blocks.end - 1 - max(diagonal, item.blocks.begin));
        if (b >= 0 && b < p.batch) item.distances = HeadDistances::of(a.m.by_distance, b, w.h, kLog2e);
      }
    }
    if constexpr (T::kSlopesInProduct) {
      item.centre = w.block * T::kBlockM + Scores{p, a.m, item.seat, w.h}.shift();
      split_slope(item, a.scale_log2);
    }
    item.mask = a.m.mask.words + item.seat.b * a.m.mask.batch_stride + w.h * a.m.mask.head_stride;
    if constexpr (T::kDrops) item.drop.make(a.m, b, w.h);
  }
  __syncwarp();
  return true;
}

// First warp: decides what is next, judges its tiles, loads its Q.
template <typename T>
__device__ __forceinline__ void schedule_mod_items(const FwdModArgs& a, const FwdModMaps& maps, uint32_t smem,
                                                   ModShared<T>& shared, ModBarriers<T> bars) {
  const FwdArgs& plain = a.plain;
  const bool draws = plain.draw.counter != nullptr;
  if (draws && ptx::fresh_lane() == 0) own_counter(plain.draw);
  // Registers are short: counts of items with tiles to visit, and of published chunks, modulo 2^16.
  uint32_t counts = 0;
  const auto items = [&] { return static_cast<int>(counts >> 16); };
  const auto chunks = [&] { return static_cast<int>(counts & 0xffff); };
  const auto wait_for_chunk = [&] {
    wait(bars.chunk_empty(slot_of(chunks(), T::kRingChunks)), parity_of(chunks(), T::kRingChunks) ^ 1);
  };
  const auto chunk = [&]() -> Chunk& { return shared.chunks[slot_of(chunks(), T::kRingChunks)]; };
  const auto publish = [&](bool is_last) {
    __syncwarp();
    if (ptx::fresh_lane() == 0) chunk().is_last = is_last;
    ptx::mbarrier_arrive_for_warp(bars.chunk_full(slot_of(chunks(), T::kRingChunks)), ptx::fresh_lane() == 0);
    counts = (counts & 0xffff0000u) | ((counts + 1) & 0xffff);
  };
  const auto load_q = [&](const Work& w) {
    const int slot = slot_of(items(), a.q_slots);
    wait(bars.q_empty(slot), parity_of(items(), a.q_slots) ^ 1);
    if (ptx::fresh_lane() == 0) copy_q<T>(plain, maps.plain, smem, bars.q_full(slot), slot, w);
  };
  // Publishes the steps of an item; false if there are none. A chunk waits for the next one: it may be the last.
  const auto publish_steps = [&](const ModItem& item) -> bool {
    const Scores scores{plain.p.problem, a.m, item.seat, item.w.h};
    enum { kNothing, kWaiting, kWaitingWithQ } state = kNothing;
    constexpr int kLanes = T::kJudges, kAtOnce = T::kTilesAtOnce;
    // A chunk of few tiles comes first: during the last one the next item is found.
    const int missing = T::kM192 ? (item.blocks.begin - item.blocks.end) & (kAtOnce - 1) : 0;
#pragma unroll 1
    for (int last = item.blocks.end - 1 + missing; last >= item.blocks.begin; last -= kAtOnce) {
      const int lane = ptx::fresh_lane();
      int tile = last - lane / kLanes;
      if constexpr (T::kMaySlope) {
        // Those at the diagonal first: a slope then raises no score above what the maxima have seen.
        const BlockRange range = item.blocks;
        const int turned = tile - item.turn;
        const bool outside = tile < range.begin || (T::kM192 && tile >= range.end);
        tile = outside ? -1 : turned < range.begin ? turned + (range.end - range.begin) : turned;
      }
      const uint32_t flags = judge_tile<T>(scores, item.w.block, tile, lane);
      const uint32_t visited = __ballot_sync(ptx::kFullWarp, flags != 0) & (kLanes == 2 ? 0x55555555u : 0x11111111u);
      if (visited == 0) continue;
      if (state != kNothing) publish(false);
      if (state == kWaiting) load_q(item.w);
      state = state == kNothing ? kWaiting : kWaitingWithQ;
      wait_for_chunk();
      if (flags != 0 && lane % kLanes == 0) chunk().steps[__popc(visited & ((1u << lane) - 1))] = {tile, flags};
      if (lane == 0) chunk().count = __popc(visited);
    }
    if (state == kNothing) return false;
    publish(true);
    if (state == kWaiting) load_q(item.w);
    return true;
  };
  uint32_t index = blockIdx.x;
#pragma unroll 1
  while (index < plain.draw.num_items) {
    if (ptx::fresh_lane() == 0) shared.index = index;  // registers are short
    typename T::Item& item = shared.items[slot_of(items(), T::kItems)];
    if (make_item<T>(a, index, item)) {
      if (publish_steps(item)) {
        if (draws) wait(bars.item_ending(), items() % 2);
        counts += 0x10000;
      } else {
        store_empty<T>(plain.p, item.w, item.sink, a.m.row_max, ptx::fresh_lane());
        __syncwarp();  // before the item's place is written again
      }
    }
    index = next_item(plain.draw, shared.index);
  }
  wait_for_chunk();
  if (ptx::fresh_lane() == 0) chunk().count = 0;
  publish(true);
}

// Second warp: loads K and V, and with each K its step; tiles of bias through a ring of their own.
template <typename T>
__device__ __forceinline__ void load_mod_tiles(const FwdModArgs& a, const FwdModMaps& maps, uint32_t smem,
                                               ModShared<T>& shared, ModBarriers<T> bars) {
  const Problem& p = a.plain.p.problem;
  const int lane = threadIdx.x % 32;
  KvLoader<T, ModBarriers<T>> kv{a.plain, maps.plain, smem, bars, lane};
  RingPosition<T::kBiasSlots> bias_ring{0, 1};
  RingPosition<T::kItems> place;
  RingPosition<T::kRingChunks> chunk;
  const auto load_bias = [&](const ModItem& item, int tile) {
    if (T::kBiasSlots == 0 || a.bias_rows == 0) return;
    wait(bars.bias_empty(bias_ring.slot), bias_ring.parity);
    if (lane == 0) {
      const uint32_t bar = bars.bias_full(bias_ring.slot);
      ptx::mbarrier_arrive_expect_tx(bar, T::kBlockN / 64 * a.bias_rows * 128);
#pragma unroll
      for (int i = 0; i < T::kBlockN / 64; ++i) {
        ptx::tma_load_5d(smem + T::kBiasAt + bias_ring.slot * T::kBiasBytes + i * T::kBlockM * 128, &maps.bias, bar,
                         tile * T::kBlockN + 64 * i, a.bias_rows == 1 ? 0 : item.w.block * T::kBlockM,
                         item.w.h * a.bias_steps.head, item.seat.b * a.bias_steps.batch, 0);
      }
    }
    bias_ring.advance();
  };
  bool is_first = true;  // chunk of its item
#pragma unroll 1
  while (true) {
    wait(bars.chunk_full(chunk.slot), chunk.parity);
    const int count = shared.chunks[chunk.slot].count;
    const bool is_last = shared.chunks[chunk.slot].is_last;
    if (count == 0) break;
    const ModItem& item = shared.items[place.slot];
    const int h = static_cast<int>(divide(item.w.h, a.plain.grid.shared));
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      // The next item is drawn as late as it can wait: one drawn early is kept from a CTA that is free before.
      const bool draws = a.plain.draw.counter != nullptr;  // else nobody waits for that
      if (draws && is_last && i == max(0, count - kModDrawAhead) && lane == 0) {
        ptx::mbarrier_arrive(bars.item_ending());
      }
      Step step = shared.chunks[chunk.slot].steps[i];
      if (is_first && i == 0) step.flags |= kFirstOfItem;
      if (is_last && i == count - 1) step.flags |= kLastOfItem;
      const RowCoordinates at = row_coordinates(p, item.w.k, item.w.b, step.tile * T::kBlockN);
      kv.load_step(at, h, [&](int slot) { shared.steps[slot] = step; });
      load_bias(item, step.tile);
    }
    __syncwarp();
    ptx::mbarrier_arrive_for_warp(bars.chunk_empty(chunk.slot), lane == 0);
    chunk.advance();
    is_first = is_last;
    if (is_last) place.advance();
  }
  // A step without a tile tells the consumers that none is left.
  wait(bars.kv_empty(kv.ring.slot), kv.ring.parity);
  if (lane == 0) {
    shared.steps[kv.ring.slot] = {0, kNoStep};
    ptx::mbarrier_arrive(bars.kv_full(kv.ring.slot));
  }
  kv.ring.advance();
  kv.load_v();
}

}  // namespace flash_ext::sm90
