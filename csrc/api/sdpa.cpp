// torch's own attention operators on these kernels: implementations that take the place of the ones
// in the dispatcher for as long as flash_ext.enable_sdpa() holds (flash_ext/_sdpa_override.py).
//
// A call that the kernels do not serve goes to the implementation that was there, so that switching
// on can break no model. Layouts and extra results are those of torch's shape functions, which
// compilers rely on.
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/_flash_attention_backward_ops.h>
#include <ATen/ops/_flash_attention_forward_ops.h>
#include <ATen/ops/_scaled_dot_product_cudnn_attention_backward_ops.h>
#include <ATen/ops/_scaled_dot_product_cudnn_attention_ops.h>
#include <ATen/ops/_scaled_dot_product_efficient_attention_backward_ops.h>
#include <ATen/ops/_scaled_dot_product_efficient_attention_ops.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_backward_ops.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_ops.h>
#include <torch/library.h>

#include <array>
#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "sdpa_replaced.h"

namespace flash_ext {
namespace {

using OptionalSymInt = std::optional<SymInt>;

// ---- what they were, and counts -----------------------------------------------------------------

std::mutex switching;  // held while the implementations come or go
std::unique_ptr<torch::Library> overrides;

// Calls may run while another thread switches. Each goes back to what was there at one moment, and keeps it
// until it returns.
std::mutex before_mutex;
std::shared_ptr<const Before> before;

}  // namespace

std::shared_ptr<const Before> current_before() {
  const std::lock_guard<std::mutex> lock(before_mutex);
  return before;
}

namespace {

// How many calls of each operator ran here.
std::array<std::atomic<int64_t>, kNumOperators> served_calls;

// How many went back, by operator and reason.
std::mutex returned_mutex;
std::map<std::pair<SdpaOperator, std::string_view>, int64_t> returned_calls;

// What flash_ext.log hears of every call; set once, at import, and only where there is a log.
SdpaListener listener = nullptr;

}  // namespace

void count_served(SdpaOperator which, const Tensor& query, const Tensor& key, const Tensor& value) {
  served_calls[which].fetch_add(1, std::memory_order_relaxed);
  if (C10_UNLIKELY(listener != nullptr)) listener(kNames[which], nullptr, {query, key, value});
}

void count_returned(SdpaOperator which, Reason reason) {
  {
    const std::lock_guard<std::mutex> lock(returned_mutex);
    ++returned_calls[{which, reason}];
  }
  if (C10_UNLIKELY(listener != nullptr)) listener(kNames[which], reason, {});
}

namespace {

// ---- F.scaled_dot_product_attention without a mask ----------------------------------------------

SdpaResult sdpa_forward(c10::DispatchKeySet keys, const Tensor& query, const Tensor& key, const Tensor& value,
                        double dropout_p, bool is_causal, bool return_debug_mask, OptionalScale scale) {
  Reason reason = refusal_of_dense(query, key, value, dropout_p);
  if (return_debug_mask) reason = "a debug mask is asked for";
  if (reason == nullptr) {
    const Call call{query, key, value, true};
    reason = call.refusal(scale);
    if (reason == nullptr) {
      count_served(kSdpaForward, query, key, value);
      const BelowAll guard;
      auto [out, lse] = call.forward(std::nullopt, std::nullopt, scale_of(scale, query), -1, is_causal ? 0 : -1);
      auto [seed, offset] = no_state(query);
      return {std::move(out),  std::move(lse),    Tensor(),
              Tensor(),        query.size(2),     key.size(2),
              std::move(seed), std::move(offset), new_tensor({0}, query.options())};
    }
  }
  return call_before<SdpaResult>(kSdpaForward, reason, keys, query, key, value, dropout_p, is_causal, return_debug_mask,
                                 scale);
}

BwdResult sdpa_backward(c10::DispatchKeySet keys, const Tensor& grad_out, const Tensor& query, const Tensor& key,
                        const Tensor& value, const Tensor& out, const Tensor& lse, const Tensor& cu_q,
                        const Tensor& cu_k, SymInt max_q, SymInt max_k, double dropout_p, bool is_causal,
                        const Tensor& seed, const Tensor& offset, OptionalScale scale) {
  Reason reason = refusal_of_dense(query, key, value, dropout_p);
  if (cu_q.defined()) reason = "the sequences are packed";
  if (reason == nullptr) {
    const Call call{query, key, value, true};
    reason = call.refusal(scale);
    if (reason == nullptr && !unit_stride(out)) reason = kOtherForward;
    if (reason == nullptr) {
      count_served(kSdpaBackward, query, key, value);
      const BelowAll guard;
      return call.backward(grad_out, out, lse, std::nullopt, std::nullopt, scale_of(scale, query), -1,
                           is_causal ? 0 : -1);
    }
  }
  return call_before<BwdResult>(kSdpaBackward, reason, keys, grad_out, query, key, value, out, lse, cu_q, cu_k, max_q,
                                max_k, dropout_p, is_causal, seed, offset, scale);
}

// ---- varlen_attn, nested tensors ----------------------------------------------------------------

using FlashResult = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

int64_t window_of(const OptionalSymInt& side) { return side.has_value() ? side->guard_int(__FILE__, __LINE__) : -1; }

// Negative sides other than -1 mean unlimited as well there.
int64_t unlimited_if_negative(int64_t side) { return side < 0 ? -1 : side; }

// The operator has gained arguments at its end (block_table and num_splits after torch 2.11), so
// that the signature is taken from torch's header; with any of them given, the call goes back.
template <class Signature>
struct FlashForward;

template <class Result, class... Args>
struct FlashForward<Result(Args...)> {
  static Result call(c10::DispatchKeySet keys, Args... args) {
    const auto all = std::forward_as_tuple(args...);
    constexpr size_t kScale = 10, kLeft = 11, kRight = 12, kFirstRefused = 13;
    const Tensor &q = std::get<0>(all), &k = std::get<1>(all), &v = std::get<2>(all);
    const OptionalTensor &cu_q = std::get<3>(all), &cu_k = std::get<4>(all);
    const double dropout_p = std::get<7>(all);
    const bool is_causal = std::get<8>(all), return_debug_mask = std::get<9>(all);
    Reason reason = nullptr;
    if (dropout_p != 0) reason = kHasDropout;
    else if (return_debug_mask) reason = "a debug mask is asked for";
    else if (cu_q.has_value() != cu_k.has_value()) reason = kOneOfBounds;
    else if (any_given<kFirstRefused>(all)) reason = "seqused_k, alibi_slopes, a paged cache or num_splits are given";
    const Call call{q, k, v, false};
    if (reason == nullptr) reason = call.refusal(std::get<kScale>(all), cu_q, cu_k);
    if (reason == nullptr) {
      count_served(kFlashForward, q, k, v);
      const BelowAll guard;
      const int64_t right = is_causal ? 0 : unlimited_if_negative(window_of(std::get<kRight>(all)));
      auto [out, lse] = call.forward(cu_q, cu_k, scale_of(std::get<kScale>(all), q),
                                     unlimited_if_negative(window_of(std::get<kLeft>(all))), right);
      auto [seed, offset] = no_state(q);
      return {std::move(out), std::move(lse), std::move(seed), std::move(offset), new_tensor({0}, q.options())};
    }
    return call_before<Result>(kFlashForward, reason, keys, args...);
  }

  template <size_t kFrom, class Tuple>
  static bool any_given(const Tuple& all) {
    if constexpr (kFrom == std::tuple_size_v<Tuple>) {
      return false;
    } else {
      return std::get<kFrom>(all).has_value() || any_given<kFrom + 1>(all);
    }
  }
};

BwdResult flash_backward(c10::DispatchKeySet keys, const Tensor& grad_out, const Tensor& q, const Tensor& k,
                         const Tensor& v, const Tensor& out, const Tensor& lse, const Tensor& cu_q, const Tensor& cu_k,
                         SymInt max_q, SymInt max_k, double dropout_p, bool is_causal, const Tensor& rng_state,
                         const Tensor& unused, OptionalScale scale, OptionalSymInt left, OptionalSymInt right) {
  const OptionalTensor bounds_q = optional(cu_q), bounds_k = optional(cu_k);
  const Call call{q, k, v, false};
  Reason reason = nullptr;
  if (dropout_p != 0) reason = kHasDropout;
  else if (cu_q.defined() != cu_k.defined()) reason = kOneOfBounds;
  else reason = call.refusal(scale, bounds_q, bounds_k);
  if (reason == nullptr && !unit_stride(out)) reason = kOtherForward;
  if (reason == nullptr) {
    count_served(kFlashBackward, q, k, v);
    const BelowAll guard;
    return call.backward(grad_out, out, lse, bounds_q, bounds_k, scale_of(scale, q),
                         unlimited_if_negative(window_of(left)),
                         is_causal ? 0 : unlimited_if_negative(window_of(right)));
  }
  return call_before<BwdResult>(kFlashBackward, reason, keys, grad_out, q, k, v, out, lse, cu_q, cu_k, max_q, max_k,
                                dropout_p, is_causal, rng_state, unused, scale, left, right);
}

// ---- on and off ---------------------------------------------------------------------------------

Before found_at(c10::DispatchKey key) {
  Before found;
  for (const char* name : kNames) {
    auto op = c10::Dispatcher::singleton().findSchemaOrThrow((std::string("aten::") + name).c_str(), "");
    std::optional<c10::SafeKernelFunction> kernel;
    if (op.hasKernelForDispatchKey(key)) kernel.emplace(op.getComputedKernelForDispatchKey(key));
    found.push_back({std::move(op), std::move(kernel)});
  }
  return found;
}

// Registers the implementations for a dispatch key by its name ("CUDA"; tests say "CPU"), or takes
// them away with an empty name. One thread at a time, or one would find another's in place of torch's.
//
// The dispatcher's readers take no lock, so that a call in another thread may still use a registration
// that is gone, or the function of one with the object of another. Functions that are part of a type
// (TORCH_FN) never look at that object; those given as pointers are kept in it.
void set_sdpa(std::string_view key_name) {
  const std::lock_guard<std::mutex> lock(switching);
  overrides.reset();
  if (key_name.empty()) return;
  const c10::DispatchKey key = c10::parseDispatchKey(std::string(key_name));
  auto found = std::make_shared<const Before>(found_at(key));
  {
    const std::lock_guard<std::mutex> lock_before(before_mutex);
    before.swap(found);
  }
  auto library = std::make_unique<torch::Library>(torch::Library::IMPL, "aten", key, __FILE__, __LINE__);
  library->impl(kNames[kSdpaForward], TORCH_FN(sdpa_forward));
  library->impl(kNames[kSdpaBackward], TORCH_FN(sdpa_backward));
  library->impl(kNames[kFlashForward], TORCH_FN(FlashForward<at::_ops::_flash_attention_forward::schema>::call));
  library->impl(kNames[kFlashBackward], TORCH_FN(flash_backward));
  library->impl(kNames[kMaskedForward], TORCH_FN(masked_forward));
  library->impl(kNames[kMaskedBackward], TORCH_FN(masked_backward));
  library->impl(kNames[kGroupedForward], TORCH_FN(grouped_forward));
  library->impl(kNames[kGroupedBackward], TORCH_FN(grouped_backward));
  overrides = std::move(library);
}

}  // namespace

std::vector<std::pair<std::string, int64_t>> sdpa_served() {
  std::vector<std::pair<std::string, int64_t>> found;
  for (int which = 0; which < kNumOperators; ++which)
    found.emplace_back(kNames[which], served_calls[which].load(std::memory_order_relaxed));
  return found;
}

std::map<std::pair<std::string, std::string>, int64_t> sdpa_returned() {
  const std::lock_guard<std::mutex> lock(returned_mutex);
  std::map<std::pair<std::string, std::string>, int64_t> found;
  for (const auto& [key, number] : returned_calls) found[{kNames[key.first], std::string(key.second)}] = number;
  return found;
}

void set_sdpa_listener(SdpaListener wanted) { listener = wanted; }

TORCH_LIBRARY_FRAGMENT(flash_ext, m) { m.def("_set_sdpa(str key) -> ()", &set_sdpa); }

}  // namespace flash_ext
