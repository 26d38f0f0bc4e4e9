// What the roles of the sm90 forward share: traits, shared memory, barriers, work tiles.
#pragma once

#include "../../common/attn_mod.cuh"
#include "../../common/debug_delay.cuh"
#include "../../common/seqlen.cuh"
#include "../../kv_splits.h"
#include "../core/matmul.cuh"
#include "../core/scheduler.cuh"

namespace flash_ext::sm90 {

// Tensor maps; host side: core/tensor_maps.cuh. Boxes have 64 columns and the rows of a tile, of `out` 16.
struct FwdMaps {
  CUtensorMap q, k, v, out;
};

// 1, or 0 where a dimension is expanded (stride 0): its map then has one entry, because TMA knows no stride 0.
struct Steps {
  int head, batch;
};

struct FwdArgs {
  FwdParams p;
  Grid grid;
  TileScheduler scheduler;
  Steps q_steps, k_steps, v_steps;
  int unit_heads = 1;  // of query heads that are given out as one work tile (Launch::unit_heads)
  float* kept = nullptr;  // kept_floats() of each CTA, null where no sequence has long keys
};

// A work tile: queries of one head, as the producer leaves it to the consumers.
struct WorkTile {
  Work w;             // block < 0: there is none any more
  BlockRange blocks;  // tiles of keys, at least one
};

// One part of the keys of a work tile, where CTAs share them out (parts.cuh).
struct PartTile : WorkTile {
  int part;
};
struct FwdPartsArgs : FwdArgs {
  SplitGrid parts;
  void* partials;
};

template <typename T>
struct PlainNumbers;  // numbers.cuh

template <typename E, int D, int Dv, int kMostRows = 192, bool kInParts = false>
struct FwdTraits {
  using Element = E;
  using Numbers = PlainNumbers<FwdTraits>;  // how the consumers compute
  using Tile = std::conditional_t<kInParts, PartTile, WorkTile>;
  using Args = std::conditional_t<kInParts, FwdPartsArgs, FwdArgs>;
  static constexpr bool kParts = kInParts, kPacked = false, kModified = false;  // the latter two: fwd_cached/packed.cuh
  static constexpr bool kUnits = !kInParts && D <= 128;  // work tiles may be units of heads
  static constexpr int kHeadDim = D, kHeadDimV = Dv;
  static constexpr FwdTile kTile = fwd_tile(D, Dv, kMostRows);
  static constexpr int kBlockN = kTile.block_n, kConsumers = kTile.consumers, kBlockM = kTile.block_m();
  static constexpr int kNarrow = kBlockN == 128 ? 80 : kBlockN;  // keys of a narrow last tile
  static constexpr int kKvStages = kTile.kv_stages, kQStages = kTile.q_stages, kThreads = kTile.threads();
  static constexpr int kChunkColumns = 64, kChunks = chunks_of(D), kChunksV = chunks_of(Dv);
  static constexpr int kStagingChunks = kTile.staging_chunks(Dv);
  static constexpr int kKeys = kBlockN;  // of a tile, a warpgroup's
  static constexpr bool kHasValues = true;  // beside keys
  static constexpr bool kNamesSequences = false;  // whether a packed work tile has the number of its sequence as its b
  // The producers want 40 for packed sequences, where consumers leave it.
  static constexpr int kConsumerRegs = kConsumers == 1 ? 128 : kConsumers == 2 ? 232 : D == 96 ? 152 : 160;
  static constexpr int kProducerRegs = ptx::kRegisterBudget<kConsumers + 1, kTile.ctas> - kConsumers * kConsumerRegs;
  static constexpr int kKBytes = tile_bytes(kBlockN, D), kVBytes = tile_bytes(kBlockN, Dv);
  static constexpr int kStageBytes = kKBytes > kVBytes ? kKBytes : kVBytes, kQBytes = tile_bytes(kBlockM, D);
  static constexpr int kQAt = kKvStages * kStageBytes, kStagingAt = kQAt + kQStages * kQBytes;
  static constexpr int kWorkAt = kStagingAt + kTile.staging_bytes(Dv);
  static constexpr int kSmemBytes = kTile.smem_bytes(D, Dv);
  // The producer writes work tile i + 2 at the earliest when every consumer has asked Q of work tile i + 1 for its last
  // scores; the slowest may then still store the output of work tile i.
  static constexpr int kWorkStages = 4;
  static constexpr int kBarriersAt = kWorkAt + kWorkStages * static_cast<int>(sizeof(Tile));
  static_assert(kBarriersAt + 8 * (2 * kKvStages + 2 * kQStages + kWorkStages + 1) <= kSmemBytes);
  static_assert(kStageBytes % 1024 == 0 && kQBytes % 1024 == 0, "swizzled tiles start on 1024 bytes");
};

// Sets up the barriers of a ring: the full ones, behind them the empty ones.
__device__ __forceinline__ void init_pairs(uint32_t first, int count, int full_arrivals, int empty_arrivals) {
  for (int i = 0; i < count; ++i) {
    ptx::mbarrier_init(first + 8 * i, full_arrivals);
    ptx::mbarrier_init(first + 8 * (count + i), empty_arrivals);
  }
}

// Shared-memory addresses of a CTA's barriers. "full" ones complete by the bytes of a copy or by who fills a stage,
// "empty" ones when every consumer warp has arrived.
template <typename T>
struct Barriers {
  uint32_t base;
  __device__ uint32_t kv_full(int stage) const { return base + 8 * stage; }
  __device__ uint32_t kv_empty(int stage) const { return base + 8 * (T::kKvStages + stage); }
  __device__ uint32_t q_full(int stage) const { return base + 8 * (2 * T::kKvStages + stage); }
  __device__ uint32_t q_empty(int stage) const { return base + 8 * (2 * T::kKvStages + T::kQStages + stage); }
  __device__ uint32_t work_full(int stage) const { return base + 8 * (2 * T::kKvStages + 2 * T::kQStages + stage); }
  __device__ uint32_t work_ending() const { return work_full(T::kWorkStages); }

  // kv_arrivals: of whoever fills a stage.
  __device__ void init(int kv_arrivals = 1) const {
    init_pairs(kv_full(0), T::kKvStages, kv_arrivals, 4 * T::kConsumers);
    init_pairs(q_full(0), T::kQStages, 1, 4 * T::kConsumers);
    for (int i = 0; i < T::kWorkStages; ++i) ptx::mbarrier_init(work_full(i), 1);
    ptx::mbarrier_init(work_ending(), 1);
    ptx::fence_mbarrier_init();
  }
};

// All lanes poll: a hand-over then takes 107 clocks, and 500 when one lane polls for its warp.
__device__ __forceinline__ void wait(uint32_t barrier, uint32_t phase) {
  debug_delay();
#if FLASH_EXT_DEBUG
  for (int tries = 0; !ptx::mbarrier_try_wait(barrier, phase); ++tries) {
    if (tries > 50'000'000) __trap();  // an error instead of a hang
  }
#else
  while (!ptx::mbarrier_try_wait(barrier, phase)) {
  }
#endif
}

// Position in a ring of stages, with the phase of the barrier to wait for.
template <int kStages>
struct PipelineState {
  int stage = 0;
  uint32_t phase = 0;
  __device__ __forceinline__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      phase ^= 1;
    }
  }
};

// The next work tile of a CTA, as its scheduler leaves it.
template <typename T, typename Tile>
__device__ __forceinline__ const Tile& wait_for_work(const Tile* work_tiles, const Barriers<T>& bars,
                                                     const PipelineState<T::kWorkStages>& ring) {
  wait(bars.work_full(ring.stage), ring.phase);
  return work_tiles[ring.stage];
}

// Where TMA finds row `row` of a sequence. Maps of dense tensors have dimensions (columns, rows, heads, batch, 1).
// Those of packed ones have (columns, 2^30, heads, 2^31 - 1, 2^31 - 1), with strides such that coordinates (2^30 -
// length + row, 2^30, first + length) meet the row modulo 2^64, and rows from `length` on lie outside: zeros, and not
// stored.
struct RowCoordinates {
  int row, outer, outermost;
};
__device__ __forceinline__ RowCoordinates row_coordinates(const Problem& p, const Span& span, int b, int row) {
  if (p.cu_seqlens_q == nullptr) return {row, b, 0};
  return {(1 << 30) - span.length + row, 1 << 30, static_cast<int>(span.start) + span.length};
}

}  // namespace flash_ext::sm90
