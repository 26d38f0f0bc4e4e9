// How the keys of sequences in a cache are divided into parts, by their lengths, which the device alone knows.
#pragma once

#include "../kv_cache.h"
#include "attn_mod.cuh"
#include "seqlen.cuh"

namespace flash_ext {

// Blocks of keys of a tile of rows, in `count` parts of `each`.
struct KeyParts {
  int first, blocks, each, count;

  __device__ BlockRange part(int i) const { return {first + i * each, min(first + (i + 1) * each, first + blocks)}; }
};

// How many parts a sequence has: `of_each`, or one for so many keys.
struct PartRule {
  int of_each, keys;
};

// By a whole warp. Sequences of about equal lengths have as many parts as fill the GPU best; of others, parts have
// about as many keys as one another, so that long sequences have more of them. Evidence: paged. It is short because
// instructions come from memory, too, and a call of one sequence waits for them.
__device__ __forceinline__ PartRule part_rule(const Problem& p, const KvCache& cache, const KvCacheGrid& c) {
  if (c.all_parts == 0) return {c.keys_of_part > 0 ? 0 : c.splits, c.keys_of_part};
  constexpr uint32_t kUnit = 64;  // of keys: sums fit 32 bits
  uint32_t sum = 0, most = 0;
#pragma unroll 1
  for (int b = ptx::fresh_lane(); b < p.batch; b += 32) {
    const uint32_t units = (static_cast<uint32_t>(min(max(cache.seqused_k[b], 0), c.seen_keys)) + kUnit - 1) / kUnit;
    sum += units, most = max(most, units);
  }
  sum = __reduce_add_sync(ptx::kFullWarp, sum), most = __reduce_max_sync(ptx::kFullWarp, most);
  if (uint64_t{8} * most * p.batch <= uint64_t{9} * sum) return {c.equal_splits, 0};
  return {0, static_cast<int>(min(max(sum / c.all_parts, 1u), (1u << 30) / kUnit) * kUnit)};
}

// In the batch-invariant mode a function of the sequence alone: there `splits` is large enough for any.
__device__ __forceinline__ KeyParts key_parts(const AttnMod& mod, const KvCacheGrid& c, const PartRule& rule,
                                              int first_query, int last_query, int block_n, bool may_split) {
  const int first_key = mod.first_key_of(first_query), last_key = mod.last_key_of(last_query);
  KeyParts k{first_key / block_n, 0, 1, 1};
  if (first_key <= last_key) k.blocks = last_key / block_n + 1 - k.first;
  if (!may_split) return {k.first, k.blocks, k.blocks, 1};
  int wanted = rule.of_each;
  if (wanted == 0) {
    int keys = mod.seqlen_k;
    if (mod.p.window_left >= 0 && mod.p.window_right >= 0) {
      keys = static_cast<int>(min(int64_t{keys}, int64_t{0} + mod.p.window_left + mod.p.window_right + mod.seqlen_q));
    }
    // Rounded up, or to the nearest. Both terms are at most 2^30.
    const uint32_t up = static_cast<uint32_t>(c.keys_of_part > 0 ? rule.keys - 1 : rule.keys / 2);
    const uint32_t parts = (static_cast<uint32_t>(keys) + up) / static_cast<uint32_t>(rule.keys);
    wanted = min(max(static_cast<int>(parts), max(keys - 1, 0) / c.most_keys + 1), c.splits);
  }
  k.each = max((k.blocks + wanted - 1) / wanted, max(c.least_keys / block_n, 1));
  k.count = max((k.blocks + k.each - 1) / k.each, 1);
  return k;
}

// Queries of sequence b, which is -1 or batch for rows outside every one.
__device__ __forceinline__ Span queries_of(const Problem& p, int b) {
  return p.cu_seqlens_q == nullptr ? Span{0, p.seqlen_q} : packed_span(p.cu_seqlens_q, p.batch, b, p.total_q);
}

}  // namespace flash_ext
