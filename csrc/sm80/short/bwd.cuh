// The backward of sequences of at most R = 16, 32, 64 or 80 queries and keys, with every modifier, in one kernel: dq,
// dk, dv, delta, and the gradient of a bias. A CTA has all queries and keys of a head, so every sum has one owner and a
// fixed order, and nothing is added to memory:
//
//   queries as rows: S, dP, P, dS, dQ = dS K;  keys as rows: dV = P^T dO, dK = dS^T Q
//
// A CTA walks heads that share a bias. It reads the bias once, and keeps its gradient in registers until the walk ends,
// when it stores it as its part; the caller adds the parts in order.
//
// Shared memory:
//   Q, K, V, dO  [R][D]
//   O [R][D], then P, dS [R queries][R keys] in its place
//   stats        [R] (lse * log2 e, delta)
//   bias         [R][R] in fp32 where there is one (own_bias.cuh); while no head is worked on, sums of its gradient
#pragma once

#include "../../common/debug_delay.cuh"
#include "config.cuh"

namespace flash_ext::sm80 {

template <int R>
using ShortScores = float[1][R / 8][4];

// acc = A^T B of 16 columns of A, which has R rows: dV = P^T dO and dK = dS^T Q. a_lane is by_cols of those columns,
// b_lane by_rows.
template <typename T, int D = T::kHeadDim>
__device__ __forceinline__ void multiply_columns(float (&acc)[D / 8][4], uint32_t a_lane, uint32_t b_lane) {
  using E = typename T::Element;
  using Tile = typename T::Tile;
  constexpr int kBlocks = D / 16, kAhead = 2, kSlots = kLeftSlots<kAhead, kBlocks>;
  uint32_t a[kSlots][4];
#pragma unroll
  for (auto& x : acc) {
#pragma unroll
    for (float& y : x) y = 0.f;
  }
  stream_fragments<T::kRows / 16 * kBlocks, kAhead>(
      [&](int i, uint32_t (&b)[4]) {
        const int ks = i / kBlocks;
        if (i % kBlocks == 0) ptx::ldmatrix_x4_trans(a[ks % kSlots], a_lane + ks * 16 * T::WeightTile::kRowBytes);
        ptx::ldmatrix_x4_trans(b, Tile::block(b_lane, ks * 16, i % kBlocks));
      },
      [&](int i, const uint32_t (&b)[4]) {
        const int ks = i / kBlocks, db = i % kBlocks;
        ptx::mma_m16n8k16<E>(acc[2 * db], a[ks % kSlots], b[0], b[1]);
        ptx::mma_m16n8k16<E>(acc[2 * db + 1], a[ks % kSlots], b[2], b[3]);
      });
}

// (lse * log2 e, delta) of this warp's queries, two lanes a query, into `stats` and the workspace.
template <typename E, int D>
__device__ __forceinline__ void leave_row_stats(const BwdParams& p, uint32_t out_tile, uint32_t dout_tile,
                                                float2* stats, int64_t stat) {
  using Tile = SmemTile<D>;
  const int lane = ptx::fresh_lane(), row = ptx::fresh_thread_idx() / 32 * 16 + lane / 2;
  float delta = 0.f;
#pragma unroll
  for (int i = 0; i < D / 16; ++i) {
    const uint32_t at = Tile::offset(row, lane % 2 * (D / 16) + i);
    const float4 o = ptx::load_shared(out_tile + at), d = ptx::load_shared(dout_tile + at);
    const float of_o[4] = {o.x, o.y, o.z, o.w}, of_d[4] = {d.x, d.y, d.z, d.w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float2 x = ptx::unpack2<E>(__float_as_uint(of_o[j])), y = ptx::unpack2<E>(__float_as_uint(of_d[j]));
      delta = fmaf(x.x, y.x, delta);
      delta = fmaf(x.y, y.y, delta);
    }
  }
  delta += __shfl_xor_sync(ptx::kFullWarp, delta, 1);
  if (lane % 2 == 0) {
    float2 x = make_float2(INFINITY, 0.f);
    if (row < p.problem.seqlen_q) {
      const float lse = p.lse[stat + row];
      x = make_float2(lse < kLowestLse ? INFINITY : lse * kLog2e,
                      delta - (p.dlse == nullptr ? 0.f : p.dlse[stat + row]));
      reinterpret_cast<float2*>(p.row_stats)[stat + row] = x;
    }
    stats[row] = x;
  }
  __syncwarp();
}

// Stores what a walk has summed of the gradient of a bias, as part `part`, summed over rows or columns where the bias
// is. `sums`: room for R x R floats that nobody needs meanwhile.
template <typename E, int R>
__device__ __forceinline__ void store_bias_gradient(const BiasGradient& g, const ShortScores<R>& acc, float* sums,
                                                    int b, int h, int part) {
  constexpr int kThreads = 2 * R;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const bool is_summed = g.sum_rows || g.sum_cols;
  const int pitch = is_summed ? R : g.cols;  // as in memory, where rows follow each other
  __syncthreads();
#pragma unroll
  for (int n = 0; n < R / 8; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = warp * 16 + lane / 4 + i / 2 * 8, col = n * 8 + 2 * (lane % 4) + i % 2;
      if (is_summed || (row < g.rows && col < g.cols)) sums[row * pitch + col] = acc[0][n][i];
    }
  }
  __syncthreads();
  const int count = g.rows * g.cols;
  const int64_t first = ((static_cast<int64_t>(part) * g.batch + b) * g.heads + h) * count;
  float* const floats = static_cast<float*>(g.out) + first;
  uint16_t* const halves = static_cast<uint16_t*>(g.out) + first;
  const auto put = [&](int index, float x) {
    if (g.is_float) floats[index] = x;
    else halves[index] = static_cast<uint16_t>(ptx::pack2<E>(x, 0.f));
  };
  if (is_summed) {
    const int summed_rows = g.sum_rows ? R : 1, summed_cols = g.sum_cols ? R : 1;
#pragma unroll 1
    for (int index = threadIdx.x; index < count; index += kThreads) {
      const int row = index / g.cols, col = index - row * g.cols;
      float sum = 0.f;
#pragma unroll 1
      for (int r = row; r < row + summed_rows; ++r) {
#pragma unroll 1
        for (int c = col; c < col + summed_cols; ++c) sum += sums[r * R + c];
      }
      put(index, sum);
    }
  } else if (g.is_float) {
#pragma unroll 4
    for (int index = threadIdx.x; index < count; index += kThreads) floats[index] = sums[index];
  } else {
    // In pairs, which begin on 4 bytes.
    const int begin = static_cast<int>(first & 1), end = begin + (count - begin) / 2 * 2;
#pragma unroll 4
    for (int index = begin + 2 * static_cast<int>(threadIdx.x); index < end; index += 2 * kThreads) {
      *reinterpret_cast<uint32_t*>(halves + index) = ptx::pack2<E>(sums[index], sums[index + 1]);
    }
    if (threadIdx.x == 0 && begin > 0) put(0, sums[0]);
    if (threadIdx.x == 0 && end < count) put(end, sums[end]);
  }
  __syncthreads();
}

template <typename T>
__global__ void __launch_bounds__(T::kThreads, T::kBwdCtas)
    bwd_short_kernel(const __grid_constant__ BwdParams p, const __grid_constant__ Modifiers m,
                     const __grid_constant__ BiasGradient bias_gradient, const __grid_constant__ ShortGrid grid) {
  using E = typename T::Element;
  using Tile = typename T::Tile;
  using WeightTile = typename T::WeightTile;
  constexpr int D = T::kHeadDim, kTile = T::kTileBytes, kBlocks = T::kRows / 8;
  extern __shared__ __align__(128) unsigned char smem_raw[];
  __shared__ DropKeys drop_keys;
  // Of this turn: registers are short.
  __shared__ ShortWalk::Head at;
  __shared__ ShortWalk here;
  const Problem& x = p.problem;
  const uint32_t smem_q = ptx::smem_address(smem_raw), smem_k = smem_q + kTile, smem_v = smem_k + kTile;
  const uint32_t smem_do = smem_v + kTile, smem_p = smem_q + T::kPAt, bias = smem_q + T::kBiasAt;
  float2* const stats = reinterpret_cast<float2*>(smem_raw + T::kStatsAt);
  // Registers are short: what follows from the thread's number is made anew where it is used.
  const auto row0 = [] { return ptx::fresh_thread_idx() / 32 * 16; };
  const auto rows_of = [=](uint32_t tile) { return Tile::by_rows(tile, ptx::fresh_lane()) + row0() * Tile::kRowBytes; };
  const auto keys_of = [](uint32_t tile) { return Tile::by_cols(tile, ptx::fresh_lane()); };
  const auto load = [&](const ShortWalk& to) {
    const ShortWalk::Head at = to.head(grid);
    load_short<T>(smem_q, p.q, at.b, at.h, x.seqlen_q, x.head_dim);
    load_short<T>(smem_k, p.k, at.b, at.h, x.seqlen_k, x.head_dim);
    load_short<T>(smem_v, p.v, at.b, at.h, x.seqlen_k, x.head_dim_v);
    load_short<T>(smem_do, p.dout, at.b, at.h, x.seqlen_q, x.head_dim_v);
    load_short<T>(smem_p, p.out, at.b, at.h, x.seqlen_q, x.head_dim_v);
    ptx::cp_async_commit();
  };
  ptx::wait_for_kernel_before();
  ShortWalk walk(grid);
  load(walk);
  ShortScores<T::kRows> bias_sums;
  clear(bias_sums);
#pragma unroll 1
  while (walk.has_head(grid)) {
    if (m.bias.ptr != nullptr && walk.begins_group(grid)) {
      const ShortWalk::Head first = walk.head(grid);
      T::Bias::template load<E>(bias, x, m.bias, first.bias_b, first.bias_h);
    }
    if (threadIdx.x == 0) {
      at = walk.head(grid);
      here = walk;
      drop_keys.make(m, at.b, at.h);
    }
    ptx::cp_async_wait<0>();
    debug_delay();
    __syncthreads();
    debug_delay();
    leave_row_stats<E, D>(p, smem_p, smem_do, stats, (static_cast<int64_t>(at.b) * x.num_heads + at.h) * x.seqlen_q);
    debug_delay();
    __syncthreads();  // O has been read
    debug_delay();
    // Of the upper and the lower row of this thread; registers are short.
    const auto row_stats = [=](int half) { return &stats[row0() + ptx::fresh_lane() / 4 + 8 * half]; };
    const SeqInfo seq = short_seq_info(x, m, at.b);
    // Derivatives of a softcap wait where this warp will put its rows of P and dS: in registers they would cost 32.
    const auto slope_at = [&](int n) {
      constexpr int kFits = WeightTile::kRowBytes / 32;  // blocks of 16 queries x 8 keys, 512 bytes each
      return smem_p + n / kFits * (T::kDsAt - T::kPAt) + row0() * WeightTile::kRowBytes +
             (n % kFits * 32 + ptx::fresh_lane()) * 16;
    };
    ShortScores<T::kRows> weights, ds;
    if (row0() < x.seqlen_q) {
      short_scores<T>(weights, ScoreMod{x, m, seq, at.h}, rows_of(smem_q), keys_of(smem_k), bias,
                      [&](int, int n, const float (&slope)[4]) {
                        ptx::store_shared(slope_at(n), make_float4(slope[0], slope[1], slope[2], slope[3]));
                      });
      const float lse[2] = {row_stats(0)->x, row_stats(1)->x};
#pragma unroll
      for (int n = 0; n < kBlocks; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) weights[0][n][i] = ptx::ex2(fmaf(weights[0][n][i], m.unit_log2, -lse[i / 2]));
      }
      if (m.rng != nullptr) drop<false, true>(weights, m, row0(), 0, drop_keys);
      T::multiply(ds, rows_of(smem_do), keys_of(smem_v));
      const float deltas[2] = {row_stats(0)->y, row_stats(1)->y};
#pragma unroll
      for (int n = 0; n < kBlocks; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          // A negative weight is one that dropout hit: its dP counts nothing, that of others keep_scale times.
          const float weight = weights[0][n][i], delta = deltas[i / 2];
          ds[0][n][i] = fabsf(weight) * (signbit(weight) ? -delta : fmaf(ds[0][n][i], m.keep_scale, -delta));
          bias_sums[0][n][i] += ds[0][n][i];
        }
      }
      if (m.softcap > 0.f) {
#pragma unroll
        for (int n = 0; n < kBlocks; ++n) {
          const float4 slope = ptx::load_shared(slope_at(n));
          ds[0][n][0] *= slope.x, ds[0][n][1] *= slope.y, ds[0][n][2] *= slope.z, ds[0][n][3] *= slope.w;
        }
        __syncwarp();
      }
    } else {
      clear(weights);
      clear(ds);
    }
    const uint32_t to_p = WeightTile::by_rows(smem_p, ptx::fresh_lane()) + row0() * WeightTile::kRowBytes;
    const uint32_t to_ds = to_p + (T::kDsAt - T::kPAt);
#pragma unroll
    for (int j = 0; j < kBlocks / 2; ++j) {
      float left[4], right[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        left[i] = weights[0][2 * j][i] < 0.f ? 0.f : weights[0][2 * j][i];  // NaN stays
        right[i] = weights[0][2 * j + 1][i] < 0.f ? 0.f : weights[0][2 * j + 1][i];
      }
      put_block<E>(WeightTile::block(to_p, 0, j), left, right, ptx::fresh_lane());
      put_block<E>(WeightTile::block(to_ds, 0, j), ds[0][2 * j], ds[0][2 * j + 1], ptx::fresh_lane());
    }
    float dq[1][D / 8][4];
    clear(dq);
    multiply_accumulate<E, D, 2>(dq, ds, Tile::by_rows(smem_k, ptx::fresh_lane()));
    debug_delay();
    __syncthreads();  // P and dS are there, K and V have been read
    debug_delay();
    const auto store = [&](float (&acc)[D / 8][4], const StridedView& to, int h, int rows, int columns, float scale,
                           uint32_t tile) {
#pragma unroll
      for (int j = 0; j < D / 8; ++j) scale_block(acc[j], scale, scale);
      store_short<E, D>(acc, to, at.b, h, rows, columns, tile);
    };
    if (row0() < x.seqlen_q) store(dq[0], p.dq, at.h, x.seqlen_q, x.head_dim, x.scale, smem_v);
    if (row0() < x.seqlen_k) {
      const uint32_t of_p = WeightTile::block(WeightTile::by_cols(smem_p, ptx::fresh_lane()), 0, row0() / 16);
      float sums[D / 8][4];
      multiply_columns<T>(sums, of_p, Tile::by_rows(smem_do, ptx::fresh_lane()));
      store(sums, p.dv, at.h, x.seqlen_k, x.head_dim_v, m.keep_scale, smem_v);
      multiply_columns<T>(sums, of_p + (T::kDsAt - T::kPAt), Tile::by_rows(smem_q, ptx::fresh_lane()));
      store(sums, p.dk, at.h, x.seqlen_k, x.head_dim, x.scale, smem_k);
    }
    walk = here;
    debug_delay();
    __syncthreads();  // everybody has left the tiles
    debug_delay();
    if (walk.ends_group(grid) && bias_gradient.out != nullptr) {
      float* const sums = reinterpret_cast<float*>(smem_raw + T::kBiasAt);
      store_bias_gradient<E, T::kRows>(bias_gradient, bias_sums, sums, at.bias_b, at.bias_h, ShortWalk::part(grid));
      clear(bias_sums);
    }
    walk.next(grid);
    if (walk.has_head(grid)) load(walk);
  }
}

}  // namespace flash_ext::sm80
