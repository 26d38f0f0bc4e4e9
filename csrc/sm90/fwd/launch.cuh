// Launches of the Hopper forward, for one compiled pair of head dims. Included by the instantiation files only.
#pragma once

#include <atomic>
#include <random>

#include "../../launch.h"
#include "../core/tensor_maps.cuh"
#include "../instances.h"
#include "kernel.cuh"

namespace flash_ext::sm90 {

// An even number for each launch of the process; random above, so that memory left by others holds none of them.
inline unsigned long long next_launch() {
  static std::atomic<unsigned long long> latest = [] {
    std::random_device random;
    return (static_cast<unsigned long long>(random()) << 32 | random()) | 1ull << 63;
  }();
  return latest.fetch_add(2) & ~1ull;
}

inline FwdArgs make_fwd_args(const FwdCall& c, const Launch& l) {
  const auto steps = [&](const StridedView& x) {
    return Steps{x.head_stride != 0, c.p.problem.is_varlen() || x.batch_stride != 0};
  };
  FwdArgs a{c.p, l.grid, {}, steps(c.p.q), steps(c.p.k), steps(c.p.v)};
  a.scheduler.num_work_tiles = static_cast<uint32_t>(l.tiles);
  a.unit_heads = l.unit_heads;
  if (l.dynamic) {
    a.scheduler.counter = part_of<Counter>(c.workspace, c.plan.workspace.tile_counters);
    a.scheduler.launch = next_launch();
  }
  return a;
}

template <typename T>
std::string encode_fwd_maps(FwdMaps& maps, const FwdParams& p) {
  const Problem& r = p.problem;
  std::string error = encode_map(maps.q, p.q, r, r.head_dim, r.seqlen_q, r.num_heads, T::kBlockM);
  if (error.empty()) error = encode_map(maps.k, p.k, r, r.head_dim, r.seqlen_k, r.num_heads_k, T::kBlockN);
  if (error.empty()) error = encode_map(maps.v, p.v, r, r.head_dim_v, r.seqlen_k, r.num_heads_k, T::kBlockN);
  if (error.empty() && !p.out.is_float) {  // fp32 is not stored by TMA
    error = encode_map(maps.out, p.out, r, r.head_dim_v, r.seqlen_q, r.num_heads, 16);
  }
  return error;
}

template <typename T>
std::string launch_fwd_as(const FwdCall& c, const Launch& l) {
  FwdArgs a = make_fwd_args(c, l);
  a.kept = part_of<float>(c.workspace, c.plan.workspace.kv_stretches);
  FwdMaps maps;
  const std::string error = encode_fwd_maps<T>(maps, c.p);
  if (!error.empty()) return "fwd_sm90: " + error;
  return launch_planned(l, fwd_sm90_kernel<T>, T::kThreads, T::kSmemBytes, c.p.stream, a, maps);
}

template <int D, int Dv>
std::string launch_fwd(const FwdCall& c, const Launch& l) {
  return dispatch_dtype(c.p.problem.dtype, [&]<typename E>() {
    if constexpr (D == 64) {
      if (l.block_m == 64) return launch_fwd_as<FwdTraits<E, D, Dv, 64>>(c, l);
    }
    if constexpr (D <= 128) {
      if (l.block_m == 128) return launch_fwd_as<FwdTraits<E, D, Dv, 128>>(c, l);
    }
    return launch_fwd_as<FwdTraits<E, D, Dv>>(c, l);
  });
}

template <int D>
std::string launch_fwd_parts(const FwdCall& c, const Launch& l) {
  return dispatch_dtype(c.p.problem.dtype, [&]<typename E>() {
    using T = FwdTraits<E, D, D, 128, true>;
    const FwdPartsArgs a{make_fwd_args(c, l), c.plan.split_kv,
                         part_of<void>(c.workspace, c.plan.workspace.kv_partials)};
    FwdMaps maps;
    const std::string error = encode_fwd_maps<T>(maps, c.p);
    if (!error.empty()) return "fwd_sm90: " + error;
    return launch_planned(l, fwd_sm90_kernel<T>, T::kThreads, T::kSmemBytes, c.p.stream, a, maps);
  });
}

}  // namespace flash_ext::sm90
