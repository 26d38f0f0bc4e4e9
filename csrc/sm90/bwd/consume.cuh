// The consumers of the sm90 backward whose warpgroups cooperate.
#pragma once

#include "steps.cuh"
#include "stream_k.cuh"

namespace flash_ext::sm90 {

// Two warpgroups with 64 keys each of the same 128. dS of both meets in shared memory, and each adds its share of the
// columns of dQ, one step late, so that neither waits for the other. S and dP of a step are issued behind dK of the
// step before, while that runs. Of few rows dQ is another kernel's, and nothing meets (T::kMakesDq). kGroup: which
// warpgroup, or -1 to tell at run time (where both have the same number of columns). What a step needs seldom is read
// again from the work tile: registers that live across the loop are short. The loop is not that of
// consume_independent(), whose steps end before the next one begins, because two blocks of keys leave no registers for
// scores of the next.
template <typename T, int kGroup>
__device__ __forceinline__ void consume_cooperative(const BwdArgs& a, uint32_t smem, unsigned char* smem_bytes,
                                                    const BwdWorkTile* work_tiles, BwdBarriers<T> bars, int group) {
  using E = typename T::Element;
  constexpr int D = T::kHeadDim, kM = T::kBlockM, kN = T::kBlockN;
  constexpr int kDqCount = kGroup < 0 ? D / 4 : kGroup == 0 ? 32 : D / 2 - 32;
  const int lane = threadIdx.x % 32, warp = (threadIdx.x / 32) % 4;
  const int heads = static_cast<int>(a.grid.shared.divisor);
  const BwdParams& p = a.p;
  const Problem& r = p.problem;
  const float scale = r.scale_log2;
  const uint32_t first_low = uniform(descriptor_low(smem + group * 64 * 128, 16));
  constexpr uint32_t kToOtherPlace = T::kVAt / 16;  // of K and V, in descriptors
  const uint32_t ds_to = smem + T::kDsAt + group * 64 * 128 + ds_offset(warp, lane);
  const int row = warp * 16 + lane / 4;  // a lane's first key of the warpgroup's
  float* const dq_warp = p.dq_accum + group * 64 * 64 + warp * 32 * kDqCount;
  // In order, a tile leaves as one piece; what is left of a warp's 4 KB then follows it.
  const uint32_t staging =
      smem + T::kStagingAt +
      (T::kOrdered ? group * 4 * T::kStagingBytes + warp * kDqCount * 128 : (group * 4 + warp) * T::kStagingBytes);
  constexpr int kNextChunk = T::kOrdered && kDqCount < 32 ? 4 * kDqCount * 128 : 16 * 128;

  float dk[D / 2], dv[D / 2];
  PipelineState<T::kWorkStages> work_ring;
  PipelineState<T::kStages> ring;
  PipelineState<T::kDsStages> ds_ring;
  uint32_t k_place = 0;  // and the phase of the barriers of both places
  [[maybe_unused]] uint32_t dq_phase = 1;
  const auto arrive = [&](uint32_t bar) { ptx::mbarrier_arrive_for_warp(bar, lane == 0); };
  const auto has_pool = [&] { return T::kPool && a.pool.words != nullptr; };
  const auto defer_arrive = [&] {
    if (lane == 0) reinterpret_cast<uint32_t*>(smem_bytes + T::kDeferredAt)[group * 4 + warp] = work_ring.stage + 1;
  };
  if (T::kPool && lane == 0) reinterpret_cast<uint32_t*>(smem_bytes + T::kDeferredAt)[group * 4 + warp] = 0;
#pragma unroll 1
  while (true) {
    if (has_pool() &&
        !__any_sync(ptx::kFullWarp, ptx::mbarrier_test_wait(bars.work_full(work_ring.stage), work_ring.phase))) {
      arrive_deferred<T>(smem_bytes, bars, group * 4 + warp, lane);
    }
    wait(bars.work_full(work_ring.stage), work_ring.phase);
    const BwdWorkTile& work = work_tiles[work_ring.stage];
    if (work.w.block < 0) {
      if (T::kStaged && !T::kOrdered && lane == 0) ptx::bulk_wait_read();
      if (has_pool()) arrive_deferred<T>(smem_bytes, bars, group * 4 + warp, lane);
      break;
    }
    // As found now, not as it was when last read.
    const auto read_again = [&]() -> const BwdWorkTile& {
      const BwdWorkTile* x = &work;
      asm volatile("" : "+l"(x));
      return *x;
    };
    const auto first_key = [&](const BwdWorkTile& x) { return x.w.block * kN + group * 64; };
    const auto mod_of = [&](const BwdWorkTile& x) { return AttnMod{r, x.w.q.length, x.w.k.length}; };
    const KeyReach reach = KeyReach::of<kM>(mod_of(work), first_key(work), 64);
    const uint32_t k_low = uniform(first_low + k_place * kToOtherPlace);
    const uint32_t v_low = uniform(first_low + (k_place ^ 1) * kToOtherPlace);
    const uint32_t k_rows = uniform(k_low + group * ((kN - 64) * 128 / 16));
    if (T::kDivides && work.share == BwdWorkTile::kTakes) {
      const SharedSums<T> sums(a.stream_k, blockIdx.x - 1);
      sums.template load<0>(dk);
      sums.template load<D / 2>(dv);
    } else {
      clear(dk);
      clear(dv);
    }
    Walk<T> walk(work);
    int tile_before = 0;  // of queries, of the previous step; where dQ is stored its head and its tile of that
    const auto ds_before = [&] { return ds_ring.stage == 0 ? T::kDsStages - 1 : ds_ring.stage - 1; };
    const auto wait_for_ds_before = [&] {
      wait(bars.ds_full(ds_before()), ds_ring.stage == 0 ? ds_ring.phase ^ 1 : ds_ring.phase);
    };
    const auto issue_dq_before = [&](float (&dq)[kDqCount]) {
      ptx::wgmma_fence();
      issue_dq<E>(dq, uniform(descriptor_low(smem + T::kDsAt + ds_before() * T::kDsBytes, 16)), k_rows);
      ptx::wgmma_commit();
    };
    const auto add_dq_before = [&](const float (&dq)[kDqCount]) {
      if constexpr (T::kOrdered) {
        wait(bars.dq_empty(0), dq_phase);
        dq_phase ^= 1;
        stage_dq(dq, staging, lane);
        arrive(bars.dq_full(0));
      } else if constexpr (T::kStores) {
        const BwdWorkTile& now = read_again();
        StridedView half = p.dq;  // this warpgroup's columns
        half.ptr = static_cast<char*>(half.ptr) + group * 64 * 2;
        // The plan says so: code for both would be called, and a call serialises products (C7510).
        half.is_float = false;
        store_rows<E>(half, now.w.b, now.w.q, now.w.h * heads + tile_before / kStoredTiles, dq, r.scale,
                      r.head_dim - group * 64, tile_before % kStoredTiles * kM + row, lane);
      } else {
        add_dq<T::kStaged>(dq_warp + static_cast<int64_t>(tile_before) * (kM * D), dq, staging, lane);
      }
    };
    const auto q_at = [&](int stage) { return smem + T::kQAt + stage * T::kQBytes; };
    const auto dout_at = [&](int stage) { return smem + T::kDoutAt + stage * T::kQBytes; };
    const auto stats_of = [&](int stage) {
      return reinterpret_cast<const float*>(smem_bytes + T::kStatsAt) + stage * 2 * kM + 2 * (lane % 4);
    };
    float s[32], dp[32];
    RsOperand<T::kRsStepsK, kN> rs_k;
    RsOperand<T::kRsStepsV, kN> rs_v;
    const auto wait_for_v = [&] { wait(bars.place_full(k_place ^ 1), k_place); };
    const auto issue_scores = [&](auto is_first) {
      wait(bars.q_full(ring.stage), ring.phase);
      begin_dp(dp, stats_of(ring.stage) + kM);
      ptx::warpgroup_fence_operand(s);
      ptx::warpgroup_fence_operand(dp);
      ptx::wgmma_fence();
      issue_rs_products<E, D, kM, false>(s, rs_k, k_low, uniform(descriptor_low(q_at(ring.stage), 16)));
      ptx::wgmma_commit();
      if constexpr (T::kRsStepsV == 0 && decltype(is_first)::value) wait_for_v();
      wait(bars.dout_full(ring.stage), ring.phase);
      ptx::wgmma_fence();
      issue_rs_products<E, D, kM, true>(dp, rs_v, v_low, uniform(descriptor_low(dout_at(ring.stage), 16)));
      ptx::wgmma_commit();
    };
    const auto form_weights = [&] {
      ptx::wgmma_wait<1>();
      ptx::warpgroup_fence_operand(s);
      scores_to_weights(s, stats_of(ring.stage), scale);
      if (!reach.whole(walk.block)) {
        const BwdWorkTile& now = read_again();
        hide(s, mod_of(now), first_key(now) + row, walk.block * kM + 2 * (lane % 4));
      }
      ptx::warpgroup_fence_operand(s);
      ptx::wgmma_wait<0>();
      ptx::warpgroup_fence_operand(dp);
    };
    // From weights and dP on, up to those of the next step.
    const auto step = [&](auto is_first, auto is_last) {
      constexpr bool kFirst = decltype(is_first)::value, kLast = decltype(is_last)::value;
      const int stage = ring.stage;
      float dq[kDqCount];
      uint32_t p_words[16], ds_words[16];
      if constexpr (kLast) arrive(bars.place_empty(k_place ^ 1));
      if constexpr (kLast && !T::kMakesDq) arrive(bars.place_empty(k_place));
#pragma unroll
      for (int i = 0; i < 32; ++i) dp[i] *= s[i];
      pack<E>(p_words, s);
      pack<E>(ds_words, dp);
      if constexpr (T::kMakesDq) {
        // When both have written dS of the step before, both are through with dS of three steps ago: its place is free.
        if constexpr (!kFirst) wait_for_ds_before();
        store_ds(ds_to + ds_ring.stage * T::kDsBytes, ds_words);
        ptx::fence_proxy_async();
        __syncwarp();
        arrive(bars.ds_full(ds_ring.stage));
      }
      ptx::warpgroup_fence_operand(p_words);
      ptx::warpgroup_fence_operand(ds_words);
      ptx::warpgroup_fence_operand(dk);
      ptx::warpgroup_fence_operand(dv);
      ptx::wgmma_fence();
      issue_pv<E>(dv, p_words, uniform(descriptor_low(dout_at(stage), kM * 128)));
      if constexpr (kFirst || !T::kMakesDq) {
        ptx::wgmma_commit();
      } else {
        issue_dq_before(dq);
      }
      issue_pv<E>(dk, ds_words, uniform(descriptor_low(q_at(stage), kM * 128)));
      ptx::wgmma_commit();
      ptx::wgmma_wait<1>();
      ptx::warpgroup_fence_operand(p_words);
      ptx::warpgroup_fence_operand(dv);
      if constexpr (!kFirst && T::kMakesDq) {
        ptx::warpgroup_fence_operand(dq);
        add_dq_before(dq);
      } else if (has_pool()) {
        arrive_deferred<T>(smem_bytes, bars, group * 4 + warp, lane);
        if (lane == 0) ptx::fence_proxy_async_global();  // zeros, before additions
      }
      if constexpr (T::kMakesDq) {
        ds_ring.advance();
        tile_before = T::kStores ? walk.head * kStoredTiles + walk.block
                                 : work.dq_tile + walk.head * a.tiles_per_head + walk.block;
      }
      walk.advance(work, heads);
      ring.advance();
      if constexpr (kLast) {
        ptx::wgmma_wait<0>();
      } else {
        issue_scores(std::false_type{});
        ptx::wgmma_wait<2>();
      }
      ptx::warpgroup_fence_operand(dk);
      ptx::warpgroup_fence_operand(ds_words);
      // racecheck reports lse and delta where dQ is made elsewhere and no __syncwarp stands here. Every lane has used
      // its own before the products, which all lanes issue together and which this arrival has waited for.
      arrive(bars.q_empty(stage));
      arrive(bars.dout_empty(stage));
      if constexpr (!kLast) form_weights();
    };
    if (walk.left > 0) {
      wait(bars.place_full(k_place), k_place);
      if constexpr (T::kRsStepsV > 0) wait_for_v();
      rs_v.load(smem + (k_place ^ 1) * T::kVAt + group * 64 * 128, warp, lane);
      if constexpr (T::kRsStepsV > 0) ptx::warpgroup_fence_operand(rs_v.words);
      rs_k.load(smem + k_place * T::kVAt + group * 64 * 128, warp, lane);
      if constexpr (T::kRsStepsK > 0) ptx::warpgroup_fence_operand(rs_k.words);
      issue_scores(std::true_type{});
      form_weights();
      if (walk.left == 1) {
        step(std::true_type{}, std::true_type{});
      } else {
        step(std::true_type{}, std::false_type{});
#pragma unroll 1
        while (walk.left > 1) step(std::false_type{}, std::false_type{});
        step(std::false_type{}, std::true_type{});
      }
      [[maybe_unused]] float dq[kDqCount];
      if constexpr (T::kMakesDq) {
        wait_for_ds_before();
        issue_dq_before(dq);
      }
      // Gradients pass through the warp's place for dQ before dQ does: they are gone when the function returns.
      if constexpr (T::kOrdered) {
        wait(bars.dq_empty(0), dq_phase);
      } else if (lane == 0) {
        ptx::bulk_wait_read();
      }
      const BwdWorkTile& now = read_again();
      const int warp_row = first_key(now) + warp * 16;
      const bool gives = T::kDivides && now.share == BwdWorkTile::kGives;
      if (gives) {
        const SharedSums<T> sums(a.stream_k, blockIdx.x);
        sums.template store<0>(dk);
        sums.template store<D / 2>(dv);
        tell_sums(a.stream_k, now);
      } else {
        store_rows_staged<E, kNextChunk>(p.dv, now.w.b, now.w.k, now.w.h, dv, 1.f, r.head_dim_v, warp_row, staging,
                                         lane);
      }
      if constexpr (T::kMakesDq) {
        ptx::wgmma_wait<0>();
        ptx::warpgroup_fence_operand(dq);
        arrive(bars.place_empty(k_place));
      }
      k_place ^= 1;
      if (!gives) {
        store_rows_staged<E, kNextChunk>(p.dk, now.w.b, now.w.k, now.w.h, dk, r.scale, r.head_dim, warp_row, staging,
                                         lane);
      }
      if constexpr (T::kMakesDq) add_dq_before(dq);
      if (has_pool()) defer_arrive();
    } else {
      if (has_pool()) {
        arrive_deferred<T>(smem_bytes, bars, group * 4 + warp, lane);
        arrive(bars.added(work_ring.stage));
      }
      const int warp_row = first_key(work) + warp * 16, rows = min(16, work.w.k.length - warp_row);
      zero_rows(p.dv, work.w.b, work.w.k.start + warp_row, work.w.h, rows, r.head_dim_v, lane);
      zero_rows(p.dk, work.w.b, work.w.k.start + warp_row, work.w.h, rows, r.head_dim, lane);
    }
    __syncwarp();
    arrive(bars.work_empty(work_ring.stage));
    work_ring.advance();
  }
}

}  // namespace flash_ext::sm90
