// The gradients of attention as both versions of FlashAttention form them: what a warp does with its own keys, and the two
// small passes around it.
//
//   P = exp(scale Q K^T - lse)      dP = dO V^T      dS = P * (dP - delta)      delta = rowsum(dO * O)
//   dV = P^T dO                     dK = scale dS^T Q                           dQ = scale dS K
//
// Keys lie along the rows of a warp's scores: P^T and dS^T then are the left operands of dV and dK, which a warp sums for
// its keys in registers. What is left is dQ, a sum over all keys: there the two versions differ.
#pragma once

#include "problem.cuh"

namespace flash_ext::ladder {

// As Problem: contiguous, (heads, seqlen, D) and (heads, seqlen_q).
struct BackwardProblem {
  const uint16_t* q;
  const uint16_t* k;
  const uint16_t* v;
  const uint16_t* out;
  const float* lse;
  const uint16_t* dout;
  uint16_t* dq;
  uint16_t* dk;
  uint16_t* dv;
  float* stats;  // written by stats_kernel, (2, heads, seqlen_q): lse in units of log 2, and delta
  float* acc;  // the shape of q: sums of dQ between key blocks
  int64_t heads;
  int seqlen_q, seqlen_k;
  float scale;
};

// What shared memory holds of a backward with kWarps warps, in bytes from its beginning. kPart: queries whose scores a warp
// has at a time.
template <int D_, int kBlockM_, int kBlockN_, int kWarps_, int kPart_>
struct BackwardTiles {
  static constexpr int D = D_, kBlockM = kBlockM_, kBlockN = kBlockN_, kWarps = kWarps_, kPart = kPart_;
  static constexpr int kThreads = 32 * kWarps, kKeys = kBlockN / kWarps, kKeyBlocks = kKeys / 16;
  static constexpr int kAhead = 1;
  using Tile = SmemTile<D>;
  using DsTile = SmemTile<kBlockM>;  // (kBlockN, kBlockM): a row is a key
  static constexpr int kKvBytes = kBlockN * D * 2, kQBytes = kBlockM * D * 2, kStatsBytes = kBlockM * 8;
  // Q, dO and the statistics of their rows lie there twice: one in use, one on its way.
  static constexpr int kVAt = kKvBytes, kQAt = 2 * kKvBytes, kDoutAt = kQAt + 2 * kQBytes,
                       kDsAt = kDoutAt + 2 * kQBytes;
  static constexpr int kStatsAt = kDsAt + kBlockN * kBlockM * 2, kSharedBytes = kStatsAt + 2 * kStatsBytes;
  static_assert(kKeys % 16 == 0 && kBlockM % kPart == 0 && kBlockM <= kThreads);
};

// dK and dV of a warp's keys.
template <typename T>
using KeyGradient = float[T::kKeyBlocks][T::D / 8][4];

template <typename T>
__device__ __forceinline__ void load_keys(const BackwardProblem& p, uint32_t smem, int64_t head, int first,
                                          int thread) {
  const int keys = p.seqlen_k - first;
  load_tile<T::kBlockN, T::D, T::kThreads>(smem, rows_of<T::D>(p.k, head, p.seqlen_k, first), keys, thread);
  load_tile<T::kBlockN, T::D, T::kThreads>(smem + T::kVAt, rows_of<T::D>(p.v, head, p.seqlen_k, first), keys, thread);
}

// Query block m with what belongs to it, if there is one, as a group of copies. Rows beyond the end are zeros: their dO and
// delta make all that they give zero.
template <typename T>
__device__ __forceinline__ void load_queries(const BackwardProblem& p, uint32_t smem, int64_t head, int m, int thread) {
  const int first = m * T::kBlockM, rows = p.seqlen_q - first, stage = m & 1;
  if (rows > 0) {
    load_tile<T::kBlockM, T::D, T::kThreads>(smem + T::kQAt + stage * T::kQBytes,
                                             rows_of<T::D>(p.q, head, p.seqlen_q, first), rows, thread);
    load_tile<T::kBlockM, T::D, T::kThreads>(smem + T::kDoutAt + stage * T::kQBytes,
                                             rows_of<T::D>(p.dout, head, p.seqlen_q, first), rows, thread);
    if (thread < T::kBlockM) {
      const float* const from = p.stats + head * p.seqlen_q + first + (thread < rows ? thread : 0);
      const uint32_t to = smem + T::kStatsAt + stage * T::kStatsBytes + thread * 4;
      const int bytes = thread < rows ? 4 : 0;
      ptx::cp_async_4(to, from, bytes);
      ptx::cp_async_4(to + T::kBlockM * 4, from + p.heads * p.seqlen_q, bytes);
    }
  }
  ptx::cp_async_commit();
}

// Scores of keys at and beyond `keys` become -inf. Their weight would be exp(0 - lse), which may be infinite.
template <int kA, int kN>
__device__ __forceinline__ void hide_keys(float (&s)[kA][kN][4], int keys, int lane) {
#pragma unroll
  for (int a = 0; a < kA; ++a) {
#pragma unroll
    for (int n = 0; n < kN; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (a * 16 + lane / 4 + i / 2 * 8 >= keys) s[a][n][i] = -INFINITY;
      }
    }
  }
}

// One query block: dV += P^T dO and dK += dS^T Q of a warp's keys; the first `keys` of the CTA's exist. Leaves dS^T in the
// warp's rows of shared memory, for dQ.
template <typename T>
__device__ __forceinline__ void add_keys(KeyGradient<T>& dk, KeyGradient<T>& dv, uint32_t smem, int stage, int keys,
                                         float scale) {
  constexpr int D = T::D;
  using Tile = typename T::Tile;
  const int warp = ptx::fresh_thread_idx() / 32, lane = ptx::fresh_lane();
  const uint32_t own = warp * T::kKeys * Tile::kRowBytes;
  const uint32_t k = Tile::by_rows(smem + own, lane), v = Tile::by_rows(smem + T::kVAt + own, lane);
  const uint32_t to = T::DsTile::by_rows(smem + T::kDsAt + warp * T::kKeys * T::DsTile::kRowBytes, lane);
  // Unrolled, the parts would be in flight together: there are no registers for that.
#pragma unroll 1
  for (int part = 0; part < T::kBlockM / T::kPart; ++part) {
    const uint32_t rows = stage * T::kQBytes + part * T::kPart * Tile::kRowBytes;
    const uint32_t q = smem + T::kQAt + rows, dout = smem + T::kDoutAt + rows;
    const uint32_t stats = smem + T::kStatsAt + stage * T::kStatsBytes + (part * T::kPart + lane % 4 * 2) * 4;
    float s[T::kKeyBlocks][T::kPart / 8][4], ds[T::kKeyBlocks][T::kPart / 8][4];
    multiply_transposed<Element, D, T::kAhead>(s, k, Tile::by_cols(q, lane));
    if (keys < T::kBlockN) hide_keys(s, keys - warp * T::kKeys, lane);
#pragma unroll
    for (int n = 0; n < T::kPart / 8; ++n) {
      const float2 lse = ptx::load_shared_pair(stats + n * 32);  // of two neighbouring queries
#pragma unroll
      for (int a = 0; a < T::kKeyBlocks; ++a) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          s[a][n][i] = ptx::ex2(fmaf(s[a][n][i], scale * kLog2e, i % 2 == 0 ? -lse.x : -lse.y));
        }
      }
    }
    multiply_accumulate<Element, D, T::kAhead>(dv, s, Tile::by_rows(dout, lane));
    multiply_transposed<Element, D, T::kAhead>(ds, v, Tile::by_cols(dout, lane));
#pragma unroll
    for (int n = 0; n < T::kPart / 8; ++n) {
      const float2 delta = ptx::load_shared_pair(stats + T::kBlockM * 4 + n * 32);
#pragma unroll
      for (int a = 0; a < T::kKeyBlocks; ++a) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          ds[a][n][i] = s[a][n][i] * (ds[a][n][i] - (i % 2 == 0 ? delta.x : delta.y));
        }
      }
    }
    const uint32_t columns = T::DsTile::block(to, 0, part * T::kPart / 16);
#pragma unroll
    for (int a = 0; a < T::kKeyBlocks; ++a) {
#pragma unroll
      for (int n = 0; n < T::kPart / 16; ++n) {
        put_block<Element>(T::DsTile::block(columns, a * 16, n), ds[a][2 * n], ds[a][2 * n + 1], lane);
      }
    }
    multiply_accumulate<Element, D, T::kAhead>(dk, ds, Tile::by_rows(q, lane));
  }
}

// acc[16 kA queries x 8 kN columns] = dS K over kKeys keys. ds_lane is by_cols of the first of these queries, k_lane by_rows
// of the first of these columns.
template <typename T, int kKeys, int kA, int kN>
__device__ __forceinline__ void multiply_keys(float (&acc)[kA][kN][4], uint32_t ds_lane, uint32_t k_lane) {
  constexpr int kBlocks = kN / 2, kSlots = kLeftSlots<T::kAhead, kBlocks>;
  clear(acc);
  uint32_t a[kSlots][kA][4];
  stream_fragments<kKeys / 16 * kBlocks, T::kAhead>(
      [&](int i, uint32_t (&b)[4]) {
        const int ks = i / kBlocks, nb = i % kBlocks;
        if (nb == 0) {
#pragma unroll
          for (int m = 0; m < kA; ++m) {
            ptx::ldmatrix_x4_trans(a[ks % kSlots][m], T::DsTile::block(ds_lane, ks * 16, m));
          }
        }
        ptx::ldmatrix_x4_trans(b, T::Tile::block(k_lane, ks * 16, nb));
      },
      [&](int i, const uint32_t (&b)[4]) {
        const int ks = i / kBlocks, nb = i % kBlocks;
#pragma unroll
        for (int m = 0; m < kA; ++m) {
          ptx::mma_m16n8k16<Element>(acc[m][2 * nb], a[ks % kSlots][m], b[0], b[1]);
          ptx::mma_m16n8k16<Element>(acc[m][2 * nb + 1], a[ks % kSlots][m], b[2], b[3]);
        }
      });
}

// A warp's gradient of its keys times `factor`, by way of its own rows of `tile`, which nobody reads any more.
template <typename T>
__device__ __forceinline__ void write_keys(KeyGradient<T>& gradient, float factor, uint32_t tile, uint16_t* to,
                                           int64_t head, int seqlen, int first) {
  using Tile = typename T::Tile;
  const int warp = ptx::fresh_thread_idx() / 32, lane = ptx::fresh_lane();
  const uint32_t own = tile + warp * T::kKeys * Tile::kRowBytes, lane_base = Tile::by_rows(own, lane);
#pragma unroll
  for (int a = 0; a < T::kKeyBlocks; ++a) {
#pragma unroll
    for (int j = 0; j < T::D / 8; ++j) scale_block(gradient[a][j], factor, factor);
#pragma unroll
    for (int db = 0; db < T::D / 16; ++db) {
      put_block<Element>(Tile::block(lane_base, a * 16, db), gradient[a][2 * db], gradient[a][2 * db + 1], lane);
    }
  }
  __syncwarp();
#pragma unroll 4
  for (int at = lane; at < T::kKeys * Tile::kChunks; at += 32) {
    const int row = at / Tile::kChunks, chunk = at % Tile::kChunks, key = first + warp * T::kKeys + row;
    if (key >= seqlen) continue;
    uint16_t* const target = to + (head * seqlen + key) * T::D + chunk * 8;
    *reinterpret_cast<float4*>(target) = ptx::load_shared(own + Tile::offset(row, chunk));
  }
}

// ---- the passes: a warp for each row

inline constexpr int kPassThreads = 256, kPassRows = kPassThreads / 32;

__device__ __forceinline__ int64_t row_of_warp() {
  return static_cast<int64_t>(blockIdx.x) * kPassRows + static_cast<int>(threadIdx.x) / 32;
}

// Before, for both versions: delta of every row, beside its lse. The paper of FlashAttention forms delta again for every
// key block, which would read O as often.
template <int D>
__global__ void __launch_bounds__(kPassThreads) stats_kernel(const BackwardProblem p) {
  const int64_t row = row_of_warp();
  const int lane = static_cast<int>(threadIdx.x) % 32;
  if (row >= p.heads * p.seqlen_q) return;
  const uint32_t* const out = reinterpret_cast<const uint32_t*>(p.out + row * D);
  const uint32_t* const dout = reinterpret_cast<const uint32_t*>(p.dout + row * D);
  float delta = 0.f;
#pragma unroll
  for (int pair = lane; pair < D / 2; pair += 32) {
    const float2 x = ptx::unpack2<Element>(out[pair]), y = ptx::unpack2<Element>(dout[pair]);
    delta += x.x * y.x + x.y * y.y;
  }
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) delta += __shfl_xor_sync(ptx::kFullWarp, delta, mask);
  if (lane == 0) p.stats[row] = p.lse[row] * kLog2e, p.stats[p.heads * p.seqlen_q + row] = delta;
}

// After FlashAttention-2: dQ from its sums.
template <int D>
__global__ void __launch_bounds__(kPassThreads) round_kernel(const BackwardProblem p) {
  const int64_t row = row_of_warp();
  const int lane = static_cast<int>(threadIdx.x) % 32;
  if (row >= p.heads * p.seqlen_q) return;
  const float2* const from = reinterpret_cast<const float2*>(p.acc + row * D);
  uint32_t* const to = reinterpret_cast<uint32_t*>(p.dq + row * D);
#pragma unroll
  for (int pair = lane; pair < D / 2; pair += 32) {
    to[pair] = ptx::pack2<Element>(from[pair].x * p.scale, from[pair].y * p.scale);
  }
}

}  // namespace flash_ext::ladder
