// What a call over a cache must satisfy before anything is allocated or launched. Metadata only, symbolic sizes
// allowed.
#include <utility>

#include "../path_choice.h"
#include "checks.h"

namespace flash_ext {

using namespace checks;

// Numbers that the device holds.
static void check_numbers(const Tensor& t, const char* name, const Tensor& q, int64_t dims, const char* shape,
                          const SymInt& batch) {
  TORCH_CHECK_TYPE(t.scalar_type() == at::kInt, name, " must be torch.int32, got ", dtype_name(t),
                   ". Convert it with .to(torch.int32).");
  check_device(t, name, q);
  TORCH_CHECK_VALUE(t.dim() == dims && equal(t.sym_size(0), batch), name, " must have shape ", shape, " with batch ",
                    batch, ", got ", shape_of(t), ".");
  TORCH_CHECK_VALUE(equal(t.sym_stride(-1), 1) || at_most(t.sym_size(-1), 1), name,
                    " must have stride 1 in its last dimension, got strides ", t.sym_strides(),
                    ". Call .contiguous() on it.");
}

// The words stand for 64 new keys. A window and slopes count keys in order, which in a tree is not that of a path.
static void check_tree(const Tensor& q, const SymInt& batch, const CallArgs& a) {
  if (!a.tree.has_value()) return;
  const bool packed = a.cu_seqlens_q.has_value();
  check_modifier(a.tree, "tree", q, {at::kLong},
                 packed ? std::vector<Sizes>{{q.sym_size(0)}} : std::vector<Sizes>{{batch}, {q.sym_size(1)}}, true);
  TORCH_CHECK_VALUE(packed || at_most(q.sym_size(1), 64), "a tree has at most 64 new tokens a sequence, got ",
                    q.sym_size(1), ". Split the call.");
  TORCH_CHECK_NOT_IMPLEMENTED(a.window_size_left == -1 && a.window_size_right == -1 && !a.slopes.has_value(),
                              "a tree takes the place of causal, and has neither a window nor ALiBi beside it, which "
                              "count keys in their order in the cache.");
}

// Rows and keys count inside each sequence. What lies behind the last row or key of a mask is hidden, and a bias adds 0
// there.
static void check_masks(const Tensor& q, const Tensor& k, const SymInt& batch, const CallArgs& a) {
  const Sizes any;
  check_mask(q, batch, a.mask, any, any);
  // Kernels over 8 bits multiply elements of fp16, whatever q is.
  check_bias(q, batch, a.bias, is_quantized(k) ? statistic_of(q) : q.scalar_type(), any, any);
  TORCH_CHECK_VALUE(a.document_q.has_value() == a.document_k.has_value(),
                    "document_q and document_k must be given together.");
  if (a.document_q.has_value()) {
    check_modifier(
        a.document_q, "document_q", q, {at::kInt},
        a.cu_seqlens_q.has_value() ? std::vector<Sizes>{{q.sym_size(0)}} : std::vector<Sizes>{{batch}, {q.sym_size(1)}},
        true);
    check_modifier(a.document_k, "document_k", q, {at::kInt}, {{batch}, any}, true);
  }
  TORCH_CHECK_NOT_IMPLEMENTED(
      !a.tree.has_value() || !(a.mask.has_value() || a.document_k.has_value() || a.bias.has_value()),
      "a tree stands by itself, without a mask, documents or a bias.");
}

// A cache of 8 bits. Its copies are of 16 bytes.
static void check_quantized(const Tensor& q, const Tensor& k, const Tensor& v, const SymInt& batch, const CallArgs& a) {
  TORCH_CHECK_TYPE(k.scalar_type() == v.scalar_type(), "k and v must share one dtype, got ", dtype_name(k), " and ",
                   dtype_name(v), ".");
  TORCH_CHECK_TYPE(is_reduced(q.scalar_type()) || (is_wide(q.scalar_type()) && !q.is_cuda()),
                   "q must be torch.float16 or torch.bfloat16 beside a cache of 8 bits, got ", dtype_name(q), ".");
  TORCH_CHECK_NOT_IMPLEMENTED(a.block_table.has_value() || !a.cu_seqlens_k.has_value(),
                              "k and v of 8 bits must lie in pages (block_table), got packed rows.");
  for (const Tensor* t : {&k, &v}) {
    TORCH_CHECK_NOT_IMPLEMENTED(equal(t->sym_size(-1) % 16, 0),
                                "head_dim of a cache of 8 bits must be a multiple of 16, got ", t->sym_size(-1), ".");
  }
  for (const auto& [t, name] : {std::pair{&a.k_descale, "k_descale"}, {&a.v_descale, "v_descale"}}) {
    if (!t->has_value()) continue;
    const SymInt heads = k.sym_size(-2);
    const Sizes of_head{1, heads};
    switch ((*t)->dim()) {
      case 0: check_modifier(*t, name, q, {at::kFloat}, {}, false); break;
      case 1: check_modifier(*t, name, q, {at::kFloat}, {of_head}, false); break;
      case 2: check_modifier(*t, name, q, {at::kFloat}, {{batch}, {heads}}, false); break;
      default: check_modifier(*t, name, q, {at::kFloat}, {{k.sym_size(0)}, {k.sym_size(-3)}, {heads}}, false);
    }
  }
}

bool is_latents(const Tensor& k, const Tensor& v) {
  return equal(k.sym_size(-1), kLatentHeadDim) && equal(v.sym_size(-1), kLatentHeadDimV) && equal(k.sym_size(-2), 1) &&
         !is_quantized(k);
}

void check_fwd_cached(const Tensor& q, const Tensor& k, const Tensor& v, const CallArgs& a) {
  check_devices(q, k, v);
  const SymInt batch = a.cu_seqlens_q.has_value() ? a.cu_seqlens_q->sym_size(0) - 1 : q.sym_size(0);
  if (is_quantized(k)) {
    check_quantized(q, k, v, batch, a);
  } else {
    check_dtypes(q, k, v, false);
    TORCH_CHECK_VALUE(!a.k_descale.has_value() && !a.v_descale.has_value(),
                      "k_descale and v_descale belong to k and v of torch.float8_e4m3fn or torch.int8, got ",
                      dtype_name(k), ".");
  }
  const bool packed = a.cu_seqlens_q.has_value(), in_pages = a.block_table.has_value();
  TORCH_CHECK_VALUE(q.dim() == (packed ? 3 : 4), "q must have shape ",
                    packed ? "(total_q, num_heads, head_dim)" : "(batch, seqlen_q, num_heads, head_dim)", ", got ",
                    shape_of(q), ".");
  if (packed) check_cu_seqlens(*a.cu_seqlens_q, "cu_seqlens_q", q);
  const bool in_rows = !in_pages && a.cu_seqlens_k.has_value();
  const char* const layout = in_pages  ? "(num_pages, page_size, num_heads, head_dim)"
                             : in_rows ? "(total_k, num_heads, head_dim)"
                                       : "(batch, seqlen_k, num_heads, head_dim)";
  for (const auto& [t, name] : {std::pair{&k, "k"}, {&v, "v"}}) {
    TORCH_CHECK_VALUE(t->dim() == (in_rows ? 3 : 4), name, " must have shape ", layout,
                      in_pages ? " with block_table" : "", ", got ", shape_of(*t), ".");
    TORCH_CHECK_VALUE(equal(t->sym_size(0), k.sym_size(0)), "v must have the ", in_pages ? "pages" : "entries",
                      " of k, ", k.sym_size(0), ", got ", v.sym_size(0), ".");
    check_unit_stride(*t, name);
  }
  check_unit_stride(q, "q");
  check_shapes(q, k, v);
  if (!is_latents(k, v)) check_head_dims(q, v);
  if (in_pages) {
    check_numbers(*a.block_table, "block_table", q, 2, "(batch, max_pages)", batch);
    TORCH_CHECK_VALUE(at_most(1, k.sym_size(1)), "a page of k must hold at least 1 key, got shape ", shape_of(k), ".");
    TORCH_CHECK_VALUE(a.seqused_k.has_value(),
                      "seqused_k must be given with block_table: the length of each sequence.");
  } else if (in_rows) {
    check_cu_seqlens(*a.cu_seqlens_k, "cu_seqlens_k", q);
    TORCH_CHECK_VALUE(equal(a.cu_seqlens_k->sym_size(0), batch + 1), "cu_seqlens_k must have ", batch + 1,
                      " bounds, one more than there are sequences, got ", a.cu_seqlens_k->sym_size(0), ".");
  } else {
    TORCH_CHECK_VALUE(at_most(batch, k.sym_size(0)), "k must have an entry for each of ", batch, " sequences, got ",
                      k.sym_size(0), ".");
  }
  if (a.seqused_k.has_value()) check_numbers(*a.seqused_k, "seqused_k", q, 1, "(batch,)", batch);
  check_of_heads(q, batch, a);
  check_tree(q, batch, a);
  check_masks(q, k, batch, a);
  for (const SymInt& size : {q.sym_size(0), q.sym_size(-3), q.sym_size(-2), k.sym_size(0), k.sym_size(-3)}) {
    TORCH_CHECK_VALUE(size.maybe_as_int().value_or(0) <= kMaxInt32,
                      "every dimension of q and k must be below 2**31, got q ", shape_of(q), ", k ", shape_of(k),
                      ". Split the call.");
  }
  check_options(q, a);
}

}  // namespace flash_ext
