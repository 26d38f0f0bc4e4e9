// torch's attention operators of calls with a mask on these kernels; api/sdpa.cpp registers them.
#include <limits>

#include "sdpa_replaced.h"

namespace flash_ext {

// ---- F.scaled_dot_product_attention with a mask, or causal with lengths that differ -------------
// The selector gives such calls to the memory-efficient operator. There the causal mask is aligned at
// the top left, and lse is padded to a multiple of 32 rows.

namespace {

constexpr int64_t kLseRows = 32;

CallArgs masked_args(double scale, bool is_causal, const OptionalTensor& bias) {
  CallArgs a;
  a.scale = scale;
  a.window_size_right = is_causal ? 0 : -1;
  a.top_left = is_causal;
  a.bias = bias;
  return a;
}

Reason refusal_of_bias(const OptionalTensor& bias, const Tensor& q, const Tensor& k) {
  if (!bias.has_value()) return nullptr;
  if (bias->scalar_type() != q.scalar_type() && bias->scalar_type() != at::kFloat)
    return "the mask is neither float32 nor of the dtype of the query";
  if (bias->device() != q.device()) return "the devices differ";
  const std::array<int64_t, 4> sizes = {q.size(0), q.size(2), q.size(1), k.size(1)};
  bool fits = bias->dim() == 4;
  for (int dim = 0; fits && dim < 4; ++dim) fits = bias->size(dim) == 1 || bias->size(dim) == sizes[dim];
  return fits ? nullptr : "the mask does not broadcast to the scores";
}

// torch expands a mask to the size of the scores; as dimensions of size 1 repeats are read once.
OptionalTensor without_repeats(const OptionalTensor& bias) {
  if (!bias.has_value()) return bias;
  Tensor t = *bias;
  for (int64_t dim = 0; dim < 4; ++dim) {
    if (t.stride(dim) == 0 && t.size(dim) > 1) t = t.narrow(dim, 0, 1);
  }
  return t;
}

}  // namespace

MaskedResult masked_forward(c10::DispatchKeySet keys, const Tensor& query, const Tensor& key, const Tensor& value,
                            const OptionalTensor& bias, bool compute_lse, double dropout_p, bool is_causal,
                            OptionalScale scale) {
  Reason reason = refusal_of_dense(query, key, value, dropout_p);
  if (reason == nullptr) {
    const Tensor q = swapped(query), k = swapped(key), v = swapped(value);
    reason = refusal(scale, q, k, v, std::nullopt, std::nullopt);
    if (reason == nullptr) reason = refusal_of_bias(bias, q, k);
    if (reason == nullptr) {
      count_served(kMaskedForward, query, key, value);
      const BelowAll guard;
      CallArgs args = masked_args(scale_of(scale, q), is_causal, without_repeats(bias));
      args.want_lse = compute_lse;
      const auto [out, own_lse, row_max] = call_fwd_mod(q, k, v, args);
      const int64_t rows = q.size(1);
      const int64_t padded = compute_lse ? (rows + kLseRows - 1) / kLseRows * kLseRows : 0;
      Tensor lse = own_lse;
      if (!compute_lse || padded != rows) {
        lse = new_tensor({q.size(0), q.size(2), padded}, own_lse.options());
        if (compute_lse) {
          lse.narrow(2, 0, rows).copy_(own_lse);
          // As torch pads: its backward, which runs where flash_ext is off by then, relies on it.
          lse.narrow(2, rows, padded - rows).fill_(std::numeric_limits<double>::infinity());
        }
      }
      return {out.transpose(1, 2), std::move(lse), no_number(query, is_capturing(query)),
              no_number(query, is_capturing(query))};
    }
  }
  return call_before<MaskedResult>(kMaskedForward, reason, keys, query, key, value, bias, compute_lse, dropout_p,
                                   is_causal, scale);
}

MaskedResult masked_backward(c10::DispatchKeySet keys, const Tensor& grad_out, const Tensor& query, const Tensor& key,
                             const Tensor& value, const Tensor& bias, const Tensor& out, const Tensor& lse,
                             const Tensor& seed, const Tensor& offset, double dropout_p, std::array<bool, 4> needs,
                             bool is_causal, OptionalScale scale) {
  Reason reason = refusal_of_dense(query, key, value, dropout_p);
  if (!grad_out.defined()) reason = kNoGradient;
  if (reason == nullptr) {
    const Tensor q = swapped(query), k = swapped(key), v = swapped(value);
    const OptionalTensor given = optional(bias);
    const bool need_bias = needs[3] && given.has_value();
    reason = refusal(scale, q, k, v, std::nullopt, std::nullopt);
    // A gradient of the bias has every element, also those of a mask that repeats.
    if (reason == nullptr) reason = refusal_of_bias(given, q, k);
    if (reason == nullptr && !(unit_stride(out) && lse.dim() == 3 && lse.size(2) >= q.size(1))) reason = kOtherForward;
    if (reason == nullptr) {
      count_served(kMaskedBackward, query, key, value);
      const BelowAll guard;
      CallArgs args = masked_args(scale_of(scale, q), is_causal, need_bias ? given : without_repeats(given));
      args.need_qkv = needs[0] || needs[1] || needs[2];
      args.need_bias = need_bias;
      auto [dq, dk, dv, dbias, dslopes, dsinks] =
          call_bwd_mod(grad_out.transpose(1, 2), q, k, v, out.transpose(1, 2), lse.narrow(2, 0, q.size(1)), args);
      const auto wanted = [](bool needed, Tensor t) { return needed ? t : Tensor(); };
      return {wanted(needs[0], dq.transpose(1, 2)), wanted(needs[1], dk.transpose(1, 2)),
              wanted(needs[2], dv.transpose(1, 2)), wanted(need_bias, dbias)};
    }
  }
  return call_before<MaskedResult>(kMaskedBackward, reason, keys, grad_out, query, key, value, bias, out, lse, seed,
                                   offset, dropout_p, needs, is_causal, scale);
}

// ---- F.scaled_dot_product_attention with grouped heads and a mask -------------------------------
// To the memory-efficient operator the selector of torch 2.11 gives no grouped heads. Where its order
// has cuDNN before unfused code, as on Hopper, that operator is asked next. Of its calls only those are
// taken that neither of the others could get, so that cuDNN asked for by name is cuDNN.

namespace {

Reason refusal_of_grouped(const Tensor& query, const Tensor& key, const Tensor& value, bool has_bias, bool is_causal,
                          double dropout_p) {
  const Reason reason = refusal_of_dense(query, key, value, dropout_p);
  if (reason != nullptr) return reason;
  const bool is_offered_to_nobody_else =
      query.size(1) != key.size(1) &&
      (has_bias || (is_causal && query.size(2) != key.size(2)) || value.size(3) != query.size(3));
  return is_offered_to_nobody_else ? nullptr : "cuDNN was chosen for it";
}

// A mask as the caller gave it, with all four dimensions.
OptionalTensor with_four_dims(const OptionalTensor& bias) {
  OptionalTensor t = bias;
  while (t.has_value() && t->dim() < 4) t = t->unsqueeze(0);
  return t;
}

}  // namespace

SdpaResult grouped_forward(c10::DispatchKeySet keys, const Tensor& query, const Tensor& key, const Tensor& value,
                           const OptionalTensor& bias, bool compute_lse, double dropout_p, bool is_causal,
                           bool return_debug_mask, OptionalScale scale) {
  Reason reason = refusal_of_grouped(query, key, value, bias.has_value(), is_causal, dropout_p);
  if (return_debug_mask) reason = "a debug mask is asked for";
  if (reason == nullptr) {
    const Tensor q = swapped(query), k = swapped(key), v = swapped(value);
    const OptionalTensor mask = with_four_dims(bias);
    reason = refusal(scale, q, k, v, std::nullopt, std::nullopt);
    if (reason == nullptr) reason = refusal_of_bias(mask, q, k);
    if (reason == nullptr) {
      count_served(kGroupedForward, query, key, value);
      const BelowAll guard;
      const auto [out, lse, row_max] =
          call_fwd_mod(q, k, v, masked_args(scale_of(scale, q), is_causal, without_repeats(mask)));
      return {placed_beside(query, out.transpose(1, 2)),
              lse.unsqueeze(-1),
              Tensor(),
              Tensor(),
              query.size(2),
              key.size(2),
              no_number(query, true),
              no_number(query, true),
              Tensor()};
    }
  }
  return call_before<SdpaResult>(kGroupedForward, reason, keys, query, key, value, bias, compute_lse, dropout_p,
                                 is_causal, return_debug_mask, scale);
}

BwdResult grouped_backward(c10::DispatchKeySet keys, const Tensor& grad_out, const Tensor& query, const Tensor& key,
                           const Tensor& value, const Tensor& out, const Tensor& lse, const Tensor& seed,
                           const Tensor& offset, const Tensor& bias, const Tensor& cu_q, const Tensor& cu_k,
                           SymInt max_q, SymInt max_k, double dropout_p, bool is_causal, OptionalScale scale) {
  Reason reason = refusal_of_grouped(query, key, value, bias.defined(), is_causal, dropout_p);
  if (!grad_out.defined()) reason = kNoGradient;
  if (cu_q.defined() || cu_k.defined()) reason = "the sequences are packed";
  if (reason == nullptr) {
    const Tensor q = swapped(query), k = swapped(key), v = swapped(value);
    const OptionalTensor mask = with_four_dims(optional(bias));
    const bool has_lse = lse.dim() == 4 && lse.size(2) == q.size(1) && lse.size(3) == 1;
    reason = refusal(scale, q, k, v, std::nullopt, std::nullopt);
    if (reason == nullptr) reason = refusal_of_bias(mask, q, k);
    if (reason == nullptr && !(unit_stride(out) && has_lse)) reason = kOtherForward;
    if (reason == nullptr) {
      count_served(kGroupedBackward, query, key, value);
      const BelowAll guard;
      const auto [dq, dk, dv, dbias, dslopes, dsinks] =
          call_bwd_mod(grad_out.transpose(1, 2), q, k, v, out.transpose(1, 2), lse.squeeze(-1),
                       masked_args(scale_of(scale, q), is_causal, without_repeats(mask)));
      return {placed_beside(query, dq.transpose(1, 2)), placed_beside(key, dk.transpose(1, 2)),
              placed_beside(value, dv.transpose(1, 2))};
    }
  }
  return call_before<BwdResult>(kGroupedBackward, reason, keys, grad_out, query, key, value, out, lse, seed, offset,
                                bias, cu_q, cu_k, max_q, max_k, dropout_p, is_causal, scale);
}

}  // namespace flash_ext
