// The producers of the sm90 forward with modifiers. The first warp finds out which tiles of keys a work tile visits and
// what their scores are tested for. The second one loads them, and a bias. In m192 a third one has the bias, or the
// words of a bool mask (T::kLoadsBeside).
#pragma once

#include "../fwd/produce.cuh"
#include "config.cuh"
#include "loose_bias.cuh"

namespace flash_ext::sm90 {

// The ring of K and V as the warp sees it that fills it, in the order of use: K0, K1, V0, K2, V1, ... without a seam
// between work tiles.
template <typename T, typename Barriers>
struct KvLoader {
  const FwdArgs& a;
  const FwdMaps& maps;
  uint32_t smem;
  Barriers bars;
  int lane;
  PipelineState<T::kKvStages> ring{0, 1};
  RowCoordinates v_at{};
  int v_h = -1;  // head of the V tile that is still to load

  // `beside(stage)` is called by the lane that copies.
  template <int kChunks, typename Beside>
  __device__ __forceinline__ void load(const CUtensorMap& map, const Steps& steps, RowCoordinates at, int h,
                                       const Beside& beside) {
    wait(bars.kv_empty(ring.stage), ring.phase);
    if (lane == 0) {
      beside(ring.stage);
      copy_tile<kChunks, T::kBlockN>(map, steps, smem + ring.stage * T::kStageBytes, bars.kv_full(ring.stage), at, h);
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

// Tiles left to load when the next work tile is fetched: its tiles must be classified first.
inline constexpr int kModFetchAhead = 6;

// T::kClassifierLanes lanes classify a tile of keys, one for each warpgroup's 64 rows: all get the tests of all, or 0
// where all skip the tile. `tile` may lie outside the sequence.
template <typename T>
__device__ __forceinline__ uint32_t classify_tile(const ScoreMod& score_mod, int m_block, int tile, int lane) {
  constexpr int kLanes = T::kClassifierLanes;
  constexpr uint32_t kAllSkip = (kSkipped * (T::kConsumers == 2 ? 0x11 : 0x111)) << kTestsAt;
  const int group = lane % kLanes, rows = m_block * T::kConsumers + group;
  TileTests tests = kSkipTile;
  const bool classifies = kLanes == T::kConsumers || group < T::kConsumers;
  if (classifies && tile >= 0 && rows * 64 < score_mod.seq.seqlen_q) {
    tests = score_mod.template classify<64, T::kBlockN, 1, false>(rows, tile);
  }
  uint32_t flags = (tests == kSkipTile ? kSkipped : static_cast<uint32_t>(tests)) << (kTestsAt + 4 * group);
  if (!classifies) flags = 0;
#pragma unroll
  for (int step = 1; step < kLanes; step *= 2) flags |= __shfl_xor_sync(ptx::kFullWarp, flags, step);
  return flags == kAllSkip ? 0 : flags | kListed;
}

// The slope of a work tile in units of raw products, as three terms of bf16. A larger slope than 2^20 (7e5, in units of
// the scores) counts as that: rows see their nearest keys alone either way, and fp32 rounds the exponent of a tile's
// largest score, up to 64 keys away, by 2^-18 slopes, which overflowed fp16 from 5e6 on. Infinity and NaN stay, and
// make NaN.
__device__ __forceinline__ void split_slope(SlopeWorkTile& work, float scale_log2) {
  constexpr float kHighest = 0x1p20f;
  float& slope = work.distances.slope;
  const float size = fabsf(slope);
  if (size > kHighest && size < INFINITY) slope = copysignf(kHighest, slope);
  const float raw = slope / scale_log2;
  work.raw_slope = raw;
  const auto rounded = [](float x) { return __bfloat162float(__float2bfloat16_rn(x)); };
  const float first = rounded(raw), second = rounded(raw - first);
  work.terms[0] = ptx::pack2<__nv_bfloat16>(first, second);
  work.terms[1] = ptx::pack2<__nv_bfloat16>(raw - first - second, 0.f);
}

// Writes work tile `index` to shared memory; false if there is nothing to compute or write.
template <typename T>
__device__ __forceinline__ bool make_work(const FwdModArgs& a, uint32_t index, typename T::WorkTile& work) {
  const Problem& p = a.plain.p.problem;
  int b = 0;
  Work w = decode_index<T::kBlockM, true, true, true, true>(index, p, a.plain.grid, &b);
  if (!w.active) return false;
  reorder_batch(a.m, w, p.num_heads, b);
  if (ptx::fresh_lane() == 0) {
    work.w = w;
    work.seq = make_seq_info(p, a.m, w, b);
    work.blocks = ScoreMod{p, a.m, work.seq, w.h}.template kv_blocks<T::kBlockM, T::kBlockN>(w.block);
    work.sink = a.m.sinks != nullptr && b >= 0 && b < p.batch ? a.m.sinks[w.h] : -INFINITY;
    work.turn = 0;
    if constexpr (T::kMaySlope) {
      work.distances = {};
      if (a.m.by_distance) {
        const int diagonal = ((w.block + 1) * T::kBlockM - 1 + ScoreMod{p, a.m, work.seq, w.h}.shift()) / T::kBlockN;
        work.turn = max(0, work.blocks.end - 1 - max(diagonal, work.blocks.begin));
        if (b >= 0 && b < p.batch) work.distances = HeadDistances::of(a.m.by_distance, b, w.h, kLog2e);
      }
    }
    if constexpr (T::kSlopesInProduct) {
      work.centre = w.block * T::kBlockM + ScoreMod{p, a.m, work.seq, w.h}.shift();
      split_slope(work, a.scale_log2);
    }
    work.mask = a.m.mask.words + work.seq.b * a.m.mask.batch_stride + w.h * a.m.mask.head_stride;
    if constexpr (T::kLoose) work.behind = elements_behind(a.m.bias, work.seq.b, w.h, w.block * T::kBlockM);
    if constexpr (T::kDrops) work.drop.make(a.m, b, w.h);
  }
  __syncwarp();
  return true;
}

// First warp: decides what is next, classifies its tiles, loads its Q.
template <typename T>
__device__ __forceinline__ void schedule_mod_work(const FwdModArgs& a, const FwdModMaps& maps, uint32_t smem,
                                                  ModShared<T>& shared, ModBarriers<T> bars) {
  const FwdArgs& plain = a.plain;
  const bool dynamic = plain.scheduler.counter != nullptr;
  // Registers are short: counts of work tiles with tiles to visit, and of published chunks, modulo 2^16.
  uint32_t counts = 0;
  const auto work_tiles = [&] { return static_cast<int>(counts >> 16); };
  const auto chunks = [&] { return static_cast<int>(counts & 0xffff); };
  const auto wait_for_chunk = [&] {
    wait(bars.chunk_empty(stage_of(chunks(), T::kChunkStages)), phase_of(chunks(), T::kChunkStages) ^ 1);
  };
  const auto chunk = [&]() -> Chunk& { return shared.chunks[stage_of(chunks(), T::kChunkStages)]; };
  const auto publish = [&](bool is_last) {
    __syncwarp();
    if (ptx::fresh_lane() == 0) chunk().is_last = is_last;
    ptx::mbarrier_arrive_for_warp(bars.chunk_full(stage_of(chunks(), T::kChunkStages)), ptx::fresh_lane() == 0);
    counts = (counts & 0xffff0000u) | ((counts + 1) & 0xffff);
  };
  const auto load_q = [&](const Work& w) {
    const int stage = stage_of(work_tiles(), a.q_stages);
    wait(bars.q_empty(stage), phase_of(work_tiles(), a.q_stages) ^ 1);
    if (ptx::fresh_lane() == 0) copy_q<T>(plain, maps.plain, smem, bars.q_full(stage), stage, w);
  };
  // Publishes the steps of a work tile; false if there are none. A chunk waits for the next one: it may be the last.
  const auto publish_steps = [&](const ModWorkTile& work) -> bool {
    const ScoreMod score_mod{plain.p.problem, a.m, work.seq, work.w.h};
    enum { kNothing, kWaiting, kWaitingWithQ } state = kNothing;
    constexpr int kLanes = T::kClassifierLanes, kAtOnce = T::kTilesAtOnce;
    // A chunk of few tiles comes first: during the last one the next work tile is found.
    const int missing = T::kM192 ? (work.blocks.begin - work.blocks.end) & (kAtOnce - 1) : 0;
#pragma unroll 1
    for (int last = work.blocks.end - 1 + missing; last >= work.blocks.begin; last -= kAtOnce) {
      const int lane = ptx::fresh_lane();
      int tile = last - lane / kLanes;
      if constexpr (T::kMaySlope) {
        // Those at the diagonal first: a slope then raises no score above what the maxima have seen.
        const BlockRange range = work.blocks;
        const int turned = tile - work.turn;
        const bool outside = tile < range.begin || (T::kM192 && tile >= range.end);
        tile = outside ? -1 : turned < range.begin ? turned + (range.end - range.begin) : turned;
      }
      const uint32_t flags = classify_tile<T>(score_mod, work.w.block, tile, lane);
      const uint32_t listed = __ballot_sync(ptx::kFullWarp, flags != 0) & (kLanes == 2 ? 0x55555555u : 0x11111111u);
      if (listed == 0) continue;
      if (state != kNothing) publish(false);
      if (state == kWaiting) load_q(work.w);
      state = state == kNothing ? kWaiting : kWaitingWithQ;
      wait_for_chunk();
      if (flags != 0 && lane % kLanes == 0) chunk().steps[__popc(listed & ((1u << lane) - 1))] = {tile, flags};
      if (lane == 0) chunk().count = __popc(listed);
    }
    if (state == kNothing) return false;
    publish(true);
    if (state == kWaiting) load_q(work.w);
    return true;
  };
  uint32_t index = blockIdx.x;
#pragma unroll 1
  while (index < plain.scheduler.num_work_tiles) {
    if (ptx::fresh_lane() == 0) shared.index = index;  // registers are short
    typename T::WorkTile& work = shared.work_tiles[stage_of(work_tiles(), T::kWorkStages)];
    if (make_work<T>(a, index, work)) {
      if (publish_steps(work)) {
        if (dynamic) wait(bars.work_ending(), work_tiles() % 2);
        counts += 0x10000;
      } else {
        store_empty<T>(plain.p, work.w, work.sink, a.m.row_max, ptx::fresh_lane());
        __syncwarp();  // before the work tile's place is written again
      }
    }
    index = next_work_tile(plain.scheduler, shared.index);
  }
  wait_for_chunk();
  if (ptx::fresh_lane() == 0) chunk().count = 0;
  publish(true);
}

// Where a lane's rows of words lie, from the first word of a work tile's first row on: row lane / 2 and every 16th
// behind it. Rows behind the last one have its words, as hide_tile() wants them.
template <int kRows>
struct WordRows {
  static constexpr int kCount = kRows / 16;
  uint32_t at[kCount];  // in words; of 192 rows less than 2^32 of them
  uint32_t inside;  // bit i: the mask has the row

  __device__ __forceinline__ void find(const BitRows& mask, int row0, int seqlen_q) {
    const int own = row0 + ptx::fresh_lane() / 2;
    inside = 0;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int row = min(own + 16 * i, seqlen_q - 1);
      at[i] = static_cast<uint32_t>(row - row0) * static_cast<uint32_t>(mask.row_stride);
      inside |= (row < mask.rows ? 1u : 0u) << i;
    }
  }
};

// Called by a warp: copies the words of 64 keys from `col0` on to 8 bytes a row, and has them complete a phase of
// `bar`, which counts one arrival.
template <int kRows>
__device__ __forceinline__ void load_words(const BitRows& mask, const uint32_t* first_row, const WordRows<kRows>& rows,
                                           int col0, uint32_t to, uint32_t bar) {
  const int lane = ptx::fresh_lane(), word = col0 / 32 + lane % 2;
  const uint32_t inside = word < mask.num_words ? rows.inside : 0;
  const uint32_t* const from = first_row + word * mask.word_stride;
#pragma unroll
  for (int i = 0; i < rows.kCount; ++i) {
    ptx::cp_async_4(to + i * 128 + lane * 4, from + rows.at[i], (inside >> i & 1) * 4);
  }
  ptx::cp_async_mbarrier_arrive(bar);
  __syncwarp();
  if (lane == 0) ptx::mbarrier_arrive(bar);
}

// Steps as the scheduler hands them on, chunk by chunk: use(work, step, is_first, left, begins). is_first: of its work
// tile. left: how many steps the work tile still has, this one counted, in its last chunk; 0 in those before. begins: a
// chunk.
template <typename T, typename Use>
__device__ __forceinline__ void for_each_step(ModShared<T>& shared, ModBarriers<T> bars, int lane, const Use& use) {
  PipelineState<T::kWorkStages> work_ring;
  PipelineState<T::kChunkStages> chunk;
  bool is_first = true;  // chunk of its work tile
#pragma unroll 1
  while (true) {
    wait(bars.chunk_full(chunk.stage), chunk.phase);
    const int count = shared.chunks[chunk.stage].count;
    const bool is_last = shared.chunks[chunk.stage].is_last;
    if (count == 0) return;
    const typename T::WorkTile& work = shared.work_tiles[work_ring.stage];
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      use(work, shared.chunks[chunk.stage].steps[i], is_first && i == 0, is_last ? count - i : 0, i == 0);
    }
    __syncwarp();
    ptx::mbarrier_arrive_for_warp(bars.chunk_empty(chunk.stage), lane == 0);
    chunk.advance();
    is_first = is_last;
    if (is_last) work_ring.advance();
  }
}

// Tiles of a bias, their parts, or words of a mask, on their way to a ring of their own.
template <typename T>
struct BesideLoader {
  const FwdModArgs& a;
  const FwdModMaps& maps;
  uint32_t smem;
  ModBarriers<T> bars;
  int lane;
  PipelineState<T::kBiasPlaces> ring{0, 1};
  WordRows<T::kBringsWords ? T::kBlockM : 16> rows{};

  __device__ __forceinline__ void begin_work(const ModWorkTile& work) {
    if constexpr (T::kBringsWords) rows.find(a.m.mask, work.w.block * T::kBlockM, work.seq.seqlen_q);
  }
  __device__ __forceinline__ void load(const ModWorkTile& work, int tile) {
    if (T::kBiasPlaces == 0 || (!T::kBringsWords && a.bias_rows == 0)) return;
    constexpr int kKeys = T::kBlockN / T::kBiasPieces, kBoxKeys = T::kFloat ? 32 : 64, kBoxes = kKeys / kBoxKeys;
#pragma unroll 1
    for (int piece = 0; piece < T::kBiasPieces; ++piece) {
      const uint32_t to = smem + T::kBiasAt + ring.stage * T::kBiasBytes, bar = bars.bias_full(ring.stage);
      const int row0 = work.w.block * T::kBlockM, col0 = tile * T::kBlockN + kKeys * piece;
      wait(bars.bias_empty(ring.stage), ring.phase);
      if constexpr (T::kBringsWords) {
        load_words(a.m.mask, work.mask + row0 * a.m.mask.row_stride, rows, col0, to, bar);
      } else if constexpr (T::kLoose) {
        load_loose_bias<T::kBlockM>(a.m.bias, work.seq.b, work.w.h, row0, col0, to, bar);
      } else if (lane == 0) {
        ptx::mbarrier_arrive_expect_tx(bar, kBoxes * a.bias_rows * 128);
#pragma unroll
        for (int i = 0; i < kBoxes; ++i) {
          ptx::tma_load_5d(to + i * T::kBlockM * 128, &maps.bias, bar, col0 + kBoxKeys * i, a.bias_rows == 1 ? 0 : row0,
                           work.w.h * a.bias_steps.head, work.seq.b * a.bias_steps.batch, 0);
        }
      }
      ring.advance();
    }
  }
};

// Second warp: loads K and V, and with each K its step; what stands beside the scores too, where no other warp does.
template <typename T>
__device__ __forceinline__ void load_mod_tiles(const FwdModArgs& a, const FwdModMaps& maps, uint32_t smem,
                                               ModShared<T>& shared, ModBarriers<T> bars) {
  const Problem& p = a.plain.p.problem;
  const int lane = threadIdx.x % 32;
  KvLoader<T, ModBarriers<T>> kv{a.plain, maps.plain, smem, bars, lane};
  BesideLoader<T> beside{a, maps, smem, bars, lane};
  int h = 0;
  for_each_step<T>(shared, bars, lane, [&](const ModWorkTile& work, Step step, bool is_first, int left, bool begins) {
    if (begins) h = static_cast<int>(divide(work.w.h, a.plain.grid.shared));
    // Fetch late: a tile claimed early cannot go to a CTA that is free before.
    const bool dynamic = a.plain.scheduler.counter != nullptr;  // else nobody waits for that
    if (dynamic && (left == kModFetchAhead || (begins && left > 0 && left < kModFetchAhead)) && lane == 0) {
      ptx::mbarrier_arrive(bars.work_ending());
    }
    if (is_first) step.flags |= kFirstStep;
    if (left == 1) step.flags |= kLastStep;
    kv.load_step(row_coordinates(p, work.w.k, work.w.b, step.tile * T::kBlockN), h,
                 [&](int stage) { shared.steps[stage] = step; });
    if constexpr (!T::kLoadsBeside) beside.load(work, step.tile);
  });
  // A step without a tile tells the consumers that none is left.
  wait(bars.kv_empty(kv.ring.stage), kv.ring.phase);
  if (lane == 0) {
    shared.steps[kv.ring.stage] = {0, kNoStep};
    ptx::mbarrier_arrive(bars.kv_full(kv.ring.stage));
  }
  kv.ring.advance();
  kv.load_v();
}

// Third warp, where T::kLoadsBeside: in the second one K and V would wait for what stands beside the scores.
template <typename T>
__device__ __forceinline__ void load_beside(const FwdModArgs& a, const FwdModMaps& maps, uint32_t smem,
                                            ModShared<T>& shared, ModBarriers<T> bars) {
  const int lane = threadIdx.x % 32;
  BesideLoader<T> beside{a, maps, smem, bars, lane};
  for_each_step<T>(shared, bars, lane, [&](const ModWorkTile& work, const Step& step, bool is_first, int, bool) {
    if (is_first) beside.begin_work(work);
    beside.load(work, step.tile);
  });
}

}  // namespace flash_ext::sm90
