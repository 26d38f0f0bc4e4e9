// The consumers of the kernel of dK and dV of the sm90 split backward.
//
// A warpgroup issues the scores of the next step together with the gradient product of this one, also across items:
// exponentials overlap that product. That wants three tiles of Q and dO in shared memory (head_dim 256, 16k rows: 923
// TFLOP/s, as of all five products, with three tiles of 48 queries, 750 with two of 64 in either order; 0.94 to 0.99 of
// that speed, and up to 1.05 with causal 1k rows, with one step after the other). The products of a step that does not
// exist (behind the last one) read what lies there, and nothing comes of them: a branch around them would make ptxas
// serialise all.
#pragma once

#include "bwd_split_steps.cuh"

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
  HeldRows<T::kHeldK> k;
  ItemSteps<T> steps(a, shared, bars, me);
  RingPosition<T::kSlots> q_ring, dout_ring;
  RingPosition<T::kWeightSlots> handed;
  handed.parity = 1;  // the first wait for an empty place passes
  int item_at = -1;
  const auto take_keys = [&] {
    wait(bars.k_full(), steps.item_parity());
    if constexpr (T::kHeldK > 0) k.load(smem, me.warp(), me.lane());
    if constexpr (T::kFreesHeldK) {
      __syncwarp();
      me.arrive(bars.k_empty());
    }
  };
  const auto take_step = [&] {
    wait(bars.q_full(q_ring.slot), q_ring.parity);
    steps.read_step(q_ring.slot);
  };
  const auto issue_scores = [&] {
    ptx::pin(s);
    ptx::pin(k.words);
    ptx::wgmma_fence();
    issue_held_products<E, D, kM, false>(s, k, k_low(),
                                         uniform(descriptor_low(smem + T::kQAt + q_ring.slot * T::kQBytes, 16)));
    ptx::wgmma_commit();
  };
  const auto col0 = [&] { return steps.item(item_at).w.block * T::kBlockN + me.warp() * 16; };
  [[maybe_unused]] ReadBias<E, true, kM / 2> bias;
  uint32_t visible = ~0u, dropped = 0;
  // Mask words, draws, and loads of a bias: all that need not wait for the scores.
  const auto prepare_scores = [&] {
    if constexpr (!T::kPlain) {
      visible = steps.visible(0);
      const int row0 = steps.block() * kM;
      dropped = steps.template dropped<kM / 2>(row0, col0(), q_ring.slot);
      if constexpr (T::kAdds) {
        const Scores scores = steps.scores(item_at);
        bias.template ask<0>(scores, row0, col0());
        bias.template ask<1>(scores, row0, col0());
      }
    }
  };
  const auto form_weights = [&] {
    const float* stats = reinterpret_cast<const float*>(smem_bytes + T::kStatsAt + q_ring.slot * T::kStatsBytes) +
                         2 * (me.lane() % 4);
    if constexpr (kPacksScores) {
      scores_to_weights(s, stats, a.unit);
      if (T::kHides && __any_sync(ptx::kFullWarp, visible != ~0u)) hide_weights(s, visible);
    } else {
      change_scores<E, T, true>(
          s, a, steps.scores(item_at), steps.block() * kM, col0(), visible, dropped, bias,
          [&](int i) { return stats[i / 4 * 8 + i % 2]; },
          [&](int i, uint32_t pair) { next_words[i] = pair; });
    }
    __syncwarp();
    me.arrive(bars.q_empty(q_ring.slot));
    if (!T::kFreesHeldK && steps.is_last()) me.arrive(bars.k_empty());
    q_ring.advance();
    if constexpr (T::kPlain) {
      if (!steps.is_whole()) {
        hide(s, steps.mod(item_at), steps.item(item_at).w.block * T::kBlockN + me.row(),
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
    wait(bars.weights_empty(handed.slot), handed.parity);
    unsigned char* const to = smem_bytes + T::kWeightsAt + handed.slot * T::kWeightBytes + me.thread() * 16;
#pragma unroll
    for (int i = 0; i < kM / 8; ++i) {
      *reinterpret_cast<float4*>(to + i * 2048) = make_float4(s[4 * i], s[4 * i + 1], s[4 * i + 2], s[4 * i + 3]);
    }
    __syncwarp();
    me.arrive(bars.weights_full(handed.slot));
    handed.advance();
  };

#pragma unroll 1
  while (true) {
    item_at = steps.take_item([&](const auto& item) {
      clear_rows(p.dv, item.w.b, item.w.k, item.w.h, p.problem.head_dim_v, item.w.block * T::kBlockN + me.warp() * 16,
                 me.lane());
    });
    if (item_at < 0) return;
    clear(dv);
    take_keys();
    take_step();
    issue_scores();
    prepare_scores();
    ptx::wgmma_wait<0>();
    ptx::pin(s);
    form_weights();
    send_weights();
    bool more = true;
#pragma unroll 1
    while (more) {
      const bool ends = steps.is_last();
      const int ended = item_at;
      ptx::pin(dv);
      ptx::pin(words);
      if (ends) {
        item_at = steps.take_following_item();
        more = item_at >= 0;
        if (more) take_keys();
      } else {
        steps.advance(item_at);
      }
      if (more) take_step();
      issue_scores();
      wait(bars.dout_full(dout_ring.slot), dout_ring.parity);
      ptx::wgmma_fence();
      issue_pv<E>(dv, words, uniform(descriptor_low(smem + T::kDoutAt + dout_ring.slot * T::kDoutBytes, kM * 128)));
      ptx::wgmma_commit();
      if (more) prepare_scores();
      ptx::wgmma_wait<1>();
      ptx::pin(s);
      if (more) form_weights();
      ptx::pin(s);
      ptx::wgmma_wait<0>();
      ptx::pin(dv);
      ptx::pin(words);
      me.arrive(bars.dout_empty(dout_ring.slot));
      dout_ring.advance();
      if (more) send_weights();
      if (ends) {
        const auto& item = steps.item(ended);
        float scale = 1.f;
        if constexpr (T::kDrops) scale = a.m.keep_scale;
        store_rows<E>(p.dv, item.w.b, item.w.k, item.w.h, dv, scale, p.problem.head_dim_v,
                      item.w.block * T::kBlockN + me.row(), me.lane());
        steps.release_item(ended);
        clear(dv);
      }
    }
    if constexpr (!T::kPlain) return;  // every item has steps: the loop above has seen the last one
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
  HeldRows<T::kHeldV> v;
  ItemSteps<T, false> steps(a, shared, bars, me);
  RingPosition<T::kSlots> q_ring, dout_ring;
  RingPosition<T::kWeightSlots> handed;
  int item_at = -1;
  const auto minus_delta = [&] {
    return reinterpret_cast<const float*>(smem_bytes + T::kStatsAt + q_ring.slot * T::kStatsBytes) + kM +
           2 * (me.lane() % 4);
  };
  const auto take_values = [&] {
    wait(bars.v_full(), steps.item_parity());
    if constexpr (T::kHeldV > 0) v.load(smem + T::kVAt, me.warp(), me.lane());
    if constexpr (T::kFreesHeldV) {
      __syncwarp();
      me.arrive(bars.v_empty());
    }
  };
  const auto take_step = [&] {
    wait(bars.q_full(q_ring.slot), q_ring.parity);
    steps.read_step(q_ring.slot);
    wait(bars.dout_full(dout_ring.slot), dout_ring.parity);
  };
  // dP starts from -delta, so that the products give dP - delta; with dropout -delta comes afterwards. Behind the last
  // step it is issued once more, on what lies there by then, and nobody takes the result.
  const auto issue_dp = [&] {
    if constexpr (!T::kDrops) begin_dp(dp, minus_delta());
    ptx::pin(dp);
    ptx::pin(v.words);
    ptx::wgmma_fence();
    issue_held_products<E, T::kHeadDimV, kM, !T::kDrops>(
        dp, v, v_low(), uniform(descriptor_low(smem + T::kDoutAt + dout_ring.slot * T::kDoutBytes, 16)));
    ptx::wgmma_commit();
  };
  const auto form_ds = [&] {
    me.arrive(bars.dout_empty(dout_ring.slot));
    if (!T::kFreesHeldV && steps.is_last()) me.arrive(bars.v_empty());
    dout_ring.advance();
    wait(bars.weights_full(handed.slot), handed.parity);
    const unsigned char* from = smem_bytes + T::kWeightsAt + handed.slot * T::kWeightBytes + me.thread() * 16;
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
    me.arrive(bars.weights_empty(handed.slot));
    handed.advance();
  };

#pragma unroll 1
  while (true) {
    item_at = steps.take_item([&](const auto& item) {
      clear_rows(p.dk, item.w.b, item.w.k, item.w.h, p.problem.head_dim, item.w.block * T::kBlockN + me.warp() * 16,
                 me.lane());
    });
    if (item_at < 0) return;
    clear(dk);
    take_values();
    take_step();
    issue_dp();
    ptx::wgmma_wait<0>();
    ptx::pin(dp);
    form_ds();
    pack<E>(words, dp);
    bool more = true;
#pragma unroll 1
    while (more) {
      const bool ends = steps.is_last();
      const int ended = item_at, q_slot = q_ring.slot;
      ptx::pin(dk);
      ptx::pin(words);
      q_ring.advance();
      steps.advance(item_at);
      if (ends) {
        item_at = steps.take_following_item();
        more = item_at >= 0;
        if (more) take_values();
      }
      if (more) take_step();
      issue_dp();
      ptx::wgmma_fence();
      issue_pv<E>(dk, words, uniform(descriptor_low(smem + T::kQAt + q_slot * T::kQBytes, kM * 128)));
      ptx::wgmma_commit();
      ptx::wgmma_wait<1>();
      ptx::pin(dp);
      if (more) form_ds();
      ptx::pin(dp);
      ptx::wgmma_wait<0>();
      ptx::pin(dk);
      ptx::pin(words);
      me.arrive(bars.q_empty(q_slot));
      pack<E>(words, dp);
      if (ends) {
        const auto& item = steps.item(ended);
        store_rows<E>(p.dk, item.w.b, item.w.k, item.w.h, dk, p.problem.softmax_scale, p.problem.head_dim,
                      item.w.block * T::kBlockN + me.row(), me.lane());
        steps.release_item(ended);
        clear(dk);
      }
    }
    if constexpr (!T::kPlain) return;  // every item has steps: the loop above has seen the last one
  }
}

}  // namespace flash_ext::sm90
