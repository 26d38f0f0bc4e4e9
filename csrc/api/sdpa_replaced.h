// torch's own attention operators: their names, what they were before, and what becomes of a call that goes back to
// them. For api/sdpa.cpp and api/sdpa_masked.cpp.
#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/boxing/impl/boxing.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <array>
#include <memory>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "sdpa.h"

namespace flash_ext {

enum SdpaOperator {
  kSdpaForward,
  kSdpaBackward,
  kFlashForward,
  kFlashBackward,
  kMaskedForward,
  kMaskedBackward,
  kGroupedForward,
  kGroupedBackward
};
inline constexpr int kNumOperators = 8;
inline constexpr std::array<const char*, kNumOperators> kNames = {"_scaled_dot_product_flash_attention",
                                                                  "_scaled_dot_product_flash_attention_backward",
                                                                  "_flash_attention_forward",
                                                                  "_flash_attention_backward",
                                                                  "_scaled_dot_product_efficient_attention",
                                                                  "_scaled_dot_product_efficient_attention_backward",
                                                                  "_scaled_dot_product_cudnn_attention",
                                                                  "_scaled_dot_product_cudnn_attention_backward"};

struct Replaced {
  c10::OperatorHandle op;
  std::optional<c10::SafeKernelFunction> kernel;  // none in a torch without CUDA
};
using Before = std::vector<Replaced>;  // by Operator

// What was there at one moment; a call keeps it until it returns.
std::shared_ptr<const Before> current_before();

// Counts a call, and tells the log.
void count_served(SdpaOperator which, const Tensor& query, const Tensor& key, const Tensor& value);
void count_returned(SdpaOperator which, Reason reason);

// Calls the implementation that was there before; its own checks and words apply.
template <class Result, class... Args>
Result call_before(SdpaOperator which, Reason reason, c10::DispatchKeySet keys, Args&&... args) {
  count_returned(which, reason);
  const std::shared_ptr<const Before> all = current_before();
  const Replaced& b = (*all)[which];
  TORCH_CHECK_NOT_IMPLEMENTED(b.kernel.has_value(), "aten::", kNames[which],
                              ": flash_ext does not serve this call because ", reason,
                              ", and this torch has no implementation of its own.");
  torch::jit::Stack stack;
  stack.reserve(sizeof...(args));
  (stack.emplace_back(std::forward<Args>(args)), ...);
  b.kernel->callBoxed(b.op, keys, &stack);
  return c10::impl::PopResult<Result>::call(stack);
}

// Below autograd, and without autocast, which has done its work by now and would cast once more.
struct BelowAll {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  c10::impl::ExcludeDispatchKeyGuard no_autocast{c10::autocast_dispatch_keyset};
};

inline constexpr Reason kHasDropout = "dropout_p is not 0";
inline constexpr Reason kNoGradient = "there is no gradient of the output";
inline constexpr Reason kOneOfBounds = "one of cu_seqlens_q and cu_seqlens_k is given";
inline constexpr Reason kOtherForward = "out or lse have a layout that this forward does not give";

// What the operators of dense tensors ask before they look at them.
inline Reason refusal_of_dense(const Tensor& query, const Tensor& key, const Tensor& value, double dropout_p) {
  if (dropout_p != 0) return kHasDropout;
  return query.dim() == 4 && key.dim() == 4 && value.dim() == 4 ? nullptr : "the tensors have other dimensions";
}

using SdpaResult = std::tuple<Tensor, Tensor, Tensor, Tensor, SymInt, SymInt, Tensor, Tensor, Tensor>;

using MaskedResult = std::tuple<Tensor, Tensor, Tensor, Tensor>;

// With a mask, or causal with lengths that differ, and the same with grouped heads (api/sdpa_masked.cpp).
MaskedResult masked_forward(c10::DispatchKeySet keys, const Tensor& query, const Tensor& key, const Tensor& value,
                            const OptionalTensor& bias, bool compute_lse, double dropout_p, bool is_causal,
                            OptionalScale scale);
MaskedResult masked_backward(c10::DispatchKeySet keys, const Tensor& grad_out, const Tensor& query, const Tensor& key,
                             const Tensor& value, const Tensor& bias, const Tensor& out, const Tensor& lse,
                             const Tensor& seed, const Tensor& offset, double dropout_p, std::array<bool, 4> needs,
                             bool is_causal, OptionalScale scale);
SdpaResult grouped_forward(c10::DispatchKeySet keys, const Tensor& query, const Tensor& key, const Tensor& value,
                           const OptionalTensor& bias, bool compute_lse, double dropout_p, bool is_causal,
                           bool return_debug_mask, OptionalScale scale);
BwdResult grouped_backward(c10::DispatchKeySet keys, const Tensor& grad_out, const Tensor& query, const Tensor& key,
                           const Tensor& value, const Tensor& out, const Tensor& lse, const Tensor& seed,
                           const Tensor& offset, const Tensor& bias, const Tensor& cu_q, const Tensor& cu_k,
                           SymInt max_q, SymInt max_k, double dropout_p, bool is_causal, OptionalScale scale);

}  // namespace flash_ext
