// The producers of the sm90 forward over a cache (kv_cache.h): three warps. The scheduler is that of fwd/produce.cuh
// but for what the device alone knows: how long a sequence is, and whether this launch serves it. K and V have a warp
// each, because a tile of small pages is many copies.
#pragma once

#include "../fwd/produce.cuh"
#include "copies.cuh"

namespace flash_ext::sm90 {

struct CachedFwdArgs : FwdArgs {
  KvCache cache;
  RowRange served;
  // Of K and V, rows come in pieces of one copy, which divide a tile and do not cross pages; bytes from row to row.
  int piece_rows = 0;
  int64_t k_row_bytes = 0, v_row_bytes = 0;
  bool by_rows = false;  // lanes copy them instead
  const float* sinks = nullptr;  // (h)
};

// First warp. Where sinks are asked for, rows without keys have an lse of their own.
template <typename T>
__device__ __forceinline__ void schedule_cached_work(const CachedFwdArgs& a, const FwdMaps& maps, uint32_t smem,
                                                     WorkTile* work_tiles, Barriers<T> bars) {
  const Problem& p = a.p.problem;
  schedule_work<T, true>(a, maps, smem, work_tiles, bars, [&](Work& w, int sequence) {
    const bool outside = sequence < 0 || sequence == p.batch;  // in no sequence: no keys
    if (!outside && w.q.length * static_cast<int>(a.grid.shared.divisor) <= a.served.above) return false;
    w.k = {0, CachedKeys::of(p, a.cache, sequence).length};
    if (a.sinks == nullptr || outside) return true;
    const BlockRange blocks = AttnMod{p, w.q.length, w.k.length}.template kv_blocks<T::kBlockM, T::kBlockN>(w.block);
    if (blocks.begin < blocks.end) return true;
    store_empty<T>(a.p, w, a.sinks[w.h], nullptr, threadIdx.x % 32);
    return false;
  });
}

// Where copies go: to the tiles that consumers read. A cache of 8 bits has other tiles (quantized.cuh).
template <typename T>
struct CopiedRing {
  static constexpr int kStages = T::kKvStages, kColumns = T::kChunkColumns, kRowBytes = 128;  // of a chunk
  static constexpr int kElementBytes = 2;
  uint32_t smem;
  CachedBarriers<T> bars;
  __device__ uint32_t tile(int stage) const { return smem + stage * T::kStageBytes; }
  __device__ uint32_t full(int stage) const { return bars.kv_full(stage); }
  __device__ uint32_t landed(int stage) const { return bars.landed(stage); }
  __device__ uint32_t empty(int stage) const { return bars.kv_empty(stage); }
  template <bool kIsV>
  static constexpr int kChunks = kIsV ? T::kChunksV : T::kChunks;
};

// Stages are used in the order of fwd/produce.cuh, K0, K1, V0, K2, V1, ..., so each warp passes
// over those of the other. A lane finds its place, with its entry of the table, before the stage is free.
template <typename T, bool kIsV, typename Copies>
__device__ __forceinline__ void load_tiles_by(Copies copies, const CachedFwdArgs& a, const typename T::Tile* work_tiles,
                                              Barriers<T> bars) {
  PipelineState<Copies::kStages> ring;
  PipelineState<T::kWorkStages> work_ring;
  ring.phase = 1;
  if (kIsV) ring.advance();  // K of the first tile
  int begun = 0;  // tiles
#pragma unroll 1
  while (true) {
    const WorkTile& work = wait_for_work<T>(work_tiles, bars, work_ring);
    if (work.w.block < 0) break;
    work_ring.advance();
    const CachedKeys keys = CachedKeys::of(a.p.problem, a.cache, work.w.b);
    const int h_k = T::kPacked ? work.w.h : static_cast<int>(divide(work.w.h, a.grid.shared));
    const int begin = work.blocks.begin, tiles = work.blocks.end - begin;
#pragma unroll 1
    for (int left = tiles; left > 0; --left, ++begun) {
      if constexpr (kIsV) {
        // V comes behind K of the next tile. Whether there is one is known when the next work tile is.
        bool is_last = left == 1;
        if (is_last) {
          wait(bars.work_full(work_ring.stage), work_ring.phase);
          is_last = work_tiles[work_ring.stage].w.block < 0;
        }
        if (!is_last) ring.advance();
      } else {
        // Fetch late: a tile claimed early cannot go to a CTA that is free before.
        const bool dynamic = a.scheduler.counter != nullptr;  // else nobody waits for that
        if (dynamic && left == min(kFetchAhead, tiles) && threadIdx.x % 32 == 0) {
          ptx::mbarrier_arrive(bars.work_ending());
        }
        if (T::kHasValues && begun > 1) ring.advance();  // V of the last tile but one
      }
      const int first = (begin + left - 1) * T::kBlockN;
      copies.find(keys, a.cache, h_k, first, left == tiles);
      wait(copies.ring.empty(ring.stage), ring.phase);
      copies.start(keys, a.cache, h_k, first, ring.stage);
      ring.advance();
    }
  }
  if constexpr (kIsV == T::kHasValues && T::kParts) ptx::allow_next_kernel();  // which adds the parts up
}

// Second warp: K, or latents; third: V.
template <typename T, bool kIsV, typename Ring>
__device__ __forceinline__ void load_cached_tiles(const CachedFwdArgs& a, const CUtensorMap& map,
                                                  const typename T::Tile* work_tiles, Barriers<T> bars,
                                                  const Ring& ring) {
  constexpr int kRows = T::kBlockN, kChunks = Ring::template kChunks<kIsV>;
  const StridedView& view = kIsV ? a.p.v : a.p.k;
  if (a.by_rows) {
    const int columns = kIsV ? a.p.problem.head_dim_v : a.p.problem.head_dim;
    const RowCopies<Ring, kRows, kChunks> copies{ring, view, columns * Ring::kElementBytes};
    load_tiles_by<T, kIsV>(copies, a, work_tiles, bars);
  } else {
    const PieceCopies<Ring, kRows, kChunks> copies{ring, map, view, kIsV ? a.v_row_bytes : a.k_row_bytes, a.piece_rows};
    load_tiles_by<T, kIsV>(copies, a, work_tiles, bars);
  }
}

}  // namespace flash_ext::sm90
