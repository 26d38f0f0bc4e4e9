// The consumers of the kernel of dK and dV of the sm90 split backward.
//
// A warpgroup issues the scores of the next step together with the gradient product of this one, also across work
// tiles: exponentials overlap that product. That wants three tiles of Q and dO in shared memory: at head_dim 256 three
// of 48 queries are faster than two of 64 (evidence: split-bwd-wide). The products of a step that does not exist
// (behind the last one) read what lies there, and nothing comes of them: a branch around them would make ptxas
// serialise all.
#pragma once

#include "steps.cuh"

namespace flash_ext::sm90 {

// First warpgroup: P of 64 keys, and dV. It leaves the second one P, with modifiers the factor from dP - delta to dS.
template <typename T>
__device__ __forceinline__ void consume_dv(const typename T::Args& a, uint32_t smem, unsigned char* smem_bytes,
                                           SplitShared<T>& shared, SplitBarriers<T> bars) {
  using E = typename T::Element;
  constexpr int D = T::kHeadDim, kM = T::kBlockM;
  constexpr bool kPacksScores = T::kPlain || T::kHides;
  const BwdParams& p = a.plain.p;
  const ConsumerThread<T> me;
  const auto k_low = kept<T>([=] { return uniform(descriptor_low(smem, 16)); });

  float dv[T::kHeadDimV / 2], s[kM / 2];
  uint32_t words[kM / 4];
  [[maybe_unused]] uint32_t next_words[kM / 4];  // of P, while the product reads those of the step before
  RsOperand<T::kRsStepsK> k;
  WorkSteps<T> steps(a, shared, bars, me);
  PipelineState<T::kStages> q_ring, dout_ring;
  PipelineState<T::kWeightStages> handed;
  handed.phase = 1;  // the first wait for an empty stage passes
  int work_at = -1;
  const auto take_keys = [&] {
    wait(bars.k_full(), steps.work_phase());
    if constexpr (T::kRsStepsK > 0) k.load(smem, me.warp(), me.lane());
    if constexpr (T::kFreesK) {
      __syncwarp();
      me.arrive(bars.k_empty());
    }
  };
  const auto take_step = [&] {
    wait(bars.q_full(q_ring.stage), q_ring.phase);
    steps.read_step(q_ring.stage);
  };
  const auto issue_scores = [&] {
    ptx::warpgroup_fence_operand(s);
    ptx::warpgroup_fence_operand(k.words);
    ptx::wgmma_fence();
    issue_rs_products<E, D, kM, false>(s, k, k_low(),
                                       uniform(descriptor_low(smem + T::kQAt + q_ring.stage * T::kQBytes, 16)));
    ptx::wgmma_commit();
  };
  const auto col0 = [&] { return steps.work(work_at).w.block * T::kBlockN + me.warp() * 16; };
  [[maybe_unused]] ReadBias<E, true, kM / 2> bias;
  uint32_t visible = ~0u, dropped = 0;
  // Mask words, draws, and loads of a bias: all that need not wait for the scores.
  const auto prepare_scores = [&] {
    if constexpr (!T::kPlain) {
      visible = steps.visible(0);
      const int row0 = steps.block() * kM;
      dropped = steps.template dropped<kM / 2>(row0, col0(), q_ring.stage);
      if constexpr (T::kAdds) {
        const ScoreMod score_mod = steps.score_mod(work_at);
        bias.template ask<0>(score_mod, row0, col0());
        bias.template ask<1>(score_mod, row0, col0());
      }
    }
  };
  const auto form_weights = [&] {
    const float* stats =
        reinterpret_cast<const float*>(smem_bytes + T::kStatsAt + q_ring.stage * T::kStatsBytes) + 2 * (me.lane() % 4);
    if constexpr (kPacksScores) {
      scores_to_weights(s, stats, a.unit);
      if (T::kHides && __any_sync(ptx::kFullWarp, visible != ~0u)) hide_weights(s, visible);
    } else {
      change_scores<E, T, true>(
          s, a, steps.score_mod(work_at), steps.block() * kM, col0(), visible, dropped, bias,
          [&](int i) { return stats[i / 4 * 8 + i % 2]; }, [&](int i, uint32_t pair) { next_words[i] = pair; });
    }
    __syncwarp();
    me.arrive(bars.q_empty(q_ring.stage));
    if (!T::kFreesK && steps.is_last()) me.arrive(bars.k_empty());
    q_ring.advance();
    if constexpr (T::kPlain) {
      if (!steps.is_whole()) {
        hide(s, steps.mod(work_at), steps.work(work_at).w.block * T::kBlockN + me.row(),
             steps.block() * kM + 2 * (me.lane() % 4));
      }
    }
  };
  const auto send_weights = [&] {
    if constexpr (kPacksScores) {
      pack<E>(words, s);
    } else {
#pragma unroll
      for (int i = 0; i < kM / 4; ++i) words[i] = next_words[i];
    }
    wait(bars.weights_empty(handed.stage), handed.phase);
    unsigned char* const to = smem_bytes + T::kWeightsAt + handed.stage * T::kWeightBytes + me.thread() * 16;
#pragma unroll
    for (int i = 0; i < kM / 8; ++i) {
      *reinterpret_cast<float4*>(to + i * 2048) = make_float4(s[4 * i], s[4 * i + 1], s[4 * i + 2], s[4 * i + 3]);
    }
    __syncwarp();
    me.arrive(bars.weights_full(handed.stage));
    handed.advance();
  };

#pragma unroll 1
  while (true) {
    work_at = steps.take_work([&](const auto& work) {
      clear_rows(p.dv, work.w.b, work.w.k, work.w.h, p.problem.head_dim_v, work.w.block * T::kBlockN + me.warp() * 16,
                 me.lane());
    });
    if (work_at < 0) return;
    clear(dv);
    take_keys();
    take_step();
    issue_scores();
    prepare_scores();
    ptx::wgmma_wait<0>();
    ptx::warpgroup_fence_operand(s);
    form_weights();
    send_weights();
    bool more = true;
#pragma unroll 1
    while (more) {
      const bool ends = steps.is_last();
      const int ended = work_at;
      ptx::warpgroup_fence_operand(dv);
      ptx::warpgroup_fence_operand(words);
      if (ends) {
        work_at = steps.take_following_work();
        more = work_at >= 0;
        if (more) take_keys();
      } else {
        steps.advance(work_at);
      }
      if (more) take_step();
      issue_scores();
      wait(bars.dout_full(dout_ring.stage), dout_ring.phase);
      ptx::wgmma_fence();
      issue_pv<E>(dv, words, uniform(descriptor_low(smem + T::kDoutAt + dout_ring.stage * T::kDoutBytes, kM * 128)));
      ptx::wgmma_commit();
      if (more) prepare_scores();
      ptx::wgmma_wait<1>();
      ptx::warpgroup_fence_operand(s);
      if (more) form_weights();
      ptx::warpgroup_fence_operand(s);
      ptx::wgmma_wait<0>();
      ptx::warpgroup_fence_operand(dv);
      ptx::warpgroup_fence_operand(words);
      me.arrive(bars.dout_empty(dout_ring.stage));
      dout_ring.advance();
      if (more) send_weights();
      if (ends) {
        const auto& work = steps.work(ended);
        float scale = 1.f;
        if constexpr (T::kDrops) scale = a.m.keep_scale;
        store_rows<E>(p.dv, work.w.b, work.w.k, work.w.h, dv, scale, p.problem.head_dim_v,
                      work.w.block * T::kBlockN + me.row(), me.lane());
        steps.release_work(ended);
        clear(dv);
      }
    }
    if constexpr (!T::kPlain) return;  // every work tile has steps: the loop above has seen the last one
  }
}

// Second warpgroup: dS from what the first one sends, and dK.
template <typename T>
__device__ __forceinline__ void consume_dk(const typename T::Args& a, uint32_t smem, unsigned char* smem_bytes,
                                           SplitShared<T>& shared, SplitBarriers<T> bars) {
  using E = typename T::Element;
  constexpr int D = T::kHeadDim, kM = T::kBlockM;
  const BwdParams& p = a.plain.p;
  const ConsumerThread<T> me;
  const auto v_low = kept<T>([=] { return uniform(descriptor_low(smem + T::kVAt, 16)); });

  float dk[D / 2], dp[kM / 2];
  uint32_t words[kM / 4];
  RsOperand<T::kRsStepsV> v;
  WorkSteps<T, false> steps(a, shared, bars, me);
  PipelineState<T::kStages> q_ring, dout_ring;
  PipelineState<T::kWeightStages> handed;
  int work_at = -1;
  const auto minus_delta = [&] {
    return reinterpret_cast<const float*>(smem_bytes + T::kStatsAt + q_ring.stage * T::kStatsBytes) + kM +
           2 * (me.lane() % 4);
  };
  const auto take_values = [&] {
    wait(bars.v_full(), steps.work_phase());
    if constexpr (T::kRsStepsV > 0) v.load(smem + T::kVAt, me.warp(), me.lane());
    if constexpr (T::kFreesV) {
      __syncwarp();
      me.arrive(bars.v_empty());
    }
  };
  const auto take_step = [&] {
    wait(bars.q_full(q_ring.stage), q_ring.phase);
    steps.read_step(q_ring.stage);
    wait(bars.dout_full(dout_ring.stage), dout_ring.phase);
  };
  // dP starts from -delta, so that the products give dP - delta; with dropout -delta comes afterwards. Behind the last
  // step it is issued once more, on what lies there by then, and nobody takes the result.
  const auto issue_dp = [&] {
    if constexpr (!T::kDrops) begin_dp(dp, minus_delta());
    ptx::warpgroup_fence_operand(dp);
    ptx::warpgroup_fence_operand(v.words);
    ptx::wgmma_fence();
    issue_rs_products<E, T::kHeadDimV, kM, !T::kDrops>(
        dp, v, v_low(), uniform(descriptor_low(smem + T::kDoutAt + dout_ring.stage * T::kDoutBytes, 16)));
    ptx::wgmma_commit();
  };
  const auto form_ds = [&] {
    me.arrive(bars.dout_empty(dout_ring.stage));
    if (!T::kFreesV && steps.is_last()) me.arrive(bars.v_empty());
    dout_ring.advance();
    wait(bars.weights_full(handed.stage), handed.phase);
    // racecheck reports -delta, read here with dropout. This warp frees the Q of the step behind it (release), and the
    // copy that writes there next has waited for that (acquire).
    const unsigned char* from = smem_bytes + T::kWeightsAt + handed.stage * T::kWeightBytes + me.thread() * 16;
    [[maybe_unused]] const float* delta = minus_delta();
    [[maybe_unused]] const float keep = keep_scale_of<T>(a);
#pragma unroll
    for (int i = 0; i < kM / 8; ++i) {
      const float4 x = *reinterpret_cast<const float4*>(from + i * 2048);
      if constexpr (T::kDrops) {
        const float2 minus = *reinterpret_cast<const float2*>(delta + 8 * i);
        dp[4 * i] = gradient_of<T>(dp[4 * i], x.x, minus.x, keep);
        dp[4 * i + 1] = gradient_of<T>(dp[4 * i + 1], x.y, minus.y, keep);
        dp[4 * i + 2] = gradient_of<T>(dp[4 * i + 2], x.z, minus.x, keep);
        dp[4 * i + 3] = gradient_of<T>(dp[4 * i + 3], x.w, minus.y, keep);
      } else {
        dp[4 * i] *= x.x;
        dp[4 * i + 1] *= x.y;
        dp[4 * i + 2] *= x.z;
        dp[4 * i + 3] *= x.w;
      }
    }
    __syncwarp();
    me.arrive(bars.weights_empty(handed.stage));
    handed.advance();
  };

#pragma unroll 1
  while (true) {
    work_at = steps.take_work([&](const auto& work) {
      clear_rows(p.dk, work.w.b, work.w.k, work.w.h, p.problem.head_dim, work.w.block * T::kBlockN + me.warp() * 16,
                 me.lane());
    });
    if (work_at < 0) return;
    clear(dk);
    take_values();
    take_step();
    issue_dp();
    ptx::wgmma_wait<0>();
    ptx::warpgroup_fence_operand(dp);
    form_ds();
    pack<E>(words, dp);
    bool more = true;
#pragma unroll 1
    while (more) {
      const bool ends = steps.is_last();
      const int ended = work_at, q_stage = q_ring.stage;
      ptx::warpgroup_fence_operand(dk);
      ptx::warpgroup_fence_operand(words);
      q_ring.advance();
      steps.advance(work_at);
      if (ends) {
        work_at = steps.take_following_work();
        more = work_at >= 0;
        if (more) take_values();
      }
      if (more) take_step();
      issue_dp();
      ptx::wgmma_fence();
      issue_pv<E>(dk, words, uniform(descriptor_low(smem + T::kQAt + q_stage * T::kQBytes, kM * 128)));
      ptx::wgmma_commit();
      ptx::wgmma_wait<1>();
      ptx::warpgroup_fence_operand(dp);
      if (more) form_ds();
      ptx::warpgroup_fence_operand(dp);
      ptx::wgmma_wait<0>();
      ptx::warpgroup_fence_operand(dk);
      ptx::warpgroup_fence_operand(words);
      me.arrive(bars.q_empty(q_stage));
      pack<E>(words, dp);
      if (ends) {
        const auto& work = steps.work(ended);
        store_rows<E>(p.dk, work.w.b, work.w.k, work.w.h, dk, p.problem.scale, p.problem.head_dim,
                      work.w.block * T::kBlockN + me.row(), me.lane());
        steps.release_work(ended);
        clear(dk);
      }
    }
    if constexpr (!T::kPlain) return;  // every work tile has steps: the loop above has seen the last one
  }
}

}  // namespace flash_ext::sm90
