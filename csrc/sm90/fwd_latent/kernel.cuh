// The Hopper forward over a cache of latents (tiles.h).
//
//   O_i = softmax(scale * Q_i C^T) C[:, :512]
//
// Scheduling, parts of keys and what leaves are those of fwd_cached/packed.cuh. Two warpgroups take turns, a tile each.
// The one in turn forms the scores, raises the maxima, and hands weights and maxima to the other one. Then both
// multiply the weights by their half of the columns. That exchange is why this loop is not the one of fwd/consume.cuh.
// Maxima are exact, because scores are a small part of the work.
//
// Named barriers from kExchangeBarrier on: weights of the tile in a stage are there, one for each stage; sums of both
// warpgroups are there.
//
// Shared memory, 128-byte swizzled tiles first:
//   ring [2] of 64 keys, Q of 64 rows: 9 chunks of 64 columns each
//   weights, thread by thread, maxima of rows, sums of rows [2][warpgroup]
//   control: work tiles, the scheduler's place, barriers
#pragma once

#include "../fwd/consume.cuh"
#include "../fwd_cached/packed.cuh"
#include "tiles.h"

namespace flash_ext::sm90 {

template <typename E>
struct LatentTraits {
  using Element = E;
  using Tile = PackedTile;
  using Args = PackedFwdArgs;
  static constexpr bool kPacked = true, kQuantized = false, kModified = false, kCutsQueries = true;
  static constexpr bool kParts = true, kHasValues = false;  // keys are values as well, so a tile comes once
  static constexpr int kHeadDim = LatentTile::kHeadDim, kHeadDimV = LatentTile::kHeadDimV;
  static constexpr int kBlockM = LatentTile::kRows, kBlockN = LatentTile::kKeys, kThreads = LatentTile::kThreads;
  static constexpr int kConsumers = 2, kConsumerThreads = 128 * kConsumers, kConsumerRegs = 232, kProducerRegs = 40;
  static constexpr int kKvStages = LatentTile::kKvStages, kQStages = 1, kWorkStages = 4;
  static constexpr int kChunkColumns = 64, kChunks = chunks_of(kHeadDim), kChunksV = 0, kChunkBytes = 64 * 128;
  static constexpr int kQBytes = LatentTile::kTileBytes, kStageBytes = LatentTile::kTileBytes;
  static constexpr int kQAt = kKvStages * kStageBytes, kWeightsAt = kQAt + kQBytes;
  static constexpr int kMaximaAt = kWeightsAt + LatentTile::kWeightBytes;
  static constexpr int kSumsAt = kMaximaAt + LatentTile::kMaximaBytes, kWorkAt = kSumsAt + LatentTile::kSumBytes;
  static constexpr int kPlaceAt = kWorkAt + kWorkStages * static_cast<int>(sizeof(Tile));
  static constexpr int kBarriersAt = (kPlaceAt + static_cast<int>(sizeof(Work)) + 7) / 8 * 8;
  static constexpr int kSmemBytes = LatentTile::kSmemBytes;
  static_assert(kBarriersAt + 8 * (3 * kKvStages + 2 * kQStages + kWorkStages + 1) <= kSmemBytes);
};

// What the warpgroup whose turn it is hands to the other one: weights thread by thread, maxima row by row.
struct Handover {
  uint32_t weights, maxima;

  template <typename T>
  __device__ static __forceinline__ Handover of(uint32_t smem, int row) {
    return {smem + T::kWeightsAt + ptx::fresh_thread_idx() % 128 * 16, smem + T::kMaximaAt + row * 4};
  }
  __device__ __forceinline__ void give(const uint32_t (&p)[16], const RowState& state, int lane) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      ptx::store_shared(weights + i * 2048, make_float4(__uint_as_float(p[4 * i]), __uint_as_float(p[4 * i + 1]),
                                                        __uint_as_float(p[4 * i + 2]), __uint_as_float(p[4 * i + 3])));
    }
    if (lane % 4 != 0) return;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      ptx::store_shared_word(maxima + half * 32, __float_as_uint(state.minus_max[half]));
    }
  }
  // factor: what output and sums so far are worth.
  __device__ __forceinline__ void take(uint32_t (&p)[16], RowState& state, float (&factor)[2]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      uint32_t words[4];
      ptx::load_shared_words(words, weights + i * 2048);
#pragma unroll
      for (int j = 0; j < 4; ++j) p[4 * i + j] = words[j];
    }
    NewMaxima taken{1.f};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      taken.take(state, half, __uint_as_float(ptx::load_shared_word(maxima + half * 32)), factor[half]);
    }
  }
};

// The sums of two rows over the tiles of both warpgroups, which meet.
template <typename T>
__device__ __forceinline__ void join_sums(uint32_t smem, int turn, int group, int row, int lane, RowState& state) {
  const uint32_t at = smem + T::kSumsAt + turn * (2 * 4 * T::kBlockM) + row * 4;
  float sum[2];
  sum_over_quad(sum, state.sum);
  if (lane % 4 == 0) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      ptx::store_shared_word(at + group * 4 * T::kBlockM + half * 32, __float_as_uint(sum[half]));
    }
  }
  debug_delay();
  ptx::bar_sync(ptx::kExchangeBarrier + T::kKvStages, T::kConsumerThreads);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float first = __uint_as_float(ptx::load_shared_word(at + half * 32));
    const float second = __uint_as_float(ptx::load_shared_word(at + 4 * T::kBlockM + half * 32));
    state.sum[half] = lane % 4 == 0 ? first + second : 0.f;  // shares of a quad
  }
}

template <typename T>
__device__ __forceinline__ void consume_latents(const PackedFwdArgs& a, uint32_t smem, const PackedTile* work_tiles,
                                                Barriers<T> bars, int group) {
  using E = typename T::Element;
  constexpr int kOwn = T::kHeadDimV / 2;  // columns of the output
  const int lane = threadIdx.x % 32, warp = (threadIdx.x / 32) % 4, row = warp * 16 + lane / 4;
  const float scale = a.p.problem.abs_scale_log2;
  const uint32_t q_low = uniform(descriptor_low(smem + T::kQAt, 16)), k_base = descriptor_low(smem, 16);
  const uint32_t v_base = descriptor_low(smem + group * (kOwn / 64) * T::kChunkBytes, T::kChunkBytes);
  const Handover other = Handover::of<T>(smem, row);

  float o[kOwn / 2], s[32];
  uint32_t p[16];
  PipelineState<T::kKvStages> ring;
  uint32_t q_phase = 0;
  int count = 0;  // work tiles begun
  const auto arrive = [&](uint32_t bar) { ptx::mbarrier_arrive_for_warp(bar, lane == 0); };
#pragma unroll 1
  while (true) {
    wait(bars.q_full(0), q_phase);
    const PackedTile& work = work_tiles[count % T::kWorkStages];
    if (work.w.block < 0) break;
    q_phase ^= 1;
    ++count;
    const AttnMod mod{a.p.problem, work.w.q.length, work.w.k.length};
    const QueryRange queries = queries_of_tile<T>(a, work.w);
    RowState state;
    clear(o);
    bool multiplying = false;  // the tile before
#pragma unroll 1
    for (int tile = work.blocks.end - 1; tile >= work.blocks.begin; --tile) {
      wait(bars.kv_full(ring.stage), ring.phase);
      const uint32_t at = ring.stage * (T::kStageBytes / 16);
      const auto end_tile_before = [&] {
        if (multiplying) arrive(bars.kv_empty(ring.stage ^ 1));
      };
      float factor[2];
      ptx::wgmma_wait<0>();
      end_tile_before();
      if (static_cast<int>(ring.stage) == group) {
        const uint32_t k_low = uniform(k_base + at);
        ptx::warpgroup_fence_operand(s);
        ptx::wgmma_fence();
        issue_qk<E, T::kHeadDim, T::kBlockM, T::kBlockN>(s, q_low, k_low);
        ptx::wgmma_commit();
        ptx::wgmma_wait<0>();
        ptx::warpgroup_fence_operand(s);
        const int first_key = tile * T::kBlockN;
        if (mod.kind_of(queries.first, queries.last, first_key, first_key + T::kBlockN) == TileKind::kPartial) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const VisibleKeys keys = mod.visible(PackedRow::of<T>(a, work.w, row + 8 * half).query);
#pragma unroll
            for (int j = 0; j < T::kBlockN / 8; ++j) {
#pragma unroll
              for (int c = 0; c < 2; ++c) {
                float& x = s[4 * j + 2 * half + c];
                x = mod.score(x, keys, first_key + 8 * j + lane % 4 * 2 + c);
              }
            }
          }
        }
        weights_by_maximum<E>(s, p, state, factor, scale);
        other.give(p, state, lane);
        debug_delay();
        ptx::bar_arrive(ptx::kExchangeBarrier + ring.stage, T::kConsumerThreads);
      } else {
        debug_delay();
        ptx::bar_sync(ptx::kExchangeBarrier + ring.stage, T::kConsumerThreads);
        other.take(p, state, factor);
      }
      ptx::warpgroup_fence_operand(o);
      if (__any_sync(ptx::kFullWarp, factor[0] != 1.f || factor[1] != 1.f)) {
#pragma unroll
        for (int i = 0; i < kOwn / 2; ++i) o[i] *= factor[i / 2 % 2];
      }
      ptx::warpgroup_fence_operand(o);
      ptx::warpgroup_fence_operand(p);
      ptx::wgmma_fence();
      issue_pv<E>(o, p, uniform(v_base + at));
      ptx::wgmma_commit();
      multiplying = true;
      ring.advance();
    }
    arrive(bars.q_empty(0));
    ptx::wgmma_wait<0>();
    ptx::warpgroup_fence_operand(o);
    arrive(bars.kv_empty(ring.stage ^ 1));
    join_sums<T>(smem, count % 2, group, row, lane, state);
    store_packed<T>(a, work, o, state, row, lane, 1.f, group * kOwn);
  }
}

template <typename T>
__global__ void __launch_bounds__(T::kThreads, 1)
    fwd_latent_sm90_kernel(const __grid_constant__ PackedFwdArgs a, const __grid_constant__ FwdMaps maps) {
  run_cta<T, PackedTile, CachedBarriers<T>>(
      [&](const auto& cta, int warp) {
        if (warp == 0) {
          Work& place = *reinterpret_cast<Work*>(cta.bytes + T::kPlaceAt);
          schedule_packed_work<T>(a, maps, cta.smem, cta.shared, cta.bars, place);
        } else if (warp == 1) {
          load_cached_tiles<T, false>(a, maps.k, cta.shared, cta.bars, CopiedRing<T>{cta.smem, cta.bars});
        } else if (warp == 2 && a.by_rows) {
          pass_on_tiles<T>(cta.shared, cta.bars);
        }
      },
      [&](const auto& cta, int group) { consume_latents<T>(a, cta.smem, cta.shared, cta.bars, group - 1); });
}

}  // namespace flash_ext::sm90
