// What the roles of the sm90 backward for head_dim above 128 share: traits, shared memory, barriers, items.
#pragma once

#include "bwd_produce.cuh"
#include "bwd_steps.cuh"
#include "bwd_wide_tiles.h"

namespace flash_ext::sm90 {

// A consumer's lane. At (192, 128) it stays in a register: ptxas would read it in every step again, which costs 1 to 3 %
// (4k rows, no mask and causal); 192 gains 1 and loses 2 with causal masks, and 256 has no register left.
template <typename T>
__device__ __forceinline__ int consumer_lane() {
  if constexpr (T::kHeadDim == 192 && T::kHeadDimV == 128) {
    return ptx::fresh_lane();
  } else {
    return threadIdx.x % 32;
  }
}

// The kernel of dK and dV. Its producers are those of bwd_produce.cuh, which ask for these names.
template <typename E, int D, int Dv>
struct WideKeyTraits {
  using Element = E;
  static constexpr WideBwdTile kTile = wide_bwd_tile(D, Dv);
  static constexpr int kHeadDim = D, kHeadDimV = Dv;
  static constexpr int kBlockM = kTile.block_m, kBlockN = WideBwdTile::kKeys, kThreads = WideBwdTile::kThreads;
  static constexpr int kSlots = kTile.slots, kChunks = chunks_of(D), kChunksV = chunks_of(Dv), kConsumerWarps = 8;
  static constexpr int kKeyParts = 1, kPartRows = kBlockN, kKeyReaders = 4, kDsWriters = 4;
  static constexpr int kConsumerRegs = 240, kProducerRegs = 24;
  static constexpr int kDrawAhead = 1;
  // Of 16 columns, whose operands stay in registers for a whole item.
  static constexpr int kHeldK = (kTile.held < D ? kTile.held : D) / 16;
  static constexpr int kHeldV = (kTile.held < Dv ? kTile.held : Dv) / 16;
  static constexpr int kQBytes = tile_bytes(kBlockM, D), kDoutBytes = tile_bytes(kBlockM, Dv);
  static constexpr int kVAt = tile_bytes(kBlockN, D), kQAt = kVAt + tile_bytes(kBlockN, Dv);
  static constexpr int kDoutAt = kQAt + kSlots * kQBytes, kWeightsAt = kDoutAt + kSlots * kDoutBytes;
  static constexpr int kWeightSlots = kTile.weight_slots, kWeightBytes = kTile.weight_bytes();
  static constexpr int kStatsAt = kWeightsAt + kWeightSlots * kWeightBytes, kStatsBytes = kBlockM * 8;
  static constexpr int kItemsAt = kStatsAt + kTile.stats_bytes(), kItems = 2;
  static constexpr int kSmemBytes = kTile.dkv_smem_bytes(D, Dv);
  static constexpr int kBarriersAt = kItemsAt + kItems * static_cast<int>(sizeof(BwdItem));
  static constexpr int kDsSlots = 2 * kWeightSlots;  // weights written, weights read
  static constexpr bool kOrdered = false, kRing = false, kSchedulerLoadsKeys = false;
  static constexpr int kItemReaders = 3;  // among the producers
  static constexpr bool kQueriesLoadDouts = false, kPlacesSwap = false;
  static_assert(kQBytes % 1024 == 0 && kDoutBytes % 1024 == 0 && kItemsAt % 16 == 0);
  static_assert(kBarriersAt + 8 * (5 + 4 * kSlots + 2 * kItems + kDsSlots) <= kSmemBytes);
};

// An item of the kernel of dQ, 128 queries of one head.
struct QueryItem {
  Work w;             // block < 0: there is none any more
  BlockRange blocks;  // tiles of keys
  int steps;          // their number, may be 0
  int tile;           // first one of the head in the workspace
};

struct WideQueryArgs {
  BwdParams p;
  Grid grid;
  Draw draw;
  Steps q, k, v, dout;
  int tiles_per_head;
};

template <typename E, int D, int Dv>
struct WideQueryTraits {
  using Element = E;
  static constexpr WideBwdTile kTile = wide_bwd_tile(D, Dv);
  static constexpr int kHeadDim = D, kHeadDimV = Dv, kStatRows = kTile.block_m;
  static constexpr int kBlockM = WideBwdTile::kQueries, kBlockN = kTile.block_n, kThreads = WideBwdTile::kThreads;
  static constexpr int kKSlots = kTile.k_slots, kVSlots = kTile.v_slots;
  static constexpr int kChunks = chunks_of(D), kChunksV = chunks_of(Dv), kConsumerWarps = 8;
  static constexpr int kConsumerRegs = 240, kProducerRegs = 24;
  static constexpr int kKBytes = tile_bytes(kBlockN, D), kVBytes = tile_bytes(kBlockN, Dv);
  static constexpr int kGroupRows = 64, kQBytes = tile_bytes(kGroupRows, D), kDoutBytes = tile_bytes(kGroupRows, Dv);
  static constexpr int kDoutAt = tile_bytes(kBlockM, D), kKAt = kDoutAt + tile_bytes(kBlockM, Dv);
  static constexpr int kVAt = kKAt + kKSlots * kKBytes, kItemsAt = kVAt + kVSlots * kVBytes, kItems = 2;
  static constexpr int kSmemBytes = kTile.dq_smem_bytes(D, Dv);
  static constexpr int kBarriersAt = kItemsAt + kItems * static_cast<int>(sizeof(QueryItem));
  static_assert(kKBytes % 1024 == 0 && kVBytes % 1024 == 0 && sizeof(QueryItem) % 8 == 0);
  static_assert(kBarriersAt + 8 * (9 + 2 * kKSlots + 2 * kVSlots + 2 * kItems) <= kSmemBytes);
};

// As BwdBarriers. Each warpgroup has its own tiles of Q and dO, so that one need not wait for the other's.
template <typename T>
struct WideQueryBarriers {
  uint32_t base;
  __device__ uint32_t q_full(int group) const { return base + 8 * group; }
  __device__ uint32_t q_empty(int group) const { return base + 16 + 8 * group; }
  __device__ uint32_t dout_full(int group) const { return base + 32 + 8 * group; }
  __device__ uint32_t dout_empty(int group) const { return base + 48 + 8 * group; }
  __device__ uint32_t item_full(int place) const { return base + 64 + 8 * place; }
  __device__ uint32_t item_empty(int place) const { return base + 64 + 8 * (T::kItems + place); }
  __device__ uint32_t k_full(int slot) const { return base + 64 + 8 * (2 * T::kItems + slot); }
  __device__ uint32_t k_empty(int slot) const { return k_full(T::kKSlots + slot); }
  __device__ uint32_t v_full(int slot) const { return k_full(2 * T::kKSlots + slot); }
  __device__ uint32_t v_empty(int slot) const { return v_full(T::kVSlots + slot); }
  __device__ uint32_t item_ending() const { return v_full(2 * T::kVSlots); }  // its last tile of K is on its way

  __device__ void init() const {
    ptx::mbarrier_init(item_ending(), 1);
    for (int i = 0; i < 2; ++i) {
      ptx::mbarrier_init(q_full(i), 1);
      ptx::mbarrier_init(q_empty(i), T::kConsumerWarps / 2);
      ptx::mbarrier_init(dout_full(i), 1);
      ptx::mbarrier_init(dout_empty(i), T::kConsumerWarps / 2);
    }
    for (int i = 0; i < T::kItems; ++i) {
      ptx::mbarrier_init(item_full(i), 1);
      ptx::mbarrier_init(item_empty(i), T::kConsumerWarps + 3);  // and the other producers
    }
    for (int i = 0; i < T::kKSlots; ++i) {
      ptx::mbarrier_init(k_full(i), 1);
      ptx::mbarrier_init(k_empty(i), T::kConsumerWarps);
    }
    for (int i = 0; i < T::kVSlots; ++i) {
      ptx::mbarrier_init(v_full(i), 1);
      ptx::mbarrier_init(v_empty(i), T::kConsumerWarps);
    }
    ptx::fence_mbarrier_init();
  }
};

}  // namespace flash_ext::sm90
