// Launches of the Hopper forward over pages. Included by its instantiation file only.
#pragma once

#include "cached.cuh"
#include "launch.cuh"

namespace flash_ext::sm90 {

template <typename T>
std::string launch_fwd_cached_as(const FwdCall& c, const Launch& l) {
  CachedFwdArgs a{make_fwd_args(c, l), c.cache, l.rows, page_box_rows(c.cache)};
  a.kept = part_of<float>(c.workspace, c.plan.workspace.kv_stretches);
  a.k_steps = {c.p.k.head_stride != 0, c.p.k.batch_stride != 0};
  a.v_steps = {c.p.v.head_stride != 0, c.p.v.batch_stride != 0};
  const Problem& r = c.p.problem;
  Problem pages = r;  // a page is an entry of a dense batch
  pages.cu_seqlens_q = nullptr;
  pages.batch = c.cache.num_pages;
  const int64_t page_size = c.cache.page_size.divisor;
  FwdMaps maps;
  std::string error = encode_map(maps.q, c.p.q, r, r.head_dim, r.seqlen_q, r.num_heads, T::kBlockM);
  if (error.empty()) error = encode_map(maps.k, c.p.k, pages, r.head_dim, page_size, r.num_heads_k, a.box_rows);
  if (error.empty()) error = encode_map(maps.v, c.p.v, pages, r.head_dim_v, page_size, r.num_heads_k, a.box_rows);
  if (error.empty()) error = encode_map(maps.out, c.p.out, r, r.head_dim_v, r.seqlen_q, r.num_heads, 16);
  if (!error.empty()) return "fwd_cached_sm90: " + error;
  return launch_planned(l, fwd_sm90_cached_kernel<T>, T::kThreads, T::kSmemBytes, c.p.stream, a, maps);
}

template <int D>
std::string launch_fwd_cached(const FwdCall& c, const Launch& l) {
  return dispatch_dtype(c.p.problem.dtype, [&]<typename E>() {
    if constexpr (D <= 128) {
      if (l.block_m == fwd_tile(D, D, true).block_m()) return launch_fwd_cached_as<FwdTraits<E, D, D, true>>(c, l);
    }
    return launch_fwd_cached_as<FwdTraits<E, D, D, false>>(c, l);
  });
}

}  // namespace flash_ext::sm90
