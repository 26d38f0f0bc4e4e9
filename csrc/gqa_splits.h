// Backwards with fewer blocks of keys than the GPU needs: the query heads that share a key head are divided among CTAs,
// each of which makes a part of dk and dv in fp32 (passes/head_sums.cuh adds them). No CUDA, no torch.
//
// To the kernels the parts are virtual key heads at one address, with a head stride of 0. Such views exist where
// there is one key head, or where there is one batch entry, whose key heads then stand as batch entries.
#pragma once

#include <algorithm>
#include <cstdint>

#include "plan.h"

namespace flash_ext {

inline bool can_split_gqa(const Problem& p) {
  return p.num_heads > p.num_heads_k && (p.num_heads_k == 1 || (p.batch == 1 && !p.is_varlen()));
}

// How long a backward takes with so many parts a key head, where 1 is the time of a CTA that has all query heads.
// Evidence: gqa-splits.
inline double time_with_splits(const Problem& p, int parts, int block_keys, int num_sms) {
  const double group = static_cast<double>(p.num_heads) / p.num_heads_k;
  const double rows_k = static_cast<double>(p.total_k), rows_q = static_cast<double>(p.total_q) / p.batch;
  const double work_tiles =
      static_cast<double>(p.num_heads_k) * (rows_k / block_keys + (p.is_varlen() ? p.batch : 0.5));
  const bool uneven = p.is_varlen() || p.window_right >= 0 || p.window_left >= 0;
  const double share = uneven ? 0.5 : 1.0;  // of the query rows that an average work tile sees
  const double even = work_tiles * share / num_sms;
  // Uneven work tiles are fetched longest first, which leaves 0.3 of one at the end. Even ones come in waves.
  const double waves = static_cast<double>((static_cast<int64_t>(work_tiles * parts) + num_sms - 1) / num_sms) / parts;
  const double balanced = uneven ? std::max(1.0 / parts, even + 0.3 / parts) : std::max(waves, even);
  if (parts == 1) return balanced;
  // Parts are written and read in fp32: 16 bytes an element of dk at about 2.3 TB/s, against 10 operations a query at
  // about 600 TFLOP/s; and 4 us of launches, where one multiprocessor does 4.5 TFLOP/s.
  const double traffic = 420.0 * parts / (group * rows_q * share);
  const double tile_us = 10e-6 * group * rows_q * block_keys * p.head_dim / 4.5;
  return balanced + even * traffic + 4.0 / std::max(tile_us, 1.0);
}

// Parts of each key head: 1, or a divisor of the query heads that share it.
inline int best_gqa_splits(const Problem& p, int block_keys, int num_sms) {
  if (!can_split_gqa(p) || p.total_k == 0 || p.total_q == 0 || num_sms <= 0) return 1;
  const int group = p.num_heads / p.num_heads_k;
  const double whole = time_with_splits(p, 1, block_keys, num_sms);
  int best = 1;
  double best_time = 0.95 * whole;  // less is not worth the memory
  for (int parts = 2; parts <= std::min(group, 16); ++parts) {
    if (group % parts != 0) continue;
    const double time = time_with_splits(p, parts, block_keys, num_sms);
    if (time < best_time) best = parts, best_time = time;
  }
  return best;
}

// The problem whose key heads are the parts.
inline Problem in_parts(Problem p, int parts) {
  if (p.num_heads_k > 1) {  // one batch entry
    p.batch = p.num_heads_k;
    p.num_heads /= p.num_heads_k;
    p.num_heads_k = 1;
    p.total_q *= p.batch;
    p.total_k *= p.batch;
  }
  p.num_heads_k = parts;
  return p;
}

// The view of a tensor with `heads` heads, of which num_heads_k groups become batch entries.
inline StridedView grouped(StridedView x, const Problem& before, int heads) {
  if (before.num_heads_k > 1) x.batch_stride = x.head_stride * (heads / before.num_heads_k);
  return x;
}

inline StridedView shared_by_parts(StridedView x, const Problem& before) {
  x = grouped(x, before, before.num_heads_k);
  x.head_stride = 0;
  return x;
}

// Of a gradient: (batch, rows, parts, columns), contiguous, in fp32.
inline StridedView place_of_parts(float* ptr, const Problem& p, int parts, int columns) {
  StridedView x;
  x.ptr = ptr;
  x.head_stride = columns;
  x.row_stride = static_cast<int64_t>(parts) * columns;
  x.batch_stride = p.is_varlen() ? 0 : p.seqlen_k * x.row_stride;
  x.aligned = columns % 4 == 0;
  x.is_float = true;
  return x;
}

// The same call for parts, which are to be written to `dk` and `dv`: (batch, rows, parts, columns).
inline BwdParams in_parts(const BwdParams& whole, int parts, float* dk, float* dv) {
  const Problem& before = whole.problem;
  BwdParams p = whole;
  p.problem = in_parts(before, parts);
  for (StridedView* x : {&p.q, &p.out, &p.dout, &p.dq}) *x = grouped(*x, before, before.num_heads);
  p.k = shared_by_parts(p.k, before);
  p.v = shared_by_parts(p.v, before);
  p.dk = place_of_parts(dk, before, parts, before.head_dim);
  p.dv = place_of_parts(dv, before, parts, before.head_dim_v);
  return p;
}

// The same call where each key head's queries are divided among `splits` CTAs, for `dk` and `dv`: (batch, rows, heads,
// splits, columns).
inline BwdParams in_query_splits(BwdParams p, int splits, float* dk, float* dv) {
  const int heads = p.problem.num_heads_k * splits;
  p.dk = place_of_parts(dk, p.problem, heads, p.problem.head_dim);
  p.dv = place_of_parts(dv, p.problem, heads, p.problem.head_dim_v);
  return p;
}

struct PartsOfGradients {
  const float *dk, *dv;
};

// Adds `num_parts` parts of dk and dv for each of `heads` heads; csrc/inst/passes.cu.
std::string sum_heads(const Launch& l, const Problem& p, int heads, int num_parts, const PartsOfGradients& parts,
                      const StridedView& dk, const StridedView& dv, void* stream);

}  // namespace flash_ext
