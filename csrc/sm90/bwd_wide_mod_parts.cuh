// What the roles of the sm90 backward with modifiers in two kernels share: traits, shared memory, barriers.
#pragma once

#include "bwd_mod_scores.cuh"
#include "bwd_wide_consume.cuh"
#include "bwd_wide_mod_tiles.h"

namespace flash_ext::sm90 {

struct WideModArgs {
  BwdArgs plain;
  Modifiers m;
  KeyCap cap;
  float unit;  // raw products, natural scores, or tanh, times this are scores in log2
};

// What both kernels have in common. kAddingDropping also stands for calls that only drop.
template <typename E, int D, ScoreKind kKind, bool kQueries>
struct WideModTraits {
  static_assert(kKind != ScoreKind::kDropping);
  using Element = E;
  static constexpr bool kCaps = kKind == ScoreKind::kCapping, kHides = kKind == ScoreKind::kHiding;
  static constexpr bool kAdds = kKind == ScoreKind::kAdding || kKind == ScoreKind::kAddingDropping;
  static constexpr bool kDrops = kKind == ScoreKind::kAddingDropping, kLoadersDraw = false;  // consumers do
  static constexpr bool kByQueries = kQueries;
  static constexpr WideBwdTile kTile = wide_mod_tile(D);
  static constexpr int kHeadDim = D, kChunks = chunks_of(D), kThreads = WideBwdTile::kThreads, kConsumerWarps = 8;
  static constexpr int kStatRows = kTile.block_m;
  // As those of bwd_mod_parts.cuh: the scheduler judges tiles.
  static constexpr int kConsumerRegs = 224, kProducerRegs = 56;
  static constexpr int kItems = 2, kRingChunks = 2, kDrawAhead = 3;
  // Warps that read marks, and places for those of a step.
  static constexpr int kMarkReaders = kQueries ? 8 : 4, kMarkSlots = 2, kMarkBytes = 4 * 32 * kMarkReaders;
};

// The kernel of dK and dV.
template <typename E, int D, ScoreKind kKind>
struct WideModKeyTraits : WideModTraits<E, D, kKind, false> {
  using Base = WideModTraits<E, D, kKind, false>;
  static constexpr WideBwdTile kTile = Base::kTile;
  static constexpr int kBlockM = kTile.block_m, kBlockN = WideBwdTile::kKeys, kOwnRows = kBlockN;
  static constexpr int kSlots = kTile.slots, kSteps = kSlots;
  // Where nothing is asked for ahead there is room for more.
  static constexpr int kHeld = (kTile.held + (Base::kAdds || D <= 128 ? 0 : 64)) / 16;
  static constexpr int kQPlaces = kSlots, kKPlaces = 1, kVPlaces = 1;
  static constexpr int kKBytes = tile_bytes(kBlockN, D), kQBytes = tile_bytes(kBlockM, D);
  static constexpr int kVAt = kKBytes, kQAt = 2 * kKBytes, kDoutAt = kQAt + kSlots * kQBytes;
  static constexpr int kWeightsAt = kDoutAt + kSlots * kQBytes, kWeightBytes = kTile.weight_bytes();
  static constexpr int kStatsAt = kWeightsAt + kWeightBytes, kStatsBytes = kBlockM * 8;
  static constexpr int kSharedAt = kStatsAt + kTile.stats_bytes(), kSmemBytes = wide_mod_keys_bytes(D);
  static_assert(kTile.weight_slots == 1 && kQBytes % 1024 == 0 && kSharedAt % 16 == 0);
};

// The kernel of dQ.
template <typename E, int D, ScoreKind kKind>
struct WideModQueryTraits : WideModTraits<E, D, kKind, true> {
  using Base = WideModTraits<E, D, kKind, true>;
  static constexpr WideBwdTile kTile = Base::kTile;
  static constexpr int kBlockM = WideBwdTile::kQueries, kBlockN = kTile.block_n, kOwnRows = kBlockM, kGroupRows = 64;
  static constexpr int kKSlots = kTile.k_slots, kVSlots = kTile.v_slots, kSteps = kKSlots;
  static constexpr int kQPlaces = 2, kKPlaces = kKSlots, kVPlaces = kVSlots;
  static constexpr int kQBytes = tile_bytes(kGroupRows, D), kKBytes = tile_bytes(kBlockN, D);
  static constexpr int kDoutAt = 2 * kQBytes, kKAt = 4 * kQBytes, kVAt = kKAt + kKSlots * kKBytes;
  // A bias asked for ahead takes the registers of dP at head_dim 256, whose product comes after it there.
  static constexpr bool kLateDp = D == 256 && Base::kAdds;
  static constexpr int kSharedAt = kVAt + kVSlots * kKBytes, kSmemBytes = wide_mod_queries_bytes(D);
  static_assert(kBlockN == 64, "two parts of marks along a tile");
  static_assert((kKSlots & (kKSlots - 1)) == 0 && (kVSlots & (kVSlots - 1)) == 0, "slots follow from counts");
};

// Behind the tiles in shared memory, before the barriers.
template <typename T>
struct WideModShared {
  static constexpr int kMarkers = 3;  // warps that make marks
  DropKeys drop[!T::kDrops ? 1 : T::kByQueries ? T::kItems : T::kSteps];  // of an item, of a step
  BwdModItem items[T::kItems];
  BwdChunk chunks[T::kRingChunks];
  BwdStep steps[T::kSteps];  // of the Q or the K in that slot
  uint32_t index;            // the scheduler's present one
  int items_found, chunks_found;
  alignas(4) unsigned char mark_bytes[T::kMarkSlots * T::kMarkBytes];

  __device__ __forceinline__ unsigned char* marks(Mark, int slot) { return mark_bytes + slot * T::kMarkBytes; }
};

// "full" ones complete by the bytes of copies or when what they announce is written, "empty" ones when all that read it
// have arrived. In the kernel of dQ each warpgroup has its own Q and dO.
template <typename T>
struct WideModBarriers {
  static constexpr int kLoaders = 3;
  static constexpr int kAt = T::kSharedAt + static_cast<int>((sizeof(WideModShared<T>) + 7) / 8 * 8);
  static constexpr int kEnding = 0, kItem = 1, kChunk = kItem + 2 * T::kItems, kMarks = kChunk + 2 * T::kRingChunks;
  static constexpr int kQ = kMarks + 2 * T::kMarkSlots;
  static constexpr int kDout = kQ + 2 * T::kQPlaces, kK = kDout + 2 * T::kQPlaces, kV = kK + 2 * T::kKPlaces;
  static constexpr int kWeights = kV + 2 * T::kVPlaces, kCount = kWeights + 2;
  static_assert(kAt + 8 * kCount <= T::kSmemBytes);

  uint32_t smem;
  __device__ uint32_t at(int index) const { return smem + kAt + 8 * index; }
  __device__ uint32_t item_ending() const { return at(kEnding); }
  __device__ uint32_t item_full(int place) const { return at(kItem + place); }
  __device__ uint32_t item_empty(int place) const { return at(kItem + T::kItems + place); }
  __device__ uint32_t chunk_full(int place) const { return at(kChunk + place); }
  __device__ uint32_t chunk_empty(int place) const { return at(kChunk + T::kRingChunks + place); }
  __device__ uint32_t marks_full(int slot) const { return at(kMarks + slot); }
  __device__ uint32_t marks_empty(int slot) const { return at(kMarks + T::kMarkSlots + slot); }
  __device__ uint32_t q_full(int slot) const { return at(kQ + slot); }
  __device__ uint32_t q_empty(int slot) const { return at(kQ + T::kQPlaces + slot); }
  __device__ uint32_t dout_full(int slot) const { return at(kDout + slot); }
  __device__ uint32_t dout_empty(int slot) const { return at(kDout + T::kQPlaces + slot); }
  __device__ uint32_t k_full(int slot = 0) const { return at(kK + slot); }
  __device__ uint32_t k_empty(int slot = 0) const { return at(kK + T::kKPlaces + slot); }
  __device__ uint32_t v_full(int slot = 0) const { return at(kV + slot); }
  __device__ uint32_t v_empty(int slot = 0) const { return at(kV + T::kVPlaces + slot); }
  __device__ uint32_t weights_full() const { return at(kWeights); }
  __device__ uint32_t weights_empty() const { return at(kWeights + 1); }

  __device__ void init() const {
    const auto init_pairs = [&](int first, int count, int full_arrivals, int empty_arrivals) {
      for (int i = 0; i < count; ++i) {
        ptx::mbarrier_init(at(first + i), full_arrivals);
        ptx::mbarrier_init(at(first + count + i), empty_arrivals);
      }
    };
    constexpr int kAll = T::kConsumerWarps, kHalf = kAll / 2;
    ptx::mbarrier_init(item_ending(), 1);
    init_pairs(kItem, T::kItems, 1, kAll + kLoaders);
    init_pairs(kChunk, T::kRingChunks, 1, kLoaders);
    init_pairs(kMarks, T::kMarkSlots, WideModShared<T>::kMarkers, T::kMarkReaders);
    init_pairs(kQ, T::kQPlaces, T::kByQueries ? 1 : 3, T::kByQueries ? kHalf : kAll);  // Q, its statistics, its step
    init_pairs(kDout, T::kQPlaces, 1, T::kByQueries ? kHalf : kAll);
    init_pairs(kK, T::kKPlaces, T::kByQueries ? 2 : 1, T::kByQueries ? kAll : kHalf);  // K, its step
    init_pairs(kV, T::kVPlaces, 1, T::kByQueries ? kAll : kHalf);
    init_pairs(kWeights, 1, kHalf, kHalf);
    ptx::fence_mbarrier_init();
  }
};

}  // namespace flash_ext::sm90
