// Softmax of long rows of fp32, one CTA a row: what each way of forming it reads.
#pragma once

#include <cstdint>

#include "../../../csrc/ptx/sm80.cuh"

namespace flash_ext::ladder {

enum class Passes : int {
  kThree,   // maximum; sum; result: 3 reads
  kTwo,     // maximum and sum together, rescaled at every element (Milakov and Gimelshein 2018): 2 reads
  kBlocks,  // the same with one rescaling for 4 elements: 2 reads
  kOnChip,  // the row stays in shared memory: 1 read
};

inline constexpr int kSoftmaxThreads = 512;
inline constexpr float kSoftmaxLog2e = 1.4426950408889634f;

struct Stats {
  float row_max = -INFINITY, row_sum = 0.f;
};

__device__ __forceinline__ float exp_of(float x) { return ptx::ex2(x * kSoftmaxLog2e); }
// Where nothing larger than -inf was seen, -inf - -inf would be NaN.
__device__ __forceinline__ float shift_of(float row_max) { return row_max == -INFINITY ? 0.f : row_max; }

__device__ __forceinline__ Stats merged(const Stats& a, const Stats& b) {
  const float row_max = max(a.row_max, b.row_max), shift = shift_of(row_max);
  return {row_max, a.row_sum * exp_of(a.row_max - shift) + b.row_sum * exp_of(b.row_max - shift)};
}

// Of all threads, for all of them. `meet` holds one for each warp.
__device__ __forceinline__ Stats of_block(Stats x, Stats* meet) {
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) {
    x = merged(x, {__shfl_xor_sync(ptx::kFullWarp, x.row_max, mask), __shfl_xor_sync(ptx::kFullWarp, x.row_sum, mask)});
  }
  __syncthreads();  // the sums before are read
  if (lane == 0) meet[warp] = x;
  __syncthreads();
  x = meet[0];
  for (int w = 1; w < kSoftmaxThreads / 32; ++w) x = merged(x, meet[w]);
  return x;
}

// f(four neighbouring elements, their place in units of four) for this thread's share of a row.
template <typename F>
__device__ __forceinline__ void for_each_four(const float4* row, int64_t fours, const F& f) {
#pragma unroll 4
  for (int64_t i = static_cast<int>(threadIdx.x); i < fours; i += kSoftmaxThreads) f(row[i], i);
}

__device__ __forceinline__ float largest_of(const float4& x) { return max(max(x.x, x.y), max(x.z, x.w)); }
__device__ __forceinline__ float sum_of(const float4& x, float shift) {
  return exp_of(x.x - shift) + exp_of(x.y - shift) + exp_of(x.z - shift) + exp_of(x.w - shift);
}

// rows: gridDim.x; a row has 4 * fours elements.
template <Passes kPasses>
__global__ void __launch_bounds__(kSoftmaxThreads) softmax_kernel(const float4* x, float4* out, int64_t fours) {
  extern __shared__ __align__(128) unsigned char smem_raw[];
  Stats* const meet = reinterpret_cast<Stats*>(smem_raw);
  float4* const kept = reinterpret_cast<float4*>(smem_raw + kSoftmaxThreads / 32 * sizeof(Stats));
  const int64_t first = static_cast<int>(blockIdx.x) * fours;
  const float4* const row = x + first;
  Stats stats;
  if constexpr (kPasses == Passes::kThree) {
    for_each_four(row, fours, [&](const float4& of, int64_t) { stats.row_max = max(stats.row_max, largest_of(of)); });
    const float row_max = of_block(stats, meet).row_max, shift = shift_of(row_max);
    stats = {row_max, 0.f};
    for_each_four(row, fours, [&](const float4& of, int64_t) { stats.row_sum += sum_of(of, shift); });
  } else if constexpr (kPasses == Passes::kTwo) {
    const auto element = [&](float value) {
      const float new_max = max(stats.row_max, value), shift = shift_of(new_max);
      stats.row_sum = stats.row_sum * exp_of(stats.row_max - shift) + exp_of(value - shift);
      stats.row_max = new_max;
    };
    for_each_four(row, fours,
                  [&](const float4& of, int64_t) { element(of.x), element(of.y), element(of.z), element(of.w); });
  } else {
    const auto block = [&](const float4& of, int64_t i) {
      if constexpr (kPasses == Passes::kOnChip) kept[i] = of;
      const float block_max = largest_of(of);
      stats = merged(stats, {block_max, sum_of(of, shift_of(block_max))});
    };
    for_each_four(row, fours, block);
  }
  stats = of_block(stats, meet);
  const float shift = shift_of(stats.row_max), inverse = 1.f / stats.row_sum;
  const float4* const source = kPasses == Passes::kOnChip ? kept : row;
  for_each_four(source, fours, [&](const float4& of, int64_t i) {
    out[first + i] = make_float4(exp_of(of.x - shift) * inverse, exp_of(of.y - shift) * inverse,
                                 exp_of(of.z - shift) * inverse, exp_of(of.w - shift) * inverse);
  });
}

}  // namespace flash_ext::ladder
