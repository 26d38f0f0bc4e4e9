// Launches of the fp8 forward, for one compiled pair of head dims. Included by the instantiation files only.
#pragma once

#include "../fwd/launch.cuh"
#include "kernel.cuh"

namespace flash_ext::sm90 {

// A map of V transposed, with boxes of so many keys and channels; packed ones get the shape that key_coordinates()
// expects.
inline std::string encode_transposed_map(CUtensorMap& map, const StridedView& x, const Problem& p, int keys,
                                         int channels) {
  const int64_t columns = transposed_columns(p.seqlen_k, p.batch, false);
  cuuint64_t dims[5] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(p.head_dim_v),
                        map_size(x.head_stride, p.num_heads_k), map_size(x.batch_stride, p.batch), 1};
  cuuint64_t strides[4] = {map_stride(x.row_stride, 1), map_stride(x.head_stride, 1), map_stride(x.batch_stride, 1),
                           16};
  if (p.is_varlen()) {
    dims[0] = cuuint64_t{1} << 30;
    dims[3] = dims[4] = kManyEntries;
    strides[2] = (cuuint64_t{1} << 38) - 16;
    strides[3] = 16;
  }
  return encode(map, x.ptr, CU_TENSOR_MAP_DATA_TYPE_UINT8, dims, strides, Box{keys, channels, 1});
}

template <typename T>
std::string encode_fp8_maps(FwdMaps& maps, const FwdParams& p) {
  const Problem& r = p.problem;
  const Box q{T::kChunkColumns, T::kBlockM, T::kMixed ? 2 : 1}, k{T::kChunkColumns, T::kBlockN, q.element_bytes};
  std::string error = encode_map(maps.q, p.q, r, r.head_dim, r.seqlen_q, r.num_heads, q);
  if (error.empty()) error = encode_map(maps.k, p.k, r, r.head_dim, r.seqlen_k, r.num_heads_k, k);
  if (error.empty()) error = encode_transposed_map(maps.v, p.v, r, T::kBlockN, T::kHeadDimV);
  if (error.empty() && !p.out.is_float) {
    error = encode_map(maps.out, p.out, r, r.head_dim_v, r.seqlen_q, r.num_heads, 16);
  }
  return error;
}

template <typename T>
std::string launch_fwd_fp8_as(const FwdCall& c, const Launch& l) {
  Fp8Args a{make_fwd_args(c, l), c.fp8};
  a.kept = part_of<float>(c.workspace, c.plan.workspace.kv_stretches);
  FwdMaps maps;
  const std::string error = encode_fp8_maps<T>(maps, c.p);
  if (!error.empty()) return "fwd_fp8_sm90: " + error;
  return launch_planned(l, fwd_fp8_sm90_kernel<T>, T::kThreads, T::kSmemBytes, c.p.stream, a, maps);
}

template <int D, int Dv, Operands kOperands>
std::string launch_fwd_fp8(const FwdCall& c, const Launch& l) {
  return dispatch_dtype(c.p.problem.dtype,
                        [&]<typename E>() { return launch_fwd_fp8_as<Fp8Traits<E, D, Dv, kOperands>>(c, l); });
}

}  // namespace flash_ext::sm90
