// What the roles of the sm90 split backward share: traits, shared memory, barriers. One kernel makes dK and dV, one dQ.
// Both are compiled plain and for kinds of modifiers, from one source.
#pragma once

#include "scores.cuh"
#include "tiles_mod.h"

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
  static constexpr bool kMakersHideEnds = true;  // what lies behind the ends of sequences, by mask words
  using Args = std::conditional_t<kPlain, SplitArgs, SplitModArgs>;
  static constexpr bool kByQueries = kQueries;
  static constexpr SplitBwdTile kTile = kPlain ? split_bwd_tile(D, Dv) : split_mod_tile(D);
  static constexpr int kHeadDim = D, kHeadDimV = Dv, kChunks = chunks_of(D), kChunksV = chunks_of(Dv);
  static constexpr int kThreads = SplitBwdTile::kThreads, kConsumerWarps = 8, kLoaders = 3;
  static constexpr int kStatRows = kTile.block_m;
  // With modifiers the scheduler classifies tiles, as that of bwd_mod/config.cuh.
  static constexpr int kConsumerRegs = kPlain ? 240 : 224, kProducerRegs = kPlain ? 24 : 56;
  static constexpr int kWorkStages = 2, kFetchAhead = kPlain ? 1 : 3, kChunkStages = kPlain ? 0 : 2;
  // Warps that read mask words, and places for those of a step.
  static constexpr int kMaskReaders = kQueries ? 8 : 4, kMaskStages = kPlain ? 0 : 2,
                       kMaskWordBytes = 4 * 32 * kMaskReaders;
  // Asked for by schedule_work() of bwd/produce.cuh.
  static constexpr bool kOrdered = false, kPool = false, kDivides = false, kUnits = false, kSchedulerLoadsKeys = false;
};

// The kernel of dK and dV.
template <typename E, int D, int Dv, ScoreKind kKind>
struct DkdvTraits : SplitTraits<E, D, Dv, kKind, false> {
  using Base = SplitTraits<E, D, Dv, kKind, false>;
  static constexpr SplitBwdTile kTile = Base::kTile;
  static constexpr int kBlockM = kTile.block_m, kBlockN = SplitBwdTile::kKeys, kOwnRows = kBlockN;
  static constexpr int kStages = kTile.stages, kSteps = kStages;
  static constexpr int kQBarriers = kStages, kKBarriers = 1, kVBarriers = 1;
  // Steps of 16 columns, whose operands stay in registers for a whole work tile. With modifiers there is room for more
  // where nothing is asked for ahead.
  static constexpr int kRsColumns = kTile.rs_columns + (Base::kPlain || Base::kAdds || D <= 128 ? 0 : 64);
  static constexpr int kRsStepsK = (kRsColumns < D ? kRsColumns : D) / 16,
                       kRsStepsV = (kRsColumns < Dv ? kRsColumns : Dv) / 16;
  // The place of K or V is free for the next work tile as soon as all of it is in registers.
  static constexpr bool kFreesK = Base::kPlain && kRsStepsK == D / 16, kFreesV = Base::kPlain && kRsStepsV == Dv / 16;
  static constexpr int kQBytes = tile_bytes(kBlockM, D), kDoutBytes = tile_bytes(kBlockM, Dv);
  static constexpr int kVAt = tile_bytes(kBlockN, D), kQAt = kVAt + tile_bytes(kBlockN, Dv);
  static constexpr int kDoutAt = kQAt + kStages * kQBytes, kWeightsAt = kDoutAt + kStages * kDoutBytes;
  static constexpr int kWeightStages = kTile.weight_stages, kWeightBytes = kTile.weight_bytes();
  static constexpr int kStatsAt = kWeightsAt + kWeightStages * kWeightBytes, kStatsBytes = kBlockM * 8;
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
  static constexpr int kKStages = kTile.k_stages, kVStages = kTile.v_stages, kSteps = kKStages;
  static constexpr int kQBarriers = 2, kKBarriers = kKStages, kVBarriers = kVStages, kWeightStages = 0;
  static constexpr int kQBytes = tile_bytes(kGroupRows, D), kDoutBytes = tile_bytes(kGroupRows, Dv);
  static constexpr int kKBytes = tile_bytes(kBlockN, D), kVBytes = tile_bytes(kBlockN, Dv);
  static constexpr int kDoutAt = 2 * kQBytes, kKAt = kDoutAt + 2 * kDoutBytes, kVAt = kKAt + kKStages * kKBytes;
  // A bias asked for ahead takes the registers of dP at head_dim 256, whose product comes after it there.
  static constexpr bool kLateDp = D == 256 && Base::kAdds;
  static constexpr int kSharedAt = kVAt + kVStages * kVBytes;
  static constexpr int kSmemBytes = Base::kPlain ? kTile.dq_smem_bytes(D, Dv) : dq_mod_bytes(D);
  static_assert(kKBytes % 1024 == 0 && kVBytes % 1024 == 0);
  static_assert(Base::kPlain || kBlockN == 64, "two parts of mask_words along a tile");
};

// Behind the tiles in shared memory, before the barriers: plain, and with modifiers.
template <typename T, bool = T::kPlain>
struct SplitShared {
  BwdWorkTile work_tiles[T::kWorkStages];
};
template <typename T>
struct SplitShared<T, false> {
  DropKeys drop[!T::kDrops ? 1 : T::kByQueries ? T::kWorkStages : T::kSteps];  // of a work tile, of a step
  BwdModWorkTile work_tiles[T::kWorkStages];
  BwdChunk chunks[T::kChunkStages];
  BwdStep steps[T::kSteps];  // of the Q or the K in that stage
  uint32_t index;  // the scheduler's present one
  int work_tiles_found, chunks_found;
  alignas(4) unsigned char mask_word_bytes[T::kMaskStages * T::kMaskWordBytes];

  __device__ __forceinline__ unsigned char* mask_words(WordKind, int stage) {
    return mask_word_bytes + stage * T::kMaskWordBytes;
  }
};

// "full" ones complete by the bytes of copies or when what they announce is written, "empty" ones when all that read it
// have arrived. In the kernel of dQ each warpgroup has its own Q and dO, so that one need not wait for the other's.
template <typename T>
struct SplitBarriers {
  static constexpr int kAt = T::kSharedAt + static_cast<int>((sizeof(SplitShared<T>) + 7) / 8 * 8);
  static constexpr int kEnding = 0, kWork = 1, kChunk = kWork + 2 * T::kWorkStages,
                       kMask = kChunk + 2 * T::kChunkStages;
  static constexpr int kQ = kMask + 2 * T::kMaskStages;
  static constexpr int kDout = kQ + 2 * T::kQBarriers, kK = kDout + 2 * T::kQBarriers, kV = kK + 2 * T::kKBarriers;
  static constexpr int kWeights = kV + 2 * T::kVBarriers, kCount = kWeights + 2 * T::kWeightStages;
  static_assert(kAt + 8 * kCount <= T::kSmemBytes);

  uint32_t smem;
  __device__ uint32_t at(int index) const { return smem + kAt + 8 * index; }
  __device__ uint32_t work_ending() const { return at(kEnding); }
  __device__ uint32_t work_full(int stage) const { return at(kWork + stage); }
  __device__ uint32_t work_empty(int stage) const { return at(kWork + T::kWorkStages + stage); }
  __device__ uint32_t chunk_full(int stage) const { return at(kChunk + stage); }
  __device__ uint32_t chunk_empty(int stage) const { return at(kChunk + T::kChunkStages + stage); }
  __device__ uint32_t mask_full(int stage) const { return at(kMask + stage); }
  __device__ uint32_t mask_empty(int stage) const { return at(kMask + T::kMaskStages + stage); }
  __device__ uint32_t q_full(int stage) const { return at(kQ + stage); }
  __device__ uint32_t q_empty(int stage) const { return at(kQ + T::kQBarriers + stage); }
  __device__ uint32_t dout_full(int stage) const { return at(kDout + stage); }
  __device__ uint32_t dout_empty(int stage) const { return at(kDout + T::kQBarriers + stage); }
  __device__ uint32_t k_full(int stage = 0) const { return at(kK + stage); }
  __device__ uint32_t k_empty(int stage = 0) const { return at(kK + T::kKBarriers + stage); }
  __device__ uint32_t v_full(int stage = 0) const { return at(kV + stage); }
  __device__ uint32_t v_empty(int stage = 0) const { return at(kV + T::kVBarriers + stage); }
  __device__ uint32_t weights_full(int stage) const { return at(kWeights + stage); }
  __device__ uint32_t weights_empty(int stage) const { return at(kWeights + T::kWeightStages + stage); }

  __device__ void init() const {
    const auto init_pairs = [&](int first, int count, int full_arrivals, int empty_arrivals) {
      for (int i = 0; i < count; ++i) {
        ptx::mbarrier_init(at(first + i), full_arrivals);
        ptx::mbarrier_init(at(first + count + i), empty_arrivals);
      }
    };
    constexpr int kAll = T::kConsumerWarps, kHalf = kAll / 2, kStep = T::kPlain ? 0 : 1;
    ptx::mbarrier_init(work_ending(), 1);
    init_pairs(kWork, T::kWorkStages, 1, kAll + T::kLoaders);
    init_pairs(kChunk, T::kChunkStages, 1, T::kLoaders);
    init_pairs(kMask, T::kMaskStages, T::kLoaders, T::kMaskReaders);
    // Q, in the kernel of dK and dV also its statistics and its step; in that of dQ the step comes with K.
    init_pairs(kQ, T::kQBarriers, T::kByQueries ? 1 : 2 + kStep, T::kByQueries ? kHalf : kAll);
    init_pairs(kDout, T::kQBarriers, 1, T::kByQueries ? kHalf : kAll);
    init_pairs(kK, T::kKBarriers, T::kByQueries ? 1 + kStep : 1, T::kByQueries ? kAll : kHalf);
    init_pairs(kV, T::kVBarriers, 1, T::kByQueries ? kAll : kHalf);
    init_pairs(kWeights, T::kWeightStages, kHalf, kHalf);
    ptx::fence_mbarrier_init();
  }
};

}  // namespace flash_ext::sm90
