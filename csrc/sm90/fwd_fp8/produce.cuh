// The producers of the fp8 forward: a scheduler that knows lengths and sinks, and tiles of K, and of V transposed.
#pragma once

#include "../fwd/produce.cuh"
#include "config.cuh"

namespace flash_ext::sm90 {

// Where TMA finds key `key` of a transposed V. Maps of dense ones have dimensions (keys, channels, heads, batch, 1).
// Those of packed ones have (2^30, channels, heads, 2^31 - 1, 2^31 - 1), with strides such that coordinates (2^30 - end
// + key, 2^26, (first + end) / 16) meet the key modulo 2^64, and keys from `end` on lie outside, where zeros come from;
// `end` is the length rounded up to groups of keys.
struct KeyCoordinates {
  int key, outer, outermost;
};
__device__ __forceinline__ KeyCoordinates key_coordinates(const Problem& p, const Work& w, int key) {
  if (p.cu_seqlens_q == nullptr) return {key, w.b, 0};
  const int groups = (w.k.length + kKeyGroup - 1) / kKeyGroup;
  const int first_group = static_cast<int>(w.k.start / kKeyGroup) + w.b;
  return {(1 << 30) - groups * kKeyGroup + key, 1 << 26, first_group + groups};
}

// First warp. Where sinks or largest scores are asked for, rows without keys have results of their own.
template <typename T>
__device__ __forceinline__ void schedule_fp8_work(const Fp8Args& a, const FwdMaps& maps, uint32_t smem,
                                                  WorkTile* work_tiles, Barriers<T> bars) {
  const Problem& p = a.p.problem;
  schedule_work<T>(a, maps, smem, work_tiles, bars, [&](Work& w, int sequence) {
    const bool outside = sequence < 0 || sequence == p.batch;  // in no sequence: no keys
    if (a.x.seqused_k != nullptr && !outside) {
      w.k.length = min(max(__ldg(a.x.seqused_k + sequence), 0), w.k.length);
    }
    if (a.x.sinks == nullptr && a.x.row_max == nullptr) return true;
    const BlockRange blocks = AttnMod{p, w.q.length, w.k.length}.template kv_blocks<T::kBlockM, T::kBlockN>(w.block);
    if (blocks.begin < blocks.end) return true;
    const float lse = a.x.sinks != nullptr && !outside ? __ldg(a.x.sinks + w.h) : -INFINITY;
    store_empty<T>(a.p, w, lse, a.x.row_max, threadIdx.x % 32);
    return false;
  });
}

// Second warp.
template <typename T>
__device__ __forceinline__ void load_fp8_tiles(const Fp8Args& a, const FwdMaps& maps, uint32_t smem,
                                               const WorkTile* work_tiles, Barriers<T> bars) {
  const Problem& p = a.p.problem;
  const int lane = threadIdx.x % 32;
  PipelineState<T::kKvStages> ring;
  PipelineState<T::kWorkStages> work_ring;
  ring.phase = 1;
  const auto load_k = [&](RowCoordinates at, int h) {
    wait(bars.kv_empty(ring.stage), ring.phase);
    const uint32_t to = smem + ring.stage * T::kStageBytes;
    if (lane == 0) {
      copy_tile<T::kChunks, T::kBlockN, T::kChunkColumns>(maps.k, a.k_steps, to, bars.kv_full(ring.stage), at, h);
    }
    ring.advance();
  };
  const auto load_v = [&](KeyCoordinates at, int h) {
    wait(bars.kv_empty(ring.stage), ring.phase);
    if (lane == 0) {
      const uint32_t full = bars.kv_full(ring.stage);
      ptx::mbarrier_arrive_expect_tx(full, T::kVBytes);
      ptx::tma_load_5d(smem + ring.stage * T::kStageBytes, &maps.v, full, at.key, 0, h * a.v_steps.head,
                       at.outer * a.v_steps.batch, at.outermost);
    }
    ring.advance();
  };
  int v_h = -1;  // head of the V tile that is still to load
  KeyCoordinates v_at{};
#pragma unroll 1
  while (true) {
    const WorkTile& work = wait_for_work<T>(work_tiles, bars, work_ring);
    if (work.w.block < 0) break;
    work_ring.advance();
    const int h = static_cast<int>(divide(work.w.h, a.grid.shared));
    const int tiles = work.blocks.end - work.blocks.begin, end = work.blocks.end * T::kBlockN;
    RowCoordinates k_at = row_coordinates(p, work.w.k, work.w.b, end);
    KeyCoordinates next_v = key_coordinates(p, work.w, end);
#pragma unroll 1
    for (int left = tiles; left > 0; --left) {
      const bool dynamic = a.scheduler.counter != nullptr;
      if (dynamic && left == min(kFetchAhead, tiles) && lane == 0) ptx::mbarrier_arrive(bars.work_ending());
      k_at.row -= T::kBlockN;
      next_v.key -= T::kBlockN;
      load_k(k_at, h);
      if (v_h >= 0) load_v(v_at, v_h);
      v_at = next_v;
      v_h = h;
    }
  }
  if (v_h >= 0) load_v(v_at, v_h);
}

}  // namespace flash_ext::sm90
