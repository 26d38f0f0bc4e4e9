// What the roles of the sm90 backward with modifiers share: traits, shared memory, barriers, work tiles and their
// steps.
#pragma once

#include "../../common/dropout.cuh"
#include "../../common/modifiers.cuh"
#include "../bwd/config.cuh"
#include "../fwd_mod/config.cuh"
#include "tiles.h"

namespace flash_ext::sm90 {

struct BwdModMaps {
  BwdMaps plain;
  CUtensorMap bias;  // boxes of 64 queries and 128 bytes of keys
  CUtensorMap mask_tiles;  // boxes of the tiles of a step
};

// tanh(factor * x) = x * (c[0] + c[1] x^2 + c[2] x^4) for |x| <= limit.
struct KeyCap {
  static constexpr int kTerms = 3;
  float c[kTerms];
  float limit;        // below 0: never
  float factor_log2;  // 2 log2(e) factor
};

// Where the gradient of a bias that all rows share is summed, in fp32, from zeros: for each key of a batch entry, a
// head and a part of the steps.
struct KeySums {
  float* to = nullptr;  // null: not asked for
  int64_t batch_stride = 0, head_stride = 0, split_stride = 0;
  int cols = 0;

  __device__ float* of(int b, int h, int split) const {
    return to + b * batch_stride + h * head_stride + split * split_stride;
  }
};

struct BwdModArgs {
  BwdArgs plain;
  Modifiers m;
  KeyCap cap;
  Steps bias_steps, mask_steps;
  float unit;        // raw products, or tanh, times this are scores in log2
  bool adds_to_keys;  // something by distance, or a bias that all rows share
  bool brings_bias;  // by TMA; else all rows share a bias, if there is one
  bool brings_words;  // mask tiles, to steps that ask for no other test
  bool stores_dq;    // of sequences with all keys in one block; others, which packed calls may have, add it
  BiasGradient dbias;  // stored beside dS, which it is, where the plan says so; else out is null
  KeySums key_sums;
  Divisor splits;    // of the steps of a block of keys: neighbours among work tiles
};

// A work tile: a block of keys of one key head or (kByQueries) of queries of one head, as the producer leaves it to the
// others. It has at least one step.
struct BwdModWorkTile {
  Work w;  // block < 0: there is none any more
  SeqInfo seq;
  BlockRange blocks;  // tiles of queries that may be visited, the same for all query heads, or of keys
  int first_head;     // of the query heads that read it; its own
  int tile;           // first one of the first query head in the workspace
};

// Whether CTAs may share out the steps of a block of keys, each as a head of dk and dv of its own. Index of a work tile
// = tile | split, the last one fastest.
template <typename Args>
inline constexpr bool kSplitsSteps = requires(const Args& a) { a.splits; };

template <typename Args>
__device__ __forceinline__ uint32_t tile_of_index(const Args& a, uint32_t index) {
  if constexpr (kSplitsSteps<Args>) return divide(index, a.splits);
  return index;
}
template <typename Args>
__device__ __forceinline__ int split_of_index(const Args& a, uint32_t index) {
  if constexpr (kSplitsSteps<Args>) return static_cast<int>(index - tile_of_index(a, index) * a.splits.divisor);
  return 0;
}
// The first of a split's steps, of so many.
template <typename Args>
__device__ __forceinline__ int first_step_of(const Args& a, int split, int total) {
  if constexpr (kSplitsSteps<Args>) return static_cast<int>(divide(static_cast<uint32_t>(total * split), a.splits));
  return total * split;
}
template <typename Args>
__device__ __forceinline__ int gradients_head(const Args& a, const Work& w, int split) {
  if constexpr (kSplitsSteps<Args>) return w.h * static_cast<int>(a.splits.divisor) + split;
  return w.h;
}

// A step is a tile of queries of a query head that reads the work tile, or a tile of keys.
struct BwdStep {
  int block;
  uint32_t bits;  // head of the group << 10, for each warpgroup four bits of tests from kKeyTestsAt on, flags

  __device__ __forceinline__ int head() const { return static_cast<int>(bits >> 10); }
  __device__ __forceinline__ bool is_first() const { return (bits & kFirstStep) != 0; }
  __device__ __forceinline__ bool is_last() const { return (bits & kLastStep) != 0; }
  // A warpgroup's tests, or kSkipped.
  __device__ __forceinline__ uint32_t tests(int group) const { return bits >> (2 + 4 * group) & 15; }
  // Of either warpgroup.
  __device__ __forceinline__ bool has_tests() const { return (bits >> 2 & 0x77) != 0; }
  __device__ __forceinline__ bool tests_only_rows() const { return (bits >> 2 & 0x55) == 0; }
};
inline constexpr int kKeyTestsAt = 2, kHeadAt = 10;

// Steps that the scheduler found, on their way to the loaders.
struct BwdChunk {
  static constexpr int kCapacity = 16;
  BwdStep steps[kCapacity];
  int count;
  bool is_last;  // of its work tile
};

// What a kernel does beside hiding scores. Code that never runs costs all the same, in registers, in instructions that
// are not there when they are needed, and in the order that ptxas finds: a bias in fp32 has a kernel of its own
// (kAddingFloat), because to be able to store its gradient slows 16-bit ones. kPlain: no modifiers at all
// (bwd_split/kernel.cuh).
enum class ScoreKind { kHiding, kAdding, kAddingFloat, kCapping, kDropping, kAddingDropping, kPlain };

template <typename E, int D, ScoreKind kKind, bool kIsIndependent = false>
struct BwdModTraits {
  using Element = E;
  static constexpr bool kCaps = kKind == ScoreKind::kCapping;
  static constexpr bool kFloatBias = kKind == ScoreKind::kAddingFloat || kKind == ScoreKind::kAddingDropping;
  static constexpr bool kAdds = kKind == ScoreKind::kAdding || kFloatBias;
  static constexpr bool kDrops = kKind == ScoreKind::kDropping || kKind == ScoreKind::kAddingDropping;
  // Draws take a loader longer than a step: consumers make them, where there is room to exchange them.
  static constexpr bool kLoadersDraw = kKind == ScoreKind::kAddingDropping, kConsumersDraw = kDrops && !kLoadersDraw;
  static constexpr int kHeadDim = D;
  static constexpr bool kIndependent = kIsIndependent;
  static constexpr BwdModTile kModTile = kIndependent
                                             ? wide_bwd_mod_tile(kAdds ? BesideScores::kBias : BesideScores::kWords)
                                             : bwd_mod_tile(D, kFloatBias);
  static_assert(!kIndependent || (D == kWideModHeadDim && !kFloatBias));
  static constexpr BwdTile kTile = kModTile.plain();
  static constexpr int kBlockM = BwdModTile::kBlockM, kBlockN = kModTile.block_n(), kThreads = BwdModTile::kThreads;
  static constexpr bool kByQueries = false;
  static constexpr int kOwnRows = kBlockN, kStatRows = kBlockM;  // of a work tile; of a tile in the workspace
  static constexpr int kStages = kTile.stages, kChunks = chunks_of(D), kConsumerWarps = 8;
  // The scheduler, which classifies tiles, does not fit 40. Independent consumers need more than 224: it then keeps
  // some in memory, as the loaders do.
  static constexpr int kConsumerRegs = !kIndependent ? 224 : kKind == ScoreKind::kHiding ? 232 : 240;
  static constexpr int kProducerRegs = ptx::kRegisterBudget<3> - 2 * kConsumerRegs;
  static constexpr int kKvBytes = kTile.kv_bytes(D), kQBytes = tile_bytes(kBlockM, D), kDsBytes = BwdTile::kDsBytes;
  static constexpr int kVAt = kKvBytes, kQAt = 2 * kKvBytes, kDoutAt = kQAt + kStages * kQBytes;
  static constexpr int kDsAt = kDoutAt + kStages * kQBytes, kDsStages = kModTile.ds_stages;
  static constexpr int kBiasAt = kDsAt + kModTile.ds_bytes(), kBiasBytes = kModTile.bias_bytes;
  static constexpr int kStagingAt = kBiasAt + kBiasBytes, kStagingBytes = 4096;  // a consumer warp
  static constexpr int kStatsAt = kStagingAt + kTile.staging_bytes(), kStatsBytes = kBlockM * 8;
  static constexpr int kSharedAt = kStatsAt + kTile.stats_bytes(), kSmemBytes = kModTile.smem_bytes(D);
  static constexpr int kWorkStages = 2, kChunkStages = 2;
  static constexpr int kSteps = kIndependent ? kStages : 2 * kStages;  // cooperating consumers look back by one
  // Steps whose mask words have a place: those of a step are made during the two steps before it. Where a bias has
  // taken the place that others have for them there is one, for visible scores, then dropped ones.
  static constexpr int kMaskStages = kAdds ? 1 : 4, kMaskWordBytes = 4 * 32 * kBlockN / 16;
  static constexpr int kBiasPlaces = kIndependent ? 4 : 1;  // each for so many of a tile's keys
  // Whether words hide what lies behind the ends of sequences. With one place for words that is slow for few keys, so
  // consumers do it; at head_dim 128, and beside dropout, that would spill. Evidence: fused-bwd-mod.
  static constexpr bool kMakersHideEnds = !kAdds || kDrops || D > 64;
  // Tiles left to load when the next work tile is fetched: its tiles must be classified first.
  static constexpr int kFetchAhead = 6;
  static_assert(kBiasAt % 1024 == 0);
};

// What a consumer thread is told of its scores: score i is bit bit_of_score(i) of a word.
enum class WordKind { kVisible, kDropped };

// Behind the tiles in shared memory, before the barriers.
template <typename T>
struct ModKeyShared {
  static constexpr int kMaskMakers = 3;  // warps that make mask words
  DropKeys drop[T::kConsumersDraw ? T::kStages : T::kDrops ? kMaskMakers : 1];  // of a stage's step, of a loader's
  BwdModWorkTile work_tiles[T::kWorkStages];
  BwdChunk chunks[T::kChunkStages];
  BwdStep steps[T::kSteps];
  HeadDistances distances[T::kStages];  // of the heads of the steps there, in units of log2
  uint32_t index;  // the scheduler's present one
  int work_tiles_found, chunks_found;
  unsigned char split[T::kWorkStages];  // of the steps of a block of keys, that a work tile has
  alignas(128) unsigned char only_mask_words[T::kAdds ? T::kMaskWordBytes : 4];  // as TMA asks

  __device__ __forceinline__ unsigned char* mask_words(WordKind which, int stage) {
    static_assert(2 * T::kMaskStages * T::kMaskWordBytes <= T::kBiasBytes);
    if constexpr (T::kAdds) return only_mask_words;
    unsigned char* const place = reinterpret_cast<unsigned char*>(this) - T::kSharedAt + T::kBiasAt;
    return place + (2 * stage + static_cast<int>(which)) * T::kMaskWordBytes;
  }
};

// "full" ones complete by the bytes of copies or when what they announce is written, "empty" ones when all that read it
// have arrived.
template <typename T>
struct ModKeyBarriers {
  static constexpr int kKeys = 0, kQ = kKeys + 4, kDout = kQ + 2 * T::kStages, kWork = kDout + 2 * T::kStages;
  static constexpr int kChunk = kWork + 2 * T::kWorkStages, kBias = kChunk + 2 * T::kChunkStages,
                       kMask = kBias + 2 * T::kBiasPlaces;
  static constexpr int kDs = kMask + 2 * T::kMaskStages;
  static constexpr int kDsEmpty = kDs + T::kDsStages, kDsEmptyCount = T::kDsStages == 2 ? 2 : 0;
  static constexpr int kEnding = kDsEmpty + kDsEmptyCount, kCount = kEnding + 1;
  static constexpr int kAt = T::kSharedAt + static_cast<int>(sizeof(ModKeyShared<T>));
  static_assert(kAt % 8 == 0 && kAt + 8 * kCount <= T::kSmemBytes);

  uint32_t smem;
  __device__ uint32_t at(int index) const { return smem + kAt + 8 * index; }
  // K and V change places with every work tile: K of the next one comes to the place of V, which is free a step
  // earlier.
  __device__ uint32_t place_full(int place) const { return at(kKeys + place); }
  __device__ uint32_t place_empty(int place) const { return at(kKeys + 2 + place); }
  __device__ uint32_t q_full(int stage) const { return at(kQ + stage); }
  __device__ uint32_t q_empty(int stage) const { return at(kQ + T::kStages + stage); }
  __device__ uint32_t dout_full(int stage) const { return at(kDout + stage); }
  __device__ uint32_t dout_empty(int stage) const { return at(kDout + T::kStages + stage); }
  __device__ uint32_t work_full(int stage) const { return at(kWork + stage); }
  __device__ uint32_t work_empty(int stage) const { return at(kWork + T::kWorkStages + stage); }
  __device__ uint32_t chunk_full(int stage) const { return at(kChunk + stage); }
  __device__ uint32_t chunk_empty(int stage) const { return at(kChunk + T::kChunkStages + stage); }
  __device__ uint32_t bias_full(int place = 0) const { return at(kBias + place); }
  __device__ uint32_t bias_empty(int place = 0) const { return at(kBias + T::kBiasPlaces + place); }
  __device__ uint32_t mask_full(int stage) const { return at(kMask + stage); }
  __device__ uint32_t mask_empty(int stage) const { return at(kMask + T::kMaskStages + stage); }
  __device__ uint32_t ds_full(int stage) const { return at(kDs + stage); }
  __device__ uint32_t ds_empty(int stage) const { return at(kDsEmpty + stage); }
  __device__ uint32_t work_ending() const { return at(kEnding); }

  __device__ void init() const {
    constexpr int kLoaders = 3;
    init_pairs(at(kKeys), 2, 1, T::kConsumerWarps);
    init_pairs(at(kQ), T::kStages, 3, T::kConsumerWarps);  // Q, its statistics, its step
    init_pairs(at(kDout), T::kStages, 1, T::kConsumerWarps);
    init_pairs(at(kWork), T::kWorkStages, 1, T::kConsumerWarps + kLoaders);
    init_pairs(at(kChunk), T::kChunkStages, 1, kLoaders);
    init_pairs(at(kBias), T::kBiasPlaces, 1, T::kIndependent ? T::kConsumerWarps / 2 : T::kConsumerWarps);
    init_pairs(at(kMask), T::kMaskStages, ModKeyShared<T>::kMaskMakers, T::kConsumerWarps);
    for (int i = 0; i < T::kDsStages; ++i) ptx::mbarrier_init(ds_full(i), T::kConsumerWarps);
    for (int i = 0; i < kDsEmptyCount; ++i) ptx::mbarrier_init(ds_empty(i), T::kConsumerWarps);
    ptx::mbarrier_init(work_ending(), 1);
    ptx::fence_mbarrier_init();
  }
};

}  // namespace flash_ext::sm90
