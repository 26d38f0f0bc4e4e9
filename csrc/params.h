// What crosses from the host to a kernel: plain structs, no torch, no CUDA headers.
//
// Every pointer carries its shape. Strides count elements and are 64-bit; the last dimension
// always has stride 1. Packed (varlen) tensors have batch_stride 0 and rows counted over all sequences.
#pragma once

#include <cstdint>

namespace flash_ext {

inline constexpr float kLog2e = 1.4426950408889634f;

enum class DType : int32_t { kFloat16 = 0, kBFloat16 = 1 };

// Whether the type holds numbers of 8 bits times factors of any size, as the slots of a cache have.
constexpr bool holds_any_factor(DType t) {
  switch (t) {
    case DType::kFloat16: return false;
    case DType::kBFloat16: return true;
  }
  throw "an element type without a range";
}

struct StridedView {
  void* ptr = nullptr;
  int64_t batch_stride = 0;
  int64_t row_stride = 0;
  int64_t head_stride = 0;
  // True when every row starts on a 16-byte boundary, so 16-byte asynchronous copies are legal.
  // Filled by is_row_aligned(); false selects the element-wise loader.
  bool aligned = false;
  // Elements are fp32, which results may be (common/float_results.cuh); otherwise they have the problem's dtype.
  bool is_float = false;
};

// Shape, masking and scaling shared by the forward and the backward.
struct Problem {
  DType dtype = DType::kBFloat16;
  int32_t batch = 0;
  int32_t num_heads = 0;    // query heads
  int32_t num_heads_k = 0;  // key/value heads; divides num_heads
  int32_t head_dim = 0;     // of q and k, 1..256
  int32_t head_dim_v = 0;   // of v and out, 1..256
  int32_t seqlen_q = 0;     // dense: rows per batch entry; varlen: 0
  int32_t seqlen_k = 0;
  int64_t total_q = 0;  // dense: batch * seqlen_q; varlen: packed rows
  int64_t total_k = 0;
  const int32_t* cu_seqlens_q = nullptr;  // (batch + 1,) or null for dense
  const int32_t* cu_seqlens_k = nullptr;  // (batch + 1,) or null for dense
  float scale = 1.f;
  int32_t window_left = -1;   // inclusive reach; -1 = unlimited
  int32_t window_right = -1;  // causal is window_right == 0
  // What TMA can address: rows of q, k and v start on 16 bytes, and rows are not expanded from one.
  bool tma_ready = true;

  // Derived by prepare(); kernels read these, straight from the constant bank.
  int32_t reach_left = 0;     // window_left, kUnlimited when open
  int32_t reach_right = 0;    // window_right, kUnlimited when open
  float scale_log2 = 0.f;     // scale * log2(e)
  float abs_scale_log2 = 0.f;  // its magnitude, 1 for scale 0: the forward's exponent factor
  // The forward looks for the largest raw dot product of a row, which is the largest score only when the
  // scale is positive; other scales are split into this factor (-1, or 0 for scale 0) and abs_scale_log2.
  float score_factor = 1.f;

  // Sequences are shorter than 2^30 - 1024, so sums of a row, a shift and a reach stay inside 32 bits.
  static constexpr int32_t kUnlimited = 1 << 30;
  static constexpr int32_t kMaxSeqlen = (1 << 30) - 1024;

  bool is_varlen() const { return cu_seqlens_q != nullptr; }

  void prepare() {
    reach_left = window_left < 0 || window_left > kUnlimited ? kUnlimited : window_left;
    reach_right = window_right < 0 || window_right > kUnlimited ? kUnlimited : window_right;
    scale_log2 = scale * kLog2e;
    score_factor = scale > 0.f ? 1.f : scale < 0.f ? -1.f : 0.f;
    abs_scale_log2 = scale == 0.f ? 1.f : scale_log2 * score_factor;
  }
};

struct FwdParams {
  Problem problem;
  StridedView q;    // (b, seqlen_q, h, d)    or (total_q, h, d)
  StridedView k;    // (b, seqlen_k, h_k, d)  or (total_k, h_k, d)
  StridedView v;    // (b, seqlen_k, h_k, dv) or (total_k, h_k, dv)
  StridedView out;  // (b, seqlen_q, h, dv)   or (total_q, h, dv)
  float* lse = nullptr;  // (b, h, seqlen_q) or (h, total_q), contiguous; natural log, -inf for empty rows
  void* kept = nullptr;  // kv_partials or kv_stretches of the workspace (plan.h), which a launch sets, or null
  void* stream = nullptr;  // cudaStream_t
};

struct BwdParams {
  Problem problem;
  StridedView q, k, v, out;  // as in FwdParams
  StridedView dout;          // as out
  StridedView dq, dk, dv;    // as q, k, v
  const float* lse = nullptr;   // as in FwdParams
  const float* dlse = nullptr;  // same shape as lse, contiguous, or null
  bool deterministic = false;
  // Parts of the workspace (plan.h), which a launch sets: fp32, written by the first pass. Shapes are those of the
  // portable kernels; sm90/bwd/passes.cuh has the others.
  float* row_stats = nullptr;  // lse's shape + (2,): lse * log2(e), and delta = rowsum(dout * out) - dlse
  float* dq_accum = nullptr;   // lse's shape + (padded head_dim,), or null when not needed
  void* stream = nullptr;     // cudaStream_t
};

}  // namespace flash_ext
