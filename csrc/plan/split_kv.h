// Whether a forward of few queries shares the keys of a head out over the GPU, and into how many parts. Functions of
// shapes and the device alone, so the same call always adds in the same order. No CUDA, no torch.
#pragma once

#include <algorithm>
#include <cmath>

#include "../heuristics.h"
#include "../kv_splits.h"
#include "../paths.h"

namespace flash_ext {

// Time below is in microseconds of an H200 beyond what every call takes, after other kernels have run (evidence:
// split-kv). Memory sets the scale: a block of 64 keys at head_dim 128 takes 1 us at a multiprocessor's share of the
// bandwidth, one of another size `weight`. On other GPUs the proportions count.

// What a CTA takes alone, as a share of a multiprocessor's time. Over a cache it waits longer for each tile.
inline constexpr double kAlone = 0.6, kAloneOverCache = 1.;

// How long `part` blocks take on a multiprocessor with so many CTAs. 16 rows are bound by memory, or, with less than a
// CTA for each multiprocessor, by latency; 64 rows by their products and exponentials.
inline double time_of_part(int64_t part, double ctas, int rows, double weight, double alone) {
  const double blocks = static_cast<double>(part);
  if (rows <= 16) return blocks * weight * std::max(ctas, alone);
  return blocks * std::max(0.37 + 0.63 * weight, 1.1 * weight - 0.1) * (0.6 + std::max(ctas, 1.));
}

struct PartsOfKeys {
  int parts;
  double time;
};

// Into how many parts keys are split so that it takes the least time: a wave of CTAs costs 1.5 beside its keys, adding
// up 3, 1 / 16 a part (of 64 rows 1 / 5) and the traffic of partial results, `result_bytes` a part. Candidates fill
// half of the multiprocessors, all of them, one and a half times as many, ...; up to 4 parts of 16 rows even out the
// last one of a few waves.
inline PartsOfKeys best_parts(int64_t items, int64_t blocks, int rows, double weight, double result_bytes, int sms,
                              int ctas_per_sm, double alone = kAlone) {
  constexpr int64_t kLeastBlocks = 2, kHalves = 8, kFewParts = 4, kFewWaves = 4;
  constexpr double kBytesPerUs = 4e6;
  const int64_t most = std::clamp<int64_t>(blocks / kLeastBlocks, 1, kMaxSplits);
  const int64_t capacity = int64_t{1} * sms * ctas_per_sm;
  PartsOfKeys best{1, 0.};
  const bool is_uneven = rows <= 16 && ctas_per_sm > 1 && items <= kFewWaves * capacity;
  const int64_t candidates = kHalves + (is_uneven ? kFewParts : 0);
  for (int64_t i = 0; i <= candidates; ++i) {
    const int64_t wanted = std::clamp<int64_t>(i <= kHalves ? i * sms / (2 * items) : i - kHalves, 1, most);
    const int64_t part = (blocks + wanted - 1) / wanted, parts = (blocks + part - 1) / part;
    const int64_t waves = items * parts / capacity, rest = items * parts % capacity;
    const double keys = static_cast<double>(waves) * time_of_part(part, ctas_per_sm, rows, weight, alone) +
                        (rest > 0 ? time_of_part(part, static_cast<double>(rest) / sms, rows, weight, alone) : 0.);
    const double of_part = (rows <= 16 ? 1. / 16 : 1. / 5) + 2 * result_bytes / kBytesPerUs;
    const double merge = 3. + static_cast<double>(parts) * of_part;
    const double time = keys + 1.5 * static_cast<double>(waves + (rest > 0)) + (parts > 1 ? merge : 0.);
    if (i == 0 || time < best.time) best = {static_cast<int>(parts), time};
  }
  return best;
}

struct FewQueries {
  int64_t sequences;
  int64_t rows;  // packed rows of a key head, the average of packed sequences
  int64_t keys;  // that they may see, likewise
  int64_t tiles;  // of 128 queries, all heads and sequences: what the other kernels launch
};

inline FewQueries few_queries(const Problem& p) {
  // Packed sequences without queries are none: what lies between the used parts of a cache may be called one.
  const int64_t group = p.num_heads / p.num_heads_k;
  const int64_t batch = std::max<int64_t>(1, p.is_varlen() ? std::min<int64_t>(p.batch, p.total_q) : p.batch);
  const int64_t queries = p.is_varlen() ? (p.total_q + batch - 1) / batch : p.seqlen_q;
  int64_t keys = p.is_varlen() ? (p.total_k + batch - 1) / batch : p.seqlen_k;
  if (p.window_left >= 0 && p.window_right >= 0) {
    keys = std::min(keys, int64_t{0} + p.window_left + p.window_right + queries);
  }
  return {batch, queries * group, keys, (queries + 127) / 128 * batch * p.num_heads};
}

// How long the other forwards take: tiles of queries in waves, each along all keys, but no less than memory takes.
inline double time_unsplit(const FewQueries& few, int num_heads_k, double weight, int sms) {
  const double blocks = static_cast<double>((few.keys + 63) / 64);
  const double waves = static_cast<double>((few.tiles + sms - 1) / sms);
  const double memory = weight * blocks * static_cast<double>(few.sequences * num_heads_k) / sms;
  return std::max(waves * blocks * (0.42 + 0.4 * weight), 1.1 * memory);
}

// What they take to begin, where a kernel for 64 rows does not take as long: they have two or three times as much code,
// which comes from memory too when other kernels have run in between. The smaller ones for short sequences have less.
inline constexpr double kStart = 4., kStartOfSmall = 2.;

// A call of fewer keys is one for short sequences.
inline constexpr int64_t kLeastKeysOfLong = 128;

// Into how many parts, from one dense sequence and the query heads of one key head: neither the batch nor the number of
// heads or multiprocessors may change how results are rounded. Packed sequences, of which only averages are known here,
// have no parts. Evidence: split-kv.
inline int invariant_parts(const Problem& p, const FewQueries& few) {
  constexpr int64_t kMostRows = 64, kLeastKeys = 1024, kKeysOfPart = 512;
  if (p.is_varlen() || few.rows > kMostRows || few.keys < kLeastKeys) return 0;
  return static_cast<int>(std::clamp<int64_t>((few.keys + kKeysOfPart - 1) / kKeysOfPart, 1, kMaxSplits));
}

// rows == 0 where keys are not to be split. `wanted`: Constraints::kv_splits. `start`: of the other forward.
inline SplitGrid make_split_grid(const Problem& p, const DeviceInfo& d, std::optional<int> wanted,
                                 double start = kStart) {
  SplitGrid g;
  const int64_t total_rows = p.total_q * p.num_heads;
  if (wanted == 0 || total_rows <= 0 || p.total_k <= 0 || total_rows > (1 << 30)) return g;
  const FewQueries few = few_queries(p);
  const int invariant = d.batch_invariant && !wanted ? invariant_parts(p, few) : -1;
  if (invariant == 0) return g;
  const int size = padded_split_head_dim(p.head_dim, p.head_dim_v);
  const SplitTile t = split_tile(size, few.rows <= 16 ? 16 : 64);
  const int group = p.num_heads / p.num_heads_k;
  const int64_t tiles = (few.rows + t.rows - 1) / t.rows;
  const int64_t slots = p.is_varlen() ? packed_slots(p.total_q * group, p.batch, t.rows) : tiles * p.batch;
  const int ctas_per_sm = std::clamp((d.smem_per_block + 1024) / (t.smem_bytes(size) + 1024), 1, 3);
  const int64_t items = std::max<int64_t>(1, tiles * few.sequences * p.num_heads_k);
  const double weight = std::max(p.head_dim + p.head_dim_v, 128) / 256.;  // tiles have 64 columns at least
  const double result_bytes = 4. * static_cast<double>(total_rows) * p.head_dim_v;
  const int sms = std::max(1, d.num_sms);
  const PartsOfKeys best = best_parts(items, (few.keys + 63) / 64, t.rows, weight, result_bytes, sms, ctas_per_sm);
  const bool begins_early = t.rows <= 16 || (size <= 64 && few.rows <= 64);
  const int64_t least_keys = t.rows <= 16 ? 33 : kLeastKeysOfLong;
  const double unsplit = time_unsplit(few, p.num_heads_k, weight, sms) + (begins_early ? start : 0.);
  const double gain = few.keys < least_keys ? 0. : unsplit / best.time;
  if (!wanted && invariant < 0 && gain <= 1.) return g;
  const int splits = wanted ? std::clamp(*wanted, 1, kMaxSplits) : invariant > 0 ? invariant : best.parts;
  if (slots * p.num_heads_k * splits > INT32_MAX) return g;
  g.rows = t.rows;
  g.gain = !wanted && invariant < 0 ? gain : HUGE_VAL;
  g.splits = splits;
  g.ctas = slots * p.num_heads_k * splits;
  g.total_rows = total_rows;
  g.pitch = (p.head_dim_v + 3) / 4 * 4;
  g.stats_bytes = (8 * splits * total_rows + 15) / 16 * 16;
  g.heads_k = Divisor(static_cast<uint32_t>(p.num_heads_k));
  g.parts = Divisor(static_cast<uint32_t>(splits));
  g.tiles = Divisor(static_cast<uint32_t>(tiles));
  g.group = Divisor(static_cast<uint32_t>(group));
  g.heads = Divisor(static_cast<uint32_t>(p.num_heads));
  g.queries = Divisor(static_cast<uint32_t>(std::max(1, p.seqlen_q)));
  return g;
}

}  // namespace flash_ext
