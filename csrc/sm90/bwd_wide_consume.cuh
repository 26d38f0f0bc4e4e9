// The consumers of the sm90 backward for head_dim above 128.
//
// In the kernel of dK and dV a warpgroup hands the tensor cores the scores of the next step together with the gradient
// product of this one, also across items: exponentials overlap that product. That wants three tiles of Q and dO in
// shared memory (head_dim 256, 16k rows: 923 TFLOP/s, as of all five products, with three tiles of 48 queries, 750 with
// two of 64 in either order; 0.94 to 0.99 of that speed, and up to 1.05 with causal 1k rows, with one step after the
// other). In that of dQ both do the same work, and products of one are at work beside the arithmetic of the other.
// There steps go one after the other: with the gradient product handed over together with the next two, 4k rows took
// 1.06 times as long. The products of a step that does not exist (behind the last one) read what lies there, and
// nothing comes of them: a branch around them would make ptxas serialise all.
#pragma once

#include "bwd_wide_produce.cuh"

namespace flash_ext::sm90 {

// Zeros in a warp's 16 rows of a gradient, from `row` of the sequence on.
template <typename E>
__device__ __forceinline__ void clear_rows(const StridedView& view, int b, const Span& span, int h, int columns,
                                           int row, int lane) {
  zero_rows(view, b, span.start + row, h, min(16, span.length - row), columns, lane);
}

template <typename Bars, int kItems>
__device__ __forceinline__ void release_item(Bars bars, int slot, int lane) {
  __syncwarp();
  ptx::mbarrier_arrive_for_warp(bars.item_empty(slot), lane == 0);
}

// Waits for the next item with steps and returns its place, or -1 at the end. Those without go to `empty` on the way.
// Holds no other item meanwhile: of two places, one with an item that is not let go and one with an item without steps
// leave none for what follows.
template <int kItems, typename Item, typename Bars, typename Empty>
__device__ __forceinline__ int next_item(const Item* items, Bars bars, RingPosition<kItems>& place, int lane,
                                         const Empty& empty) {
  while (true) {
    wait(bars.item_full(place.slot), place.parity);
    const Item& item = items[place.slot];
    if (item.w.block < 0) return -1;
    const int slot = place.slot;
    place.advance();
    if (item.steps > 0) return slot;
    empty(item);
    release_item<Bars, kItems>(bars, slot, lane);
  }
}

// As next_item(), while another item is under way: -1 also before an item without steps, which stays the next one.
template <int kItems, typename Item, typename Bars>
__device__ __forceinline__ int following_item(const Item* items, Bars bars, RingPosition<kItems>& place) {
  wait(bars.item_full(place.slot), place.parity);
  const Item& item = items[place.slot];
  if (item.w.block < 0 || item.steps == 0) return -1;
  const int slot = place.slot;
  place.advance();
  return slot;
}

// Tiles of queries that see all keys of an item, and its walk.
template <typename T>
struct KeyItem {
  QueryWalk<false> walk;
  KeyReach reach;
  int slot;
  __device__ KeyItem(const BwdArgs& a, const BwdItem& item, int slot) : walk(item), slot(slot) {
    const AttnMod mod{a.p.problem, item.w.q.length, item.w.k.length};
    reach = KeyReach::of<T::kBlockM>(mod, item.w.block * T::kBlockN, T::kBlockN);
  }
};

// First warpgroup of the kernel of dK and dV: P of 64 keys, which it leaves to the second one, and dV.
template <typename T>
__device__ __forceinline__ void consume_weights(const BwdArgs& a, uint32_t smem, unsigned char* smem_bytes,
                                                const BwdItem* items, BwdBarriers<T> bars) {
  using E = typename T::Element;
  constexpr int D = T::kHeadDim, Dv = T::kHeadDimV, kM = T::kBlockM;
  const int lane = consumer_lane<T>(), warp = (threadIdx.x / 32) % 4, row = warp * 16 + lane / 4;
  const int heads = static_cast<int>(a.grid.shared.divisor);
  const float scale = a.p.problem.scale_log2;
  const uint32_t k_low = uniform(descriptor_low(smem, 16));
  unsigned char* const weights_to = smem_bytes + T::kWeightsAt + threadIdx.x % 128 * 16;

  float dv[Dv / 2], s[kM / 2];
  uint32_t words[kM / 4];
  HeldRows<T::kHeldK> k;
  RingPosition<T::kItems> place;
  RingPosition<T::kSlots> q_ring, dout_ring;
  RingPosition<T::kWeightSlots> handed;
  handed.parity = 1;  // the first wait for an empty place passes
  uint32_t k_parity = 0;
  const auto arrive = [&](uint32_t bar) {
    ptx::mbarrier_arrive_for_warp(bar, lane == 0);
  };
  const auto next = [&] {
    return next_item(items, bars, place, lane, [&](const BwdItem& item) {
      clear_rows<E>(a.p.dv, item.w.b, item.w.k, item.w.h, a.p.problem.head_dim_v, item.w.block * T::kBlockN + warp * 16,
                    lane);
    });
  };
  constexpr bool kAllHeld = T::kHeldK == D / 16;
  const auto take_keys = [&] {
    wait(bars.k_full(), k_parity);
    k_parity ^= 1;
    if constexpr (T::kHeldK > 0) k.load(smem, warp, lane);
    if constexpr (kAllHeld) {
      __syncwarp();
      arrive(bars.k_empty());
    }
  };
  const auto issue_scores = [&] {
    ptx::pin(s);
    ptx::pin(k.words);
    ptx::wgmma_fence();
    issue_held_products<E, D, kM, false>(s, k, k_low,
                                         uniform(descriptor_low(smem + T::kQAt + q_ring.slot * T::kQBytes, 16)));
    ptx::wgmma_commit();
  };
  const auto form_weights = [&](const KeyItem<T>& at) {
    const float* stats =
        reinterpret_cast<const float*>(smem_bytes + T::kStatsAt + q_ring.slot * T::kStatsBytes) + 2 * (lane % 4);
    scores_to_weights(s, stats, scale);
    __syncwarp();
    arrive(bars.q_empty(q_ring.slot));
    if (!kAllHeld && at.walk.left == 1) arrive(bars.k_empty());
    q_ring.advance();
    if (!at.reach.whole(at.walk.block)) {
      const BwdItem& item = items[at.slot];
      const AttnMod mod{a.p.problem, item.w.q.length, item.w.k.length};
      hide(s, mod, item.w.block * T::kBlockN + row, at.walk.block * kM + 2 * (lane % 4));
    }
  };
  const auto send_weights = [&] {
    pack<E>(words, s);
    wait(bars.ds_full(T::kWeightSlots + handed.slot), handed.parity);
#pragma unroll
    for (int i = 0; i < kM / 8; ++i) {
      *reinterpret_cast<float4*>(weights_to + handed.slot * T::kWeightBytes + i * 2048) =
          make_float4(s[4 * i], s[4 * i + 1], s[4 * i + 2], s[4 * i + 3]);
    }
    __syncwarp();
    arrive(bars.ds_full(handed.slot));
    handed.advance();
  };

#pragma unroll 1
  while (true) {
    const int first = next();
    if (first < 0) return;
    KeyItem<T> at(a, items[first], first);
    clear(dv);
    take_keys();
    wait(bars.q_full(q_ring.slot), q_ring.parity);
    issue_scores();
    ptx::wgmma_wait<0>();
    ptx::pin(s);
    form_weights(at);
    send_weights();
    bool more = true;
#pragma unroll 1
    while (more) {
      const bool ends = at.walk.left == 1;
      const int item_at = at.slot;
      ptx::pin(dv);
      ptx::pin(words);
      if (ends) {
        const int slot = following_item(items, bars, place);
        more = slot >= 0;
        if (more) {
          at = KeyItem<T>(a, items[slot], slot);
          take_keys();
        }
      } else {
        at.walk.advance(items[at.slot], heads);
      }
      if (more) wait(bars.q_full(q_ring.slot), q_ring.parity);
      issue_scores();
      wait(bars.dout_full(dout_ring.slot), dout_ring.parity);
      ptx::wgmma_fence();
      issue_pv<E>(dv, words, uniform(descriptor_low(smem + T::kDoutAt + dout_ring.slot * T::kDoutBytes, kM * 128)));
      ptx::wgmma_commit();
      ptx::wgmma_wait<1>();
      ptx::pin(s);
      if (more) form_weights(at);
      ptx::pin(s);
      ptx::wgmma_wait<0>();
      ptx::pin(dv);
      ptx::pin(words);
      arrive(bars.dout_empty(dout_ring.slot));
      dout_ring.advance();
      if (more) send_weights();
      if (ends) {
        const BwdItem& item = items[item_at];
        store_rows<E>(a.p.dv, item.w.b, item.w.k, item.w.h, dv, 1.f, a.p.problem.head_dim_v,
                      item.w.block * T::kBlockN + row, lane);
        release_item<BwdBarriers<T>, T::kItems>(bars, item_at, lane);
        clear(dv);
      }
    }
  }
}

// Second warpgroup: dS from the weights of the first, and dK.
template <typename T>
__device__ __forceinline__ void consume_gradients(const BwdArgs& a, uint32_t smem, unsigned char* smem_bytes,
                                                  const BwdItem* items, BwdBarriers<T> bars) {
  using E = typename T::Element;
  constexpr int D = T::kHeadDim, Dv = T::kHeadDimV, kM = T::kBlockM;
  const int lane = consumer_lane<T>(), warp = (threadIdx.x / 32) % 4, row = warp * 16 + lane / 4;
  const uint32_t v_low = uniform(descriptor_low(smem + T::kVAt, 16));
  const unsigned char* const weights_from = smem_bytes + T::kWeightsAt + threadIdx.x % 128 * 16;
  const float* const minus_delta = reinterpret_cast<const float*>(smem_bytes + T::kStatsAt) + kM + 2 * (lane % 4);

  float dk[D / 2], dp[kM / 2];
  uint32_t words[kM / 4];
  HeldRows<T::kHeldV> v;
  RingPosition<T::kItems> place;
  RingPosition<T::kSlots> q_ring, dout_ring;
  RingPosition<T::kWeightSlots> handed;
  uint32_t v_parity = 0;
  const auto arrive = [&](uint32_t bar) {
    ptx::mbarrier_arrive_for_warp(bar, lane == 0);
  };
  const auto next = [&] {
    return next_item(items, bars, place, lane, [&](const BwdItem& item) {
      clear_rows<E>(a.p.dk, item.w.b, item.w.k, item.w.h, a.p.problem.head_dim, item.w.block * T::kBlockN + warp * 16,
                    lane);
    });
  };
  constexpr bool kAllHeld = T::kHeldV == Dv / 16;
  const auto take_values = [&] {
    wait(bars.v_full(), v_parity);
    v_parity ^= 1;
    if constexpr (T::kHeldV > 0) v.load(smem + T::kVAt, warp, lane);
    if constexpr (kAllHeld) {
      __syncwarp();
      arrive(bars.v_empty());
    }
  };
  // dP starts from -delta, so that the products give dP - delta. Behind the last step it is issued once more, on what lies
  // there by then, and nobody takes the result.
  const auto issue_dp = [&] {
    begin_dp(dp, minus_delta + q_ring.slot * (T::kStatsBytes / 4));
    ptx::pin(dp);
    ptx::pin(v.words);
    ptx::wgmma_fence();
    issue_held_products<E, Dv, kM, true>(
        dp, v, v_low, uniform(descriptor_low(smem + T::kDoutAt + dout_ring.slot * T::kDoutBytes, 16)));
    ptx::wgmma_commit();
  };
  const auto form_ds = [&](int left) {
    arrive(bars.dout_empty(dout_ring.slot));
    if (!kAllHeld && left == 1) arrive(bars.v_empty());
    dout_ring.advance();
    wait(bars.ds_full(handed.slot), handed.parity);
#pragma unroll
    for (int i = 0; i < kM / 8; ++i) {
      const float4 p = *reinterpret_cast<const float4*>(weights_from + handed.slot * T::kWeightBytes + i * 2048);
      dp[4 * i] *= p.x;
      dp[4 * i + 1] *= p.y;
      dp[4 * i + 2] *= p.z;
      dp[4 * i + 3] *= p.w;
    }
    __syncwarp();
    arrive(bars.ds_full(T::kWeightSlots + handed.slot));
    handed.advance();
  };

#pragma unroll 1
  while (true) {
    int item_at = next();
    if (item_at < 0) return;
    int left = items[item_at].steps;
    clear(dk);
    take_values();
    wait(bars.q_full(q_ring.slot), q_ring.parity);
    wait(bars.dout_full(dout_ring.slot), dout_ring.parity);
    issue_dp();
    ptx::wgmma_wait<0>();
    ptx::pin(dp);
    form_ds(left);
    pack<E>(words, dp);
    bool more = true;
#pragma unroll 1
    while (more) {
      const bool ends = left == 1;
      const int ended = item_at, q_slot = q_ring.slot;
      ptx::pin(dk);
      ptx::pin(words);
      q_ring.advance();
      --left;
      if (ends) {
        item_at = following_item(items, bars, place);
        more = item_at >= 0;
        if (more) {
          left = items[item_at].steps;
          take_values();
        }
      }
      if (more) {
        wait(bars.q_full(q_ring.slot), q_ring.parity);
        wait(bars.dout_full(dout_ring.slot), dout_ring.parity);
      }
      issue_dp();
      ptx::wgmma_fence();
      issue_pv<E>(dk, words, uniform(descriptor_low(smem + T::kQAt + q_slot * T::kQBytes, kM * 128)));
      ptx::wgmma_commit();
      ptx::wgmma_wait<1>();
      ptx::pin(dp);
      if (more) form_ds(left);
      ptx::pin(dp);
      ptx::wgmma_wait<0>();
      ptx::pin(dk);
      ptx::pin(words);
      arrive(bars.q_empty(q_slot));
      pack<E>(words, dp);
      if (ends) {
        const BwdItem& item = items[ended];
        store_rows<E>(a.p.dk, item.w.b, item.w.k, item.w.h, dk, a.p.problem.softmax_scale, a.p.problem.head_dim,
                      item.w.block * T::kBlockN + row, lane);
        release_item<BwdBarriers<T>, T::kItems>(bars, ended, lane);
        clear(dk);
      }
    }
  }
}

// s = P = 2^(scale s - lse), dp = P (dP - delta): a thread has two queries, x[4 j + 2 half + c] is query 8 half and
// key 8 j + 2 (lane % 4) + c.
struct QueryStats {
  float minus_lse[2], minus_delta[2];
};

// Of a thread's queries, from `row` of an item on. They come from the kernel before the one before this one, in which
// every CTA allows this one behind griddepcontrol.wait: their writes are performed before any thread here begins (PTX
// ISA, griddepcontrol), and strong loads are not answered by an older line of L1.
template <typename T, typename Item>
__device__ __forceinline__ QueryStats load_query_stats(const float* row_stats, const Item& item, int row) {
  QueryStats stats;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int at = row + 8 * half;
    const bool inside = at < item.w.q.length;
    const float* from = row_stats + (item.tile + static_cast<int64_t>(at / T::kStatRows)) * (2 * T::kStatRows) +
                        at % T::kStatRows;
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

template <int kCount>
__device__ __forceinline__ void hide_keys(float (&s)[kCount], const AttnMod& mod, int query, int key) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const VisibleKeys keys = mod.visible(query + 8 * half);
#pragma unroll
    for (int j = 0; j < kCount / 4; ++j) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        float& x = s[4 * j + 2 * half + c];
        x = keys.contains(key + 8 * j + c) ? x : 0.f;
      }
    }
  }
}

// A warpgroup of the kernel of dQ: 64 queries of an item.
template <typename T>
__device__ __forceinline__ void consume_keys(const WideQueryArgs& a, uint32_t smem, const QueryItem* items,
                                             WideQueryBarriers<T> bars, int group) {
  using E = typename T::Element;
  constexpr int D = T::kHeadDim, Dv = T::kHeadDimV, kN = T::kBlockN;
  const Problem& problem = a.p.problem;
  const int lane = consumer_lane<T>(), warp = (threadIdx.x / 32) % 4, row = group * 64 + warp * 16 + lane / 4;
  const float scale = problem.scale_log2;
  const uint32_t q_low = uniform(descriptor_low(smem + group * T::kQBytes, 16));
  const uint32_t dout_low = uniform(descriptor_low(smem + T::kDoutAt + group * T::kDoutBytes, 16));

  float dq[D / 2], s[kN / 2], dp[kN / 2];
  uint32_t words[kN / 4];
  QueryStats stats;
  RingPosition<T::kItems> place;
  RingPosition<T::kKSlots> k_ring;
  RingPosition<T::kVSlots> v_ring;
  uint32_t parity = 0;  // of the item's Q and dO
  int item_at = -1, block = 0, left = 0, first_row = 0;
  const auto arrive = [&](uint32_t bar) {
    ptx::mbarrier_arrive_for_warp(bar, lane == 0);
  };
  const auto next = [&] {
    return next_item(items, bars, place, lane, [&](const QueryItem& item) {
      clear_rows<E>(a.p.dq, item.w.b, item.w.q, item.w.h, problem.head_dim, item.w.block * T::kBlockM + row - lane / 4,
                    lane);
    });
  };
  const auto begin_item = [&](int slot) {
    item_at = slot;
    if (slot < 0) return;
    const QueryItem& item = items[slot];
    block = item.blocks.begin;
    first_row = item.w.block * T::kBlockM + row;
    left = item.steps;
    stats = load_query_stats<T>(a.p.row_stats, item, first_row);
  };
  const auto issue_scores = [&] {
    ptx::pin(s);
    ptx::wgmma_fence();
    issue_products<E, D, T::kGroupRows, kN, false>(
        s, q_low, uniform(descriptor_low(smem + T::kKAt + k_ring.slot * T::kKBytes, 16)));
    ptx::wgmma_commit();
  };
  const auto issue_dp = [&] {
    ptx::pin(dp);
    ptx::wgmma_fence();
    issue_products<E, Dv, T::kGroupRows, kN, false>(
        dp, dout_low, uniform(descriptor_low(smem + T::kVAt + v_ring.slot * T::kVBytes, 16)));
    ptx::wgmma_commit();
  };
  const auto form_weights = [&] {
    if (left == 1) arrive(bars.q_empty(group));
    scores_to_row_weights(s, stats, scale);
    const QueryItem& item = items[item_at];
    const AttnMod mod{problem, item.w.q.length, item.w.k.length};
    // Rows outside the sequence have weight 0 anyway.
    const int first_key = block * kN, first = first_row - lane / 4 - warp * 16;
    const bool whole = first_key + kN <= min(item.w.k.length, first + mod.shift() + problem.reach_right + 1) &&
                       first_key >= first + 63 + mod.shift() - problem.reach_left;
    if (!whole) hide_keys(s, mod, first_row, first_key + 2 * (lane % 4));
  };
  const auto form_ds = [&] {
    arrive(bars.v_empty(v_ring.slot));
    if (left == 1) arrive(bars.dout_empty(group));
    v_ring.advance();
#pragma unroll
    for (int i = 0; i < kN / 2; ++i) dp[i] = s[i] * (dp[i] + stats.minus_delta[i / 2 % 2]);
    pack<E>(words, dp);
  };

#pragma unroll 1
  while (true) {
    begin_item(next());
    if (item_at < 0) return;
    clear(dq);
    wait(bars.q_full(group), parity);
    wait(bars.dout_full(group), parity);
    parity ^= 1;
#pragma unroll 1
    for (; left > 0; --left, ++block) {
      ptx::pin(dq);
      wait(bars.k_full(k_ring.slot), k_ring.parity);
      issue_scores();
      wait(bars.v_full(v_ring.slot), v_ring.parity);
      issue_dp();
      ptx::wgmma_wait<1>();
      ptx::pin(s);
      form_weights();
      ptx::pin(s);
      ptx::wgmma_wait<0>();
      ptx::pin(dp);
      form_ds();
      ptx::pin(dq);
      ptx::pin(words);
      ptx::wgmma_fence();
      issue_pv<E>(dq, words, uniform(descriptor_low(smem + T::kKAt + k_ring.slot * T::kKBytes, kN * 128)));
      ptx::wgmma_commit();
      ptx::wgmma_wait<0>();
      ptx::pin(dq);
      ptx::pin(words);
      arrive(bars.k_empty(k_ring.slot));
      k_ring.advance();
    }
    const QueryItem& item = items[item_at];
    store_rows<E>(a.p.dq, item.w.b, item.w.q, item.w.h, dq, problem.softmax_scale, problem.head_dim, first_row, lane);
    release_item<WideQueryBarriers<T>, T::kItems>(bars, item_at, lane);
  }
}

}  // namespace flash_ext::sm90
