// dQ of the deterministic backward on mma.sync: one CTA owns a tile of queries and walks the keys, so every
// dQ element is summed by one thread in a fixed order, without workspace.
//
//   P = exp(scale * Q K^T - lse),  dS = P * (dO V^T - delta),  dQ = scale * dS K
//
// It recomputes S and dP, which bwd.cuh computes too: 7 matrix products in all instead of 5.
//
// Shared memory (bytes, D = padded head_dim):
//   Q, dO  [kBlockM][D]           2 x 2 D kBlockM
//   K, V   [kStages][kBlockN][D]  2 x 2 D kBlockN kStages
#pragma once

#include "../common/attn_mod.cuh"
#include "../common/seqlen.cuh"
#include "../common/fragments.cuh"
#include "../heuristics.h"

namespace flash_ext::sm80 {

template <typename E, int D>
struct BwdQTraits {
  using Element = E;
  static constexpr int kHeadDim = D;
  static constexpr BwdQTile kTile = bwd_q_tile_sm80(D);
  static constexpr int kBlockM = kTile.block_m(), kBlockN = kTile.block_n, kStages = kTile.stages;
  static constexpr int kThreads = kTile.threads();
  static constexpr int kQBytes = 2 * D * kBlockM, kKvBytes = 2 * D * kBlockN;
  using Tile = SmemTile<D>;
};

struct BwdQWork {
  Work w;
  const uint16_t* k;
  const uint16_t* v;
};

template <typename T>
__global__ void __launch_bounds__(T::kThreads, 1)
    bwd_q_kernel(const __grid_constant__ BwdParams p, const __grid_constant__ Grid grid) {
  using E = typename T::Element;
  constexpr int D = T::kHeadDim, kBlockM = T::kBlockM, kBlockN = T::kBlockN, kAhead = 3;
  extern __shared__ __align__(128) unsigned char smem_raw[];
  const int thread_idx = threadIdx.x, lane = thread_idx % 32, warp = thread_idx / 32;

  __shared__ BwdQWork shared;
  if (thread_idx == 0) {
    const Work w = decode_work<kBlockM, true, true>(p.problem, grid);
    const int h_k = static_cast<int>(divide(w.h, grid.shared));
    shared.w = w;
    shared.k = row_pointer(p.k, w.b, w.k.start, h_k);
    shared.v = row_pointer(p.v, w.b, w.k.start, h_k);
  }
  __syncthreads();
  const Work& w = shared.w;
  if (!w.active) return;
  const AttnMod mod{p.problem, w.q.length, w.k.length};
  const BlockRange range = mod.template kv_blocks<kBlockM, kBlockN>(w.block);
  const int first_row = w.block * kBlockM, rows = w.q.length - first_row;

  const uint32_t smem_q = ptx::smem_address(smem_raw);
  const uint32_t smem_do = smem_q + T::kQBytes;
  const uint32_t smem_k = smem_do + T::kQBytes;
  const uint32_t smem_v = smem_k + T::kStages * T::kKvBytes;
  const int warp_row = warp * 16;

  const auto load_kv = [&](int stage, int n_block) {
    const int first = n_block * kBlockN;
    const TileSource k{shared.k + first * p.k.row_stride, p.k.row_stride, p.problem.head_dim, p.k.aligned};
    load_tile<kBlockN, D, T::kThreads>(smem_k + stage * T::kKvBytes, k, w.k.length - first, thread_idx);
    const TileSource v{shared.v + first * p.v.row_stride, p.v.row_stride, p.problem.head_dim_v, p.v.aligned};
    load_tile<kBlockN, D, T::kThreads>(smem_v + stage * T::kKvBytes, v, w.k.length - first, thread_idx);
  };

  float acc_dq[1][D / 8][4];
  clear(acc_dq);
  float2 stats[2];  // (lse * log2 e, delta) of this thread's rows
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int r = warp_row + half * 8 + lane / 4;
    const float2* at = reinterpret_cast<const float2*>(p.row_stats) + row_stat_offset(p.problem, w, w.h) + first_row;
    stats[half] = r < rows ? at[r] : make_float2(INFINITY, 0.f);
  }

  if (range.begin < range.end) {
    const TileSource q{row_pointer(p.q, w.b, w.q.start + first_row, w.h), p.q.row_stride, p.problem.head_dim, p.q.aligned};
    const TileSource dout{row_pointer(p.dout, w.b, w.q.start + first_row, w.h), p.dout.row_stride, p.problem.head_dim_v,
                          p.dout.aligned};
    load_tile<kBlockM, D, T::kThreads>(smem_q, q, rows, thread_idx);
    load_tile<kBlockM, D, T::kThreads>(smem_do, dout, rows, thread_idx);
    load_kv(0, range.end - 1);
    ptx::cp_async_commit();
  }
  int stage = 0;
#pragma unroll 1
  for (int n_block = range.end - 1; n_block >= range.begin; --n_block) {
    ptx::cp_async_wait<0>();
    __syncthreads();
    const uint32_t kv_at = stage * T::kKvBytes;
    if constexpr (T::kStages > 1) {
      stage ^= 1;
      if (n_block > range.begin) {
        load_kv(stage, n_block - 1);
        ptx::cp_async_commit();
      }
    }
    float acc_s[1][kBlockN / 8][4], acc_dp[1][kBlockN / 8][4];
    multiply_transposed<E, D, kAhead>(acc_s, T::Tile::by_rows(smem_q, lane) + warp_row * T::Tile::kRowBytes,
                       T::Tile::by_cols(smem_k + kv_at, lane));
    multiply_transposed<E, D, kAhead>(acc_dp, T::Tile::by_rows(smem_do, lane) + warp_row * T::Tile::kRowBytes,
                       T::Tile::by_cols(smem_v + kv_at, lane));
    const bool partial = mod.template kind<kBlockM, kBlockN>(w.block, n_block) == TileKind::kPartial;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const VisibleKeys keys = mod.visible(first_row + warp_row + half * 8 + lane / 4);
#pragma unroll
      for (int nb = 0; nb < kBlockN / 8; ++nb) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          float& s = acc_s[0][nb][2 * half + c];
          s = ptx::ex2(fmaf(s, p.problem.scale_log2, -stats[half].x));
          if (partial && !keys.contains(n_block * kBlockN + nb * 8 + (lane % 4) * 2 + c)) s = 0.f;
          s *= acc_dp[0][nb][2 * half + c] - stats[half].y;
        }
      }
    }
    multiply_accumulate<E, D, kAhead>(acc_dq, acc_s, T::Tile::by_rows(smem_k + kv_at, lane));
    if constexpr (T::kStages == 1) {
      __syncthreads();
      if (n_block > range.begin) {
        load_kv(0, n_block - 1);
        ptx::cp_async_commit();
      }
    }
  }
  // Each warp reuses its own rows of Q for the result.
#pragma unroll
  for (int db = 0; db < D / 16; ++db) {
    const float scale = p.problem.softmax_scale;
    scale_block(acc_dq[0][2 * db], scale, scale);
    scale_block(acc_dq[0][2 * db + 1], scale, scale);
    put_block<E>(T::Tile::block(T::Tile::by_rows(smem_q, lane) + warp_row * T::Tile::kRowBytes, 0, db),
                 acc_dq[0][2 * db], acc_dq[0][2 * db + 1], lane);
  }
  __syncwarp();
  const TileDestination dst{row_pointer(p.dq, w.b, w.q.start + first_row, w.h), p.dq.row_stride, p.problem.head_dim,
                            p.dq.aligned};
  store_tile<16, D, 32>(dst, smem_q, warp_row, rows, lane);
}

}  // namespace flash_ext::sm80
