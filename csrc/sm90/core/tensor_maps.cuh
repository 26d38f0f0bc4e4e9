// Tensor maps for TMA. Included by .cu files only. The encoder wants a current context: bind_context().
#pragma once

#include <cuda.h>

#include <string>

#include "../../launch.h"
#include "../../params.h"

namespace flash_ext::sm90 {

using EncodeTiled = decltype(&cuTensorMapEncodeTiled);

inline EncodeTiled find_encoder() { return driver_function<EncodeTiled>("cuTensorMapEncodeTiled"); }

inline CUtensorMapDataType map_type_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat16: return CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
    case DType::kBFloat16: return CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  }
  return CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
}

// What one copy brings: rows of 128 bytes, or of 64, which have a swizzle of their own. `others`: along the dimension
// behind that of `rows`.
struct Box {
  int columns, rows, element_bytes = 2, others = 1;
  bool swizzled = true;
  int row_bytes() const { return columns * element_bytes; }
  CUtensorMapSwizzle swizzle() const {
    if (!swizzled) return CU_TENSOR_MAP_SWIZZLE_NONE;
    return row_bytes() == 64 ? CU_TENSOR_MAP_SWIZZLE_64B : CU_TENSOR_MAP_SWIZZLE_128B;
  }
};

inline constexpr cuuint64_t kManyEntries = (cuuint64_t{1} << 31) - 1;

// Errors in words, or empty. A miss brings a line of 128 bytes into the L2 cache: of two, the second is often another
// head's, or gone before the box beside asks for it. Evidence: paged.
inline std::string encode(CUtensorMap& map, void* ptr, CUtensorMapDataType type, const cuuint64_t (&dims)[5],
                          const cuuint64_t (&strides)[4], const Box& b) {
  static const EncodeTiled encode_tiled = find_encoder();
  if (encode_tiled == nullptr) return "the driver has no cuTensorMapEncodeTiled";
  const cuuint32_t box[5] = {static_cast<cuuint32_t>(b.columns), static_cast<cuuint32_t>(b.rows),
                             static_cast<cuuint32_t>(b.others), 1, 1};
  const cuuint32_t ones[5] = {1, 1, 1, 1, 1};
  const CUresult result =
      encode_tiled(&map, type, 5, ptr, dims, strides, box, ones, CU_TENSOR_MAP_INTERLEAVE_NONE, b.swizzle(),
                   CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  // The driver's codes are those of the runtime; a context lost earlier shows here first.
  if (result == CUDA_SUCCESS) return {};
  return cuda_error_text(static_cast<cudaError_t>(result), "cuTensorMapEncodeTiled");
}

// A dimension of size 1 has stride 0 in a view, an expanded one as well and counts as size 1 here (see Steps): TMA
// asks for a positive multiple of 16 bytes.
inline cuuint64_t map_stride(int64_t stride, int element_bytes) {
  return static_cast<cuuint64_t>(stride == 0 ? 16 : element_bytes * stride);
}
inline cuuint64_t map_size(int64_t stride, int64_t n) { return static_cast<cuuint64_t>(stride == 0 ? 1 : n); }

// A map of rows, with boxes `b`. `rows` counts those of a batch entry; packed tensors get the shape that
// fwd/config.cuh's row_coordinates() expects.
inline std::string encode_map(CUtensorMap& map, const StridedView& x, const Problem& p, int columns, int64_t rows,
                              int heads, const Box& b) {
  const cuuint64_t row = map_stride(x.row_stride, b.element_bytes);
  cuuint64_t dims[5] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows), map_size(x.head_stride, heads),
                        map_size(x.batch_stride, p.batch), 1};
  cuuint64_t strides[4] = {row, map_stride(x.head_stride, b.element_bytes), map_stride(x.batch_stride, b.element_bytes),
                           16};
  if (p.is_varlen()) {
    dims[1] = cuuint64_t{1} << 30;
    dims[3] = dims[4] = kManyEntries;
    strides[2] = (cuuint64_t{1} << 35) - row;
    strides[3] = row;
  }
  return encode(map, x.ptr, b.element_bytes == 1 ? CU_TENSOR_MAP_DATA_TYPE_UINT8 : map_type_of(p.dtype), dims, strides,
                b);
}
inline std::string encode_map(CUtensorMap& map, const StridedView& x, const Problem& p, int columns, int64_t rows,
                              int heads, int box_rows, int box_columns = 64) {
  return encode_map(map, x, p, columns, rows, heads, Box{box_columns, box_rows});
}

// What a backward reads, in boxes of so many rows.
template <typename Maps>
std::string encode_bwd_maps(Maps& maps, const BwdParams& p, int query_rows, int key_rows) {
  const Problem& r = p.problem;
  std::string error = encode_map(maps.q, p.q, r, r.head_dim, r.seqlen_q, r.num_heads, query_rows);
  if (error.empty()) error = encode_map(maps.dout, p.dout, r, r.head_dim_v, r.seqlen_q, r.num_heads, query_rows);
  if (error.empty()) error = encode_map(maps.k, p.k, r, r.head_dim, r.seqlen_k, r.num_heads_k, key_rows);
  if (error.empty()) error = encode_map(maps.v, p.v, r, r.head_dim_v, r.seqlen_k, r.num_heads_k, key_rows);
  return error;
}

}  // namespace flash_ext::sm90
