// Launches of the Hopper forward over a cache of latents. Included by its instantiation file only.
#pragma once

#include "../fwd_cached/launch.cuh"
#include "kernel.cuh"

namespace flash_ext::sm90 {

// Rows of heads lie one after the other in q, whatever query they belong to: it is contiguous.
inline std::string encode_latent_q_map(CUtensorMap& map, const FwdParams& p) {
  const Problem& r = p.problem;
  const cuuint64_t dims[5] = {static_cast<cuuint64_t>(r.head_dim), static_cast<cuuint64_t>(r.total_q * r.num_heads), 1,
                              1, 1};
  const cuuint64_t strides[4] = {map_stride(r.head_dim, 2), 16, 16, 16};
  return encode(map, p.q.ptr, map_type_of(r.dtype), dims, strides, Box{64, LatentTile::kRows});
}

inline std::string launch_fwd_latent(const FwdCall& c, const Launch& l) {
  return dispatch_dtype(c.p.problem.dtype, [&]<typename E>() {
    using T = LatentTraits<E>;
    PackedFwdArgs a{};
    FwdMaps maps{};
    prepare_cached<T>(c, l, a);
    prepare_parts(c, l, a);
    const Problem& r = c.p.problem;
    std::string error =
        encode_cache_map(maps.k, c.p.k, map_type_of(r.dtype), r.head_dim, Box{T::kChunkColumns, a.piece_rows});
    if (error.empty()) error = encode_latent_q_map(maps.q, c.p);
    if (!error.empty()) return "fwd_latent_sm90: " + error;
    return launch_planned(l, fwd_latent_sm90_kernel<T>, T::kThreads, T::kSmemBytes, c.p.stream, a, maps);
  });
}

}  // namespace flash_ext::sm90
