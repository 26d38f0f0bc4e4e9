// From a forward request to a launch, for one compiled head dim. Included by the instantiation files only.
#pragma once

#include <atomic>
#include <random>

#include "../grid.h"
#include "../launch.h"
#include "fwd.cuh"
#include "instances.h"
#include "tensor_maps.cuh"

namespace flash_ext::sm90 {

// An even number for each launch of the process; random above, so that memory left by others holds none of them.
inline unsigned long long next_launch() {
  static std::atomic<unsigned long long> latest = [] {
    std::random_device random;
    return (static_cast<unsigned long long>(random()) << 32 | random()) | 1ull << 63;
  }();
  return latest.fetch_add(2) & ~1ull;
}

inline std::string make_fwd_args(FwdArgs& a, const FwdParams& p, const Grid& grid, bool drawn) {
  const auto steps = [&](const StridedView& x) {
    return Steps{x.head_stride != 0, p.problem.is_varlen() || x.batch_stride != 0};
  };
  a = FwdArgs{p, grid, {}, steps(p.q), steps(p.k), steps(p.v)};
  if (grid.ctas > INT32_MAX) return "the problem needs more than 2^31 - 1 tiles";
  a.draw.num_items = static_cast<uint32_t>(grid.ctas);
  if (drawn) {
    a.draw.counter = static_cast<Counter*>(p.schedule);
    a.draw.launch = next_launch();
  }
  return {};
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

template <typename E, int D, int Dv, bool kLower = false>
std::string launch_fwd(const FwdParams& p, const DeviceInfo& d) {
  using T = FwdTraits<E, D, Dv, kLower>;
  FwdArgs a;
  FwdMaps maps;
  const bool drawn = draws_items(p.problem) || draws_short_tiles(p.problem, d, T::kBlockM);
  std::string error = make_fwd_args(a, p, fwd_grid(p.problem, d, T::kBlockM), drawn);
  if (error.empty()) error = encode_fwd_maps<T>(maps, p);
  if (!error.empty()) return "fwd_sm90: " + error;
  const int64_t ctas = std::min<int64_t>(a.grid.ctas, d.num_sms);
  if (has_long_keys(p.problem)) {
    a.kept = reinterpret_cast<float*>(static_cast<char*>(p.schedule) + (drawn ? kCounterBytes : 0));
  }
  return launch("fwd_sm90", fwd_sm90_kernel<T>, ctas, T::kThreads, T::kSmemBytes, p.stream, a, maps);
}

template <int D, int Dv, bool kLower = false>
std::string run_fwd_hd(const FwdParams& p, const DeviceInfo& d) {
  return dispatch_dtype(p.problem.dtype, [&]<typename E>() { return launch_fwd<E, D, Dv, kLower>(p, d); });
}

}  // namespace flash_ext::sm90
