// From the arguments of a call with modifiers to what the kernels read (modifiers.h).
#include <algorithm>
#include <cmath>
#include <iterator>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "../condensed.h"
#include "../path_choice.h"
#include "api.h"
#include "tensors.h"

namespace flash_ext {
namespace {

// What kernels read several numbers at a time of. Tensors of flash_ext::condense and slices of their batch and heads
// do.
void check_boundary(const void* at, uintptr_t bytes, const char* names) {
  TORCH_CHECK_VALUE(reinterpret_cast<uintptr_t>(at) % bytes == 0, names, " must begin on ", bytes,
                    " bytes where they are ", "condensed. Call .clone() on them.");
}

int32_t extent(const Tensor& t, int64_t dim) {
  return t.size(dim) == 1 ? BitRows::kAny : static_cast<int32_t>(t.size(dim));
}

int64_t last_element(const Tensor& t) {  // from the first
  int64_t at = 0;
  for (int64_t dim = 0; dim < t.dim(); ++dim) at += (t.size(dim) - 1) * t.stride(dim);
  return at;
}

BiasView bias_view(const Tensor& t) {
  BiasView x;
  x.ptr = t.const_data_ptr();
  x.batch_stride = stride_or_zero(t, 0);
  x.head_stride = stride_or_zero(t, 1);
  x.row_stride = stride_or_zero(t, 2);
  x.col_stride = stride_or_zero(t, 3);
  x.rows = extent(t, 2);
  x.cols = extent(t, 3);
  x.is_float = t.scalar_type() == at::kFloat;
  const int64_t piece = x.is_float ? 4 : 8;  // elements of 16 bytes
  const bool strides_fit = (x.batch_stride | x.head_stride | x.row_stride) % piece == 0;
  x.aligned = x.col_stride == 1 && strides_fit && reinterpret_cast<uintptr_t>(x.ptr) % 16 == 0 &&
              get_switch(Switch::kUnaligned) != 1;
  x.staged = x.aligned && !x.is_float;
  // A row of an odd number of elements ends in half a pair: those that follow have the next row there, the last one
  // may be the end of the memory.
  const int64_t elements = static_cast<int64_t>(t.storage().nbytes() / t.element_size());
  x.has_room = x.cols % 2 == 0 || (t.numel() > 0 && t.storage_offset() + last_element(t) + 1 < elements);
  // One value for all keys is read as it is.
  x.is_unaligned = !x.aligned && x.col_stride != 0 && t.numel() > 0 && get_switch(Switch::kUnaligned) != 1;
  return x;
}

// The condensed form of a mask's tensor: what is given, or made of it by passes in front of the kernels.
const Tensor& condensed_form(Prepared& made, const Tensor& given, bool is_condensed, int64_t block_rows = 0,
                             int64_t block_cols = 0) {
  if (is_condensed) return given;
  made.kept.push_back(condense(given, block_rows, block_cols, made.stream));
  made.modifiers.follows_pass = made.modifiers.follows_pass || given.numel() > 0;
  return made.kept.back();
}

// Of a tensor without elements a place that is never read: a null pointer would say that there is none.
const int32_t* numbers_of(Prepared& made, const Tensor& t) {
  if (t.numel() > 0) return t.const_data_ptr<int32_t>();
  made.kept.push_back(new_tensor({4}, t.options()));
  return made.kept.back().const_data_ptr<int32_t>();
}

void prepare_mask(Prepared& made, const Tensor& mask) {
  const Tensor t = condensed_form(made, mask, mask.scalar_type() == at::kInt);
  const bool fill = t.dim() == 3;
  const int64_t rows = condensed::rows_of_mask(t.size(2), fill), words = fill ? 1 : t.size(3);
  const int64_t summed = condensed::summed_rows(rows), groups = (summed - rows) / 2;
  Modifiers& m = made.modifiers;
  m.mask.words = reinterpret_cast<const uint32_t*>(numbers_of(made, t));
  m.mask_any = m.mask.words + rows * words;
  m.mask_all = m.mask_any + groups * words;
  if (t.size(2) > summed) {
    m.mask_tiles = m.mask.words + summed * words;
    check_boundary(m.mask_tiles, 16, "mask");
  }
  m.mask.rows = rows == 1 ? BitRows::kAny : static_cast<int32_t>(rows);
  m.mask.num_words = fill ? BitRows::kAny : static_cast<int32_t>(words);
  m.mask.word_stride = fill ? 0 : 1;
  m.mask.row_stride = m.mask_group_stride = rows == 1 ? 0 : words;
  m.mask.head_stride = m.mask_group_head_stride = stride_or_zero(t, 1);
  m.mask.batch_stride = m.mask_group_batch_stride = stride_or_zero(t, 0);
}

void prepare_blocks(Prepared& made, const Tensor& blocks, int64_t block_rows, int64_t block_cols) {
  BitRows& x = made.modifiers.blocks;
  made.modifiers.block_rows = static_cast<int32_t>(std::min(block_rows, int64_t{1} << 30));
  const Tensor t = condensed_form(made, blocks, blocks.scalar_type() == at::kInt, block_rows, block_cols);
  x.words = reinterpret_cast<const uint32_t*>(numbers_of(made, t));
  x.rows = static_cast<int32_t>(t.size(2));
  x.num_words = static_cast<int32_t>(t.size(3));
  x.word_stride = 1;
  x.row_stride = t.size(3);
  x.head_stride = stride_or_zero(t, 1);
  x.batch_stride = stride_or_zero(t, 0);
}

// `length`: rows, or keys. Condensed ids are more than there are positions.
DocumentIds prepare_document_ids(Prepared& made, const Tensor& ids, int64_t length) {
  const Tensor t = condensed_form(made, ids, ids.size(-1) != length);
  DocumentIds x;
  x.ids = numbers_of(made, t);
  x.groups = x.ids + condensed::ids_groups_at(length);
  x.batch_stride = t.dim() == 2 ? t.stride(0) : 0;
  x.group_batch_stride = x.batch_stride / 2;
  check_boundary(x.ids, 8, "document_q and document_k");
  return x;
}

// Of calls over a cache, whose kernels want no summaries: (length) or (batch, length), side by side. Of the keys the
// stride says as well how many have an id.
DocumentIds plain_document_ids(Prepared& made, const Tensor& ids) {
  DocumentIds x;
  x.ids = numbers_of(made, ids);
  x.batch_stride = ids.dim() == 2 ? ids.size(1) : 0;
  return x;
}

// (B|1, H|1, length, 2n), packed (H|1, total, 2n), or condensed and with one dimension less.
HiddenIntervals prepare_intervals(Prepared& made, const Tensor& bounds, int64_t length, bool is_packed) {
  const Tensor t = condensed_form(made, bounds, bounds.dim() == (is_packed ? 2 : 3));
  HiddenIntervals x;
  x.count = t.size(-1) == condensed::interval_length(length, 1) ? 1 : 2;
  x.bounds = numbers_of(made, t);
  x.groups = x.bounds + condensed::interval_groups_at(length, x.count);
  x.head_stride = stride_or_zero(t, -2);
  x.batch_stride = is_packed ? 0 : stride_or_zero(t, 0);
  x.group_head_stride = x.head_stride / 4;
  x.group_batch_stride = x.batch_stride / 4;
  check_boundary(x.bounds, 16, "hidden_rows and hidden_keys");
  return x;
}

}  // namespace

Prepared prepare(const Request& request, const CallArgs& a, void* stream) {
  const Problem& p = request.problem;
  Prepared made;
  made.stream = stream;
  Modifiers& m = made.modifiers;
  m.softcap = static_cast<float>(a.softcap);
  m.inv_softcap = a.softcap > 0 ? static_cast<float>(1 / a.softcap) : 0.f;
  if (a.bias.has_value() && a.bias->dim() == 3) {
    DistanceBias& x = m.by_distance;
    x.reach = static_cast<int32_t>(a.bias->size(2) / 2);
    x.last_entry = 2 * x.reach;
    x.table = a.bias->const_data_ptr<float>();
    x.table_batch_stride = static_cast<int32_t>(stride_or_zero(*a.bias, 0));
    x.table_head_stride = static_cast<int32_t>(stride_or_zero(*a.bias, 1));
  } else if (a.bias.has_value()) {
    m.bias = bias_view(*a.bias);
    if (request.cache != nullptr) m.bias.is_unaligned = false;  // read as it is
  }
  if (a.slopes.has_value()) {
    m.by_distance.slopes = a.slopes->const_data_ptr<float>();
    m.by_distance.slopes_batch_stride = a.slopes->dim() == 2 ? p.num_heads : 0;
  }
  if (a.sinks.has_value()) m.sinks = a.sinks->const_data_ptr<float>();
  m.top_left = a.top_left;
  m.chunk = clamp_to_int32(a.chunk.expect_int());
  m.chunk_divisor = Divisor(static_cast<uint32_t>(std::max<int32_t>(m.chunk, 1)));
  m.sink_tokens = static_cast<int32_t>(std::min<int64_t>(a.sink_tokens.expect_int(), Problem::kMaxSeqlen));
  if (a.prefix_lens.has_value()) m.prefix_lens = a.prefix_lens->const_data_ptr<int32_t>();
  if (a.mask.has_value()) prepare_mask(made, *a.mask);
  if (a.blocks.has_value()) prepare_blocks(made, *a.blocks, a.block_rows.expect_int(), a.block_cols.expect_int());
  const bool is_packed = p.is_varlen();
  const int64_t rows = is_packed ? p.total_q : p.seqlen_q, keys = is_packed ? p.total_k : p.seqlen_k;
  if (request.cache != nullptr) {
    if (a.tree.has_value()) m.tree = reinterpret_cast<const uint64_t*>(a.tree->const_data_ptr<int64_t>());
    if (a.document_q.has_value()) m.document_q = plain_document_ids(made, *a.document_q);
    if (a.document_k.has_value()) m.document_k = plain_document_ids(made, *a.document_k);
  } else {
    if (a.document_q.has_value()) m.document_q = prepare_document_ids(made, *a.document_q, rows);
    if (a.document_k.has_value()) m.document_k = prepare_document_ids(made, *a.document_k, keys);
  }
  if (a.hidden_rows.has_value()) m.hidden_rows = prepare_intervals(made, *a.hidden_rows, keys, is_packed);
  if (a.hidden_keys.has_value()) m.hidden_keys = prepare_intervals(made, *a.hidden_keys, rows, is_packed);
  m.drop_below = static_cast<uint32_t>(std::nearbyint(a.dropout_p * 65536));
  if (m.drop_below > 0) {
    m.rng = a.rng->const_data_ptr<int64_t>();
    m.keep_scale = m.drop_below >= 65536 ? 0.f : 65536.f / static_cast<float>(65536 - m.drop_below);
  }
  const bool shares_bias = m.bias.ptr != nullptr && a.bias->size(0) == 1 && a.bias->size(2) > 1;
  m.batch_fastest = shares_bias && !p.is_varlen() && p.batch > 1 && request.cache == nullptr;
  m.has_score_mod = a.softcap > 0 || m.adds();
  m.batches = Divisor(static_cast<uint32_t>(std::max(p.batch, 1)));
  return made;
}

BiasGradient gradient_of(at::IntArrayRef shape, bool is_slope) {
  BiasGradient g;
  g.batch = static_cast<int32_t>(shape[0]);
  g.heads = static_cast<int32_t>(shape[1]);
  if (shape.size() == 3) {
    g.cols = static_cast<int32_t>(shape[2]);
    g.reach = g.cols / 2;
    g.sum_rows = g.sum_cols = true;
    return g;
  }
  g.rows = static_cast<int32_t>(shape[2]);
  g.cols = static_cast<int32_t>(shape[3]);
  g.sum_rows = shape[2] == 1;
  g.sum_cols = shape[3] == 1;
  g.is_slope = is_slope;
  return g;
}

Tensor place_gradient(BiasGradient& g, int splits, const Part& part, const Tensor& workspace, const Tensor& result) {
  g.splits = splits;
  const Tensor to = part ? workspace.narrow(0, part.offset, part.bytes).view(at::kFloat).view({splits, -1}) : result;
  g.is_float = to.scalar_type() == at::kFloat;
  g.out = to.mutable_data_ptr();
  if (g.reach >= 0) to.zero_();
  return to;
}

namespace {

// How a plan is asked about a modifier: by its name, with _gradient behind it also about its gradient.
struct NamedModifier {
  std::string_view name;
  void (*put)(Modifiers&);  // null: biases, which depend on the problem
  bool has_gradient = false;
  enum Goes { kWithoutCache, kAnywhere, kWithCache } goes = kWithoutCache;
};

template <typename T>
const T* something() {  // never read
  static const int64_t number = 0;
  return reinterpret_cast<const T*>(&number);
}

constexpr NamedModifier kNamedModifiers[] = {
    {"softcap", [](Modifiers& m) { m.softcap = 30.f, m.inv_softcap = 1.f / 30.f; }, false, NamedModifier::kAnywhere},
    {"alibi", [](Modifiers& m) { m.by_distance.slopes = something<float>(); }, true, NamedModifier::kAnywhere},
    {"bias", nullptr, true, NamedModifier::kAnywhere},
    {"full_bias", nullptr, true, NamedModifier::kAnywhere},
    {"float_bias", nullptr, true, NamedModifier::kAnywhere},
    {"relative", nullptr, true, NamedModifier::kAnywhere},
    {"dropout", [](Modifiers& m) { m.rng = something<int64_t>(), m.drop_below = 6554; }},
    {"mask", [](Modifiers& m) { m.mask.words = something<uint32_t>(), m.mask.row_stride = m.mask.word_stride = 1; },
     false, NamedModifier::kAnywhere},
    {"query_padding", [](Modifiers& m) { m.mask.words = something<uint32_t>(), m.mask.row_stride = 1; }, false,
     NamedModifier::kAnywhere},
    {"key_padding", [](Modifiers& m) { m.mask.words = something<uint32_t>(); }, false, NamedModifier::kAnywhere},
    {"blocks", [](Modifiers& m) { m.blocks.words = something<uint32_t>(), m.block_rows = 128; }},
    {"documents", [](Modifiers& m) { m.document_q.ids = m.document_k.ids = something<int32_t>(); }, false,
     NamedModifier::kAnywhere},
    {"hidden_rows", [](Modifiers& m) { m.hidden_rows.count = 1; }},
    {"hidden_keys", [](Modifiers& m) { m.hidden_keys.count = 1; }},
    {"chunk", [](Modifiers& m) { m.chunk = 1024; }},
    {"prefix", [](Modifiers& m) { m.prefix_lens = something<int32_t>(); }},
    {"sink_tokens", [](Modifiers& m) { m.sink_tokens = 4; }},
    {"sinks", [](Modifiers& m) { m.sinks = something<float>(); }, true, NamedModifier::kAnywhere},
    {"tree", [](Modifiers& m) { m.tree = something<uint64_t>(); }, false, NamedModifier::kWithCache},
};

// (1, num_heads, seqlen_q, seqlen_k), rows on 16 bytes; full: (batch, ...), rows side by side; float: in fp32.
void put_bias(Modifiers& m, BiasGradient& dbias, const Problem& p, bool is_full, bool is_float) {
  BiasView& b = m.bias;
  b.ptr = something<int64_t>();
  b.rows = p.is_varlen() ? static_cast<int32_t>(p.total_q) : p.seqlen_q;
  b.cols = p.is_varlen() ? static_cast<int32_t>(p.total_k) : p.seqlen_k;
  b.row_stride = is_full ? b.cols : (b.cols + 7) / 8 * 8;
  b.col_stride = 1;
  b.head_stride = b.row_stride * b.rows;
  if (is_full && p.batch > 1) b.batch_stride = b.head_stride * p.num_heads;
  b.is_float = is_float;
  b.aligned = b.row_stride % 8 == 0;
  b.staged = b.aligned && !is_float;
  b.is_unaligned = !b.aligned;
  b.has_room = true;
  dbias.batch = is_full ? p.batch : 1;
  dbias.heads = p.num_heads;
  dbias.rows = b.rows;
  dbias.cols = b.cols;
  dbias.is_float = is_float;
}

// A table of 257 entries a head.
void put_table(Modifiers& m, BiasGradient& dbias, const Problem& p) {
  m.by_distance.table = something<float>();
  m.by_distance.reach = dbias.reach = 128;
  dbias.heads = p.num_heads;
  dbias.cols = 257;
  dbias.sum_rows = dbias.sum_cols = true;
}

}  // namespace

NamedModifiers::NamedModifiers(const std::vector<std::string>& names, const Problem& p, bool has_cache) {
  constexpr std::string_view kGradient = "_gradient";
  Modifiers& m = modifiers;
  for (const std::string& name : names) {
    std::string_view kind = name;
    const bool wants = kind.ends_with(kGradient);
    if (wants) kind.remove_suffix(kGradient.size());
    const auto* const found = std::ranges::find(kNamedModifiers, kind, &NamedModifier::name);
    if (found == std::end(kNamedModifiers) || (wants && !found->has_gradient)) {
      std::string known;
      for (const NamedModifier& one : kNamedModifiers) {
        known += (known.empty() ? "" : ", ") + std::string(one.name);
        if (one.has_gradient) known += "[_gradient]";
      }
      throw std::invalid_argument("unknown modifier '" + name + "'; known: " + known);
    }
    if (found->goes == (has_cache ? NamedModifier::kWithoutCache : NamedModifier::kWithCache)) {
      throw std::invalid_argument(name + (has_cache ? " does not go with a cache" : " goes with a cache alone"));
    }
    if (found->put != nullptr) {
      found->put(m);
    } else if (kind == "relative") {
      put_table(m, dbias, p);
    } else {
      put_bias(m, dbias, p, kind.starts_with("full"), kind.starts_with("float"));
    }
    if (!wants) continue;
    if (kind == "alibi") {
      dslopes = gradient_of({1, p.num_heads, 1, 1}, true);
      wants_dslopes = true;
    } else {
      (kind == "sinks" ? wants_dsinks : wants_dbias) = true;
    }
  }
  m.has_score_mod = m.softcap > 0 || m.adds();
  if (has_cache) m.bias.is_unaligned = false;
}

}  // namespace flash_ext
