#include "prepared.h"

#include <ATen/ops/_unsafe_view.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>

#include <algorithm>

#include "../path_choice.h"
#include "api.h"
#include "checks.h"
#include "operators.h"
#include "tensors.h"

namespace flash_ext {
namespace {

int64_t batch_of(const Tensor& q, const OptionalTensor& cu_seqlens_q) {
  return cu_seqlens_q.has_value() ? cu_seqlens_q->size(0) - 1 : q.size(0);
}

// Subclasses in Python and tensors of transforms see the operators with their own arguments.
bool is_plain_tensor(const Tensor& t) {
  constexpr c10::DispatchKeySet kOthers({c10::DispatchKey::Python, c10::DispatchKey::FuncTorchBatched,
                                         c10::DispatchKey::FuncTorchGradWrapper, c10::DispatchKey::Functionalize});
  return !t.key_set().has_any(kOthers);
}

// Rows of batch entries lie one behind the other.
bool is_flat(const Tensor& t) { return t.size(0) == 1 || t.stride(0) == t.size(1) * t.stride(1); }

// (batch, rows, heads, size) from (total, heads, size), no view.
Tensor dense(const Tensor& t, int64_t batch) {
  return at::_unsafe_view(t, {batch, t.size(0) / batch, t.size(1), t.size(2)});
}

// (batch, heads, rows) from (heads, total); what was not asked for has no heads.
Tensor dense_rows(const Tensor& t, int64_t batch) {
  if (!t.defined() || t.dim() != 2) return t;
  return at::_unsafe_view(t, {t.size(0), batch, t.size(1) / batch}).transpose(0, 1).clone(at::MemoryFormat::Contiguous);
}

// (heads, total) from (batch, heads, rows).
Tensor packed_rows(const Tensor& t) { return t.transpose(0, 1).flatten(1); }

bool has_no_bias(const CallArgs& a) { return !a.bias.has_value() && !a.slopes.has_value(); }

}  // namespace

PreparedCall::PreparedCall(const Tensor& q, const Tensor& k, const CallArgs& args)
    : args_(args),
      is_packed_(args.cu_seqlens_q.has_value()),
      batch_(batch_of(q, args.cu_seqlens_q)),
      heads_(q.size(-2)),
      rows_(q.size(-3)),
      keys_(k.size(-3)),
      device_(q.device()) {
  args_.cu_seqlens_q = args_.cu_seqlens_k = args_.sinks = args_.rng = std::nullopt;
  for_each_tensor<fields::kModifiers>([&](const auto member) {
    const OptionalTensor& t = args_.*member;
    has_inference_tensors_ = has_inference_tensors_ || (t.has_value() && t->is_inference());
  });
}

void PreparedCall::watch(const std::vector<Tensor>& sources) {
  for (const Tensor& t : sources) sources_.push_back({t, t._version()});
}

void PreparedCall::bind_stream() {
  is_bound_ = device_.is_cuda();
  if (is_bound_) stream_ = stream_handle(device_);
}

void PreparedCall::set_borders(const OptionalTensor& cu_seqlens_q, const OptionalTensor& cu_seqlens_k) {
  borders_q_ = cu_seqlens_q, borders_k_ = cu_seqlens_k;
  awaits_borders_ = false;
}

bool PreparedCall::may_pack(const Tensor& q, const Tensor& k, const Tensor& v, double dropout_p) const {
  if (!(awaits_borders_ || borders_q_.has_value()) || dropout_p != 0) return false;
  // Above head_dim 128 shorter documents are slower as packed sequences (flash_ext/_masks/documents.py).
  constexpr int64_t kLeastRowsWide = 32;
  const bool is_wide = q.dim() == 4 && v.dim() == 4 && std::max(q.size(3), v.size(3)) > 128;
  if (is_wide && borders_q_.has_value() && batch_ * rows_ < kLeastRowsWide * (borders_q_->size(0) - 1)) return false;
  const OptionalTensor &bias = args_.bias, &slopes = args_.slopes;
  const bool knows_distances = (!bias.has_value() || (bias->dim() == 3 && bias->size(0) == 1)) &&
                               (!slopes.has_value() || slopes->dim() == 1) && missing_bias_dims_ == 0;
  const auto fits = [&](const Tensor& t) {
    return t.dim() == 4 && t.size(0) == batch_ && t.size(1) == rows_ && is_flat(t);
  };
  return knows_distances && fits(q) && fits(k) && fits(v) && get_switch(Switch::kBatchInvariant) != 1;
}

CallArgs PreparedCall::packed(const Tensor& q, const CallArgs& own) const {
  CallArgs a = joined(q, own);
  a.document_q = a.document_k = std::nullopt;
  a.cu_seqlens_q = borders_q_, a.cu_seqlens_k = borders_k_;
  return a;
}

bool PreparedCall::fits(const Tensor& q, const OptionalTensor& cu_seqlens_q) const {
  if (!is_plain_tensor(q) || c10::impl::TorchDispatchModeTLS::stack_len() != 0) return false;
  const bool same_sizes = q.dim() == (is_packed_ ? 3 : 4) && cu_seqlens_q.has_value() == is_packed_ &&
                          q.size(-3) == rows_ && q.size(-2) == heads_ && q.device() == device_;
  if (!same_sizes) return false;
  if (is_packed_ && cu_seqlens_q->dim() != 1) return false;
  if (batch_of(q, cu_seqlens_q) != batch_) return false;
  if (has_inference_tensors_ && !c10::InferenceMode::is_enabled()) return false;
  const bool unchanged = std::all_of(sources_.begin(), sources_.end(), [](const Source& s) {
    return s.tensor._version() == s.version && !s.tensor.requires_grad();
  });
  if (!unchanged) return false;
  // What a graph reads is found, and kept for it, by the road that prepares.
  return !is_bound_ || (stream_handle(device_) == stream_ && !is_capturing(q));
}

bool PreparedCall::fits_both(const Tensor& q, const Tensor& k, const CallArgs& own) const {
  return k.dim() == q.dim() && q.dim() >= 3 && k.size(-3) == keys_ && fits(q, own.cu_seqlens_q);
}

CallArgs PreparedCall::joined(const Tensor& q, const CallArgs& own) const {
  CallArgs a = args_;
  a.dlse = own.dlse;
  a.cu_seqlens_q = own.cu_seqlens_q, a.cu_seqlens_k = own.cu_seqlens_k;
  a.max_seqlen_q = own.max_seqlen_q, a.max_seqlen_k = own.max_seqlen_k;
  a.scale = own.scale;
  a.sinks = own.sinks, a.softcap = own.softcap;
  a.dropout_p = own.dropout_p, a.rng = own.rng;
  a.want_row_max = own.want_row_max, a.want_lse = own.want_lse;
  a.deterministic = own.deterministic, a.backend = own.backend;
  const auto statistic = checks::statistic_of(q);
  if (a.sinks.has_value() && a.sinks->is_floating_point() && a.sinks->scalar_type() != statistic) {
    a.sinks = a.sinks->to(statistic);
  }
  for (int64_t i = 0; i < missing_bias_dims_; ++i) a.bias = a.bias->unsqueeze(0);
  return a;
}

std::optional<FwdModResult> PreparedCall::forward(const Tensor& q, const Tensor& k, const Tensor& v,
                                                  const CallArgs& own) const {
  if (!fits_both(q, k, own)) return std::nullopt;
  const auto run = [&](const Tensor& q, const Tensor& k, const Tensor& v, const CallArgs& a, bool is_plain) {
    if (!is_plain || a.sinks.has_value() || a.softcap != 0 || a.dropout_p != 0 || a.want_row_max) {
      return call_fwd_mod(q, k, v, a);
    }
    auto [out, lse] = call_fwd(q, k, v, a);
    return FwdModResult{std::move(out), std::move(lse), Tensor()};
  };
  if (!may_pack(q, k, v, own.dropout_p)) return run(q, k, v, joined(q, own), is_plain_);
  if (awaits_borders_) return std::nullopt;
  const CallArgs a = packed(q, own);
  const auto [out, lse, row_max] = run(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), a, has_no_bias(a));
  return FwdModResult{dense(out, batch_), dense_rows(lse, batch_), dense_rows(row_max, batch_)};
}

std::optional<BwdResult> PreparedCall::backward(const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v,
                                                const Tensor& out, const Tensor& lse, const CallArgs& own) const {
  if (!fits_both(q, k, own)) return std::nullopt;
  const auto run = [](const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out,
                      const Tensor& lse, const CallArgs& a, bool is_plain) {
    if (is_plain && !a.sinks.has_value() && a.softcap == 0 && a.dropout_p == 0) {
      return call_bwd(dout, q, k, v, out, lse, a);
    }
    auto [dq, dk, dv, dbias, dslopes, dsinks] = call_bwd_mod(dout, q, k, v, out, lse, a);
    return BwdResult{std::move(dq), std::move(dk), std::move(dv)};
  };
  if (!may_pack(q, k, v, own.dropout_p)) return run(dout, q, k, v, out, lse, joined(q, own), is_plain_);
  if (awaits_borders_) return std::nullopt;
  CallArgs a = packed(q, own);
  const auto fits_rows = [&](const Tensor& t) { return t.sizes() == c10::IntArrayRef{batch_, heads_, rows_}; };
  const auto fits_out = [&](const Tensor& t) {
    return t.sizes() == c10::IntArrayRef{batch_, rows_, heads_, v.size(3)};
  };
  const bool fit = fits_out(dout) && fits_out(out) && fits_rows(lse) && (!a.dlse.has_value() || fits_rows(*a.dlse));
  if (!fit) return std::nullopt;
  if (a.dlse.has_value()) a.dlse = packed_rows(*a.dlse);
  const auto [dq, dk, dv] = run(dout.flatten(0, 1), q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1),
                                out.flatten(0, 1), packed_rows(lse), a, has_no_bias(a));
  return BwdResult{dense(dq, batch_), dense(dk, batch_), dense(dv, batch_)};
}

}  // namespace flash_ext
