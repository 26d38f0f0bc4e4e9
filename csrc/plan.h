// What runs: plan(Request, DeviceInfo, Arch) -> Plan, a pure host function without CUDA or torch. The rows of the
// tables (plan/fwd.cpp, plan/bwd.cpp) are in order: the first one that supports a request and is preferred for it runs.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "fp8.h"
#include "kv_cache.h"
#include "kv_splits.h"
#include "modifiers.h"
#include "params.h"
#include "paths.h"
#include "short_tiles.h"
#include "sm90/bwd/tiles.h"

namespace flash_ext {

enum class Direction : uint8_t { kForward, kBackward };
enum class Arch : uint8_t { kSm80, kSm90 };

// What is asked. Pointers inside are looked at for null only.
struct Request {
  Direction direction = Direction::kForward;
  Problem problem;
  const Modifiers* modifiers = nullptr;  // null: the plain operators
  Operands operands = Operands::k16Bit;  // of forwards without modifiers
  bool has_own_lengths = false;  // of them in fp8: how many keys a sequence has is on the device alone
  bool deterministic = false;  // dq, dk and dv repeat bit by bit
  bool has_tma_out = true;  // of backwards: TMA reads `out`
  bool wide = false;  // of backwards: dq, dk and dv are fp32
  // Of backwards with modifiers: whether dq, dk and dv are wanted; gradients of a bias and of slopes, shapes only,
  // without splits.
  bool need_qkv = true;
  const BiasGradient* dbias = nullptr;
  const BiasGradient* dslopes = nullptr;
  Constraints constraints = {};
  // Of forwards over a cache; bounds on the lengths of each sequence where the caller knows some, else 0.
  const KvCache* cache = nullptr;
  CacheType cache_type = CacheType::k16Bit;
  bool has_slot_factors = false;  // of k or v, where those have 8 bits
  bool has_latents = false;  // v is the first columns of k
  int64_t most_queries = 0, most_keys = 0;
};

// Which measurement justifies a row: the same ids head the lines of the table "Evidence" in docs/benchmarks.md. kNone:
// no measurement chooses the row, which takes what those above it have left. A row with a preference has an id.
enum class Evidence : uint8_t {
  kNone,
  kShort,
  kSplitKv,
  kGrid,
  kM64,
  kM192,
  kMaskedM192,
  kMaskedVariants,
  kSplitBwdWide,
  kSplitBwdShort,
  kWholeKeys,
  kOrderedShort,
  kDqPool,
  kSplitBwdMod,
  kFusedBwdMod,
  kFwdParts,
  kPaged,
};
std::string_view name_of(Evidence e);

// One member for each family of __global__ functions.
enum class KernelId : uint8_t {
  kNone,
  // portable
  kFwd80,
  kFwdShort80,
  kFwdMod80,
  kFwdSplitKv80,
  kFwdCombine80,
  kFwdSplitCached80,
  kFwdMergeCached80,
  kFwdCached80,
  kRowStats80,
  kBwd80,
  kBwdShort80,
  kBwdMod80,
  kBwdDq80,
  kBwdDqMod80,
  kDqConvert80,
  kDbias80,
  // Hopper
  kFwd90,
  kFwdFp890,
  kFwdMod90,
  kRowStatsAndZero90,
  kRowStats90,
  kBwdFused90,
  kDqConvert90,
  kBwdDkdv90,
  kBwdDq90,
  kBwdDkdvShort90,
  kBwdFusedMod90,
  kBwdDkdvMod90,
  kBwdDqMod90,
  kDbias90,
  // passes
  kSumParts,
  // Hopper
  kFwdCached90,
  kFwdPacked90,
  kFwdParts90,
  // portable
  kFwdSplitMod80,
  kFwdSplitCachedMod80,
  kFwdSplitQuantized80,
  // passes
  kAlignBias,
  // Hopper
  kFwdPackedQuantized90,
  kFwdLatent90,
  kFwdPackedMod90,
  kFwdPackedQuantizedMod90,
};

// How a backward over keys gives its part of dq: added to memory in any order or in a fixed one, added in the L2 cache,
// stored because it is all there is, made by a kernel of its own, or added in any order by CTAs that divide work tiles.
enum class DqMode : uint8_t { kNone, kAtomic, kOrdered, kPool, kStored, kElsewhere, kDivided };

// What an instance is compiled for beside its sizes, mostly modifiers. A kernel has those that it needs.
enum class ScoreVariant : uint8_t {
  kPlain,
  kHide,
  kDrop,
  kSlopes,
  kCap,
  kExponents,
  kBias,
  kLooseBias,
  kFloatBias,
  kWords,
  kAdd,
  kAddFloat,
  kAddDrop,
  kChange,
  kAll,
  kMixed,  // of the fp8 forward: q and k have 16 bits
  kHalf,  // of the fp8 forward: scores are fp16
  kStretches,  // of the portable forward: very many keys
  kLatents,  // of the kernel that adds up parts of a cache: rows of up to 512 columns
};

// One launch: the instance (kernel, compiled head dims, variant) and its shape. A launcher adds pointers to it and
// chooses nothing. Tiles are 0 in passes, shared memory is 0 where it is static.
struct Launch {
  KernelId kernel = KernelId::kNone;
  int16_t head_dim = 0, head_dim_v = 0;
  SmemClass smem_class = SmemClass::kSmall;  // of portable kernels
  ScoreVariant variant = ScoreVariant::kPlain;
  DqMode dq = DqMode::kNone;
  int block_m = 0, block_n = 0, stages = 0, threads = 0, smem_bytes = 0;
  int64_t ctas = 0;
  int64_t tiles = 0;  // work tiles; more than ctas where a kernel is persistent
  bool dynamic = false;  // tiles are fetched from a counter, else tile i goes to CTA i modulo their number
  bool pdl = false;  // programmatic launch: begins before the kernel in front of it has ended
  Grid grid;  // the order of work tiles; not of passes, short and split-KV kernels
  int unit_heads = 1;  // Hopper, short packed sequences: heads of a tile that are given out together
  bool makes_stats = false;  // Hopper, backwards: row statistics, for which there is no pass
  bool zeroes_half = false;  // Hopper, the pass that zeroes dq: of 64 columns the first 32, all that are added to
  int rotate = 0;  // Hopper: tiles by which a block of keys starts its walk later than the block before
  int bias_rows = 0;  // Hopper, forwards: of a tile of bias that TMA brings; 0: there is none
  RowRange rows;  // of forwards over a cache: which sequences
  CacheType cache_type = CacheType::k16Bit;  // of the same
};

// A part of the workspace. Without bytes it is not there, and nobody has a pointer to it.
struct Part {
  int64_t offset = 0, bytes = 0;
  explicit operator bool() const { return bytes > 0; }
};
struct Workspace {
  Part tile_counters;  // 16 bytes for each kernel that fetches its tiles
  Part kv_partials;  // of parts of the keys: maxima and sums, then outputs
  Part kv_stretches;  // forwards over very many keys: output, maximum and sum between stretches
  Part stats_portable;  // fp32 pairs [h][rows] (lse log2 e, delta); read by gradients of biases, slopes and sinks
  Part row_stats;  // the same by tiles of queries, Hopper; read by gradients of biases where there are no others
  Part dq_semaphore;  // ordered dq: a word for each tile of queries
  Part pool_words;  // L2 dq pool: what CTAs tell each other
  Part dq_accum;  // fp32
  Part dk_partials, dv_partials;  // fp32, of each GQA or query split
  Part stream_k_sums, stream_k_words;  // DqMode::kDivided: fp32, and a word for each work tile that two CTAs divide
  Part dbias_partials, dslopes_partials;  // fp32, where what is summed over is divided
  Part bias_rows;  // the copy of a bias that is_unaligned
  int64_t bytes = 0;

  static constexpr int64_t kAlignment = 128;  // a line of the L2 cache; TMA wants 16
  Part add(int64_t size) {
    if (size <= 0) return {};
    const int64_t at = (bytes + kAlignment - 1) / kAlignment * kAlignment;
    bytes = at + size;
    return {at, size};
  }
};

struct Plan {
  std::string_view row;  // of the table; empty where no row supports the request
  Arch arch = Arch::kSm80;
  Evidence evidence = Evidence::kNone;
  int kv_splits = 1, gqa_splits = 1;
  int q_splits = 1;  // of the queries of a block of keys
  int dbias_splits = 1, dslopes_splits = 1;
  bool dbias_with_dk = false;  // the kernel that makes dk stores the gradient of the bias
  bool zeroes_dbias = false;  // and leaves out tiles that nothing sees
  bool zeroes_dq = false;  // of DqMode::kStored: no step visits some tiles of queries
  std::array<Launch, 10> launches{};  // in order
  int num_launches = 0;
  int main = 0;  // the launch whose tile is printed first
  SplitGrid split_kv;  // of forwards that split the keys
  KvCacheGrid kv_cache;  // of forwards over a cache
  ShortGrid short_heads;  // of the kernels for short sequences
  sm90::DqPool dq_pool;  // of DqMode::kPool
  Workspace workspace;

  std::span<const Launch> steps() const { return {launches.data(), static_cast<size_t>(num_launches)}; }
  const Launch& main_launch() const { return launches[static_cast<size_t>(main)]; }
  Launch& push(const Launch& l) { return launches[static_cast<size_t>(num_launches++)] = l; }
};

Plan plan(const Request& request, const DeviceInfo& device, Arch arch);

// All rows of the tables, in order.
struct RowName {
  Arch arch;
  std::string_view name;
  Evidence evidence;
};
std::vector<RowName> row_names();

// e.g. "fwd_sm90"
const char* stem_of(KernelId k);
// e.g. "fwd_sm90_hd128_m128": the kernel of one launch, and of a plan, whose second kernel for dq is part of the name.
std::string name_of(const Launch& l);
std::string name_of(const Plan& p);

}  // namespace flash_ext
