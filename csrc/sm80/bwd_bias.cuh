// Gradient of an additive bias, and of ALiBi slopes, on mma.sync. One CTA owns a tile of the result and walks
// whatever the bias is broadcast over, recomputing the scores, so that every element is summed by one thread in a
// fixed order and memory is that of the result:
//
//   dS = P * (keep * dO V^T - delta),  dbias = sum of dS over broadcast dimensions,
//   dslope = -sum of dS * |row + shift - key|
//
// Two matrix products more than a backward without it. Where the rows are broadcast there may be few CTAs, so they
// are split over parts that the caller adds in order.
//
// Shared memory (bytes, D = padded head_dim):
//   Q, dO  [kBlockM][D]  2 x 2 D kBlockM
//   K, V   [kBlockN][D]  2 x 2 D kBlockN
//   bias   a warp's rows x keys, where it fits
#pragma once

#include "bwd_q.cuh"

namespace flash_ext::sm80 {

template <typename E, int D>
struct BwdBiasTraits {
  using Element = E;
  static constexpr int kHeadDim = D;
  static constexpr BwdQTile kTile = bwd_bias_tile_sm80(D);
  static constexpr int kBlockM = kTile.block_m(), kBlockN = kTile.block_n;
  static constexpr int kThreads = kTile.threads(), kWarps = kTile.warps;
  static constexpr int kQBytes = 2 * D * kBlockM, kKvBytes = 2 * D * kBlockN;
  static constexpr int kBiasBytes = bias_stage_bytes(kTile.warps, 16, kBlockN, kTile.smem_bytes(D), kSmemLimitSmall);
  static constexpr int kSmemBytes = kTile.smem_bytes(D) + kBiasBytes;
  using Stage = std::conditional_t<kBiasBytes != 0, BiasStage<16, kBlockN>, NoBiasStage>;
  using Tile = SmemTile<D>;
};

// Tiles of the result, times the parts that its rows are split into.
struct BiasOwners {
  int tiles_m, tiles_n;
  template <typename T>
  __host__ __device__ static BiasOwners of(const BiasGradient& g) {
    return {g.sum_rows ? 1 : (g.rows + T::kBlockM - 1) / T::kBlockM,
            g.sum_cols ? 1 : (g.cols + T::kBlockN - 1) / T::kBlockN};
  }
  __host__ __device__ int64_t ctas(const BiasGradient& g) const {
    return int64_t{1} * tiles_m * tiles_n * g.heads * g.batch * g.splits;
  }
};

template <typename T>
__global__ void __launch_bounds__(T::kThreads, 2)
    bwd_bias_kernel(const __grid_constant__ BwdParams p, const __grid_constant__ Modifiers m,
                    const __grid_constant__ BiasGradient g) {
  using E = typename T::Element;
  constexpr int D = T::kHeadDim, kBlockM = T::kBlockM, kBlockN = T::kBlockN, kAhead = 3;
  extern __shared__ __align__(128) unsigned char smem_raw[];
  // Loops four deep would keep all of this in registers, which spills.
  __shared__ struct {
    int n, m, h, b, split;  // the tile of the result, and its part of the rows
    Work w;                 // of the sequence at hand
    Seat seat;
    DropKeys drop_keys;
  } own;
  __shared__ float sums[T::kWarps][kBlockN];
  const int thread_idx = threadIdx.x, lane = thread_idx % 32, warp = thread_idx / 32;
  if (thread_idx == 0) {
    const BiasOwners owners = BiasOwners::of<T>(g);
    uint32_t rest = blockIdx.x;
    const auto next_digit = [&](int base) {
      const uint32_t digit = rest % static_cast<uint32_t>(base);
      rest /= static_cast<uint32_t>(base);
      return static_cast<int>(digit);
    };
    own.n = next_digit(owners.tiles_n);
    own.m = next_digit(owners.tiles_m);
    own.h = next_digit(g.heads);
    own.b = next_digit(g.batch);
    own.split = static_cast<int>(rest);
  }
  __syncthreads();

  const uint32_t smem_q = ptx::smem_address(smem_raw);
  const uint32_t smem_do = smem_q + T::kQBytes;
  const uint32_t smem_k = smem_do + T::kQBytes;
  const uint32_t smem_v = smem_k + T::kKvBytes;
  const uint32_t stage_bias = smem_v + T::kKvBytes + warp * T::Stage::kBytes;
  const int warp_row = warp * 16;

  float acc[kBlockN / 8][4];
#pragma unroll
  for (int nb = 0; nb < kBlockN / 8; ++nb) {
#pragma unroll
    for (int i = 0; i < 4; ++i) acc[nb][i] = 0.f;
  }

#pragma unroll 1
  for (int b = g.batch == 1 ? 0 : own.b; b < (g.batch == 1 ? p.problem.batch : own.b + 1); ++b) {
    __syncthreads();
    if (thread_idx == 0) {
      const bool packed = p.problem.cu_seqlens_q != nullptr;
      Work w{};
      w.b = packed ? 0 : b;
      w.q = packed ? packed_span(p.problem.cu_seqlens_q, b, p.problem.total_q) : Span{0, p.problem.seqlen_q};
      w.k = packed ? packed_span(p.problem.cu_seqlens_k, b, p.problem.total_k) : Span{0, p.problem.seqlen_k};
      own.w = w;
      own.seat = make_seat(p.problem, m, w, b);
    }
    __syncthreads();
    const Work& w = own.w;
#pragma unroll 1
    for (int h = g.heads == 1 ? 0 : own.h; h < (g.heads == 1 ? p.problem.num_heads : own.h + 1); ++h) {
      const Scores scores{p.problem, m, own.seat, h};
      if (m.rng != nullptr) {
        __syncthreads();
        if (thread_idx == 0) own.drop_keys.make(m, b, h);
        __syncthreads();
      }
#pragma unroll 1
      for (int m_block = g.sum_rows ? own.split : own.m; g.sum_rows || m_block <= own.m; m_block += g.splits) {
        const int first_row = m_block * kBlockM, rows = w.q.length - first_row;
        if (rows <= 0) break;
        bool has_q = false;
#pragma unroll 1
        for (int n_block = g.sum_cols ? 0 : own.n; g.sum_cols || n_block <= own.n; ++n_block) {
          const int first_key = n_block * kBlockN, keys = w.k.length - first_key;
          if (keys <= 0) break;
          const TileTests tests = scores.template visit<kBlockM, kBlockN>(m_block, n_block);
          if (tests == kSkipTile) continue;
          __syncthreads();  // everybody has left the tiles before
          if (!has_q) {
            const TileSource q{row_pointer(p.q, w.b, w.q.start + first_row, h), p.q.row_stride, p.problem.head_dim,
                               p.q.aligned};
            const TileSource dout{row_pointer(p.dout, w.b, w.q.start + first_row, h), p.dout.row_stride,
                                  p.problem.head_dim_v, p.dout.aligned};
            load_tile<kBlockM, D, T::kThreads>(smem_q, q, rows, ptx::fresh_thread_idx());
            load_tile<kBlockM, D, T::kThreads>(smem_do, dout, rows, ptx::fresh_thread_idx());
            has_q = true;
          }
          const int h_k = h / (p.problem.num_heads / p.problem.num_heads_k);
          const TileSource k{row_pointer(p.k, w.b, w.k.start + first_key, h_k), p.k.row_stride,
                             p.problem.head_dim, p.k.aligned};
          const TileSource v{row_pointer(p.v, w.b, w.k.start + first_key, h_k), p.v.row_stride,
                             p.problem.head_dim_v, p.v.aligned};
          load_tile<kBlockN, D, T::kThreads>(smem_k, k, keys, ptx::fresh_thread_idx());
          load_tile<kBlockN, D, T::kThreads>(smem_v, v, keys, ptx::fresh_thread_idx());
          if (T::Stage::kBytes > 0 && m.bias.ptr != nullptr && m.bias.staged) {
            T::Stage::load(stage_bias, scores, first_row + warp_row, first_key);
          }
          ptx::cp_async_commit();
          float2 stats[2];  // (lse * log2 e, delta) of this thread's rows
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const int r = warp_row + half * 8 + ptx::fresh_lane() / 4;
            const float2* at = reinterpret_cast<const float2*>(p.row_stats) + row_stat_offset(p.problem, w, h) + first_row;
            stats[half] = r < rows ? at[r] : make_float2(INFINITY, 0.f);
          }
          const int row0 = first_row + warp_row, col0 = first_key;
          ptx::cp_async_wait<0>();
          __syncthreads();
          float acc_s[1][kBlockN / 8][4], acc_dp[1][kBlockN / 8][4];
          multiply_transposed<E, D, kAhead>(acc_s, T::Tile::by_rows(smem_q, ptx::fresh_lane()) + warp_row * T::Tile::kRowBytes,
                                            T::Tile::by_cols(smem_k, ptx::fresh_lane()));
          const auto mask = scores.template fetch_mask<false, 16, kBlockN>(row0, col0, tests);
          multiply_transposed<E, D, kAhead>(acc_dp, T::Tile::by_rows(smem_do, ptx::fresh_lane()) + warp_row * T::Tile::kRowBytes,
                                            T::Tile::by_cols(smem_v, ptx::fresh_lane()));
          modified_score_gradients<T>(acc_s, acc_dp, scores, stats, tests, mask, row0, col0, stage_bias,
                                      own.drop_keys, false);
          if (g.is_slope) {
            Scores::for_each<false>(acc_s, row0 + scores.shift(), col0,
                                    [](float& s, int centre, int col) { s *= -fabsf(static_cast<float>(centre - col)); });
          }
#pragma unroll
          for (int nb = 0; nb < kBlockN / 8; ++nb) {
#pragma unroll
            for (int i = 0; i < 4; ++i) acc[nb][i] += acc_s[0][nb][i];
          }
        }
      }
    }
  }

  const int64_t out_head = ((static_cast<int64_t>(own.split) * g.batch + own.b) * g.heads + own.h) * g.rows * g.cols;
  const auto put = [&](int row, int col, float x) {
    if (row >= g.rows || col >= g.cols) return;
    const int64_t at = out_head + static_cast<int64_t>(row) * g.cols + col;
    if (g.is_float) {
      static_cast<float*>(g.out)[at] = x;
    } else {
      const uint32_t pair = ptx::pack2<E>(x, 0.f);
      static_cast<uint16_t*>(g.out)[at] = static_cast<uint16_t>(pair);
    }
  };
  if (!g.sum_rows && !g.sum_cols) {
#pragma unroll
    for (int nb = 0; nb < kBlockN / 8; ++nb) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        put(own.m * kBlockM + warp_row + i / 2 * 8 + lane / 4, own.n * kBlockN + nb * 8 + 2 * (lane % 4) + i % 2,
            acc[nb][i]);
      }
    }
    return;
  }
  if (!g.sum_rows) {  // columns only: a row lies in the four lanes of a quad
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float sum = 0.f;
#pragma unroll
      for (int nb = 0; nb < kBlockN / 8; ++nb) sum += acc[nb][2 * half] + acc[nb][2 * half + 1];
      sum += __shfl_xor_sync(0xffffffffu, sum, 1);
      sum += __shfl_xor_sync(0xffffffffu, sum, 2);
      if (lane % 4 == 0) put(own.m * kBlockM + warp_row + half * 8 + lane / 4, 0, sum);
    }
    return;
  }
#pragma unroll
  for (int nb = 0; nb < kBlockN / 8; ++nb) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      float sum = acc[nb][c] + acc[nb][2 + c];
#pragma unroll
      for (int step = 4; step < 32; step *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
      if (lane < 4) sums[warp][nb * 8 + 2 * lane + c] = sum;
    }
  }
  __syncthreads();
  if (g.sum_cols) {
    if (warp > 0) return;
    float sum = 0.f;
    for (int i = lane; i < T::kWarps * kBlockN; i += 32) sum += sums[i / kBlockN][i % kBlockN];
#pragma unroll
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
    if (lane == 0) put(0, 0, sum);
    return;
  }
  if (thread_idx < kBlockN) {
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < T::kWarps; ++i) sum += sums[i][thread_idx];
    put(0, own.n * kBlockN + thread_idx, sum);
  }
}

}  // namespace flash_ext::sm80
