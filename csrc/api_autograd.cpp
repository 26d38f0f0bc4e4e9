// Gradients and automatic mixed precision of the operators.
#include <ATen/autocast_mode.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <string>

#include "api.h"

namespace flash_ext {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// ---- autograd -----------------------------------------------------------------------------------

class AttentionFunction : public torch::autograd::Function<AttentionFunction> {
 public:
  static constexpr bool is_traceable = true;

  static variable_list forward(AutogradContext* ctx, const Tensor& q, const Tensor& k,
                               const Tensor& v, const OptionalTensor& cu_seqlens_q,
                               const OptionalTensor& cu_seqlens_k, SymInt max_seqlen_q,
                               SymInt max_seqlen_k, double softmax_scale, SymInt window_left,
                               SymInt window_right, bool deterministic, OptionalName path) {
    deterministic = is_deterministic(deterministic);
    FwdResult result;
    {
      const at::AutoDispatchBelowADInplaceOrView below_autograd;
      result = call_fwd(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
                        softmax_scale, window_left, window_right, deterministic, path,
                        /*wide=*/false);
    }
    const auto& [out, lse] = result;
    ctx->save_for_backward(
        {q, k, v, out, lse, cu_seqlens_q.value_or(Tensor()), cu_seqlens_k.value_or(Tensor())});
    ctx->set_materialize_grads(false);
    auto& saved = ctx->saved_data;
    saved["max_seqlen_q"] = std::move(max_seqlen_q);
    saved["max_seqlen_k"] = std::move(max_seqlen_k);
    saved["softmax_scale"] = softmax_scale;
    saved["window_left"] = std::move(window_left);
    saved["window_right"] = std::move(window_right);
    saved["deterministic"] = deterministic;
    if (path.has_value()) saved["path"] = std::string(*path);
    return {out, lse};
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    constexpr size_t kNumArguments = 12;  // of forward, without ctx
    variable_list result(kNumArguments);
    Tensor dout = grads[0];
    const Tensor dlse = grads[1];
    if (!dout.defined() && !dlse.defined()) return result;

    const variable_list tensors = ctx->get_saved_variables();
    const Tensor &q = tensors[0], &k = tensors[1], &v = tensors[2], &out = tensors[3],
                 &lse = tensors[4];
    if (!dout.defined()) dout = at::zeros_like(out);
    const auto optional = [](const Tensor& t) {
      return t.defined() ? OptionalTensor(t) : std::nullopt;
    };
    auto& saved = ctx->saved_data;
    const auto path = saved.find("path");
    const std::string path_name = path == saved.end() ? "" : path->second.toStringRef();
    const auto [dq, dk, dv] = call_bwd(
        dout, q, k, v, out, lse, optional(dlse), optional(tensors[5]), optional(tensors[6]),
        saved["max_seqlen_q"].toSymInt(), saved["max_seqlen_k"].toSymInt(),
        saved["softmax_scale"].toDouble(), saved["window_left"].toSymInt(),
        saved["window_right"].toSymInt(), saved["deterministic"].toBool(),
        path_name.empty() ? OptionalName() : OptionalName(path_name), /*wide=*/false);
    if (ctx->needs_input_grad(0)) result[0] = dq;
    if (ctx->needs_input_grad(1)) result[1] = dk;
    if (ctx->needs_input_grad(2)) result[2] = dv;
    return result;
  }
};

bool has_tangent(const Tensor& t) { return t._fw_grad(/*level=*/0).defined(); }

FwdResult fwd_autograd(const Tensor& q, const Tensor& k, const Tensor& v,
                       const OptionalTensor& cu_seqlens_q, const OptionalTensor& cu_seqlens_k,
                       SymInt max_seqlen_q, SymInt max_seqlen_k, double softmax_scale,
                       SymInt window_left, SymInt window_right, bool deterministic,
                       OptionalName path, bool wide) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      !has_tangent(q) && !has_tangent(k) && !has_tangent(v),
      "forward-mode automatic differentiation of attention is not implemented; use reverse mode.");
  if (at::GradMode::is_enabled() && (q.requires_grad() || k.requires_grad() || v.requires_grad())) {
    // Autograd wants a gradient in the dtype of out, which the backward takes in that of q only.
    TORCH_CHECK_NOT_IMPLEMENTED(
        !wide || !c10::isReducedFloatingType(q.scalar_type()),
        "out_dtype: a result wider than q has no gradient; call forward under torch.no_grad(), and "
        "backward for the gradients.");
    variable_list result = AttentionFunction::apply(
        q, k, v, cu_seqlens_q, cu_seqlens_k, std::move(max_seqlen_q), std::move(max_seqlen_k),
        softmax_scale, std::move(window_left), std::move(window_right), deterministic, path);
    return {std::move(result[0]), std::move(result[1])};
  }
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  return call_fwd(q, k, v, cu_seqlens_q, cu_seqlens_k, std::move(max_seqlen_q),
                  std::move(max_seqlen_k), softmax_scale, std::move(window_left),
                  std::move(window_right), deterministic, path, wide);
}

// ---- autocast -----------------------------------------------------------------------------------

template <c10::DeviceType kDevice>
FwdResult fwd_autocast(const Tensor& q, const Tensor& k, const Tensor& v,
                       const OptionalTensor& cu_seqlens_q, const OptionalTensor& cu_seqlens_k,
                       SymInt max_seqlen_q, SymInt max_seqlen_k, double softmax_scale,
                       SymInt window_left, SymInt window_right, bool deterministic,
                       OptionalName path, bool wide) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(
      at::autocast::get_autocast_dispatch_key_from_device_type(kDevice));
  const auto dtype = at::autocast::get_autocast_dtype(kDevice);
  const auto cast = [dtype](const Tensor& t) {
    return at::autocast::cached_cast(dtype, t, kDevice);
  };
  return call_fwd(cast(q), cast(k), cast(v), cu_seqlens_q, cu_seqlens_k, std::move(max_seqlen_q),
                  std::move(max_seqlen_k), softmax_scale, std::move(window_left),
                  std::move(window_right), deterministic, path, wide);
}

// For direct calls of backward inside an autocast region; autograd arrives here with dtypes that
// agree.
template <c10::DeviceType kDevice>
BwdResult bwd_autocast(const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v,
                       const Tensor& out, const Tensor& lse, const OptionalTensor& dlse,
                       const OptionalTensor& cu_seqlens_q, const OptionalTensor& cu_seqlens_k,
                       SymInt max_seqlen_q, SymInt max_seqlen_k, double softmax_scale,
                       SymInt window_left, SymInt window_right, bool deterministic,
                       OptionalName path, bool wide) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(
      at::autocast::get_autocast_dispatch_key_from_device_type(kDevice));
  const auto dtype = at::autocast::get_autocast_dtype(kDevice);
  const auto cast = [dtype](const Tensor& t) {
    return at::autocast::cached_cast(dtype, t, kDevice);
  };
  return call_bwd(cast(dout), cast(q), cast(k), cast(v), cast(out), lse, dlse, cu_seqlens_q,
                  cu_seqlens_k, std::move(max_seqlen_q), std::move(max_seqlen_k), softmax_scale,
                  std::move(window_left), std::move(window_right), deterministic, path, wide);
}

}  // namespace

TORCH_LIBRARY_IMPL(flash_ext, Autograd, m) {
  m.impl("fwd", &fwd_autograd);
  // A second derivative raises instead of being silently zero.
  m.impl("bwd", torch::autograd::autogradNotImplementedFallback());
}

TORCH_LIBRARY_IMPL(flash_ext, AutocastCUDA, m) {
  m.impl("fwd", &fwd_autocast<c10::DeviceType::CUDA>);
  m.impl("bwd", &bwd_autocast<c10::DeviceType::CUDA>);
}

TORCH_LIBRARY_IMPL(flash_ext, AutocastCPU, m) {
  m.impl("fwd", &fwd_autocast<c10::DeviceType::CPU>);
  m.impl("bwd", &bwd_autocast<c10::DeviceType::CPU>);
}

}  // namespace flash_ext
