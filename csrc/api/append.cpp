// flash_ext::append_kv: new keys and values go into a cache in place, keys turned by their positions.
#include <c10/core/ScalarType.h>

#include <sstream>
#include <string>

#include "../append_kv.h"
#include "api.h"
#include "tangents.h"
#include "tensors.h"

namespace flash_ext {
namespace {

std::string text_of(const Tensor& t) {
  std::ostringstream text;
  text << "torch." << c10::getDtypeNames(t.scalar_type()).first << ' ' << t.sym_sizes();
  return text.str();
}

bool same(const SymInt& a, const SymInt& b) {
  const auto x = a.maybe_as_int(), y = b.maybe_as_int();
  return x && y ? *x == *y : a.sym_eq(b).expect_true(__FILE__, __LINE__);
}

void check_indices(const Tensor& t, const char* name, const Tensor& k_new) {
  TORCH_CHECK_TYPE(t.scalar_type() == at::kInt || t.scalar_type() == at::kLong, name,
                   " must be torch.int32 or torch.int64, got ", text_of(t), ".");
  TORCH_CHECK_VALUE(t.device() == k_new.device(), name, " must be on the device of k_new, ", k_new.device(), ", got ",
                    t.device(), ".");
  TORCH_CHECK_VALUE(t.dim() == 1 && same(t.sym_size(0), k_new.sym_size(0)), name, " must have shape (tokens,), here (",
                    k_new.sym_size(0), ",), got ", t.sym_sizes(), ".");
  TORCH_CHECK_VALUE(t.is_contiguous(), name, " must be contiguous. Call .contiguous() on it.");
}

void check_is_written(const Tensor& t, const char* name) {
  for (int64_t dim = 0; dim < t.dim(); ++dim) {
    TORCH_CHECK_VALUE(
        t.sym_size(dim).maybe_as_int().value_or(2) <= 1 || t.sym_stride(dim).maybe_as_int().value_or(1) != 0, name,
        " must not be expanded to be written, got strides ", t.sym_strides(), ".");
  }
}

// Given for each head, or token and head; or of the slots of the cache, where they are written.
void check_descale(const OptionalTensor& t, const char* name, const Tensor& k_new, const Tensor& k_cache) {
  if (!t.has_value()) return;
  TORCH_CHECK_VALUE(is_quantized(k_cache), name, " belongs to a cache of torch.float8_e4m3fn or torch.int8, got ",
                    text_of(k_cache), ".");
  TORCH_CHECK_TYPE(t->scalar_type() == at::kFloat, name, " must be torch.float32, got ", text_of(*t), ".");
  TORCH_CHECK_VALUE(t->device() == k_new.device(), name, " must be on the device of k_new, ", k_new.device(), ", got ",
                    t->device(), ".");
  const SymInt heads = k_new.sym_size(1);
  bool fits = t->dim() <= 3;
  if (t->dim() == 1) fits = same(t->sym_size(0), 1) || same(t->sym_size(0), heads);
  if (t->dim() == 2) fits = same(t->sym_size(0), k_new.sym_size(0)) && same(t->sym_size(1), heads);
  if (t->dim() == 3) {
    fits = same(t->sym_size(0), k_cache.sym_size(0)) && same(t->sym_size(1), k_cache.sym_size(1)) &&
           same(t->sym_size(2), heads);
  }
  TORCH_CHECK_VALUE(fits, name,
                    " must have shape (num_heads,), (tokens, num_heads) or (num_pages, page_size, "
                    "num_heads), got ",
                    t->sym_sizes(), ".");
  if (t->dim() == 3) check_is_written(*t, name);
}

void check_no_gradient(const Tensor& t, const char* name) {
  TORCH_CHECK_NOT_IMPLEMENTED(!t.requires_grad() || !at::GradMode::is_enabled(), name,
                              " requires a gradient, and append_kv has none. Call it under torch.no_grad().");
  refuse_tangent(t);
}

}  // namespace

void check_append_kv(const Tensor& k_new, const Tensor& v_new, const AppendArgs& a) {
  const auto& [k_cache, v_cache, slots, cos, sin, positions, interleaved, k_descale, v_descale] = a;
  const std::pair<const Tensor*, const char*> all[] = {
      {&k_new, "k_new"}, {&v_new, "v_new"}, {&k_cache, "k_cache"}, {&v_cache, "v_cache"}};
  for (const auto& [t, name] : all) {
    const bool is_new = t == &k_new || t == &v_new;
    TORCH_CHECK_VALUE(t->dim() == (is_new ? 3 : 4), name, " must have shape ",
                      is_new ? "(tokens, num_heads, head_dim)" : "(num_pages, page_size, num_heads, head_dim)",
                      ", got ", t->sym_sizes(), ".");
    const bool is_like_new = is_new || !is_quantized(k_cache);
    const Tensor& like = is_like_new ? k_new : k_cache;
    TORCH_CHECK_TYPE(t->scalar_type() == like.scalar_type(), name, " must have the dtype of ",
                     is_like_new ? "k_new" : "k_cache", ", got ", text_of(*t), " and ", text_of(like), ".");
    TORCH_CHECK_VALUE(t->device() == k_new.device(), name, " must be on the device of k_new, ", k_new.device(),
                      ", got ", t->device(), ".");
    TORCH_CHECK_VALUE(same(t->sym_stride(-1), 1) || same(t->sym_size(-1), 1), name,
                      " must have stride 1 in its last dimension, got strides ", t->sym_strides(), ".");
    check_no_gradient(*t, name);
    TORCH_CHECK_VALUE(same(t->sym_size(-2), k_new.sym_size(-2)), name, " must have the ", k_new.sym_size(-2),
                      " heads of k_new, got ", t->sym_size(-2), ".");
    if (is_new) continue;
    check_is_written(*t, name);
  }
  TORCH_CHECK_TYPE(at::isFloatingType(k_new.scalar_type()) &&
                       (!k_new.is_cuda() || k_new.scalar_type() == at::kHalf || k_new.scalar_type() == at::kBFloat16),
                   "k_new must be torch.float16 or torch.bfloat16 on cuda, and floating point elsewhere, got ",
                   text_of(k_new), ".");
  TORCH_CHECK_VALUE(same(v_new.sym_size(0), k_new.sym_size(0)), "v_new must have the tokens of k_new, ",
                    k_new.sym_size(0), ", got ", v_new.sym_size(0), ".");
  TORCH_CHECK_VALUE(same(k_cache.sym_size(-1), k_new.sym_size(-1)) && same(v_cache.sym_size(-1), v_new.sym_size(-1)),
                    "k_cache and v_cache must have the head_dim of k_new and v_new, got ", k_cache.sym_sizes(), " and ",
                    v_cache.sym_sizes(), ".");
  TORCH_CHECK_VALUE(same(k_cache.sym_size(0), v_cache.sym_size(0)) && same(k_cache.sym_size(1), v_cache.sym_size(1)),
                    "k_cache and v_cache must have the same pages, got ", k_cache.sym_sizes(), " and ",
                    v_cache.sym_sizes(), ".");
  check_indices(slots, "slot_mapping", k_new);
  check_descale(k_descale, "k_descale", k_new, k_cache);
  check_descale(v_descale, "v_descale", k_new, k_cache);
  TORCH_CHECK_VALUE(cos.has_value() == sin.has_value() && cos.has_value() == positions.has_value(),
                    "cos, sin and positions of a rotary embedding must be given together.");
  if (!cos.has_value()) return;
  check_indices(*positions, "positions", k_new);
  for (const auto& [t, name] : {std::pair{&*cos, "cos"}, {&*sin, "sin"}}) {
    TORCH_CHECK_VALUE(t->device() == k_new.device(), name, " must be on the device of k_new, ", k_new.device(),
                      ", got ", t->device(), ".");
    check_no_gradient(*t, name);
    TORCH_CHECK_TYPE(t->scalar_type() == at::kFloat || t->scalar_type() == k_new.scalar_type(), name,
                     " must be torch.float32 or have the dtype of k_new, got ", text_of(*t), ".");
    TORCH_CHECK_VALUE(t->dim() == 2 && same(t->sym_size(1), cos->sym_size(1)) && same(t->sym_size(0), cos->sym_size(0)),
                      name, " must have shape (positions, rotary_dim / 2), as cos and sin both, got ", t->sym_sizes(),
                      ".");
    TORCH_CHECK_VALUE(same(t->sym_stride(-1), 1) || same(t->sym_size(-1), 1), name,
                      " must have stride 1 in its last dimension. Call .contiguous() on it.");
  }
  TORCH_CHECK_TYPE(cos->scalar_type() == sin->scalar_type(), "cos and sin must have one dtype, got ", text_of(*cos),
                   " and ", text_of(*sin), ".");
  const auto half = cos->sym_size(1).maybe_as_int(), d = k_new.sym_size(-1).maybe_as_int();
  TORCH_CHECK_VALUE(!half || !d || 2 * *half <= *d, "cos and sin turn ", 2 * half.value_or(0),
                    " features, but k_new has ", d.value_or(0), ".");
  TORCH_CHECK_VALUE(cos->sym_size(0).maybe_as_int().value_or(1) > 0,
                    "cos and sin must have a row for each position, got none.");
}

void append_kv_gpu(const Tensor& k_new, const Tensor& v_new, const AppendArgs& a) {
  check_append_kv(k_new, v_new, a);
  const auto& [k_cache, v_cache, slots, cos, sin, positions, interleaved, k_descale, v_descale] = a;
  if (k_new.numel() == 0 && v_new.numel() == 0) return;
  if (k_cache.size(0) == 0 || k_cache.size(1) == 0) return;
  const OnDevice on_device(k_new);
  AppendParams p;
  p.dtype = dtype_of(k_new);
  p.k_new = view_of(k_new), p.v_new = view_of(v_new);
  p.k_cache = view_of(k_cache), p.v_cache = view_of(v_cache);
  p.slots = slots.const_data_ptr();
  p.is_wide = slots.scalar_type() == at::kLong;
  p.tokens = k_new.size(0);
  p.num_slots = k_cache.size(0) * k_cache.size(1);
  TORCH_CHECK_NOT_IMPLEMENTED(p.num_slots < (int64_t{1} << 31), "append_kv: the cache has ", p.num_slots,
                              " slots, 2^31 or more. Divide it.");
  p.page_size = Divisor(static_cast<uint32_t>(k_cache.size(1)));
  p.heads = Divisor(static_cast<uint32_t>(k_new.size(1)));
  p.head_dim = static_cast<int32_t>(k_new.size(2)), p.head_dim_v = static_cast<int32_t>(v_new.size(2));
  p.key_chunks = (p.head_dim + 7) / 8;
  p.chunks = Divisor(static_cast<uint32_t>(p.key_chunks + (p.head_dim_v + 7) / 8));
  if (cos.has_value()) {
    Rotary& r = p.rotary;
    r.cos = cos->const_data_ptr(), r.sin = sin->const_data_ptr();
    r.cos_stride = cos->stride(0), r.sin_stride = sin->stride(0);
    r.is_float = cos->scalar_type() == at::kFloat;
    r.interleaved = interleaved;
    r.dim = static_cast<int32_t>(2 * cos->size(1));
    r.positions = clamp_to_int32(cos->size(0));
    r.of_token = positions->const_data_ptr();
    r.is_wide = positions->scalar_type() == at::kLong;
  }
  p.cache_type = cache_type_of(k_cache);
  p.k_factors = factors_of(k_descale), p.v_factors = factors_of(v_descale);
  const auto note_change = [](const Tensor& t) {  // as torch does in place: autograd notices what was saved before
    if (!t.is_inference()) t.unsafeGetTensorImpl()->bump_version();
  };
  note_change(k_cache), note_change(v_cache);
  if (p.k_factors.of_slots) note_change(*k_descale);
  if (p.v_factors.of_slots) note_change(*v_descale);
  p.stream = stream_handle(k_new.device());
  if (!should_launch()) return;
  const std::string error = append_kv(p);
  TORCH_CHECK(error.empty(), "flash_ext append_kv: ", error);
}

}  // namespace flash_ext
