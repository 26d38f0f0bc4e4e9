// What of a call of torch's attention operators the kernels serve, and results in the layouts that torch
// promises: for api/sdpa.cpp.
#pragma once

#include <ATen/ops/empty_like_ops.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <utility>
#include <vector>

#include "../path_choice.h"
#include "api.h"
#include "tensors.h"

namespace flash_ext {

using OptionalScale = std::optional<double>;

inline bool unit_stride(const Tensor& t) { return t.size(-1) <= 1 || t.stride(-1) == 1; }

// Why a call goes back to torch; null where the kernels serve it.
using Reason = const char*;

// Of tensors (batch, rows, heads, features) or (total, heads, features), and a factor.
inline Reason refusal(OptionalScale scale, const Tensor& q, const Tensor& k, const Tensor& v,
                      const OptionalTensor& cu_q, const OptionalTensor& cu_k) {
  constexpr int64_t kLargestHeadDim = 256;
  if (scale.has_value() && !std::isfinite(*scale)) return "scale is not finite";
  const auto dtype = q.scalar_type();
  if (dtype != at::kHalf && dtype != at::kBFloat16) return "the dtype is neither float16 nor bfloat16";
  if (k.scalar_type() != dtype || v.scalar_type() != dtype) return "the dtypes differ";
  if (k.device() != q.device() || v.device() != q.device()) return "the devices differ";
  const int64_t dims = cu_q.has_value() ? 3 : 4;
  if (q.dim() != dims || k.dim() != dims || v.dim() != dims) return "the tensors have other dimensions";
  if (q.size(-1) < 1 || q.size(-1) > kLargestHeadDim || v.size(-1) < 1 || v.size(-1) > kLargestHeadDim)
    return "head_dim is not between 1 and 256";
  const bool same_batch = dims == 3 || (k.size(0) == q.size(0) && v.size(0) == q.size(0));
  if (k.size(-1) != q.size(-1) || k.size(-2) != v.size(-2) || k.size(-3) != v.size(-3) || k.size(-2) < 1 ||
      q.size(-2) % k.size(-2) != 0 || !same_batch)
    return "the shapes do not fit each other";
  if (!unit_stride(q) || !unit_stride(k) || !unit_stride(v)) return "the last dimension is not contiguous";
  for (const OptionalTensor& cu : {cu_q, cu_k}) {
    if (cu.has_value() && (cu->scalar_type() != at::kInt || cu->dim() != 1 || !cu->is_contiguous() ||
                           cu->device() != q.device() || cu->size(0) != cu_q->size(0)))
      return "cu_seqlens are no contiguous int32 on the device of q, or differ in length";
  }
  if (!q.is_cuda()) return nullptr;  // tests register on the CPU, where there is nothing to choose
  const DeviceInfo info = device_info_of(q);
  CallArgs a;
  a.cu_seqlens_q = cu_q, a.cu_seqlens_k = cu_k;
  if (info.error.empty() && choose_path(problem_of(q, k, v, a), info, {}) != nullptr) return nullptr;
  TORCH_WARN_ONCE("flash_ext.enable_sdpa() has no kernels for ", q.device(),
                  ": attention on it runs as before. `python -m flash_ext.info` says why.");
  return "no backend serves this GPU, or a size of this call";
}

inline double scale_of(OptionalScale scale, const Tensor& q) {
  return scale.has_value() ? *scale : 1.0 / std::sqrt(static_cast<double>(q.size(-1)));
}

// A dimension of size 1 has no meaningful stride.
inline bool same_strides(const Tensor& a, const Tensor& b) {
  for (int64_t dim = 0; dim < a.dim(); ++dim) {
    if (a.size(dim) != 1 && a.stride(dim) != b.stride(dim)) return false;
  }
  return true;
}

// t with its dimensions 1 and 2 exchanged, past the dispatcher, which would be asked eight times a call.
inline Tensor swapped(const Tensor& t) {
  c10::SmallVector<int64_t, 4> sizes(t.sizes()), strides(t.strides());
  std::swap(sizes[1], sizes[2]);
  std::swap(strides[1], strides[2]);
  auto impl = t.unsafeGetTensorImpl()->shallow_copy_and_detach(c10::VariableVersion(0), true);
  impl->set_sizes_and_strides(sizes, strides);
  return Tensor(std::move(impl));
}

// What torch allocates for a result of this head_dim that goes with `like`: its strides, or with
// another head_dim its order of dimensions.
inline Tensor empty_beside(const Tensor& like, int64_t head_dim) {
  if (head_dim == like.size(-1)) {
    if (!like.is_non_overlapping_and_dense()) {
      return at::_ops::empty_like::call(like, std::nullopt, std::nullopt, std::nullopt, std::nullopt, std::nullopt);
    }
    return new_tensor(like.sizes(), like.strides(), like.options());
  }
  std::vector<int64_t> sizes = like.sizes().vec(), order(like.dim()), strides(like.dim());
  sizes.back() = head_dim;
  std::iota(order.begin(), order.end(), 0);
  const auto length = [&](int64_t dim) {
    return like.stride(dim) == 0 ? std::numeric_limits<int64_t>::max() : like.stride(dim);
  };
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return length(a) < length(b); });
  int64_t stride = 1;
  for (const int64_t dim : order) {
    strides[dim] = stride;
    stride *= sizes[dim];
  }
  return new_tensor(sizes, strides, like.options());
}

// A result in that layout: a copy only where it has another one.
inline Tensor placed_beside(const Tensor& like, const Tensor& result) {
  const bool same_size = like.size(-1) == result.size(-1) && like.is_non_overlapping_and_dense();
  if (same_size && same_strides(result, like)) return result;
  const Tensor wanted = empty_beside(like, result.size(-1));
  return same_strides(result, wanted) ? result : wanted.copy_(result);
}

inline CallArgs plain_args(const OptionalTensor& cu_q, const OptionalTensor& cu_k, double scale, int64_t left,
                           int64_t right) {
  CallArgs a;
  a.cu_seqlens_q = cu_q, a.cu_seqlens_k = cu_k;
  a.scale = scale;
  a.window_size_left = left, a.window_size_right = right;
  return a;
}

// A call's q, k and v, with rows before heads as the kernels want them, and results in the layout that torch promises
// for those of `query`, `key` and `value`. The kernels write any order of dimensions but the last; what has another
// last one gets a copy, and so do the CPU tensors of tests, whose operators choose their own layout.
struct Call {
  const Tensor &query, &key, &value;
  bool heads_first;
  Tensor q = rows_first(query), k = rows_first(key), v = rows_first(value);

  Tensor rows_first(const Tensor& t) const { return heads_first ? swapped(t) : t; }

  Reason refusal(OptionalScale scale, const OptionalTensor& cu_q = {}, const OptionalTensor& cu_k = {}) const {
    return flash_ext::refusal(scale, q, k, v, cu_q, cu_k);
  }

  FwdResult forward(const OptionalTensor& cu_q, const OptionalTensor& cu_k, double scale, int64_t left,
                    int64_t right) const {
    const CallArgs args = plain_args(cu_q, cu_k, scale, left, right);
    const Tensor wanted = empty_beside(query, value.size(-1));
    auto [out, lse] = is_written(wanted) ? fwd_into(rows_first(wanted), q, k, v, args) : call_fwd(q, k, v, args);
    return {place(out, wanted), std::move(lse)};
  }

  BwdResult backward(const Tensor& grad_out, const Tensor& out, const Tensor& lse, const OptionalTensor& cu_q,
                     const OptionalTensor& cu_k, double scale, int64_t left, int64_t right) const {
    const CallArgs args = plain_args(cu_q, cu_k, scale, left, right);
    const Tensor wanted_q = empty_beside(query, query.size(-1)), wanted_k = empty_beside(key, key.size(-1)),
                 wanted_v = empty_beside(value, value.size(-1));
    const Tensor dout = rows_first(grad_out), o = rows_first(out);
    const bool written = is_written(wanted_q) && is_written(wanted_k) && is_written(wanted_v);
    const auto [dq, dk, dv] = written ? bwd_into({rows_first(wanted_q), rows_first(wanted_k), rows_first(wanted_v)},
                                                 dout, q, k, v, o, lse, args)
                                      : call_bwd(dout, q, k, v, o, lse, args);
    return {place(dq, wanted_q), place(dk, wanted_k), place(dv, wanted_v)};
  }

 private:
  static bool is_written(const Tensor& wanted) { return wanted.is_cuda() && unit_stride(wanted); }
  Tensor place(const Tensor& result, const Tensor& wanted) const {
    if (result.is_alias_of(wanted)) return wanted;
    const Tensor t = heads_first ? result.transpose(1, 2) : result;
    if (same_strides(t, wanted)) return t;
    wanted.copy_(t);
    return wanted;
  }
};

// The random state of a call without dropout: shapes that a backward pass hands on, nobody reads. Both share memory.
inline std::pair<Tensor, Tensor> no_state(const Tensor& q) {
  const Tensor pair = new_tensor({2}, q.options().dtype(at::kUInt64));
  auto impl = pair.unsafeGetTensorImpl()->shallow_copy_and_detach(c10::VariableVersion(0), true);
  impl->set_sizes_contiguous({});
  return {pair, Tensor(std::move(impl))};
}

// The seed or the offset of such a call where torch's own operators leave them: cuDNN's on the GPU, those of the
// memory-efficient operator on the CPU, but on the GPU while a CUDA graph is captured.
inline Tensor no_number(const Tensor& q, bool on_device) {
  const auto options = at::TensorOptions().dtype(at::kLong);
  return new_tensor({}, on_device ? options.device(q.device()) : options);
}

}  // namespace flash_ext
