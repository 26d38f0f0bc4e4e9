// The forward for few queries over a cache (kv_cache.h): lengths and places of the keys are on the device.
//
// A slot is a sequence, whatever it holds, so the grid depends on shapes alone and a CUDA graph may be replayed with
// other lengths and tables. Keys are divided into parts by the lengths of all sequences (common/key_parts.cuh); CTAs of
// parts that are not there end at once. A sequence of one part leaves its result directly, and the merge passes over
// it.
#pragma once

#include "../../common/key_parts.cuh"
#include "../../common/kv_rows.cuh"
#include "merge.cuh"

namespace flash_ext::sm80 {

// What a CTA has of a sequence: a part of the keys of its rows, or a share of its tiles of rows.
struct CachedWork {
  SplitWork w;  // without `first` and `rows`
  CachedKeys keys;
  int rows;
  bool outside;  // rows that belong to no sequence, which have no keys: CTAs of all parts share them out
  bool is_served;  // by this launch

  template <typename T>
  __device__ static CachedWork of(const Problem& p, const SplitGrid& g, const KvCache& cache, const RowRange& served) {
    CachedWork x;
    SplitWork& w = x.w;
    const uint32_t rest = divide(blockIdx.x, g.heads_k);
    const uint32_t slot = divide(rest, g.parts);
    w.h_k = static_cast<int>(blockIdx.x - rest * g.heads_k.divisor);
    w.part = static_cast<int>(rest - slot * g.parts.divisor);
    const int b = static_cast<int>(slot) > p.batch ? -1 : static_cast<int>(slot);
    w.b = p.cu_seqlens_q == nullptr ? b : 0;
    w.sequence = b;
    w.q = queries_of(p, b);
    x.rows = w.q.length * static_cast<int>(g.group.divisor);
    x.outside = b < 0 || b == p.batch;
    x.is_served = x.outside ? served.upto == INT32_MAX : x.rows > served.above && x.rows <= served.upto;
    if (!x.is_served) return x;
    x.keys = CachedKeys::of(p, cache, b);
    w.k = {0, x.keys.length};
    return x;
  }
  // Packed row among those that have parts.
  __device__ int64_t number(const KvCacheGrid& c, const SplitGrid& g, int r) const {
    return (int64_t{w.sequence} * g.heads_k.divisor + w.h_k) * c.rows + w.first + r;
  }
};

// Copies rows of a cache.
template <typename T>
struct CacheRows {
  const CachedKeys& keys;
  const KvCache& cache;

  __device__ void operator()(uint32_t tile, const uint16_t* from, const StridedView& view, int columns, int first,
                             int sharing_idx) const {
    load_cached_tile<T::kKeys, T::kLoadedDim, T::kSharing>(tile, keys, cache, view, from, columns, first, sharing_idx);
  }
};

// A row's end knows its head's sink. sinks: null in rows that belong to no sequence.
struct CachedPlainRules : PlainRules {
  const float* sinks;

  __device__ CachedPlainRules(const Problem& p, const SplitWork& w, const SplitRows& rows, const float* sinks)
      : PlainRules(p, w, rows), sinks(sinks) {}
  __device__ float finish(const FwdParams& p, const RowState& state, const RowPlace& at, bool stores) const {
    return RowEnding{mod.p.abs_scale_log2, sinks}.finish(p, state, at, true, stores);
  }
};

template <typename T>
__global__ void __launch_bounds__(T::kThreads, 2)
    fwd_split_cached_kernel(const __grid_constant__ FwdParams p, const __grid_constant__ SplitGrid g,
                            const __grid_constant__ KvCache cache, const __grid_constant__ KvCacheGrid c,
                            const __grid_constant__ RowRange served, const float* sinks) {
  __shared__ RowState states[T::kKeyWarps][T::kRows];
  CachedWork x = CachedWork::of<T>(p.problem, g, cache, served);
  if (!x.is_served) return;
  SplitWork& w = x.w;
  const PartRule rule = part_rule(p.problem, cache, c);
  const int step = x.outside ? g.parts.divisor * T::kRows : T::kRows;
#pragma unroll 1
  for (w.first = x.outside ? w.part * T::kRows : 0; w.first < x.rows; w.first += step) {
    w.rows = x.rows - w.first;
    const SplitRows rows{g, w, T::kRows};
    CachedPlainRules rules(p.problem, w, rows, x.outside ? nullptr : sinks);
    const KeyParts parts =
        key_parts(rules.mod, c, rule, rules.first_query, rules.last_query, T::kBlockN, x.rows <= c.rows);
    if (!x.outside && w.part >= parts.count) return;  // the keys of a sequence of several tiles are not divided
    attend<T>(p, g, w, rules, rows, parts.part(x.outside ? 0 : w.part), row_pointer(p.k, 0, 0, w.h_k),
              row_pointer(p.v, 0, 0, w.h_k), states, parts.count == 1, CacheRows<T>{x.keys, cache},
              [&](const RowPlace&, int r) { return x.number(c, g, r); });
    __syncthreads();  // results have left shared memory
  }
}

// A row is a sequence, head and query of those that may be split. Sequences of up to `narrow_rows` rows had tiles of 16
// rows, with blocks of `block_n` keys; KvCacheGrid has the tiles of the others.
template <typename E, int kPasses>
__global__ void __launch_bounds__(SplitTile::kThreads, 5)  // else ptxas spills to have seven
    fwd_merge_cached_kernel(const __grid_constant__ FwdParams p, const __grid_constant__ SplitGrid g,
                            const __grid_constant__ KvCache cache, const __grid_constant__ KvCacheGrid c,
                            RowEnding ending, int narrow_rows, int block_n) {
  __shared__ MergeShares<kPasses> shares;
  const Problem& problem = p.problem;
  const uint32_t row = merged_row(g), rest = divide(row, g.heads);
  const int h = static_cast<int>(row - rest * g.heads.divisor);
  const uint32_t found = divide(rest, g.queries), b = min(found, static_cast<uint32_t>(problem.batch - 1));
  const int query = static_cast<int>(rest - found * g.queries.divisor);
  const int group = static_cast<int>(g.group.divisor), h_k = static_cast<int>(divide(h, g.group));
  const Span q = queries_of(problem, static_cast<int>(b));
  const int rows = q.length * group, packed_row = query * group + h - h_k * group;
  const AttnMod mod{problem, q.length, CachedKeys::of(problem, cache, static_cast<int>(b)).length};
  const bool narrow = rows <= narrow_rows;  // the tile that made the parts
  const int tile_rows = narrow ? 16 : c.tile_rows, first = packed_row - packed_row % tile_rows;
  const KeyParts parts = key_parts(mod, c, part_rule(problem, cache, c), static_cast<int>(divide(first, g.group)),
                                   static_cast<int>(divide(min(first + tile_rows, rows) - 1, g.group)),
                                   narrow ? block_n : c.block_n, true);
  if (!narrow && c.scaled_maxima) ending.unit_log2 = 1.f;
  ptx::wait_for_kernel_before();  // before any end, so that the kernel after this one waits for both
  if (b != found || query >= q.length || rows > c.rows || parts.count == 1) return;
  const RowPlace at{problem.cu_seqlens_q == nullptr ? static_cast<int>(b) : 0, q.start + query, h};
  merge_row<E, kPasses>(p, g, ending, at, true, (int64_t{b} * problem.num_heads_k + h_k) * c.rows + packed_row,
                        parts.count, shares);
}

}  // namespace flash_ext::sm80
