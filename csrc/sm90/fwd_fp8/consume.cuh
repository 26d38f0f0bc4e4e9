// The consumers of the fp8 forward. Steps, seams and turns are those of fwd/consume.cuh; what differs is below.
//
// The tensor cores add e4m3 products into an accumulator of some 14 bits, and cut what is beyond: over 8192 keys whose
// values have something in common an eighth of it is lost. So the output has two: the product's own, of 8 tiles at most,
// and one in fp32 to which it goes wherever tiles pass a multiple of 8. Those places belong to the keys, not to the tile
// of queries. Maxima, below which weights are rounded, do depend on the rows beside: the 16 rows of a warp raise theirs
// together.
#pragma once

#include "../fwd/consume.cuh"
#include "store.cuh"
#include "weights.cuh"

namespace flash_ext::sm90 {

inline constexpr int kTilesOfAccumulator = 8;
inline constexpr float kLeastScale = 0x1p-126f;

// The scale of a tile's scores from the product of its factors, which must be positive: a hidden score of -inf times 0
// would be NaN. What is smaller than the least normal number gives all weights alike. Negative products give NaN.
__device__ __forceinline__ float usable_scale(float product) {
  if (product < 0.f) return __int_as_float(0x7fffffff);
  return product < kLeastScale ? kLeastScale : product;  // NaN stays
}

// s = Q K^T for the 64 rows of a warpgroup.
template <typename T, int kCount>
__device__ __forceinline__ void issue_fp8_qk(float (&s)[kCount], uint32_t q, uint32_t k) {
  if constexpr (T::kMixed) {
    issue_qk<typename T::Element, T::kHeadDim, T::kBlockM, T::kBlockN>(s, q, k);
  } else {
    for_steps<0, T::kHeadDim / 32>([&](auto step) {
      constexpr int i = decltype(step)::value;
      constexpr int at = (i % 4) * 2, chunk = i / 4;
      ptx::wgmma_ss_e4m3<(i > 0)>(s, q + at + chunk * T::kBlockM * 8, k + at + chunk * T::kBlockN * 8);
    });
  }
}

// o += P V; a row of V transposed has the 128 keys of a tile.
template <int kWords, int kCount>
__device__ __forceinline__ void issue_fp8_pv(float (&o)[kCount], const uint32_t (&p)[kWords], uint32_t v) {
#pragma unroll
  for (int i = 0; i < kWords / 4; ++i) {
    ptx::wgmma_rs_e4m3(o, p[4 * i], p[4 * i + 1], p[4 * i + 2], p[4 * i + 3], v + i * 2);
  }
}

template <typename T>
__device__ __forceinline__ void consume_fp8(const Fp8Args& a, const FwdMaps& maps, uint32_t smem,
                                            const WorkTile* work_tiles, Barriers<T> bars, int group) {
  constexpr int Dv = T::kHeadDimV, kN = T::kBlockN;
  constexpr int kPingpongThreads = 256;
  const int lane = threadIdx.x % 32, warp = (threadIdx.x / 32) % 4;
  const int warp_row = group * 64 + warp * 16, row_in_tile = warp_row + lane / 4;
  const uint32_t q_base = descriptor_low(smem + T::kQAt + group * 64 * 128, 16);
  const uint32_t kv_base = descriptor_low(smem, 16);

  float o[Dv / 2], total[Dv / 2], s[kN / 2];
  uint32_t weights[kN / 8];
  RowState state;
  PipelineState<T::kKvStages> ring;
  PipelineState<T::kQStages> q_ring;
  int count = 0;
  int work_at = 0;
  int tile = 0, tiles_left = 0;
  int seen_begin = 0, seen_end = 0;
  int whole_begin = 0, whole_end = 0;
  float q_scale = 0.f;  // of the work tile whose scores are under way
  float scale = 0.f;  // of the step's tile
  const float* k_factors = nullptr;
  bool new_work = false;

  const auto arrive = [&](uint32_t bar) { ptx::mbarrier_arrive_for_warp(bar, lane == 0); };
  const auto pingpong_wait = [&] {
    debug_delay();
    ptx::bar_sync(ptx::kPingpongBarrier + group, kPingpongThreads);
  };
  const auto pingpong_arrive = [&] {
    ptx::bar_arrive_only(ptx::kPingpongBarrier + (group + 1) % T::kConsumers, kPingpongThreads);
  };
  const auto begin_work = [&]() -> bool {
    wait(bars.q_full(q_ring.stage), q_ring.phase);
    const WorkTile& work = work_tiles[count % T::kWorkStages];
    if (work.w.block < 0) return false;
    ++count;
    const AttnMod mod{a.p.problem, work.w.q.length, work.w.k.length};
    tile = work.blocks.end;
    tiles_left = work.blocks.end - work.blocks.begin;
    const int first_row = work.w.block * T::kBlockM + group * 64;
    const int last_row = min(first_row + 64, work.w.q.length) - 1;
    const BlockRange seen = seen_tiles<T>(a, work, group);
    seen_begin = seen.begin;
    seen_end = seen.end;
    const int whole_lo = max(0, last_row + mod.shift() - a.p.problem.reach_left);
    const int whole_hi = min(work.w.k.length, first_row + mod.shift() + a.p.problem.reach_right + 1);
    whole_begin = (whole_lo + kN - 1) / kN;
    whole_end = a.p.problem.score_factor == 1.f ? max(whole_hi, 0) / kN : 0;
    q_scale = a.p.problem.abs_scale_log2;
    if constexpr (!T::kMixed) {
      const int h_k = static_cast<int>(divide(work.w.h, a.grid.shared));
      k_factors = block_factors(a.x.k_factor, a.p.problem, work.w.b, work.w.k.start, h_k);
      q_scale *= __ldg(block_factors(a.x.q_factor, a.p.problem, work.w.b, work.w.q.start, work.w.h) +
                       work.w.block * a.x.q_factor.step);
    }
    return true;
  };
  // On to the next step; false after the last one of all work tiles.
  const auto next_step = [&]() -> bool {
    new_work = tiles_left == 0;
    if (new_work && !begin_work()) return false;
    --tile;
    --tiles_left;
    scale = q_scale;
    if constexpr (!T::kMixed) scale = usable_scale(scale * __ldg(k_factors + tile * a.x.k_factor.step));
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
  const auto mask = [&] {
    if (tile >= whole_begin && tile < whole_end) return;
    const WorkTile& work = work_tiles[(count - 1) % T::kWorkStages];
    const AttnMod mod{a.p.problem, work.w.q.length, work.w.k.length};
    const int first_col = tile * kN + (lane % 4) * 2;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const VisibleKeys keys = mod.visible(work.w.block * T::kBlockM + row_in_tile + 8 * half);
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
    wait(bars.kv_full(ring.stage), ring.phase);
    const uint32_t q_low = uniform(q_base + q_ring.stage * (T::kQBytes / 16));
    const uint32_t k_low = uniform(kv_base + ring.stage * (T::kStageBytes / 16));
    ptx::warpgroup_fence_operand(s);
    ptx::wgmma_fence();
    issue_fp8_qk<T>(s, q_low, k_low);
    ptx::wgmma_commit();
  };
  const auto finish_scores = [&](int k_stage) {
    ptx::warpgroup_fence_operand(s);
    arrive(bars.kv_empty(k_stage));
    finish_q();
    mask();
  };
  const auto issue_output = [&] {
    wait(bars.kv_full(ring.stage), ring.phase);
    const uint32_t v_low = uniform(kv_base + ring.stage * (T::kStageBytes / 16));
    ptx::wgmma_fence();
    issue_fp8_pv(o, weights, v_low);
    ptx::wgmma_commit();
  };
  const auto add_to_total = [&] {
#pragma unroll
    for (int i = 0; i < Dv / 2; ++i) {
      total[i] += o[i];
      o[i] = 0.f;
    }
  };
  const auto prepare_weights = [&] {
    if (try_fp8_weights(s, weights, state, scale)) return;
    float factor[2];
    fp8_weights_by_maximum(s, weights, state, factor, scale);
#pragma unroll
    for (int i = 0; i < Dv / 2; ++i) {
      o[i] *= factor[(i / 2) % 2];
      total[i] *= factor[(i / 2) % 2];
    }
  };
  const auto store = [&] {
    const WorkTile& work = work_tiles[work_at];
    const Work& w = work.w;
    add_to_total();
    if (work.w.k.length > kStretches.above) {
      const BlockRange seen = seen_tiles<T>(a, work, group);
      float* own = kept_place<T>(a, group);
      if (seen.end > work.blocks.end) join_kept<T>(own, total, state);
      if (seen.begin < work.blocks.begin) return keep<T>(own, total, state);
    }
    float inverse[2];
    const int row = w.block * T::kBlockM + row_in_tile;
    finish_rows(a, w, state, row, lane, inverse);
    put_back_row_offset(a, w, row, lane);
    finish_output<T>(a, w, static_cast<int>(divide(w.h, a.grid.shared)), total, inverse, lane);
    const uint32_t staging = smem + T::kStagingAt + (group * 4 + warp) * T::kStagingChunks * 16 * 128;
    constexpr float kOnes[2] = {1.f, 1.f};
    store_staged<T>(a, maps, w, total, kOnes, staging, warp_row, lane);
  };
  const auto begin_state = [&] {
    clear(o);
    clear(total);
    work_at = (count - 1) % T::kWorkStages;
    state = RowState{};
    guess_fp8_maximum(s, state, scale);
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
    ptx::wgmma_wait<1>();
    finish_scores(k_stage);
    ptx::wgmma_wait<0>();
    ptx::warpgroup_fence_operand(o);
    ptx::warpgroup_fence_operand(weights);
    arrive(bars.kv_empty(v_stage));
    if (seam) {
      store();
      begin_state();
    } else if ((tile + 1) % kTilesOfAccumulator == 0) {
      add_to_total();
    }
    prepare_weights();
  };

  if (group == T::kConsumers - 1) ptx::bar_arrive_only(ptx::kPingpongBarrier, kPingpongThreads);
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
    if (started) skip_stage();
    started = true;
    ptx::wgmma_wait<0>();
    finish_scores(k_stage);
    begin_state();
    prepare_weights();
#pragma unroll 1
    while ((has_step = next_step()) && is_seen()) {
      if (new_work) {
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

}  // namespace flash_ext::sm90
