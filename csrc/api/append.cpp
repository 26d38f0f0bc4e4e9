// flash_ext::append_kv and flash_ext::append_behind: new keys and values go into a cache in place, keys turned by their
// positions. The second finds places from lengths, which makes a step of a server one launch.
#include <ATen/core/grad_mode.h>
#include <c10/core/ScalarType.h>

#include <algorithm>
#include <string>

#include "../append_kv.h"
#include "api.h"
#include "checks.h"
#include "tangents.h"
#include "tensors.h"

namespace flash_ext {

using namespace checks;

namespace {

std::string text_of(const Tensor& t) { return c10::str(dtype_name(t), ' ', t.sym_sizes()); }

bool is_floating_on_device(const Tensor& t) {
  return at::isFloatingType(t.scalar_type()) && (!t.is_cuda() || is_reduced(t.scalar_type()));
}

void check_indices(const Tensor& t, const char* name, const Tensor& k_new) {
  TORCH_CHECK_TYPE(t.scalar_type() == at::kInt || t.scalar_type() == at::kLong, name,
                   " must be torch.int32 or torch.int64, got ", text_of(t), ".");
  check_device(t, name, k_new, "k_new");
  TORCH_CHECK_VALUE(t.dim() == 1 && equal(t.sym_size(0), k_new.sym_size(0)), name, " must have shape (tokens,), here (",
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

// Given for each head, or token and head, or sequence and head; or of the slots of the cache, where they are written.
void check_descale(const OptionalTensor& t, const char* name, const Tensor& k_new, const Tensor& k_cache) {
  if (!t.has_value()) return;
  TORCH_CHECK_VALUE(is_quantized(k_cache), name, " belongs to a cache of torch.float8_e4m3fn or torch.int8, got ",
                    text_of(k_cache), ".");
  TORCH_CHECK_TYPE(t->scalar_type() == at::kFloat, name, " must be torch.float32, got ", text_of(*t), ".");
  check_device(*t, name, k_new, "k_new");
  const SymInt heads = k_new.sym_size(-2);
  bool fits = t->dim() <= 3;
  if (t->dim() == 1) fits = equal(t->sym_size(0), 1) || equal(t->sym_size(0), heads);
  if (t->dim() == 2) fits = equal(t->sym_size(0), k_new.sym_size(0)) && equal(t->sym_size(1), heads);
  if (t->dim() == 3) {
    fits = equal(t->sym_size(0), k_cache.sym_size(0)) && equal(t->sym_size(1), k_cache.sym_size(1)) &&
           equal(t->sym_size(2), heads);
  }
  TORCH_CHECK_VALUE(fits, name, " must have shape (num_heads,), (", k_new.dim() == 3 ? "tokens" : "batch",
                    ", num_heads) or (num_pages, page_size, num_heads), got ", t->sym_sizes(), ".");
  if (t->dim() == 3) check_is_written(*t, name);
}

void check_no_gradient(const Tensor& t, const char* name) {
  TORCH_CHECK_NOT_IMPLEMENTED(!t.requires_grad() || !at::GradMode::is_enabled(), name,
                              " requires a gradient, and append_kv has none. Call it under torch.no_grad().");
  refuse_tangent(t);
}

// dims: of k_new and v_new, 3, or 4 where the second counts the tokens of a sequence.
void check_rows(const Tensor& k_new, const Tensor& v_new, const Tensor& k_cache, const Tensor& v_cache, int64_t dims) {
  const std::pair<const Tensor*, const char*> all[] = {
      {&k_new, "k_new"}, {&v_new, "v_new"}, {&k_cache, "k_cache"}, {&v_cache, "v_cache"}};
  const char* const shape = dims == 3 ? "(tokens, num_heads, head_dim)" : "(batch, new_tokens, num_heads, head_dim)";
  for (const auto& [t, name] : all) {
    const bool is_new = t == &k_new || t == &v_new;
    TORCH_CHECK_VALUE(t->dim() == (is_new ? dims : 4), name, " must have shape ",
                      is_new ? shape : "(num_pages, page_size, num_heads, head_dim)", ", got ", t->sym_sizes(), ".");
    const bool is_like_new = is_new || !is_quantized(k_cache);
    const Tensor& like = is_like_new ? k_new : k_cache;
    TORCH_CHECK_TYPE(t->scalar_type() == like.scalar_type(), name, " must have the dtype of ",
                     is_like_new ? "k_new" : "k_cache", ", got ", text_of(*t), " and ", text_of(like), ".");
    check_device(*t, name, k_new, "k_new");
    TORCH_CHECK_VALUE(equal(t->sym_stride(-1), 1) || equal(t->sym_size(-1), 1), name,
                      " must have stride 1 in its last dimension, got strides ", t->sym_strides(), ".");
    check_no_gradient(*t, name);
    TORCH_CHECK_VALUE(equal(t->sym_size(-2), k_new.sym_size(-2)), name, " must have the ", k_new.sym_size(-2),
                      " heads of k_new, got ", t->sym_size(-2), ".");
    if (is_new) continue;
    check_is_written(*t, name);
  }
  TORCH_CHECK_TYPE(is_floating_on_device(k_new),
                   "k_new must be torch.float16 or torch.bfloat16 on cuda, and floating point elsewhere, got ",
                   text_of(k_new), ".");
  for (int64_t dim = 0; dim < dims - 2; ++dim) {
    TORCH_CHECK_VALUE(equal(v_new.sym_size(dim), k_new.sym_size(dim)), "v_new must have the tokens of k_new, ",
                      k_new.sym_size(dim), ", got ", v_new.sym_size(dim), ".");
  }
  TORCH_CHECK_VALUE(equal(k_cache.sym_size(-1), k_new.sym_size(-1)) && equal(v_cache.sym_size(-1), v_new.sym_size(-1)),
                    "k_cache and v_cache must have the head_dim of k_new and v_new, got ", k_cache.sym_sizes(), " and ",
                    v_cache.sym_sizes(), ".");
  TORCH_CHECK_VALUE(equal(k_cache.sym_size(0), v_cache.sym_size(0)) && equal(k_cache.sym_size(1), v_cache.sym_size(1)),
                    "k_cache and v_cache must have the same pages, got ", k_cache.sym_sizes(), " and ",
                    v_cache.sym_sizes(), ".");
}

void check_factors(const Tensor& cos, const Tensor& sin, const Tensor& k_new) {
  for (const auto& [t, name] : {std::pair{&cos, "cos"}, {&sin, "sin"}}) {
    check_device(*t, name, k_new, "k_new");
    check_no_gradient(*t, name);
    TORCH_CHECK_TYPE(t->scalar_type() == at::kFloat || t->scalar_type() == k_new.scalar_type(), name,
                     " must be torch.float32 or have the dtype of k_new, got ", text_of(*t), ".");
    TORCH_CHECK_VALUE(t->dim() == 2 && equal(t->sym_size(1), cos.sym_size(1)) && equal(t->sym_size(0), cos.sym_size(0)),
                      name, " must have shape (positions, rotary_dim / 2), as cos and sin both, got ", t->sym_sizes(),
                      ".");
    TORCH_CHECK_VALUE(equal(t->sym_stride(-1), 1) || equal(t->sym_size(-1), 1), name,
                      " must have stride 1 in its last dimension. Call .contiguous() on it.");
  }
  TORCH_CHECK_TYPE(cos.scalar_type() == sin.scalar_type(), "cos and sin must have one dtype, got ", text_of(cos),
                   " and ", text_of(sin), ".");
  const auto half = cos.sym_size(1).maybe_as_int(), d = k_new.sym_size(-1).maybe_as_int();
  TORCH_CHECK_VALUE(!half || !d || 2 * *half <= *d, "cos and sin turn ", 2 * half.value_or(0),
                    " features, but k_new has ", d.value_or(0), ".");
  TORCH_CHECK_VALUE(cos.sym_size(0).maybe_as_int().value_or(1) > 0,
                    "cos and sin must have a row for each position, got none.");
}

// Numbers of sequences, of which some may be of 64 bits.
void check_numbers(const Tensor& t, const char* name, const Tensor& k_new, int64_t dims, bool may_be_wide) {
  TORCH_CHECK_TYPE(t.scalar_type() == at::kInt || (may_be_wide && t.scalar_type() == at::kLong), name,
                   may_be_wide ? " must be torch.int32 or torch.int64, got " : " must be torch.int32, got ", text_of(t),
                   ".");
  check_device(t, name, k_new, "k_new");
  TORCH_CHECK_VALUE(t.dim() == dims && equal(t.sym_size(0), k_new.sym_size(0)), name, " must have shape ",
                    dims == 1 ? "(batch,)" : "(batch, max_pages)", " with batch ", k_new.sym_size(0), ", got ",
                    t.sym_sizes(), ".");
}

// Queries that are turned by the factors of the keys.
void check_turned(const Tensor& q, const Tensor& k_new, const AppendBehindArgs& a) {
  TORCH_CHECK_VALUE(a.cos.has_value(), "q is given to be turned: cos and sin must be given with it.");
  TORCH_CHECK_TYPE(is_floating_on_device(q),
                   "q must be torch.float16 or torch.bfloat16 on cuda, and floating point elsewhere, got ", text_of(q),
                   ".");
  check_device(q, "q", k_new, "k_new");
  const bool packed = a.cu_seqlens_q.has_value();
  TORCH_CHECK_VALUE(q.dim() == (packed ? 3 : 4), "q must have shape ",
                    packed ? "(total_q, num_heads, head_dim)" : "(batch, seqlen_q, num_heads, head_dim)", ", got ",
                    q.sym_sizes(), ".");
  TORCH_CHECK_VALUE(equal(q.sym_size(-1), k_new.sym_size(-1)), "q must have the head_dim of k_new, ",
                    k_new.sym_size(-1), ", got ", q.sym_size(-1), ".");
  TORCH_CHECK_VALUE(equal(q.sym_stride(-1), 1) || equal(q.sym_size(-1), 1),
                    "q must have stride 1 in its last dimension, got strides ", q.sym_strides(), ".");
  check_no_gradient(q, "q");
  if (packed) check_cu_seqlens(*a.cu_seqlens_q, "cu_seqlens_q", q);
  TORCH_CHECK_VALUE(equal(packed ? a.cu_seqlens_q->sym_size(0) - 1 : q.sym_size(0), k_new.sym_size(0)),
                    "q must have the ", k_new.sym_size(0), " sequences of k_new, got ",
                    packed ? a.cu_seqlens_q->sym_size(0) - 1 : q.sym_size(0), ".");
}

uint32_t at_least_one(int64_t size) { return static_cast<uint32_t>(std::max<int64_t>(size, 1)); }

// What both operators give to the kernel. The cache may have no slots, and new rows no elements.
template <typename Args>
AppendParams params_of_rows(const Tensor& k_new, const Tensor& v_new, const Args& a) {
  AppendParams p;
  p.dtype = dtype_of(k_new);
  p.k_new = view_of(k_new), p.v_new = view_of(v_new);
  p.k_cache = view_of(a.k_cache), p.v_cache = view_of(a.v_cache);
  p.num_slots = a.k_cache.size(0) * a.k_cache.size(1);
  TORCH_CHECK_NOT_IMPLEMENTED(p.num_slots < (int64_t{1} << 31), "append_kv: the cache has ", p.num_slots,
                              " slots, 2^31 or more. Divide it.");
  p.page_size = Divisor(at_least_one(a.k_cache.size(1)));
  p.heads = Divisor(at_least_one(k_new.size(-2)));
  p.head_dim = static_cast<int32_t>(k_new.size(-1)), p.head_dim_v = static_cast<int32_t>(v_new.size(-1));
  p.key_chunks = (p.head_dim + 7) / 8;
  p.chunks = Divisor(at_least_one(p.key_chunks + (p.head_dim_v + 7) / 8));
  if (a.cos.has_value()) {
    Rotary& r = p.rotary;
    r.cos = a.cos->const_data_ptr(), r.sin = a.sin->const_data_ptr();
    r.cos_stride = a.cos->stride(0), r.sin_stride = a.sin->stride(0);
    r.is_float = a.cos->scalar_type() == at::kFloat;
    r.interleaved = a.interleaved;
    r.dim = static_cast<int32_t>(2 * a.cos->size(1));
    r.positions = clamp_to_int32(a.cos->size(0));
  }
  p.cache_type = cache_type_of(a.k_cache);
  p.k_factors = factors_of(a.k_descale), p.v_factors = factors_of(a.v_descale);
  return p;
}

// As torch does in place: autograd notices what was saved before.
template <typename Args>
void note_changes(const AppendParams& p, const Args& a) {
  const auto note_change = [](const Tensor& t) {
    if (!t.is_inference()) t.unsafeGetTensorImpl()->bump_version();
  };
  note_change(a.k_cache), note_change(a.v_cache);
  if (p.k_factors.of_slots) note_change(*a.k_descale);
  if (p.v_factors.of_slots) note_change(*a.v_descale);
}

void run_append(AppendParams& p, const Tensor& k_new) {
  p.stream = stream_handle(k_new.device());
  if (!should_launch()) return;
  const std::string error = append_kv(p);
  TORCH_CHECK(error.empty(), "flash_ext append_kv: ", error);
}

}  // namespace

void check_append_kv(const Tensor& k_new, const Tensor& v_new, const AppendArgs& a) {
  check_rows(k_new, v_new, a.k_cache, a.v_cache, 3);
  check_indices(a.slot_mapping, "slot_mapping", k_new);
  check_descale(a.k_descale, "k_descale", k_new, a.k_cache);
  check_descale(a.v_descale, "v_descale", k_new, a.k_cache);
  TORCH_CHECK_VALUE(a.cos.has_value() == a.sin.has_value() && a.cos.has_value() == a.positions.has_value(),
                    "cos, sin and positions of a rotary embedding must be given together.");
  if (!a.cos.has_value()) return;
  check_indices(*a.positions, "positions", k_new);
  check_factors(*a.cos, *a.sin, k_new);
}

void check_append_behind(const Tensor& k_new, const Tensor& v_new, const AppendBehindArgs& a) {
  check_rows(k_new, v_new, a.k_cache, a.v_cache, 4);
  check_numbers(a.lengths, "lengths", k_new, 1, true);
  TORCH_CHECK_VALUE(!a.block_table.has_value() || !a.entries.has_value(),
                    "block_table and entries must not be given together.");
  if (a.block_table.has_value()) {
    const Tensor& table = *a.block_table;
    check_numbers(table, "block_table", k_new, 2, false);
    TORCH_CHECK_VALUE(equal(table.sym_stride(1), 1) || table.sym_size(1).maybe_as_int().value_or(2) <= 1,
                      "block_table must have stride 1 in its last dimension, got strides ", table.sym_strides(),
                      ". Call .contiguous() on it.");
  } else if (a.entries.has_value()) {
    check_numbers(*a.entries, "entries", k_new, 1, false);
  } else {
    const auto batch = k_new.sym_size(0).maybe_as_int(), entries = a.k_cache.sym_size(0).maybe_as_int();
    TORCH_CHECK_VALUE(!batch || !entries || *batch <= *entries, "k_cache must have an entry for each of ",
                      batch.value_or(0), " sequences, got ", entries.value_or(0), ".");
  }
  check_descale(a.k_descale, "k_descale", k_new, a.k_cache);
  check_descale(a.v_descale, "v_descale", k_new, a.k_cache);
  TORCH_CHECK_VALUE(a.cos.has_value() == a.sin.has_value(),
                    "cos and sin of a rotary embedding must be given together.");
  if (a.cos.has_value()) check_factors(*a.cos, *a.sin, k_new);
  if (a.q.has_value()) check_turned(*a.q, k_new, a);
}

void append_kv_gpu(const Tensor& k_new, const Tensor& v_new, const AppendArgs& a) {
  check_append_kv(k_new, v_new, a);
  if (k_new.numel() == 0 && v_new.numel() == 0) return;
  if (a.k_cache.size(0) == 0 || a.k_cache.size(1) == 0) return;
  const OnDevice on_device(k_new);
  AppendParams p = params_of_rows(k_new, v_new, a);
  p.slots = a.slot_mapping.const_data_ptr();
  p.is_wide = a.slot_mapping.scalar_type() == at::kLong;
  p.tokens = k_new.size(0);
  if (a.positions.has_value()) {
    p.rotary.of_token = a.positions->const_data_ptr();
    p.rotary.is_wide = a.positions->scalar_type() == at::kLong;
  }
  note_changes(p, a);
  run_append(p, k_new);
}

AppendBehindResult append_behind_gpu(const Tensor& k_new, const Tensor& v_new, const AppendBehindArgs& a) {
  check_append_behind(k_new, v_new, a);
  const OnDevice on_device(k_new);
  AppendParams p = params_of_rows(k_new, v_new, a);
  const int64_t batch = k_new.size(0), count = k_new.size(1), pages = a.k_cache.size(0);
  p.tokens = k_new.numel() == 0 && v_new.numel() == 0 ? 0 : batch * count;

  AppendEnds& e = p.ends;
  e.lengths = a.lengths.const_data_ptr();
  e.lengths_stride = a.lengths.stride(0);
  e.is_wide = a.lengths.scalar_type() == at::kLong;
  e.batch = clamp_to_int32(batch);
  e.of_entries = a.entries.has_value();
  if (const OptionalTensor& table = e.of_entries ? a.entries : a.block_table; table.has_value()) {
    e.table = table->const_data_ptr<int32_t>();
    e.table_stride = table->stride(0);
  }
  e.num_pages = clamp_to_int32(pages);
  e.room = clamp_to_int32((a.block_table.has_value() ? a.block_table->size(1) : 1) * a.k_cache.size(1));
  e.new_tokens = clamp_to_int32(count);
  e.count = Divisor(at_least_one(count));
  const Tensor new_lengths = new_tensor({batch}, k_new.options().dtype(at::kInt));
  e.new_lengths = new_lengths.mutable_data_ptr<int32_t>();

  Tensor turned_q;
  if (a.q.has_value()) {
    const Tensor& q = *a.q;
    turned_q = new_tensor(q.sizes(), q.options());
    TurnedQueries& t = p.queries;
    t.dtype = dtype_of(q);
    t.from = view_of(q);
    t.to = static_cast<uint16_t*>(turned_q.mutable_data_ptr());
    t.aligned = is_row_aligned(turned_q);
    if (a.cu_seqlens_q.has_value()) t.cu_seqlens = a.cu_seqlens_q->const_data_ptr<int32_t>();
    t.tokens = q.numel() == 0 ? 0 : q.numel() / (q.size(-1) * q.size(-2));
    t.rows = Divisor(at_least_one(q.size(-3)));
    t.heads = Divisor(at_least_one(q.size(-2)));
    t.chunks = Divisor(at_least_one(p.key_chunks));
    t.counts = a.counts;
  } else {
    turned_q = new_tensor({0}, k_new.options());
  }
  note_changes(p, a);
  run_append(p, k_new);
  return {new_lengths, turned_q};
}

}  // namespace flash_ext
