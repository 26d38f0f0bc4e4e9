// What the roles of the sm90 split backward share: traits, shared memory, barriers. One kernel makes dK and dV, one dQ.
// Both are compiled plain and for kinds of modifiers, from one source.
#pragma once

#include "bwd_split_scores.cuh"
#include "bwd_split_mod_tiles.h"

namespace flash_ext::sm90 {

struct SplitArgs {
  BwdArgs plain;
  float unit;  // raw products, natural scores, or tanh, times this are scores in log2
};
struct SplitModArgs : SplitArgs {
  Modifiers m;
  KeyCap cap;
};

// What both kernels have in common. kAddingDropping also stands for calls that only drop.
template <typename E, int D, int Dv, ScoreKind kKind, bool kQueries>
struct SplitTraits {
  static_assert(kKind != ScoreKind::kDropping && (kKind == ScoreKind::kPlain || D == Dv));
  using Element = E;
  static constexpr bool kPlain = kKind == ScoreKind::kPlain, kHides = kKind == ScoreKind::kHiding;
  static constexpr bool kAdds = kKind == ScoreKind::kAdding || kKind == ScoreKind::kAddingDropping;
  static constexpr bool kCaps = kKind == ScoreKind::kCapping, kDrops = kKind == ScoreKind::kAddingDropping;
  static constexpr bool kLoadersDraw = false;  // consumers do
  using Args = std::conditional_t<kPlain, SplitArgs, SplitModArgs>;
  static constexpr bool kByQueries = kQueries;
  static constexpr SplitBwdTile kTile = kPlain ? split_bwd_tile(D, Dv) : split_mod_tile(D);
  static constexpr int kHeadDim = D, kHeadDimV = Dv, kChunks = chunks_of(D), kChunksV = chunks_of(Dv);
  static constexpr int kThreads = SplitBwdTile::kThreads, kConsumerWarps = 8, kLoaders = 3;
  static constexpr int kStatRows = kTile.block_m;
  // With modifiers the scheduler judges tiles, as that of bwd_mod_parts.cuh.
  static constexpr int kConsumerRegs = kPlain ? 240 : 224, kProducerRegs = kPlain ? 24 : 56;
  static constexpr int kItems = 2, kDrawAhead = kPlain ? 1 : 3, kRingChunks = kPlain ? 0 : 2;
  // Warps that read marks, and places for those of a step.
  static constexpr int kMarkReaders = kQueries ? 8 : 4, kMarkSlots = kPlain ? 0 : 2, kMarkBytes = 4 * 32 * kMarkReaders;
  // Asked for by schedule_items() of bwd_produce.cuh.
  static constexpr bool kOrdered = false, kRing = false, kSchedulerLoadsKeys = false;
};

// The kernel of dK and dV.
template <typename E, int D, int Dv, ScoreKind kKind>
struct DkdvTraits : SplitTraits<E, D, Dv, kKind, false> {
  using Base = SplitTraits<E, D, Dv, kKind, false>;
  static constexpr SplitBwdTile kTile = Base::kTile;
  static constexpr int kBlockM = kTile.block_m, kBlockN = SplitBwdTile::kKeys, kOwnRows = kBlockN;
  static constexpr int kSlots = kTile.slots, kSteps = kSlots;
  static constexpr int kQPlaces = kSlots, kKPlaces = 1, kVPlaces = 1;
  // Steps of 16 columns, whose operands stay in registers for a whole item. With modifiers there is room for more where
  // nothing is asked for ahead.
  static constexpr int kHeld = kTile.held + (Base::kPlain || Base::kAdds || D <= 128 ? 0 : 64);
  static constexpr int kHeldK = (kHeld < D ? kHeld : D) / 16, kHeldV = (kHeld < Dv ? kHeld : Dv) / 16;
  // The place of K or V is free for the next item as soon as all of it is held.
  static constexpr bool kFreesHeldK = Base::kPlain && kHeldK == D / 16, kFreesHeldV = Base::kPlain && kHeldV == Dv / 16;
  static constexpr int kQBytes = tile_bytes(kBlockM, D), kDoutBytes = tile_bytes(kBlockM, Dv);
  static constexpr int kVAt = tile_bytes(kBlockN, D), kQAt = kVAt + tile_bytes(kBlockN, Dv);
  static constexpr int kDoutAt = kQAt + kSlots * kQBytes, kWeightsAt = kDoutAt + kSlots * kDoutBytes;
  static constexpr int kWeightSlots = kTile.weight_slots, kWeightBytes = kTile.weight_bytes();
  static constexpr int kStatsAt = kWeightsAt + kWeightSlots * kWeightBytes, kStatsBytes = kBlockM * 8;
  static constexpr int kSharedAt = kStatsAt + kTile.stats_bytes();
  static constexpr int kSmemBytes = Base::kPlain ? kTile.dkv_smem_bytes(D, Dv) : dkdv_mod_bytes(D);
  static_assert(kQBytes % 1024 == 0 && kDoutBytes % 1024 == 0 && kSharedAt % 16 == 0);
};

// The kernel of dQ.
template <typename E, int D, int Dv, ScoreKind kKind>
struct DqTraits : SplitTraits<E, D, Dv, kKind, true> {
  using Base = SplitTraits<E, D, Dv, kKind, true>;
  static constexpr SplitBwdTile kTile = Base::kTile;
  static constexpr int kBlockM = SplitBwdTile::kQueries, kBlockN = kTile.block_n, kOwnRows = kBlockM, kGroupRows = 64;
  static constexpr int kKSlots = kTile.k_slots, kVSlots = kTile.v_slots, kSteps = kKSlots;
  static constexpr int kQPlaces = 2, kKPlaces = kKSlots, kVPlaces = kVSlots, kWeightSlots = 0;
  static constexpr int kQBytes = tile_bytes(kGroupRows, D), kDoutBytes = tile_bytes(kGroupRows, Dv);
  static constexpr int kKBytes = tile_bytes(kBlockN, D), kVBytes = tile_bytes(kBlockN, Dv);
  static constexpr int kDoutAt = 2 * kQBytes, kKAt = kDoutAt + 2 * kDoutBytes, kVAt = kKAt + kKSlots * kKBytes;
  // A bias asked for ahead takes the registers of dP at head_dim 256, whose product comes after it there.
  static constexpr bool kLateDp = D == 256 && Base::kAdds;
  static constexpr int kSharedAt = kVAt + kVSlots * kVBytes;
  static constexpr int kSmemBytes = Base::kPlain ? kTile.dq_smem_bytes(D, Dv) : dq_mod_bytes(D);
  static_assert(kKBytes % 1024 == 0 && kVBytes % 1024 == 0);
  static_assert(Base::kPlain || kBlockN == 64, "two parts of marks along a tile");
};

// Behind the tiles in shared memory, before the barriers: plain, and with modifiers.
template <typename T, bool = T::kPlain>
struct SplitShared {
  BwdItem items[T::kItems];
};
template <typename T>
struct SplitShared<T, false> {
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
// have arrived. In the kernel of dQ each warpgroup has its own Q and dO, so that one need not wait for the other's.
template <typename T>
struct SplitBarriers {
  static constexpr int kAt = T::kSharedAt + static_cast<int>((sizeof(SplitShared<T>) + 7) / 8 * 8);
  static constexpr int kEnding = 0, kItem = 1, kChunk = kItem + 2 * T::kItems, kMarks = kChunk + 2 * T::kRingChunks;
  static constexpr int kQ = kMarks + 2 * T::kMarkSlots;
  static constexpr int kDout = kQ + 2 * T::kQPlaces, kK = kDout + 2 * T::kQPlaces, kV = kK + 2 * T::kKPlaces;
  static constexpr int kWeights = kV + 2 * T::kVPlaces, kCount = kWeights + 2 * T::kWeightSlots;
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
  __device__ uint32_t weights_full(int slot) const { return at(kWeights + slot); }
  __device__ uint32_t weights_empty(int slot) const { return at(kWeights + T::kWeightSlots + slot); }

  __device__ void init() const {
    const auto init_pairs = [&](int first, int count, int full_arrivals, int empty_arrivals) {
      for (int i = 0; i < count; ++i) {
        ptx::mbarrier_init(at(first + i), full_arrivals);
        ptx::mbarrier_init(at(first + count + i), empty_arrivals);
      }
    };
    constexpr int kAll = T::kConsumerWarps, kHalf = kAll / 2, kStep = T::kPlain ? 0 : 1;
    ptx::mbarrier_init(item_ending(), 1);
    init_pairs(kItem, T::kItems, 1, kAll + T::kLoaders);
    init_pairs(kChunk, T::kRingChunks, 1, T::kLoaders);
    init_pairs(kMarks, T::kMarkSlots, T::kLoaders, T::kMarkReaders);
    // Q, in the kernel of dK and dV also its statistics and its step; in that of dQ the step comes with K.
    init_pairs(kQ, T::kQPlaces, T::kByQueries ? 1 : 2 + kStep, T::kByQueries ? kHalf : kAll);
    init_pairs(kDout, T::kQPlaces, 1, T::kByQueries ? kHalf : kAll);
    init_pairs(kK, T::kKPlaces, T::kByQueries ? 1 + kStep : 1, T::kByQueries ? kAll : kHalf);
    init_pairs(kV, T::kVPlaces, 1, T::kByQueries ? kAll : kHalf);
    init_pairs(kWeights, T::kWeightSlots, kHalf, kHalf);
    ptx::fence_mbarrier_init();
  }
};

}  // namespace flash_ext::sm90
