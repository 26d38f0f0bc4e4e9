// How the keys of a sequence in a cache are divided into parts, by its own length, which the device alone knows.
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

// A function of the sequence alone in the batch-invariant mode, where `splits` is large enough for any.
__device__ __forceinline__ KeyParts key_parts(const AttnMod& mod, const KvCacheGrid& c, int first_query, int last_query,
                                              int block_n, bool may_split) {
  const int first_key = mod.first_key_of(first_query), last_key = mod.last_key_of(last_query);
  KeyParts k{first_key / block_n, 0, 1, 1};
  if (first_key <= last_key) k.blocks = last_key / block_n + 1 - k.first;
  if (!may_split) return {k.first, k.blocks, k.blocks, 1};
  int wanted = c.splits;
  if (c.keys_of_part > 0) {
    int keys = mod.seqlen_k;
    if (mod.p.window_left >= 0 && mod.p.window_right >= 0) {
      keys = static_cast<int>(min(int64_t{keys}, int64_t{0} + mod.p.window_left + mod.p.window_right + mod.seqlen_q));
    }
    wanted = min(max((keys + c.keys_of_part - 1) / c.keys_of_part, 1), wanted);
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
