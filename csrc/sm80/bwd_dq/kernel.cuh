// dQ of the deterministic backward on mma.sync: one CTA owns a tile of queries and walks the keys, so every
// dQ element is summed by one thread in a fixed order, without workspace.
//
//   P = exp(scale * Q K^T - lse),  dS = P * (dO V^T - delta),  dQ = scale * dS K
//
// It recomputes S and dP, which bwd/kernel.cuh computes too: 7 matrix products in all instead of 5.
//
// Shared memory (bytes, D = padded head_dim):
//   Q, dO  [kBlockM][D]           2 x 2 D kBlockM
//   K, V   [kStages][kBlockN][D]  2 x 2 D kBlockN kStages
//   bias   a warp's rows x keys   (2 kBlockN + 16) kBlockM, with modifiers and where it fits
#pragma once

#include <type_traits>

#include "../../common/attn_mod.cuh"
#include "../../common/bias_stage.cuh"
#include "../../common/debug_delay.cuh"
#include "../../common/dropout.cuh"
#include "../../common/float_results.cuh"
#include "../../common/fragments.cuh"
#include "../../common/seqlen.cuh"
#include "../../common/tile_list.cuh"
#include "../../heuristics.h"
#include "../core/score_gradients.cuh"
#include "../core/wait_for_copies.cuh"

namespace flash_ext::sm80 {

template <typename E, int D, bool kWithModifiers = false>
struct BwdQTraits {
  using Element = E;
  static constexpr int kHeadDim = D;
  static constexpr bool kMods = kWithModifiers;
  static constexpr BwdQTile kTile = kMods ? bwd_q_mod_tile_sm80(D) : bwd_q_tile_sm80(D);
  static constexpr int kBlockM = kTile.block_m(), kBlockN = kTile.block_n, kStages = kTile.stages;
  static constexpr int kThreads = kTile.threads();
  static constexpr int kQBytes = 2 * D * kBlockM, kKvBytes = 2 * D * kBlockN;
  static constexpr int kBiasBytes =
      kMods ? bias_stage_bytes(kTile.warps, 16, kBlockN, kTile.smem_bytes(D), kSmemLimitSmall) : 0;
  static constexpr int kSmemBytes = kTile.smem_bytes(D) + kBiasBytes;
  using Stage = std::conditional_t<kBiasBytes != 0, BiasStage<16, kBlockN>, NoBiasStage>;
  using Tile = SmemTile<D>;
};

struct BwdQWork {
  Work w;
  const uint16_t* k;
  const uint16_t* v;
};

struct BwdQModWork : BwdQWork {
  SeqInfo seq;
  BlockRange range;
  TileList tile_list;
  DropKeys drop_keys;
};

template <typename T>
__device__ __forceinline__ void bwd_q_body(const BwdParams& p,
                                           const std::conditional_t<T::kMods, Modifiers, NoModifiers>& m,
                                           const Grid& grid) {
  using E = typename T::Element;
  constexpr int D = T::kHeadDim, kBlockM = T::kBlockM, kBlockN = T::kBlockN, kAhead = 3;
  extern __shared__ __align__(128) unsigned char smem_raw[];
  const int thread_idx = threadIdx.x, lane = thread_idx % 32, warp = thread_idx / 32;

  __shared__ std::conditional_t<T::kMods, BwdQModWork, BwdQWork> shared;
  if (thread_idx == 0) {
    int b = 0;
    Work w = decode_work<kBlockM, true, true>(p.problem, grid, T::kMods ? &b : nullptr);
    if constexpr (T::kMods) reorder_batch(m, w, p.problem.num_heads, b);
    const int h_k = static_cast<int>(divide(w.h, grid.shared));
    shared.w = w;
    shared.k = row_pointer(p.k, w.b, w.k.start, h_k);
    shared.v = row_pointer(p.v, w.b, w.k.start, h_k);
    if constexpr (T::kMods) {
      shared.seq = make_seq_info(p.problem, m, w, b);
      shared.range = BlockRange{0, 0};
      if (w.active)
        shared.range = ScoreMod{p.problem, m, shared.seq, w.h}.template kv_blocks<kBlockM, kBlockN>(w.block);
      shared.drop_keys.make(m, b, w.h);
    }
  }
  debug_delay();
  __syncthreads();
  debug_delay();
  const Work& w = shared.w;
  if (!w.active) return;
  const int first_row = w.block * kBlockM, rows = w.q.length - first_row;

  const uint32_t smem_q = ptx::smem_address(smem_raw);
  const uint32_t smem_do = smem_q + T::kQBytes;
  const uint32_t smem_k = smem_do + T::kQBytes;
  const uint32_t smem_v = smem_k + T::kStages * T::kKvBytes;
  const uint32_t stage_bias = smem_v + T::kStages * T::kKvBytes + warp * T::Stage::kBytes;
  const int warp_row = warp * 16;

  const auto load_kv = [&](int stage, int n_block) {
    const int first = n_block * kBlockN;
    const TileSource k{shared.k + first * p.k.row_stride, p.k.row_stride, p.problem.head_dim, p.k.aligned};
    load_tile<kBlockN, D, T::kThreads>(smem_k + stage * T::kKvBytes, k, w.k.length - first, thread_idx);
    const TileSource v{shared.v + first * p.v.row_stride, p.v.row_stride, p.problem.head_dim_v, p.v.aligned};
    load_tile<kBlockN, D, T::kThreads>(smem_v + stage * T::kKvBytes, v, w.k.length - first, thread_idx);
  };
  const auto load_queries = [&] {
    const TileSource q{row_pointer(p.q, w.b, w.q.start + first_row, w.h), p.q.row_stride, p.problem.head_dim,
                       p.q.aligned};
    const TileSource dout{row_pointer(p.dout, w.b, w.q.start + first_row, w.h), p.dout.row_stride, p.problem.head_dim_v,
                          p.dout.aligned};
    load_tile<kBlockM, D, T::kThreads>(smem_q, q, rows, thread_idx);
    load_tile<kBlockM, D, T::kThreads>(smem_do, dout, rows, thread_idx);
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

  // The products of one tile of keys; `gradients` turns S and dP into dS, in place of S, with what `prepare` asked for.
  const auto step = [&](int& stage, int next_block, const auto& prepare, const auto& gradients) {
    wait_for_copies();
    const uint32_t kv_at = stage * T::kKvBytes;
    if constexpr (T::kStages > 1) {
      stage ^= 1;
      if (next_block >= 0) {
        load_kv(stage, next_block);
        ptx::cp_async_commit();
      }
    }
    float acc_s[1][kBlockN / 8][4], acc_dp[1][kBlockN / 8][4];
    const auto fetched = prepare();
    multiply_transposed<E, D, kAhead>(acc_s, T::Tile::by_rows(smem_q, lane) + warp_row * T::Tile::kRowBytes,
                                      T::Tile::by_cols(smem_k + kv_at, lane));
    multiply_transposed<E, D, kAhead>(acc_dp, T::Tile::by_rows(smem_do, lane) + warp_row * T::Tile::kRowBytes,
                                      T::Tile::by_cols(smem_v + kv_at, lane));
    gradients(acc_s, acc_dp, fetched);
    multiply_accumulate<E, D, kAhead>(acc_dq, acc_s, T::Tile::by_rows(smem_k + kv_at, lane));
    if constexpr (T::kStages == 1) {
      debug_delay();
      __syncthreads();
      debug_delay();
      if (next_block >= 0) {
        load_kv(0, next_block);
        ptx::cp_async_commit();
      }
    }
  };

  if constexpr (T::kMods) {
    const ScoreMod score_mod{p.problem, m, shared.seq, w.h};
    const auto load_bias = [&](int n_block) {
      if (T::Stage::kBytes > 0 && m.bias.ptr != nullptr && m.bias.staged) {
        T::Stage::load(stage_bias, score_mod, first_row + warp_row, n_block * kBlockN);
        ptx::cp_async_commit();
      }
    };
    const int total = shared.range.end - shared.range.begin;
    bool has_q = false;
    int scanned = 0;
#pragma unroll 1
    do {
      if (warp == 0) {
        shared.tile_list.find(scanned, total, lane, [&](int x, ListedTile& tile) {
          tile.block = shared.range.end - 1 - x;
          return score_mod.template classify<kBlockM, kBlockN>(w.block, tile.block);
        });
      }
      debug_delay();
      __syncthreads();
      debug_delay();
      scanned = shared.tile_list.scanned;
      const int count = shared.tile_list.count;
      if (count > 0) {
        if (!has_q) load_queries();
        has_q = true;
        load_kv(0, shared.tile_list[0].block);
        load_bias(shared.tile_list[0].block);
        ptx::cp_async_commit();
      }
      int stage = 0;
#pragma unroll 1
      for (int it = 0; it < count; ++it) {
        const ListedTile tile = shared.tile_list[it];
        const int next = it + 1 < count ? shared.tile_list[it + 1].block : -1;
        const int row0 = first_row + warp_row, col0 = tile.block * kBlockN;
        step(
            stage, next, [&] { return fetch_mask<16, kBlockN>(score_mod, row0, col0, tile.tests); },
            [&](auto& acc_s, auto& acc_dp, const auto& mask) {
              modified_score_gradients<E, typename T::Stage, true>(acc_s, acc_dp, score_mod, stats, tile.tests, mask,
                                                                   row0, col0, stage_bias, shared.drop_keys);
              if (next >= 0) {
                __syncwarp();
                load_bias(next);
              }
            });
      }
      debug_delay();
      __syncthreads();  // everybody has left this segment's list and tiles
      debug_delay();
    } while (scanned < total);
  } else {
    const AttnMod mod{p.problem, w.q.length, w.k.length};
    const BlockRange range = mod.template kv_blocks<kBlockM, kBlockN>(w.block);
    if (range.begin < range.end) {
      load_queries();
      load_kv(0, range.end - 1);
      ptx::cp_async_commit();
    }
    int stage = 0;
#pragma unroll 1
    for (int n_block = range.end - 1; n_block >= range.begin; --n_block) {
      const auto nothing = [] { return 0; };
      step(stage, n_block > range.begin ? n_block - 1 : -1, nothing, [&](auto& acc_s, auto& acc_dp, int) {
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
      });
    }
  }
  if (p.dq.is_float) {
    store_float_rows<D / 8, false>(p.dq, w.b, w.q, w.h, first_row + warp_row + lane / 4, p.problem.head_dim, lane,
                                   [&](int j, int i) { return acc_dq[0][j][i] * p.problem.scale; });
    return;
  }
  // Each warp reuses its own rows of Q for the result.
#pragma unroll
  for (int db = 0; db < D / 16; ++db) {
    const float scale = p.problem.scale;
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

template <typename T>
__global__ void __launch_bounds__(T::kThreads, 1)
    bwd_q_kernel(const __grid_constant__ BwdParams p, const __grid_constant__ Grid grid) {
  bwd_q_body<T>(p, NoModifiers{}, grid);
}

template <typename T>
__global__ void __launch_bounds__(T::kThreads, 1)
    bwd_q_mod_kernel(const __grid_constant__ BwdParams p, const __grid_constant__ Modifiers m,
                     const __grid_constant__ Grid grid) {
  bwd_q_body<T>(p, m, grid);
}

}  // namespace flash_ext::sm80
