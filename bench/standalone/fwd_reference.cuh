// The forward in fp32, one block of 128 threads per sampled row, and the error of what a kernel wrote there.
#pragma once

#include "harness.cuh"

namespace standalone {

using flash_ext::FwdParams;
using flash_ext::Problem;

struct SampledRow {
  int batch;
  int head;
  int row;  // of all packed rows, where sequences are packed
};

// A row within its own sequence, and where that begins.
template <typename E>
struct RowOfSequence {
  const E *q, *k, *v, *out;
  float lse;
  int first_key;
  int last_key;  // before the first: the row sees nothing
};

template <typename E>
__device__ RowOfSequence<E> locate_row(const FwdParams& p, const SampledRow& s) {
  const Problem& r = p.problem;
  const int head_k = s.head / (r.num_heads / r.num_heads_k);
  int row = s.row, seqlen_q = r.seqlen_q, seqlen_k = r.seqlen_k;
  int64_t start_k = 0, index = (static_cast<int64_t>(s.batch) * r.num_heads + s.head) * r.seqlen_q + s.row;
  if (r.cu_seqlens_q != nullptr) {
    int sequence = 0;
    while (r.cu_seqlens_q[sequence + 1] <= s.row) ++sequence;
    row -= r.cu_seqlens_q[sequence];
    seqlen_q = r.cu_seqlens_q[sequence + 1] - r.cu_seqlens_q[sequence];
    start_k = r.cu_seqlens_k[sequence];
    seqlen_k = r.cu_seqlens_k[sequence + 1] - r.cu_seqlens_k[sequence];
    index = s.head * r.total_q + s.row;
  }
  const auto at = [&](const StridedView& x, int64_t i, int head) {
    return static_cast<const E*>(x.ptr) + s.batch * x.batch_stride + i * x.row_stride + head * x.head_stride;
  };
  const int level = row + seqlen_k - seqlen_q;
  return {at(p.q, s.row, s.head),       at(p.k, start_k, head_k),
          at(p.v, start_k, head_k),     at(p.out, s.row, s.head),
          p.lse[index],                 max(0, level - r.reach_left),
          min(seqlen_k - 1, level + r.reach_right)};
}

// Weights of the row into `weights`, not yet divided by their sum, which is returned with the largest score.
template <typename E>
__device__ float2 weigh_keys(const FwdParams& p, const RowOfSequence<E>& at, float* weights) {
  float largest = -INFINITY;
  for (int j = at.first_key + threadIdx.x; j <= at.last_key; j += 128) {
    const E* key = at.k + j * p.k.row_stride;
    float score = 0.f;
    for (int i = 0; i < p.problem.head_dim; ++i) score += static_cast<float>(at.q[i]) * static_cast<float>(key[i]);
    weights[j] = score * p.problem.softmax_scale;
    largest = fmaxf(largest, weights[j]);
  }
  largest = block_reduce(largest, Largest());
  float sum = 0.f;
  for (int j = at.first_key + threadIdx.x; j <= at.last_key; j += 128) {
    weights[j] = expf(weights[j] - largest);
    sum += weights[j];
  }
  return {largest, block_reduce(sum, Sum())};
}

__device__ inline void tally_lse(Errors* errors, double got, double want) {
  const double difference = want == got ? 0. : fabs(want - got) / fmax(1., fabs(want));
  atomic_max(&errors->largest_lse, difference < 1e30 ? difference : 1e30);
}

template <typename E>
__global__ void check_rows_kernel(FwdParams p, const SampledRow* samples, Errors* errors) {
  extern __shared__ float weights[];
  const RowOfSequence<E> at = locate_row<E>(p, samples[blockIdx.x]);
  const bool empty = at.last_key < at.first_key;
  const auto [largest, sum] = weigh_keys(p, at, weights);
  for (int c = threadIdx.x; c < p.problem.head_dim_v; c += 128) {
    float want = 0.f;
    for (int j = at.first_key; j <= at.last_key; ++j) {
      want += weights[j] * static_cast<float>(at.v[j * p.v.row_stride + c]);
    }
    tally(errors, static_cast<float>(at.out[c]), empty ? 0.f : want / sum);
  }
  if (threadIdx.x == 0) tally_lse(errors, at.lse, empty ? -INFINITY : largest + logf(sum));
}

// Up to 3000 rows, all of them where there are no more: a full reference at 16384 keys would take minutes.
inline std::vector<SampledRow> sample_rows(int batch, int heads, int rows) {
  const size_t all = static_cast<size_t>(batch) * heads * rows;
  const size_t count = std::min<size_t>(all, 3000);
  std::vector<SampledRow> samples;
  for (size_t i = 0; i < count; ++i) {
    const size_t at = count == all ? i : (i * 2654435761u + 12345 * i * i) % all;
    samples.push_back({static_cast<int>(at / rows / heads), static_cast<int>(at / rows % heads),
                       static_cast<int>(at % rows)});
  }
  return samples;
}

__global__ void count_differences_kernel(const uint32_t* a, const uint32_t* b, size_t count, int* differences) {
  for (size_t i = first_index(); i < count; i += index_step()) {
    if (a[i] != b[i]) atomicAdd(differences, 1);
  }
}

}  // namespace standalone
