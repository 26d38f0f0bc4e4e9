// flash_ext::quantize_fp8 and flash_ext::fwd_fp8, for GPUs. What callers may pass is checked in flash_ext/_fp8.py, with
// words; here only what memory safety hangs on.
#include <string>
#include <string_view>
#include <tuple>

#include "../passes/rounding_loss.h"
#include "../quantize_fp8.h"
#include "api.h"
#include "checks.h"
#include "tensors.h"

namespace flash_ext {
namespace {

using checks::check_device, checks::is_reduced;

void check_bounds(const Tensor& cu, const char* name, const Tensor& q) {
  check_device(cu, name, q);
  TORCH_CHECK_VALUE(cu.scalar_type() == at::kInt && cu.dim() == 1 && cu.size(0) >= 1 && cu.is_contiguous(), name,
                    " must be (batch + 1,) int32 and contiguous.");
}

const int32_t* lengths_of(const OptionalTensor& used, const Problem& p, const Tensor& q) {
  if (!used.has_value()) return nullptr;
  check_device(*used, "seqused_k", q);
  TORCH_CHECK_VALUE(
      used->scalar_type() == at::kInt && used->dim() == 1 && used->size(0) == p.batch && used->is_contiguous(),
      "seqused_k must be (batch,) int32 and contiguous.");
  return used->const_data_ptr<int32_t>();
}

Problem fp8_problem(const Tensor& q, const Tensor& k, const Tensor& v, int64_t head_dim_v, at::ScalarType dtype,
                    const OptionalTensor& cu_seqlens_q, const OptionalTensor& cu_seqlens_k) {
  Problem p;
  const bool packed = cu_seqlens_q.has_value();
  TORCH_CHECK_VALUE(packed == cu_seqlens_k.has_value(), "cu_seqlens_q and cu_seqlens_k must be given together.");
  const int64_t dims = packed ? 3 : 4;
  TORCH_CHECK_VALUE(q.dim() == dims && k.dim() == dims && v.dim() == dims, "q, k and v must have ", dims,
                    " dimensions.");
  check_device(k, "k", q);
  check_device(v, "v", q);
  for (const Tensor& t : {q, k}) {
    for (int64_t i = 0; i < dims - 1; ++i) {
      TORCH_CHECK_VALUE(t.size(i) <= Problem::kMaxSeqlen, "dimensions of q and k must be at most ", Problem::kMaxSeqlen,
                        ", got ", t.size(i), ". Split the call.");
    }
  }
  p.dtype = dtype_of(dtype);
  p.num_heads = static_cast<int32_t>(q.size(-2));
  p.num_heads_k = static_cast<int32_t>(k.size(-2));
  p.head_dim = static_cast<int32_t>(q.size(-1));
  p.head_dim_v = static_cast<int32_t>(head_dim_v);
  TORCH_CHECK_VALUE(p.num_heads_k > 0 && p.num_heads % p.num_heads_k == 0,
                    "heads of q must be a multiple of those of k.");
  if (packed) {
    check_bounds(*cu_seqlens_q, "cu_seqlens_q", q);
    check_bounds(*cu_seqlens_k, "cu_seqlens_k", q);
    TORCH_CHECK_VALUE(cu_seqlens_q->size(0) == cu_seqlens_k->size(0),
                      "cu_seqlens_q and cu_seqlens_k must have one length.");
  } else {
    TORCH_CHECK_VALUE(q.size(0) == k.size(0), "q and k must have one batch size.");
  }
  set_lengths(p, q, k, cu_seqlens_q, cu_seqlens_k);
  return p;
}

// (b, h, n), packed (h, n).
FactorView factors_of(const Tensor& t, const Problem& p, const Tensor& q, int64_t heads, int64_t n, const char* name) {
  const bool packed = p.is_varlen();
  check_device(t, name, q);
  TORCH_CHECK_VALUE(t.scalar_type() == at::kFloat && t.dim() == (packed ? 2 : 3) && t.size(-2) == heads &&
                        (t.size(-1) == n || t.size(-1) == 1) && (packed || t.size(0) == p.batch),
                    name, " does not fit.");
  FactorView x;
  x.ptr = t.const_data_ptr<float>();
  x.batch_stride = packed ? 0 : stride_or_zero(t, 0);
  x.head_stride = stride_or_zero(t, -2);
  x.step = stride_or_zero(t, -1);
  return x;
}

StridedView transposed_view(const Tensor& v, const Problem& p) {
  const int64_t columns = transposed_columns(p.is_varlen() ? p.total_k : p.seqlen_k, p.batch, p.is_varlen());
  TORCH_CHECK_VALUE(v.dim() == (p.is_varlen() ? 3 : 4) && v.size(-1) == columns && v.size(-3) == p.num_heads_k &&
                        (p.is_varlen() || v.size(0) == p.batch) && (v.size(-1) <= 1 || v.stride(-1) == 1),
                    "v does not have the transposed form of k's sequences.");
  StridedView x;
  x.ptr = const_cast<void*>(v.const_data_ptr());
  x.batch_stride = p.is_varlen() ? 0 : stride_or_zero(v, 0);
  x.head_stride = stride_or_zero(v, -3);
  x.row_stride = v.stride(-2);
  x.aligned = true;
  return x;
}

// Factors of the rows of x; none where rows stay as they are.
RotaryRows rotary_rows(const OptionalTensor& cos, const OptionalTensor& sin, bool interleaved, const Tensor& x,
                       const char* name) {
  RotaryRows r;
  TORCH_CHECK_VALUE(cos.has_value() == sin.has_value(), "cos and sin of ", name, " must be given together.");
  if (!cos.has_value()) return r;
  for (const Tensor& t : {*cos, *sin}) {
    check_device(t, "a rotary factor", x);
    TORCH_CHECK_VALUE((t.scalar_type() == at::kFloat || t.scalar_type() == x.scalar_type()) &&
                          t.scalar_type() == cos->scalar_type() && (t.dim() == 2 || (t.dim() == 3 && x.dim() == 4)) &&
                          t.sizes() == cos->sizes() && t.size(-2) == x.size(-3) &&
                          (t.dim() == 2 || t.size(0) == x.size(0)) && t.stride(-1) == 1 && t.size(-1) > 0 &&
                          t.size(-1) % 8 == 0 && 2 * t.size(-1) <= x.size(-1),
                      "cos and sin do not fit ", name, ".");
  }
  r.cos = cos->const_data_ptr(), r.sin = sin->const_data_ptr();
  r.cos_row = cos->stride(-2), r.sin_row = sin->stride(-2);
  r.cos_batch = cos->dim() == 3 ? cos->stride(0) : 0, r.sin_batch = sin->dim() == 3 ? sin->stride(0) : 0;
  r.is_float = cos->scalar_type() == at::kFloat;
  r.interleaved = interleaved;
  r.dim = static_cast<int32_t>(2 * cos->size(-1));
  return r;
}

}  // namespace

FwdModResult fwd_fp8_gpu(const Tensor& q, const Tensor& k, const Tensor& v, const Fp8CallArgs& a) {
  const ProfilerRange range("fwd_fp8");
  const OnDevice on_device(q);
  const bool mixed = is_reduced(q.scalar_type());
  TORCH_CHECK_TYPE(v.scalar_type() == at::kFloat8_e4m3fn && k.scalar_type() == q.scalar_type() &&
                       (mixed ? q.scalar_type() == a.dtype : q.scalar_type() == at::kFloat8_e4m3fn) &&
                       is_reduced(a.dtype),
                   "fwd_fp8 takes torch.float8_e4m3fn and gives torch.float16 or torch.bfloat16.");
  TORCH_CHECK_VALUE(k.size(-1) == q.size(-1) && (mixed || (a.q_descale.has_value() && a.k_descale.has_value())),
                    "q and k must have one head_dim, and in e4m3 factors.");
  Problem p = fp8_problem(q, k, v, v.size(-2), a.dtype, a.cu_seqlens_q, a.cu_seqlens_k);
  p.scale = static_cast<float>(a.scale);
  set_window(p, a.window_size_left, a.window_size_right);
  p.tma_ready = is_tma_ready(q) && is_tma_ready(k) && is_tma_ready(v);

  c10::SmallVector<int64_t, 4> sizes(q.sizes());
  sizes.back() = v.size(-2);
  // Sinks join the lse that the kernel has stored.
  const bool makes_lse = a.want_lse || a.sinks.has_value();
  const Tensor out = new_tensor(sizes, q.options().dtype(a.dtype)), lse = empty_lse(q, makes_lse);
  const Tensor row_max = empty_lse(q, a.want_row_max);
  const FwdModResult result{out, a.want_lse ? lse : empty_lse(q, false), row_max};
  Fp8Operands x;
  x.seqused_k = lengths_of(a.seqused_k, p, q);
  if (a.sinks.has_value()) {
    check_device(*a.sinks, "sinks", q);
    TORCH_CHECK_VALUE(a.sinks->scalar_type() == at::kFloat && a.sinks->dim() == 1 && a.sinks->size(0) == p.num_heads &&
                          a.sinks->is_contiguous(),
                      "sinks must be (num_heads,) float32 and contiguous.");
    x.sinks = a.sinks->const_data_ptr<float>();
  }
  if (out.numel() == 0) return result;
  if (p.batch == 0 || p.total_k == 0) {
    out.zero_();
    row_max.fill_(kMinusInfinity);
    lse.fill_(kMinusInfinity);
    if (a.sinks.has_value()) fill_with_sinks(lse, *a.sinks, a.cu_seqlens_q);
    return result;
  }
  const int64_t rows_q = p.is_varlen() ? p.total_q : p.seqlen_q, rows_k = p.is_varlen() ? p.total_k : p.seqlen_k;
  if (!mixed) {
    x.q_factor =
        factors_of(*a.q_descale, p, q, p.num_heads, factor_blocks(rows_q, p.batch, p.is_varlen()), "q_descale");
    x.k_factor =
        factors_of(*a.k_descale, p, q, p.num_heads_k, factor_blocks(rows_k, p.batch, p.is_varlen()), "k_descale");
  }
  x.v_factor = factors_of(a.v_descale, p, q, p.num_heads_k, p.head_dim_v, "v_descale");
  if (a.v_offset.has_value()) x.v_offset = factors_of(*a.v_offset, p, q, p.num_heads_k, p.head_dim_v, "v_offset");
  if (a.row_offset.has_value()) {
    check_device(*a.row_offset, "row_offset", q);
    TORCH_CHECK_VALUE(a.row_offset->is_contiguous() && a.row_offset->sizes() == at::IntArrayRef(lse_sizes(q)) &&
                          a.row_offset->scalar_type() == at::kFloat,
                      "row_offset must be float32, contiguous, and have the shape of lse.");
    if (makes_lse || a.want_row_max) x.row_offset = a.row_offset->const_data_ptr<float>();  // which out does not need
  }

  const DeviceInfo info = device_info_of(q);
  const Choice choice = choice_of(a.backend);
  const Path& path = required_path(p, info, choice);
  const bool in_half = a.small && !a.want_row_max;  // the largest scores are wanted as fp32 has them
  const Request request{.direction = Direction::kForward,
                        .problem = p,
                        .operands = mixed     ? Operands::kMixed
                                    : in_half ? Operands::kSmallFp8
                                              : Operands::kFp8,
                        .has_own_lengths = x.seqused_k != nullptr,
                        .constraints = choice.constraints};
  const Plan found = plan(request, info, path.arch);
  TORCH_CHECK_NOT_IMPLEMENTED(
      !found.row.empty(),
      "no fp8 kernel runs this call: they need a Hopper GPU, head sizes that are multiples of 16 up to "
      "256 (q and k of 16 bits up to 128), and rows on 16 bytes. Call ",
      x.seqused_k != nullptr
          ? "attention_varlen(*x.dequantize(), x.cu_seqlens_q, x.cu_seqlens_k, seqused_k=x.seqused_k)"
      : p.is_varlen() ? "attention_varlen(*x.dequantize(), x.cu_seqlens_q, x.cu_seqlens_k)"
                      : "attention(*x.dequantize())",
      " instead.");
  FwdParams params;
  params.problem = p;
  params.q = view_of(q);
  params.k = view_of(k);
  params.v = transposed_view(v, p);
  params.out = view_of(out);
  params.lse = lse_pointer(lse, makes_lse);
  if (a.want_row_max) x.row_max = row_max.mutable_data_ptr<float>();
  params.stream = stream_handle(q.device());
  const Tensor workspace = workspace_of(found, q);
  launch(path, FwdCall{.plan = found, .p = params, .modifiers = {}, .workspace = pointer_to(workspace), .fp8 = x});
  return result;
}

Quantized quantize_fp8_gpu(const Tensor& q, const Tensor& k, const Tensor& v, const QuantizeArgs& a) {
  const ProfilerRange range("quantize_fp8");
  const OnDevice on_device(q);
  TORCH_CHECK_TYPE(
      is_reduced(q.scalar_type()) && k.scalar_type() == q.scalar_type() && v.scalar_type() == q.scalar_type(),
      "quantize_fp8 takes float16 or bfloat16.");
  TORCH_CHECK_VALUE(!a.mixed || !(a.cos_q.has_value() || a.cos_k.has_value()),
                    "mixed mode hands q and k back as they are: turn them before.");
  TORCH_CHECK_VALUE(k.size(-1) == q.size(-1) && k.size(-2) == v.size(-2) && k.size(-3) == v.size(-3) &&
                        v.dim() == k.dim() && (k.dim() == 3 || k.size(0) == v.size(0)) && q.stride(-1) == 1 &&
                        k.stride(-1) == 1 && v.stride(-1) == 1,
                    "q, k and v do not fit each other.");
  QuantizeFp8 x;
  Problem& p = x.problem = fp8_problem(q, k, v, v.size(-1), q.scalar_type(), a.cu_seqlens_q, a.cu_seqlens_k);
  TORCH_CHECK_VALUE(p.head_dim % 16 == 0 && p.head_dim_v % 16 == 0 && p.head_dim <= 256 && p.head_dim_v <= 256,
                    "head sizes must be multiples of 16 up to 256.");
  TORCH_CHECK_VALUE(!a.hadamard || (a.by_block && (p.head_dim & (p.head_dim - 1)) == 0),
                    "a rotation wants factors of blocks, and a head_dim that is a power of two.");
  const bool packed = p.is_varlen();
  TORCH_CHECK_NOT_IMPLEMENTED(
      !packed || !device_info_of(q).batch_invariant,
      "packed sequences share means and factors in fp8, which the batch-invariant mode rules out. Quantise each sequence in "
      "a call of its own, or call attention_varlen.");
  const auto bytes = q.options().dtype(at::kFloat8_e4m3fn), floats = q.options().dtype(at::kFloat);
  const auto of_heads = [&](bool wanted, int64_t heads, int64_t n, const at::TensorOptions& options) {
    if (!wanted) return new_tensor({0}, options);
    return packed ? new_tensor({heads, n}, options) : new_tensor({p.batch, heads, n}, options);
  };
  const auto blocks = [&](int64_t rows) { return a.by_block ? factor_blocks(rows, p.batch, packed) : 1; };
  const int64_t rows_q = packed ? p.total_q : p.seqlen_q, rows_k = packed ? p.total_k : p.seqlen_k;
  const bool shifts_k = a.smooth_k && !a.mixed;
  const int64_t columns = transposed_columns(rows_k, p.batch, packed);
  Quantized r{a.mixed ? new_tensor({0}, bytes) : new_tensor(q.sizes(), bytes),
              a.mixed ? new_tensor({0}, bytes) : new_tensor(k.sizes(), bytes),
              packed ? new_tensor({p.num_heads_k, p.head_dim_v, columns}, bytes)
                     : new_tensor({p.batch, p.num_heads_k, p.head_dim_v, columns}, bytes),
              of_heads(!a.mixed, p.num_heads, blocks(rows_q), floats),
              of_heads(!a.mixed, p.num_heads_k, blocks(rows_k), floats),
              of_heads(true, p.num_heads_k, p.head_dim_v, floats),
              of_heads(a.smooth_v, p.num_heads_k, p.head_dim_v, floats),
              of_heads(shifts_k, p.num_heads_k, p.head_dim, floats),
              shifts_k ? empty_lse(q) : new_tensor({0}, floats)};
  auto& [q8, k8, v8, q_descale, k_descale, v_descale, v_offset, k_offset, row_offset] = r;
  // What no tile writes: rows, columns and blocks outside sequences, and everything where there are no keys.
  if (packed || p.total_k == 0 || p.total_q == 0) {
    for (const Tensor& t : {q8, k8, v8}) t.view(at::kByte).zero_();
    for (const Tensor& t : {q_descale, k_descale, v_descale}) t.fill_(1);
    for (const Tensor& t : {v_offset, k_offset, row_offset}) t.zero_();
  }
  if (p.batch == 0 || p.total_k == 0 || !should_launch()) return r;
  const auto byte_pointer = [](const Tensor& t) {
    return t.numel() == 0 ? nullptr : static_cast<uint8_t*>(t.mutable_data_ptr());
  };
  const auto pointer = [](const Tensor& t) { return t.numel() == 0 ? nullptr : t.mutable_data_ptr<float>(); };
  x.q = view_of(q), x.k = view_of(k), x.v = view_of(v);
  x.q8 = byte_pointer(q8), x.k8 = byte_pointer(k8), x.v8 = byte_pointer(v8);
  x.q_factor = pointer(q_descale), x.k_factor = pointer(k_descale), x.v_factor = pointer(v_descale);
  x.v_offset = pointer(v_offset), x.k_offset = pointer(k_offset), x.row_offset = pointer(row_offset);
  x.by_block = a.by_block, x.hadamard = a.hadamard;
  x.rotary[0] = rotary_rows(a.cos_q, a.sin_q, a.interleaved, q, "q");
  x.rotary[1] = rotary_rows(a.cos_k, a.sin_k, a.interleaved, k, "k");
  x.seqused_k = lengths_of(a.seqused_k, p, q);
  x.stream = stream_handle(q.device());
  const Tensor partials = new_tensor({quantize_floats(p) + RoundingLoss::floats(p)}, floats);
  x.partials = partials.mutable_data_ptr<float>();
  const std::string error = quantize_fp8(x);
  TORCH_CHECK(error.empty(), "flash_ext quantize_fp8: ", error);
  return r;
}

}  // namespace flash_ext
