#include "tensors.h"

#include <ATen/Context.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty_ops.h>
#include <ATen/ops/empty_strided_ops.h>
#include <ATen/ops/where.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <limits>

#include "../stream.h"

namespace flash_ext {

int32_t clamp_to_int32(int64_t value) {
  return static_cast<int32_t>(std::min<int64_t>(value, std::numeric_limits<int32_t>::max()));
}

namespace {

bool is_packed(const Tensor& t) { return t.dim() == 3; }

}  // namespace

bool is_row_aligned(const Tensor& t) {
  constexpr int64_t kBytes = 16;
  const int64_t elements = kBytes / static_cast<int64_t>(t.element_size());
  if (reinterpret_cast<uintptr_t>(t.const_data_ptr()) % kBytes != 0) return false;
  for (int64_t dim = 0; dim < t.dim() - 1; ++dim) {
    if (stride_or_zero(t, dim) % elements != 0) return false;
  }
  return true;
}

bool is_tma_ready(const Tensor& t) {
  if (!is_row_aligned(t) || get_switch(Switch::kUnaligned) == 1) return false;
  return t.size(-3) <= 1 || t.stride(-3) > 0;
}

StridedView view_of(const Tensor& t) {
  StridedView view;
  view.ptr = const_cast<void*>(t.const_data_ptr());
  view.batch_stride = is_packed(t) ? 0 : stride_or_zero(t, 0);
  view.row_stride = stride_or_zero(t, -3);
  view.head_stride = stride_or_zero(t, -2);
  view.aligned = is_row_aligned(t) && get_switch(Switch::kUnaligned) != 1;
  view.is_float = t.scalar_type() == at::kFloat;
  return view;
}

CacheFactors factors_of(const OptionalTensor& t) {
  CacheFactors f;
  if (!t.has_value()) return f;
  f.ptr = t->const_data_ptr<float>();
  f.of_slots = t->dim() == 3;
  if (t->dim() > 0) f.head_stride = stride_or_zero(*t, -1);
  if (t->dim() > 1) f.batch_stride = stride_or_zero(*t, 0);
  if (f.of_slots) f.row_stride = stride_or_zero(*t, 1);
  return f;
}

CacheType cache_type_of(const Tensor& k) {
  return !is_quantized(k) ? CacheType::k16Bit : k.scalar_type() == at::kChar ? CacheType::kInt8 : CacheType::kE4m3;
}

void fill_with_sinks(const Tensor& lse, const Tensor& sinks, const OptionalTensor& cu_seqlens_q) {
  const Tensor each = sinks.unsqueeze(-1).expand_as(lse);
  if (!cu_seqlens_q.has_value()) {
    lse.copy_(each);
  } else if (cu_seqlens_q->size(0) > 1) {
    const Tensor row = at::arange(lse.size(-1), cu_seqlens_q->options());
    const Tensor inside = row.ge(cu_seqlens_q->select(0, 0)).logical_and(row.lt(cu_seqlens_q->select(0, -1)));
    lse.copy_(at::where(inside, each, lse));
  }
}

DType dtype_of(at::ScalarType type) {
  if (type == at::kHalf) return DType::kFloat16;
  TORCH_CHECK(type == at::kBFloat16, "flash_ext has no kernels for ", type);
  return DType::kBFloat16;
}

Problem heads_of(const Tensor& q, const Tensor& k, const Tensor& v) {
  Problem p;
  p.dtype = dtype_of(q);
  p.num_heads = static_cast<int32_t>(q.size(-2));
  p.num_heads_k = static_cast<int32_t>(k.size(-2));
  p.head_dim = static_cast<int32_t>(q.size(-1));
  p.head_dim_v = static_cast<int32_t>(v.size(-1));
  p.tma_ready = is_tma_ready(q) && is_tma_ready(k) && is_tma_ready(v);
  return p;
}

void set_lengths(Problem& p, const Tensor& q, const Tensor& k, const OptionalTensor& cu_seqlens_q,
                 const OptionalTensor& cu_seqlens_k) {
  if (cu_seqlens_q.has_value()) {
    p.batch = static_cast<int32_t>(cu_seqlens_q->size(0) - 1);
    p.total_q = q.size(0);
    p.total_k = k.size(0);
    p.cu_seqlens_q = cu_seqlens_q->const_data_ptr<int32_t>();
    p.cu_seqlens_k = cu_seqlens_k->const_data_ptr<int32_t>();
  } else {
    p.batch = static_cast<int32_t>(q.size(0));
    p.seqlen_q = static_cast<int32_t>(q.size(1));
    p.seqlen_k = static_cast<int32_t>(k.size(1));
    p.total_q = q.size(0) * q.size(1);
    p.total_k = k.size(0) * k.size(1);
  }
}

Problem problem_of(const Tensor& q, const Tensor& k, const Tensor& v, const CallArgs& a) {
  Problem p = heads_of(q, k, v);
  set_lengths(p, q, k, a.cu_seqlens_q, a.cu_seqlens_k);
  p.scale = static_cast<float>(a.scale);
  set_window(p, a.window_size_left.expect_int(), a.window_size_right.expect_int(), a.top_left);
  return p;
}

void set_window(Problem& p, int64_t left, int64_t right, bool top_left) {
  if (!p.is_varlen()) {
    // Keys before the one that the last row is level with, and keys behind the one that the first row is level with.
    const int64_t before_last = int64_t{top_left ? p.seqlen_q : p.seqlen_k} - 1;
    const int64_t behind_first = int64_t{top_left ? p.seqlen_k : p.seqlen_q} - 1;
    if (left >= before_last) left = -1;
    // Beside a left bound the right one stays: rules for windows count the keys between the two.
    if (left < 0 && right >= behind_first) right = -1;
  }
  p.window_left = clamp_to_int32(left);
  p.window_right = clamp_to_int32(right);
}

Choice choice_of(OptionalName backend) {
  Choice choice;
  if (backend.has_value()) parse_choice(*backend, choice);
  return choice;
}

const Path& required_path(const Problem& p, const DeviceInfo& info, const Choice& wanted) {
  TORCH_CHECK(info.error.empty(), "flash_ext cannot read the GPU: ", info.error);
  const Path* path = choose_path(p, info, wanted.path);
  if (C10_LIKELY(path != nullptr)) return *path;
  TORCH_CHECK_VALUE(wanted.path.empty(), "backend '", wanted.path, "' cannot run this call. ", refusal_text(p, info),
                    ".");
  TORCH_CHECK_NOT_IMPLEMENTED(false, "no backend can run this call. ", refusal_text(p, info), ".");
}

Plan required_plan(const Path& path, const Request& request, const DeviceInfo& info) {
  const Plan found = plan(request, info, path.arch);
  TORCH_CHECK_VALUE(!found.row.empty(), "backend ", path.name, " has no row '", request.constraints.row,
                    "' for this call.");
  return found;
}

Plan required_forward_plan(const Path& path, Request request, const DeviceInfo& info, const Tensor& q) {
  const auto is_packed = [](const Launch& l) {
    switch (l.kernel) {
      case KernelId::kFwdPacked90:
      case KernelId::kFwdPackedMod90:
      case KernelId::kFwdPackedQuantized90:
      case KernelId::kFwdPackedQuantizedMod90: return true;
      default: return false;
    }
  };
  const Plan found = required_plan(path, request, info);
  if (q.size(-2) == 1 || q.stride(-2) != 0 || std::ranges::none_of(found.steps(), is_packed)) return found;
  request.problem.tma_ready = false;
  return required_plan(path, request, info);
}

// Torch's guard does nothing where the index is the thread's already, so that a thread new to CUDA has no context.
OnDevice::OnDevice(const Tensor& t) : guard_(t.device()) {
  if (!t.is_cuda() || !should_launch()) return;
  const std::string error = bind_context(t.get_device());
  TORCH_CHECK(error.empty(), "flash_ext cannot use the GPU: ", error);
}

void* stream_handle(const c10::Device& device) {
  if (!device.is_cuda()) return nullptr;
  const c10::impl::VirtualGuardImpl guard(device.type());
  return guard.getStreamNativeHandle(guard.getStream(device));
}

// CPU tensors come here only under the null kernels, whose switches describe the device.
DeviceInfo device_info_of(const Tensor& q) { return device_info(q.is_cuda() ? q.get_device() : 0); }

bool should_launch() { return get_switch(Switch::kSkipLaunch) != 1; }

Tensor workspace_of(const Plan& plan, const Tensor& q) {
  if (plan.workspace.bytes == 0) return {};
  return new_tensor({plan.workspace.bytes}, q.options().dtype(at::kByte));
}

void launch(const Path& path, const FwdCall& call) {
  if (get_switch(Switch::kRecordLaunches) == 1) {
    record_launch({Direction::kForward, call.plan, false, call.p.q.aligned && call.p.k.aligned && call.p.v.aligned});
  }
  if (!should_launch()) return;
  const std::string error = run(call);
  TORCH_CHECK(error.empty(), "flash_ext forward, backend ", path.name, ": ", error);
}

void launch(const Path& path, const BwdCall& call, bool follows) {
  if (get_switch(Switch::kRecordLaunches) == 1) {
    const BwdParams& p = call.p;
    if (follows) record_second_plan(call.plan);
    else
      record_launch({Direction::kBackward, call.plan, p.deterministic,
                     p.q.aligned && p.k.aligned && p.v.aligned && p.out.aligned && p.dout.aligned});
  }
  if (!should_launch()) return;
  const std::string error = run(call);
  TORCH_CHECK(error.empty(), "flash_ext backward, backend ", path.name, ": ", error);
}

bool is_capturing(const Tensor& q) {
  if (const auto pretended = get_switch(Switch::kCapturing)) return *pretended == 1;
  return q.is_cuda() && is_capturing(stream_handle(q.device()));
}

bool is_deterministic(bool asked) { return asked || at::globalContext().deterministicAlgorithms(); }

Tensor new_tensor(at::IntArrayRef sizes, const at::TensorOptions& o) {
  return at::_ops::empty_memory_format::call(c10::fromIntArrayRefSlow(sizes),
                                             c10::optTypeMetaToScalarType(o.dtype_opt()), o.layout_opt(),
                                             o.device_opt(), o.pinned_memory_opt(), std::nullopt);
}

Tensor new_tensor(at::IntArrayRef sizes, at::IntArrayRef strides, const at::TensorOptions& o) {
  return at::_ops::empty_strided::call(c10::fromIntArrayRefSlow(sizes), c10::fromIntArrayRefSlow(strides),
                                       c10::optTypeMetaToScalarType(o.dtype_opt()), o.layout_opt(), o.device_opt(),
                                       o.pinned_memory_opt());
}

at::TensorOptions result_options(const Tensor& t, bool wide) {
  return wide ? t.options().dtype(at::kFloat) : t.options();
}

Tensor empty_out(const Tensor& q, const Tensor& v, bool wide) {
  c10::SmallVector<int64_t, 4> sizes(q.sizes());
  sizes.back() = v.size(-1);
  return new_tensor(sizes, result_options(q, wide));
}

Tensor empty_lse(const Tensor& q, bool wanted) {
  const auto float_options = q.options().dtype(at::kFloat);
  return wanted ? new_tensor(lse_sizes(q), float_options) : new_tensor({0}, float_options);
}

c10::DimVector lse_sizes(const Tensor& q) {
  if (is_packed(q)) return {q.size(1), q.size(0)};
  return {q.size(0), q.size(2), q.size(1)};
}

}  // namespace flash_ext
