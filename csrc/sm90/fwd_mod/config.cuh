// What the roles of the sm90 forward with modifiers share: traits, shared memory, barriers, steps.
#pragma once

#include "../../common/dropout.cuh"
#include "../../common/modifiers.cuh"
#include "../fwd/config.cuh"

namespace flash_ext::sm90 {

struct FwdModMaps {
  FwdMaps plain;
  CUtensorMap bias;  // boxes of 64 keys and the queries of a tile, or a single row that all share
};

// cap * tanh(factor * x) = x * (c[0] + c[1] x^2 + ...) for |x| <= limit.
template <int kTermCount>
struct SeriesOf {
  static constexpr int kTerms = kTermCount;
  float c[kTerms];
  float limit;  // below 0: never
};
using CapSeries = SeriesOf<6>;
using ShortCapSeries = SeriesOf<3>;

struct FwdModArgs {
  FwdArgs plain;
  Modifiers m;
  CapSeries cap;             // in natural units, or with kLog2Maxima in those of log2, as the other
  ShortCapSeries short_cap;
  float scale_log2;          // from raw products to units of log2
  Steps bias_steps;
  int bias_rows;  // of a staged tile of bias: those of a tile of queries, or 1; 0: bias is read from global memory
  int q_stages;   // 1 where tiles of bias take the place of the second one and of the staging
};

// What a kernel does beside hiding scores. Code that never runs costs all the same, in registers and in the order that
// ptxas finds. Evidence: masked-variants. kExponents knows slopes or a softcap, kBias a bias of 16 bits that TMA
// brings, kLooseBias a loose one (loose_bias.cuh), kFloatBias one in fp32, all without dropout or one of the others.
// kM192Hides hides like kHides in the plain kernel's tiles of 192 queries (m192), and does to whole tiles what that
// kernel does. The others of m192 have slopes, a softcap, dropout, one of the three kinds of bias or words of a bool
// mask besides, and need them.
enum class FwdModKind {
  kHides,
  kDrops,
  kAll,
  kExponents,
  kBias,
  kLooseBias,
  kFloatBias,
  kM192Hides,
  kM192Slopes,
  kM192Cap,
  kM192Drops,
  kM192Bias,
  kM192LooseBias,
  kM192FloatBias,
  kM192Words
};

// Whether tiles of a bias are brought, and how many places for Q that leaves; most kinds know.
template <typename T>
__device__ __forceinline__ bool has_bias(const FwdModArgs& a) {
  return T::kBringsBias || (T::kKind == FwdModKind::kAll && a.bias_rows > 0);
}
template <typename T>
__device__ __forceinline__ int q_stages(const FwdModArgs& a) {
  if (T::kKind == FwdModKind::kAll) return a.q_stages;
  return T::kBringsBias && !T::kModTile.bias_has_place ? 1 : T::kQStages;
}

// A work tile: queries of one head.
struct ModWorkTile {
  Work w;
  SeqInfo seq;
  float sink;           // -inf: none
  BlockRange blocks;    // tiles of keys that may be visited
  int turn;             // they are visited from blocks.end - 1 - turn down, those above it last
  const uint32_t* mask;  // its words of the head's first row
};
struct LooseWorkTile : ModWorkTile {
  int behind;  // its first row is: elements_behind()
};
struct DropWorkTile : ModWorkTile {
  DropKeys drop;
};
struct DistanceItem : ModWorkTile {
  HeadDistances distances;  // in units of log2
};
struct SlopeWorkTile : DistanceItem {
  int centre;         // the first row's place among the keys
  float raw_slope;    // in units of raw products
  uint32_t terms[2];  // its slope as a sum: pairs of bf16
};

// A step is a tile of keys of a work tile: the tile, and in `flags` what concerns all warpgroups, above it four bits
// for each one's tests.
struct Step {
  int tile;
  uint32_t flags;
};
inline constexpr uint32_t kFirstStep = 1, kLastStep = 2, kNoStep = 4, kListed = 1 << 16;
inline constexpr int kTestsAt = 3;
inline constexpr uint32_t kSkipped = 8;  // instead of a warpgroup's tests: its rows see nothing of the tile

// A step as one warpgroup keeps it, in one register: there are less than 2^24 tiles.
struct OwnStep {
  uint32_t bits;  // tile << 7 | the warpgroup's tests << 3 | flags

  __device__ __forceinline__ void take(const Step& step, int group) {
    bits = static_cast<uint32_t>(step.tile) << 7 | (step.flags >> (4 * group) & 15u << kTestsAt) | (step.flags & 7);
  }
  __device__ __forceinline__ int tile() const { return static_cast<int>(bits >> 7); }
  __device__ __forceinline__ TileTests tests() const { return static_cast<TileTests>(bits >> kTestsAt & 7); }
  __device__ __forceinline__ bool is_seen() const { return (bits & kSkipped << kTestsAt) == 0; }
  __device__ __forceinline__ bool is_first() const { return (bits & kFirstStep) != 0; }
  __device__ __forceinline__ bool is_last() const { return (bits & kLastStep) != 0; }
};

// Steps that the scheduler found, on their way to the loader.
struct Chunk {
  static constexpr int kCapacity = 16;
  Step steps[kCapacity];
  int count;  // 0: there are no work tiles any more
  bool is_last;  // of its work tile
};

// What weights are made of: raw products of Q and K as in the plain kernel, scores that were changed, or exponents: in
// units of log2 and less the maxima there are.
enum class ScoreUnits { kRaw, kChanged, kExponents };

// kIsWide: tiles of 192 queries have 128 keys.
template <typename E, int D, int Dv, FwdModKind Kind, bool kIsWide = false>
struct FwdModTraits {
  using Element = E;
  static constexpr FwdModKind kKind = Kind;
  static constexpr bool kM192 = Kind >= FwdModKind::kM192Hides;  // tiles of 192 queries instead of 128
  static constexpr bool kSlopesInProduct = Kind == FwdModKind::kM192Slopes;  // see fwd_mod/slopes.cuh
  static constexpr bool kLoose = Kind == FwdModKind::kLooseBias || Kind == FwdModKind::kM192LooseBias;
  static constexpr bool kFloat = Kind == FwdModKind::kFloatBias || Kind == FwdModKind::kM192FloatBias;
  static constexpr bool kBringsBias = Kind == FwdModKind::kBias || Kind == FwdModKind::kM192Bias || kLoose || kFloat;
  static constexpr bool kBringsWords = Kind == FwdModKind::kM192Words, kBrings = kBringsBias || kBringsWords;
  static constexpr bool kInParts =
      kBrings && Kind != FwdModKind::kBias;  // what is beside the scores comes 64 keys at a time
  static constexpr bool kLoadsBeside = kM192 && kBrings;  // by a warp of its own
  static constexpr bool kMaySlope = Kind == FwdModKind::kExponents || kSlopesInProduct;
  static constexpr bool kDrops =
      Kind == FwdModKind::kDrops || Kind == FwdModKind::kAll || Kind == FwdModKind::kM192Drops;
  static constexpr bool kMakesExponents =
      Kind == FwdModKind::kExponents || Kind == FwdModKind::kM192Cap || (D == 256 && Kind == FwdModKind::kHides);
  static constexpr ScoreUnits kUnits = kMakesExponents         ? ScoreUnits::kExponents
                                       : kM192 && !kBringsBias ? ScoreUnits::kRaw
                                                               : ScoreUnits::kChanged;
  static constexpr bool kLog2Maxima = kUnits != ScoreUnits::kChanged;
  // Registers are short: bits of masks are made behind the changes instead of while S is computed.
  static constexpr bool kLateBits = Kind == FwdModKind::kAll || D == 256;
  // Scores change while products run.
  static constexpr bool kChanges = kBringsBias || Kind == FwdModKind::kAll;
  using WorkTile = std::conditional_t<
      kDrops, DropWorkTile,
      std::conditional_t<
          kSlopesInProduct, SlopeWorkTile,
          std::conditional_t<kMaySlope, DistanceItem, std::conditional_t<kLoose, LooseWorkTile, ModWorkTile>>>>;
  static constexpr int kHeadDim = D, kHeadDimV = Dv;
  static constexpr FwdModTile tile() {
    if (kBringsWords) return m192_words_tile(D);
    if (kLoose) return kM192 ? m192_loose_bias_tile(D) : loose_bias_tile(D);
    if (kFloat) return kM192 ? m192_float_bias_tile(D) : float_bias_tile(D);
    if (kM192) return kBringsBias ? m192_bias_tile(D, kIsWide) : m192_mod_tile(D, kIsWide);
    return fwd_mod_tile(D);
  }
  static constexpr FwdModTile kModTile = tile();
  static constexpr FwdTile kTile = kModTile.plain();
  static constexpr int kBlockN = kTile.block_n, kConsumers = kTile.consumers, kBlockM = kTile.block_m();
  static constexpr int kKvStages = kTile.kv_stages, kQStages = kTile.q_stages, kThreads = kTile.threads();
  static constexpr bool kStaged = kModTile.staged;
  static constexpr int kChunkColumns = 64, kChunks = chunks_of(D), kChunksV = chunks_of(Dv),
                       kStagingChunks = kTile.staging_chunks(Dv);
  static_assert(kIsWide == (kM192 && kBlockN == 128));
  // The scheduler, which classifies tiles, does not fit 40. Where consumers need 160 it keeps some 100 bytes in memory.
  // With tiles of 64 keys, which need none, these calls take 1.1 to 1.25 of the time: masked-m192.
  static constexpr int kConsumerRegs = kIsWide ? 160 : kM192 ? 152 : 224, kProducerRegs = kIsWide ? 32 : 56;
  static constexpr int kClassifierLanes = kConsumers == 2 ? 2 : 4;  // lanes a tile, one for each warpgroup's rows
  static constexpr int kTilesAtOnce = 32 / kClassifierLanes;
  static_assert(kTilesAtOnce <= Chunk::kCapacity);
  static constexpr int kKBytes = tile_bytes(kBlockN, D), kVBytes = tile_bytes(kBlockN, Dv);
  static constexpr int kStageBytes = kKBytes > kVBytes ? kKBytes : kVBytes, kQBytes = tile_bytes(kBlockM, D);
  static constexpr int kQAt = kKvStages * kStageBytes, kStagingAt = kQAt + kQStages * kQBytes;
  static constexpr int kStagingEnd = kStagingAt + kModTile.staging_bytes(Dv);
  static constexpr int kBiasAt = kModTile.bias_has_place ? kStagingEnd : kQAt + kQBytes;
  static constexpr int kBiasPlaces = kModTile.bias_places, kBiasBytes = kModTile.bias_bytes();
  static constexpr int kBiasPieces = kInParts ? kBlockN / FwdModTile::kPartKeys : 1;  // of a tile
  static constexpr int kBiasEnd = kBiasAt + kBiasPlaces * kBiasBytes;
  static constexpr int kNumbersAt = kBiasEnd > kStagingEnd ? kBiasEnd : kStagingEnd;  // of keys, for slopes
  static constexpr int kSharedAt = kNumbersAt + (kSlopesInProduct ? 16 * kBlockN : 0);
  static constexpr int kSmemBytes = kModTile.smem_bytes(D, Dv);
  // The scheduler writes work tile i + 1 when every consumer has asked Q of work tile i - 2 for its last scores; the
  // slowest may then still store the output of work tile i - 3. A power of 2, for the consumers' count.
  static constexpr int kWorkStages = 8;
  static constexpr int kChunkStages = 4;
  static_assert(kModTile.bias_has_place || (kQStages == 2 && kBiasEnd <= kStagingEnd));
  static_assert(kM192 || (kKvStages & (kKvStages - 1)) == 0);
  static_assert(kStageBytes % 1024 == 0 && kQBytes % 1024 == 0, "swizzled tiles start on 1024 bytes");
};

// Behind the tiles in shared memory, before the barriers.
template <typename T>
struct ModShared {
  typename T::WorkTile work_tiles[T::kWorkStages];
  Chunk chunks[T::kChunkStages];
  Step steps[T::kKvStages];  // of the K in that stage of the ring
  uint32_t index;            // the scheduler's present one
};

// As Barriers of the plain forward; see there.
template <typename T>
struct ModBarriers {
  static constexpr int kKv = 0, kQ = kKv + 2 * T::kKvStages, kChunk = kQ + 2 * T::kQStages;
  static constexpr int kBias = kChunk + 2 * T::kChunkStages, kEnding = kBias + 2 * T::kBiasPlaces, kCount = kEnding + 1;
  static constexpr int kAt = T::kSharedAt + static_cast<int>(sizeof(ModShared<T>));
  static_assert(kAt % 8 == 0 && kAt + 8 * kCount <= T::kSmemBytes);

  uint32_t smem;
  __device__ uint32_t at(int index) const { return smem + kAt + 8 * index; }
  __device__ uint32_t kv_full(int stage) const { return at(kKv + stage); }
  __device__ uint32_t kv_empty(int stage) const { return at(kKv + T::kKvStages + stage); }
  __device__ uint32_t q_full(int stage) const { return at(kQ + stage); }
  __device__ uint32_t q_empty(int stage) const { return at(kQ + T::kQStages + stage); }
  __device__ uint32_t chunk_full(int stage) const { return at(kChunk + stage); }
  __device__ uint32_t chunk_empty(int stage) const { return at(kChunk + T::kChunkStages + stage); }
  __device__ uint32_t bias_full(int stage) const { return at(kBias + stage); }
  __device__ uint32_t bias_empty(int stage) const { return at(kBias + T::kBiasPlaces + stage); }
  __device__ uint32_t work_ending() const { return at(kEnding); }

  __device__ void init() const {
    init_pairs(at(kKv), T::kKvStages, 1, 4 * T::kConsumers);
    init_pairs(at(kQ), T::kQStages, 1, 4 * T::kConsumers);
    init_pairs(at(kChunk), T::kChunkStages, 1, T::kLoadsBeside ? 2 : 1);
    init_pairs(at(kBias), T::kBiasPlaces, 1, 4 * T::kConsumers);
    ptx::mbarrier_init(work_ending(), 1);
    ptx::fence_mbarrier_init();
  }
};

// Stage and phase of the n-th use of a ring whose stages are a power of 2.
__device__ __forceinline__ int stage_of(int n, int stages) { return n & (stages - 1); }
__device__ __forceinline__ uint32_t phase_of(int n, int stages) { return (n & stages) != 0; }

}  // namespace flash_ext::sm90
