// The torch side of the package: checks, operators, bindings. Only api*.cpp may include it.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "call_args.h"

namespace flash_ext {

// What every forward and every backward takes; R is what it returns.
template <typename R>
using ForwardOf = R(const Tensor& q, const Tensor& k, const Tensor& v, const CallArgs& args);
template <typename R>
using BackwardOf = R(const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out,
                     const Tensor& lse, const CallArgs& args);

// Calls through the dispatcher, so that every mode and tensor subclass sees the operator (api/ops.cpp).
ForwardOf<FwdResult> call_fwd, call_fwd_cached;
BackwardOf<BwdResult> call_bwd;
ForwardOf<FwdModResult> call_fwd_mod;
BackwardOf<BwdModResult> call_bwd_mod;
void call_append_kv(const Tensor& k_new, const Tensor& v_new, const AppendArgs& args);
AppendBehindResult call_append_behind(const Tensor& k_new, const Tensor& v_new, const AppendBehindArgs& args);

// The implementations for GPUs of calls without modifiers, below the dispatcher and behind the checks: results go into
// `out` and `gradients`, which have the results' shapes and a unit last stride (api/ops.cpp).
FwdResult fwd_into(const Tensor& out, const Tensor& q, const Tensor& k, const Tensor& v, const CallArgs& args);
BwdResult bwd_into(const BwdResult& gradients, const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v,
                   const Tensor& out, const Tensor& lse, const CallArgs& args);

// Whether the caller or torch.use_deterministic_algorithms() wants it (api/tensors.cpp).
bool is_deterministic(bool asked);

// The rules that every implementation shares: CUDA, CPU and fake tensors call these same functions
// with the operator's arguments, so their messages agree. They read metadata only and raise
// ValueError, TypeError or NotImplementedError (api/checks.cpp).
ForwardOf<void> check_fwd, check_fwd_mod, check_fwd_cached;
BackwardOf<void> check_bwd, check_bwd_mod;

// Of a call over a cache, behind check_fwd_cached(): it has no gradient; what GPUs refuse where there is something to
// compute (api/cached.cpp).
ForwardOf<void> check_cached_gradients, check_fwd_cached_gpu;
bool is_latents(const Tensor& k, const Tensor& v);

void check_append_kv(const Tensor& k_new, const Tensor& v_new, const AppendArgs& args);
void check_append_behind(const Tensor& k_new, const Tensor& v_new, const AppendBehindArgs& args);
void check_condense(const Tensor& x, const CallArgs& args);

// Of a cache: 8 bits, e4m3 or int8.
inline bool is_quantized(const Tensor& cache) {
  return cache.scalar_type() == at::kFloat8_e4m3fn || cache.scalar_type() == at::kChar;
}

// The implementation of flash_ext::fwd_cached for GPUs (api/cached.cpp).
ForwardOf<FwdResult> fwd_cached_gpu;

// The implementations of flash_ext::append_kv and flash_ext::append_behind for GPUs (api/append.cpp).
void append_kv_gpu(const Tensor& k_new, const Tensor& v_new, const AppendArgs& args);
AppendBehindResult append_behind_gpu(const Tensor& k_new, const Tensor& v_new, const AppendBehindArgs& args);

// Those of the operators of fp8 attention (api/fp8.cpp).
FwdModResult fwd_fp8_gpu(const Tensor& q, const Tensor& k, const Tensor& v, const Fp8CallArgs& args);
Quantized quantize_fp8_gpu(const Tensor& q, const Tensor& k, const Tensor& v, const QuantizeArgs& args);

// The implementation of flash_ext::condense for GPUs (api/condense.cpp).
Tensor condense_gpu(const Tensor& x, const CallArgs& args);

// How many calls of each of torch's own operators ran here, and how many went back, by operator and reason, since
// the start (api/sdpa.cpp).
std::vector<std::pair<std::string, int64_t>> sdpa_served();
std::map<std::pair<std::string, std::string>, int64_t> sdpa_returned();

// Hears of each of those calls. The reason is null where it ran here; then the tensors are query, key and value.
using SdpaListener = void (*)(const char* op, const char* reason, std::initializer_list<Tensor> tensors);
void set_sdpa_listener(SdpaListener wanted);

// Puts the GPU implementations, without their launch and with the facts of an H100, in the place of
// the CPU ones until called with false. For bench/host_cost.py, and for tests of the host side
// where there is no GPU (api/ops.cpp).
void use_null_kernels_on_cpu(bool enable);

}  // namespace flash_ext
