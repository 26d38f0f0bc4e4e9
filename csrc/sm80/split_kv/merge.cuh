// Adds up the parts of the keys that the forward for few queries leaves.
#pragma once

#include "../../common/mod_scores.cuh"
#include "../../common/sink.cuh"
#include "kernel.cuh"

namespace flash_ext::sm80 {

// A pass is of 128 columns. Up to head_dim_v 256, and 512 of latents.
inline constexpr int kMergePasses = 2, kLatentMergePasses = 4;
static_assert(128 * kMergePasses == kMergedColumns);
static_assert(kLatentMergePasses <= SplitTile::kWarps, "a warp stores a pass");
template <int kPasses>
using MergeShares = float4[SplitTile::kWarps][kPasses][32];

// What happens at the end of a row: its head's sink takes part, and the largest score is stored where it is wanted.
struct RowEnding {
  float unit_log2;  // of scores, as Modifiers has it
  const float* sinks = nullptr;
  float* row_max = nullptr;

  FLASH_EXT_HOST_DEVICE static RowEnding of(const Modifiers& m) { return {m.unit_log2, m.sinks, m.row_max}; }
  // As PlainRules::finish. Rows outside every sequence have no sink.
  __device__ float finish(const FwdParams& p, const RowState& state, const RowPlace& at, bool inside,
                          bool stores) const {
    float lse;
    float inverse = finish_row(state, unit_log2, lse);
    const float sink = sinks != nullptr && inside ? sinks[at.h] : -INFINITY;
    if (sink != -INFINITY) inverse *= add_sink(lse, sink);
    if (!stores) return inverse;
    const int64_t offset = at.lse_offset(p.problem);
    if (p.lse != nullptr) p.lse[offset] = lse;
    if (row_max != nullptr) row_max[offset] = state.largest * (unit_log2 * kLn2);
    return inverse;
  }
};

// Where a call has up to so many parts a warp puts a row together, else a CTA; plan/table.h counts CTAs by it. Both
// round alike, since the bits of a sequence must not depend on how many parts a call may have.
inline constexpr int kPartsOfWarp = SplitTile::kWarps;

// The row that this CTA or warp puts together.
__device__ __forceinline__ uint32_t merged_row(const SplitGrid& g) {
  return g.splits <= kPartsOfWarp ? blockIdx.x * SplitTile::kWarps + threadIdx.x / 32 : blockIdx.x;
}

// Puts the parts of a row together: of a CTA, warp i has the parts i, i + 4, ..., then the four are added in order; a
// warp alone adds up to four in order. `number`: of the row among those that have parts.
template <typename E, int kPasses>
__device__ __forceinline__ void merge_row(const FwdParams& p, const SplitGrid& g, const RowEnding& ending,
                                          const RowPlace& at, bool inside, int64_t number, int splits,
                                          MergeShares<kPasses>& shares) {
  constexpr int kWarps = SplitTile::kWarps;
  const bool by_warp = g.splits <= kPartsOfWarp;
  const int lane = threadIdx.x % 32, warp = by_warp ? 0 : threadIdx.x / 32, stride = by_warp ? 1 : kWarps;
  const float scale = ending.unit_log2;
  const auto state_of = [&](int part) { return row_states(p, g, part)[number]; };

  // Outputs are asked for before their weights are known: one wait for memory less of three.
  constexpr int kAtOnce = kPasses > 2 ? 2 : 4;
  float4 y[kAtOnce][kPasses];
  const auto ask = [&](int first) {
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n) {
      if (first + n * stride >= splits) continue;
      const float* row = partial_out(p, g, first + n * stride) + number * g.pitch + 4 * lane;
#pragma unroll
      for (int i = 0; i < kPasses; ++i) {
        if (128 * i + 4 * lane < g.pitch) y[n][i] = *reinterpret_cast<const float4*>(row + 128 * i);
      }
    }
  };
  ask(warp);
  const RowState own = lane < splits ? state_of(lane) : RowState{-INFINITY, 0.f};  // a lane keeps one of the first 32
  RowState all{own.largest, 0.f};
  for (int part = lane + 32; part < splits; part += 32) all.largest = fmaxf(all.largest, state_of(part).largest);
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    all.largest = fmaxf(all.largest, __shfl_xor_sync(ptx::kFullWarp, all.largest, step));
  }
  if (lane < splits) all.sum = own.sum * own.factor(all.largest, scale);
  for (int part = lane + 32; part < splits; part += 32) {
    const RowState s = state_of(part);
    all.sum += s.sum * s.factor(all.largest, scale);
  }
#pragma unroll
  for (int step = 16; step > 0; step /= 2) all.sum += __shfl_xor_sync(ptx::kFullWarp, all.sum, step);

  // use(pass, y, factor): what a part adds to four columns.
  const auto for_parts = [&](const auto& use) {
#pragma unroll 1
    for (int first = warp; first < splits; first += kAtOnce * stride) {
      if (first != warp) ask(first);
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n) {
        const int part = first + n * stride;
        if (part >= splits) break;
        RowState s{__shfl_sync(ptx::kFullWarp, own.largest, part % 32),
                   __shfl_sync(ptx::kFullWarp, own.sum, part % 32)};
        if (part >= 32) s = state_of(part);
        if (s.is_empty()) continue;  // its output need not be there
        const float factor = s.factor(all.largest, scale);
#pragma unroll
        for (int i = 0; i < kPasses; ++i) {
          if (128 * i + 4 * lane < g.pitch) use(i, y[n][i], factor);
        }
      }
    }
  };
  const auto store = [&](int pass, float (&sums)[4], float inverse) {
#pragma unroll
    for (float& y : sums) y *= inverse;
    const int col = 128 * pass + 4 * lane;
    if (col < p.problem.head_dim_v) store_quad<E>(p.out, at, col, p.problem.head_dim_v, sums);
  };
  if (by_warp) {
    float sums[kPasses][4] = {};
    for_parts([&](int i, const float4& y, float factor) {
      const float of_part[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
      for (int c = 0; c < 4; ++c) sums[i][c] = __fadd_rn(sums[i][c], __fmul_rn(of_part[c], factor));
    });
    const float inverse = ending.finish(p, all, at, inside, lane == 0);
#pragma unroll
    for (int i = 0; i < kPasses; ++i) store(i, sums[i], inverse);
    return;
  }
  float4 x[kPasses] = {};
  for_parts([&](int i, const float4& y, float factor) {
    x[i].x += y.x * factor, x[i].y += y.y * factor, x[i].z += y.z * factor, x[i].w += y.w * factor;
  });
#pragma unroll
  for (int i = 0; i < kPasses; ++i) shares[warp][i][lane] = x[i];
  __syncthreads();
  if (warp >= kPasses) return;
  const float inverse = ending.finish(p, all, at, inside, threadIdx.x == 0);
  float sums[4] = {};
#pragma unroll
  for (int n = 0; n < kWarps; ++n) {
    const float4 y = shares[n][warp][lane];
    sums[0] += y.x, sums[1] += y.y, sums[2] += y.z, sums[3] += y.w;
  }
  store(warp, sums, inverse);
}

template <typename E>
__global__ void __launch_bounds__(SplitTile::kThreads)
    fwd_merge_kernel(const __grid_constant__ FwdParams p, const __grid_constant__ SplitGrid g,
                     const __grid_constant__ RowEnding ending) {
  __shared__ MergeShares<kMergePasses> shares;
  ptx::wait_for_kernel_before();
  const uint32_t row = merged_row(g);
  if (row >= g.total_rows) return;
  const int token = static_cast<int>(divide(row, g.heads));
  const Problem& problem = p.problem;
  RowPlace at{0, token, static_cast<int>(row) - token * problem.num_heads};
  bool inside = true;
  if (problem.cu_seqlens_q == nullptr) {
    at.b = static_cast<int>(divide(token, g.queries));
    at.row = token - at.b * problem.seqlen_q;
  } else if (ending.sinks != nullptr) {
    inside = token >= problem.cu_seqlens_q[0] && token < problem.cu_seqlens_q[problem.batch];
  }
  merge_row<E, kMergePasses>(p, g, ending, at, inside, row, g.splits, shares);
}

}  // namespace flash_ext::sm80
