// Gradients and automatic mixed precision of the operators.
#include <ATen/autocast_mode.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/functions/basic_ops.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/library.h>

#include <memory>
#include <string>
#include <type_traits>
#include <utility>

#include "api.h"
#include "tangents.h"

namespace flash_ext {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// ---- autograd -----------------------------------------------------------------------------------

// The numbers of a call that its backward needs; tensors are saved apart.
constexpr std::tuple kKept =
    std::tuple_cat(fields::kProblem, std::tuple{Field{"deterministic", &CallArgs::deterministic}});
constexpr std::tuple kKeptMod = std::tuple_cat(kKept, fields::kModifiers);

template <typename T>
bool is_default(const T& value, const T& otherwise) {
  if constexpr (std::is_same_v<T, SymInt>) {
    return value.maybe_as_int() == otherwise.maybe_as_int() && value.maybe_as_int().has_value();
  } else {
    return value == otherwise;
  }
}

// Those that are not the defaults.
template <const auto& kFields>
void keep_numbers(AutogradContext* ctx, const CallArgs& a) {
  static const CallArgs defaults;
  auto& saved = ctx->saved_data;
  const auto keep = [&](const auto& field) {
    const auto& value = a.*field.member;
    if constexpr (!std::is_same_v<std::remove_cvref_t<decltype(value)>, OptionalTensor>) {
      if (!is_default(value, defaults.*field.member)) saved[std::string(field.name)] = value;
    }
  };
  std::apply([&](const auto&... field) { (keep(field), ...); }, kFields);
  if (a.backend.has_value()) saved["backend"] = std::string(*a.backend);
}

template <const auto& kFields>
void restore_numbers(AutogradContext* ctx, CallArgs& a, std::string& backend) {
  auto& saved = ctx->saved_data;
  if (saved.empty()) return;
  const auto restore = [&](const auto& field) {
    auto& value = a.*field.member;
    using T = std::remove_cvref_t<decltype(value)>;
    if constexpr (!std::is_same_v<T, OptionalTensor>) {
      const auto found = saved.find(std::string(field.name));
      if (found != saved.end()) value = found->second.template to<T>();
    }
  };
  std::apply([&](const auto&... field) { (restore(field), ...); }, kFields);
  const auto found = saved.find("backend");
  if (found == saved.end()) return;
  backend = found->second.toStringRef();
  a.backend = backend;
}

OptionalTensor optional(const Tensor& t) { return t.defined() ? OptionalTensor(t) : std::nullopt; }

class AttentionFunction : public torch::autograd::Function<AttentionFunction> {
 public:
  static constexpr bool is_traceable = true;

  static variable_list forward(AutogradContext* ctx, const Tensor& q, const Tensor& k, const Tensor& v, CallArgs a) {
    a.deterministic = is_deterministic(a.deterministic);
    a.want_lse = true;
    FwdResult result;
    {
      const at::AutoDispatchBelowADInplaceOrView below_autograd;
      result = call_fwd(q, k, v, a);
    }
    const auto& [out, lse] = result;
    ctx->save_for_backward({q, k, v, out, lse, a.cu_seqlens_q.value_or(Tensor()), a.cu_seqlens_k.value_or(Tensor())});
    ctx->set_materialize_grads(false);
    keep_numbers<kKept>(ctx, a);
    return {out, lse};
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    variable_list result(4);  // of q, k, v and the rest
    Tensor dout = grads[0];
    const Tensor dlse = grads[1];
    if (!dout.defined() && !dlse.defined()) return result;

    const variable_list tensors = ctx->get_saved_variables();
    const Tensor &q = tensors[0], &k = tensors[1], &v = tensors[2], &out = tensors[3], &lse = tensors[4];
    if (!dout.defined()) dout = at::zeros_like(out);
    CallArgs a;
    std::string backend;
    a.dlse = optional(dlse);
    a.cu_seqlens_q = optional(tensors[5]);
    a.cu_seqlens_k = optional(tensors[6]);
    restore_numbers<kKept>(ctx, a, backend);
    const auto [dq, dk, dv] = call_bwd(dout, q, k, v, out, lse, a);
    if (ctx->needs_input_grad(0)) result[0] = dq;
    if (ctx->needs_input_grad(1)) result[1] = dk;
    if (ctx->needs_input_grad(2)) result[2] = dv;
    return result;
  }
};

// The tensors of modifiers, in the order in which they are saved.
constexpr OptionalTensor CallArgs::* kModifierTensors[] = {
    &CallArgs::cu_seqlens_q, &CallArgs::cu_seqlens_k, &CallArgs::bias,        &CallArgs::mask,
    &CallArgs::document_q,   &CallArgs::document_k,   &CallArgs::prefix_lens, &CallArgs::hidden_rows,
    &CallArgs::hidden_keys,  &CallArgs::blocks,       &CallArgs::slopes,      &CallArgs::sinks,
    &CallArgs::rng};

// Masks are saved in the form that was given: what their tensors hold later changes no gradient once they are condensed.
class ModifiedAttentionFunction : public torch::autograd::Function<ModifiedAttentionFunction> {
 public:
  static constexpr bool is_traceable = true;

  // bias, slopes and sinks stand in `a` as well; here autograd sees them.
  static variable_list forward(AutogradContext* ctx, const Tensor& q, const Tensor& k, const Tensor& v,
                               const OptionalTensor& bias, const OptionalTensor& slopes, const OptionalTensor& sinks,
                               CallArgs a) {
    a.deterministic = is_deterministic(a.deterministic);
    a.want_lse = true;
    FwdModResult result;
    {
      const at::AutoDispatchBelowADInplaceOrView below_autograd;
      result = call_fwd_mod(q, k, v, a);
    }
    const auto& [out, lse, row_max] = result;
    variable_list tensors{q, k, v, out, lse};
    for (const auto member : kModifierTensors) tensors.push_back((a.*member).value_or(Tensor()));
    ctx->save_for_backward(std::move(tensors));
    ctx->set_materialize_grads(false);
    ctx->mark_non_differentiable({row_max});
    keep_numbers<kKeptMod>(ctx, a);
    return {out, lse, row_max};
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    variable_list result(7);  // of q, k, v, bias, slopes, sinks and the rest
    Tensor dout = grads[0];
    if (!dout.defined() && !grads[1].defined()) return result;
    const variable_list tensors = ctx->get_saved_variables();
    const Tensor& out = tensors[3];
    if (!dout.defined()) dout = at::zeros_like(out);
    CallArgs a;
    std::string backend;
    a.dlse = optional(grads[1]);
    for (size_t i = 0; i < std::size(kModifierTensors); ++i) a.*kModifierTensors[i] = optional(tensors[5 + i]);
    restore_numbers<kKeptMod>(ctx, a, backend);
    // Autograd counts the tensors that were given.
    bool needs[6];
    size_t edge = 0;
    const bool given[6] = {true, true, true, a.bias.has_value(), a.slopes.has_value(), a.sinks.has_value()};
    for (int i = 0; i < 6; ++i) needs[i] = given[i] && ctx->needs_input_grad(edge++);
    a.need_qkv = needs[0] || needs[1] || needs[2];
    a.need_bias = needs[3], a.need_slopes = needs[4], a.need_sinks = needs[5];
    const auto [dq, dk, dv, dbias, dslopes, dsinks] =
        call_bwd_mod(dout, tensors[0], tensors[1], tensors[2], out, tensors[4], a);
    const Tensor* const found[6] = {&dq, &dk, &dv, &dbias, &dslopes, &dsinks};
    for (int i = 0; i < 6; ++i) {
      if (needs[i]) result[i] = *found[i];
    }
    return result;
  }
};

// Whether a gradient may be wanted of one of these. Refuses what has none.
bool needs_graph(std::initializer_list<const Tensor*> tensors, bool is_wide, const Tensor& q) {
  bool has_gradient = false;
  for (const Tensor* t : tensors) {
    if (t == nullptr) continue;
    refuse_tangent(*t);
    has_gradient = has_gradient || t->requires_grad();
  }
  if (!has_gradient || !at::GradMode::is_enabled()) return false;
  // Autograd wants a gradient in the dtype of out, which the backward takes in that of q only.
  TORCH_CHECK_NOT_IMPLEMENTED(
      !is_wide || !c10::isReducedFloatingType(q.scalar_type()),
      "out_dtype: a result wider than q has no gradient; call forward under torch.no_grad(), and "
      "backward for the gradients.");
  return true;
}

FwdResult fwd_autograd(const Tensor& q, const Tensor& k, const Tensor& v, const CallArgs& a) {
  if (needs_graph({&q, &k, &v}, a.wide, q)) {
    variable_list result = AttentionFunction::apply(q, k, v, a);
    return {std::move(result[0]), std::move(result[1])};
  }
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  return call_fwd(q, k, v, a);
}

FwdModResult fwd_mod_autograd(const Tensor& q, const Tensor& k, const Tensor& v, const CallArgs& a) {
  const auto pointer = [](const OptionalTensor& t) { return t.has_value() ? &*t : nullptr; };
  if (needs_graph({&q, &k, &v, pointer(a.bias), pointer(a.slopes), pointer(a.sinks)}, a.wide, q)) {
    variable_list result = ModifiedAttentionFunction::apply(q, k, v, a.bias, a.slopes, a.sinks, a);
    return {std::move(result[0]), std::move(result[1]), std::move(result[2])};
  }
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  return call_fwd_mod(q, k, v, a);
}

// How torch holds a node: by std::shared_ptr in 2.11, by a pointer of its own in 2.13.
using NodePointer = decltype(torch::autograd::Edge::function);

template <typename Pointer, typename Kind, typename... Args>
Pointer new_node(Args&&... args) {
  if constexpr (std::is_same_v<Pointer, std::shared_ptr<torch::autograd::Node>>) {
    return std::make_shared<Kind>(std::forward<Args>(args)...);
  } else {
    return c10::make_intrusive<Kind>(std::forward<Args>(args)...);
  }
}

// Gradients whose own gradient raises, in words, instead of being silently zero.
template <typename Result, typename... Inputs>
Result without_derivative(Result gradients, const Inputs&... inputs) {
  if (!torch::autograd::compute_requires_grad(inputs...)) return gradients;
  const auto node = new_node<NodePointer, torch::autograd::Error>(
      "the second derivative of attention is not implemented. F.scaled_dot_product_attention has one under "
      "torch.nn.attention.sdpa_kernel(SDPBackend.MATH).",
      torch::autograd::collect_next_edges(inputs...));
  const auto mark = [&](const Tensor& t) {
    if (t.defined()) torch::autograd::set_history(t, node);
  };
  std::apply([&](const auto&... t) { (mark(t), ...); }, gradients);
  return gradients;
}

template <typename Result, auto kCall>
Result bwd_autograd(const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out,
                    const Tensor& lse, const CallArgs& a) {
  Result gradients;
  {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    gradients = kCall(dout, q, k, v, out, lse, a);
  }
  const auto or_none = [](const OptionalTensor& t) { return t.value_or(Tensor()); };
  return without_derivative(std::move(gradients), dout, q, k, v, out, lse, or_none(a.dlse), or_none(a.bias),
                            or_none(a.slopes), or_none(a.sinks));
}

// ---- autocast -----------------------------------------------------------------------------------

// Tensors in the dtype of the autocast region, which what it is made for does not see.
template <c10::DeviceType kDevice>
struct Cast {
  c10::impl::ExcludeDispatchKeyGuard no_autocast{at::autocast::get_autocast_dispatch_key_from_device_type(kDevice)};
  c10::ScalarType dtype = at::autocast::get_autocast_dtype(kDevice);
  Tensor operator()(const Tensor& t) const { return at::autocast::cached_cast(dtype, t, kDevice); }
};

template <c10::DeviceType kDevice>
FwdResult fwd_autocast(const Tensor& q, const Tensor& k, const Tensor& v, const CallArgs& a) {
  const Cast<kDevice> cast;
  return call_fwd(cast(q), cast(k), cast(v), a);
}

// For direct calls of backward inside an autocast region; autograd arrives here with dtypes that
// agree.
template <c10::DeviceType kDevice>
BwdResult bwd_autocast(const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out,
                       const Tensor& lse, const CallArgs& a) {
  const Cast<kDevice> cast;
  return call_bwd(cast(dout), cast(q), cast(k), cast(v), cast(out), lse, a);
}

// A bias keeps float32 or the region's dtype, whichever it has, and else becomes float32.
CallArgs with_cast_bias(const CallArgs& a, const Tensor& q) {
  CallArgs result = a;
  if (a.bias.has_value() && a.bias->scalar_type() != at::kFloat && a.bias->scalar_type() != q.scalar_type()) {
    result.bias = a.bias->to(at::kFloat);
  }
  return result;
}

template <c10::DeviceType kDevice>
FwdModResult fwd_mod_autocast(const Tensor& q, const Tensor& k, const Tensor& v, const CallArgs& a) {
  const Cast<kDevice> cast;
  const Tensor own_q = cast(q);
  return call_fwd_mod(own_q, cast(k), cast(v), with_cast_bias(a, own_q));
}

template <c10::DeviceType kDevice>
BwdModResult bwd_mod_autocast(const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out,
                              const Tensor& lse, const CallArgs& a) {
  const Cast<kDevice> cast;
  const Tensor own_q = cast(q);
  return call_bwd_mod(cast(dout), own_q, cast(k), cast(v), cast(out), lse, with_cast_bias(a, own_q));
}

}  // namespace

TORCH_LIBRARY_IMPL(flash_ext, Autograd, m) {
  m.impl("fwd", &FwdOperator::entry<fwd_autograd>);
  m.impl("fwd_mod", &FwdModOperator::entry<fwd_mod_autograd>);
  m.impl("bwd", &BwdOperator::entry<bwd_autograd<BwdResult, call_bwd>>);
  m.impl("bwd_mod", &BwdModOperator::entry<bwd_autograd<BwdModResult, call_bwd_mod>>);
}

TORCH_LIBRARY_IMPL(flash_ext, AutocastCUDA, m) {
  m.impl("fwd", &FwdOperator::entry<fwd_autocast<c10::DeviceType::CUDA>>);
  m.impl("bwd", &BwdOperator::entry<bwd_autocast<c10::DeviceType::CUDA>>);
  m.impl("fwd_mod", &FwdModOperator::entry<fwd_mod_autocast<c10::DeviceType::CUDA>>);
  m.impl("bwd_mod", &BwdModOperator::entry<bwd_mod_autocast<c10::DeviceType::CUDA>>);
}

TORCH_LIBRARY_IMPL(flash_ext, AutocastCPU, m) {
  m.impl("fwd", &FwdOperator::entry<fwd_autocast<c10::DeviceType::CPU>>);
  m.impl("bwd", &BwdOperator::entry<bwd_autocast<c10::DeviceType::CPU>>);
  m.impl("fwd_mod", &FwdModOperator::entry<fwd_mod_autocast<c10::DeviceType::CPU>>);
  m.impl("bwd_mod", &BwdModOperator::entry<bwd_mod_autocast<c10::DeviceType::CPU>>);
}

}  // namespace flash_ext
