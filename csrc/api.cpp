// The operators: schemas, the implementation for GPUs, and the calls into the dispatcher.
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/library.h>

#include <algorithm>
#include <limits>
#include <memory>
#include <string>

#include "api.h"
#include "api_params.h"
#include "path_choice.h"

namespace flash_ext {
namespace {

// ---- one launch ---------------------------------------------------------------------------------

FwdResult fwd_gpu(const Tensor& q, const Tensor& k, const Tensor& v,
                  const OptionalTensor& cu_seqlens_q, const OptionalTensor& cu_seqlens_k,
                  int64_t max_seqlen_q, int64_t max_seqlen_k, double softmax_scale,
                  int64_t window_left, int64_t window_right, bool deterministic,
                  OptionalName path_name, bool wide) {
  check_fwd(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale,
            window_left, window_right, deterministic, path_name);
  return fwd_into(empty_out(q, v, wide), q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale,
                  window_left, window_right, path_name);
}

BwdResult bwd_gpu(const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v,
                  const Tensor& out, const Tensor& lse, const OptionalTensor& dlse,
                  const OptionalTensor& cu_seqlens_q, const OptionalTensor& cu_seqlens_k,
                  int64_t max_seqlen_q, int64_t max_seqlen_k, double softmax_scale,
                  int64_t window_left, int64_t window_right, bool deterministic,
                  OptionalName path_name, bool wide) {
  check_bwd(dout, q, k, v, out, lse, dlse, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
            softmax_scale, window_left, window_right, deterministic, path_name);
  const auto place = [&](const Tensor& t) { return new_tensor(t.sizes(), result_options(t, wide)); };
  return bwd_into({place(q), place(k), place(v)}, dout, q, k, v, out, lse, dlse, cu_seqlens_q,
                  cu_seqlens_k, softmax_scale, window_left, window_right, deterministic, path_name);
}

}  // namespace

FwdResult fwd_into(const Tensor& out, const Tensor& q, const Tensor& k, const Tensor& v,
                   const OptionalTensor& cu_seqlens_q, const OptionalTensor& cu_seqlens_k,
                   double softmax_scale, int64_t window_left, int64_t window_right,
                   OptionalName path_name) {
  const ProfilerRange range("fwd");
  const OnDevice on_device(q);
  const Problem problem = problem_of(q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale,
                                     window_left, window_right);
  const DeviceInfo info = device_info_of(q);
  const Choice choice = choice_of(path_name);
  const Path& path = required_path(problem, info, choice);

  const Tensor lse = empty_lse(q);
  if (out.numel() == 0) return {out, lse};
  if (problem.batch == 0 || problem.total_k == 0) {
    out.zero_();
    lse.fill_(-std::numeric_limits<double>::infinity());
    return {out, lse};
  }

  FwdParams params;
  params.problem = problem;
  params.q = view_of(q);
  params.k = view_of(k);
  params.v = view_of(v);
  params.out = view_of(out);
  params.lse = lse.mutable_data_ptr<float>();
  params.stream = stream_handle(q.device());
  const Plan plan = required_plan(
      path, {.direction = Direction::kForward, .problem = problem, .constraints = choice.constraints}, info);
  const Tensor workspace = workspace_of(plan, q);
  launch(path, FwdCall{plan, params, {}, pointer_to(workspace)});
  return {out, lse};
}

BwdResult bwd_into(const BwdResult& gradients, const Tensor& dout_any, const Tensor& q,
                   const Tensor& k, const Tensor& v, const Tensor& out, const Tensor& lse_any,
                   const OptionalTensor& dlse_any, const OptionalTensor& cu_seqlens_q,
                   const OptionalTensor& cu_seqlens_k, double softmax_scale, int64_t window_left,
                   int64_t window_right, bool deterministic, OptionalName path_name) {
  const ProfilerRange range("bwd");
  const OnDevice on_device(q);
  Problem problem = problem_of(q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale, window_left,
                               window_right);
  const DeviceInfo info = device_info_of(q);
  const Choice choice = choice_of(path_name);
  const Path& path = required_path(problem, info, choice);

  const auto& [dq, dk, dv] = gradients;
  if (out.numel() == 0 || problem.batch == 0 || problem.total_k == 0) {
    for (const Tensor& t : {dq, dk, dv}) t.zero_();
    return gradients;
  }

  // The one copy the package makes: gradients such as that of out.sum() have stride 0 everywhere.
  const bool unit_stride = dout_any.size(-1) == 1 || dout_any.stride(-1) == 1;
  const Tensor dout = unit_stride ? dout_any : dout_any.contiguous();
  problem.tma_ready = problem.tma_ready && is_tma_ready(dout);
  const Tensor lse = lse_any.contiguous();
  const Tensor dlse = dlse_any.has_value() ? dlse_any->contiguous() : Tensor();

  BwdParams params;
  params.problem = problem;
  params.q = view_of(q);
  params.k = view_of(k);
  params.v = view_of(v);
  params.out = view_of(out);
  params.dout = view_of(dout);
  params.dq = view_of(dq);
  params.dk = view_of(dk);
  params.dv = view_of(dv);
  params.lse = lse.const_data_ptr<float>();
  params.dlse = dlse.defined() ? dlse.const_data_ptr<float>() : nullptr;
  params.deterministic = is_deterministic(deterministic, info);
  params.stream = stream_handle(q.device());
  launch_bwd(path, choice.constraints, params, info, q);
  return gradients;
}

void launch_bwd(const Path& path, const Constraints& constraints, const BwdParams& params, const DeviceInfo& info,
                const Tensor& q) {
  const Plan plan = required_plan(path,
                                  {.direction = Direction::kBackward,
                                   .problem = params.problem,
                                   .deterministic = params.deterministic,
                                   .constraints = constraints},
                                  info);
  const Tensor workspace = workspace_of(plan, q);
  launch(path, BwdCall{plan, params, {}, {}, {}, pointer_to(workspace)});
}

// ---- dispatcher ---------------------------------------------------------------------------------

FwdResult call_fwd(const Tensor& q, const Tensor& k, const Tensor& v,
                   const OptionalTensor& cu_seqlens_q, const OptionalTensor& cu_seqlens_k,
                   SymInt max_seqlen_q, SymInt max_seqlen_k, double softmax_scale,
                   SymInt window_left, SymInt window_right, bool deterministic, OptionalName path,
                   bool wide) {
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("flash_ext::fwd", "").typed<FwdSignature>();
  return op.call(q, k, v, cu_seqlens_q, cu_seqlens_k, std::move(max_seqlen_q),
                 std::move(max_seqlen_k), softmax_scale, std::move(window_left),
                 std::move(window_right), deterministic, path, wide);
}

BwdResult call_bwd(const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v,
                   const Tensor& out, const Tensor& lse, const OptionalTensor& dlse,
                   const OptionalTensor& cu_seqlens_q, const OptionalTensor& cu_seqlens_k,
                   SymInt max_seqlen_q, SymInt max_seqlen_k, double softmax_scale,
                   SymInt window_left, SymInt window_right, bool deterministic, OptionalName path,
                   bool wide) {
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("flash_ext::bwd", "").typed<BwdSignature>();
  return op.call(dout, q, k, v, out, lse, dlse, cu_seqlens_q, cu_seqlens_k, std::move(max_seqlen_q),
                 std::move(max_seqlen_k), softmax_scale, std::move(window_left),
                 std::move(window_right), deterministic, path, wide);
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
  library = std::make_unique<torch::Library>(torch::Library::IMPL, "flash_ext",
                                             c10::DispatchKey::CPU, __FILE__, __LINE__);
  library->impl("fwd", &fwd_gpu);
  library->impl("bwd", &bwd_gpu);
  implement_modifiers(*library);
}

// Everything is functional: no argument is written or aliased by a result. max_seqlen_* is 0 when
// unknown and serves FLOP counts only; windows are inclusive reaches, -1 unlimited. `wide` has a
// default because it came later: programs that were exported before keep working.
TORCH_LIBRARY(flash_ext, m) {
  m.def(
      "fwd(Tensor q, Tensor k, Tensor v, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, SymInt "
      "max_seqlen_q, "
      "SymInt max_seqlen_k, float softmax_scale, SymInt window_left, SymInt window_right, "
      "bool deterministic, str? path, bool wide=False) -> (Tensor out, Tensor lse)",
      {at::Tag::pt2_compliant_tag});
  m.def(
      "bwd(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor? dlse, "
      "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, SymInt max_seqlen_q, SymInt max_seqlen_k, "
      "float softmax_scale, SymInt window_left, SymInt window_right, bool deterministic, str? "
      "path, bool wide=False) "
      "-> (Tensor dq, Tensor dk, Tensor dv)",
      {at::Tag::pt2_compliant_tag});
}

TORCH_LIBRARY_IMPL(flash_ext, CUDA, m) {
  m.impl("fwd", &fwd_gpu);
  m.impl("bwd", &bwd_gpu);
}

}  // namespace flash_ext
