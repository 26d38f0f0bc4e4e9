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

// The numbers of a call, kept for its backward; tensors are saved apart.
constexpr std::tuple kKept = std::tuple_cat(fields::kProblem, std::tuple{Field{"deterministic", &CallArgs::deterministic}});

class AttentionFunction : public torch::autograd::Function<AttentionFunction> {
 public:
  static constexpr bool is_traceable = true;

  static variable_list forward(AutogradContext* ctx, const Tensor& q, const Tensor& k, const Tensor& v, CallArgs a) {
    a.deterministic = is_deterministic(a.deterministic);
    FwdResult result;
    {
      const at::AutoDispatchBelowADInplaceOrView below_autograd;
      result = call_fwd(q, k, v, a);
    }
    const auto& [out, lse] = result;
    ctx->save_for_backward({q, k, v, out, lse, a.cu_seqlens_q.value_or(Tensor()), a.cu_seqlens_k.value_or(Tensor())});
    ctx->set_materialize_grads(false);
    auto& saved = ctx->saved_data;
    const auto keep = [&](const auto& field) {
      const auto& value = a.*field.member;
      if constexpr (!std::is_same_v<std::remove_cvref_t<decltype(value)>, OptionalTensor>) {
        saved[std::string(field.name)] = value;
      }
    };
    std::apply([&](const auto&... field) { (keep(field), ...); }, kKept);
    if (a.path.has_value()) saved["path"] = std::string(*a.path);
    return {out, lse};
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    variable_list result(4);  // of q, k, v and the rest
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
    CallArgs a;
    a.dlse = optional(dlse);
    a.cu_seqlens_q = optional(tensors[5]);
    a.cu_seqlens_k = optional(tensors[6]);
    const auto restore = [&](const auto& field) {
      auto& value = a.*field.member;
      using T = std::remove_cvref_t<decltype(value)>;
      if constexpr (!std::is_same_v<T, OptionalTensor>) value = saved[std::string(field.name)].template to<T>();
    };
    std::apply([&](const auto&... field) { (restore(field), ...); }, kKept);
    const auto path = saved.find("path");
    const std::string path_name = path == saved.end() ? "" : path->second.toStringRef();
    if (!path_name.empty()) a.path = path_name;
    const auto [dq, dk, dv] = call_bwd(dout, q, k, v, out, lse, a);
    if (ctx->needs_input_grad(0)) result[0] = dq;
    if (ctx->needs_input_grad(1)) result[1] = dk;
    if (ctx->needs_input_grad(2)) result[2] = dv;
    return result;
  }
};

bool has_tangent(const Tensor& t) { return t._fw_grad(/*level=*/0).defined(); }

FwdResult fwd_autograd(const Tensor& q, const Tensor& k, const Tensor& v, const CallArgs& a) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      !has_tangent(q) && !has_tangent(k) && !has_tangent(v),
      "forward-mode automatic differentiation of attention is not implemented; use reverse mode.");
  if (at::GradMode::is_enabled() && (q.requires_grad() || k.requires_grad() || v.requires_grad())) {
    // Autograd wants a gradient in the dtype of out, which the backward takes in that of q only.
    TORCH_CHECK_NOT_IMPLEMENTED(
        !a.wide || !c10::isReducedFloatingType(q.scalar_type()),
        "out_dtype: a result wider than q has no gradient; call forward under torch.no_grad(), and "
        "backward for the gradients.");
    variable_list result = AttentionFunction::apply(q, k, v, a);
    return {std::move(result[0]), std::move(result[1])};
  }
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  return call_fwd(q, k, v, a);
}

// ---- autocast -----------------------------------------------------------------------------------

// Tensors in the dtype of the autocast region.
template <c10::DeviceType kDevice>
struct Cast {
  c10::ScalarType dtype = at::autocast::get_autocast_dtype(kDevice);
  Tensor operator()(const Tensor& t) const { return at::autocast::cached_cast(dtype, t, kDevice); }
};

template <c10::DeviceType kDevice>
FwdResult fwd_autocast(const Tensor& q, const Tensor& k, const Tensor& v, const CallArgs& a) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(
      at::autocast::get_autocast_dispatch_key_from_device_type(kDevice));
  const Cast<kDevice> cast;
  return call_fwd(cast(q), cast(k), cast(v), a);
}

// For direct calls of backward inside an autocast region; autograd arrives here with dtypes that
// agree.
template <c10::DeviceType kDevice>
BwdResult bwd_autocast(const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out,
                       const Tensor& lse, const CallArgs& a) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(
      at::autocast::get_autocast_dispatch_key_from_device_type(kDevice));
  const Cast<kDevice> cast;
  return call_bwd(cast(dout), cast(q), cast(k), cast(v), cast(out), lse, a);
}

}  // namespace

TORCH_LIBRARY_IMPL(flash_ext, Autograd, m) {
  m.impl("fwd", &FwdOperator::entry<fwd_autograd>);
  // A second derivative raises instead of being silently zero.
  m.impl("bwd", torch::autograd::autogradNotImplementedFallback());
}

TORCH_LIBRARY_IMPL(flash_ext, AutocastCUDA, m) {
  m.impl("fwd", &FwdOperator::entry<fwd_autocast<c10::DeviceType::CUDA>>);
  m.impl("bwd", &BwdOperator::entry<bwd_autocast<c10::DeviceType::CUDA>>);
}

TORCH_LIBRARY_IMPL(flash_ext, AutocastCPU, m) {
  m.impl("fwd", &FwdOperator::entry<fwd_autocast<c10::DeviceType::CPU>>);
  m.impl("bwd", &BwdOperator::entry<bwd_autocast<c10::DeviceType::CPU>>);
}

}  // namespace flash_ext
