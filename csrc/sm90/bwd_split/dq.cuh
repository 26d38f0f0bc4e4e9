// The consumers of the kernel of dQ of the sm90 split backward. Both warpgroups do the same work, and the products of
// one run beside the arithmetic of the other. Steps go one after the other: with the gradient product issued together
// with the next two they are slower.
#pragma once

#include "steps.cuh"

namespace flash_ext::sm90 {

// s = P = 2^(scale s - lse), dp = P (dP - delta): a thread has two queries, x[4 j + 2 half + c] is query 8 half and
// key 8 j + 2 (lane % 4) + c.
struct QueryStats {
  float minus_lse[2], minus_delta[2];
};

// Of a thread's queries, from `row` of a work tile on. They come from the kernel before the one before this one, in
// which every CTA allows this one behind griddepcontrol.wait: their writes are performed before any thread here begins
// (PTX ISA, griddepcontrol), and strong loads are not answered by an older line of L1.
template <typename T, typename WorkTile>
__device__ __forceinline__ QueryStats load_query_stats(const float* row_stats, const WorkTile& work, int row) {
  QueryStats stats;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int at = row + 8 * half;
    const bool inside = at < work.w.q.length;
    const float* from =
        row_stats + (work.tile + static_cast<int64_t>(at / T::kStatRows)) * (2 * T::kStatRows) + at % T::kStatRows;
    stats.minus_lse[half] = -INFINITY;
    stats.minus_delta[half] = 0.f;
    ptx::load_relaxed_if(stats.minus_lse[half], from, inside);
    ptx::load_relaxed_if(stats.minus_delta[half], from + T::kStatRows, inside);
  }
  return stats;
}

template <int kCount>
__device__ __forceinline__ void scores_to_row_weights(float (&s)[kCount], const QueryStats& stats, float scale) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) s[i] = ptx::ex2(fmaf(s[i], scale, stats.minus_lse[i / 2 % 2]));
}

// hide() where rows are queries.
template <int kCount>
__device__ __forceinline__ void hide_keys(float (&s)[kCount], const AttnMod& mod, int query, int key) {
  hide_unseen(s, key, [&](int below) { return mod.visible(query + below); });
}

// A warpgroup: 64 queries of a work tile.
template <typename T>
__device__ __forceinline__ void consume_dq(const typename T::Args& a, uint32_t smem, SplitShared<T>& shared,
                                           SplitBarriers<T> bars, int group) {
  using E = typename T::Element;
  constexpr int kN = T::kBlockN;
  const BwdParams& p = a.plain.p;
  const Problem& problem = p.problem;
  const ConsumerThread<T> me;
  const auto q_low = kept<T>([=] { return uniform(descriptor_low(smem + group * T::kQBytes, 16)); });
  const auto dout_low = kept<T>([=] { return uniform(descriptor_low(smem + T::kDoutAt + group * T::kDoutBytes, 16)); });

  float dq[T::kHeadDim / 2], s[kN / 2], dp[kN / 2];
  uint32_t words[kN / 4];
  WorkSteps<T> steps(a, shared, bars, me);
  PipelineState<T::kKStages> k_ring;
  PipelineState<T::kVStages> v_ring;
  uint32_t count = 0;  // of steps so far; with modifiers both positions follow from it, because registers are short
  const auto k_stage = [&] { return T::kPlain ? k_ring.stage : stage_of(count, T::kKStages); };
  const auto v_stage = [&] { return T::kPlain ? v_ring.stage : stage_of(count, T::kVStages); };
  const auto k_phase = [&] { return T::kPlain ? k_ring.phase : phase_of(count, T::kKStages); };
  const auto v_phase = [&] { return T::kPlain ? v_ring.phase : phase_of(count, T::kVStages); };
  const auto k_at = [&] { return smem + T::kKAt + k_stage() * T::kKBytes; };
  const auto issue_scores = [&] {
    ptx::warpgroup_fence_operand(s);
    ptx::warpgroup_fence_operand(dq);
    ptx::wgmma_fence();
    issue_products<E, T::kHeadDim, T::kGroupRows, kN, false>(s, q_low(), uniform(descriptor_low(k_at(), 16)));
    ptx::wgmma_commit();
  };
  const auto issue_dp = [&] {
    wait(bars.v_full(v_stage()), v_phase());
    if constexpr (T::kLateDp) clear(dp);  // else it would keep its registers from the step before
    ptx::warpgroup_fence_operand(dp);
    ptx::wgmma_fence();
    issue_products<E, T::kHeadDimV, T::kGroupRows, kN, false>(
        dp, dout_low(), uniform(descriptor_low(smem + T::kVAt + v_stage() * T::kVBytes, 16)));
    ptx::wgmma_commit();
  };

#pragma unroll 1
  while (true) {
    const int work_at = steps.take_work([&](const auto& work) {
      clear_rows(p.dq, work.w.b, work.w.q, work.w.h, problem.head_dim,
                 work.w.block * T::kBlockM + group * T::kGroupRows + me.warp() * 16, me.lane());
    });
    if (work_at < 0) return;
    // Copies, not references to locals: with these NVVM computes addresses anew in every step (12 instructions of 337).
    const auto row0 = kept<T>(
        [=, &steps] { return steps.work(work_at).w.block * T::kBlockM + group * T::kGroupRows + me.warp() * 16; });
    const QueryStats stats = load_query_stats<T>(p.row_stats, steps.work(work_at), row0() + me.lane() / 4);
    clear(dq);
    wait(bars.q_full(group), steps.work_phase());
    wait(bars.dout_full(group), steps.work_phase());
    bool is_last = false;
#pragma unroll 1
    while (!is_last) {
      wait(bars.k_full(k_stage()), k_phase());
      steps.read_step(k_stage());
      is_last = steps.is_last();
      issue_scores();
      if constexpr (!T::kLateDp) issue_dp();
      const int col0 = steps.block() * kN;
      [[maybe_unused]] ReadBias<E, false, kN / 2> bias;
      [[maybe_unused]] uint32_t visible = ~0u, dropped = 0;
      if constexpr (!T::kPlain) {
        visible = steps.visible(group);
        dropped = steps.template dropped<kN / 2>(row0(), col0, work_at);
        if constexpr (T::kAdds) bias.template ask<0>(steps.score_mod(work_at), row0(), col0);
      }
      ptx::wgmma_wait<T::kLateDp ? 0 : 1>();
      ptx::warpgroup_fence_operand(s);
      if (is_last) me.arrive(bars.q_empty(group));
      if constexpr (T::kPlain) {
        scores_to_row_weights(s, stats, a.unit);
        const AttnMod mod = steps.mod(work_at);
        // Rows outside the sequence have weight 0 anyway.
        const int first = row0() - me.warp() * 16;
        const bool whole = col0 + kN <= min(mod.seqlen_k, first + mod.shift() + problem.reach_right + 1) &&
                           col0 >= first + T::kGroupRows - 1 + mod.shift() - problem.reach_left;
        if (!whole) hide_keys(s, mod, row0() + me.lane() / 4, col0 + 2 * (me.lane() % 4));
      } else if constexpr (T::kHides) {
        scores_to_row_weights(s, stats, a.unit);
        if (__any_sync(ptx::kFullWarp, visible != ~0u)) hide_weights(s, visible);
      } else {
        change_scores<E, T, false>(
            s, a, steps.score_mod(work_at), row0(), col0, visible, dropped, bias,
            [&](int i) { return stats.minus_lse[i / 2 % 2]; }, [](int, uint32_t) {});
      }
      ptx::warpgroup_fence_operand(s);
      if constexpr (T::kLateDp) issue_dp();
      ptx::wgmma_wait<0>();
      ptx::warpgroup_fence_operand(dp);
      me.arrive(bars.v_empty(v_stage()));
      if (is_last) me.arrive(bars.dout_empty(group));
      v_ring.advance();
      const float keep = keep_scale_of<T>(a);
#pragma unroll
      for (int i = 0; i < kN / 2; ++i) dp[i] = gradient_of<T>(dp[i], s[i], stats.minus_delta[i / 2 % 2], keep);
      pack<E>(words, dp);
      ptx::warpgroup_fence_operand(dq);
      ptx::warpgroup_fence_operand(words);
      ptx::wgmma_fence();
      issue_pv<E>(dq, words, uniform(descriptor_low(k_at(), kN * 128)));
      ptx::wgmma_commit();
      ptx::wgmma_wait<0>();
      ptx::warpgroup_fence_operand(dq);
      ptx::warpgroup_fence_operand(words);
      if constexpr (!T::kPlain) __syncwarp();  // all lanes have read the step
      me.arrive(bars.k_empty(k_stage()));
      k_ring.advance();
      ++count;
      steps.advance(work_at);
    }
    const auto& work = steps.work(work_at);
    store_rows<E>(p.dq, work.w.b, work.w.q, work.w.h, dq, problem.scale, problem.head_dim, row0() + me.lane() / 4,
                  me.lane());
    steps.release_work(work_at);
  }
}

}  // namespace flash_ext::sm90
