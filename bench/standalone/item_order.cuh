// The items of a grid, those with most tiles to visit first: a trial.
//
// Where the rows of a random block map differ, long items that begin last leave multiprocessors idle. Heads stay in the
// groups of grid.h, whose shared rows fit the L2 cache, so items are sorted inside a group. The last two groups count
// as one: the last alone may be less than a wave, too few for short items to even out long ones.
#pragma once

#include "common/seqlen.cuh"
#include "common/visits.cuh"
#include "grid.h"
#include "launch.h"

namespace flash_ext::sm80 {

inline constexpr int kCountThreads = 256, kSortThreads = 512, kSortBuckets = 256;

// One warp an item: its tiles to visit.
template <typename T, bool kOverQueries, typename Params>
__global__ void __launch_bounds__(kCountThreads)
    count_visits_kernel(const __grid_constant__ Params p, const __grid_constant__ Modifiers m,
                        const __grid_constant__ Grid grid, uint32_t* counts) {
  const uint32_t item = blockIdx.x * (kCountThreads / 32) + threadIdx.x / 32;
  if (item >= static_cast<uint32_t>(grid.ctas)) return;
  constexpr int kBlock = kOverQueries ? T::kBlockM : T::kBlockN;
  const int lane = threadIdx.x % 32, group = kOverQueries ? 1 : static_cast<int>(grid.shared.divisor);
  int b = 0;
  Work w = decode_index<kBlock, kOverQueries, kOverQueries>(item, p.problem, grid, &b);
  reorder_batch(m, w, kOverQueries ? p.problem.num_heads : p.problem.num_heads_k, b);
  const Seat seat = make_seat(p.problem, m, w, b);
  uint32_t visited = 0;
  for (int h = w.h * group; w.active && h < (w.h + 1) * group; ++h) {
    const Scores scores{p.problem, m, seat, h};
    BlockRange range;
    if constexpr (kOverQueries) range = scores.template kv_blocks<T::kBlockM, T::kBlockN>(w.block);
    else range = scores.template q_blocks<T::kBlockM, T::kBlockN>(w.block);
    for (int first = range.begin; first < range.end; first += 32) {
      const int n = first + lane;
      const auto tests = [&] {
        if constexpr (kOverQueries) return scores.template visit<T::kBlockM, T::kBlockN, 4>(w.block, n);
        else return scores.template visit<T::kBlockM, T::kBlockN, 4>(n, w.block);
      };
      visited += __popc(__ballot_sync(0xffffffffu, n < range.end && tests() != kSkipTile));
    }
  }
  if (lane == 0) counts[item] = visited;
}

// One CTA a group of heads. Items of about the same count stay about in their order.
__global__ void __launch_bounds__(kSortThreads)
    sort_items_kernel(const uint32_t* counts, uint32_t* order, uint32_t group_items, uint32_t items) {
  __shared__ uint32_t buckets[kSortBuckets], longest;
  const uint32_t first = blockIdx.x * group_items;
  const uint32_t end = blockIdx.x + 1 == gridDim.x ? items : first + group_items;
  if (threadIdx.x < kSortBuckets) buckets[threadIdx.x] = 0;
  if (threadIdx.x == 0) longest = 0;
  __syncthreads();
  for (uint32_t i = first + threadIdx.x; i < end; i += kSortThreads) atomicMax(&longest, counts[i]);
  __syncthreads();
  const auto bucket = [&](uint32_t i) {
    return static_cast<uint32_t>(uint64_t{longest - counts[i]} * (kSortBuckets - 1) / max(longest, 1u));
  };
  for (uint32_t i = first + threadIdx.x; i < end; i += kSortThreads) atomicAdd(&buckets[bucket(i)], 1u);
  __syncthreads();
  // Where each bucket begins: eight a lane of the first warp.
  if (threadIdx.x < 32) {
    constexpr int kALane = kSortBuckets / 32;
    uint32_t own[kALane], sum = 0;
#pragma unroll
    for (int i = 0; i < kALane; ++i) own[i] = sum, sum += buckets[threadIdx.x * kALane + i];
    uint32_t before = sum;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const uint32_t other = __shfl_up_sync(0xffffffffu, before, step);
      if (static_cast<int>(threadIdx.x) >= step) before += other;
    }
#pragma unroll
    for (int i = 0; i < kALane; ++i) buckets[threadIdx.x * kALane + i] = before - sum + own[i];
  }
  __syncthreads();
  for (uint32_t i = first + threadIdx.x; i < end; i += kSortThreads) {
    order[first + atomicAdd(&buckets[bucket(i)], 1u)] = i;
  }
}

// `counts`: a word an item of scratch memory.
template <typename T, bool kOverQueries, typename Params>
std::string sort_items(const Params& p, const Modifiers& m, const Grid& g, uint32_t* counts, uint32_t* order) {
  constexpr int kAtOnce = kCountThreads / 32;
  const std::string error = launch("count_visits", count_visits_kernel<T, kOverQueries, Params>,
                                   (g.ctas + kAtOnce - 1) / kAtOnce, kCountThreads, 0, p.stream, p, m, g, counts);
  if (!error.empty()) return error;
  const uint32_t items = static_cast<uint32_t>(g.ctas), group = g.group_tiles.divisor;
  return launch("sort_items", sort_items_kernel, std::max(1u, items / group),
                kSortThreads, 0, p.stream, counts, order, group, items);
}

}  // namespace flash_ext::sm80
