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

template <typename T>
std::string launch_fwd_packed_quantized_as(const FwdCall& c, const Launch& l) {
  const Problem& r = c.p.problem;
  QuantizedFwdArgs a{};
  FwdMaps maps{};
  prepare_cached<T>(c, l, a);
  a.quantized = c.quantized;
  a.cache_type = l.cache_type;
  std::string error = encode_bytes_map<T>(maps.k, c.p.k, r.head_dim, a.piece_rows);
  if (error.empty()) error = encode_bytes_map<T>(maps.v, c.p.v, r.head_dim_v, a.piece_rows);
  if (error.empty()) error = prepare_packed<T>(c, l, a, maps);
  if (!error.empty()) return "fwd_packed_quantized_sm90: " + error;
  return launch_planned(l, fwd_packed_quantized_sm90_kernel<T>, T::kThreads, T::kSmemBytes, c.p.stream, a, maps);
}

template <int D>
std::string launch_fwd_packed_quantized(const FwdCall& c, const Launch& l) {
  return with_packed_tile<D>(l, [&]<bool kSharesKeys>() {
    return dispatch_dtype(c.p.problem.dtype, [&]<typename E>() {
      return launch_fwd_packed_quantized_as<QuantizedTraits<E, D, kSharesKeys>>(c, l);
    });
  });
}

}  // namespace flash_ext::sm90
