// The torch side of the package: checks, operators, bindings. Only api*.cpp may include it.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/SymInt.h>

#include <optional>
#include <string_view>
#include <tuple>

namespace flash_ext {

using at::Tensor;
using c10::SymInt;
using OptionalTensor = std::optional<Tensor>;
using OptionalName = std::optional<std::string_view>;
using FwdResult = std::tuple<Tensor, Tensor>;          // out, lse
using BwdResult = std::tuple<Tensor, Tensor, Tensor>;  // dq, dk, dv

// The operators as the dispatcher sees them. Argument order is that of the schemas in api.cpp. `wide`
// leaves out, or dq, dk and dv, as they were accumulated: fp32, where q is not wider already.
using FwdSignature = FwdResult(const Tensor& q, const Tensor& k, const Tensor& v,
                               const OptionalTensor& cu_seqlens_q,
                               const OptionalTensor& cu_seqlens_k, SymInt max_seqlen_q,
                               SymInt max_seqlen_k, double softmax_scale, SymInt window_left,
                               SymInt window_right, bool deterministic, OptionalName path,
                               bool wide);
using BwdSignature = BwdResult(const Tensor& dout, const Tensor& q, const Tensor& k,
                               const Tensor& v, const Tensor& out, const Tensor& lse,
                               const OptionalTensor& dlse, const OptionalTensor& cu_seqlens_q,
                               const OptionalTensor& cu_seqlens_k, SymInt max_seqlen_q,
                               SymInt max_seqlen_k, double softmax_scale, SymInt window_left,
                               SymInt window_right, bool deterministic, OptionalName path,
                               bool wide);

// Calls through the dispatcher, so that every mode and tensor subclass sees the operator (api.cpp).
FwdSignature call_fwd;
BwdSignature call_bwd;

// The implementations for GPUs, below the dispatcher and behind the checks: results go into `out` and
// `gradients`, which have the results' shapes and a unit last stride (api.cpp).
FwdResult fwd_into(const Tensor& out, const Tensor& q, const Tensor& k, const Tensor& v,
                   const OptionalTensor& cu_seqlens_q, const OptionalTensor& cu_seqlens_k,
                   double softmax_scale, int64_t window_left, int64_t window_right,
                   OptionalName path);
BwdResult bwd_into(const BwdResult& gradients, const Tensor& dout, const Tensor& q,
                   const Tensor& k, const Tensor& v, const Tensor& out, const Tensor& lse,
                   const OptionalTensor& dlse, const OptionalTensor& cu_seqlens_q,
                   const OptionalTensor& cu_seqlens_k, double softmax_scale, int64_t window_left,
                   int64_t window_right, bool deterministic, OptionalName path);

// Whether the caller or torch.use_deterministic_algorithms() wants it (api_params.cpp).
bool is_deterministic(bool asked);

// The rules that every implementation shares: CUDA, CPU and fake tensors call these same functions
// with the operator's arguments, so their messages agree. They read metadata only and raise
// ValueError, TypeError or NotImplementedError (api_checks.cpp).
void check_fwd(const Tensor& q, const Tensor& k, const Tensor& v,
               const OptionalTensor& cu_seqlens_q, const OptionalTensor& cu_seqlens_k,
               const SymInt& max_seqlen_q, const SymInt& max_seqlen_k, double softmax_scale,
               const SymInt& window_left, const SymInt& window_right, bool deterministic,
               OptionalName path);
void check_bwd(const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v,
               const Tensor& out, const Tensor& lse, const OptionalTensor& dlse,
               const OptionalTensor& cu_seqlens_q, const OptionalTensor& cu_seqlens_k,
               const SymInt& max_seqlen_q, const SymInt& max_seqlen_k, double softmax_scale,
               const SymInt& window_left, const SymInt& window_right, bool deterministic,
               OptionalName path);

// Puts the GPU implementations, without their launch and with the facts of an H100, in the place of
// the CPU ones until called with false. For bench/host_cost.py, and for tests of the host side
// where there is no GPU (api.cpp).
void use_null_kernels_on_cpu(bool enable);

}  // namespace flash_ext
