// torch's own attention operators on these kernels: implementations that take the place of the ones
// in the dispatcher for as long as flash_ext.enable_sdpa() holds (flash_ext/_sdpa_override.py).
//
// A call that the kernels do not serve goes to the implementation that was there, so that switching
// on can break no model. Layouts and extra results are those of torch's shape functions, which
// compilers rely on.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/boxing/impl/boxing.h>
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

#include "sdpa.h"

namespace flash_ext {
namespace {

using OptionalSymInt = std::optional<SymInt>;

// ---- the operators, and what they were ----------------------------------------------------------

enum Operator {
  kSdpaForward,
  kSdpaBackward,
  kFlashForward,
  kFlashBackward,
  kMaskedForward,
  kMaskedBackward,
  kGroupedForward,
  kGroupedBackward
};
constexpr int kNumOperators = 8;
constexpr std::array<const char*, kNumOperators> kNames = {
    "_scaled_dot_product_flash_attention",
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

std::mutex switching;  // held while the implementations come or go
std::unique_ptr<torch::Library> overrides;

// Calls may run while another thread switches. Each goes back to what was there at one moment, and keeps it
// until it returns.
std::mutex before_mutex;
std::shared_ptr<const Before> before;

std::shared_ptr<const Before> current_before() {
  const std::lock_guard<std::mutex> lock(before_mutex);
  return before;
}

// How many calls of each operator ran here.
std::array<std::atomic<int64_t>, kNumOperators> served_calls;

// How many went back, by operator and reason.
std::mutex returned_mutex;
std::map<std::pair<Operator, std::string_view>, int64_t> returned_calls;

// What flash_ext.log hears of every call; set once, at import, and only where there is a log.
SdpaListener listener = nullptr;

void count_served(Operator which, const Tensor& query, const Tensor& key, const Tensor& value) {
  served_calls[which].fetch_add(1, std::memory_order_relaxed);
  if (C10_UNLIKELY(listener != nullptr)) listener(kNames[which], nullptr, {query, key, value});
}

// Calls the implementation that was there before; its own checks and words apply.
template <class Result, class... Args>
Result call_before(Operator which, Reason reason, c10::DispatchKeySet keys, Args&&... args) {
  {
    const std::lock_guard<std::mutex> lock(returned_mutex);
    ++returned_calls[{which, reason}];
  }
  if (C10_UNLIKELY(listener != nullptr)) listener(kNames[which], reason, {});
  const std::shared_ptr<const Before> all = current_before();
  const Replaced& b = (*all)[which];
  TORCH_CHECK_NOT_IMPLEMENTED(
      b.kernel.has_value(), "aten::", kNames[which],
      ": flash_ext does not serve this call because ", reason, ", and this torch has no implementation of its own.");
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

constexpr Reason kHasDropout = "dropout_p is not 0";
constexpr Reason kNoGradient = "there is no gradient of the output";
constexpr Reason kOneOfBounds = "one of cu_seqlens_q and cu_seqlens_k is given";
constexpr Reason kOtherForward = "out or lse have a layout that this forward does not give";

// What the operators of dense tensors ask before they look at them.
Reason refusal_of_dense(const Tensor& query, const Tensor& key, const Tensor& value, double dropout_p) {
  if (dropout_p != 0) return kHasDropout;
  return query.dim() == 4 && key.dim() == 4 && value.dim() == 4 ? nullptr : "the tensors have other dimensions";
}

// ---- F.scaled_dot_product_attention without a mask ----------------------------------------------

using SdpaResult =
    std::tuple<Tensor, Tensor, Tensor, Tensor, SymInt, SymInt, Tensor, Tensor, Tensor>;

SdpaResult sdpa_forward(c10::DispatchKeySet keys, const Tensor& query, const Tensor& key,
                        const Tensor& value, double dropout_p, bool is_causal,
                        bool return_debug_mask, OptionalScale scale) {
  Reason reason = refusal_of_dense(query, key, value, dropout_p);
  if (return_debug_mask) reason = "a debug mask is asked for";
  if (reason == nullptr) {
    const Call call{query, key, value, true};
    reason = call.refusal(scale);
    if (reason == nullptr) {
      count_served(kSdpaForward, query, key, value);
      const BelowAll guard;
      auto [out, lse] = call.forward(std::nullopt, std::nullopt, scale_of(scale, query), -1,
                                     is_causal ? 0 : -1);
      auto [seed, offset] = no_state(query);
      return {std::move(out),
              std::move(lse),
              Tensor(),
              Tensor(),
              query.size(2),
              key.size(2),
              std::move(seed),
              std::move(offset),
              new_tensor({0}, query.options())};
    }
  }
  return call_before<SdpaResult>(kSdpaForward, reason, keys, query, key, value, dropout_p, is_causal,
                                 return_debug_mask, scale);
}

BwdResult sdpa_backward(c10::DispatchKeySet keys, const Tensor& grad_out, const Tensor& query,
                        const Tensor& key, const Tensor& value, const Tensor& out,
                        const Tensor& lse, const Tensor& cu_q, const Tensor& cu_k, SymInt max_q,
                        SymInt max_k, double dropout_p, bool is_causal, const Tensor& seed,
                        const Tensor& offset, OptionalScale scale) {
  Reason reason = refusal_of_dense(query, key, value, dropout_p);
  if (cu_q.defined()) reason = "the sequences are packed";
  if (reason == nullptr) {
    const Call call{query, key, value, true};
    reason = call.refusal(scale);
    if (reason == nullptr && !unit_stride(out)) reason = kOtherForward;
    if (reason == nullptr) {
      count_served(kSdpaBackward, query, key, value);
      const BelowAll guard;
      return call.backward(grad_out, out, lse, std::nullopt, std::nullopt, scale_of(scale, query),
                           -1, is_causal ? 0 : -1);
    }
  }
  return call_before<BwdResult>(kSdpaBackward, reason, keys, grad_out, query, key, value, out, lse, cu_q,
                                cu_k, max_q, max_k, dropout_p, is_causal, seed, offset, scale);
}

// ---- varlen_attn, nested tensors ----------------------------------------------------------------

using FlashResult = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

int64_t window_of(const OptionalSymInt& side) {
  return side.has_value() ? side->guard_int(__FILE__, __LINE__) : -1;
}

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
      return {std::move(out), std::move(lse), std::move(seed), std::move(offset),
              new_tensor({0}, q.options())};
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

BwdResult flash_backward(c10::DispatchKeySet keys, const Tensor& grad_out, const Tensor& q,
                         const Tensor& k, const Tensor& v, const Tensor& out, const Tensor& lse,
                         const Tensor& cu_q, const Tensor& cu_k, SymInt max_q, SymInt max_k,
                         double dropout_p, bool is_causal, const Tensor& rng_state,
                         const Tensor& unused, OptionalScale scale, OptionalSymInt left,
                         OptionalSymInt right) {
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
  return call_before<BwdResult>(kFlashBackward, reason, keys, grad_out, q, k, v, out, lse, cu_q, cu_k,
                                max_q, max_k, dropout_p, is_causal, rng_state, unused, scale, left,
                                right);
}

// ---- F.scaled_dot_product_attention with a mask, or causal with lengths that differ -------------
// The selector gives such calls to the memory-efficient operator. There the causal mask is aligned at
// the top left, and lse is padded to a multiple of 32 rows.

using MaskedResult = std::tuple<Tensor, Tensor, Tensor, Tensor>;
constexpr int64_t kLseRows = 32;

CallArgs masked_args(double scale, bool is_causal, const OptionalTensor& bias) {
  CallArgs a;
  a.softmax_scale = scale;
  a.window_right = is_causal ? 0 : -1;
  a.top_left = is_causal;
  a.bias = bias;
  return a;
}

Reason refusal_of_bias(const OptionalTensor& bias, const Tensor& q, const Tensor& k) {
  if (!bias.has_value()) return nullptr;
  if (bias->scalar_type() != q.scalar_type() && bias->scalar_type() != at::kFloat)
    return "the mask is neither float32 nor of the dtype of the query";
  if (bias->device() != q.device()) return "the devices differ";
  const std::array<int64_t, 4> sizes = {q.size(0), q.size(2), q.size(1), k.size(1)};
  bool fits = bias->dim() == 4;
  for (int dim = 0; fits && dim < 4; ++dim) fits = bias->size(dim) == 1 || bias->size(dim) == sizes[dim];
  return fits ? nullptr : "the mask does not broadcast to the scores";
}

// torch expands a mask to the size of the scores; as dimensions of size 1 repeats are read once.
OptionalTensor without_repeats(const OptionalTensor& bias) {
  if (!bias.has_value()) return bias;
  Tensor t = *bias;
  for (int64_t dim = 0; dim < 4; ++dim) {
    if (t.stride(dim) == 0 && t.size(dim) > 1) t = t.narrow(dim, 0, 1);
  }
  return t;
}

MaskedResult masked_forward(c10::DispatchKeySet keys, const Tensor& query, const Tensor& key,
                            const Tensor& value, const OptionalTensor& bias, bool compute_lse,
                            double dropout_p, bool is_causal, OptionalScale scale) {
  Reason reason = refusal_of_dense(query, key, value, dropout_p);
  if (reason == nullptr) {
    const Tensor q = swapped(query), k = swapped(key), v = swapped(value);
    reason = refusal(scale, q, k, v, std::nullopt, std::nullopt);
    if (reason == nullptr) reason = refusal_of_bias(bias, q, k);
    if (reason == nullptr) {
      count_served(kMaskedForward, query, key, value);
      const BelowAll guard;
      const auto [out, own_lse, row_max] = call_fwd_mod(
          q, k, v, masked_args(scale_of(scale, q), is_causal, without_repeats(bias)));
      const int64_t rows = q.size(1);
      const int64_t padded = compute_lse ? (rows + kLseRows - 1) / kLseRows * kLseRows : 0;
      Tensor lse = own_lse;
      if (padded != rows) {
        lse = new_tensor({q.size(0), q.size(2), padded}, own_lse.options());
        if (compute_lse) {
          lse.narrow(2, 0, rows).copy_(own_lse);
          // As torch pads: its backward, which runs where flash_ext is off by then, relies on it.
          lse.narrow(2, rows, padded - rows).fill_(std::numeric_limits<double>::infinity());
        }
      }
      return {out.transpose(1, 2), std::move(lse), no_number(query, is_capturing(query)), no_number(query, is_capturing(query))};
    }
  }
  return call_before<MaskedResult>(kMaskedForward, reason, keys, query, key, value, bias, compute_lse,
                                   dropout_p, is_causal, scale);
}

MaskedResult masked_backward(c10::DispatchKeySet keys, const Tensor& grad_out, const Tensor& query,
                             const Tensor& key, const Tensor& value, const Tensor& bias,
                             const Tensor& out, const Tensor& lse, const Tensor& seed,
                             const Tensor& offset, double dropout_p, std::array<bool, 4> needs,
                             bool is_causal, OptionalScale scale) {
  Reason reason = refusal_of_dense(query, key, value, dropout_p);
  if (!grad_out.defined()) reason = kNoGradient;
  if (reason == nullptr) {
    const Tensor q = swapped(query), k = swapped(key), v = swapped(value);
    const OptionalTensor given = optional(bias);
    const bool need_bias = needs[3] && given.has_value();
    reason = refusal(scale, q, k, v, std::nullopt, std::nullopt);
    // A gradient of the bias has every element, also those of a mask that repeats.
    if (reason == nullptr) reason = refusal_of_bias(given, q, k);
    if (reason == nullptr && !(unit_stride(out) && lse.dim() == 3 && lse.size(2) >= q.size(1))) reason = kOtherForward;
    if (reason == nullptr) {
      count_served(kMaskedBackward, query, key, value);
      const BelowAll guard;
      CallArgs args = masked_args(scale_of(scale, q), is_causal, need_bias ? given : without_repeats(given));
      args.need_qkv = needs[0] || needs[1] || needs[2];
      args.need_bias = need_bias;
      auto [dq, dk, dv, dbias, dslopes, dsinks] = call_bwd_mod(
          grad_out.transpose(1, 2), q, k, v, out.transpose(1, 2), lse.narrow(2, 0, q.size(1)), args);
      const auto wanted = [](bool needed, Tensor t) { return needed ? t : Tensor(); };
      return {wanted(needs[0], dq.transpose(1, 2)), wanted(needs[1], dk.transpose(1, 2)),
              wanted(needs[2], dv.transpose(1, 2)), wanted(need_bias, dbias)};
    }
  }
  return call_before<MaskedResult>(kMaskedBackward, reason, keys, grad_out, query, key, value, bias, out,
                                   lse, seed, offset, dropout_p, needs, is_causal, scale);
}

// ---- F.scaled_dot_product_attention with grouped heads and a mask -------------------------------
// To the memory-efficient operator the selector of torch 2.11 gives no grouped heads. Where its order
// has cuDNN before unfused code, as on Hopper, that operator is asked next. Of its calls only those are
// taken that neither of the others could get, so that cuDNN asked for by name is cuDNN.

Reason refusal_of_grouped(const Tensor& query, const Tensor& key, const Tensor& value, bool has_bias, bool is_causal,
                          double dropout_p) {
  const Reason reason = refusal_of_dense(query, key, value, dropout_p);
  if (reason != nullptr) return reason;
  const bool is_offered_to_nobody_else =
      query.size(1) != key.size(1) &&
      (has_bias || (is_causal && query.size(2) != key.size(2)) || value.size(3) != query.size(3));
  return is_offered_to_nobody_else ? nullptr : "cuDNN was chosen for it";
}

// A mask as the caller gave it, with all four dimensions.
OptionalTensor with_four_dims(const OptionalTensor& bias) {
  OptionalTensor t = bias;
  while (t.has_value() && t->dim() < 4) t = t->unsqueeze(0);
  return t;
}

SdpaResult grouped_forward(c10::DispatchKeySet keys, const Tensor& query, const Tensor& key,
                           const Tensor& value, const OptionalTensor& bias, bool compute_lse,
                           double dropout_p, bool is_causal, bool return_debug_mask,
                           OptionalScale scale) {
  Reason reason = refusal_of_grouped(query, key, value, bias.has_value(), is_causal, dropout_p);
  if (return_debug_mask) reason = "a debug mask is asked for";
  if (reason == nullptr) {
    const Tensor q = swapped(query), k = swapped(key), v = swapped(value);
    const OptionalTensor mask = with_four_dims(bias);
    reason = refusal(scale, q, k, v, std::nullopt, std::nullopt);
    if (reason == nullptr) reason = refusal_of_bias(mask, q, k);
    if (reason == nullptr) {
      count_served(kGroupedForward, query, key, value);
      const BelowAll guard;
      const auto [out, lse, row_max] = call_fwd_mod(
          q, k, v, masked_args(scale_of(scale, q), is_causal, without_repeats(mask)));
      return {placed_beside(query, out.transpose(1, 2)), lse.unsqueeze(-1), Tensor(), Tensor(), query.size(2),
              key.size(2), no_number(query, true), no_number(query, true), Tensor()};
    }
  }
  return call_before<SdpaResult>(kGroupedForward, reason, keys, query, key, value, bias, compute_lse,
                                 dropout_p, is_causal, return_debug_mask, scale);
}

BwdResult grouped_backward(c10::DispatchKeySet keys, const Tensor& grad_out, const Tensor& query,
                           const Tensor& key, const Tensor& value, const Tensor& out,
                           const Tensor& lse, const Tensor& seed, const Tensor& offset,
                           const Tensor& bias, const Tensor& cu_q, const Tensor& cu_k, SymInt max_q,
                           SymInt max_k, double dropout_p, bool is_causal, OptionalScale scale) {
  Reason reason = refusal_of_grouped(query, key, value, bias.defined(), is_causal, dropout_p);
  if (!grad_out.defined()) reason = kNoGradient;
  if (cu_q.defined() || cu_k.defined()) reason = "the sequences are packed";
  if (reason == nullptr) {
    const Tensor q = swapped(query), k = swapped(key), v = swapped(value);
    const OptionalTensor mask = with_four_dims(optional(bias));
    const bool has_lse = lse.dim() == 4 && lse.size(2) == q.size(1) && lse.size(3) == 1;
    reason = refusal(scale, q, k, v, std::nullopt, std::nullopt);
    if (reason == nullptr) reason = refusal_of_bias(mask, q, k);
    if (reason == nullptr && !(unit_stride(out) && has_lse)) reason = kOtherForward;
    if (reason == nullptr) {
      count_served(kGroupedBackward, query, key, value);
      const BelowAll guard;
      const auto [dq, dk, dv, dbias, dslopes, dsinks] =
          call_bwd_mod(grad_out.transpose(1, 2), q, k, v, out.transpose(1, 2), lse.squeeze(-1),
                       masked_args(scale_of(scale, q), is_causal, without_repeats(mask)));
      return {placed_beside(query, dq.transpose(1, 2)), placed_beside(key, dk.transpose(1, 2)),
              placed_beside(value, dv.transpose(1, 2))};
    }
  }
  return call_before<BwdResult>(kGroupedBackward, reason, keys, grad_out, query, key, value, out, lse, seed,
                                offset, bias, cu_q, cu_k, max_q, max_k, dropout_p, is_causal,
                                scale);
}

// ---- on and off ---------------------------------------------------------------------------------

Before found_at(c10::DispatchKey key) {
  Before found;
  for (const char* name : kNames) {
    auto op = c10::Dispatcher::singleton().findSchemaOrThrow(
        (std::string("aten::") + name).c_str(), "");
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
  auto library =
      std::make_unique<torch::Library>(torch::Library::IMPL, "aten", key, __FILE__, __LINE__);
  library->impl(kNames[kSdpaForward], TORCH_FN(sdpa_forward));
  library->impl(kNames[kSdpaBackward], TORCH_FN(sdpa_backward));
  library->impl(kNames[kFlashForward],
                TORCH_FN(FlashForward<at::_ops::_flash_attention_forward::schema>::call));
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

TORCH_LIBRARY_FRAGMENT(flash_ext, m) {
  m.def("_set_sdpa(str key) -> ()", &set_sdpa);
}

}  // namespace flash_ext
