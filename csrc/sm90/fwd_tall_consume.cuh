// The consumers of the sm90 forward with masks that leave most tiles whole: those of fwd_consume.cuh, with the steps of
// fwd_mod_consume.cuh. A tile that a warpgroup sees whole costs what it costs there; bits are made where a step asks
// for them, behind its scores, because words kept over a step, or asked for ahead, cost registers that all steps pay.
// T::kTallSlopes adds ALiBi, see fwd_tall_slopes.cuh, T::kTallCap a softcap, T::kTallDrops dropout.
#pragma once

#include "fwd_consume.cuh"
#include "fwd_mod_scores.cuh"
#include "fwd_mod_weights.cuh"
#include "fwd_tall_hide.cuh"
#include "fwd_tall_slopes.cuh"

namespace flash_ext::sm90 {

template <typename T>
__device__ __forceinline__ void consume_tall(const FwdModArgs& a, const FwdModMaps& maps, uint32_t smem,
                                             ModShared<T>& shared, ModBarriers<T> bars, int group) {
  using E = typename T::Element;
  constexpr int D = T::kHeadDim, Dv = T::kHeadDimV, kN = T::kBlockN;
  constexpr int kTurnThreads = 256;  // of the warpgroup whose turn it is and of the one before
  const float scale = a.scale_log2;

  float o[Dv / 2], s[kN / 2];
  uint32_t weights[kN / 4];
  std::conditional_t<T::kTallCap, ModRowState, RowState> state;
  RingPosition<T::kKvSlots> ring;
  int items = -1;  // begun before the present one
  OwnStep now{}, next{};

  // Registers are short: what follows from the thread's number is made anew where it is used.
  const auto warp_row = [&] { return group * 64 + ptx::fresh_thread_idx() / 32 % 4 * 16; };
  int own_row = warp_row();  // but for slopes, which ask for it in each step
  asm volatile("" : "+r"(own_row));
  const auto arrive = [&](uint32_t bar) {
    ptx::mbarrier_arrive_for_warp_flat(bar, ptx::fresh_lane() == 0);
  };
  // Warpgroups take turns in issuing the products of a step, so that one computes weights while another's products run.
  const auto take_turn = [&] {
    debug_delay();
    ptx::bar_sync(1 + group, kTurnThreads);
  };
  const auto pass_turn = [&] { ptx::bar_arrive_only(1 + (group + 1) % T::kConsumers, kTurnThreads); };
  const auto item_at = [&](int n) -> const typename T::Item& { return shared.items[slot_of(n, T::kItems)]; };
  const auto wait_for_slot = [&] { wait(bars.kv_full(ring.slot), ring.parity); };
  // The next step, looked up while a product runs: behind its wait that lengthens the chain from scores to scores.
  const auto look_ahead = [&] {
    wait_for_slot();
    next.take(shared.steps[ring.slot], group);
  };
  // On to the step that has been looked at.
  const auto enter_step = [&] {
    now = next;
    if (!now.is_first()) return;
    ++items;
    wait(bars.q_full(slot_of(items, T::kQSlots)), parity_of(items, T::kQSlots));
  };
  // The same; false after the last one of all items.
  const auto begin_step = [&]() -> bool {
    if (next.bits & kNoStep) {
      ring.advance();
      return false;
    }
    enter_step();
    return true;
  };
  // One test for both: whether there is a next step, and whether it is seen.
  const auto goes_on = [&] { return (next.bits & (kNoStep | kSkipped << kTestsAt)) == 0; };
  const auto next_step = [&] {
    look_ahead();
    return begin_step();
  };
  // The slot used so many slots ago.
  const auto slot_ago = [&](int ago) { return ring.slot - ago + (ring.slot < ago ? T::kKvSlots : 0); };
  const auto free_slot = [&](int ago) { arrive(bars.kv_empty(slot_ago(ago))); };
  const auto skip_slot = [&] {
    wait_for_slot();
    arrive(bars.kv_empty(ring.slot));
    ring.advance();
  };
  const auto finish_q = [&] {
    if (now.is_last()) arrive(bars.q_empty(slot_of(items, T::kQSlots)));
  };
  const auto first_row = [&] { return item_at(items).w.block * T::kBlockM + warp_row(); };
  // Votes tell ptxas that the warp stays together, also between a product's issue and its wait.
  const auto hide = [&] {
    if (!__any_sync(0xffffffffu, now.tests() != 0)) return;
    const ModItem& item = item_at(items);
    const Scores scores{a.plain.p.problem, a.m, item.seat, item.w.h};
    hide_tile(s, scores, item, first_row(), now.tile() * kN, now.tests());
    ptx::pin(s);
  };
  // From the tile's first key to the warp's first row.
  const auto find_ahead = [&] {
    if constexpr (T::kTallSlopes) return item_at(items).centre + own_row - now.tile() * kN;
    else return 0;
  };
  const auto find_terms = [&](int ahead) -> uint32_t {
    if constexpr (T::kTallSlopes) return own_terms<kN>(item_at(items), ahead);
    else return 0;
  };
  const auto find_bias = [&](int ahead) {
    if constexpr (T::kTallSlopes) return bias_of_rows<kN>(item_at(items), ahead);
    else return RowBias{};
  };
  const auto bend = [&](RowBias& bias, int ahead) {
    if constexpr (T::kTallSlopes) {
      if (!bias.bends) return;
      bias.of[0] = bias.of[1] = 0.f;
      subtract_distances(s, item_at(items).raw_slope, ahead);
      ptx::pin(s);
    }
  };
  // Raw products to exponents, less the maxima there are.
  const auto cap = [&] {
    if constexpr (T::kTallCap) {
      // An item's state is not begun before the output of the last one has left.
      const float shift[2] = {now.is_first() ? 0.f : shift_of(state.max[0]),
                              now.is_first() ? 0.f : shift_of(state.max[1])};
      cap_to_exponents(s, a, shift);
      ptx::pin(s);
    }
  };
  // The K has been waited for, when its step was looked up.
  const auto issue_scores = [&](uint32_t terms) {
    const uint32_t q_at = smem + T::kQAt + group * 64 * 128 + slot_of(items, T::kQSlots) * T::kQBytes;
    const uint32_t q_low = uniform(descriptor_low(q_at, 16));
    const uint32_t k_low = uniform(descriptor_low(smem + ring.slot * T::kSlotBytes, 16));
    ptx::pin(s);
    ptx::wgmma_fence();
    issue_qk<E, D, T::kBlockM, kN>(s, q_low, k_low);
    if constexpr (T::kTallSlopes) ptx::wgmma_rs_one_group(s, terms, uniform(descriptor_low(smem + T::kNumbersAt, 16)));
    ptx::wgmma_commit();
    ring.advance();
  };
  const auto finish_scores = [&](int k_ago) {
    ptx::pin(s);
    free_slot(k_ago);
    finish_q();
  };
  const auto issue_output = [&] {
    wait_for_slot();
    const uint32_t v_low = uniform(descriptor_low(smem + ring.slot * T::kSlotBytes, kN * 128));
    ptx::wgmma_fence();
    issue_pv<E>(o, weights, v_low);
    ptx::wgmma_commit();
    ring.advance();
  };
  // Maxima that are wanted must be true ones. The first tile of an item takes its own, so that no result depends on
  // which hidden tiles were visited.
  const auto prepare_weights = [&](const RowBias& bias) {
    const bool asks = now.is_first() || a.m.row_max != nullptr;
    float factor[2];
    if constexpr (T::kTallCap) {
      if (!asks && try_exponents<E>(s, weights, state)) return;
      weights_by_maximum_of_exponents<E>(s, weights, state, factor);
    } else if constexpr (T::kTallSlopes) {
      if (!asks && try_biased_weights<E>(s, weights, state, scale, bias)) return;
      biased_weights_by_maximum<E>(s, weights, state, factor, scale, bias);
    } else {
      if (!asks && try_weights<E>(s, weights, state, scale)) return;
      weights_by_maximum<E>(s, weights, state, factor, scale);
    }
#pragma unroll
    for (int i = 0; i < Dv / 2; ++i) o[i] *= factor[(i / 2) % 2];
  };
  const auto drop = [&] {
    if constexpr (T::kDrops) drop_packed(weights, a.m, first_row(), now.tile() * kN, item_at(items).drop);
  };
  const auto store = [&](int n) {
    const ModItem& item = item_at(n);
    const int lane = ptx::fresh_lane(), first = warp_row();
    const ModRowState rows = [&] {
      if constexpr (T::kTallCap) return state;
      else return ModRowState{{-state.minus_max[0], -state.minus_max[1]}, {state.sum[0], state.sum[1]}};
    }();
    float inverse[2];
    finish_mod_rows(a, item, rows, item.w.block * T::kBlockM + first + lane / 4, lane, inverse);
    const uint32_t stage = smem + T::kStageAt + first / 16 * T::kStageChunks * 16 * 128;
    store_staged<T>(a.plain, maps.plain, item.w, o, inverse, stage, first, lane);
  };
  const auto begin_output = [&] {
    clear(o);
    state = {};
  };
  const auto step = [&] {
    ptx::pin(o);
    ptx::pin(weights);
    const int ahead = find_ahead();
    const uint32_t terms = find_terms(ahead);
    take_turn();
    issue_scores(terms);
    issue_output();
    pass_turn();
    RowBias bias = find_bias(ahead);
    ptx::wgmma_wait<1>();
    finish_scores(2);
    bend(bias, ahead);
    cap();
    hide();
    look_ahead();
    ptx::wgmma_wait<0>();
    ptx::pin(o);
    ptx::pin(weights);
    free_slot(1);
    if (now.is_first()) {
      store(items - 1);
      begin_output();
    }
    prepare_weights(bias);
    drop();
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
        skip_slot();
        if (started) skip_slot();
        pass_turn();
      }
      is_passed = false;
      started = true;
      finish_q();
      has_step = next_step();
      continue;
    }
    const int ahead = find_ahead();
    const uint32_t terms = find_terms(ahead);
    take_turn();
    issue_scores(terms);
    pass_turn();
    RowBias bias = find_bias(ahead);
    if (started) skip_slot();
    ptx::wgmma_wait<0>();
    finish_scores(started ? 2 : 1);
    started = true;
    bend(bias, ahead);
    cap();
    hide();
    prepare_weights(bias);
    drop();
    look_ahead();
#pragma unroll 1
    while (goes_on()) {
      enter_step();
      step();
    }
    has_step = begin_step();
    // The last product, which no scores accompany: the step's tile is not seen, or there is none.
    if (has_step) {
      take_turn();
      skip_slot();
    }
    ptx::pin(o);
    ptx::pin(weights);
    issue_output();
    if (has_step) pass_turn();
    is_passed = has_step;
    ptx::wgmma_wait<0>();
    ptx::pin(o);
    free_slot(1);
  }
  if (ptx::fresh_lane() == 0) ptx::bulk_wait_read();
}

}  // namespace flash_ext::sm90
