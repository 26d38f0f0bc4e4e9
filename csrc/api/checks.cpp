// What a call must satisfy before anything is allocated or launched. Metadata only, symbolic sizes
// allowed.
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <initializer_list>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "../condensed.h"
#include "../path_choice.h"
#include "checks.h"

namespace flash_ext {
namespace checks {

// Plain numbers, the case of every real call, are compared in place.
bool equal(const SymInt& a, const SymInt& b) {
  const auto x = a.maybe_as_int(), y = b.maybe_as_int();
  return x && y ? *x == *y : a.sym_eq(b).expect_true(__FILE__, __LINE__);
}
bool at_most(const SymInt& a, const SymInt& b) {
  const auto x = a.maybe_as_int(), y = b.maybe_as_int();
  return x && y ? *x <= *y : a.sym_le(b).expect_true(__FILE__, __LINE__);
}

std::string dtype_name(const Tensor& t) { return c10::str("torch.", c10::getDtypeNames(t.scalar_type()).first); }

std::string shape_of(const Tensor& t) {
  std::ostringstream text;
  text << '(';
  const auto sizes = t.sym_sizes();
  for (size_t i = 0; i < sizes.size(); ++i) text << (i == 0 ? "" : ", ") << sizes[i];
  text << (sizes.size() == 1 ? ",)" : ")");
  return text.str();
}

bool is_reduced(c10::ScalarType dtype) { return dtype == at::kHalf || dtype == at::kBFloat16; }
bool is_wide(c10::ScalarType dtype) { return dtype == at::kFloat || dtype == at::kDouble; }

void check_device(const Tensor& t, const char* name, const Tensor& like, const char* like_name) {
  TORCH_CHECK_VALUE(t.device() == like.device(), name, " must be on the device of ", like_name, ", ", like.device(),
                    ", got ", t.device(), ".");
}

void check_devices(const Tensor& q, const Tensor& k, const Tensor& v) {
  TORCH_CHECK_NOT_IMPLEMENTED(q.is_cuda() || q.is_cpu() || q.is_meta(), "q is on ", q.device(),
                              "; attention runs on cuda and cpu. Move q, k and v to one of them.");
  TORCH_CHECK_VALUE(q.device() == k.device() && q.device() == v.device(), "q, k and v must be on one device, got q on ",
                    q.device(), ", k on ", k.device(), ", v on ", v.device(), ". Move them with .to(q.device).");
}

void check_dtypes(const Tensor& q, const Tensor& k, const Tensor& v, bool autocasts) {
  const auto dtype = q.scalar_type();
  const bool same = dtype == k.scalar_type() && dtype == v.scalar_type();
  const bool known = is_reduced(dtype) || (is_wide(dtype) && !q.is_cuda());
  if (C10_LIKELY(same && known)) return;
  std::ostringstream got;
  got << "got q " << dtype_name(q) << ", k " << dtype_name(k) << ", v " << dtype_name(v);
  TORCH_CHECK_TYPE(!q.is_cuda(), "q, k and v on cuda must all be torch.float16 or all torch.bfloat16, ", got.str(),
                   ". Cast them with .to(torch.bfloat16)",
                   autocasts ? ", or call inside torch.autocast(\"cuda\")." : ".");
  TORCH_CHECK_TYPE(known, "q, k and v must all be torch.float16, torch.bfloat16, torch.float32 or torch.float64, ",
                   got.str(), ". Cast them first.");
  TORCH_CHECK_TYPE(same, "q, k and v must share one dtype, ", got.str(),
                   autocasts ? ". Cast them to one, or call inside torch.autocast." : ". Cast them to one.");
}

void check_unit_stride(const Tensor& t, const char* name) {
  TORCH_CHECK_VALUE(equal(t.sym_stride(-1), 1) || equal(t.sym_size(-1), 1), name,
                    " must have stride 1 in its last dimension, got strides ", t.sym_strides(),
                    ". Call .contiguous() on it.");
}

void check_cu_seqlens(const Tensor& cu, const char* name, const Tensor& q) {
  TORCH_CHECK_TYPE(cu.scalar_type() == at::kInt, name, " must be torch.int32, got ", dtype_name(cu),
                   ". Convert it with .to(torch.int32).");
  check_device(cu, name, q);
  TORCH_CHECK_VALUE(cu.dim() == 1 && at_most(1, cu.sym_size(0)), name, " must have shape (batch + 1,), got ",
                    shape_of(cu), ".");
  TORCH_CHECK_VALUE(cu.is_contiguous(), name, " must be contiguous, got stride ", cu.sym_stride(0),
                    ". Call .contiguous() on it.");
}

void check_packed_or_dense(const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& cu_seqlens_q,
                           const OptionalTensor& cu_seqlens_k) {
  TORCH_CHECK_VALUE(cu_seqlens_q.has_value() == cu_seqlens_k.has_value(),
                    "cu_seqlens_q and cu_seqlens_k must be given together, got only ",
                    cu_seqlens_q.has_value() ? "cu_seqlens_q" : "cu_seqlens_k", ".");
  const bool packed = cu_seqlens_q.has_value();
  const int64_t want_dim = packed ? 3 : 4;
  const char* layout = packed ? "(total, num_heads, head_dim)" : "(batch, seqlen, num_heads, head_dim)";
  TORCH_CHECK_VALUE(q.dim() == want_dim, "q must have shape ", layout, ", got ", shape_of(q), ".",
                    packed && q.dim() == 4    ? " Sequences of one length go into attention."
                    : !packed && q.dim() == 3 ? " Packed sequences go into attention_varlen."
                                              : "");
  TORCH_CHECK_VALUE(k.dim() == want_dim, "k must have shape ", layout, ", got ", shape_of(k), ".");
  TORCH_CHECK_VALUE(v.dim() == want_dim, "v must have shape ", layout, ", got ", shape_of(v), ".");
  if (packed) {
    check_cu_seqlens(*cu_seqlens_q, "cu_seqlens_q", q);
    check_cu_seqlens(*cu_seqlens_k, "cu_seqlens_k", q);
    TORCH_CHECK_VALUE(equal(cu_seqlens_q->sym_size(0), cu_seqlens_k->sym_size(0)),
                      "cu_seqlens_q and cu_seqlens_k must have the same length (batch + 1), got ",
                      cu_seqlens_q->sym_size(0), " and ", cu_seqlens_k->sym_size(0), ".");
  } else {
    TORCH_CHECK_VALUE(equal(q.sym_size(0), k.sym_size(0)), "k must have the batch size of q, ", q.sym_size(0), ", got ",
                      k.sym_size(0), ".");
    TORCH_CHECK_VALUE(equal(q.sym_size(0), v.sym_size(0)), "v must have the batch size of q, ", q.sym_size(0), ", got ",
                      v.sym_size(0), ".");
  }
  // The kernels count rows, heads and batch entries in 32 bits; offsets are 64-bit. Sizes that are
  // still symbolic are not asked: the limit would become a guard of every traced program.
  for (int64_t i = 0; i < want_dim - 1; ++i) {
    TORCH_CHECK_VALUE(
        q.sym_size(i).maybe_as_int().value_or(0) <= kMaxInt32 && k.sym_size(i).maybe_as_int().value_or(0) <= kMaxInt32,
        "every dimension of q and k must be below 2**31, got q ", shape_of(q), ", k ", shape_of(k),
        ". Split the call.");
  }
}

void check_head_dims(const Tensor& q, const Tensor& v) {
  TORCH_CHECK_NOT_IMPLEMENTED(!q.is_cuda() || at_most(q.sym_size(-1), kMaxHeadDim),
                              "head_dim of q and k must be at most ", kMaxHeadDim, " on cuda, got ", q.sym_size(-1),
                              ". Use smaller heads, or torch.nn.functional.scaled_dot_product_attention.");
  TORCH_CHECK_NOT_IMPLEMENTED(!q.is_cuda() || at_most(v.sym_size(-1), kMaxHeadDim), "head_dim of v must be at most ",
                              kMaxHeadDim, " on cuda, got ", v.sym_size(-1),
                              ". Split v along its last dimension and concatenate the outputs.");
}

void check_shapes(const Tensor& q, const Tensor& k, const Tensor& v) {
  TORCH_CHECK_VALUE(equal(k.sym_size(-3), v.sym_size(-3)), "v must have the sequence length of k, ", k.sym_size(-3),
                    ", got ", v.sym_size(-3), ".");
  TORCH_CHECK_VALUE(equal(k.sym_size(-2), v.sym_size(-2)), "v must have the num_heads of k, ", k.sym_size(-2), ", got ",
                    v.sym_size(-2), ".");
  TORCH_CHECK_VALUE(equal(q.sym_size(-1), k.sym_size(-1)), "k must have the head_dim of q, ", q.sym_size(-1), ", got ",
                    k.sym_size(-1), ".");
  TORCH_CHECK_VALUE(at_most(1, q.sym_size(-1)), "head_dim of q and k must be at least 1, got 0.");
  TORCH_CHECK_VALUE(at_most(1, v.sym_size(-1)), "head_dim of v must be at least 1, got 0.");

  const SymInt num_heads = q.sym_size(-2);
  const SymInt num_heads_k = k.sym_size(-2);
  const bool divides = equal(num_heads, num_heads_k) ||
                       (at_most(1, num_heads) && at_most(1, num_heads_k) && equal(num_heads % num_heads_k, 0));
  if (C10_LIKELY(divides)) return;
  const bool is_heads_first =
      q.dim() == 4 && at_most(1, q.sym_size(1)) && at_most(1, k.sym_size(1)) && equal(q.sym_size(1) % k.sym_size(1), 0);
  TORCH_CHECK_VALUE(
      false, "num_heads of q must be a positive multiple of num_heads of k and v, got ", num_heads, " and ",
      num_heads_k, ".",
      is_heads_first
          ? " Tensors of shape (batch, num_heads, seqlen, head_dim) need layout=\"bhsd\", and transpose(1, 2) "
            "where a function has none."
          : "");
}

void check_options(const Tensor& q, const CallArgs& a) {
  TORCH_CHECK_VALUE(std::isfinite(a.scale), "scale must be finite, got ", a.scale, ".");
  TORCH_CHECK_VALUE(at_most(-1, a.window_size_left) && at_most(-1, a.window_size_right),
                    "window_size must be (left, right) with values of at least -1 (-1 is unlimited), got (",
                    a.window_size_left, ", ", a.window_size_right, ").");
  TORCH_CHECK_VALUE(at_most(0, a.max_seqlen_q), "max_seqlen_q must not be negative, got ", a.max_seqlen_q,
                    "; leave it out when unknown.");
  TORCH_CHECK_VALUE(at_most(0, a.max_seqlen_k), "max_seqlen_k must not be negative, got ", a.max_seqlen_k,
                    "; leave it out when unknown.");
  if (!a.backend.has_value()) return;
  Choice choice;
  const std::string error = parse_choice(*a.backend, choice);
  TORCH_CHECK_VALUE(error.empty() && !a.backend->empty(), "backend must be None (automatic) or one of ", path_names(),
                    ", got '", *a.backend, "'", error.empty() ? "" : ": ", error, ".");
  if (q.is_cpu() && *a.backend != "cpu") {
    std::string text;
    for (const Path& gpu_path : gpu_paths()) text += std::string(gpu_path.name) + " backend: q is on cpu; ";
    TORCH_CHECK_VALUE(false, "backend '", *a.backend, "' cannot run this call. ", text,
                      "cpu backend: accepts. Leave backend out, or move q, k and v to a GPU.");
  }
}

// `t` must look like a result of the forward: same device, the given shape.
void check_like(const Tensor& t, const char* name, const Tensor& q, c10::SymIntArrayRef want) {
  check_device(t, name, q);
  bool same = t.dim() == static_cast<int64_t>(want.size());
  for (size_t i = 0; same && i < want.size(); ++i) same = equal(t.sym_size(static_cast<int64_t>(i)), want[i]);
  TORCH_CHECK_VALUE(same, name, " must have shape ", want, ", got ", shape_of(t), ".");
}

void check_row_statistic(const Tensor& t, const char* name, const Tensor& q) {
  const auto want = statistic_of(q);
  TORCH_CHECK_TYPE(t.scalar_type() == want, name, " must be ", want == at::kFloat ? "torch.float32" : "torch.float64",
                   ", got ", dtype_name(t), ".");
  if (q.dim() == 4) {
    const std::array<SymInt, 3> shape = {q.sym_size(0), q.sym_size(2), q.sym_size(1)};
    check_like(t, name, q, shape);
  } else {
    const std::array<SymInt, 2> shape = {q.sym_size(1), q.sym_size(0)};
    check_like(t, name, q, shape);
  }
}

// ---- modifiers ----------------------------------------------------------------------------------

bool is_any_of(const SymInt& size, const Sizes& allowed) {
  return allowed.empty() || std::any_of(allowed.begin(), allowed.end(), [&](const SymInt& one) {
           const auto x = size.maybe_as_int(), y = one.maybe_as_int();
           return x && y ? *x == *y : size.sym_eq(one).guard_bool(__FILE__, __LINE__);
         });
}

void check_modifier(const OptionalTensor& t, const char* name, const Tensor& q,
                    std::initializer_list<c10::ScalarType> dtypes, const std::vector<Sizes>& sizes, bool contiguous) {
  if (std::find(dtypes.begin(), dtypes.end(), t->scalar_type()) == dtypes.end()) {
    std::set<std::string> names;
    for (const auto dtype : dtypes) names.insert("torch." + std::string(c10::getDtypeNames(dtype).first));
    std::string wanted;
    for (const std::string& one : names) wanted += (wanted.empty() ? "" : " or ") + one;
    TORCH_CHECK_TYPE(false, name, " must be ", wanted, ", got ", dtype_name(*t), ".");
  }
  check_device(*t, name, q);
  bool fits = t->dim() == static_cast<int64_t>(sizes.size());
  for (size_t i = 0; fits && i < sizes.size(); ++i) fits = is_any_of(t->sym_size(static_cast<int64_t>(i)), sizes[i]);
  if (!fits) {
    std::ostringstream wanted;
    for (size_t i = 0; i < sizes.size(); ++i) {
      wanted << (i == 0 ? "" : ", ") << (sizes[i].empty() ? "any" : "");
      for (size_t j = 0; j < sizes[i].size(); ++j) wanted << (j == 0 ? "" : " or ") << sizes[i][j];
    }
    TORCH_CHECK_VALUE(false, name, " must have shape (", wanted.str(), "), got ", shape_of(*t), ".");
  }
  TORCH_CHECK_VALUE(!contiguous || t->is_contiguous(), name, " must be contiguous. Call .contiguous() on it.");
}

// Slopes, sinks and the softcap, which calls over a cache have as well.
void check_of_heads(const Tensor& q, const SymInt& batch, const CallArgs& a) {
  const SymInt heads = q.sym_size(-2);
  const auto statistic = statistic_of(q);
  if (a.slopes.has_value()) {
    const bool has_batch = a.slopes->dim() != 1;
    check_modifier(a.slopes, "slopes", q, {statistic},
                   has_batch ? std::vector<Sizes>{{batch}, {heads}} : std::vector<Sizes>{{heads}}, true);
  }
  if (a.sinks.has_value()) check_modifier(a.sinks, "sinks", q, {statistic}, {{heads}}, true);
  TORCH_CHECK_VALUE(a.softcap >= 0 && std::isfinite(a.softcap),
                    "softcap must be 0 (off) or a positive finite number, got ", a.softcap, ".");
}

bool is_int32(const OptionalTensor& t) { return t.has_value() && t->scalar_type() == at::kInt; }

// By distance (three dimensions), or for each pair of row and key.
void check_bias(const Tensor& q, const SymInt& batch, const OptionalTensor& bias, c10::ScalarType narrow,
                const Sizes& rows, const Sizes& keys) {
  if (!bias.has_value()) return;
  const Sizes batches{batch, 1}, heads{q.sym_size(-2), 1};
  if (bias->dim() != 3) {
    check_modifier(bias, "bias", q, {at::kFloat, narrow}, {batches, heads, rows, keys}, false);
    return;
  }
  const auto statistic = statistic_of(q);
  check_modifier(bias, "bias", q, {statistic}, {batches, heads, {}}, true);
  const SymInt entries = bias->sym_size(2);
  TORCH_CHECK_VALUE(equal(entries % 2, 1), "bias by distance must have an odd number of entries, got ", entries, ".");
  TORCH_CHECK_VALUE(at_most(bias->sym_numel(), INT32_MAX), "bias by distance must have less than 2^31 elements, got ",
                    bias->sym_numel(), ".");
}

// As it was given, or condensed (condensed.h).
void check_mask(const Tensor& q, const SymInt& batch, const OptionalTensor& mask, const Sizes& rows,
                const Sizes& keys) {
  if (!mask.has_value()) return;
  const Sizes batches{batch, 1}, heads{q.sym_size(-2), 1};
  if (!is_int32(mask)) {
    check_modifier(mask, "mask", q, {at::kBool}, {batches, heads, rows, keys}, false);
    return;
  }
  const bool one_column = mask->dim() == 3;
  const auto to_rows_of = [&](const SymInt& n) { return condensed::mask_rows(n, one_column); };
  const Sizes to_rows = rows.empty() ? Sizes{} : Sizes{to_rows_of(rows[0]), to_rows_of(SymInt(1))};
  const Sizes to_words = keys.empty() ? Sizes{} : Sizes{condensed::mask_words(keys[0])};
  std::vector<Sizes> shape{batches, heads, to_rows};
  if (!one_column) shape.push_back(to_words);
  check_modifier(mask, "mask", q, {at::kInt}, shape, true);
  const int64_t found = mask->sym_size(2).maybe_as_int().value_or(0);
  TORCH_CHECK_VALUE(condensed::mask_rows(condensed::rows_of_mask(found, one_column), one_column) == found,
                    "a condensed mask has rows and those of its groups and tiles (csrc/condensed.h), got ", found,
                    " in all.");
}

// Dtypes, devices and shapes of what the arguments point to. Values stay on the device; kernels clamp them. The public
// functions check more, in the caller's words.
void check_modifiers(const Tensor& q, const Tensor& k, const CallArgs& a) {
  const bool packed = a.cu_seqlens_q.has_value();
  const SymInt batch = packed ? a.cu_seqlens_q->sym_size(0) - 1 : q.sym_size(0);
  const SymInt rows = q.sym_size(-3), heads = q.sym_size(-2), keys = k.sym_size(-3);
  const Sizes any;
  const auto shape = [&](bool with_batch, std::initializer_list<Sizes> rest) {
    std::vector<Sizes> sizes;
    if (with_batch) sizes.push_back({batch, 1});
    sizes.insert(sizes.end(), rest);
    return sizes;
  };
  const auto of_positions = [&](const SymInt& length) {
    const Sizes lengths{length, condensed::ids_length(length)};
    return packed ? std::vector<Sizes>{lengths} : std::vector<Sizes>{{batch}, lengths};
  };
  const Sizes of_rows = packed ? any : Sizes{rows, 1}, of_keys = packed ? any : Sizes{keys, 1};
  check_bias(q, batch, a.bias, q.scalar_type(), of_rows, of_keys);
  check_mask(q, batch, a.mask, of_rows, of_keys);
  const auto check_ids = [&](const OptionalTensor& t, const char* name, const SymInt& length) {
    if (t.has_value()) check_modifier(t, name, q, {at::kInt}, of_positions(length), true);
  };
  check_ids(a.document_q, "document_q", rows);
  check_ids(a.document_k, "document_k", keys);
  if (a.prefix_lens.has_value()) check_modifier(a.prefix_lens, "prefix_lens", q, {at::kInt}, {{batch}}, true);
  const auto check_intervals = [&](const OptionalTensor& t, const char* name, const SymInt& length) {
    if (!t.has_value()) return;
    const bool is_condensed = t->dim() == (packed ? 2 : 3);
    check_modifier(
        t, name, q, {at::kInt},
        is_condensed ? shape(!packed, {{heads, 1},
                                       {condensed::interval_length(length, 1), condensed::interval_length(length, 2)}})
                     : shape(!packed, {{heads, 1}, {length}, {2, 4}}),
        true);
  };
  check_intervals(a.hidden_rows, "hidden_rows", keys);
  check_intervals(a.hidden_keys, "hidden_keys", rows);
  check_of_heads(q, batch, a);
  if (a.rng.has_value()) check_modifier(a.rng, "rng", q, {at::kLong}, {{2}}, true);
  TORCH_CHECK_VALUE(a.document_q.has_value() == a.document_k.has_value(),
                    "document_q and document_k must be given together.");
  TORCH_CHECK_VALUE(a.dropout_p >= 0 && a.dropout_p <= 1, "dropout_p must be a probability from 0 to 1, got ",
                    a.dropout_p, ".");
  TORCH_CHECK_VALUE(a.dropout_p == 0 || a.rng.has_value(), "rng must be given with dropout_p ", a.dropout_p, ".");
  TORCH_CHECK_VALUE(at_most(0, a.sink_tokens) && at_most(0, a.chunk),
                    "sink_tokens and chunk must not be negative, got ", a.sink_tokens, " and ", a.chunk, ".");
  if (!a.blocks.has_value()) return;
  const SymInt &m = a.block_rows, &n = a.block_cols;
  TORCH_CHECK_VALUE(at_most(1, m) && at_most(1, n) && equal(m % 16, 0) && equal(n % 16, 0),
                    "block_rows and block_cols must be positive multiples of 16, got (", m, ", ", n, ").");
  const auto count = [](const SymInt& length, const SymInt& size) { return (length + size - 1) / size; };
  if (is_int32(a.blocks)) {
    const Sizes granules{condensed::block_rows(count(rows, m), m)}, words{condensed::block_words(count(keys, n), n)};
    check_modifier(a.blocks, "blocks", q, {at::kInt},
                   shape(true, {{heads, 1}, packed ? any : granules, packed ? any : words}), true);
    return;
  }
  check_modifier(a.blocks, "blocks", q, {at::kBool},
                 shape(true, {{heads, 1}, packed ? any : Sizes{count(rows, m)}, packed ? any : Sizes{count(keys, n)}}),
                 false);
}

}  // namespace checks

using namespace checks;

void check_fwd(const Tensor& q, const Tensor& k, const Tensor& v, const CallArgs& a) {
  check_devices(q, k, v);
  check_dtypes(q, k, v);
  check_packed_or_dense(q, k, v, a.cu_seqlens_q, a.cu_seqlens_k);
  check_shapes(q, k, v);
  check_head_dims(q, v);
  check_unit_stride(q, "q");
  check_unit_stride(k, "k");
  check_unit_stride(v, "v");
  check_options(q, a);
}

void check_bwd(const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out,
               const Tensor& lse, const CallArgs& a) {
  check_fwd(q, k, v, a);
  std::vector<SymInt> out_shape = q.sym_sizes().vec();
  out_shape.back() = v.sym_size(-1);
  TORCH_CHECK_TYPE(out.scalar_type() == q.scalar_type(), "out must have the dtype of q, ", dtype_name(q), ", got ",
                   dtype_name(out), ".");
  check_like(out, "out", q, out_shape);
  check_unit_stride(out, "out");
  TORCH_CHECK_TYPE(dout.scalar_type() == q.scalar_type(), "dout must have the dtype of q, ", dtype_name(q), ", got ",
                   dtype_name(dout), ".");
  check_like(dout, "dout", q, out_shape);
  check_row_statistic(lse, "lse", q);
  if (a.dlse.has_value()) check_row_statistic(*a.dlse, "dlse", q);
}

void check_fwd_mod(const Tensor& q, const Tensor& k, const Tensor& v, const CallArgs& a) {
  check_fwd(q, k, v, a);
  check_modifiers(q, k, a);
}

void check_bwd_mod(const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out,
                   const Tensor& lse, const CallArgs& a) {
  check_bwd(dout, q, k, v, out, lse, a);
  check_modifiers(q, k, a);
}

}  // namespace flash_ext
