// The backward in fp32 with all weights in memory, one block of 128 threads per row, and the errors of a kernel.
#pragma once

#include "harness.cuh"

namespace standalone {

using flash_ext::BwdParams;
using flash_ext::Problem;

struct Sequence {
  int batch;  // 0 when packed
  int start_q, start_k;
  int seqlen_q, seqlen_k;
  int64_t start_scores;  // in Scores
};

// Of all sequences, each [head][row][key].
struct Scores {
  float* weights;
  float* gradients;  // dS

  __device__ Scores of(const Sequence& s) const { return {weights + s.start_scores, gradients + s.start_scores}; }
};

template <typename E>
__device__ E* row_of(const StridedView& x, const Sequence& s, int64_t row, int head) {
  return static_cast<E*>(x.ptr) + s.batch * x.batch_stride + row * x.row_stride + head * x.head_stride;
}

__device__ inline int heads_per_key_head(const Problem& p) { return p.num_heads / p.num_heads_k; }

struct Visible {
  int first, last;  // keys; none when last < first
};

__device__ inline Visible visible_keys(const Problem& p, const Sequence& s, int row) {
  const int level = row + s.seqlen_k - s.seqlen_q;
  return {max(0, level - p.reach_left), min(s.seqlen_k - 1, level + p.reach_right)};
}

// Scores (-inf where hidden) and dP of a row; returns the largest score of the thread's keys.
template <typename E>
__device__ float score_keys(const BwdParams& p, const Sequence& s, int row, int head, float* score, float* dp) {
  const int head_k = head / heads_per_key_head(p.problem);
  const Visible keys = visible_keys(p.problem, s, row);
  const E* q = row_of<E>(p.q, s, s.start_q + row, head);
  const E* dout = row_of<E>(p.dout, s, s.start_q + row, head);
  float largest = -INFINITY;
  for (int j = threadIdx.x; j < s.seqlen_k; j += 128) {
    score[j] = -INFINITY;
    dp[j] = 0.f;
    if (j < keys.first || j > keys.last) continue;
    const E* k = row_of<E>(p.k, s, s.start_k + j, head_k);
    const E* v = row_of<E>(p.v, s, s.start_k + j, head_k);
    float qk = 0.f;
    for (int i = 0; i < p.problem.head_dim; ++i) qk += static_cast<float>(q[i]) * static_cast<float>(k[i]);
    for (int i = 0; i < p.problem.head_dim_v; ++i) dp[j] += static_cast<float>(dout[i]) * static_cast<float>(v[i]);
    score[j] = qk * p.problem.softmax_scale;
    largest = fmaxf(largest, score[j]);
  }
  return largest;
}

// Grid (rows, heads). Weights and dS of one sequence, and the output and lse that the backward starts from.
template <typename E>
__global__ void reference_rows_kernel(BwdParams p, float* lse, Sequence s, Scores all) {
  const Problem& r = p.problem;
  const int row = blockIdx.x, head = blockIdx.y;
  const int64_t at = (static_cast<int64_t>(head) * s.seqlen_q + row) * s.seqlen_k;
  float* weights = all.of(s).weights + at;
  float* gradients = all.of(s).gradients + at;
  const float largest = block_reduce(score_keys<E>(p, s, row, head, weights, gradients), Largest());
  const bool empty = largest == -INFINITY;
  float sum = 0.f;
  for (int j = threadIdx.x; j < s.seqlen_k; j += 128) {
    weights[j] = empty ? 0.f : expf(weights[j] - largest);
    sum += weights[j];
  }
  sum = block_reduce(sum, Sum());
  float delta = 0.f;
  for (int j = threadIdx.x; j < s.seqlen_k; j += 128) {
    weights[j] = empty ? 0.f : weights[j] / sum;
    delta += weights[j] * gradients[j];
  }
  delta = block_reduce(delta, Sum());
  const int64_t stat = r.cu_seqlens_q != nullptr
                           ? head * r.total_q + s.start_q + row
                           : (static_cast<int64_t>(s.batch) * r.num_heads + head) * r.seqlen_q + row;
  if (p.dlse != nullptr) delta -= p.dlse[stat];
  for (int j = threadIdx.x; j < s.seqlen_k; j += 128) gradients[j] = weights[j] * (gradients[j] - delta);
  if (threadIdx.x == 0) lse[stat] = empty ? -INFINITY : largest + logf(sum);
  __syncthreads();
  const int head_k = head / heads_per_key_head(r);
  E* out = row_of<E>(p.out, s, s.start_q + row, head);
  for (int c = threadIdx.x; c < r.head_dim_v; c += 128) {
    float value = 0.f;
    for (int j = 0; j < s.seqlen_k; ++j) {
      value += weights[j] * static_cast<float>(row_of<E>(p.v, s, s.start_k + j, head_k)[c]);
    }
    out[c] = from_float<E>(value);
  }
}

// Grid (rows, heads).
template <typename E>
__global__ void check_dq_kernel(BwdParams p, Sequence s, Scores all, Errors* errors) {
  const int row = blockIdx.x, head = blockIdx.y, head_k = head / heads_per_key_head(p.problem);
  const float* gradients = all.of(s).gradients + (static_cast<int64_t>(head) * s.seqlen_q + row) * s.seqlen_k;
  const E* dq = row_of<E>(p.dq, s, s.start_q + row, head);
  for (int c = threadIdx.x; c < p.problem.head_dim; c += 128) {
    float want = 0.f;
    for (int j = 0; j < s.seqlen_k; ++j) {
      want += gradients[j] * static_cast<float>(row_of<E>(p.k, s, s.start_k + j, head_k)[c]);
    }
    tally(errors, static_cast<float>(dq[c]), want * p.problem.softmax_scale);
  }
}

// Grid (keys, key heads). Errors of dk, then of dv.
template <typename E>
__global__ void check_dkv_kernel(BwdParams p, Sequence s, Scores all, Errors* errors) {
  const int key = blockIdx.x, head_k = blockIdx.y, group = heads_per_key_head(p.problem);
  const Scores scores = all.of(s);
  const Problem& r = p.problem;
  for (int c = threadIdx.x; c < max(r.head_dim, r.head_dim_v); c += 128) {
    const bool in_k = c < r.head_dim, in_v = c < r.head_dim_v;
    float want_dk = 0.f, want_dv = 0.f;
    for (int head = head_k * group; head < (head_k + 1) * group; ++head) {
      for (int row = 0; row < s.seqlen_q; ++row) {
        const int64_t at = (static_cast<int64_t>(head) * s.seqlen_q + row) * s.seqlen_k + key;
        if (in_k) want_dk += scores.gradients[at] * static_cast<float>(row_of<E>(p.q, s, s.start_q + row, head)[c]);
        if (in_v) want_dv += scores.weights[at] * static_cast<float>(row_of<E>(p.dout, s, s.start_q + row, head)[c]);
      }
    }
    const auto got = [&](const StridedView& x) {
      return static_cast<float>(row_of<E>(x, s, s.start_k + key, head_k)[c]);
    };
    if (in_k) tally(errors, got(p.dk), want_dk * r.softmax_scale);
    if (in_v) tally(errors + 1, got(p.dv), want_dv);
  }
}

}  // namespace standalone
