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
#include "checks.h"
#include "operators.h"
#include "tangents.h"

namespace flash_ext {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// ---- autograd -----------------------------------------------------------------------------------

// What a call's backward needs beside q, k, v, out and lse.
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

// Tensors, and the numbers that are not the defaults. Masks are kept in the form that was given: what their tensors
// hold later changes no gradient once they are condensed.
template <const auto& kFields>
void keep(AutogradContext* ctx, variable_list tensors, const CallArgs& a) {
  for_each_tensor<kFields>([&](const auto member) { tensors.push_back((a.*member).value_or(Tensor())); });
  ctx->save_for_backward(std::move(tensors));
  static const CallArgs defaults;
  auto& saved = ctx->saved_data;
  for_each_number<kFields>([&](const auto& field) {
    const auto& value = a.*field.member;
    if (!is_default(value, defaults.*field.member)) saved[std::string(field.name)] = value;
  });
  if (a.backend.has_value()) saved["backend"] = std::string(*a.backend);
}

// A call's arguments as keep() has left them, with the tensors in front of its own.
struct Kept {
  variable_list tensors;
  CallArgs args;
  std::string backend;  // which args name
};

template <const auto& kFields>
void restore(AutogradContext* ctx, Kept& kept) {
  constexpr size_t kInFront = 5;  // q, k, v, out, lse
  kept.tensors = ctx->get_saved_variables();
  CallArgs& a = kept.args;
  size_t at = kInFront;
  for_each_tensor<kFields>([&](const auto member) { a.*member = optional(kept.tensors[at++]); });
  auto& saved = ctx->saved_data;
  if (saved.empty()) return;
  for_each_number<kFields>([&](const auto& field) {
    auto& value = a.*field.member;
    const auto found = saved.find(std::string(field.name));
    if (found != saved.end()) value = found->second.template to<std::remove_cvref_t<decltype(value)>>();
  });
  const auto found = saved.find("backend");
  if (found == saved.end()) return;
  kept.backend = found->second.toStringRef();
  a.backend = kept.backend;
}

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
    keep<kKept>(ctx, {q, k, v, out, lse}, a);
    ctx->set_materialize_grads(false);
    return {out, lse};
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    variable_list result(4);  // of q, k, v and the rest
    Tensor dout = grads[0];
    const Tensor dlse = grads[1];
    if (!dout.defined() && !dlse.defined()) return result;

    Kept kept;
    restore<kKept>(ctx, kept);
    const variable_list& t = kept.tensors;
    if (!dout.defined()) dout = at::zeros_like(t[3]);
    kept.args.dlse = optional(dlse);
    const auto [dq, dk, dv] = call_bwd(dout, t[0], t[1], t[2], t[3], t[4], kept.args);
    if (ctx->needs_input_grad(0)) result[0] = dq;
    if (ctx->needs_input_grad(1)) result[1] = dk;
    if (ctx->needs_input_grad(2)) result[2] = dv;
    return result;
  }
};

class ModifiedAttentionFunction : public torch::autograd::Function<ModifiedAttentionFunction> {
 public:
  static constexpr bool is_traceable = true;

  // bias, slopes and sinks stand in `a` as well; here autograd sees them.
  static variable_list forward(AutogradContext* ctx, const Tensor& q, const Tensor& k, const Tensor& v,
                               const OptionalTensor& /*bias*/, const OptionalTensor& /*slopes*/,
                               const OptionalTensor& /*sinks*/, CallArgs a) {
    a.deterministic = is_deterministic(a.deterministic);
    a.want_lse = true;
    FwdModResult result;
    {
      const at::AutoDispatchBelowADInplaceOrView below_autograd;
      result = call_fwd_mod(q, k, v, a);
    }
    const auto& [out, lse, row_max] = result;
    keep<kKeptMod>(ctx, {q, k, v, out, lse}, a);
    ctx->set_materialize_grads(false);
    ctx->mark_non_differentiable({row_max});
    return {out, lse, row_max};
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    variable_list result(7);  // of q, k, v, bias, slopes, sinks and the rest
    Tensor dout = grads[0];
    if (!dout.defined() && !grads[1].defined()) return result;
    Kept kept;
    restore<kKeptMod>(ctx, kept);
    const variable_list& t = kept.tensors;
    CallArgs& a = kept.args;
    if (!dout.defined()) dout = at::zeros_like(t[3]);
    a.dlse = optional(grads[1]);
    // Autograd counts the tensors that were given.
    bool needs[6];
    size_t edge = 0;
    const bool given[6] = {true, true, true, a.bias.has_value(), a.slopes.has_value(), a.sinks.has_value()};
    for (int i = 0; i < 6; ++i) needs[i] = given[i] && ctx->needs_input_grad(edge++);
    a.need_qkv = needs[0] || needs[1] || needs[2];
    a.need_bias = needs[3], a.need_slopes = needs[4], a.need_sinks = needs[5];
    const auto [dq, dk, dv, dbias, dslopes, dsinks] = call_bwd_mod(dout, t[0], t[1], t[2], t[3], t[4], a);
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

FwdResult fwd_cached_autograd(const Tensor& q, const Tensor& k, const Tensor& v, const CallArgs& a) {
  check_cached_gradients(q, k, v, a);
  for (const Tensor* t : {&q, &k, &v}) refuse_tangent(*t);
  for (const OptionalTensor* t : {&a.bias, &a.slopes, &a.sinks}) {
    if (t->has_value()) refuse_tangent(**t);
  }
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  return call_fwd_cached(q, k, v, a);
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

// q takes the dtype of the cache, which is not copied; beside one of 8 bits that of autocast. A bias in another becomes
// float32.
template <c10::DeviceType kDevice>
FwdResult fwd_cached_autocast(const Tensor& q, const Tensor& k, const Tensor& v, const CallArgs& a) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(
      at::autocast::get_autocast_dispatch_key_from_device_type(kDevice));
  if (is_quantized(k) && checks::is_reduced(q.scalar_type())) return call_fwd_cached(q, k, v, a);
  const auto dtype = is_quantized(k) ? at::autocast::get_autocast_dtype(kDevice) : k.scalar_type();
  CallArgs own = a;
  if (a.bias.has_value() && a.bias->scalar_type() != dtype) own.bias = a.bias->to(at::kFloat);
  return call_fwd_cached(at::autocast::cached_cast(dtype, q, kDevice), k, v, own);
}

template <c10::DeviceType kDevice>
void implement_autocast(torch::Library& m) {
  m.impl("fwd", &FwdOperator::entry<fwd_autocast<kDevice>>);
  m.impl("bwd", &BwdOperator::entry<bwd_autocast<kDevice>>);
  m.impl("fwd_mod", &FwdModOperator::entry<fwd_mod_autocast<kDevice>>);
  m.impl("bwd_mod", &BwdModOperator::entry<bwd_mod_autocast<kDevice>>);
  m.impl("fwd_cached", &FwdCachedOperator::entry<fwd_cached_autocast<kDevice>>);
}

}  // namespace

TORCH_LIBRARY_IMPL(flash_ext, Autograd, m) {
  m.impl("fwd", &FwdOperator::entry<fwd_autograd>);
  m.impl("fwd_mod", &FwdModOperator::entry<fwd_mod_autograd>);
  m.impl("bwd", &BwdOperator::entry<bwd_autograd<BwdResult, call_bwd>>);
  m.impl("bwd_mod", &BwdModOperator::entry<bwd_autograd<BwdModResult, call_bwd_mod>>);
  m.impl("fwd_cached", &FwdCachedOperator::entry<fwd_cached_autograd>);
}

TORCH_LIBRARY_IMPL(flash_ext, AutocastCUDA, m) { implement_autocast<c10::DeviceType::CUDA>(m); }

TORCH_LIBRARY_IMPL(flash_ext, AutocastCPU, m) { implement_autocast<c10::DeviceType::CPU>(m); }

}  // namespace flash_ext
