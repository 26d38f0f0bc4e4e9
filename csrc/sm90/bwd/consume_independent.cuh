// The consumers of the sm90 backward whose warpgroups are independent.
#pragma once

#include "../../common/dot.cuh"
#include "steps.cuh"
#include "stream_k.cuh"

namespace flash_ext::sm90 {

// Statistics of a step's rows by the consumers themselves, two threads a row: -lse and -delta in the form of
// passes.cuh. They replace lse and its gradient. O and dO are tiles in shared memory. rows_left: of the sequence.
template <typename E, int kRows>
__device__ __forceinline__ void make_row_stats(unsigned char* stats, uint32_t out, uint32_t dout, int rows_left) {
  const int row = ptx::fresh_thread_idx() % 128 / 2, half = ptx::fresh_thread_idx() % 2;
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t piece = row * 128 + (((half * 4 + i) ^ (row % 8)) << 4);
    const float4 x = ptx::load_shared(out + piece), y = ptx::load_shared(dout + piece);
    sum += dot_8<E>(reinterpret_cast<const uint4&>(x), reinterpret_cast<const uint4&>(y));
  }
  sum += __shfl_xor_sync(ptx::kFullWarp, sum, 1);
  float& own = reinterpret_cast<float*>(stats)[half * kRows + row];
  const float minus_lse = row >= rows_left || own < kLowestLse ? -INFINITY : -own * kLog2e;
  own = half == 0 ? minus_lse : own - sum;
}

// Two warpgroups with 128 keys each, in two blocks of 64, that share nothing but the stream of Q and dO. Where these
// are all keys (T::kStores), their parts of dQ meet in shared memory: by turns one leaves its part, and the other adds
// it to its own and stores the sum. Both then take every step, also one whose queries see none of their keys. The loop
// is not that of consume_cooperative(): dK and dV of two blocks fill the registers, so products go block by block
// within a step, and dS is the warpgroup's own.
template <typename T>
__device__ __forceinline__ void consume_independent(const BwdArgs& a, uint32_t smem, unsigned char* smem_bytes,
                                                    const BwdWorkTile* work_tiles, BwdBarriers<T> bars, int group) {
  using E = typename T::Element;
  constexpr int D = T::kHeadDim, kM = T::kBlockM, kBlocks = T::kKeyBlocks;
  // Read once: ptxas would read the thread's number in every step again, and spill 16 bytes; with
  // ptx::fresh_lane() it spills 4.
  int lane = threadIdx.x % 32;
  asm volatile("" : "+r"(lane));
  const int warp = (threadIdx.x / 32) % 4;
  const int heads = static_cast<int>(a.grid.shared.divisor);
  const float scale = a.p.problem.scale_log2;
  constexpr int kRows = T::kPartRows;
  const uint32_t k_low = uniform(descriptor_low(smem + group * 128 * 128, 16));
  const uint32_t v_low = uniform(descriptor_low(smem + T::kVAt + group * 128 * 128, 16));
  const uint32_t ds_at = smem + T::kDsAt + group * T::kDsStages * T::kDsBytes, ds_to = ds_at + ds_offset(warp, lane);
  const int row = warp * 16 + lane / 4;
  const uint32_t staging = smem + T::kStagingAt + (group * 4 + warp) * T::kStagingBytes;

  float dk[kBlocks][D / 2], dv[kBlocks][D / 2];
  PipelineState<T::kWorkStages> work_ring;
  PipelineState<T::kStages> ring;
  uint32_t kv_phase = 0, ds_stage = 0;
  [[maybe_unused]] uint32_t dq_phase = 1;
  const auto arrive = [&](uint32_t bar) { ptx::mbarrier_arrive_for_warp(bar, lane == 0); };
#pragma unroll 1
  while (true) {
    wait(bars.work_full(work_ring.stage), work_ring.phase);
    const BwdWorkTile& work = work_tiles[work_ring.stage];
    if (work.w.block < 0) {
      if (T::kStaged && !T::kOrdered && lane == 0) ptx::bulk_wait_read();
      break;
    }
    const AttnMod mod{a.p.problem, work.w.q.length, work.w.k.length};
    const int first_key = work.w.block * T::kBlockN + group * 64 * kBlocks;
    const KeyReach reach = KeyReach::of<kM>(mod, first_key, 64 * kBlocks);
    if (T::kDivides && work.share == BwdWorkTile::kTakes) {
      const SharedSums<T> sums(a.stream_k, blockIdx.x - 1);
      for_steps<0, kBlocks>([&](auto b) {
        sums.template load<b.value * D>(dk[b.value]);
        sums.template load<b.value * D + D / 2>(dv[b.value]);
      });
    } else {
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) {
        clear(dk[b]);
        clear(dv[b]);
      }
    }
    Walk<T> walk(work);
    if (walk.left > 0) {
      wait(bars.k_full(), kv_phase);
      wait(bars.v_full(), kv_phase);
      kv_phase ^= 1;
    }
#pragma unroll 1
    while (walk.left > 0) {
      wait(bars.q_full(ring.stage), ring.phase);
      wait(bars.dout_full(ring.stage), ring.phase);
      if (!T::kStores && !reach.sees(walk.block)) {
        arrive(bars.q_empty(ring.stage));
        arrive(bars.dout_empty(ring.stage));
        ring.advance();
        walk.advance(work, heads);
        continue;
      }
      const uint32_t q_at = smem + T::kQAt + ring.stage * T::kQBytes, dout_at = q_at + (T::kDoutAt - T::kQAt);
      const uint32_t q_low = uniform(descriptor_low(q_at, 16)), dout_low = uniform(descriptor_low(dout_at, 16));
      if constexpr (T::kMayMakeStats) {
        if (a.makes_stats) {
          make_row_stats<E, kM>(smem_bytes + T::kStatsAt + ring.stage * T::kStatsBytes,
                                smem + T::kDsAt + ring.stage * T::kDsBytes, dout_at, work.w.q.length - walk.block * kM);
          debug_delay();
          ptx::bar_sync(ptx::kGroupBarrier + group, ptx::kWarpgroupThreads);
        }
      }
      const float* stats =
          reinterpret_cast<const float*>(smem_bytes + T::kStatsAt) + ring.stage * 2 * kM + 2 * (lane % 4);
      // Both blocks of keys use the same lse: to read it twice is slower.
      [[maybe_unused]] RegisterStats<32> lse;
      if constexpr (kBlocks == 2) lse.load(stats);
      if constexpr (T::kDsStages == 1) {
        ptx::bar_sync(ptx::kGroupBarrier + group, ptx::kWarpgroupThreads);  // dQ of the step before is made
      }
      float s[32], dp[32];
      uint32_t p_words[16], ds_words[16];
      const auto form = [&](int b) {
        ptx::wgmma_wait<1>();
        ptx::warpgroup_fence_operand(s);
        if constexpr (kBlocks == 2) {
          scores_to_weights(s, lse, scale);
        } else {
          scores_to_weights(s, stats, scale);
        }
        if (!reach.whole(walk.block)) hide(s, mod, first_key + b * 64 + row, walk.block * kM + 2 * (lane % 4));
        RegisterStats<32> delta;
        if (b > 0) delta.load(stats + kM);
        ptx::wgmma_wait<0>();
        ptx::warpgroup_fence_operand(dp);
        if (b > 0) add_minus_delta(dp, delta);
#pragma unroll
        for (int i = 0; i < 32; ++i) dp[i] *= s[i];
        pack<E>(p_words, s);
        pack<E>(ds_words, dp);
        store_ds(ds_to + ds_stage * T::kDsBytes + b * 64 * 128, ds_words);
        ptx::warpgroup_fence_operand(p_words);
        ptx::warpgroup_fence_operand(ds_words);
      };
      take_key_blocks<E, kM, kRows, true>({k_low, v_low, q_low, dout_low}, s, dp, p_words, ds_words, dk, dv, stats + kM,
                                          form);
      debug_delay();
      ptx::bar_sync(ptx::kGroupBarrier + group, ptx::kWarpgroupThreads);
      const int tile = (T::kPool ? work.dq_tile : work.tile) + walk.head * a.tiles_per_head + walk.block;
      float* const to = a.p.dq_accum + static_cast<int64_t>(tile) * (kM * D);
      // dQ by chunks of columns, because registers for all of them are short.
      for_steps<0, T::kChunks>([&](auto chunk) {
        constexpr int kFirst = 64 * chunk.value, kColumns = D - kFirst < 64 ? D - kFirst : 64;
        float dq[kColumns / 2];
        ptx::wgmma_fence();
        issue_dq<E, 64 * kBlocks>(dq, uniform(descriptor_low(ds_at + ds_stage * T::kDsBytes, 16)),
                                  k_low + chunk.value * (kRows * 128 / 16));
        ptx::wgmma_commit();
        [[maybe_unused]] uint32_t seen = 0;
        if constexpr (T::kOrdered && !T::kStaged) seen = ptx::load_acquire(a.dq_semaphore + tile);
        if constexpr (kFirst == 0) {
          ptx::wgmma_wait<1>();
          fence_blocks(dk, dv);
          if constexpr (!T::kMayMakeStats) {
            arrive(bars.q_empty(ring.stage));
            arrive(bars.dout_empty(ring.stage));
          }
        }
        ptx::wgmma_wait<0>();
        ptx::warpgroup_fence_operand(dq);
        if constexpr (T::kMayMakeStats) {  // `out` of another step comes to the place of this dS
          arrive(bars.q_empty(ring.stage));
          arrive(bars.dout_empty(ring.stage));
        }
        [[maybe_unused]] float* const chunk_to = to + kFirst * kM + warp * 16 * kColumns;
        const auto store_dq = [&] {
          const Problem& p = a.p.problem;
          store_rows<E, kFirst>(a.p.dq, work.w.b, work.w.q, work.w.h * heads + walk.head, dq, p.scale, p.head_dim,
                                walk.block * kM + row, lane);
        };
        if constexpr (T::kStores && T::kGroups == 1) {
          if (work.w.k.length <= T::kBlockN) {
            store_dq();
          } else {
            add_dq<false>(chunk_to, dq, staging, lane);
          }
        } else if constexpr (T::kStores) {
          // A thread meets the one of the other warpgroup that has the same queries and columns. What it left has been
          // read before it writes there again, two steps later: in between it waits for the other's part. Two barriers
          // by turns, because one warpgroup may come to the next step's before the other has come to this one's.
          const uint32_t part = smem + T::kExchangeAt + (warp * 32 + lane) * 16,
                         meeting = ptx::kExchangeBarrier + ds_stage;
          debug_delay();
          if (static_cast<uint32_t>(group) == ds_stage) {
#pragma unroll
            for (int i = 0; i < D / 8; ++i) ptx::store_shared(part + i * 2048, four_of(dq, i));
            ptx::bar_arrive_only(meeting, 2 * ptx::kWarpgroupThreads);
          } else {
            ptx::bar_sync(meeting, 2 * ptx::kWarpgroupThreads);
#pragma unroll
            for (int i = 0; i < D / 8; ++i) {
              const float4 other = ptx::load_shared(part + i * 2048);
              float* x = dq + i / 2 * 8 + i % 2 * 2;
              x[0] += other.x, x[1] += other.y, x[4] += other.z, x[5] += other.w;
            }
            store_dq();
          }
        } else if constexpr (T::kOrdered) {
          if constexpr (!T::kStaged) {
            add_dq_in_order(chunk_to, dq, lane,
                            wait_dq_semaphore(a.dq_semaphore + tile, 2 * work.w.block + group, seen));
          }
          wait(bars.dq_empty(group), dq_phase);
          dq_phase ^= 1;
          if constexpr (T::kStaged) stage_dq(dq, staging, lane);
          arrive(bars.dq_full(group));
        } else {
          add_dq<T::kStaged>(chunk_to, dq, staging, lane);
        }
      });
      ring.advance();
      if constexpr (T::kDsStages == 2) ds_stage ^= 1;
      walk.advance(work, heads);
    }
    __syncwarp();
    if (T::kPool && a.pool.words != nullptr) arrive(bars.added(work_ring.stage));
    if (work.steps > 0) {
      arrive(bars.k_empty());
      arrive(bars.v_empty());
    }
    const Problem& p = a.p.problem;
    if (T::kDivides && work.share == BwdWorkTile::kGives) {
      const SharedSums<T> sums(a.stream_k, blockIdx.x);
      for_steps<0, kBlocks>([&](auto b) {
        sums.template store<b.value * D>(dk[b.value]);
        sums.template store<b.value * D + D / 2>(dv[b.value]);
      });
      tell_sums(a.stream_k, work);
    } else {
      int h = work.w.h;
      if constexpr (T::kUnits) {
        if (a.query_splits.divisor > 1) h = h * static_cast<int>(a.query_splits.divisor) + work.round;
      }
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) {
        const int key = first_key + b * 64 + row;
        store_rows<E>(a.p.dv, work.w.b, work.w.k, h, dv[b], 1.f, p.head_dim_v, key, lane);
        store_rows<E>(a.p.dk, work.w.b, work.w.k, h, dk[b], p.scale, p.head_dim, key, lane);
      }
    }
    __syncwarp();
    arrive(bars.work_empty(work_ring.stage));
    work_ring.advance();
  }
}

}  // namespace flash_ext::sm90
