// Launches of the packed Hopper forward over a cache of 8 bits. Included by its instantiation file only.
#pragma once

#include "launch.cuh"
#include "quantized.cuh"

namespace flash_ext::sm90 {

// A map of K or V in bytes. Strides of a cache of 8 bits count units of 16 bits, as pieces.cuh reads them.
template <typename T>
std::string encode_bytes_map(CUtensorMap& map, const StridedView& x, int columns, int rows) {
  return encode_cache_map(map, x, CU_TENSOR_MAP_DATA_TYPE_UINT8, columns, Box{T::kRawRowBytes, rows, 1});
}

template <int D, bool kMod>
std::string launch_fwd_packed_quantized(const FwdCall& c, const Launch& l) {
  return with_packed_tile<D, kMod>(c, l, [&]<typename E, bool kSharesKeys>() {
    using T = QuantizedTraits<E, D, kSharesKeys, kMod>;
    typename T::Args a{};
    if constexpr (kMod) a.m = c.modifiers;
    a.quantized = c.quantized;
    a.cache_type = l.cache_type;
    return launch_packed_kernel<T>(stem_of(l.kernel), fwd_packed_quantized_sm90_kernel<T>, c, l, a,
                                   [&](const auto& prepared, FwdMaps& maps) {
                                     const int rows = prepared.piece_rows;
                                     std::string error = encode_bytes_map<T>(maps.k, c.p.k, c.p.problem.head_dim, rows);
                                     if (!error.empty()) return error;
                                     return encode_bytes_map<T>(maps.v, c.p.v, c.p.problem.head_dim_v, rows);
                                   });
  });
}

}  // namespace flash_ext::sm90
