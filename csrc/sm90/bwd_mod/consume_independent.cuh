// The consumers of the sm90 backward with modifiers whose warpgroups are independent: as consume_independent() of the
// plain one, with the steps and tests of consume.cuh. A loop of its own: nothing passes between warpgroups, so it has
// neither the exchange nor the barriers of that one.
#pragma once

#include "../bwd/steps.cuh"
#include "scores.cuh"

namespace flash_ext::sm90 {

// A warpgroup has 128 keys, in two blocks of 64. It passes over steps whose queries see none of its keys.
template <typename T>
__device__ __forceinline__ void consume_mod_independent(const BwdModArgs& a, uint32_t smem, unsigned char* smem_bytes,
                                                        ModKeyShared<T>& shared, ModKeyBarriers<T> bars, int group) {
  using E = typename T::Element;
  constexpr int D = T::kHeadDim, kM = T::kBlockM, kBlocks = 2, kRows = 64 * kBlocks;
  static_assert(D == 64 && T::kDsStages == 2);
  const Modifiers& m = a.m;
  const Problem& problem = a.plain.p.problem;
  // Read once: ptxas would read the thread's number in every step again, and spill.
  int lane = threadIdx.x % 32;
  asm volatile("" : "+r"(lane));
  const int warp = (threadIdx.x / 32) % 4;
  const uint32_t ds_at = smem + T::kDsAt + group * T::kDsStages * T::kDsBytes, ds_to = ds_at + ds_offset(warp, lane);

  float dk[kBlocks][D / 2], dv[kBlocks][D / 2];
  PipelineState<T::kWorkStages> work_ring;
  PipelineState<T::kStages> ring;
  PipelineState<T::kMaskStages> mask_ring;
  uint32_t kv_place = 0, kv_phase = 0, ds_stage = 0, bias_phase = 0;
  const auto arrive = [&](uint32_t bar) { ptx::mbarrier_arrive_for_warp(bar, lane == 0); };
  const auto free_mask_words = [&] {
    __syncwarp();
    arrive(bars.mask_empty(mask_ring.stage));
    mask_ring.advance();
  };
  const auto free_bias = [&](int place) {
    __syncwarp();
    arrive(bars.bias_empty(place));
  };
#pragma unroll 1
  while (true) {
    wait(bars.work_full(work_ring.stage), work_ring.phase);
    const BwdModWorkTile& work = shared.work_tiles[work_ring.stage];
    if (work.w.block < 0) break;
    const int group_key = work.w.block * T::kBlockN + group * kRows;
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      clear(dk[b]);
      clear(dv[b]);
    }
    wait(bars.place_full(0), kv_phase);
    wait(bars.place_full(1), kv_phase);
    kv_phase ^= 1;
    const uint32_t k_low = uniform(descriptor_low(smem + kv_place * T::kVAt + group * kRows * 128, 16));
    const uint32_t v_low = uniform(descriptor_low(smem + (kv_place ^ 1) * T::kVAt + group * kRows * 128, 16));
    bool is_over = false;
#pragma unroll 1
    while (!is_over) {
      wait(bars.q_full(ring.stage), ring.phase);
      wait(bars.dout_full(ring.stage), ring.phase);
      const BwdStep& step = shared.steps[ring.stage];
      is_over = step.is_last();
      const uint32_t tests = step.tests(group);
      const bool has_words = __any_sync(ptx::kFullWarp, step.has_tests());
      if (has_words) wait(bars.mask_full(mask_ring.stage), mask_ring.phase);
      if (__any_sync(ptx::kFullWarp, tests == kSkipped)) {
        if (has_words) free_mask_words();
        if constexpr (T::kAdds) {
          if (a.brings_bias) {
#pragma unroll 1
            for (int place = group * kBlocks; place < (group + 1) * kBlocks; ++place) {
              wait(bars.bias_full(place), bias_phase);
              free_bias(place);
            }
            bias_phase ^= 1;
          }
        }
        __syncwarp();
        arrive(bars.q_empty(ring.stage));
        arrive(bars.dout_empty(ring.stage));
        ring.advance();
        continue;
      }
      const uint32_t q_at = smem + T::kQAt + ring.stage * T::kQBytes, dout_at = q_at + (T::kDoutAt - T::kQAt);
      const uint32_t q_low = uniform(descriptor_low(q_at, 16)), dout_low = uniform(descriptor_low(dout_at, 16));
      const float* stats =
          reinterpret_cast<const float*>(smem_bytes + T::kStatsAt) + ring.stage * 2 * kM + 2 * (lane % 4);
      uint32_t visible[kBlocks] = {~0u, ~0u};  // bits of the scores that are seen
      if (has_words) {
        if (tests != 0) {
          const auto* words =
              reinterpret_cast<const uint32_t*>(shared.mask_words(WordKind::kVisible, mask_ring.stage)) + group * 256 +
              warp * 32 + lane;
#pragma unroll
          for (int b = 0; b < kBlocks; ++b) visible[b] = words[b * 128];
        }
        free_mask_words();
      }
      const auto score_mod = [&] { return ScoreMod{problem, m, work.seq, work.first_head + step.head()}; };
      const auto first_query = [&] { return step.block * kM; };
      float s[32], dp[32];
      uint32_t p_words[16], ds_words[16];
      const auto form = [&](int b) {
        const auto first_key = [&] { return group_key + b * 64 + warp * 16; };
        uint32_t own_visible = visible[b];
        if constexpr (!T::kMakersHideEnds) {
          const int left = work.seq.seqlen_k - first_key() - lane / 4;
          own_visible &= left > 8 ? ~0u : left > 0 ? kFirstKeyScores : 0;
        }
        [[maybe_unused]] float key_bias[2] = {};
        if constexpr (T::kAdds) {
          if (m.bias.ptr != nullptr && !a.brings_bias) load_key_bias<E>(key_bias, score_mod(), first_key());
        }
        [[maybe_unused]] uint32_t dropped = 0;
        if constexpr (T::kConsumersDraw) {
          uint16_t* const drawn = reinterpret_cast<uint16_t*>(shared.mask_words(WordKind::kDropped, b));
          dropped = draw_dropped<T>(m, first_query(), first_key(), shared.drop[ring.stage], drawn);
        }
        ptx::wgmma_wait<1>();
        ptx::warpgroup_fence_operand(s);
        const StepView view{score_mod, first_query, first_key, [&] { return stats; },
                            [&]() -> const HeadDistances& { return shared.distances[ring.stage]; }};
        weights_of_scores<T>(s, a, view, key_bias, own_visible, [&](float (&s)[32]) {
          const int place = group * kBlocks + b;
          wait(bars.bias_full(place), bias_phase);
          add_brought_bias<E>(s, smem + T::kBiasAt + place * kM * 128, warp);
          free_bias(place);
        });
        ptx::wgmma_wait<0>();
        ptx::warpgroup_fence_operand(dp);
        if (b > 0 && !T::kDrops) {
          RegisterStats<32> delta;
          delta.load(stats + kM);
          add_minus_delta(dp, delta);
        }
        gradients_of_scores<T>(s, dp, a, stats, own_visible, dropped);
        if constexpr (T::kAdds) {
          if (a.key_sums.to != nullptr) {
            const int head = work.first_head + step.head(), split = shared.split[work_ring.stage];
            add_to_key_sums(a.key_sums.of(work.seq.b, head, split), a.key_sums.cols, dp, first_key());
          }
        }
        pack<E>(p_words, s);
        pack<E>(ds_words, dp);
        store_ds(ds_to + ds_stage * T::kDsBytes + b * 64 * 128, ds_words);
        ptx::warpgroup_fence_operand(p_words);
        ptx::warpgroup_fence_operand(ds_words);
      };
      // With dropout -delta comes to dP afterwards.
      take_key_blocks<E, kM, kRows, !T::kDrops>({k_low, v_low, q_low, dout_low}, s, dp, p_words, ds_words, dk, dv,
                                                stats + kM, form);
      debug_delay();
      ptx::bar_sync(ptx::kGroupBarrier + group, ptx::kWarpgroupThreads);
      float dq[D / 2];
      ptx::wgmma_fence();
      issue_dq<E, kRows>(dq, uniform(descriptor_low(ds_at + ds_stage * T::kDsBytes, 16)), k_low);
      ptx::wgmma_commit();
      ptx::wgmma_wait<1>();
      fence_blocks(dk, dv);
      // The gradient of a 16-bit bias with an entry for each score is dS.
      if constexpr (T::kAdds) {
        if (a.dbias.out != nullptr) {
#pragma unroll 1
          for (int first = warp * 16, i = 0; i < 2; ++i, first += 8) {
            store_gradient_rows(a.dbias, work.w.b, work.first_head + step.head(), ds_at + ds_stage * T::kDsBytes, first,
                                first_query(), group_key);
          }
        }
      }
      const bool has_rows = first_query() + warp * 16 < work.seq.seqlen_q;
      const int tile = work.tile + step.head() * a.plain.tiles_per_head + step.block;
      __syncwarp();  // all lanes have read the step
      arrive(bars.q_empty(ring.stage));
      arrive(bars.dout_empty(ring.stage));
      ptx::wgmma_wait<0>();
      ptx::warpgroup_fence_operand(dq);
      float* const to = a.plain.p.dq_accum + static_cast<int64_t>(tile) * (kM * D) + warp * 16 * D;
      if (has_rows) {
        if (problem.head_dim <= 32) {  // half of the columns
          add_dq<false>(to, first_of<D / 4>(dq), 0, lane);
        } else {
          add_dq<false>(to, dq, 0, lane);
        }
      }
      ring.advance();
      ds_stage ^= 1;
      if constexpr (T::kAdds) bias_phase ^= 1;
    }
    __syncwarp();
    arrive(bars.place_empty(0));
    arrive(bars.place_empty(1));
    kv_place ^= 1;
    const BwdParams& p = a.plain.p;
    const int head = gradients_head(a, work.w, shared.split[work_ring.stage]);
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      const int key = group_key + b * 64 + warp * 16 + lane / 4;
      store_rows<E>(p.dv, work.w.b, work.w.k, head, dv[b], T::kDrops ? m.keep_scale : 1.f, problem.head_dim_v, key,
                    lane);
      store_rows<E>(p.dk, work.w.b, work.w.k, head, dk[b], problem.scale, problem.head_dim, key, lane);
    }
    __syncwarp();
    arrive(bars.work_empty(work_ring.stage));
    work_ring.advance();
  }
}

}  // namespace flash_ext::sm90
