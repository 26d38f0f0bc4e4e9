// The forward of sequences of at most R = 16, 32, 64 or 80 queries and keys, with every modifier: a warp has 16 queries
// and all keys, so the softmax is that of whole rows and nothing is rescaled. A CTA walks heads that share a bias,
// which it reads once.
//
// Shared memory: Q, K, V [stages][R][D]; bias [R][R] in fp32 (own_bias.cuh); a bias of the next head alone, as it lies.
#pragma once

#include "../../common/debug_delay.cuh"
#include "../../common/sink.cuh"
#include "config.cuh"

namespace flash_ext::sm80 {

template <typename T>
__global__ void __launch_bounds__(T::kThreads, T::kFwdCtas)
    fwd_short_kernel(const __grid_constant__ FwdParams p, const __grid_constant__ Modifiers m,
                     const __grid_constant__ ShortGrid grid) {
  using E = typename T::Element;
  using Tile = typename T::Tile;
  using Bias = typename T::Bias;
  constexpr int D = T::kHeadDim, kTile = T::kTileBytes, kBlocks = T::kRows / 8;
  constexpr int kBiasAt = 3 * T::kFwdStages * kTile, kAheadAt = kBiasAt + Bias::kBytes;
  extern __shared__ __align__(128) unsigned char smem_raw[];
  __shared__ DropKeys drop_keys;
  // Of this turn: registers are short.
  __shared__ ShortWalk::Head at;
  __shared__ ShortWalk next;
  const Problem& x = p.problem;
  const uint32_t smem = ptx::smem_address(smem_raw), bias = smem + kBiasAt;
  // Registers are short: what follows from the thread's number is made anew where it is used.
  const auto row0 = [] { return ptx::fresh_thread_idx() / 32 * 16; };
  const auto load = [&](const ShortWalk& to, uint32_t smem_q) {
    if (to.has_head(grid)) {
      const ShortWalk::Head at = to.head(grid);
      const int h_k = static_cast<int>(divide(static_cast<uint32_t>(at.h), grid.shared));
      load_short<T>(smem_q, p.q, at.b, at.h, x.seqlen_q, x.head_dim);
      load_short<T>(smem_q + kTile, p.k, at.b, h_k, x.seqlen_k, x.head_dim);
      load_short<T>(smem_q + 2 * kTile, p.v, at.b, h_k, x.seqlen_k, x.head_dim_v);
    }
    ptx::cp_async_commit();
  };
  const bool bias_ahead = Bias::comes_ahead(m.bias, x, grid);
  const auto load_bias_ahead = [&](const ShortWalk& to) {
    if (to.has_head(grid)) {
      const ShortWalk::Head head = to.head(grid);
      Bias::load_ahead(smem + kAheadAt, x, m.bias, head.bias_b, head.bias_h);
    }
    ptx::cp_async_commit();
  };
  ptx::wait_for_kernel_before();
  uint32_t smem_q = smem;
  ShortWalk walk(grid);
  load(walk, smem_q);
  if (bias_ahead) load_bias_ahead(walk);
#pragma unroll 1
  while (walk.has_head(grid)) {
    if (m.bias.ptr != nullptr && !bias_ahead && walk.begins_group(grid)) {
      const ShortWalk::Head first = walk.head(grid);
      Bias::template load<E>(bias, x, m.bias, first.bias_b, first.bias_h);
    }
    if (threadIdx.x == 0) {
      at = walk.head(grid);
      drop_keys.make(m, at.b, at.h);
    }
    walk.next(grid);
    if (threadIdx.x == 0) next = walk;
    const uint32_t next_q = T::kFwdStages == 1 ? smem : smem == smem_q ? smem + 3 * kTile : smem;
    if (T::kFwdStages > 1) load(walk, next_q);
    ptx::cp_async_wait<T::kFwdStages - 1>();
    debug_delay();
    __syncthreads();
    debug_delay();
    if (bias_ahead) {
      Bias::template take<E>(bias, smem_raw + kAheadAt, x, m.bias, at.bias_b, at.bias_h);
      debug_delay();
      __syncthreads();  // everybody has taken it
      debug_delay();
      load_bias_ahead(next);
    }
    if (row0() < x.seqlen_q) {
      const SeqInfo seq = short_seq_info(x, m, at.b);
      float acc_s[1][kBlocks][4];
      const uint32_t rows = Tile::by_rows(smem_q, ptx::fresh_lane()) + row0() * Tile::kRowBytes;
      short_scores<T>(acc_s, ScoreMod{x, m, seq, at.h}, rows, Tile::by_cols(smem_q + kTile, ptx::fresh_lane()), bias,
                      [](int, int, const float (&)[4]) {});
      // Both rows of a lane at once: one behind the other, with branches between, they wait for twice the latencies.
      const auto over_quad = [](float (&x)[2], auto&& both) {
#pragma unroll
        for (int step = 1; step <= 2; step *= 2) {
#pragma unroll
          for (int half = 0; half < 2; ++half) x[half] = both(x[half], __shfl_xor_sync(ptx::kFullWarp, x[half], step));
        }
      };
      float top[2] = {-INFINITY, -INFINITY}, sum[2] = {}, lse[2], inverse[2];
#pragma unroll
      for (int n = 0; n < kBlocks; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) top[i / 2] = fmaxf(top[i / 2], acc_s[0][n][i]);
      }
      over_quad(top, [](float x, float y) { return fmaxf(x, y); });
      // The maximum is subtracted first: the product with log2(e) of a mask made of finfo.min is not finite.
      const float shift[2] = {top[0] == -INFINITY ? 0.f : top[0], top[1] == -INFINITY ? 0.f : top[1]};
#pragma unroll
      for (int n = 0; n < kBlocks; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          float& s = acc_s[0][n][i];
          s = ptx::ex2((s - shift[i / 2]) * m.unit_log2);
          sum[i / 2] += s;
        }
      }
      over_quad(sum, [](float x, float y) { return x + y; });
      const float unit = m.has_score_mod ? 1.f : x.scale * x.score_factor;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const bool unseen = top[half] == -INFINITY, empty = unseen && sum[half] == 0.f;  // not a row of NaN
        top[half] = unseen ? top[half] : top[half] * unit;  // in natural units
        lse[half] = top[half] + logf(sum[half]);
        inverse[half] = m.keep_scale * ptx::reciprocal(empty ? INFINITY : sum[half]);
      }
      const float sink = m.sinks == nullptr ? -INFINITY : m.sinks[at.h];
      if (sink != -INFINITY) {
#pragma unroll
        for (int half = 0; half < 2; ++half) inverse[half] *= add_sink(lse[half], sink);
      }
      const int row = row0() + ptx::fresh_lane() / 4;
      if (ptx::fresh_lane() % 4 == 0) {
        const int64_t stat = (static_cast<int64_t>(at.b) * x.num_heads + at.h) * x.seqlen_q + row;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          if (row + 8 * half >= x.seqlen_q) continue;
          if (p.lse != nullptr) p.lse[stat + 8 * half] = lse[half];
          if (m.row_max != nullptr) m.row_max[stat + 8 * half] = top[half];
        }
      }
      if (m.rng != nullptr) drop<false, false>(acc_s, m, row0(), 0, drop_keys);
      float acc_o[1][D / 8][4];
      clear(acc_o);
      multiply_accumulate<E, D, 2>(acc_o, acc_s, Tile::by_rows(smem_q + 2 * kTile, ptx::fresh_lane()));
#pragma unroll
      for (int j = 0; j < D / 8; ++j) scale_block(acc_o[0][j], inverse[0], inverse[1]);
      store_short<E, D>(acc_o[0], p.out, at.b, at.h, x.seqlen_q, x.head_dim_v, smem_q);
    }
    walk = next;
    debug_delay();
    __syncthreads();  // everybody has left the tiles
    debug_delay();
    if (T::kFwdStages == 1) load(walk, next_q);
    smem_q = next_q;
  }
}

}  // namespace flash_ext::sm80
