// Launches of the Hopper forward over a cache. Included by the instantiation files only.
#pragma once

#include <numeric>

#include "../fwd/launch.cuh"
#include "packed_mod.cuh"

namespace flash_ext::sm90 {

// A map of K or V (pieces.cuh).
inline std::string encode_cache_map(CUtensorMap& map, const StridedView& x, CUtensorMapDataType type, int columns,
                                    const Box& b) {
  const cuuint64_t dims[5] = {static_cast<cuuint64_t>(columns), kMapRows, cuuint64_t{1} << 30, cuuint64_t{1} << 30, 1};
  const cuuint64_t strides[4] = {map_stride(x.row_stride, 2), cuuint64_t{1} << kFarShift, cuuint64_t{1} << kNearShift,
                                 16};
  return encode(map, x.ptr, type, dims, strides, b);
}

template <typename T>
void prepare_cached(const FwdCall& c, const Launch& l, CachedFwdArgs& a) {
  static_cast<FwdArgs&>(a) = make_fwd_args(c, l);
  a.cache = c.cache;
  a.served = l.rows;
  a.sinks = c.modifiers.sinks;
  const int page_size = static_cast<int>(c.cache.page_size.divisor);
  a.piece_rows = c.cache.block_table != nullptr ? std::gcd(page_size, T::kBlockN) : T::kBlockN;
  a.by_rows = a.piece_rows < kLeastPieceRows;
  a.k_row_bytes = static_cast<int64_t>(map_stride(c.p.k.row_stride, 2));
  a.v_row_bytes = static_cast<int64_t>(map_stride(c.p.v.row_stride, 2));
}
inline std::string encode_kv_maps(const FwdCall& c, const CachedFwdArgs& a, FwdMaps& maps) {
  const Problem& r = c.p.problem;
  const Box box{64, a.piece_rows};
  std::string error = encode_cache_map(maps.k, c.p.k, map_type_of(r.dtype), r.head_dim, box);
  if (error.empty()) error = encode_cache_map(maps.v, c.p.v, map_type_of(r.dtype), r.head_dim_v, box);
  return error;
}

template <typename T>
std::string launch_fwd_cached_as(const FwdCall& c, const Launch& l) {
  CachedFwdArgs a{};
  FwdMaps maps;
  prepare_cached<T>(c, l, a);
  std::string error = encode_kv_maps(c, a, maps);
  a.kept = part_of<float>(c.workspace, c.plan.workspace.kv_stretches);
  const Problem& r = c.p.problem;
  if (error.empty()) error = encode_map(maps.q, c.p.q, r, r.head_dim, r.seqlen_q, r.num_heads, T::kBlockM);
  if (error.empty()) error = encode_map(maps.out, c.p.out, r, r.head_dim_v, r.seqlen_q, r.num_heads, 16);
  if (!error.empty()) return "fwd_cached_sm90: " + error;
  return launch_planned(l, fwd_cached_sm90_kernel<T>, T::kThreads, T::kSmemBytes, c.p.stream, a, maps);
}

template <int D, int Dv>
std::string launch_fwd_cached(const FwdCall& c, const Launch& l) {
  return dispatch_dtype(c.p.problem.dtype,
                        [&]<typename E>() { return launch_fwd_cached_as<CachedTraits<E, D, Dv>>(c, l); });
}

// As encode_map(), with heads in front of rows: a box has some heads of some rows.
inline std::string encode_heads_map(CUtensorMap& map, const StridedView& x, const Problem& p, const Box& b) {
  const cuuint64_t row = map_stride(x.row_stride, 2);
  cuuint64_t dims[5] = {static_cast<cuuint64_t>(p.head_dim), static_cast<cuuint64_t>(p.num_heads),
                        static_cast<cuuint64_t>(p.seqlen_q), map_size(x.batch_stride, p.batch), 1};
  cuuint64_t strides[4] = {map_stride(x.head_stride, 2), row, map_stride(x.batch_stride, 2), 16};
  if (p.is_varlen()) {
    dims[2] = cuuint64_t{1} << 30;
    dims[3] = dims[4] = kManyEntries;
    strides[2] = (cuuint64_t{1} << 35) - row;
    strides[3] = row;
  }
  return encode(map, x.ptr, map_type_of(p.dtype), dims, strides, b);
}

// What kernels add whose CTAs share out the keys of a sequence.
inline void prepare_parts(const FwdCall& c, const Launch& l, PackedFwdArgs& a) {
  a.parts = c.plan.split_kv;
  a.c = c.plan.kv_cache;
  a.partials = part_of<void>(c.workspace, c.plan.workspace.kv_partials);
  a.tile_rows = a.c.tile_rows;
  a.tile_queries = a.tile_rows / static_cast<int>(l.grid.shared.divisor);
  a.row_tiles = Divisor(l.grid.blocks);
}

// What packed tiles add, with the map of Q.
template <typename T>
std::string prepare_packed(const FwdCall& c, const Launch& l, PackedFwdArgs& a, FwdMaps& maps) {
  prepare_parts(c, l, a);
  const int group = static_cast<int>(l.grid.shared.divisor);
  Box box{T::kChunkColumns, group};
  box.others = a.tile_queries;
  return encode_heads_map(maps.q, c.p.q, c.p.problem, box);
}

// Calls f<E, kSharesKeys>() for the element type and the tile that the plan has chosen. kOnlyShares: there is no other.
template <int D, bool kOnlyShares = false, typename F>
std::string with_packed_tile(const FwdCall& c, const Launch& l, const F& f) {
  return dispatch_dtype(c.p.problem.dtype, [&]<typename E>() {
    if constexpr (can_share_keys(D)) {
      if (l.block_m == 64) return f.template operator()<E, true>();
    }
    if constexpr (kOnlyShares) return not_compiled(l);
    else return f.template operator()<E, false>();
  });
}

// encode(a, maps): the maps of K and V.
template <typename T, typename Args, typename Kernel, typename Encode>
std::string launch_packed_kernel(const char* name, const Kernel& kernel, const FwdCall& c, const Launch& l, Args a,
                                 const Encode& encode) {
  FwdMaps maps{};
  prepare_cached<T>(c, l, a);
  std::string error = encode(a, maps);
  if (error.empty()) error = prepare_packed<T>(c, l, a, maps);
  if (!error.empty()) return std::string(name) + ": " + error;
  return launch_planned(l, kernel, T::kThreads, T::kSmemBytes, c.p.stream, a, maps);
}

template <int D, bool kMod>
std::string launch_fwd_packed(const FwdCall& c, const Launch& l) {
  return with_packed_tile<D>(c, l, [&]<typename E, bool kSharesKeys>() {
    using T = PackedTraits<E, D, kSharesKeys, kMod>;
    typename T::Args args{};
    if constexpr (kMod) args.m = c.modifiers;
    return launch_packed_kernel<T>(stem_of(l.kernel), fwd_packed_sm90_kernel<T>, c, l, args,
                                   [&](auto& a, FwdMaps& maps) { return encode_kv_maps(c, a, maps); });
  });
}

}  // namespace flash_ext::sm90
