// FlashAttention-2 (Dao 2023, Algorithm 1): query tiles outside, key tiles inside, a warp owns rows ("split-Q").
//
// Three of its ideas can be taken away one at a time: with one CTA a head (Problem::ctas_per_head = 1) nothing is parallel
// over the sequence; with kNormaliseEachStep the accumulator is divided after every key tile, as FlashAttention does.
// Numbered comments are the lines of the algorithm.
#pragma once

#include "problem.cuh"

namespace flash_ext::ladder {

template <int D_, bool kNormaliseEachStep_>
struct Flash2 {
  static constexpr int D = D_;
  static constexpr bool kNormaliseEachStep = kNormaliseEachStep_;
  static constexpr int kWarps = 4, kThreads = 32 * kWarps, kBlockM = 128, kBlockN = D == 128 ? 32 : 64;
  static constexpr int kMBlocks = kBlockM / kWarps / 16;  // of 16 rows, for a warp
  static constexpr int kQBytes = kBlockM * D * 2, kTileBytes = kBlockN * D * 2;
  static constexpr int kSmemBytes = kQBytes + 4 * kTileBytes;  // K and V twice
  static constexpr int kAhead = 1;
};

// A thread's rows: maximum of the scores, and sum of the exponentials of this thread's keys or of all.
template <int kMBlocks>
struct RowState {
  float row_max[2 * kMBlocks], row_sum[2 * kMBlocks];

  __device__ __forceinline__ RowState() {
#pragma unroll
    for (int r = 0; r < 2 * kMBlocks; ++r) row_max[r] = -INFINITY, row_sum[r] = 0.f;
  }
};

// 9 and the first half of 10: scores become weights, and what was accumulated so far is rescaled.
template <typename T, int kN>
__device__ __forceinline__ void update(RowState<T::kMBlocks>& state, float (&s)[T::kMBlocks][kN][4],
                                       float (&acc)[T::kMBlocks][T::D / 8][4], float scale_log2) {
#pragma unroll
  for (int m = 0; m < T::kMBlocks; ++m) {
    float factor[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float &row_max = state.row_max[2 * m + half], &row_sum = state.row_sum[2 * m + half];
      // Finite: every tile has at least one key.
      const float new_max = max(row_max, quad_max(largest(s[m], half)));
      const float rescale = ptx::ex2((row_max - new_max) * scale_log2);
      const float sum = exponentials(s[m], half, scale_log2, new_max * scale_log2);
      row_max = new_max;
      if constexpr (T::kNormaliseEachStep) {
        const float new_sum = row_sum * rescale + quad_sum(sum);
        const float inverse = ptx::reciprocal(new_sum);
        factor[half] = row_sum * rescale * inverse;
        row_sum = new_sum;
#pragma unroll
        for (int n = 0; n < kN; ++n) s[m][n][2 * half] *= inverse, s[m][n][2 * half + 1] *= inverse;
      } else {
        factor[half] = rescale;
        row_sum = row_sum * rescale + sum;
      }
    }
#pragma unroll
    for (int j = 0; j < T::D / 8; ++j) scale_block(acc[m][j], factor[0], factor[1]);
  }
}

// 12 to 15: the only division of rows, and the only time that the output leaves the chip.
template <typename T>
__device__ __forceinline__ void finish(const Problem& p, RowState<T::kMBlocks>& state,
                                       float (&acc)[T::kMBlocks][T::D / 8][4], uint32_t smem_q, int64_t head,
                                       int first_row, int warp, int lane) {
  constexpr int D = T::D, kRows = 16 * T::kMBlocks;
  using Tile = SmemTile<D>;
  const uint32_t lane_base = Tile::by_rows(smem_q, lane);
#pragma unroll
  for (int m = 0; m < T::kMBlocks; ++m) {
    float factor[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float sum = state.row_sum[2 * m + half];
      if constexpr (!T::kNormaliseEachStep) sum = quad_sum(sum);
      factor[half] = T::kNormaliseEachStep ? 1.f : ptx::reciprocal(sum);
      const int row = first_row + warp * kRows + m * 16 + half * 8 + lane / 4;
      if (p.lse != nullptr && lane % 4 == 0 && row < p.seqlen_q) {
        p.lse[head * p.seqlen_q + row] = state.row_max[2 * m + half] * p.scale + logf(sum);
      }
    }
#pragma unroll
    for (int j = 0; j < D / 8; ++j) scale_block(acc[m][j], factor[0], factor[1]);
    // Through the warp's own rows of Q, which nobody else reads.
#pragma unroll
    for (int db = 0; db < D / 16; ++db) {
      const int row0 = warp * kRows + m * 16;
      put_block<Element>(Tile::block(lane_base, row0, db), acc[m][2 * db], acc[m][2 * db + 1], lane);
    }
  }
  __syncwarp();
#pragma unroll 4
  for (int at = lane; at < kRows * Tile::kChunks; at += 32) {
    const int row = warp * kRows + at / Tile::kChunks, chunk = at % Tile::kChunks;
    if (first_row + row >= p.seqlen_q) continue;
    uint16_t* const target = p.out + (head * p.seqlen_q + first_row + row) * D + chunk * 8;
    *reinterpret_cast<float4*>(target) = ptx::load_shared(smem_q + Tile::offset(row, chunk));
  }
}

template <typename T>
__global__ void __launch_bounds__(T::kThreads) flash2_kernel(const Problem p) {
  constexpr int D = T::D, kBlockM = T::kBlockM, kBlockN = T::kBlockN;
  using Tile = SmemTile<D>;
  extern __shared__ __align__(128) unsigned char smem_raw[];
  const uint32_t smem_q = ptx::smem_address(smem_raw), smem_k = smem_q + T::kQBytes;
  const uint32_t smem_v = smem_k + 2 * T::kTileBytes;
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  const int64_t head = static_cast<int>(blockIdx.x) / p.ctas_per_head;
  const int num_m = ceil_div(p.seqlen_q, kBlockM), num_n = ceil_div(p.seqlen_k, kBlockN);
  const float scale_log2 = p.scale * kLog2e;
  const auto load_keys = [&](const uint16_t* x, uint32_t to, int n) {
    if (n < num_n) {
      load_tile<kBlockN, D, T::kThreads>(to + (n & 1) * T::kTileBytes, rows_of<D>(x, head, p.seqlen_k, n * kBlockN),
                                         p.seqlen_k - n * kBlockN, thread);
    }
    ptx::cp_async_commit();  // a group without copies where there are no more keys, so that waits count the same
  };

  for (int m = static_cast<int>(blockIdx.x) % p.ctas_per_head; m < num_m; m += p.ctas_per_head) {  // 3
    __syncthreads();  // the tile before is done with shared memory
    load_tile<kBlockM, D, T::kThreads>(smem_q, rows_of<D>(p.q, head, p.seqlen_q, m * kBlockM), p.seqlen_q - m * kBlockM,
                                       thread);  // 4
    load_keys(p.k, smem_k, 0);
    load_keys(p.v, smem_v, 0);
    float acc[T::kMBlocks][D / 8][4];
    clear(acc);  // 5
    RowState<T::kMBlocks> state;
    const uint32_t q_lane = Tile::by_rows(smem_q, lane) + warp * 16 * T::kMBlocks * Tile::kRowBytes;
    for (int n = 0; n < num_n; ++n) {  // 6
      const uint32_t stage = (n & 1) * T::kTileBytes;
      ptx::cp_async_wait<1>();  // K of this step
      __syncthreads();
      load_keys(p.k, smem_k, n + 1);  // 7
      float s[T::kMBlocks][kBlockN / 8][4];
      multiply_transposed<Element, D, T::kAhead>(s, q_lane, Tile::by_cols(smem_k + stage, lane));  // 8
      if (p.seqlen_k - n * kBlockN < kBlockN) hide_tail(s, p.seqlen_k - n * kBlockN, lane);
      update<T>(state, s, acc, scale_log2);
      ptx::cp_async_wait<1>();  // V of this step
      __syncthreads();
      load_keys(p.v, smem_v, n + 1);
      multiply_accumulate<Element, D, T::kAhead>(acc, s, Tile::by_rows(smem_v + stage, lane));  // 10
    }
    finish<T>(p, state, acc, smem_q, head, m * kBlockM, warp, lane);
  }
}

}  // namespace flash_ext::ladder
