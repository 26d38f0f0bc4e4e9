// The sm90 forward where tiles of queries are too few for the multiprocessors: CTAs share out the keys of each tile,
// and leave what they have come to. sm80/split_kv/merge.cuh adds it up.
//
// A part leaves, of each of its rows in fp32, its maximum (in units of log2) and its sum, and its output before the
// division, where row_states() and partial_out() of the split-KV kernels have theirs. A part without keys leaves
// {-inf, 0}, and no output is read of it.
#pragma once

#include "config.cuh"
#include "weights.cuh"

namespace flash_ext::sm90 {

// Tiles of keys of one part of `splits`, which differ by one tile at most.
__device__ __forceinline__ BlockRange part_of_blocks(const BlockRange& all, int part, int splits) {
  const int count = max(all.end - all.begin, 0);
  return {all.begin + count * part / splits, all.begin + count * (part + 1) / splits};
}

// The tiles of a part among those that a warpgroup's rows see. Where it has none of them, the rows go through its first
// one, so that what they leave is that they have seen nothing.
__device__ __forceinline__ BlockRange seen_in_part(const BlockRange& seen, const BlockRange& part) {
  const BlockRange both{max(seen.begin, part.begin), min(seen.end, part.end)};
  return both.begin < both.end ? both : BlockRange{part.begin, part.begin + 1};
}

// Number of a row of a part among the rows of all parts.
__device__ __forceinline__ int64_t partial_row(const FwdPartsArgs& a, const Work& w, int part, int row) {
  const Problem& p = a.p.problem;
  return part * a.parts.total_rows + (static_cast<int64_t>(w.b) * p.seqlen_q + row) * p.num_heads + w.h;
}

template <typename T>
__device__ __forceinline__ void store_empty_part(const FwdPartsArgs& a, const Work& w, int part, int lane) {
  const int first_row = w.block * T::kBlockM, end = min(first_row + T::kBlockM, w.q.length);
  for (int row = first_row + lane; row < end; row += 32) {
    static_cast<float2*>(a.partials)[partial_row(a, w, part, row)] = make_float2(-INFINITY, 0.f);
  }
}

// Stores what a thread holds of two rows.
template <typename T>
__device__ __forceinline__ void store_part(const FwdPartsArgs& a, const PartTile& work,
                                           const float (&o)[T::kHeadDimV / 2], const RowState& state, int row,
                                           int lane) {
  float* const outputs = reinterpret_cast<float*>(static_cast<char*>(a.partials) + a.parts.stats_bytes);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float sum = state.sum[half];
    sum += __shfl_xor_sync(ptx::kFullWarp, sum, 1);
    sum += __shfl_xor_sync(ptx::kFullWarp, sum, 2);
    if (row + 8 * half >= work.w.q.length) continue;
    const int64_t number = partial_row(a, work.w, work.part, row + 8 * half);
    if (lane % 4 == 0) static_cast<float2*>(a.partials)[number] = make_float2(-state.minus_max[half], sum);
    float* const to = outputs + number * a.parts.pitch + lane % 4 * 2;
#pragma unroll
    for (int j = 0; j < T::kHeadDimV / 8; ++j) {
      if (8 * j >= a.p.problem.head_dim_v) break;
      *reinterpret_cast<float2*>(to + 8 * j) = make_float2(o[4 * j + 2 * half], o[4 * j + 2 * half + 1]);
    }
  }
}

}  // namespace flash_ext::sm90
