// Adds up the parts of the keys that the forward for few queries leaves.
#pragma once

#include "kernel.cuh"

namespace flash_ext::sm80 {

inline constexpr int kMergePasses = 2;  // of 128 columns
using MergeShares = float4[SplitTile::kWarps][kMergePasses][32];

// Puts the parts of a row together: warp i has the parts i, i + 4, ..., then the four are added in order. `number`: of the
// row among those that have parts.
template <typename E>
__device__ __forceinline__ void merge_row(const FwdParams& p, const SplitGrid& g, const RowPlace& at, int64_t number,
                                          int splits, MergeShares& shares) {
  constexpr int kWarps = SplitTile::kWarps, kPasses = kMergePasses;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const float scale = p.problem.abs_scale_log2;
  const auto state_of = [&](int part) { return row_states(p, g, part)[number]; };

  RowState all{-INFINITY, 0.f};
  for (int part = lane; part < splits; part += 32) all.largest = fmaxf(all.largest, state_of(part).largest);
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    all.largest = fmaxf(all.largest, __shfl_xor_sync(ptx::kFullWarp, all.largest, step));
  }
  for (int part = lane; part < splits; part += 32) {
    const RowState s = state_of(part);
    all.sum += s.sum * s.factor(all.largest, scale);
  }
#pragma unroll
  for (int step = 16; step > 0; step /= 2) all.sum += __shfl_xor_sync(ptx::kFullWarp, all.sum, step);

  float4 x[kPasses] = {};
#pragma unroll 8
  for (int part = warp; part < splits; part += kWarps) {
    if (state_of(part).is_empty()) continue;  // its output need not be there
    const float factor = state_of(part).factor(all.largest, scale);
    const float* row = partial_out(p, g, part) + number * g.pitch + 4 * lane;
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {
      if (128 * i + 4 * lane >= g.pitch) continue;
      const float4 y = *reinterpret_cast<const float4*>(row + 128 * i);
      x[i].x += y.x * factor, x[i].y += y.y * factor, x[i].z += y.z * factor, x[i].w += y.w * factor;
    }
  }
#pragma unroll
  for (int i = 0; i < kPasses; ++i) shares[warp][i][lane] = x[i];
  __syncthreads();
  if (warp >= kPasses) return;
  float lse;
  const float inverse = finish_row(all, scale, lse);
  if (threadIdx.x == 0 && p.lse != nullptr) p.lse[at.lse_offset(p.problem)] = lse;
  float sums[4] = {};
#pragma unroll
  for (int n = 0; n < kWarps; ++n) {
    const float4 y = shares[n][warp][lane];
    sums[0] += y.x, sums[1] += y.y, sums[2] += y.z, sums[3] += y.w;
  }
#pragma unroll
  for (float& y : sums) y *= inverse;
  const int col = 128 * warp + 4 * lane;
  if (col < p.problem.head_dim_v) store_quad<E>(p.out, at, col, p.problem.head_dim_v, sums);
}

// A CTA a row.
template <typename E>
__global__ void __launch_bounds__(SplitTile::kThreads)
    fwd_merge_kernel(const __grid_constant__ FwdParams p, const __grid_constant__ SplitGrid g) {
  __shared__ MergeShares shares;
  ptx::wait_for_kernel_before();
  const int token = static_cast<int>(divide(blockIdx.x, g.heads));
  RowPlace at{0, token, static_cast<int>(blockIdx.x) - token * p.problem.num_heads};
  if (p.problem.cu_seqlens_q == nullptr) {
    at.b = static_cast<int>(divide(token, g.queries));
    at.row = token - at.b * p.problem.seqlen_q;
  }
  merge_row<E>(p, g, at, blockIdx.x, g.splits, shares);
}

}  // namespace flash_ext::sm80
