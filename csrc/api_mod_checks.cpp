// What the kernels with modifiers rely on: dtypes, devices, shapes. Values stay on the device; kernels clamp them.
#include <array>
#include <cmath>
#include <string>

#include "api_params.h"

namespace flash_ext {
namespace {

void check_tensor(const OptionalTensor& t, const char* name, const Tensor& q, at::ScalarType dtype,
                  bool contiguous) {
  if (!t.has_value()) return;
  TORCH_CHECK_VALUE(t->device() == q.device(), name, " must be on the device of q, ", q.device(),
                    ", got ", t->device(), ".");
  TORCH_CHECK_TYPE(t->scalar_type() == dtype, name, " must have dtype ", dtype, ", got ", t->scalar_type(), ".");
  TORCH_CHECK_VALUE(!contiguous || t->is_contiguous(), name, " must be contiguous.");
}

struct Extents {
  int64_t batch, heads, rows, keys;
  bool packed;
};

// Each dimension is 1 or that of the problem; packed rows and keys are those of a sequence, any number.
void check_broadcast(const OptionalTensor& t, const char* name, const Extents& e) {
  if (!t.has_value()) return;
  TORCH_CHECK_VALUE(t->dim() == 4, name, " must have 4 dimensions, got ", t->dim(), ".");
  const std::array<int64_t, 4> want = {e.batch, e.heads, e.packed ? t->size(2) : e.rows, e.packed ? t->size(3) : e.keys};
  for (int dim = 0; dim < 4; ++dim) {
    TORCH_CHECK_VALUE(t->size(dim) == 1 || t->size(dim) == want[dim], name, " must broadcast to ", at::IntArrayRef(want),
                      ", got ", t->sizes(), ".");
  }
}

void check_shape(const OptionalTensor& t, const char* name, at::IntArrayRef want) {
  if (!t.has_value()) return;
  TORCH_CHECK_VALUE(t->sizes() == want, name, " must have shape ", want, ", got ", t->sizes(), ".");
}

void check_intervals(const OptionalTensor& t, const char* name, const Extents& e, int64_t length) {
  if (!t.has_value()) return;
  TORCH_CHECK_VALUE(t->dim() == (e.packed ? 3 : 4), name, " must have ", e.packed ? 3 : 4, " dimensions, got ",
                    t->dim(), ".");
  const bool fits = (t->size(-1) == 2 || t->size(-1) == 4) && t->size(-2) == length &&
                    (t->size(-3) == 1 || t->size(-3) == e.heads) &&
                    (e.packed || t->size(0) == 1 || t->size(0) == e.batch);
  TORCH_CHECK_VALUE(fits, name, " must be (1 or batch, 1 or heads, ", length, ", 2 or 4), without batch when packed; got ",
                    t->sizes(), ".");
}

}  // namespace

void check_modifiers(const Tensor& q, const Tensor& k, const OptionalTensor& cu_seqlens_q,
                     const ModifierArguments& a) {
  const bool packed = cu_seqlens_q.has_value();
  const Extents e{packed ? cu_seqlens_q->size(0) - 1 : q.size(0), q.size(-2), q.size(-3), k.size(-3), packed};
  if (a.bias.has_value()) {
    const auto dtype = a.bias->scalar_type() == at::kFloat ? at::kFloat : q.scalar_type();
    check_tensor(a.bias, "bias", q, dtype, false);
  }
  check_broadcast(a.bias, "bias", e);
  check_tensor(a.mask, "mask", q, at::kBool, false);
  check_broadcast(a.mask, "mask", e);
  TORCH_CHECK_VALUE(a.document_q.has_value() == a.document_k.has_value(),
                    "document_q and document_k must be given together.");
  check_tensor(a.document_q, "document_q", q, at::kInt, true);
  check_tensor(a.document_k, "document_k", q, at::kInt, true);
  if (packed) {
    check_shape(a.document_q, "document_q", {e.rows});
    check_shape(a.document_k, "document_k", {e.keys});
  } else {
    check_shape(a.document_q, "document_q", {e.batch, e.rows});
    check_shape(a.document_k, "document_k", {e.batch, e.keys});
  }
  check_tensor(a.prefix_lens, "prefix_lens", q, at::kInt, true);
  check_shape(a.prefix_lens, "prefix_lens", {e.batch});
  check_tensor(a.hidden_rows, "hidden_rows", q, at::kInt, true);
  check_intervals(a.hidden_rows, "hidden_rows", e, e.keys);
  check_tensor(a.hidden_keys, "hidden_keys", q, at::kInt, true);
  check_intervals(a.hidden_keys, "hidden_keys", e, e.rows);
  check_tensor(a.blocks, "blocks", q, at::kBool, false);
  if (a.blocks.has_value()) {
    TORCH_CHECK_VALUE(a.block_rows > 0 && a.block_rows % 16 == 0 && a.block_cols > 0 && a.block_cols % 16 == 0,
                      "block sizes must be positive multiples of 16, got ", a.block_rows, " and ", a.block_cols, ".");
    const auto count = [](int64_t length, int64_t size) { return (length + size - 1) / size; };
    const Tensor& b = *a.blocks;
    const bool fits = b.dim() == 4 && (b.size(0) == 1 || b.size(0) == e.batch) && (b.size(1) == 1 || b.size(1) == e.heads) &&
                      (packed || (b.size(2) == count(e.rows, a.block_rows) && b.size(3) == count(e.keys, a.block_cols)));
    TORCH_CHECK_VALUE(fits, "blocks must be (1 or batch, 1 or heads, blocks of rows, blocks of keys), got ", b.sizes(), ".");
  }
  check_tensor(a.slopes, "slopes", q, at::kFloat, true);
  if (a.slopes.has_value() && a.slopes->dim() == 2) {
    check_shape(a.slopes, "slopes", {e.batch, e.heads});
  } else {
    check_shape(a.slopes, "slopes", {e.heads});
  }
  check_tensor(a.sinks, "sinks", q, at::kFloat, true);
  check_shape(a.sinks, "sinks", {e.heads});
  check_tensor(a.rng, "rng", q, at::kLong, true);
  check_shape(a.rng, "rng", {2});
  TORCH_CHECK_VALUE(a.dropout_p >= 0 && a.dropout_p <= 1, "dropout_p must lie in [0, 1], got ", a.dropout_p, ".");
  TORCH_CHECK_VALUE(a.dropout_p == 0 || a.rng.has_value(), "dropout needs rng, its seed and offset.");
  TORCH_CHECK_VALUE(a.softcap >= 0 && std::isfinite(a.softcap),
                    "softcap must be 0 (off) or a positive finite number, got ", a.softcap, ".");
  TORCH_CHECK_VALUE(a.sink_tokens >= 0, "sink_tokens must not be negative, got ", a.sink_tokens, ".");
  TORCH_CHECK_VALUE(a.chunk >= 0, "chunk must not be negative, got ", a.chunk, ".");
}

}  // namespace flash_ext
