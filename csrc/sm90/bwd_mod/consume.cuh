// The consumers of the sm90 backward with modifiers: as consume_cooperative() of the plain one, but what a step is and
// which of its tests a warpgroup needs comes with each Q, and scores are changed before they become weights.
#pragma once

#include "../bwd/steps.cuh"
#include "scores.cuh"

namespace flash_ext::sm90 {

// The loop is not that of consume_cooperative(): what changes scores needs the registers in which that one keeps its
// walk, stages and phases, which here follow from one count and from what warp 0 lists.
template <typename T>
__device__ __forceinline__ void consume_mod_keys(const BwdModArgs& a, uint32_t smem, unsigned char* smem_bytes,
                                                 ModKeyShared<T>& shared, ModKeyBarriers<T> bars) {
  using E = typename T::Element;
  constexpr int D = T::kHeadDim, kM = T::kBlockM, kN = T::kBlockN;
  constexpr int kDqCount = D / 4;  // both warpgroups have half of the columns
  const Modifiers& m = a.m;
  const Problem& problem = a.plain.p.problem;
  // Registers are short: what follows from the thread's number is made anew where it is used.
  const auto warp_number = [] { return static_cast<uint32_t>(ptx::fresh_thread_idx()) / 32; };
  const auto warp_of = [=] { return static_cast<int>(warp_number() % 4); };
  const auto group_of = [=] { return static_cast<int>(warp_number() / 4 - 1); };
  const auto staging = [=] { return smem + T::kStagingAt + (warp_number() - 4) * T::kStagingBytes; };

  float dk[D / 2], dv[D / 2];
  uint32_t counts = 0;  // steps so far << 2 | work tiles so far modulo 4, in one register
  int mask_words = 0;  // taken so far
  const auto forget = [&] { asm volatile("" : "+r"(counts)::"memory"); };  // what was made of them
  const auto steps = [&] { return static_cast<int>(counts >> 2); };
  const auto work_tiles = [&] { return static_cast<int>(counts & 3); };
  const auto arrive = [&](uint32_t bar) { ptx::mbarrier_arrive_for_warp(bar, ptx::fresh_lane() == 0); };
  const auto work_of = [&]() -> const BwdModWorkTile& {
    return shared.work_tiles[stage_of(work_tiles(), T::kWorkStages)];
  };
  const auto stage = [&] { return stage_of(steps(), T::kStages); };
  const auto now = [&]() -> const BwdStep& { return shared.steps[stage_of(steps(), T::kSteps)]; };
  const auto first_query = [&] { return now().block * kM; };
  const auto first_key = [&] { return work_of().w.block * kN + group_of() * 64 + warp_of() * 16; };
  const auto score_mod = [&] {
    const BwdModWorkTile& work = work_of();
    return ScoreMod{problem, m, work.seq, work.first_head + now().head()};
  };
  const auto q_at = [&] { return smem + T::kQAt + stage() * T::kQBytes; };
  const auto dout_at = [&] { return q_at() + (T::kDoutAt - T::kQAt); };
  const auto k_place = [&] { return work_tiles() % 2; };  // and the phase of the barriers of both places
  const auto keys_at = [&](int place) { return smem + place * T::kVAt + group_of() * 64 * 128; };
  const auto stats = [&] {
    return reinterpret_cast<const float*>(smem_bytes + T::kStatsAt) + stage() * 2 * kM + 2 * (ptx::fresh_lane() % 4);
  };
  const auto ds_at = [&](int n) { return smem + T::kDsAt + n % T::kDsStages * T::kDsBytes; };
  const auto ds_full = [&](int n) { return bars.ds_full(n % T::kDsStages); };
  // Of the very first step there is none before, and the phase before the first is over.
  const auto wait_for_ds_before = [&] {
    const uint32_t before = steps() + 2 * T::kDsStages - 1;
    wait(ds_full(before), before / T::kDsStages % 2);
  };
  // dS goes where that of kDsStages steps ago was, when both warpgroups have read it for dQ and for the gradient of a
  // bias. Of three places that follows from ds_full of the step before. Of two, both say so: in every step of the dS of
  // the step before.
  const auto wait_for_ds_place = [&] {
    if constexpr (T::kDsStages == 2) wait(bars.ds_empty(steps() % 2), ((steps() + 1) / 2 + 1) % 2);
  };
  const auto free_ds_before = [&] {
    if constexpr (T::kDsStages == 2) arrive(bars.ds_empty((steps() + 1) % 2));
  };
  const auto issue_dq_before = [&](float (&dq)[kDqCount]) {
    const uint32_t columns = smem + k_place() * T::kVAt + group_of() * (D == 64 ? 64 : kN * 128);
    const uint32_t ds = ds_at(steps() + T::kDsStages - 1);
    issue_dq<E>(dq, uniform(descriptor_low(ds, 16)), uniform(descriptor_low(columns, 16)));
    ptx::wgmma_commit();
  };
  const auto add_dq_before = [&](const float (&dq)[kDqCount]) {
    const BwdStep before = shared.steps[stage_of(steps() - 1, T::kSteps)];
    if (a.stores_dq && work_of().seq.seqlen_k <= kN) {
      const BwdModWorkTile& work = work_of();
      StridedView half = a.plain.p.dq;  // this warpgroup's columns
      const int first = group_of() * 2 * kDqCount;
      half.ptr = static_cast<char*>(half.ptr) + first * (half.is_float ? 4 : 2);
      store_rows<E>(half, work.w.b, work.w.q, work.first_head + before.head(), dq, problem.scale,
                    problem.head_dim - first, before.block * kM + warp_of() * 16 + ptx::fresh_lane() / 4,
                    ptx::fresh_lane());
      return;
    }
    if constexpr (D == 64) {  // at 128 that would spill
      // The warp has no row of the sequence, or the warpgroup no column of dq.
      const bool has_rows = before.block * kM + warp_of() * 16 < work_of().seq.seqlen_q;
      if (!has_rows || group_of() * 2 * kDqCount >= problem.head_dim) return;
    }
    const int tile = work_of().tile + before.head() * a.plain.tiles_per_head + before.block;
    const int first =
        D == 64 ? warp_of() * 16 * 64 + group_of() * 32 * kDqCount : group_of() * 64 * 64 + warp_of() * 32 * kDqCount;
    add_dq<true>(a.plain.p.dq_accum + static_cast<int64_t>(tile) * (kM * D) + first, dq, staging(), ptx::fresh_lane());
  };
  // The gradient of a bias with an entry for each score is dS. In 16 bits it leaves from shared memory a step later,
  // each warp's eight rows whole, while products run. Kernels that take a bias in fp32 store what lanes hold: their dS
  // in shared memory is rounded, and beside dropout at head_dim 128 rows would spill 4 bytes.
  constexpr bool kStoresRows = T::kAdds && !T::kFloatBias;
  static_assert(!kStoresRows || T::kDsStages > 2);  // of two places the lanes' reads would need a __syncwarp
  const auto store_gradients_before = [&] {
    if constexpr (kStoresRows) {
      if (a.dbias.out == nullptr) return;
      const BwdStep before = shared.steps[stage_of(steps() - 1, T::kSteps)];
      store_gradient_rows(a.dbias, work_of().w.b, work_of().first_head + before.head(),
                          ds_at(steps() + T::kDsStages - 1), (group_of() * 4 + warp_of()) * 8, before.block * kM,
                          work_of().w.block * kN);
    }
  };
  const auto mask_stage = [&] { return stage_of(mask_words, T::kMaskStages); };
  const auto read_mask_word = [&](WordKind which) {
    wait(bars.mask_full(mask_stage()), phase_of(mask_words, T::kMaskStages));
    return reinterpret_cast<const uint32_t*>(shared.mask_words(which, mask_stage()))[ptx::fresh_thread_idx() - 128];
  };
  const auto free_mask_words = [&] {
    __syncwarp();
    arrive(bars.mask_empty(mask_stage()));
    ++mask_words;
  };
  // Bits of the scores of keys before the sequence's end.
  const auto scores_before_end = [&]() -> uint32_t {
    if constexpr (T::kMakersHideEnds) return ~0u;
    const int left = work_of().seq.seqlen_k - first_key() - ptx::fresh_lane() / 4;
    return left > 8 ? ~0u : left > 0 ? kFirstKeyScores : 0;
  };
  // The vote makes the exit warp-uniform; otherwise ptxas clones what follows.
  const auto visible_scores = [&]() -> uint32_t {
    const uint32_t tests = now().tests(group_of());
    uint32_t visible = ~0u;
    if (__any_sync(ptx::kFullWarp, now().has_tests())) {
      const uint32_t word = read_mask_word(WordKind::kVisible);
      free_mask_words();
      visible = tests == 0 ? ~0u : word;
    }
    return tests == kSkipped ? 0 : visible & scores_before_end();
  };
  const auto dropped_scores = [&]() -> uint32_t {
    if constexpr (!T::kLoadersDraw) return 0;
    const uint32_t word = read_mask_word(WordKind::kDropped);
    free_mask_words();
    return word;
  };
  const StepView view{score_mod, first_query, first_key, stats,
                      [&]() -> const HeadDistances& { return shared.distances[stage()]; }};
  const auto form_weights = [&](float (&s)[32], const float (&key_bias)[2], uint32_t visible) {
    weights_of_scores<T>(s, a, view, key_bias, visible, [&](float (&s)[32]) {
      wait(bars.bias_full(), steps() % 2);
      if (T::kFloatBias && m.bias.is_float) {
        add_brought_float_bias(s, smem + T::kBiasAt + group_of() * 2 * kM * 128, warp_of());
      } else {
        add_brought_bias<E>(s, smem + T::kBiasAt + group_of() * kM * 128, warp_of());
      }
      __syncwarp();
      arrive(bars.bias_empty());
    });
  };
  const auto step = [&] {
    float s[32], dp[32], dq[kDqCount];
    uint32_t p_words[16], ds_words[16];
    ptx::warpgroup_fence_operand(dk);
    ptx::warpgroup_fence_operand(dv);
    wait(bars.q_full(stage()), phase_of(steps(), T::kStages));
    [[maybe_unused]] float key_bias[2] = {};
    if constexpr (T::kAdds) {
      if (m.bias.ptr != nullptr && !a.brings_bias) load_key_bias<E>(key_bias, score_mod(), first_key());
    }
    const uint32_t visible = visible_scores();
    // With dropout -delta comes to dP afterwards.
    if constexpr (!T::kDrops) begin_dp(dp, stats() + kM);
    ptx::warpgroup_fence_operand(s);
    ptx::warpgroup_fence_operand(dp);
    ptx::wgmma_fence();
    issue_products<E, D, kN, kM, false>(s, uniform(descriptor_low(keys_at(k_place()), 16)),
                                        uniform(descriptor_low(q_at(), 16)));
    ptx::wgmma_commit();
    [[maybe_unused]] uint32_t dropped = 0;
    if constexpr (T::kConsumersDraw) {
      uint16_t* const drawn = reinterpret_cast<uint16_t*>(shared.mask_words(WordKind::kDropped, steps() % 2));
      dropped = draw_dropped<T>(m, first_query(), first_key(), shared.drop[stage()], drawn);
    }
    wait(bars.dout_full(stage()), phase_of(steps(), T::kStages));
    ptx::wgmma_fence();
    issue_products<E, D, kN, kM, !T::kDrops>(dp, uniform(descriptor_low(keys_at(k_place() ^ 1), 16)),
                                             uniform(descriptor_low(dout_at(), 16)));
    ptx::wgmma_commit();
    forget();
    ptx::wgmma_wait<1>();
    ptx::warpgroup_fence_operand(s);
    form_weights(s, key_bias, visible);
    ptx::warpgroup_fence_operand(s);
    forget();
    ptx::wgmma_wait<0>();
    ptx::warpgroup_fence_operand(dp);
    if constexpr (T::kLoadersDraw) dropped = dropped_scores();
    gradients_of_scores<T>(s, dp, a, stats(), visible, dropped);
    if constexpr (T::kAdds && !T::kDrops) {  // beside dropout that would spill at head_dim 128
      if (a.key_sums.to != nullptr) {
        const int head = work_of().first_head + now().head();
        const int split = shared.split[stage_of(work_tiles(), T::kWorkStages)];
        add_to_key_sums(a.key_sums.of(work_of().seq.b, head, split), a.key_sums.cols, dp, first_key());
      }
    }
    if constexpr (T::kAdds && !kStoresRows) {
      if (a.dbias.out != nullptr) {
        const int head = work_of().first_head + now().head();
        store_score_gradients<E>(a.dbias, work_of().w.b, head, dp, first_query(), first_key());
      }
    }
    ptx::warpgroup_fence_operand(s);
    ptx::warpgroup_fence_operand(dp);
    pack<E>(p_words, s);
    pack<E>(ds_words, dp);
    if constexpr (T::kDsStages > 2) wait_for_ds_before();
    wait_for_ds_place();
    store_ds(ds_at(steps()) + group_of() * 64 * 128 + ds_offset(warp_of(), ptx::fresh_lane()), ds_words);
    ptx::fence_proxy_async();
    __syncwarp();
    arrive(ds_full(steps()));
    if constexpr (T::kDsStages == 2) wait_for_ds_before();
    ptx::warpgroup_fence_operand(p_words);
    ptx::warpgroup_fence_operand(ds_words);
    ptx::wgmma_fence();
    issue_pv<E>(dv, p_words, uniform(descriptor_low(dout_at(), kM * 128)));
    // In a work tile's first step of what lies in shared memory, and then not added: a branch would cost more.
    ptx::wgmma_fence();
    issue_dq_before(dq);
    issue_pv<E>(dk, ds_words, uniform(descriptor_low(q_at(), kM * 128)));
    ptx::wgmma_commit();
    if (!now().is_first()) store_gradients_before();
    ptx::wgmma_wait<1>();
    ptx::warpgroup_fence_operand(dq);
    free_ds_before();
    if (!now().is_first()) add_dq_before(dq);
    ptx::wgmma_wait<0>();
    ptx::warpgroup_fence_operand(dk);
    ptx::warpgroup_fence_operand(dv);
  };

#pragma unroll 1
  while (true) {
    wait(bars.work_full(stage_of(work_tiles(), T::kWorkStages)), phase_of(work_tiles(), T::kWorkStages));
    if (work_of().w.block < 0) break;
    clear(dk);
    clear(dv);
    wait(bars.place_full(k_place()), k_place());
    wait(bars.place_full(k_place() ^ 1), k_place());
    bool is_over = false;
#pragma unroll 1
    while (!is_over) {
      step();
      is_over = now().is_last();
      __syncwarp();  // all lanes have read the step
      arrive(bars.q_empty(stage()));
      arrive(bars.dout_empty(stage()));
      counts += 4;
    }
    arrive(bars.place_empty(k_place() ^ 1));
    wait_for_ds_before();
    float dq[kDqCount];
    ptx::wgmma_fence();
    issue_dq_before(dq);
    store_gradients_before();
    // Gradients pass through the warp's place for dQ before dQ does: they are gone when the function returns.
    if (ptx::fresh_lane() == 0) ptx::bulk_wait_read();
    const BwdParams& p = a.plain.p;
    const BwdModWorkTile& work = work_of();
    const int warp_row = first_key();
    const int head = gradients_head(a, work.w, shared.split[stage_of(work_tiles(), T::kWorkStages)]);
    const auto store = [&](const StridedView& view, const float (&x)[D / 2], float scale, int columns) {
      store_rows_staged<E, 16 * 128>(view, work.w.b, work.w.k, head, x, scale, columns, warp_row, staging(),
                                     ptx::fresh_lane());
    };
    store(p.dv, dv, T::kDrops ? m.keep_scale : 1.f, problem.head_dim_v);
    ptx::wgmma_wait<0>();
    ptx::warpgroup_fence_operand(dq);
    arrive(bars.place_empty(k_place()));
    store(p.dk, dk, problem.scale, problem.head_dim);
    add_dq_before(dq);
    __syncwarp();
    arrive(bars.work_empty(stage_of(work_tiles(), T::kWorkStages)));
    counts = (counts & ~3u) | ((counts + 1) & 3);
  }
  if (ptx::fresh_lane() == 0) ptx::bulk_wait_read();
}

}  // namespace flash_ext::sm90
