// The producers of the sm90 forward: two warps, because one would spill in its 24 registers a thread.
#pragma once

#include "../../common/float_results.cuh"
#include "parts.cuh"

namespace flash_ext::sm90 {

// Rows that no key is visited for: output 0, and their lse and maxima where those are wanted. Consumers meet work tiles
// with tiles only.
template <typename T>
__device__ __forceinline__ void store_empty(const FwdParams& p, const Work& w, float lse, float* row_max, int lane) {
  const int first_row = w.block * T::kBlockM, rows = min(T::kBlockM, w.q.length - first_row);
  const int64_t stat = row_stat_offset(p.problem, w, w.h) + first_row;
#pragma unroll 1
  for (int row = lane; row < rows; row += 32) {
    if (p.lse != nullptr) p.lse[stat + row] = lse;
    if (row_max != nullptr) row_max[stat + row] = -INFINITY;
  }
  // In a loop of its own: there are no registers for one loop over both.
  zero_rows(p.out, w.b, w.q.start + first_row, w.h, rows, p.problem.head_dim_v, lane);
}

template <int kChunks, int kRows, int kColumns = 64>
__device__ __forceinline__ void copy_tile(const CUtensorMap& map, const Steps& steps, uint32_t to, uint32_t bar,
                                          RowCoordinates at, int h, int column = 0) {
  h *= steps.head;
  at.outer *= steps.batch;
  ptx::mbarrier_arrive_expect_tx(bar, kChunks * kRows * 128);
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
    ptx::tma_load_5d(to + i * kRows * 128, &map, bar, column + kColumns * i, at.row, h, at.outer, at.outermost);
  }
}

// Q of a work tile, by one lane.
template <typename T>
__device__ __forceinline__ void copy_q(const FwdArgs& a, const FwdMaps& maps, uint32_t smem, uint32_t bar, int stage,
                                       const Work& w) {
  copy_tile<T::kChunks, T::kBlockM, T::kChunkColumns>(maps.q, a.q_steps, smem + T::kQAt + stage * T::kQBytes, bar,
                                                      row_coordinates(a.p.problem, w.q, w.b, w.block * T::kBlockM),
                                                      w.h);
}

inline constexpr int kFetchAhead = 3;  // tiles of a work tile still to load when the next one is fetched

struct EveryTile {
  __device__ __forceinline__ bool operator()(Work&, int) const { return true; }
};

// First warp: decides what is next, loads its Q. look(work, sequence): whether this launch serves a work tile, whose
// keys it may set; `sequence` counts where work is named by it (kNamed).
template <typename T, bool kNamed = T::kNamesSequences, typename Args, typename Tile, typename Look = EveryTile>
__device__ __forceinline__ void schedule_work(const Args& a, const FwdMaps& maps, uint32_t smem, Tile* work_tiles,
                                              Barriers<T> bars, const Look& look = {}) {
  constexpr bool kParts = std::is_same_v<Tile, PartTile>, kUnits = T::kUnits && std::is_same_v<Args, FwdArgs>;
  const Problem& p = a.p.problem;
  const int lane = threadIdx.x % 32;
  const bool dynamic = a.scheduler.counter != nullptr;
  PipelineState<T::kQStages> q_ring;
  PipelineState<T::kWorkStages> work_ring;
  q_ring.phase = 1;  // the first wait for an empty stage passes
  // By the first lane.
  const auto publish = [&](const Tile& tile) {
    work_tiles[work_ring.stage] = tile;
    ptx::mbarrier_arrive(bars.work_full(work_ring.stage));
    copy_q<T>(a, maps, smem, bars.q_full(q_ring.stage), q_ring.stage, tile.w);
  };
  const auto advance = [&] {
    q_ring.advance();
    static_assert(T::kWorkStages % 2 == 0);  // stages then tell the phase of work_ending
    if (dynamic) wait(bars.work_ending(), work_ring.stage % 2);
    __syncwarp();  // a lane that is late would miss a phase, where the first one goes on to the next tile
    work_ring.advance();
  };
  uint32_t index = blockIdx.x;
  int stretch_end = 0;  // of the tiles of the same work tile that are left; 0: none
  int head = 0;  // of a unit, each of whose heads has stretches
#pragma unroll 1
  while (index < a.scheduler.num_work_tiles) {
    int sequence = 0;
    uint32_t tile_index = index;
    if constexpr (kParts) tile_index = divide(index, a.parts.parts);
    Work w = decode_index<T::kBlockM, true, true, true, true>(tile_index, p, a.grid, kNamed ? &sequence : nullptr);
    if constexpr (kNamed) w.b = sequence;
    if constexpr (kUnits) w.h = w.h * a.unit_heads + head;
    if (w.active && look(w, sequence)) {
      BlockRange blocks = AttnMod{p, w.q.length, w.k.length}.template kv_blocks<T::kBlockM, T::kBlockN>(w.block);
      int part = 0;
      if constexpr (kParts) {
        part = static_cast<int>(index - tile_index * a.parts.parts.divisor);
        blocks = part_of_blocks(blocks, part, a.parts.splits);
      }
      if (blocks.begin < blocks.end) {
        if (w.k.length > kStretches.above) {
          // Stretches of one tile of queries are work tiles of their own, from the last one on.
          constexpr int kStretch = kStretches.keys / T::kBlockN;
          if (stretch_end > 0) blocks.end = stretch_end;
          const int begin = (blocks.end - 1) / kStretch * kStretch;
          stretch_end = begin > blocks.begin ? begin : 0;
          blocks.begin = max(blocks.begin, begin);
        }
        wait(bars.q_empty(q_ring.stage), q_ring.phase);
        if (lane == 0) {
          if constexpr (kParts) {
            publish({{w, blocks}, part});
          } else {
            publish({w, blocks});
          }
        }
        advance();
        if (stretch_end > 0) continue;
        if constexpr (kUnits) {
          const bool has_stretches = w.k.length > kStretches.above;
          if (has_stretches && ++head < a.unit_heads) continue;
          head = 0;
#pragma unroll 1
          for (int left = has_stretches ? 1 : a.unit_heads; --left > 0;) {
            wait(bars.q_empty(q_ring.stage), q_ring.phase);
            if (lane == 0) {
              Tile tile = work_tiles[(work_ring.stage + T::kWorkStages - 1) % T::kWorkStages];
              ++tile.w.h;
              publish(tile);
            }
            advance();
          }
        }
      } else if constexpr (kParts) {
        store_empty_part<T>(a, w, part, lane);
      } else {
        for (int left = kUnits ? a.unit_heads : 1; left > 0; --left, ++w.h)
          store_empty<T>(a.p, w, -INFINITY, nullptr, lane);
      }
    }
    uint32_t next = index + gridDim.x;
    if (dynamic && lane == 0) next = claim_and_fetch(a.scheduler, index);
    index = dynamic ? __shfl_sync(ptx::kFullWarp, next, 0) : next;
  }
  wait(bars.q_empty(q_ring.stage), q_ring.phase);
  if (lane == 0) {
    work_tiles[work_ring.stage].w.block = -1;
    ptx::mbarrier_arrive(bars.work_full(work_ring.stage));
    ptx::mbarrier_arrive(bars.q_full(q_ring.stage));
  }
}

// Second warp: streams K and V through the ring in the order of use, K0, K1, V0, K2, V1, ... without a seam between
// work tiles. As fwd_mod/produce.cuh has it, in a struct, it makes ptxas order the code of the consumers otherwise,
// which is slower at head sizes (192, 128).
template <typename T, typename Tile>
__device__ __forceinline__ void load_tiles(const FwdArgs& a, const FwdMaps& maps, uint32_t smem, const Tile* work_tiles,
                                           Barriers<T> bars) {
  const Problem& p = a.p.problem;
  const int lane = threadIdx.x % 32;
  PipelineState<T::kKvStages> ring;
  PipelineState<T::kWorkStages> work_ring;
  ring.phase = 1;
  const auto load_k = [&](RowCoordinates at, int h) {
    wait(bars.kv_empty(ring.stage), ring.phase);
    const uint32_t to = smem + ring.stage * T::kStageBytes;
    if (lane == 0) copy_tile<T::kChunks, T::kBlockN>(maps.k, a.k_steps, to, bars.kv_full(ring.stage), at, h);
    ring.advance();
  };
  const auto load_v = [&](RowCoordinates at, int h) {
    wait(bars.kv_empty(ring.stage), ring.phase);
    const uint32_t to = smem + ring.stage * T::kStageBytes;
    if (lane == 0) copy_tile<T::kChunksV, T::kBlockN>(maps.v, a.v_steps, to, bars.kv_full(ring.stage), at, h);
    ring.advance();
  };
  int v_h = -1;  // head of the V tile that is still to load
  RowCoordinates v_at{};
#pragma unroll 1
  while (true) {
    const WorkTile& work = wait_for_work<T>(work_tiles, bars, work_ring);
    if (work.w.block < 0) break;
    work_ring.advance();
    const int h = static_cast<int>(divide(work.w.h, a.grid.shared));
    const int tiles = work.blocks.end - work.blocks.begin;
    RowCoordinates at = row_coordinates(p, work.w.k, work.w.b, work.blocks.end * T::kBlockN);
#pragma unroll 1
    for (int left = tiles; left > 0; --left) {
      // Fetch late: a tile claimed early cannot go to a CTA that is free before.
      const bool dynamic = a.scheduler.counter != nullptr;  // else nobody waits for that
      if (dynamic && left == min(kFetchAhead, tiles) && lane == 0) ptx::mbarrier_arrive(bars.work_ending());
      at.row -= T::kBlockN;
      load_k(at, h);
      if (v_h >= 0) load_v(v_at, v_h);
      v_at = at;
      v_h = h;
    }
  }
  if (v_h >= 0) load_v(v_at, v_h);
  // Which adds the parts up. Earlier it would take room from CTAs that load.
  if constexpr (std::is_same_v<Tile, PartTile>) ptx::allow_next_kernel();
}

}  // namespace flash_ext::sm90
