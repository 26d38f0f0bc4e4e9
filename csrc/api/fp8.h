// The operators of fp8 attention for GPUs (api/fp8.cpp).
#pragma once

#include <string_view>
#include <tuple>

#include "call_args.h"

namespace flash_ext {

// q, k, v, their factors, and the offsets of v, of k, and of a row's scores. What is not asked for has no elements.
using Quantized = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;
Quantized quantize_fp8_gpu(const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& cu_seqlens_q,
                           const OptionalTensor& cu_seqlens_k, const OptionalTensor& seqused_k, bool by_block,
                           bool smooth_k, bool smooth_v, bool hadamard, bool mixed);

FwdModResult fwd_fp8_gpu(const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& q_descale,
                         const OptionalTensor& k_descale, const Tensor& v_descale, const OptionalTensor& v_offset,
                         const OptionalTensor& row_offset, const OptionalTensor& cu_seqlens_q,
                         const OptionalTensor& cu_seqlens_k, const OptionalTensor& seqused_k,
                         const OptionalTensor& sinks, double scale, int64_t window_size_left, int64_t window_size_right,
                         at::ScalarType dtype, std::optional<std::string_view> backend, bool want_lse,
                         bool want_row_max);

}  // namespace flash_ext
