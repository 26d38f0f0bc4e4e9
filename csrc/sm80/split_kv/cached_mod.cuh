// The forward for few queries over a cache, with a softcap, slopes, sinks, and a tree of new tokens or masks and
// biases.
#pragma once

#include "cached.cuh"
#include "mod.cuh"

namespace flash_ext::sm80 {

// Sequences of more rows than may be split have their tiles of rows shared out instead: no other kernel over a cache
// knows modifiers, or elements of 8 bits. operands_of(CachedWork) makes T::Operands.
template <typename T, Knows kKnows, typename OperandsOf>
__device__ __forceinline__ void attend_cached_mod(const FwdParams& p, const SplitGrid& g, const KvCache& cache,
                                                  const KvCacheGrid& c, const RowRange& served, const Modifiers& m,
                                                  const OperandsOf& operands_of) {
  __shared__ RowState states[T::kKeyWarps][T::kRows];
  __shared__ ModTile tile;
  __shared__ CachedWork x;
  __shared__ PartRule rule;
  if (threadIdx.x == 0) x = CachedWork::of<T>(p.problem, g, cache, served);
  if (threadIdx.x < 32) {
    const PartRule found = part_rule(p.problem, cache, c);
    if (threadIdx.x == 0) rule = found;
  }
  __syncthreads();
  if (!x.is_served) return;
  const bool divides = !x.outside && x.rows <= c.rows;
  const int step = divides ? T::kRows : g.parts.divisor * T::kRows;
#pragma unroll 1
  for (int first = divides ? 0 : x.w.part * T::kRows; first < x.rows; first += step) {
    if (threadIdx.x == 0) {
      x.w.first = first;
      x.w.rows = x.rows - first;
      tile.w = x.w;
      tile.find(p.problem, m, g, T::kRows);
    }
    __syncthreads();
    const SplitWork& w = tile.w;
    const SplitRows rows{g, w, T::kRows};
    const AttnMod mod{p.problem, w.q.length, w.k.length};
    const KeyParts parts = key_parts(mod, c, rule, rows.query(0), rows.query(rows.last()), T::kBlockN, divides);
    if (!divides || w.part < parts.count) {  // the rows behind these may see more keys
      ModRules<T, kKnows> rules{p.problem, m, tile, rows};
      attend<T>(
          p, g, w, rules, rows, parts.part(divides ? w.part : 0), row_pointer(p.k, 0, 0, w.h_k),
          row_pointer(p.v, 0, 0, w.h_k), states, parts.count == 1, CacheRows<T>{x.keys, cache},
          [&](const RowPlace&, int r) { return x.number(c, g, r); }, operands_of(x));
    }
    __syncthreads();  // results have left shared memory
  }
}

template <typename T, Knows kKnows>
__global__ void __launch_bounds__(T::kThreads, 2)
    fwd_split_cached_mod_kernel(const __grid_constant__ FwdParams p, const __grid_constant__ SplitGrid g,
                                const __grid_constant__ KvCache cache, const __grid_constant__ KvCacheGrid c,
                                const __grid_constant__ RowRange served, const __grid_constant__ Modifiers m) {
  attend_cached_mod<T, kKnows>(p, g, cache, c, served, m, [](const CachedWork&) { return HeldOperands<T>{}; });
}

}  // namespace flash_ext::sm80
