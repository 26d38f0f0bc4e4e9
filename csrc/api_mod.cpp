// The operators with modifiers for GPUs: from tensors to common/modifiers.cuh's parameters.
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "api.h"
#include "api_params.h"
#include "path_choice.h"
#include "short_tiles.h"

namespace flash_ext {
namespace {

// What the kernels read beside the caller's tensors, kept alive until they are launched.
struct Prepared {
  Modifiers modifiers;
  std::vector<Tensor> kept;
  void* stream = nullptr;

  Tensor ints(int64_t count, const Tensor& like) {
    kept.push_back(new_tensor({std::max<int64_t>(count, 1)}, like.options().dtype(at::kInt)));
    return kept.back();
  }

  // After a pass over so many elements; of none nothing is launched.
  void check_pass(const std::string& error, int64_t elements) {
    TORCH_CHECK(error.empty(), "flash_ext masks: ", error);
    modifiers.follows_pass = modifiers.follows_pass || elements > 0;
  }
};

// A dimension of size 1 is broadcast.
int64_t broadcast_stride(const Tensor& t, int64_t dim) {
  return t.size(dim) == 1 ? 0 : t.stride(dim);
}

int32_t extent(const Tensor& t, int64_t dim) {
  return t.size(dim) == 1 ? BitRows::kAny : static_cast<int32_t>(t.size(dim));
}

BoolView bool_view(const Tensor& t) {
  BoolView x;
  x.ptr = t.const_data_ptr<bool>();
  for (int dim = 0; dim < 4; ++dim) {
    x.strides[dim] = broadcast_stride(t, dim);
    x.sizes[dim] = static_cast<int32_t>(t.size(dim));
  }
  return x;
}

int64_t last_element(const Tensor& t) {  // from the first
  int64_t at = 0;
  for (int64_t dim = 0; dim < t.dim(); ++dim) at += (t.size(dim) - 1) * t.stride(dim);
  return at;
}

BiasView bias_view(const Tensor& t) {
  BiasView x;
  x.ptr = t.const_data_ptr();
  x.batch_stride = broadcast_stride(t, 0);
  x.head_stride = broadcast_stride(t, 1);
  x.row_stride = broadcast_stride(t, 2);
  x.col_stride = broadcast_stride(t, 3);
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
  return x;
}

// The bias as kernels read it. One whose rows do not begin on 16 bytes, as with 77 keys, is copied so that they do: read
// element by element it is 2 to 4 times as slow forward, and backward it leaves the Hopper kernels. One value for all
// keys is read as it is.
BiasView prepare_bias(Prepared& made, const Tensor& bias) {
  const BiasView as_given = bias_view(bias);
  if (as_given.aligned || as_given.col_stride == 0 || get_switch(Switch::kUnaligned) == 1) return as_given;
  Tensor entries = bias;  // those that differ
  for (int64_t dim = 0; dim < 3; ++dim) {
    if (entries.stride(dim) == 0) entries = entries.narrow(dim, 0, 1);
  }
  const int64_t cols = bias.size(3), room = (cols + 7) / 8 * 8;
  const Tensor rows = new_tensor({entries.size(0), entries.size(1), entries.size(2), room}, bias.options());
  if (room > cols) rows.narrow(3, cols, room - cols).zero_();
  made.kept.push_back(rows.narrow(3, 0, cols));
  made.kept.back().copy_(entries);
  return bias_view(made.kept.back());
}

void prepare_mask(Prepared& made, const Tensor& mask) {
  Modifiers& m = made.modifiers;
  const bool fill = mask.size(3) == 1;
  const int64_t heads = mask.size(0) * mask.size(1), rows = mask.size(2);
  const int64_t words = fill ? 1 : (mask.size(3) + 31) / 32;
  const int64_t groups = (rows + Modifiers::kMaskGroup - 1) / Modifiers::kMaskGroup;
  const Tensor bits = made.ints(heads * rows * words, mask);
  const Tensor any = made.ints(heads * groups * words, mask), all = made.ints(heads * groups * words, mask);
  auto* bits_ptr = reinterpret_cast<uint32_t*>(bits.mutable_data_ptr<int32_t>());
  auto* any_ptr = reinterpret_cast<uint32_t*>(any.mutable_data_ptr<int32_t>());
  auto* all_ptr = reinterpret_cast<uint32_t*>(all.mutable_data_ptr<int32_t>());
  if (should_launch()) {
    made.check_pass(pack_mask(bool_view(mask), bits_ptr, static_cast<int>(words), fill, made.stream), mask.numel());
    made.check_pass(group_mask(bits_ptr, any_ptr, all_ptr, heads, static_cast<int>(rows),
                               static_cast<int>(words), made.stream), mask.numel());
  }
  m.mask.words = bits_ptr;
  m.mask_any = any_ptr;
  m.mask_all = all_ptr;
  m.mask.rows = extent(mask, 2);
  m.mask.num_words = fill ? BitRows::kAny : static_cast<int32_t>(words);
  m.mask.word_stride = fill ? 0 : 1;
  m.mask.row_stride = rows == 1 ? 0 : words;
  m.mask.head_stride = mask.size(1) == 1 ? 0 : rows * words;
  m.mask.batch_stride = mask.size(0) == 1 ? 0 : mask.size(1) * rows * words;
  m.mask_group_stride = rows == 1 ? 0 : words;
  m.mask_group_head_stride = mask.size(1) == 1 ? 0 : groups * words;
  m.mask_group_batch_stride = mask.size(0) == 1 ? 0 : mask.size(1) * groups * words;
}

void prepare_blocks(Prepared& made, const Tensor& blocks, int64_t block_rows, int64_t block_cols) {
  BitRows& x = made.modifiers.blocks;
  made.modifiers.block_rows = static_cast<int32_t>(std::min(block_rows, int64_t{1} << 30));
  const int64_t granule_rows = blocks.size(2) * (block_rows / 16);
  const int64_t words = (blocks.size(3) * (block_cols / 16) + 31) / 32;
  const Tensor bits = made.ints(blocks.size(0) * blocks.size(1) * granule_rows * words, blocks);
  auto* bits_ptr = reinterpret_cast<uint32_t*>(bits.mutable_data_ptr<int32_t>());
  // Blocks are not broadcast over rows and columns, and a stride of 0 is one like any other.
  BoolView view = bool_view(blocks);
  for (int dim = 2; dim < 4; ++dim) view.strides[dim] = blocks.stride(dim);
  if (should_launch()) {
    made.check_pass(pack_blocks(view, bits_ptr, static_cast<int>(granule_rows), static_cast<int>(words),
                                static_cast<int>(block_rows / 16), static_cast<int>(block_cols / 16), made.stream),
                    blocks.numel());
  }
  x.words = bits_ptr;
  x.rows = static_cast<int32_t>(granule_rows);
  x.num_words = static_cast<int32_t>(words);
  x.word_stride = 1;
  x.row_stride = words;
  x.head_stride = blocks.size(1) == 1 ? 0 : granule_rows * words;
  x.batch_stride = blocks.size(0) == 1 ? 0 : blocks.size(1) * granule_rows * words;
}

Labels prepare_labels(Prepared& made, const Tensor& ids) {
  const int64_t length = ids.size(-1), rows = ids.numel() / std::max<int64_t>(length, 1);
  const int64_t groups = (length + Labels::kGroup - 1) / Labels::kGroup;
  const Tensor bounds = made.ints(rows * groups * 2, ids);
  Labels x;
  x.ids = ids.const_data_ptr<int32_t>();
  x.groups = bounds.mutable_data_ptr<int32_t>();
  x.batch_stride = ids.dim() == 2 ? length : 0;
  x.group_batch_stride = ids.dim() == 2 ? groups : 0;
  if (should_launch()) {
    made.check_pass(group_labels(x.ids, bounds.mutable_data_ptr<int32_t>(), rows, length, made.stream), ids.numel());
  }
  return x;
}

// (B|1, H|1, length, 2n), packed (H|1, total, 2n).
HiddenIntervals prepare_intervals(Prepared& made, const Tensor& bounds) {
  const int64_t length = bounds.size(-2), count = bounds.size(-1) / 2;
  const int64_t heads = bounds.size(-3), batch = bounds.dim() == 4 ? bounds.size(0) : 1;
  const int64_t groups = (length + Labels::kGroup - 1) / Labels::kGroup;
  const Tensor summary = made.ints(batch * heads * groups * count * 4, bounds);
  HiddenIntervals x;
  x.bounds = bounds.const_data_ptr<int32_t>();
  x.groups = summary.mutable_data_ptr<int32_t>();
  x.count = static_cast<int32_t>(count);
  x.head_stride = heads == 1 ? 0 : length * count * 2;
  x.batch_stride = batch == 1 ? 0 : heads * length * count * 2;
  x.group_head_stride = heads == 1 ? 0 : groups * count;
  x.group_batch_stride = batch == 1 ? 0 : heads * groups * count;
  if (should_launch()) {
    made.check_pass(group_intervals(x.bounds, summary.mutable_data_ptr<int32_t>(), batch * heads, length,
                                    static_cast<int>(count), made.stream), bounds.numel());
  }
  return x;
}

Prepared prepare(Direction direction, const Problem& p, const ModifierArguments& a, const DeviceInfo& info,
                 const Constraints& c, void* stream) {
  Prepared made;
  made.stream = stream;
  Modifiers& m = made.modifiers;
  m.softcap = static_cast<float>(a.softcap);
  m.inv_softcap = a.softcap > 0 ? static_cast<float>(1 / a.softcap) : 0.f;
  if (a.bias.has_value()) {
    const bool is_kept = direction == Direction::kForward ? is_short_mod(p, info, c) : is_short_bwd(p, info, c);
    m.bias = is_kept ? bias_view(*a.bias) : prepare_bias(made, *a.bias);
  }
  if (a.slopes.has_value()) {
    m.slopes = a.slopes->const_data_ptr<float>();
    m.slopes_batch_stride = a.slopes->dim() == 2 ? p.num_heads : 0;
  }
  if (a.sinks.has_value()) m.sinks = a.sinks->const_data_ptr<float>();
  m.top_left = a.top_left;
  m.chunk = clamp_to_int32(a.chunk);
  m.chunk_divisor = Divisor(static_cast<uint32_t>(std::max<int32_t>(m.chunk, 1)));
  m.sink_tokens = static_cast<int32_t>(std::min<int64_t>(a.sink_tokens, Problem::kMaxSeqlen));
  if (a.prefix_lens.has_value()) m.prefix_lens = a.prefix_lens->const_data_ptr<int32_t>();
  if (a.mask.has_value()) prepare_mask(made, *a.mask);
  if (a.blocks.has_value()) prepare_blocks(made, *a.blocks, a.block_rows, a.block_cols);
  if (a.document_q.has_value()) m.document_q = prepare_labels(made, *a.document_q);
  if (a.document_k.has_value()) m.document_k = prepare_labels(made, *a.document_k);
  if (a.hidden_rows.has_value()) m.hidden_rows = prepare_intervals(made, *a.hidden_rows);
  if (a.hidden_keys.has_value()) m.hidden_keys = prepare_intervals(made, *a.hidden_keys);
  m.drop_below = static_cast<uint32_t>(std::nearbyint(a.dropout_p * 65536));
  if (m.drop_below > 0) {
    m.rng = a.rng->const_data_ptr<int64_t>();
    m.keep_scale = m.drop_below >= 65536 ? 0.f : 65536.f / static_cast<float>(65536 - m.drop_below);
  }
  const bool shares_bias = a.bias.has_value() && a.bias->size(0) == 1 && a.bias->size(2) > 1;
  m.batch_fastest = shares_bias && !p.is_varlen() && p.batch > 1;
  m.is_natural = a.softcap > 0 || a.bias.has_value() || a.slopes.has_value();
  m.batches = Divisor(static_cast<uint32_t>(std::max(p.batch, 1)));
  return made;
}

// ---- one launch ---------------------------------------------------------------------------------

using FwdModResult = std::tuple<Tensor, Tensor, Tensor>;
using BwdModResult = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

FwdModResult fwd_mod_gpu(const Tensor& q, const Tensor& k, const Tensor& v,
                         const OptionalTensor& cu_seqlens_q, const OptionalTensor& cu_seqlens_k,
                         int64_t max_seqlen_q, int64_t max_seqlen_k, double softmax_scale,
                         int64_t window_left, int64_t window_right, const OptionalTensor& bias,
                         const OptionalTensor& mask, const OptionalTensor& document_q,
                         const OptionalTensor& document_k, const OptionalTensor& prefix_lens,
                         const OptionalTensor& hidden_rows, const OptionalTensor& hidden_keys,
                         const OptionalTensor& blocks, const OptionalTensor& slopes,
                         const OptionalTensor& sinks, const OptionalTensor& rng, double softcap,
                         double dropout_p, int64_t block_rows, int64_t block_cols,
                         int64_t sink_tokens, int64_t chunk, bool top_left, bool want_row_max,
                         bool deterministic, OptionalName path_name, bool wide) {
  check_fwd(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale,
            window_left, window_right, deterministic, path_name);
  const ModifierArguments a{bias,   mask,   document_q, document_k, prefix_lens, hidden_rows, hidden_keys,
                            blocks, slopes, sinks,      rng,        softcap,     dropout_p,   block_rows,
                            block_cols, sink_tokens, chunk, top_left};
  check_modifiers(q, k, cu_seqlens_q, a);
  const ProfilerRange range("fwd");
  const OnDevice on_device(q);
  const Problem problem = problem_of(q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale, window_left, window_right,
                                     top_left);
  const DeviceInfo info = device_info_of(q);
  const Choice choice = choice_of(path_name);
  const Path& path = required_path(problem, info, choice);

  const Tensor out = empty_out(q, v, wide), lse = empty_lse(q);
  const Tensor row_max = new_tensor(want_row_max ? lse.sizes() : at::IntArrayRef({0}), lse.options());
  if (out.numel() == 0) return {out, lse, row_max};
  if (problem.batch == 0 || problem.total_k == 0) {
    constexpr double kNothing = -std::numeric_limits<double>::infinity();
    out.zero_();
    row_max.fill_(kNothing);
    // With a sink a dense row that sees nothing has the sink's logit as its lse; outside sequences it has none.
    if (sinks.has_value() && problem.batch > 0 && !problem.is_varlen()) {
      lse.copy_(sinks->view({1, -1, 1}).expand_as(lse));
      return {out, lse, row_max};
    }
    if (!(sinks.has_value() && problem.batch > 0)) {
      lse.fill_(kNothing);
      return {out, lse, row_max};
    }
  }

  FwdParams params;
  params.problem = problem;
  params.q = view_of(q);
  params.k = view_of(k);
  params.v = view_of(v);
  params.out = view_of(out);
  params.lse = lse.mutable_data_ptr<float>();
  params.stream = stream_handle(q.device());
  Prepared made = prepare(Direction::kForward, problem, a, info, choice.constraints, params.stream);
  if (want_row_max) made.modifiers.row_max = row_max.mutable_data_ptr<float>();
  const Plan plan = required_plan(path,
                                  {.direction = Direction::kForward,
                                   .problem = problem,
                                   .modifiers = &made.modifiers,
                                   .constraints = choice.constraints},
                                  info);
  const Tensor workspace = workspace_of(plan, q);
  launch(path, FwdCall{plan, params, made.modifiers, pointer_to(workspace)});
  return {out, lse, row_max};
}

// (b, h, seqlen_q) or (h, total_q) to (h).
Tensor sum_over_rows(const Tensor& t) {
  constexpr int64_t kBatchAndRows[] = {0, 2}, kRows = 1;
  return t.dim() == 3 ? t.sum(at::IntArrayRef(kBatchAndRows)) : t.sum(at::IntArrayRef(&kRows, 1));
}

// A gradient of shape (batch|1, h|1, rows|1, cols|1).
BiasGradient gradient_of(at::IntArrayRef shape, bool is_slope) {
  BiasGradient g;
  g.batch = static_cast<int32_t>(shape[0]);
  g.heads = static_cast<int32_t>(shape[1]);
  g.rows = static_cast<int32_t>(shape[2]);
  g.cols = static_cast<int32_t>(shape[3]);
  g.sum_rows = shape[2] == 1;
  g.sum_cols = shape[3] == 1;
  g.is_slope = is_slope;
  return g;
}

// Where it is summed: in its parts of the workspace, else in `result`.
Tensor place_gradient(BiasGradient& g, int splits, const Part& part, const Tensor& workspace, const Tensor& result) {
  g.splits = splits;
  const Tensor to = part ? workspace.narrow(0, part.offset, part.bytes).view(at::kFloat).view({splits, -1}) : result;
  g.is_float = to.scalar_type() == at::kFloat;
  g.out = to.mutable_data_ptr();
  return to;
}

// Whether dq, dk and dv are those of a backward without modifiers from the same out and lse: where nothing but sinks is
// asked for, which add to the denominator that lse holds and are no part of the scores.
bool is_plain_given_lse(const Problem& p, const ModifierArguments& a) {
  const OptionalTensor* const others[] = {&a.bias,        &a.mask,        &a.document_q, &a.document_k, &a.prefix_lens,
                                          &a.hidden_rows, &a.hidden_keys, &a.blocks,     &a.slopes};
  if (std::any_of(std::begin(others), std::end(others), [](const OptionalTensor* t) { return t->has_value(); })) {
    return false;
  }
  // Where there is no window, or rows and keys are as many, both alignments are one.
  const bool is_aligned = !a.top_left || (p.window_left < 0 && p.window_right < 0) ||
                          (!p.is_varlen() && p.seqlen_q == p.seqlen_k);
  return is_aligned && a.softcap == 0 && a.dropout_p == 0 && a.sink_tokens == 0 && a.chunk == 0;
}

BwdModResult bwd_mod_gpu(const Tensor& dout_any, const Tensor& q, const Tensor& k, const Tensor& v,
                         const Tensor& out, const Tensor& lse_any, const OptionalTensor& dlse_any,
                         const OptionalTensor& cu_seqlens_q, const OptionalTensor& cu_seqlens_k,
                         int64_t max_seqlen_q, int64_t max_seqlen_k, double softmax_scale,
                         int64_t window_left, int64_t window_right, const OptionalTensor& bias,
                         const OptionalTensor& mask, const OptionalTensor& document_q,
                         const OptionalTensor& document_k, const OptionalTensor& prefix_lens,
                         const OptionalTensor& hidden_rows, const OptionalTensor& hidden_keys,
                         const OptionalTensor& blocks, const OptionalTensor& slopes,
                         const OptionalTensor& sinks, const OptionalTensor& rng, double softcap,
                         double dropout_p, int64_t block_rows, int64_t block_cols,
                         int64_t sink_tokens, int64_t chunk, bool top_left, bool need_qkv,
                         bool need_bias, bool need_slopes, bool need_sinks, bool deterministic,
                         OptionalName path_name, bool wide) {
  check_bwd(dout_any, q, k, v, out, lse_any, dlse_any, cu_seqlens_q, cu_seqlens_k, max_seqlen_q,
            max_seqlen_k, softmax_scale, window_left, window_right, deterministic, path_name);
  const ModifierArguments a{bias,   mask,   document_q, document_k, prefix_lens, hidden_rows, hidden_keys,
                            blocks, slopes, sinks,      rng,        softcap,     dropout_p,   block_rows,
                            block_cols, sink_tokens, chunk, top_left};
  check_modifiers(q, k, cu_seqlens_q, a);
  need_bias = need_bias && bias.has_value();
  need_slopes = need_slopes && slopes.has_value();
  need_sinks = need_sinks && sinks.has_value();
  const ProfilerRange range("bwd");
  const OnDevice on_device(q);
  Problem problem = problem_of(q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale, window_left, window_right,
                               top_left);
  const DeviceInfo info = device_info_of(q);
  const Choice choice = choice_of(path_name);
  const Path& path = required_path(problem, info, choice);
  deterministic = is_deterministic(deterministic, info);

  const auto float_options = q.options().dtype(at::kFloat);
  const auto like = [](const Tensor& t, bool wanted) {
    return new_tensor(wanted ? t.sizes() : at::IntArrayRef({0}), t.options());
  };
  const auto of_input = [&](const Tensor& t) {
    return new_tensor(need_qkv ? t.sizes() : at::IntArrayRef({0}), result_options(t, wide));
  };
  const Tensor dq = of_input(q), dk = of_input(k), dv = of_input(v);
  const Tensor dbias = need_bias ? like(*bias, true) : new_tensor({0}, q.options());
  const Tensor dslopes = need_slopes ? like(*slopes, true) : new_tensor({0}, float_options);
  Tensor dsinks = need_sinks ? like(*sinks, true) : new_tensor({0}, float_options);
  const bool nothing = out.numel() == 0 || problem.batch == 0;
  if (nothing || problem.total_k == 0) {
    for (const Tensor& t : {dq, dk, dv, dbias, dslopes, dsinks}) t.zero_();
    if (nothing || !need_sinks || !dlse_any.has_value()) return {dq, dk, dv, dbias, dslopes, dsinks};
    // No keys: lse is the sink itself in every row that has one.
    dsinks = sum_over_rows(dlse_any->masked_fill(lse_any.isfinite().logical_not(), 0));
    return {dq, dk, dv, dbias, dslopes, dsinks};
  }

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
  if (need_qkv) {
    params.dq = view_of(dq);
    params.dk = view_of(dk);
    params.dv = view_of(dv);
  }
  params.lse = lse.const_data_ptr<float>();
  params.dlse = dlse.defined() ? dlse.const_data_ptr<float>() : nullptr;
  params.deterministic = deterministic;
  params.stream = stream_handle(q.device());

  const bool runs_plain = need_qkv && is_plain_given_lse(problem, a);
  if (runs_plain) {
    launch_bwd(path, choice.constraints, params, info, q);
    if (!need_sinks) return {dq, dk, dv, dbias, dslopes, dsinks};
    need_qkv = false;  // what is left is the gradient of the sinks
  }
  const Prepared made = prepare(Direction::kBackward, problem, a, info, choice.constraints, params.stream);
  BiasGradient of_bias, of_slopes;
  if (need_bias) of_bias = gradient_of(bias->sizes(), false);
  if (need_slopes) of_slopes = gradient_of({slopes->dim() == 2 ? slopes->size(0) : 1, problem.num_heads, 1, 1}, true);
  const Plan plan = required_plan(path,
                            {.direction = Direction::kBackward,
                             .problem = problem,
                             .modifiers = &made.modifiers,
                             .deterministic = deterministic,
                             .need_qkv = need_qkv,
                             .dbias = need_bias ? &of_bias : nullptr,
                             .dslopes = need_slopes ? &of_slopes : nullptr,
                             .constraints = choice.constraints},
                            info);
  const Tensor workspace = workspace_of(plan, q);
  const Workspace& w = plan.workspace;
  Tensor bias_parts, slope_parts;
  if (need_bias) bias_parts = place_gradient(of_bias, plan.dbias_splits, w.dbias_partials, workspace, dbias);
  if (need_slopes) slope_parts = place_gradient(of_slopes, plan.dslopes_splits, w.dslopes_partials, workspace, dslopes);
  launch(path, BwdCall{plan, params, made.modifiers, of_bias, of_slopes, pointer_to(workspace)}, !runs_plain);
  // Sums over parts and rows have a fixed order in torch, too.
  if (of_bias.splits > 1) dbias.copy_(bias_parts.sum(0).view(dbias.sizes()));
  if (of_slopes.splits > 1) dslopes.copy_(slope_parts.sum(0).view(dslopes.sizes()));
  if (need_sinks) {
    // d sink = -sum of exp(sink - lse) * delta over the rows of a head; the second row statistic is delta.
    const Part& stats = plan.workspace.stats_portable;
    const Tensor delta =
        workspace.narrow(0, stats.offset, stats.bytes).view(at::kFloat).view({-1, 2}).select(1, 1).view(lse.sizes());
    const Tensor of_head = lse.dim() == 3 ? sinks->view({1, -1, 1}) : sinks->view({-1, 1});
    // Rows outside every sequence have lse -inf and no sink; whatever their dout holds must not count.
    const Tensor of_rows = of_head.sub(lse).exp().mul(delta).masked_fill(
        lse.eq(-std::numeric_limits<double>::infinity()), 0);
    dsinks = sum_over_rows(of_rows).neg();
  }
  return {dq, dk, dv, dbias, dslopes, dsinks};
}

}  // namespace

void implement_modifiers(torch::Library& m) {
  m.impl("fwd_mod", &fwd_mod_gpu);
  m.impl("bwd_mod", &bwd_mod_gpu);
}

// Order, meaning and shapes of the modifiers: flash_ext/modifiers.py. A gradient that is not needed, and row_max
// when it is not wanted, has no elements.
TORCH_LIBRARY_FRAGMENT(flash_ext, m) {
  const std::string common =
      "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, SymInt max_seqlen_q, SymInt max_seqlen_k, float softmax_scale, "
      "SymInt window_left, SymInt window_right, Tensor? bias, Tensor? mask, Tensor? document_q, Tensor? document_k, "
      "Tensor? prefix_lens, Tensor? hidden_rows, Tensor? hidden_keys, Tensor? blocks, Tensor? slopes, Tensor? sinks, "
      "Tensor? rng, float softcap, float dropout_p, SymInt block_rows, SymInt block_cols, SymInt sink_tokens, "
      "SymInt chunk, bool top_left, ";
  const std::string fwd =
      "fwd_mod(Tensor q, Tensor k, Tensor v, " + common +
      "bool want_row_max, bool deterministic, str? path, bool wide=False) -> (Tensor out, Tensor lse, Tensor row_max)";
  const std::string bwd =
      "bwd_mod(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor? dlse, " + common +
      "bool need_qkv, bool need_bias, bool need_slopes, bool need_sinks, bool deterministic, str? path, "
      "bool wide=False) "
      "-> (Tensor dq, Tensor dk, Tensor dv, Tensor dbias, Tensor dslopes, Tensor dsinks)";
  m.def(fwd.c_str(), {at::Tag::pt2_compliant_tag});
  m.def(bwd.c_str(), {at::Tag::pt2_compliant_tag});
}

TORCH_LIBRARY_IMPL(flash_ext, CUDA, m) { implement_modifiers(m); }

}  // namespace flash_ext
