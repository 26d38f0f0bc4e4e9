// What the roles of the sm90 backward share: traits, shared memory, barriers, work tiles.
#pragma once

#include "../fwd/consume.cuh"
#include "../fwd/produce.cuh"
#include "dq_semaphore.cuh"
#include "tiles.h"

namespace flash_ext::sm90 {

// Tensor maps; host side: core/tensor_maps.cuh. Boxes have 64 columns, and 64 rows of q, dout and out, 128 of k and v,
// 16 of dq.
struct BwdMaps {
  CUtensorMap q, k, v, dout, dq, out;
};

// The dQ pool as kernels see it; bwd/dq_pool.cuh. Tiles are those of queries.
struct DqPoolView {
  uint32_t* words = nullptr;  // null: none
  Divisor round_tiles, pool_tiles, tiles_per_head;  // of a round, of the rounds that have a place, of a query head
  Divisor heads;                                    // of queries
  uint32_t all_tiles = 0, all_rounds = 0, rounds = 0;
  uint32_t round_heads = 0;  // key heads of a round, counted with the batch
};

// Stream-K (Osama et al., 2023, https://arxiv.org/abs/2301.03598): work tiles from `first` on, more than one for each
// CTA and fewer than two, are divided evenly by their steps. A CTA has neighbouring steps, at least as many as a work
// tile has, so that of a divided work tile one CTA has the first steps (kGives) and the next CTA the others (kTakes).
// The first one leaves its sums of dK and dV in memory, and the next one begins with them instead of zeros: the bits
// are those of whole work tiles.
struct StreamK {
  uint32_t first = 0;
  uint32_t all = 0, share = 0;  // steps of all; of a CTA, the last ones have what is left
  Divisor steps;  // of a work tile
  float* sums = nullptr;  // of each CTA; null: nothing is divided
  uint32_t* words = nullptr;  // of each divided work tile, zeroed by the pass before: warps whose sums are there
};

struct BwdArgs {
  BwdParams p;
  Grid grid;
  TileScheduler scheduler;
  Steps q, k, v, dout, out;
  int tiles_per_head;  // of queries, in the workspace
  int rotate;  // tiles by which a block of keys starts its walk later than the block before
  uint32_t* dq_semaphore;  // of bwd/dq_semaphore.cuh, or null
  DqPoolView pool;
  StreamK stream_k;
  int unit_heads = 1;  // of key heads that are given out together (Launch::unit_heads)
  bool makes_stats = false;  // whether consumers make the statistics of rows (T::kMayMakeStats); else they are there
  Divisor query_splits =
      Divisor(1);  // of the queries of a head, where T::kUnits: parts of its dk and dv, neighbours in order
};

// A work tile: a block of keys of one key head or (kByQueries) of queries of one head, as the producer leaves it to the
// others.
struct BwdWorkTile {
  Work w;             // block < 0: there is none any more
  BlockRange blocks;  // tiles of queries, the same for all query heads, or of keys
  int first;          // of them, where the walk starts
  int steps;          // tiles of all heads together, may be 0
  int tile;           // first one of the first query head, or of its own, in the workspace
  int dq_tile;        // the same among the accumulators
  int round;          // of its head; where queries are split, which part
  enum : uint32_t { kWhole, kGives, kTakes };
  uint32_t share : 2;   // what its steps are of it (StreamK)
  uint32_t index : 30;  // the scheduler's, whose registers are short
};

// Number in the workspace of the first tile of queries of a sequence. Packed ones have places as the slots of
// common/seqlen.cuh, which no two sequences share.
template <int kBlockM = BwdTile::kBlockM>
__device__ __forceinline__ int64_t first_tile(const Problem& p, const Work& w, int sequence, int h,
                                              int tiles_per_head) {
  if (p.cu_seqlens_q == nullptr) return (static_cast<int64_t>(w.b) * p.num_heads + h) * tiles_per_head;
  return static_cast<int64_t>(h) * tiles_per_head + w.q.start / kBlockM + sequence;
}

// The tiles of queries that see a work tile, of one query head after the other. Additions in order descend: with causal
// masks and windows block n then follows block n - 1 by a step. Of a work tile of queries (kByQueries), the tiles of
// keys that it sees.
template <bool kOrdered, bool kByQueries>
struct TileWalk {
  int block, head, left;
  TileWalk() = default;
  __device__ explicit TileWalk(const BwdWorkTile& work) : block(work.first), head(0), left(work.steps) {}
  __device__ __forceinline__ void advance(const BwdWorkTile& work, int heads) {
    --left;
    if constexpr (kOrdered) {
      if (--block < work.blocks.begin) {
        block = work.blocks.end - 1;
        ++head;
      }
      return;
    }
    ++block;
    if (!kByQueries && block == work.blocks.end) {
      block = work.blocks.begin;
      if (++head == heads) head = 0;
    }
  }
};

// How dQ is added; in another kernel; all at once; as unordered, by CTAs that divide work tiles (StreamK): what that
// takes besides the steps would cost causal calls of head_dim 128 a hundredth.
enum class DqKind { kUnordered, kOrdered, kElsewhere, kStored, kStoredShort, kDivided };

template <typename E, int D, DqKind kDq = DqKind::kUnordered>
struct BwdTraits {
  using Element = E;
  static constexpr bool kOrdered = kDq == DqKind::kOrdered;
  static constexpr bool kDivides = kDq == DqKind::kDivided;
  static constexpr bool kUnits = kDq == DqKind::kStoredShort;  // of heads may be given out together
  // From tiles of dO and of `out`, which has the place of the dS of its step.
  static constexpr bool kMayMakeStats = kDq == DqKind::kStoredShort && D <= kOwnStatsHeadDim;
  static constexpr bool kPool = kDq == DqKind::kUnordered || kDivides;  // may have its accumulators in a pool
  static constexpr bool kMakesDq = kDq != DqKind::kElsewhere,
                        kStores = kDq == DqKind::kStored || kDq == DqKind::kStoredShort;
  // Tiles of a work tile still to load when the next one is fetched: one fetched early is kept from a CTA that is free
  // before, and additions in order want work tiles to begin in the order in which they are fetched.
  static constexpr int kFetchAhead = 2;
  static constexpr int kHeadDim = D;
  static constexpr BwdTile kTile = kDq == DqKind::kStoredShort ? stored_short_tile(D)
                                   : kStores                   ? stored_tile(D)
                                   : kMakesDq                  ? bwd_tile(D)
                                                               : kShortKeysTile;
  static constexpr bool kIndependent = kTile.independent;
  static constexpr int kBlockM = BwdTile::kBlockM, kBlockN = kTile.block_n(), kThreads = kTile.threads();
  static constexpr int kGroups = kTile.groups, kKeyBlocks = kTile.key_blocks, kCtas = kTile.ctas();
  static constexpr bool kByQueries = false;
  static constexpr int kOwnRows = kBlockN, kStatRows = kBlockM;  // of a work tile; of a tile in the workspace
  static constexpr int kStages = kTile.stages, kChunks = chunks_of(D), kConsumerWarps = 4 * kGroups;
  static constexpr int kPartRows = kBlockN < 128 ? kBlockN : 128,
                       kKeyParts = kBlockN / kPartRows;  // boxes in which K and V come
  // K of the next work tile comes to the place of V, which is free a step before that of K.
  static constexpr bool kPlacesSwap = !kIndependent;
  // Steps of 16 columns of K and V, of 6, whose operands stay in registers for a whole work tile: at 96 columns shared
  // memory is the limit, and registers have room for those of K and two of V. Others have no room.
  static constexpr int kRsStepsK = D == 96 ? 6 : 0, kRsStepsV = D == 96 ? 2 : 0;
  static constexpr int kConsumerRegs = kCtas == 2 ? 232 : 240, kProducerRegs = 24;
  static_assert(kProducerRegs + kGroups * kConsumerRegs <= ptx::kRegisterBudget<kGroups + 1, kCtas>);
  static constexpr int kKvBytes = kTile.kv_bytes(D), kQBytes = tile_bytes(kBlockM, D),
                       kDsBytes = kTile.ds_stage_bytes();
  static constexpr int kVAt = kKvBytes, kQAt = 2 * kKvBytes, kDoutAt = kQAt + kStages * kQBytes;
  static constexpr int kDsAt = kDoutAt + kStages * kQBytes, kPiecesAt = kDsAt + kTile.ds_bytes();
  static constexpr int kPieceStages = kTile.piece_stages(), kConverterBytes = kTile.converter_bytes();
  static constexpr int kZerosAt = kPiecesAt + BwdTile::kConverters * kConverterBytes;
  static constexpr int kExchangeAt = kZerosAt + kTile.zero_bytes();  // of dQ, between the warpgroups
  static constexpr int kStatsAt = kExchangeAt + kTile.exchange_bytes();
  static constexpr bool kStaged = kTile.staged;
  // A warp: 16 queries, 64 columns.
  static constexpr int kStagingAt = kStatsAt + kTile.stats_bytes(), kStagingBytes = 4096;
  // In order: additions of a step, each kind of which has a warp to itself, and tiles whose turns it asks for at once.
  static constexpr int kDqStages = kIndependent ? 2 : 1, kSemaphoresAtOnce = 4;
  static constexpr bool kQueriesLoadDouts = kPool || kIndependent;
  static constexpr bool kSchedulerLoadsKeys = true;
  static constexpr int kWorkReaders = kOrdered                                    ? 3
                                      : kStores && kIndependent && !kMayMakeStats ? 1
                                                                                  : 2;  // among the producers
  static constexpr int kWorkAt = kStagingAt + kTile.staging_bytes();
  static constexpr int kSmemBytes = kTile.smem_bytes(D);
  static constexpr int kWorkStages = 2;
  // Deferred arrivals (bwd/dq_pool.cuh).
  static constexpr int kDeferredAt = kWorkAt + kWorkStages * static_cast<int>(sizeof(BwdWorkTile));
  static constexpr int kBarriersAt = kDeferredAt + 4 * kConsumerWarps;
  static constexpr int kDsStages = kTile.ds_stages(), kStatsBytes = kBlockM * 8;
  static_assert(sizeof(BwdWorkTile) % 8 == 0 && kStagingAt % 16 == 0 && kPiecesAt % 1024 == 0);
  static_assert(!kMayMakeStats || (kDsStages == kStages && kQBytes <= kDsBytes));
  static_assert(kBarriersAt +
                    8 * (4 + 4 * kStages + 2 * kWorkStages + kDsStages + 7 + BwdTile::kConverters * kPieceStages) <=
                kSmemBytes);
};

template <typename T>
using Walk = TileWalk<T::kOrdered, T::kByQueries>;

// Shared-memory addresses of a CTA's barriers. "full" ones complete by the bytes of copies (of Q with those of lse and
// delta; of dS and dQ when every warp concerned has written its part), "empty" ones when all that read it have arrived.
template <typename T>
struct BwdBarriers {
  uint32_t base;
  __device__ uint32_t k_full() const { return base; }
  __device__ uint32_t k_empty() const { return base + 8; }
  __device__ uint32_t v_full() const { return base + 16; }
  __device__ uint32_t v_empty() const { return base + 24; }
  // Where K and V change places with every work tile: of the first place the barriers of K, of the second those of V.
  __device__ uint32_t place_full(int place) const { return base + 16 * place; }
  __device__ uint32_t place_empty(int place) const { return place_full(place) + 8; }
  __device__ uint32_t q_full(int stage) const { return base + 32 + 8 * stage; }
  __device__ uint32_t q_empty(int stage) const { return base + 32 + 8 * (T::kStages + stage); }
  __device__ uint32_t dout_full(int stage) const { return base + 32 + 8 * (2 * T::kStages + stage); }
  __device__ uint32_t dout_empty(int stage) const { return base + 32 + 8 * (3 * T::kStages + stage); }
  __device__ uint32_t work_full(int stage) const { return base + 32 + 8 * (4 * T::kStages + stage); }
  __device__ uint32_t work_empty(int stage) const { return base + 32 + 8 * (4 * T::kStages + T::kWorkStages + stage); }

  __device__ uint32_t ds_full(int stage) const { return base + 32 + 8 * (4 * T::kStages + 2 * T::kWorkStages + stage); }

  // The last tiles of a work tile are on their way.
  __device__ uint32_t work_ending() const { return ds_full(T::kDsStages); }
  // In order: dQ has been left or added, and is where it belongs.
  __device__ uint32_t dq_full(int group) const { return work_ending() + 8 + 8 * group; }
  __device__ uint32_t dq_empty(int group) const { return work_ending() + 24 + 8 * group; }
  // With a dQ pool: what a work tile adds to dQ is where it belongs; a piece of dQ has come.
  __device__ uint32_t added(int stage) const { return work_ending() + 40 + 8 * stage; }
  __device__ uint32_t piece_full(int stage) const { return added(T::kWorkStages) + 8 * stage; }

  __device__ void init() const {
    ptx::mbarrier_init(k_full(), T::kKeyParts);
    ptx::mbarrier_init(k_empty(), T::kConsumerWarps);
    ptx::mbarrier_init(v_full(), T::kKeyParts);
    ptx::mbarrier_init(v_empty(), T::kConsumerWarps);
    for (int i = 0; i < T::kStages; ++i) {
      ptx::mbarrier_init(q_full(i), T::kMayMakeStats ? 3 : 2);
      ptx::mbarrier_init(q_empty(i), T::kConsumerWarps);
      ptx::mbarrier_init(dout_full(i), 1);
      ptx::mbarrier_init(dout_empty(i), T::kConsumerWarps);
    }
    for (int i = 0; i < T::kWorkStages; ++i) {
      ptx::mbarrier_init(work_full(i), 1);
      ptx::mbarrier_init(work_empty(i), T::kConsumerWarps + T::kWorkReaders);
      if constexpr (T::kPool) ptx::mbarrier_init(added(i), T::kConsumerWarps);
    }
    if constexpr (T::kPool) {
      for (int i = 0; i < BwdTile::kConverters * T::kPieceStages; ++i) ptx::mbarrier_init(piece_full(i), 1);
    }
    for (int i = 0; i < T::kDsStages; ++i) ptx::mbarrier_init(ds_full(i), T::kConsumerWarps);
    ptx::mbarrier_init(work_ending(), 1);
    if constexpr (T::kOrdered) {
      for (int i = 0; i < T::kDqStages; ++i) {
        ptx::mbarrier_init(dq_full(i), T::kConsumerWarps / T::kDqStages);
        ptx::mbarrier_init(dq_empty(i), 1);
      }
    }
    ptx::fence_mbarrier_init();
  }
};

}  // namespace flash_ext::sm90
