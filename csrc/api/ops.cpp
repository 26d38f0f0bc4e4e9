// The operators: schemas, the implementation for GPUs, and the calls into the dispatcher.
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/library.h>

#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>

#include "api.h"
#include "operators.h"
#include "tensors.h"

namespace flash_ext {
namespace {

// ---- forward ------------------------------------------------------------------------------------

// Results of rows that see nothing because there are no keys at all. False: a kernel is needed, for the lse of packed
// sequences that have sinks.
bool fill_without_keys(const Problem& p, const CallArgs& a, const Tensor& out, const Tensor& lse,
                       const Tensor& row_max) {
  const bool has_sinks = a.sinks.has_value() && p.batch > 0;
  out.zero_();
  if (row_max.defined()) row_max.fill_(kMinusInfinity);
  if (!a.want_lse) return true;
  if (!has_sinks) {
    lse.fill_(kMinusInfinity);
    return true;
  }
  // With a sink a dense row that sees nothing has the sink's logit as its lse; outside sequences it has none.
  if (!p.is_varlen()) lse.copy_(a.sinks->view({1, -1, 1}).expand_as(lse));
  return !p.is_varlen();
}

// Into `out`. is_modified: the operator with modifiers, whose row maxima come last, else undefined.
FwdModResult forward(const Tensor& out, const Tensor& q, const Tensor& k, const Tensor& v, const CallArgs& a,
                     bool is_modified) {
  const ProfilerRange range("fwd");
  const OnDevice on_device(q);
  const Problem problem = problem_of(q, k, v, a);
  const DeviceInfo info = device_info_of(q);
  const Choice choice = choice_of(a.backend);
  const Path& path = required_path(problem, info, choice);

  const Tensor lse = empty_lse(q, a.want_lse);
  Tensor row_max;
  if (is_modified) row_max = empty_lse(q, a.want_row_max);
  if (out.numel() == 0) return {out, lse, row_max};
  const bool has_nothing = problem.batch == 0 || problem.total_k == 0;
  if (has_nothing && fill_without_keys(problem, a, out, lse, row_max)) return {out, lse, row_max};

  auto params = params_of<FwdParams>(problem, q, k, v, out);
  params.lse = lse_pointer(lse, a.want_lse);
  params.stream = stream_handle(q.device());
  Request request{.direction = Direction::kForward, .problem = problem, .constraints = choice.constraints};
  Prepared made;
  if (is_modified) {
    made = prepare(request, a, params.stream);
    if (a.want_row_max) made.modifiers.row_max = row_max.mutable_data_ptr<float>();
    request.modifiers = &made.modifiers;
  }
  const Plan plan = required_forward_plan(path, request, info, q);
  const Tensor workspace = workspace_of(plan, q);
  launch(path, FwdCall{plan, params, made.modifiers, pointer_to(workspace)});
  return {out, lse, row_max};
}

FwdResult fwd_gpu(const Tensor& q, const Tensor& k, const Tensor& v, const CallArgs& a) {
  check_fwd(q, k, v, a);
  return fwd_into(empty_out(q, v, a.wide), q, k, v, a);
}

FwdModResult fwd_mod_gpu(const Tensor& q, const Tensor& k, const Tensor& v, const CallArgs& a) {
  check_fwd_mod(q, k, v, a);
  return forward(empty_out(q, v, a.wide), q, k, v, a, true);
}

// ---- backward -----------------------------------------------------------------------------------

// (b, h, seqlen_q) or (h, total_q) to (h).
Tensor sum_over_rows(const Tensor& t) {
  constexpr int64_t kBatchAndRows[] = {0, 2}, kRows = 1;
  return t.dim() == 3 ? t.sum(at::IntArrayRef(kBatchAndRows)) : t.sum(at::IntArrayRef(&kRows, 1));
}

// d sink = -sum of exp(sink - lse) * delta over the rows of a head. stats: pairs of row statistics, the second is
// delta.
Tensor gradient_of_sinks(const Tensor& sinks, const Tensor& lse, const Tensor& stats) {
  const Tensor delta = stats.view(at::kFloat).view({-1, 2}).select(1, 1).view(lse.sizes());
  const Tensor of_head = lse.dim() == 3 ? sinks.view({1, -1, 1}) : sinks.view({-1, 1});
  // Rows outside every sequence have lse -inf and no sink; whatever their dout holds must not count.
  const Tensor of_rows = of_head.sub(lse).exp().mul(delta).masked_fill(lse.eq(kMinusInfinity), 0);
  return sum_over_rows(of_rows).neg();
}

// Whether dq, dk and dv are those of a backward without modifiers from the same out and lse: where nothing but sinks is
// asked for, which add to the denominator that lse holds and are no part of the scores.
bool is_plain_given_lse(const Problem& p, const CallArgs& a) {
  // Where there is no window, or rows and keys are as many, both alignments are one.
  const bool has_one_alignment =
      (p.window_left < 0 && p.window_right < 0) || (!p.is_varlen() && p.seqlen_q == p.seqlen_k);
  const CallArgs nothing;
  const auto is_off = [&](const auto& field) {
    // Numbers of rng and sizes of blocks say nothing without a dropout_p or blocks.
    const bool is_free = field.name == "sinks" || field.name == "rng" || field.name == "block_rows" ||
                         field.name == "block_cols" || (field.name == "top_left" && has_one_alignment);
    const auto& value = a.*field.member;
    if constexpr (std::is_same_v<std::remove_cvref_t<decltype(value)>, OptionalTensor>) {
      return is_free || !value.has_value();
    } else {
      return is_free || value == nothing.*field.member;
    }
  };
  return std::apply([&](const auto&... field) { return (is_off(field) && ...); }, fields::kModifiers);
}

// Whether the bias has one value for all keys of a row. It leaves weights as they are and moves lse, so a backward that
// starts from lse without it needs no bias. Kernels for short sequences take it with its gradient.
bool moves_lse_alone(const Request& r, const DeviceInfo& d, const CallArgs& a) {
  const bool is_of_rows = a.bias.has_value() && a.bias->dim() == 4 && a.bias->size(3) == 1;
  return is_of_rows && !r.problem.is_varlen() && !is_short_bwd(r.problem, d, r.constraints);
}
// Empty rows stay empty.
Tensor lse_without(const Tensor& lse, const Tensor& row_bias) {
  return lse.sub(row_bias.squeeze(3)).masked_fill(lse.eq(kMinusInfinity), kMinusInfinity);
}
// Its gradient is P (dP - delta + dlse) summed over the keys of a row, where P sums to 1 and P dP to delta. So dlse is
// left, or NaN where dout or out is not finite. Rows that see nothing have none.
Tensor gradient_of_row_bias(at::IntArrayRef sizes, const Tensor& dout, const Tensor& out, const Tensor& lse,
                            const Tensor& dlse) {
  constexpr int64_t kLast = -1;
  const auto sum = [&](const Tensor& t) {
    return t.sum(at::IntArrayRef(&kLast, 1), false, at::kFloat).transpose(1, 2);
  };
  Tensor of_rows = sum(out).add_(sum(dout)).mul_(0);
  if (dlse.defined()) of_rows.add_(dlse);
  return of_rows.masked_fill(lse.eq(kMinusInfinity), 0).unsqueeze(3).sum_to_size(sizes);
}

// Into `gradients`. is_modified: the operator with modifiers, whose own gradients come last, else undefined.
BwdModResult backward(const BwdResult& gradients, const Tensor& dout_any, const Tensor& q, const Tensor& k,
                      const Tensor& v, const Tensor& out, const Tensor& lse_any, const CallArgs& a, bool is_modified) {
  const ProfilerRange range("bwd");
  const OnDevice on_device(q);
  Problem problem = problem_of(q, k, v, a);
  const DeviceInfo info = device_info_of(q);
  const Choice choice = choice_of(a.backend);
  const Path& path = required_path(problem, info, choice);

  const auto& [dq, dk, dv] = gradients;
  const bool need_bias = is_modified && a.need_bias && a.bias.has_value();
  const bool need_slopes = is_modified && a.need_slopes && a.slopes.has_value();
  const bool need_sinks = is_modified && a.need_sinks && a.sinks.has_value();
  Tensor dbias, dslopes, dsinks;
  if (is_modified) {
    const auto place = [&](const OptionalTensor& of, bool needed, const at::TensorOptions& otherwise) {
      return needed ? new_tensor(of->sizes(), of->options()) : new_tensor({0}, otherwise);
    };
    dbias = place(a.bias, need_bias, q.options());
    dslopes = place(a.slopes, need_slopes, q.options().dtype(at::kFloat));
    dsinks = place(a.sinks, need_sinks, q.options().dtype(at::kFloat));
  }
  const bool nothing = out.numel() == 0 || problem.batch == 0;
  if (nothing || problem.total_k == 0) {
    for (const Tensor& t : {dq, dk, dv, dbias, dslopes, dsinks}) {
      if (t.defined()) t.zero_();
    }
    // No keys: lse is the sink itself in every row that has one.
    if (!nothing && need_sinks && a.dlse.has_value()) {
      dsinks = sum_over_rows(a.dlse->masked_fill(lse_any.isfinite().logical_not(), 0));
    }
    return {dq, dk, dv, dbias, dslopes, dsinks};
  }

  // The one copy the package makes: gradients such as that of out.sum() have stride 0 everywhere.
  const bool unit_stride = dout_any.size(-1) == 1 || dout_any.stride(-1) == 1;
  const Tensor dout = unit_stride ? dout_any : dout_any.contiguous();
  problem.tma_ready = problem.tma_ready && is_tma_ready(dout);
  const Tensor dlse = a.dlse.has_value() ? a.dlse->contiguous() : Tensor();

  Request request{.direction = Direction::kBackward,
                  .problem = problem,
                  .deterministic = is_deterministic(a.deterministic, info),
                  .has_tma_out = is_tma_ready(out),
                  .wide = a.wide,
                  .constraints = choice.constraints};
  const bool moves_lse = is_modified && moves_lse_alone(request, info, a);
  std::optional<CallArgs> without_bias;
  if (moves_lse) without_bias.emplace(a).bias.reset();
  const CallArgs& others = moves_lse ? *without_bias : a;
  const Tensor given_lse = lse_any.contiguous(), lse = moves_lse ? lse_without(given_lse, *a.bias) : given_lse;
  const bool follows_from_lse = need_bias && moves_lse && !a.sinks.has_value(),
             sums_bias = need_bias && !follows_from_lse;
  if (follows_from_lse) {
    dbias.copy_(gradient_of_row_bias(dbias.sizes(), dout, out, given_lse, dlse));
    if (!a.need_qkv && !need_slopes) return {dq, dk, dv, dbias, dslopes, dsinks};
  }

  auto params = params_of<BwdParams>(problem, q, k, v, out);
  params.dout = view_of(dout);
  if (a.need_qkv) {
    params.dq = view_of(dq);
    params.dk = view_of(dk);
    params.dv = view_of(dv);
  }
  params.lse = lse.const_data_ptr<float>();
  params.dlse = dlse.defined() ? dlse.const_data_ptr<float>() : nullptr;
  params.deterministic = request.deterministic;
  params.stream = stream_handle(q.device());

  const bool runs_plain = !is_modified || (a.need_qkv && is_plain_given_lse(problem, others));
  if (runs_plain) {
    const Plan plan = required_plan(path, request, info);
    const Tensor workspace = workspace_of(plan, q);
    launch(path, BwdCall{plan, params, {}, {}, {}, pointer_to(workspace)});
    if (!need_sinks && !sums_bias) return {dq, dk, dv, dbias, dslopes, dsinks};
    request.constraints.row = {};  // it has chosen the kernels of dq, dk and dv
  }

  const Prepared made = prepare(request, others, params.stream);
  BiasGradient of_bias, of_slopes;
  request.modifiers = &made.modifiers;
  request.need_qkv = a.need_qkv && !runs_plain;
  if (sums_bias) {
    of_bias = gradient_of(a.bias->sizes(), false);
    request.dbias = &of_bias;
  }
  if (need_slopes) {
    of_slopes = gradient_of({a.slopes->dim() == 2 ? a.slopes->size(0) : 1, problem.num_heads, 1, 1}, true);
    request.dslopes = &of_slopes;
  }
  const Plan plan = required_plan(path, request, info);
  const Workspace& w = plan.workspace;
  const Tensor workspace = workspace_of(plan, q);
  Tensor bias_parts, slope_parts;
  if (sums_bias) bias_parts = place_gradient(of_bias, plan.dbias_splits, w.dbias_partials, workspace, dbias);
  if (plan.zeroes_dbias) bias_parts.zero_();
  if (need_slopes) slope_parts = place_gradient(of_slopes, plan.dslopes_splits, w.dslopes_partials, workspace, dslopes);
  launch(path, BwdCall{plan, params, made.modifiers, of_bias, of_slopes, pointer_to(workspace)}, runs_plain);
  // Sums over parts and rows have a fixed order in torch, too.
  if (w.dbias_partials) dbias.copy_(bias_parts.sum(0).view(dbias.sizes()));
  if (w.dslopes_partials) dslopes.copy_(slope_parts.sum(0).view(dslopes.sizes()));
  if (need_sinks) {
    dsinks =
        gradient_of_sinks(*a.sinks, given_lse, workspace.narrow(0, w.stats_portable.offset, w.stats_portable.bytes));
  }
  return {dq, dk, dv, dbias, dslopes, dsinks};
}

// dq, dk and dv, not filled, and without elements where they are not wanted.
BwdResult empty_gradients(const Tensor& q, const Tensor& k, const Tensor& v, const CallArgs& a) {
  const auto like = [&](const Tensor& t) {
    return new_tensor(a.need_qkv ? t.sizes() : at::IntArrayRef({0}), result_options(t, a.wide));
  };
  return {like(q), like(k), like(v)};
}

BwdResult bwd_gpu(const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out,
                  const Tensor& lse, const CallArgs& a) {
  check_bwd(dout, q, k, v, out, lse, a);
  return bwd_into(empty_gradients(q, k, v, a), dout, q, k, v, out, lse, a);
}

BwdModResult bwd_mod_gpu(const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out,
                         const Tensor& lse, const CallArgs& a) {
  check_bwd_mod(dout, q, k, v, out, lse, a);
  return backward(empty_gradients(q, k, v, a), dout, q, k, v, out, lse, a, true);
}

void implement(torch::Library& m) {
  m.impl("fwd", &FwdOperator::entry<fwd_gpu>);
  m.impl("bwd", &BwdOperator::entry<bwd_gpu>);
  m.impl("fwd_mod", &FwdModOperator::entry<fwd_mod_gpu>);
  m.impl("bwd_mod", &BwdModOperator::entry<bwd_mod_gpu>);
  m.impl("condense", &CondenseOperator::entry<condense_gpu>);
  m.impl("append_kv", &AppendOperator::entry<append_kv_gpu>);
  m.impl("append_behind", &AppendBehindOperator::entry<append_behind_gpu>);
  m.impl("fwd_cached", &FwdCachedOperator::entry<fwd_cached_gpu>);
  m.impl("fwd_fp8", &FwdFp8Operator::entry<fwd_fp8_gpu>);
  m.impl("quantize_fp8", &QuantizeOperator::entry<quantize_fp8_gpu>);
}

template <typename Op>
auto handle_of(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<typename Op::Signature>();
}

}  // namespace

FwdResult fwd_into(const Tensor& out, const Tensor& q, const Tensor& k, const Tensor& v, const CallArgs& a) {
  auto [result, lse, row_max] = forward(out, q, k, v, a, false);
  return {std::move(result), std::move(lse)};
}

BwdResult bwd_into(const BwdResult& gradients, const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v,
                   const Tensor& out, const Tensor& lse, const CallArgs& a) {
  backward(gradients, dout, q, k, v, out, lse, a, false);
  return gradients;
}

// ---- dispatcher ---------------------------------------------------------------------------------

FwdResult call_fwd(const Tensor& q, const Tensor& k, const Tensor& v, const CallArgs& a) {
  static const auto op = handle_of<FwdOperator>("flash_ext::fwd");
  return FwdOperator::call(op, q, k, v, a);
}
BwdResult call_bwd(const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out,
                   const Tensor& lse, const CallArgs& a) {
  static const auto op = handle_of<BwdOperator>("flash_ext::bwd");
  return BwdOperator::call(op, dout, q, k, v, out, lse, a);
}
FwdModResult call_fwd_mod(const Tensor& q, const Tensor& k, const Tensor& v, const CallArgs& a) {
  static const auto op = handle_of<FwdModOperator>("flash_ext::fwd_mod");
  return FwdModOperator::call(op, q, k, v, a);
}
BwdModResult call_bwd_mod(const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out,
                          const Tensor& lse, const CallArgs& a) {
  static const auto op = handle_of<BwdModOperator>("flash_ext::bwd_mod");
  return BwdModOperator::call(op, dout, q, k, v, out, lse, a);
}
FwdResult call_fwd_cached(const Tensor& q, const Tensor& k, const Tensor& v, const CallArgs& a) {
  static const auto op = handle_of<FwdCachedOperator>("flash_ext::fwd_cached");
  return FwdCachedOperator::call(op, q, k, v, a);
}
void call_append_kv(const Tensor& k_new, const Tensor& v_new, const AppendArgs& a) {
  static const auto op = handle_of<AppendOperator>("flash_ext::append_kv");
  AppendOperator::call(op, k_new, v_new, a);
}
AppendBehindResult call_append_behind(const Tensor& k_new, const Tensor& v_new, const AppendBehindArgs& a) {
  static const auto op = handle_of<AppendBehindOperator>("flash_ext::append_behind");
  return AppendBehindOperator::call(op, k_new, v_new, a);
}

void use_null_kernels_on_cpu(bool enable) {
  constexpr std::pair<Switch, int64_t> kSwitches[] = {{Switch::kSkipLaunch, 1},
                                                      {Switch::kComputeCapability, 90},
                                                      {Switch::kNumSms, 132},
                                                      {Switch::kSmemPerBlock, 232448}};
  static std::unique_ptr<torch::Library> library;
  library.reset();
  for (const auto& [which, value] : kSwitches) {
    set_switch(which, enable ? std::optional<int64_t>(value) : std::nullopt);
  }
  if (!enable) return;
  library =
      std::make_unique<torch::Library>(torch::Library::IMPL, "flash_ext", c10::DispatchKey::CPU, __FILE__, __LINE__);
  implement(*library);
}

// Everything but append_kv and append_behind is functional: no argument is written or aliased by a result. A gradient
// that is not needed, lse or row_max when it is not wanted, and turned_q without q, has no elements; an lse that
// autograd keeps for a backward has all of them.
TORCH_LIBRARY(flash_ext, m) {
  const Names kQkv = {"q", "k", "v"}, kBackward = {"dout", "q", "k", "v", "out", "lse"};
  const auto define = [&](const std::string& schema) { m.def(schema.c_str(), {at::Tag::pt2_compliant_tag}); };
  define(FwdOperator::schema("fwd", kQkv, {"out", "lse"}));
  define(BwdOperator::schema("bwd", kBackward, {"dq", "dk", "dv"}));
  define(FwdModOperator::schema("fwd_mod", kQkv, {"out", "lse", "row_max"}));
  define(BwdModOperator::schema("bwd_mod", kBackward, {"dq", "dk", "dv", "dbias", "dslopes", "dsinks"}));
  define(FwdCachedOperator::schema("fwd_cached", kQkv, {"out", "lse"}));
  define(FwdFp8Operator::schema("fwd_fp8", kQkv, {"out", "lse", "row_max"}));
  define(QuantizeOperator::schema(
      "quantize_fp8", kQkv,
      {"q8", "k8", "v8", "q_descale", "k_descale", "v_descale", "v_offset", "k_offset", "row_offset"}));
  define(AppendOperator::schema("append_kv", {"k_new", "v_new"}, {}));
  define(AppendBehindOperator::schema("append_behind", {"k_new", "v_new"}, {"new_lengths", "turned_q"}));
  define(CondenseOperator::schema("condense", {"x"}, {""}));
}

TORCH_LIBRARY_IMPL(flash_ext, CUDA, m) { implement(m); }

}  // namespace flash_ext
