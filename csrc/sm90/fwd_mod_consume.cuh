// The consumers of the sm90 forward with modifiers. As those of fwd_consume.cuh, but what a step is and which of its
// tests a warpgroup needs comes with each K, and an item may hold tiles that a warpgroup does not see in any place.
#pragma once

#include "fwd_consume.cuh"
#include "fwd_mod_bits.cuh"
#include "fwd_mod_scores.cuh"
#include "fwd_mod_weights.cuh"

namespace flash_ext::sm90 {

template <typename T>
__device__ __forceinline__ void consume_mod(const FwdModArgs& a, const FwdModMaps& maps, uint32_t smem,
                                            ModShared<T>& shared, ModBarriers<T> bars, int group) {
  using E = typename T::Element;
  constexpr int D = T::kHeadDim, Dv = T::kHeadDimV, kN = T::kBlockN;
  constexpr int kTurnThreads = 256;  // of the warpgroup whose turn it is and of the one before
  const Modifiers& m = a.m;

  float o[Dv / 2], s[kN / 2];
  uint32_t weights[kN / 4];
  ModRowState state;
  int used = 0;    // slots of the ring so far
  int items = -1;  // begun before the present one
  OwnStep now{}, next{};

  // Registers are short: what follows from the thread's number is made anew where it is used.
  const auto warp_row = [&] { return group * 64 + ptx::fresh_thread_idx() / 32 % 4 * 16; };
  const auto arrive = [&](uint32_t bar) {
    ptx::mbarrier_arrive_for_warp(bar, ptx::fresh_lane() == 0);
  };
  // Warpgroups take turns in issuing the products of a step, so that one computes weights while another's products run.
  const auto take_turn = [&] {
    debug_delay();
    ptx::bar_sync(1 + group, kTurnThreads);
  };
  const auto pass_turn = [&] { ptx::bar_arrive_only(1 + (group + 1) % T::kConsumers, kTurnThreads); };
  const auto item_at = [&](int n) -> const typename T::Item& { return shared.items[slot_of(n, T::kItems)]; };
  const auto wait_for_slot = [&] {
    wait(bars.kv_full(slot_of(used, T::kKvSlots)), parity_of(used, T::kKvSlots));
  };
  // Gives back the slot used so many slots ago.
  const auto free_slot = [&](int ago) { arrive(bars.kv_empty(slot_of(used - ago, T::kKvSlots))); };
  const auto slot_at = [&] { return smem + slot_of(used, T::kKvSlots) * T::kSlotBytes; };
  // The next step, looked up while a product runs: behind its wait that lengthens the chain from scores to scores.
  const auto look_ahead = [&] {
    wait_for_slot();
    next.take(shared.steps[slot_of(used, T::kKvSlots)], group);
  };
  // On to the step that has been looked at; false after the last one of all items.
  const auto begin_step = [&]() -> bool {
    now = next;
    if (now.bits & kNoStep) {
      ++used;
      return false;
    }
    if (now.is_first()) {
      ++items;
      wait(bars.q_full(slot_of(items, q_slots<T>(a))), parity_of(items, q_slots<T>(a)));
    }
    return true;
  };
  const auto next_step = [&] {
    look_ahead();
    return begin_step();
  };
  const auto scores = [&] {
    const ModItem& item = item_at(items);
    return Scores{a.plain.p.problem, m, item.seat, item.w.h};
  };
  const auto first_row = [&] { return item_at(items).w.block * T::kBlockM + warp_row(); };
  using Mask = OwnWords<kN>;
  const auto fetch_mask = [&] {
    return fetch_own_words<kN>(scores(), item_at(items), first_row(), now.tile() * kN, now.tests());
  };
  const auto find_visible = [&](const Mask& mask) {
    return visible_scores<kN>(scores(), mask, first_row(), now.tile() * kN, now.tests());
  };
  const auto find_early = [&](const Mask& mask) {
    if constexpr (T::kLateBits) return ScoreBits<kN>{};
    else return find_visible(mask);
  };
  // Step i has used 2 i or 2 i + 1 slots when it comes to its bias, the first step one.
  const auto wait_for_bias = [&]() -> uint32_t {
    const int slot = slot_of(used / 2, T::kBiasSlots);
    wait(bars.bias_full(slot), parity_of(used / 2, T::kBiasSlots));
    return smem + T::kBiasAt + slot * T::kBiasBytes;
  };
  const auto free_bias = [&] {
    __syncwarp();
    arrive(bars.bias_empty(slot_of(used / 2, T::kBiasSlots)));
  };
  const auto skip_slot = [&] {
    wait_for_slot();
    free_slot(0);
    ++used;
  };
  // K of a step that this warpgroup does not see, and its bias.
  const auto skip_step = [&] {
    skip_slot();
    if (has_bias<T>(a)) {
      wait_for_bias();
      free_bias();
    }
  };
  const auto finish_q = [&] {
    if (now.is_last()) arrive(bars.q_empty(slot_of(items, q_slots<T>(a))));
  };
  const auto issue_scores = [&] {
    const uint32_t q_at = smem + T::kQAt + group * 64 * 128 + slot_of(items, q_slots<T>(a)) * T::kQBytes;
    const uint32_t q_low = uniform(descriptor_low(q_at, 16));
    const uint32_t k_low = uniform(descriptor_low(slot_at(), 16));
    ptx::pin(s);
    ptx::wgmma_fence();
    issue_qk<E, D, T::kBlockM, kN>(s, q_low, k_low);
    ptx::wgmma_commit();
  };
  const auto finish_products = [&](int k_ago) {
    ptx::pin(s);
    free_slot(k_ago);
    finish_q();
  };
  const auto change_scores = [&] {
    const int row0 = first_row();
    const uint32_t bias = has_bias<T>(a) ? wait_for_bias() : 0;
#pragma unroll
    for (int part = 0; part < kN / kPartKeys; ++part) {
      ScorePart& x = part_of(s, part);
      const int col0 = now.tile() * kN + part * kPartKeys;
      modify_scores<T>(x, a, scores(), row0, col0, [&](float scale) {
        add_staged_bias<E>(x, scale, bias + part * T::kBlockM * 128, warp_row(), a.bias_rows == 1);
      });
      ptx::pin(x);
    }
    if (has_bias<T>(a)) free_bias();
  };
  const auto make_exponents = [&] {
    // An item's state is not begun before the output of the last one has left.
    const float shift[2] = {now.is_first() ? 0.f : shift_of(state.max[0]),
                            now.is_first() ? 0.f : shift_of(state.max[1])};
#pragma unroll
    for (int part = 0; part < kN / kPartKeys; ++part) {
      ScorePart& x = part_of(s, part);
      if constexpr (!T::kCapsOrSlopes) {
        shift_scores(x, a.scale_log2, shift);
      } else if (m.slopes == nullptr) {
        cap_to_exponents(x, a, shift);
      } else {
        const int centre0 = first_row() + scores().shift(), col0 = now.tile() * kN + part * kPartKeys;
        slope_scores(x, a.scale_log2, item_at(items).slope, centre0, col0, shift);
      }
      ptx::pin(x);
    }
  };
  const auto finish_scores = [&](const ScoreBits<kN>& visible, const Mask& mask) {
    if constexpr (T::kChanges) change_scores();
    if constexpr (T::kExponents) make_exponents();
    if constexpr (T::kLateBits) {
      hide_scores(s, find_visible(mask));
    } else {
      hide_scores(s, visible);
    }
    ptx::pin(s);
  };
  const auto issue_output = [&] {
    wait_for_slot();
    const uint32_t v_low = uniform(descriptor_low(slot_at(), kN * 128));
    ptx::wgmma_fence();
    issue_pv<E>(o, weights, v_low);
    ptx::wgmma_commit();
  };
  const auto try_weights_of = [&](const float (&x)[kN / 2]) {
    if constexpr (T::kExponents) return try_exponents<E>(x, weights, state);
    else return try_mod_weights<E>(x, weights, state, m.unit_log2);
  };
  const auto prepare_weights = [&] {
    // Maxima that are wanted must be true ones. The first tile has none to try.
    const bool asks = now.is_first() || m.row_max != nullptr;
    if (asks || !try_weights_of(s)) {
      float factor[2];
      if constexpr (T::kExponents) {
        weights_by_maximum_of_exponents<E>(s, weights, state, factor);
      } else {
        mod_weights_by_maximum<E>(s, weights, state, factor, m.unit_log2);
      }
#pragma unroll
      for (int i = 0; i < Dv / 2; ++i) o[i] *= factor[(i / 2) % 2];
    }
    if constexpr (T::kDrops) {
      if (m.rng != nullptr) drop_packed(weights, m, first_row(), now.tile() * kN, item_at(items).drop);
    }
  };
  const auto store = [&](int n) {
    const ModItem& item = item_at(n);
    const int lane = ptx::fresh_lane(), first = warp_row(), row_in_tile = first + lane / 4;
    float inverse[2];
    finish_mod_rows(a, item, state, item.w.block * T::kBlockM + row_in_tile, lane, inverse);
    if constexpr (T::kStaged) {
      if (T::kModTile.bias_apart || !has_bias<T>(a)) {
        const uint32_t stage = smem + T::kStageAt + first / 16 * T::kStageChunks * 16 * 128;
        store_staged<T>(a.plain, maps.plain, item.w, o, inverse, stage, first, lane);
        return;
      }
    }
    store_direct<T>(a.plain, item.w, o, inverse, item.w.block * T::kBlockM + row_in_tile, lane);
  };
  const auto begin_output = [&] {
    clear(o);
    state = ModRowState{};
  };
  const auto step = [&] {
    const Mask mask = fetch_mask();
    ptx::pin(o);
    ptx::pin(weights);
    take_turn();
    issue_scores();
    ++used;
    issue_output();
    ++used;
    pass_turn();
    const ScoreBits<kN> visible = find_early(mask);
    ptx::wgmma_wait<1>();
    finish_products(2);
    finish_scores(visible, mask);
    look_ahead();
    ptx::wgmma_wait<0>();
    ptx::pin(o);
    ptx::pin(weights);
    free_slot(1);
    if (now.is_first()) {
      store(items - 1);
      begin_output();
    }
    prepare_weights();
  };

  if (group == T::kConsumers - 1) ptx::bar_arrive_only(1, kTurnThreads);
  bool started = false;    // from the second step on a V comes with it
  bool is_passed = false;  // the step's turn has been taken already, by the last product before it
  bool has_step = next_step();
#pragma unroll 1
  while (true) {
    // No weights wait for their V here.
    if (!has_step || now.is_first()) {
      const int finished = has_step ? items - 1 : items;
      if (finished >= 0) store(finished);
      if (!has_step) break;
      begin_output();
    }
    if (!now.is_seen()) {
      if (!is_passed) {
        take_turn();
        skip_step();
        if (started) skip_slot();
        pass_turn();
      }
      is_passed = false;
      started = true;
      finish_q();
      has_step = next_step();
      continue;
    }
    const Mask mask = fetch_mask();
    take_turn();
    issue_scores();
    ++used;
    pass_turn();
    const ScoreBits<kN> visible = find_early(mask);
    if (started) skip_slot();
    ptx::wgmma_wait<0>();
    finish_products(started ? 2 : 1);
    started = true;
    finish_scores(visible, mask);
    prepare_weights();
    look_ahead();
#pragma unroll 1
    while ((has_step = begin_step()) && now.is_seen()) step();
    // The last product, which no scores accompany: the step's tile is not seen, or there is none.
    if (has_step) {
      take_turn();
      skip_step();
    }
    ptx::pin(o);
    ptx::pin(weights);
    issue_output();
    ++used;
    if (has_step) pass_turn();
    is_passed = has_step;
    ptx::wgmma_wait<0>();
    ptx::pin(o);
    free_slot(1);
  }
  if (T::kStaged && ptx::fresh_lane() == 0) ptx::bulk_wait_read();
}

}  // namespace flash_ext::sm90
