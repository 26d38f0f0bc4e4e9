// The forward over a cache of keys and values: lengths and pages are on the device, and nothing has a gradient.
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "../path_choice.h"
#include "api.h"
#include "checks.h"
#include "tensors.h"

namespace flash_ext {
namespace {

KvCache cache_of(const Tensor& k, const CallArgs& a) {
  KvCache c;
  if (a.seqused_k.has_value()) c.seqused_k = a.seqused_k->const_data_ptr<int32_t>();
  int64_t room = k.size(-3);
  if (k.dim() == 4) {
    c.num_pages = static_cast<int32_t>(k.size(0));
    c.page_size = Divisor(static_cast<uint32_t>(std::clamp<int64_t>(k.size(1), 1, 1 << 30)));
  }
  if (a.block_table.has_value()) {
    c.block_table = a.block_table->const_data_ptr<int32_t>();
    c.table_stride = a.block_table->size(0) > 1 ? a.block_table->stride(0) : 0;
    room *= a.block_table->size(1);
  }
  c.max_keys = clamp_to_int32(room);
  return c;
}

// Whether v is the first columns of k: one kernel reads both at once. Strides of one head, page or row say nothing.
bool is_first_columns(const Tensor& v, const Tensor& k) {
  for (int64_t dim = 0; dim < k.dim() - 1; ++dim) {
    if (k.size(dim) != 1 && k.stride(dim) != v.stride(dim)) return false;
  }
  return k.const_data_ptr() == v.const_data_ptr();
}

[[noreturn]] void refuse_latents(const Tensor& k, const Tensor& v) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      false, "a cache of latents (head_dim ", k.size(-1), ", of which v is the first ", v.size(-1),
      ") needs a Hopper GPU and rows on 16 bytes; it has no softcap, no biases, and no masks but causal and windows.");
}

// What TMA reads as one list of rows of heads.
Tensor contiguous_and_aligned(const Tensor& q) {
  const Tensor x = q.contiguous();
  return is_row_aligned(x) ? x : x.clone();
}

// In units of 16 bits, as kernels copy it.
StridedView view_of_bytes(const Tensor& t) {
  StridedView x = view_of(t);
  x.batch_stride /= 2, x.row_stride /= 2, x.head_stride /= 2;
  x.aligned = true;
  return x;
}

Problem cached_problem(const Tensor& q, const Tensor& k, const Tensor& v, const CallArgs& a, const KvCache& c) {
  Problem p = heads_of(q, k, v);
  if (a.cu_seqlens_q.has_value()) {
    p.batch = static_cast<int32_t>(a.cu_seqlens_q->size(0) - 1);
    p.total_q = q.size(0);
    p.total_k = c.max_keys;
    p.cu_seqlens_q = a.cu_seqlens_q->const_data_ptr<int32_t>();
    // Bounds of keys are read, and not used, where keys are not in rows.
    p.cu_seqlens_k = a.cu_seqlens_k.has_value() ? a.cu_seqlens_k->const_data_ptr<int32_t>() : p.cu_seqlens_q;
  } else {
    p.batch = static_cast<int32_t>(q.size(0));
    p.seqlen_q = static_cast<int32_t>(q.size(1));
    p.seqlen_k = c.max_keys;
    p.total_q = q.size(0) * q.size(1);
    p.total_k = int64_t{1} * p.batch * c.max_keys;
    if (a.cu_seqlens_k.has_value()) {
      p.total_k = k.size(0);
      p.cu_seqlens_k = a.cu_seqlens_k->const_data_ptr<int32_t>();
    }
  }
  p.scale = static_cast<float>(a.scale);
  // Of a dense q: the longest sequence there may be decides which bounds hide nothing, hence nothing of a shorter one.
  set_window(p, a.window_size_left.expect_int(), a.window_size_right.expect_int());
  return p;
}

}  // namespace

void check_cached_gradients(const Tensor& q, const Tensor& k, const Tensor& v, const CallArgs& a) {
  const auto needs = [](const OptionalTensor& t) { return t.has_value() && t->requires_grad(); };
  const bool wants_gradient =
      q.requires_grad() || k.requires_grad() || v.requires_grad() || needs(a.slopes) || needs(a.sinks) || needs(a.bias);
  TORCH_CHECK_NOT_IMPLEMENTED(!wants_gradient || !at::GradMode::is_enabled(),
                              "attention over a cache (seqused_k, block_table) has no gradient. Call it under "
                              "torch.no_grad(), or gather the keys and call attention_varlen without these arguments.");
}

void check_fwd_cached_gpu(const Tensor& q, const Tensor& k, const Tensor& v, const CallArgs& a) {
  const int64_t rows = q.size(-3) * q.size(-2);  // of a sequence; packed, one may have them all
  TORCH_CHECK_NOT_IMPLEMENTED(rows <= int64_t{1} << 30, "attention over a cache: a sequence of q may have ", rows,
                              " rows (queries * heads), more than 2^30. Split the call.");
  for (const auto& [t, name] : {std::pair{&k, "k"}, {&v, "v"}}) {
    TORCH_CHECK_VALUE(!is_quantized(k) || is_row_aligned(*t), "rows of ", name,
                      " must start on 16 bytes where it has 8 bits, got strides ", t->strides(),
                      ". Call .contiguous() on it.");
  }
  if (!is_latents(k, v)) return;
  TORCH_CHECK_NOT_IMPLEMENTED(is_first_columns(v, k), "beside k of head_dim ", k.size(-1),
                              " v must be k[..., :", kLatentHeadDimV,
                              "], the same memory: there are kernels for latents alone.");
  const bool is_plain = a.softcap == 0 && !a.slopes.has_value() && !a.bias.has_value() && !a.tree.has_value() &&
                        !a.mask.has_value() && !a.document_k.has_value();
  if (!is_plain || !is_tma_ready(k)) refuse_latents(k, v);
}

FwdResult fwd_cached_gpu(const Tensor& given_q, const Tensor& k, const Tensor& v, const CallArgs& a) {
  check_fwd_cached(given_q, k, v, a);
  const ProfilerRange range("fwd_cached");
  const bool latents = is_latents(k, v);
  const Tensor q = latents ? contiguous_and_aligned(given_q) : given_q;
  const OnDevice on_device(q);
  const KvCache cache = cache_of(k, a);
  const Problem problem = cached_problem(q, k, v, a, cache);
  const DeviceInfo info = device_info_of(q);
  const Choice choice = choice_of(a.backend);
  const Path& path = required_path(problem, info, choice);
  const bool is_empty = q.numel() == 0 || problem.batch == 0 || cache.max_keys == 0 || k.numel() == 0;
  if (!is_empty) check_fwd_cached_gpu(q, k, v, a);
  const Tensor out = empty_out(q, v, false), lse = empty_lse(q, a.want_lse);
  if (out.numel() == 0) return {out, lse};
  if (is_empty) {
    out.zero_();
    lse.fill_(kMinusInfinity);
    if (a.sinks.has_value() && lse.numel() > 0) fill_with_sinks(lse, *a.sinks, a.cu_seqlens_q);
    return {out, lse};
  }
  auto params = params_of<FwdParams>(problem, q, k, v, out);
  const CacheType type = cache_type_of(k);
  if (type != CacheType::k16Bit) params.k = view_of_bytes(k), params.v = view_of_bytes(v);
  params.lse = lse_pointer(lse, a.want_lse);
  params.stream = stream_handle(q.device());
  const QuantizedCache quantized{factors_of(a.k_descale), factors_of(a.v_descale)};
  Request request{.direction = Direction::kForward,
                  .problem = problem,
                  .constraints = choice.constraints,
                  .cache = &cache,
                  .cache_type = type,
                  .has_slot_factors = quantized.k.of_slots || quantized.v.of_slots,
                  .has_latents = latents,
                  .most_queries = a.max_seqlen_q.expect_int(),
                  .most_keys = a.max_seqlen_k.expect_int()};
  const Prepared made = prepare(request, a, params.stream);
  const Modifiers& modifiers = made.modifiers;
  const bool is_modified =
      modifiers.has_score_mod || a.tree.has_value() || a.mask.has_value() || a.document_k.has_value();
  if (is_modified) request.modifiers = &modifiers;
  if (latents && path.arch != Arch::kSm90) refuse_latents(k, v);
  const Plan plan = required_forward_plan(path, request, info, q);
  const Tensor workspace = workspace_of(plan, q);
  launch(path, FwdCall{.plan = plan,
                       .p = params,
                       .modifiers = modifiers,
                       .workspace = pointer_to(workspace),
                       .cache = cache,
                       .quantized = quantized});
  return {out, lse};
}

}  // namespace flash_ext
