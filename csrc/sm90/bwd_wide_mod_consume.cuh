// The consumers of the sm90 backward with modifiers in two kernels. Who has what is as in bwd_wide_consume.cuh; what
// a step is and which of its tests a warpgroup needs comes with each Q or K, and scores are changed before they become
// weights.
#pragma once

#include "bwd_wide_mod_parts.cuh"

namespace flash_ext::sm90 {

// Items and marks as a consumer warpgroup takes them.
template <typename T>
class ModSteps {
 public:
  __device__ ModSteps(WideModShared<T>& shared, WideModBarriers<T> bars) : shared_(shared), bars_(bars) {}

  // Place of the next item, or -1 at the end.
  __device__ __forceinline__ int take_item() {
    const int at = slot_of(items_, T::kItems);
    wait(bars_.item_full(at), parity_of(items_, T::kItems));
    if (shared_.items[at].w.block < 0) return -1;
    ++items_;
    return at;
  }
  // Of what comes once an item, for the one taken last.
  __device__ __forceinline__ uint32_t item_parity() const { return (items_ - 1) % 2; }
  __device__ __forceinline__ void release_item(int at) const {
    __syncwarp();
    arrive(bars_.item_empty(at));
  }
  __device__ __forceinline__ const BwdModItem& item(int at) const { return shared_.items[at]; }
  __device__ __forceinline__ Scores scores(const WideModArgs& a, int at, const BwdStep& step) const {
    const BwdModItem& x = item(at);
    return Scores{a.plain.p.problem, a.m, x.seat, x.first_head + step.head()};
  }

  // Bits of this thread's scores. Votes tell ptxas that the warp stays together.
  __device__ __forceinline__ uint32_t visible(const BwdStep& step, int group) {
    const uint32_t tests = step.tests(group);
    uint32_t bits = ~0u;
    if (__any_sync(0xffffffffu, step.has_tests())) {
      const uint32_t mark = take_mark();
      bits = tests == 0 ? ~0u : mark;
    }
    return tests == kSkipped ? 0 : bits;
  }
  // The same of what dropout hits: bit i is score i.
  template <int kCount>
  __device__ __forceinline__ uint32_t dropped(const Modifiers& m, int row0, int col0, int keys_at) const {
    if constexpr (!T::kDrops) return 0;
    return draw_own<!T::kByQueries, kCount>(m, row0, col0, shared_.drop[keys_at]);
  }

 private:
  __device__ __forceinline__ static void arrive(uint32_t bar) {
    ptx::mbarrier_arrive_for_warp(bar, ptx::fresh_lane() == 0);
  }
  __device__ __forceinline__ uint32_t take_mark() {
    const int slot = slot_of(marks_, T::kMarkSlots);
    wait(bars_.marks_full(slot), parity_of(marks_, T::kMarkSlots));
    const uint32_t* words = reinterpret_cast<const uint32_t*>(shared_.marks(Mark::kVisible, slot));
    const uint32_t mark = words[ptx::fresh_thread_idx() - 128];
    __syncwarp();
    arrive(bars_.marks_empty(slot));
    ++marks_;
    return mark;
  }

  WideModShared<T>& shared_;
  WideModBarriers<T> bars_;
  uint32_t items_ = 0, marks_ = 0;  // taken so far; registers are short
};

// A warp's part of a bias, keys along the rows of the accumulators (kT) or queries, on its way from global memory:
// there is no place for tiles of it. It is asked for before the scores are there; with one trip to memory after the
// other it took five times as long as all else. That is what ends of a bias and strange strides get where queries are
// the rows, because addresses and predicates of all elements do not fit the registers there.
template <typename E, bool kT, int kCount>
class ReadBias {
 public:
  // Of the rows of accumulators from 8 half on. Writes all its registers, which would else be kept from step to step.
  template <int half>
  __device__ __forceinline__ void ask(const Scores& scores, int row0, int col0) {
#pragma unroll
    for (int i = 2 * half; i < kCount; i += 4) raw_[i] = raw_[i + 1] = 0;
    if (scores.m.bias.ptr == nullptr) return;
    const Part x(scores, row0, col0, half);
    if (!kT && !is_asked(scores, x)) return;
    if (scores.m.bias.is_float) {
      ask_for<half, uint32_t>(x);
    } else {
      ask_for<half, uint16_t>(x);
    }
  }

  template <int half>
  __device__ __forceinline__ void add_to(float (&s)[kCount], const Scores& scores, int row0, int col0) const {
    const bool is_float = scores.m.bias.is_float;
    if constexpr (!kT) {
      if (const Part x(scores, row0, col0, half); !is_asked(scores, x)) {
        const char* at = x.at;
#pragma unroll
        for (int i = 2 * half; i < kCount; i += i % 2 == 0 ? 1 : 3) {
          if (i / 4 * 8 + i % 2 < x.left) {
            s[i] += is_float ? ptx::load_late<float>(at) : ptx::to_float<E>(ptx::load_late<E>(at));
          }
          at += i % 2 == 0 ? x.many_bytes : 7 * x.many_bytes;
        }
        return;
      }
    }
#pragma unroll
    for (int i = 2 * half; i < kCount; i += 4) {
      float2 x = ptx::unpack2<E>(kT ? raw_[i] | raw_[i + 1] << 16 : raw_[i]);
      if (is_float) x = make_float2(__uint_as_float(raw_[i]), __uint_as_float(raw_[i + 1]));
      s[i] += x.x;
      s[i + 1] += x.y;
    }
  }

 private:
  // Of this thread: its first element, bytes between those side by side, and how far the bias goes on.
  struct Part {
    const char* at;
    int64_t many_bytes;
    int left;
    __device__ __forceinline__ Part(const Scores& scores, int row0, int col0, int half) {
      const BiasView& x = scores.m.bias;
      const int lane = ptx::fresh_lane(), size = x.is_float ? 4 : 2;
      const int last_row = min(x.rows, scores.seat.seqlen_q), last_col = min(x.cols, scores.seat.seqlen_k);
      const int few = (kT ? col0 : row0) + lane / 4 + 8 * half, many = (kT ? row0 : col0) + 2 * (lane % 4);
      many_bytes = (kT ? x.row_stride : x.col_stride) * size;
      at = static_cast<const char*>(x.ptr) + (scores.seat.b * x.batch_stride + scores.h * x.head_stride) * size +
           few * ((kT ? x.col_stride : x.row_stride) * size) + many * many_bytes;
      left = few < (kT ? last_col : last_row) ? (kT ? last_row : last_col) - many : 0;
    }
  };
  // Up to the thread's last element, which lies 2 (kCount - 4) + 1 behind its first. Pairs of 16 bits want rows that
  // begin on 16 bytes.
  __device__ __forceinline__ static bool is_asked(const Scores& scores, const Part& x) {
    const BiasView& bias = scores.m.bias;
    const bool has_neighbours = bias.staged || (bias.is_float && bias.col_stride == 1);
    return __all_sync(0xffffffffu, has_neighbours && x.left > 2 * (kCount - 4) + 1);
  }

  template <int half, typename Raw>
  __device__ __forceinline__ void ask_for(const Part& x) {
    const char* at = x.at;
#pragma unroll
    for (int i = 2 * half; i < kCount; i += 4) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        if constexpr (kT) {
          ptx::load_if<Raw>(raw_[i + c], at, i / 4 * 8 + c < x.left);
          at += c == 0 ? x.many_bytes : 7 * x.many_bytes;
        } else if (sizeof(Raw) == 4 || c == 0) {
          ptx::load_if<uint32_t>(raw_[i + c], x.at + i / 4 * 8 * static_cast<int>(sizeof(Raw)) + 4 * c, true);
        }
      }
    }
  }

  uint32_t raw_[kCount];
};

// s = scale s, with slopes and bias, in natural units. kHalf: only the first half of the bias has been asked for,
// because registers are short.
template <typename E, bool kT, bool kHalf, int kCount>
__device__ __forceinline__ void add_naturally(float (&s)[kCount], const Scores& scores, int row0, int col0,
                                              ReadBias<E, kT, kCount>& bias) {
  if (scores.m.slopes != nullptr) {
    auto& x = reinterpret_cast<float (&)[1][kCount / 4][4]>(s);
    scores.template add_slopes<kT>(x, row0, col0, scores.p.softmax_scale);
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) s[i] *= scores.p.softmax_scale;
  }
  if (scores.m.bias.ptr == nullptr) return;
  bias.template add_to<0>(s, scores, row0, col0);
  if constexpr (kHalf) bias.template ask<1>(scores, row0, col0);
  bias.template add_to<1>(s, scores, row0, col0);
}

// From raw products s and bits of what is hidden and dropped: s = dS / (dP - delta), negative where a weight is
// dropped; pairs of P as it is rounded, 0 there, go to put_weights(). minus_lse(i) is that of score i.
template <typename E, typename T, bool kT, int kCount, typename MinusLse, typename PutWeights>
__device__ __forceinline__ void change_scores(float (&s)[kCount], const WideModArgs& a, const Scores& scores, int row0,
                                              int col0, uint32_t visible, uint32_t dropped,
                                              ReadBias<E, kT, kCount>& bias, const MinusLse& minus_lse,
                                              const PutWeights& put_weights) {
  if constexpr (T::kCaps) take_tanh(s, a.cap);
  if constexpr (T::kAdds) {
    if (a.m.is_natural) add_naturally<E, kT, T::kByQueries>(s, scores, row0, col0, bias);
  }
  const auto is_set = [](uint32_t bits, int i) { return (bits >> mark_of(i) & 1) != 0; };
#pragma unroll
  for (int i = 0; i < kCount; i += 2) {
    float p[2];
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      float& x = s[i + c];
      const float t = x;
      p[c] = ptx::ex2(fmaf(t, a.unit, minus_lse(i + c)));
      const bool is_visible = is_set(visible, i + c);
      p[c] = is_visible ? p[c] : 0.f;
      x = !T::kCaps ? p[c] : is_visible ? p[c] * fmaf(-t, t, 1.f) : 0.f;  // tanh of a hidden score may be NaN
      if constexpr (T::kDrops) {
        x = p[c] = __uint_as_float(__float_as_uint(x) | (dropped << (31 - i - c) & 0x80000000u));
      }
    }
    put_weights(i / 2, T::kDrops ? ptx::pack2_positive<E>(p[0], p[1]) : ptx::pack2<E>(p[0], p[1]));
  }
}

// dS from dP, or with a delta of 0 from dP - delta, and s of change_scores(). `keep` is the factor of kept weights.
template <typename T>
__device__ __forceinline__ float gradient_of(float dp, float s, float minus_delta, float keep) {
  if constexpr (!T::kDrops) return s * (dp + minus_delta);
  return fabsf(s) * fmaf(dp, s < 0.f ? 0.f : keep, minus_delta);
}

// In a register: ptxas fetches a constant anew, by a predicated load, for every score otherwise.
__device__ __forceinline__ float keep_scale_of(const Modifiers& m) {
  float keep = m.keep_scale;
  asm volatile("" : "+f"(keep));
  return keep;
}

// First warpgroup of the kernel of dK and dV.
template <typename T>
__device__ __forceinline__ void consume_mod_weights(const WideModArgs& a, uint32_t smem, unsigned char* smem_bytes,
                                                    WideModShared<T>& shared, WideModBarriers<T> bars) {
  using E = typename T::Element;
  constexpr int D = T::kHeadDim, kM = T::kBlockM;
  const Problem& problem = a.plain.p.problem;
  const auto warp_of = [] { return ptx::fresh_thread_idx() / 32 % 4; };
  const auto weights_to = [=] { return smem_bytes + T::kWeightsAt + ptx::fresh_thread_idx() % 128 * 16; };
  const auto arrive = [](uint32_t bar) {
    ptx::mbarrier_arrive_for_warp(bar, ptx::fresh_lane() == 0);
  };

  float dv[D / 2], s[kM / 2];
  uint32_t words[kM / 4];
  [[maybe_unused]] uint32_t next_words[kM / 4];  // of P, while the product reads those of the step before
  HeldRows<T::kHeld> k;
  ModSteps<T> steps(shared, bars);
  RingPosition<T::kSlots> q_ring, dout_ring;
  uint32_t weights_parity = 1;
  int item_at = -1;
  BwdStep now;
  const auto take_keys = [&] {
    wait(bars.k_full(), steps.item_parity());
    if constexpr (T::kHeld > 0) k.load(smem, warp_of(), ptx::fresh_lane());
  };
  const auto take_step = [&] {
    wait(bars.q_full(q_ring.slot), q_ring.parity);
    now = shared.steps[q_ring.slot];
  };
  const auto issue_scores = [&] {
    ptx::pin(s);
    ptx::pin(k.words);
    ptx::wgmma_fence();
    issue_held_products<E, D, kM, false>(s, k, uniform(descriptor_low(smem, 16)),
                                         uniform(descriptor_low(smem + T::kQAt + q_ring.slot * T::kQBytes, 16)));
    ptx::wgmma_commit();
  };
  const auto col0 = [&] { return steps.item(item_at).w.block * T::kBlockN + warp_of() * 16; };
  const auto draw = [&] { return steps.template dropped<kM / 2>(a.m, now.block * kM, col0(), q_ring.slot); };
  [[maybe_unused]] ReadBias<E, true, kM / 2> bias;
  const auto ask_for_bias = [&] {
    if constexpr (T::kAdds) {
      const Scores scores = steps.scores(a, item_at, now);
      bias.template ask<0>(scores, now.block * kM, col0());
      bias.template ask<1>(scores, now.block * kM, col0());
    }
  };
  const auto form_weights = [&](uint32_t visible, uint32_t dropped) {
    const float* stats = reinterpret_cast<const float*>(smem_bytes + T::kStatsAt + q_ring.slot * T::kStatsBytes) +
                         2 * (ptx::fresh_lane() % 4);
    if constexpr (T::kHides) {
      scores_to_weights(s, stats, a.unit);
      if (__any_sync(0xffffffffu, visible != ~0u)) hide_weights(s, visible);
    } else {
      change_scores<E, T, true>(
          s, a, steps.scores(a, item_at, now), now.block * kM, col0(), visible, dropped, bias,
          [&](int i) { return stats[i / 4 * 8 + i % 2]; },
          [&](int i, uint32_t pair) { next_words[i] = pair; });
    }
    __syncwarp();
    arrive(bars.q_empty(q_ring.slot));
    if (now.is_last()) arrive(bars.k_empty());
    q_ring.advance();
  };
  const auto send_weights = [&] {
    if constexpr (T::kHides) {
      pack<E>(words, s);
    } else {
#pragma unroll
      for (int i = 0; i < kM / 4; ++i) words[i] = next_words[i];
    }
    wait(bars.weights_empty(), weights_parity);
    unsigned char* const to = weights_to();
#pragma unroll
    for (int i = 0; i < kM / 8; ++i) {
      *reinterpret_cast<float4*>(to + i * 2048) = make_float4(s[4 * i], s[4 * i + 1], s[4 * i + 2], s[4 * i + 3]);
    }
    __syncwarp();
    arrive(bars.weights_full());
    weights_parity ^= 1;
  };

  item_at = steps.take_item();
  if (item_at < 0) return;
  clear(dv);
  take_keys();
  take_step();
  issue_scores();
  {
    const uint32_t visible = steps.visible(now, 0), dropped = draw();
    ask_for_bias();
    ptx::wgmma_wait<0>();
    ptx::pin(s);
    form_weights(visible, dropped);
  }
  send_weights();
  bool more = true;
#pragma unroll 1
  while (more) {
    const bool ends = now.is_last();
    const int ended = item_at;
    ptx::pin(dv);
    ptx::pin(words);
    if (ends) {
      item_at = steps.take_item();
      more = item_at >= 0;
      if (more) take_keys();
    }
    if (more) take_step();
    issue_scores();
    wait(bars.dout_full(dout_ring.slot), dout_ring.parity);
    ptx::wgmma_fence();
    issue_pv<E>(dv, words, uniform(descriptor_low(smem + T::kDoutAt + dout_ring.slot * T::kQBytes, kM * 128)));
    ptx::wgmma_commit();
    uint32_t visible = 0, dropped = 0;
    if (more) {
      visible = steps.visible(now, 0);
      dropped = draw();
      ask_for_bias();
    }
    ptx::wgmma_wait<1>();
    ptx::pin(s);
    if (more) form_weights(visible, dropped);
    ptx::pin(s);
    ptx::wgmma_wait<0>();
    ptx::pin(dv);
    ptx::pin(words);
    arrive(bars.dout_empty(dout_ring.slot));
    dout_ring.advance();
    if (more) send_weights();
    if (ends) {
      const BwdModItem& item = steps.item(ended);
      store_rows<E>(a.plain.p.dv, item.w.b, item.w.k, item.w.h, dv, T::kDrops ? a.m.keep_scale : 1.f,
                    problem.head_dim_v, item.w.block * T::kBlockN + warp_of() * 16 + ptx::fresh_lane() / 4,
                    ptx::fresh_lane());
      steps.release_item(ended);
      clear(dv);
    }
  }
}

// Second warpgroup: dS from what the first one sends, and dK.
template <typename T>
__device__ __forceinline__ void consume_mod_gradients(const WideModArgs& a, uint32_t smem, unsigned char* smem_bytes,
                                                      WideModShared<T>& shared, WideModBarriers<T> bars) {
  using E = typename T::Element;
  constexpr int D = T::kHeadDim, kM = T::kBlockM;
  const Problem& problem = a.plain.p.problem;
  const auto warp_of = [] { return ptx::fresh_thread_idx() / 32 % 4; };
  const auto arrive = [](uint32_t bar) {
    ptx::mbarrier_arrive_for_warp(bar, ptx::fresh_lane() == 0);
  };

  float dk[D / 2], dp[kM / 2];
  uint32_t words[kM / 4];
  HeldRows<T::kHeld> v;
  ModSteps<T> steps(shared, bars);
  RingPosition<T::kSlots> q_ring, dout_ring;
  uint32_t weights_parity = 0;
  int item_at = -1;
  BwdStep now;
  const auto minus_delta = [&] {
    return reinterpret_cast<const float*>(smem_bytes + T::kStatsAt + q_ring.slot * T::kStatsBytes) + kM +
           2 * (ptx::fresh_lane() % 4);
  };
  const auto take_values = [&] {
    wait(bars.v_full(), steps.item_parity());
    if constexpr (T::kHeld > 0) v.load(smem + T::kVAt, warp_of(), ptx::fresh_lane());
  };
  const auto take_step = [&] {
    wait(bars.q_full(q_ring.slot), q_ring.parity);
    now = shared.steps[q_ring.slot];
    wait(bars.dout_full(dout_ring.slot), dout_ring.parity);
  };
  // dP starts from -delta, so that the products give dP - delta, but with dropout, where -delta comes afterwards. Behind
  // the last step it is issued once more, on what lies there by then, and nobody takes the result.
  const auto issue_dp = [&] {
    if constexpr (!T::kDrops) begin_dp(dp, minus_delta());
    ptx::pin(dp);
    ptx::pin(v.words);
    ptx::wgmma_fence();
    issue_held_products<E, D, kM, !T::kDrops>(
        dp, v, uniform(descriptor_low(smem + T::kVAt, 16)),
        uniform(descriptor_low(smem + T::kDoutAt + dout_ring.slot * T::kQBytes, 16)));
    ptx::wgmma_commit();
  };
  const auto form_ds = [&] {
    arrive(bars.dout_empty(dout_ring.slot));
    if (now.is_last()) arrive(bars.v_empty());
    dout_ring.advance();
    wait(bars.weights_full(), weights_parity);
    weights_parity ^= 1;
    const unsigned char* from = smem_bytes + T::kWeightsAt + ptx::fresh_thread_idx() % 128 * 16;
    [[maybe_unused]] const float* delta = minus_delta();
    const float keep = keep_scale_of(a.m);
#pragma unroll
    for (int i = 0; i < kM / 8; ++i) {
      const float4 x = *reinterpret_cast<const float4*>(from + i * 2048);
      float2 minus = make_float2(0.f, 0.f);
      if constexpr (T::kDrops) minus = *reinterpret_cast<const float2*>(delta + 8 * i);
      dp[4 * i] = gradient_of<T>(dp[4 * i], x.x, minus.x, keep);
      dp[4 * i + 1] = gradient_of<T>(dp[4 * i + 1], x.y, minus.y, keep);
      dp[4 * i + 2] = gradient_of<T>(dp[4 * i + 2], x.z, minus.x, keep);
      dp[4 * i + 3] = gradient_of<T>(dp[4 * i + 3], x.w, minus.y, keep);
    }
    __syncwarp();
    arrive(bars.weights_empty());
  };

  item_at = steps.take_item();
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
    const bool ends = now.is_last();
    const int ended = item_at, q_slot = q_ring.slot;
    ptx::pin(dk);
    ptx::pin(words);
    q_ring.advance();
    if (ends) {
      item_at = steps.take_item();
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
    arrive(bars.q_empty(q_slot));
    pack<E>(words, dp);
    if (ends) {
      const BwdModItem& item = steps.item(ended);
      store_rows<E>(a.plain.p.dk, item.w.b, item.w.k, item.w.h, dk, problem.softmax_scale, problem.head_dim,
                    item.w.block * T::kBlockN + warp_of() * 16 + ptx::fresh_lane() / 4, ptx::fresh_lane());
      steps.release_item(ended);
      clear(dk);
    }
  }
}

// A warpgroup of the kernel of dQ: 64 queries of an item, one step after the other as without modifiers.
template <typename T>
__device__ __forceinline__ void consume_mod_queries(const WideModArgs& a, uint32_t smem, WideModShared<T>& shared,
                                                    WideModBarriers<T> bars, int group) {
  using E = typename T::Element;
  constexpr int D = T::kHeadDim, kN = T::kBlockN;
  const BwdParams& params = a.plain.p;
  const Problem& problem = params.problem;
  const auto warp_of = [] { return ptx::fresh_thread_idx() / 32 % 4; };
  const auto arrive = [](uint32_t bar) {
    ptx::mbarrier_arrive_for_warp(bar, ptx::fresh_lane() == 0);
  };
  float dq[D / 2], s[kN / 2], dp[kN / 2];
  uint32_t words[kN / 4];
  ModSteps<T> steps(shared, bars);
  uint32_t count = 0;  // of steps so far
  const auto k_slot = [&] { return slot_of(count, T::kKSlots); };
  const auto v_slot = [&] { return slot_of(count, T::kVSlots); };

#pragma unroll 1
  while (true) {
    const int item_at = steps.take_item();
    if (item_at < 0) return;
    const auto row0 = [&] { return steps.item(item_at).w.block * T::kBlockM + group * T::kGroupRows + warp_of() * 16; };
    const QueryStats stats =
        load_query_stats<T>(params.row_stats, steps.item(item_at), row0() + ptx::fresh_lane() / 4);
    clear(dq);
    wait(bars.q_full(group), steps.item_parity());
    wait(bars.dout_full(group), steps.item_parity());
    bool is_last = false;
#pragma unroll 1
    while (!is_last) {
      wait(bars.k_full(k_slot()), parity_of(count, T::kKSlots));
      const BwdStep now = shared.steps[k_slot()];
      is_last = now.is_last();
      const auto k_at = [&] { return smem + T::kKAt + k_slot() * T::kKBytes; };
      ptx::pin(s);
      ptx::pin(dq);
      ptx::wgmma_fence();
      issue_products<E, D, T::kGroupRows, kN, false>(s, uniform(descriptor_low(smem + group * T::kQBytes, 16)),
                                                     uniform(descriptor_low(k_at(), 16)));
      ptx::wgmma_commit();
      const auto issue_dp = [&] {
        wait(bars.v_full(v_slot()), parity_of(count, T::kVSlots));
        if constexpr (T::kLateDp) clear(dp);  // else it would keep its registers from the step before
        ptx::pin(dp);
        ptx::wgmma_fence();
        issue_products<E, D, T::kGroupRows, kN, false>(
            dp, uniform(descriptor_low(smem + T::kDoutAt + group * T::kQBytes, 16)),
            uniform(descriptor_low(smem + T::kVAt + v_slot() * T::kKBytes, 16)));
        ptx::wgmma_commit();
      };
      if constexpr (!T::kLateDp) issue_dp();
      const uint32_t visible = steps.visible(now, group);
      const uint32_t dropped = steps.template dropped<kN / 2>(a.m, row0(), now.block * kN, item_at);
      [[maybe_unused]] ReadBias<E, false, kN / 2> bias;
      if constexpr (T::kAdds) {
        bias.template ask<0>(steps.scores(a, item_at, now), row0(), now.block * kN);
      }
      ptx::wgmma_wait<T::kLateDp ? 0 : 1>();
      ptx::pin(s);
      if (is_last) arrive(bars.q_empty(group));
      if constexpr (T::kHides) {
        scores_to_row_weights(s, stats, a.unit);
        if (__any_sync(0xffffffffu, visible != ~0u)) hide_weights(s, visible);
      } else {
        change_scores<E, T, false>(
            s, a, steps.scores(a, item_at, now), row0(), now.block * kN, visible, dropped, bias,
            [&](int i) { return stats.minus_lse[i / 2 % 2]; }, [](int, uint32_t) {});
      }
      ptx::pin(s);
      if constexpr (T::kLateDp) issue_dp();
      ptx::wgmma_wait<0>();
      ptx::pin(dp);
      arrive(bars.v_empty(v_slot()));
      if (is_last) arrive(bars.dout_empty(group));
      const float keep = keep_scale_of(a.m);
#pragma unroll
      for (int i = 0; i < kN / 2; ++i) dp[i] = gradient_of<T>(dp[i], s[i], stats.minus_delta[i / 2 % 2], keep);
      pack<E>(words, dp);
      ptx::pin(dq);
      ptx::pin(words);
      ptx::wgmma_fence();
      issue_pv<E>(dq, words, uniform(descriptor_low(k_at(), kN * 128)));
      ptx::wgmma_commit();
      ptx::wgmma_wait<0>();
      ptx::pin(dq);
      ptx::pin(words);
      __syncwarp();  // all lanes have read the step
      arrive(bars.k_empty(k_slot()));
      ++count;
    }
    const BwdModItem& item = steps.item(item_at);
    store_rows<E>(params.dq, item.w.b, item.w.q, item.w.h, dq, problem.softmax_scale, problem.head_dim,
                  row0() + ptx::fresh_lane() / 4, ptx::fresh_lane());
    steps.release_item(item_at);
  }
}

}  // namespace flash_ext::sm90
