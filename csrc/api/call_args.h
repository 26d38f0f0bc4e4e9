// What the operators are called with, a struct for each kind of call, and what they return. Their meaning:
// flash_ext/_attention.py, flash_ext/_ops/modifiers.py, flash_ext/_append.py, flash_ext/fp8.py. Most files of the
// binding read this header, and it reads no more of torch than a tensor is: the dispatcher's headers take twice as
// long.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <c10/core/SymInt.h>

#include <optional>
#include <string_view>
#include <tuple>

namespace flash_ext {

using at::Tensor;
using c10::SymInt;
using OptionalTensor = std::optional<Tensor>;
using OptionalName = std::optional<std::string_view>;

// None where it is undefined.
inline OptionalTensor optional(const Tensor& t) { return t.defined() ? OptionalTensor(t) : std::nullopt; }

// What a call says beside q, k, v and what a backward reads. Without modifiers by default.
struct CallArgs {
  OptionalTensor dlse;  // of a backward: the gradient of lse
  OptionalTensor cu_seqlens_q, cu_seqlens_k;  // (batch + 1,) int32; none: dense
  OptionalTensor seqused_k, block_table;  // of a forward over a cache: (batch,), (batch, max_pages) int32
  OptionalTensor k_descale, v_descale;  // of the same in 8 bits: fp32, of heads or of slots and heads
  OptionalTensor tree;  // of the same: a word for each row of q, (total_q,) or (batch, seqlen_q) int64
  SymInt max_seqlen_q = 0, max_seqlen_k = 0;  // 0: not known; for FLOP counts alone
  double scale = 1.;
  SymInt window_size_left = -1, window_size_right = -1;  // inclusive reach, -1: unlimited

  OptionalTensor bias, mask, document_q, document_k, prefix_lens, hidden_rows, hidden_keys, blocks, slopes, sinks, rng;
  double softcap = 0., dropout_p = 0.;
  SymInt block_rows = 0, block_cols = 0, sink_tokens = 0, chunk = 0;
  bool top_left = false;

  bool want_row_max = false;  // of a forward with modifiers
  bool need_qkv = true, need_bias = false, need_slopes = false, need_sinks = false;  // of a backward with modifiers
  bool deterministic = false;
  OptionalName backend;
  bool wide = false;  // results as they were accumulated: fp32, where q is not wider already
  bool want_lse = true;  // of a forward; where a gradient needs it, it is made in any case
};

// Beside k_new and v_new what append_kv takes.
struct AppendArgs {
  Tensor k_cache, v_cache;  // written
  Tensor slot_mapping;
  OptionalTensor cos, sin, positions;
  bool interleaved = false;
  OptionalTensor k_descale, v_descale;  // written where they are of slots
};

// Beside k_new and v_new, of the same number of tokens for each sequence, what append_behind takes.
struct AppendBehindArgs {
  Tensor k_cache, v_cache;  // written
  Tensor lengths;  // (batch,) int32 or int64: keys of each sequence before the call
  OptionalTensor block_table, entries;  // (batch, max_pages), or (batch,), int32; neither: sequence b has entry b
  OptionalTensor cos, sin;
  bool interleaved = false;
  OptionalTensor q, cu_seqlens_q;  // turned into a copy
  bool counts = false;  // rows of q have positions of their own, else that of the first
  OptionalTensor k_descale, v_descale;  // written where they are of slots
};

// Beside q, k and v what quantize_fp8 and fwd_fp8 take.
struct QuantizeArgs {
  OptionalTensor cu_seqlens_q, cu_seqlens_k, seqused_k;
  bool by_block = false, smooth_k = false, smooth_v = false, hadamard = false, mixed = false;
  OptionalTensor cos_q, sin_q, cos_k, sin_k;  // of a rotary embedding
  bool interleaved = false;
};
struct Fp8CallArgs {
  OptionalTensor q_descale, k_descale;  // none where q and k have 16 bits
  Tensor v_descale;
  OptionalTensor v_offset, row_offset;
  OptionalTensor cu_seqlens_q, cu_seqlens_k, seqused_k, sinks;
  double scale = 1.;
  int64_t window_size_left = -1, window_size_right = -1;
  at::ScalarType dtype = at::kHalf;
  OptionalName backend;
  bool want_lse = true, want_row_max = false;
  bool small = false;  // no number of q and k exceeds kSmallMax
};

using FwdResult = std::tuple<Tensor, Tensor>;  // out, lse
using BwdResult = std::tuple<Tensor, Tensor, Tensor>;  // dq, dk, dv
using FwdModResult = std::tuple<Tensor, Tensor, Tensor>;  // out, lse, row_max
using BwdModResult = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;  // dq, dk, dv, dbias, dslopes, dsinks
using AppendBehindResult = std::tuple<Tensor, Tensor>;  // new_lengths, turned_q
// q, k, v, their factors, and the offsets of v, of k, and of a row's scores. What is not asked for has no elements.
using Quantized = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

}  // namespace flash_ext
