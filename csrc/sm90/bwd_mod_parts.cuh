// What the roles of the sm90 backward with modifiers share: traits, shared memory, barriers, items and their steps.
#pragma once

#include "../common/dropout.cuh"
#include "../common/modifiers.cuh"
#include "bwd_mod_tiles.h"
#include "bwd_parts.cuh"
#include "fwd_mod_parts.cuh"

namespace flash_ext::sm90 {

struct BwdModMaps {
  BwdMaps plain;
  CUtensorMap bias;  // boxes of 64 queries and 128 bytes of keys
};

// tanh(factor * x) = x * (c[0] + c[1] x^2 + c[2] x^4) for |x| <= limit.
struct KeyCap {
  static constexpr int kTerms = 3;
  float c[kTerms];
  float limit;        // below 0: never
  float factor_log2;  // 2 log2(e) factor
};

struct BwdModArgs {
  BwdArgs plain;
  Modifiers m;
  KeyCap cap;
  Steps bias_steps;
  float unit;        // raw products, or tanh, times this are scores in log2
  bool adds_to_keys;  // something by distance, or a bias that all rows share
  bool brings_bias;  // by TMA; else all rows share a bias, if there is one
  bool stores_dq;    // has_whole_keys()
};

// An item, a block of keys of one key head or (kByQueries) of queries of one head, as the producer leaves it to the
// others. It has at least one step.
struct BwdModItem {
  Work w;  // block < 0: there is none any more
  Seat seat;
  BlockRange blocks;  // tiles of queries that may be visited, the same for all query heads, or of keys
  int first_head;     // of the query heads that read it; its own
  int tile;           // first one of the first query head in the workspace
};

// A step is a tile of queries of a query head that reads the item, or a tile of keys.
struct BwdStep {
  int block;
  uint32_t bits;  // head of the group << 10, for each warpgroup four bits of tests from kKeyTestsAt on, flags

  __device__ __forceinline__ int head() const { return static_cast<int>(bits >> 10); }
  __device__ __forceinline__ bool is_first() const { return (bits & kFirstOfItem) != 0; }
  __device__ __forceinline__ bool is_last() const { return (bits & kLastOfItem) != 0; }
  // A warpgroup's tests, or kSkipped.
  __device__ __forceinline__ uint32_t tests(int group) const { return bits >> (2 + 4 * group) & 15; }
  // Of either warpgroup.
  __device__ __forceinline__ bool has_tests() const { return (bits >> 2 & 0x77) != 0; }
};
inline constexpr int kKeyTestsAt = 2, kHeadAt = 10;

// Steps that the scheduler found, on their way to the loaders.
struct BwdChunk {
  static constexpr int kCapacity = 16;
  BwdStep steps[kCapacity];
  int count;
  bool is_last;  // of its item
};

// What a kernel does beside hiding scores. Code that never runs costs all the same, in registers, in instructions that
// are not there when they are needed, and in the order that ptxas finds. kPlain: no modifiers at all (bwd_split.cuh).
enum class ScoreKind { kHiding, kAdding, kCapping, kDropping, kAddingDropping, kPlain };

template <typename E, int D, ScoreKind kKind>
struct BwdModTraits {
  using Element = E;
  static constexpr bool kCaps = kKind == ScoreKind::kCapping;
  static constexpr bool kAdds = kKind == ScoreKind::kAdding || kKind == ScoreKind::kAddingDropping;
  static constexpr bool kDrops = kKind == ScoreKind::kDropping || kKind == ScoreKind::kAddingDropping;
  // Draws take a loader longer than a step: consumers make them, where there is room to exchange them.
  static constexpr bool kLoadersDraw = kKind == ScoreKind::kAddingDropping, kConsumersDraw = kDrops && !kLoadersDraw;
  static constexpr int kHeadDim = D;
  static constexpr BwdModTile kModTile = bwd_mod_tile(D);
  static constexpr BwdTile kTile = kModTile.plain();
  static constexpr int kBlockM = BwdModTile::kBlockM, kBlockN = BwdModTile::kBlockN, kThreads = BwdModTile::kThreads;
  static constexpr bool kByQueries = false, kFloatBias = BwdModTile::has_float_bias(D);
  static constexpr int kOwnRows = kBlockN, kStatRows = kBlockM;  // of an item; of a tile in the workspace
  static constexpr int kSlots = kTile.slots, kChunks = chunks_of(D), kConsumerWarps = 8;
  // The scheduler, which judges tiles, does not fit 40.
  static constexpr int kConsumerRegs = 224, kProducerRegs = 56;
  static constexpr int kKvBytes = kTile.kv_bytes(D), kQBytes = tile_bytes(kBlockM, D), kDsBytes = BwdTile::kDsBytes;
  static constexpr int kVAt = kKvBytes, kQAt = 2 * kKvBytes, kDoutAt = kQAt + kSlots * kQBytes;
  static constexpr int kDsAt = kDoutAt + kSlots * kQBytes, kDsSlots = BwdModTile::kDsSlots;
  static constexpr int kBiasAt = kDsAt + kTile.ds_bytes(), kBiasBytes = BwdModTile::bias_bytes(D);
  static constexpr int kStageAt = kBiasAt + kBiasBytes, kStageBytes = 4096;  // a consumer warp
  static constexpr int kStatsAt = kStageAt + kTile.stage_bytes(), kStatsBytes = kBlockM * 8;
  static constexpr int kSharedAt = kStatsAt + kTile.stats_bytes(), kSmemBytes = kModTile.smem_bytes(D);
  static constexpr int kItems = 2, kRingChunks = 2;
  static constexpr int kSteps = 2 * kSlots;  // consumers look back by one
  // Steps whose marks have a place: those of a step are made during the two steps before it. Where a bias has taken the
  // place that others have for them there is one, for visible scores, then dropped ones.
  static constexpr int kMarkSlots = kAdds ? 1 : 4, kMarkBytes = 4 * 32 * kConsumerWarps;
  static constexpr int kDrawAhead = 6;  // tiles of an item still to load; the next one's are to be judged as well
  static_assert(kTile.stage_bytes() == BwdModTile::kStageBytes && kBiasAt % 1024 == 0);
};

// What a consumer thread is told of its scores: bit mark_of(i) of a word is score i.
enum class Mark { kVisible, kDropped };

// Behind the tiles in shared memory, before the barriers.
template <typename T>
struct ModKeyShared {
  static constexpr int kMarkers = 3;  // warps that make marks
  DropKeys drop[T::kConsumersDraw ? T::kSlots : T::kDrops ? kMarkers : 1];  // of a slot's step, of a loader's
  BwdModItem items[T::kItems];
  BwdChunk chunks[T::kRingChunks];
  BwdStep steps[T::kSteps];
  uint32_t index;           // the scheduler's present one
  int items_found, chunks_found;
  alignas(4) unsigned char only_marks[T::kAdds ? T::kMarkBytes : 4];

  __device__ __forceinline__ unsigned char* marks(Mark which, int slot) {
    static_assert(2 * T::kMarkSlots * T::kMarkBytes <= T::kBiasBytes);
    if constexpr (T::kAdds) return only_marks;
    unsigned char* const place = reinterpret_cast<unsigned char*>(this) - T::kSharedAt + T::kBiasAt;
    return place + (2 * slot + static_cast<int>(which)) * T::kMarkBytes;
  }
};

// "full" ones complete by the bytes of copies or when what they announce is written, "empty" ones when all that read it
// have arrived.
template <typename T>
struct ModKeyBarriers {
  static constexpr int kKeys = 0, kQ = kKeys + 4, kDout = kQ + 2 * T::kSlots, kItem = kDout + 2 * T::kSlots;
  static constexpr int kChunk = kItem + 2 * T::kItems, kBias = kChunk + 2 * T::kRingChunks, kMarks = kBias + 2;
  static constexpr int kDs = kMarks + 2 * T::kMarkSlots;
  static constexpr int kEnding = kDs + T::kDsSlots, kCount = kEnding + 1;
  static constexpr int kAt = T::kSharedAt + static_cast<int>(sizeof(ModKeyShared<T>));
  static_assert(kAt % 8 == 0 && kAt + 8 * kCount <= T::kSmemBytes);

  uint32_t smem;
  __device__ uint32_t at(int index) const { return smem + kAt + 8 * index; }
  // K and V change places with every item: K of the next one comes to the place of V, which is free a step earlier.
  __device__ uint32_t place_full(int place) const { return at(kKeys + place); }
  __device__ uint32_t place_empty(int place) const { return at(kKeys + 2 + place); }
  __device__ uint32_t q_full(int slot) const { return at(kQ + slot); }
  __device__ uint32_t q_empty(int slot) const { return at(kQ + T::kSlots + slot); }
  __device__ uint32_t dout_full(int slot) const { return at(kDout + slot); }
  __device__ uint32_t dout_empty(int slot) const { return at(kDout + T::kSlots + slot); }
  __device__ uint32_t item_full(int place) const { return at(kItem + place); }
  __device__ uint32_t item_empty(int place) const { return at(kItem + T::kItems + place); }
  __device__ uint32_t chunk_full(int place) const { return at(kChunk + place); }
  __device__ uint32_t chunk_empty(int place) const { return at(kChunk + T::kRingChunks + place); }
  __device__ uint32_t bias_full() const { return at(kBias); }
  __device__ uint32_t bias_empty() const { return at(kBias + 1); }
  __device__ uint32_t marks_full(int slot) const { return at(kMarks + slot); }
  __device__ uint32_t marks_empty(int slot) const { return at(kMarks + T::kMarkSlots + slot); }
  __device__ uint32_t ds_full(int slot) const { return at(kDs + slot); }
  __device__ uint32_t item_ending() const { return at(kEnding); }

  __device__ void init() const {
    constexpr int kLoaders = 3;
    init_pairs(at(kKeys), 2, 1, T::kConsumerWarps);
    init_pairs(at(kQ), T::kSlots, 3, T::kConsumerWarps);  // Q, its statistics, its step
    init_pairs(at(kDout), T::kSlots, 1, T::kConsumerWarps);
    init_pairs(at(kItem), T::kItems, 1, T::kConsumerWarps + kLoaders);
    init_pairs(at(kChunk), T::kRingChunks, 1, kLoaders);
    init_pairs(at(kBias), 1, 1, T::kConsumerWarps);
    init_pairs(at(kMarks), T::kMarkSlots, ModKeyShared<T>::kMarkers, T::kConsumerWarps);
    for (int i = 0; i < T::kDsSlots; ++i) ptx::mbarrier_init(ds_full(i), T::kConsumerWarps);
    ptx::mbarrier_init(item_ending(), 1);
    ptx::fence_mbarrier_init();
  }
};

}  // namespace flash_ext::sm90
