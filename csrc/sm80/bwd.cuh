// FlashAttention backward over keys on mma.sync (Dao 2023, Algorithm 2), for sm_80 and newer.
//
//   P = exp(scale * Q K^T - lse)        dV = P^T dO
//   dP = dO V^T                         dK = scale * dS^T Q
//   dS = P * (dP - delta)               dQ = scale * dS K
//
// One CTA owns kBlockN keys of one key/value head and walks the query tiles of all query heads that read it,
// so dK and dV stay in registers and grouped heads need no further reduction. Scores are computed
// transposed, keys along the rows: the accumulator of S^T is then already the A operand of dV and dK.
//
// Warps work in pairs on the same 16 * kKeyBlocks keys:
//   first warp:  S^T -> P^T (handed over in fp32 through shared memory) -> dV += P^T dO
//   second warp: dP^T, dS^T = P^T * (dP^T - delta) (to shared memory)   -> dK += dS^T Q
// The first never waits for the second. dQ of the previous query tile, which needs the dS of all pairs, is
// computed by all warps one iteration late and added to an fp32 buffer; so one barrier an iteration is
// enough. With p.dq_accum null (deterministic mode) dQ is left to bwd_q.cuh.
//
// Shared memory (bytes, D = padded head_dim):
//   K, V       [kBlockN][D]            2 x 2 D kBlockN
//   Q, dO      [kStages][kBlockM][D]   2 x 2 D kBlockM kStages
//   row stats  [kStages][kBlockM]      8 kBlockM kStages    (lse * log2 e, delta)
//   P          fragments, fp32         4 kBlockN kBlockM
//   dS         [2][kBlockN][kBlockM]   4 kBlockN kBlockM
// Named barriers: 1 + pair, "P of this pair is written", 64 threads.
#pragma once

#include "../common/attn_mod.cuh"
#include "../common/seqlen.cuh"
#include "../common/tiles.cuh"
#include "../heuristics.h"
#include "compiled_here.cuh"

namespace flash_ext::sm80 {

template <typename E, int D, SmemClass kSmemClass>
struct BwdTraits {
  using Element = E;
  static constexpr SmemClass kClass = kSmemClass;
  static constexpr int kHeadDim = D;
  static constexpr BwdTile kTile = bwd_tile_sm80(D, kSmemClass);
  static constexpr int kBlockM = kTile.block_m, kBlockN = kTile.block_n(), kStages = kTile.stages;
  static constexpr int kPairs = kTile.pairs, kKeyBlocks = kTile.key_blocks, kThreads = kTile.threads();
  static constexpr int kDqWarpsM = kTile.dq_warps_m, kDqWarpsD = kTile.dq_warps_d;
  static constexpr int kDqRows = kBlockM / kDqWarpsM, kDqCols = D / kDqWarpsD;
  // A warp's columns in one go while that leaves room beside dK or dV, else in two.
  static constexpr int kDqStep = kDqCols > 48 ? kDqCols / 2 : kDqCols;
  static_assert(kDqRows % 16 == 0 && kDqStep % 16 == 0 && kDqWarpsM * kDqWarpsD <= kTile.warps());
  using Tile = SmemTile<D>;
  using DsTile = SmemTile<kBlockM>;  // rows are keys, columns queries

  static constexpr int kKBytes = 2 * D * kBlockN, kQBytes = 2 * D * kBlockM;
  static constexpr int kStatsBytes = 8 * kBlockM, kDsBytes = kTile.ds_bytes();
  static constexpr int kPBytesOfPair = kTile.p_bytes() / kPairs;
  static constexpr int kKAt = 0, kVAt = kKAt + kKBytes, kQAt = kVAt + kKBytes;
  static constexpr int kDoAt = kQAt + kStages * kQBytes;
  static constexpr int kPAt = kDoAt + kStages * kQBytes;
  static constexpr int kDsAt = kPAt + kTile.p_bytes();
  static constexpr int kStatsAt = kDsAt + 2 * kTile.ds_bytes();
  static_assert(kStatsAt + kStages * kStatsBytes == kTile.smem_bytes(D));
};

template <int kN, int kM>
__device__ __forceinline__ void clear(float (&acc)[kN][kM][4]) {
#pragma unroll
  for (int n = 0; n < kN; ++n) {
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int i = 0; i < 4; ++i) acc[n][m][i] = 0.f;
    }
  }
}

// acc[keys x queries] = A B^T: A is K or V (this pair's rows), B is Q or dO.
template <typename T>
__device__ __forceinline__ void keys_by_queries(float (&acc)[T::kKeyBlocks][T::kBlockM / 8][4], uint32_t a_lane,
                                                uint32_t b_lane) {
  clear(acc);
#pragma unroll (T::kHeadDim >= 128 ? 4 : 8)
  for (int ks = 0; ks < T::kHeadDim / 16; ++ks) {
    uint32_t a[T::kKeyBlocks][4];
#pragma unroll
    for (int kb = 0; kb < T::kKeyBlocks; ++kb) ptx::ldmatrix_x4(a[kb], T::Tile::block(a_lane, kb * 16, ks));
#pragma unroll
    for (int mb = 0; mb < T::kBlockM / 16; ++mb) {
      uint32_t b[4];
      ptx::ldmatrix_x4(b, T::Tile::block(b_lane, mb * 16, ks));
#pragma unroll
      for (int kb = 0; kb < T::kKeyBlocks; ++kb) {
        ptx::mma_m16n8k16<typename T::Element>(acc[kb][2 * mb], a[kb], b[0], b[2]);
        ptx::mma_m16n8k16<typename T::Element>(acc[kb][2 * mb + 1], a[kb], b[1], b[3]);
      }
    }
  }
}

// acc[keys x D] += W B: W is P^T or dS^T in accumulator layout, B is dO or Q.
template <typename T>
__device__ __forceinline__ void accumulate_keys(float (&acc)[T::kKeyBlocks][T::kHeadDim / 8][4],
                                                const float (&weights)[T::kKeyBlocks][T::kBlockM / 8][4],
                                                uint32_t b_lane) {
  using E = typename T::Element;
#pragma unroll
  for (int ms = 0; ms < T::kBlockM / 16; ++ms) {
    uint32_t a[T::kKeyBlocks][4];
#pragma unroll
    for (int kb = 0; kb < T::kKeyBlocks; ++kb) {
      const auto& lo = weights[kb][2 * ms];
      const auto& hi = weights[kb][2 * ms + 1];
      a[kb][0] = ptx::pack2<E>(lo[0], lo[1]);
      a[kb][1] = ptx::pack2<E>(lo[2], lo[3]);
      a[kb][2] = ptx::pack2<E>(hi[0], hi[1]);
      a[kb][3] = ptx::pack2<E>(hi[2], hi[3]);
    }
#pragma unroll
    for (int db = 0; db < T::kHeadDim / 16; ++db) {
      uint32_t b[4];
      ptx::ldmatrix_x4_trans(b, T::Tile::block(b_lane, ms * 16, db));
#pragma unroll
      for (int kb = 0; kb < T::kKeyBlocks; ++kb) {
        ptx::mma_m16n8k16<E>(acc[kb][2 * db], a[kb], b[0], b[1]);
        ptx::mma_m16n8k16<E>(acc[kb][2 * db + 1], a[kb], b[2], b[3]);
      }
    }
  }
}

struct DqRows {
  float* first;
  int rows;
};

// dQ[queries x D] of one query tile, this warp's share, added to the fp32 buffer (row pitch D).
// `destination()` gives the tile's first row and its number of rows; asked for late, they cost no registers
// while the matrix products run.
template <typename T, typename Destination>
__device__ __forceinline__ void add_dq(uint32_t ds_tile, uint32_t k_tile, int warp, int lane,
                                       const Destination& destination) {
  if (warp >= T::kDqWarpsM * T::kDqWarpsD) return;
  const int row0 = (warp % T::kDqWarpsM) * T::kDqRows;
  // dS is stored keys by queries, so a transposing load yields the queries-by-keys operand.
#pragma unroll 1
  for (int col0 = warp / T::kDqWarpsM * T::kDqCols, end = col0 + T::kDqCols; col0 < end; col0 += T::kDqStep) {
    float acc[T::kDqRows / 16][T::kDqStep / 8][4];
    clear(acc);
    uint32_t a_at[T::kDqRows / 16], b_at[T::kDqStep / 16];
#pragma unroll
    for (int mb = 0; mb < T::kDqRows / 16; ++mb) {
      a_at[mb] = T::DsTile::block(T::DsTile::lane_address(ds_tile, lane), 0, row0 / 16 + mb);
    }
#pragma unroll
    for (int db = 0; db < T::kDqStep / 16; ++db) {
      b_at[db] = T::Tile::block(T::Tile::lane_address(k_tile, lane), 0, col0 / 16 + db);
    }
#pragma unroll
    for (int ks = 0; ks < T::kBlockN / 16; ++ks) {
      uint32_t a[T::kDqRows / 16][4];
#pragma unroll
      for (int mb = 0; mb < T::kDqRows / 16; ++mb) {
        uint32_t r[4];
        ptx::ldmatrix_x4_trans(r, a_at[mb] + ks * 16 * T::DsTile::kRowBytes);
        a[mb][0] = r[0], a[mb][1] = r[2], a[mb][2] = r[1], a[mb][3] = r[3];
      }
#pragma unroll
      for (int db = 0; db < T::kDqStep / 16; ++db) {
        uint32_t b[4];
        ptx::ldmatrix_x4_trans(b, b_at[db] + ks * 16 * T::Tile::kRowBytes);
#pragma unroll
        for (int mb = 0; mb < T::kDqRows / 16; ++mb) {
          ptx::mma_m16n8k16<typename T::Element>(acc[mb][2 * db], a[mb], b[0], b[1]);
          ptx::mma_m16n8k16<typename T::Element>(acc[mb][2 * db + 1], a[mb], b[2], b[3]);
        }
      }
    }
    const DqRows out = destination();
#pragma unroll
    for (int mb = 0; mb < T::kDqRows / 16; ++mb) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int r = row0 + mb * 16 + half * 8 + lane / 4;
        if (r < out.rows) {
          float* at = out.first + r * T::kHeadDim + col0 + (lane % 4) * 2;
#pragma unroll
          for (int db = 0; db < T::kDqStep / 8; ++db) {
            ptx::red_add_f32x2(at + db * 8, acc[mb][db][2 * half], acc[mb][db][2 * half + 1]);
          }
        }
      }
    }
  }
}

struct BwdWork {
  Work w;
  BlockRange range;        // query tiles that see these keys
  int64_t stats_per_head;  // rows between two heads of stats and dq_accum
  const uint16_t* q;       // row 0 of the sequence, first of the query heads that read these keys
  const uint16_t* dout;
  const float2* stats;     // (lse * log2 e, delta) of that row and head
  float* dq_accum;         // likewise, or null
};

template <typename T>
__device__ __forceinline__ void bwd_body(const BwdParams& p, int64_t blocks, int heads_in_group) {
  using E = typename T::Element;
  constexpr int D = T::kHeadDim, kBlockM = T::kBlockM, kBlockN = T::kBlockN, kKeyBlocks = T::kKeyBlocks;
  extern __shared__ __align__(128) unsigned char smem_raw[];
  const int thread_idx = threadIdx.x, lane = thread_idx % 32;
  const int warp = __shfl_sync(0xffffffffu, thread_idx / 32, 0);
  const int pair = warp % T::kPairs;
  const bool makes_p = warp < T::kPairs;  // first warp of its pair

  __shared__ BwdWork shared;
  if (thread_idx == 0) {
    const Work w = decode_work<kBlockN, false, false>(p.problem, p.problem.num_heads_k, blocks, heads_in_group);
    const int h = w.h * (p.problem.num_heads / p.problem.num_heads_k);
    const int64_t stat = row_stat_offset(p.problem, w, h);
    shared.w = w;
    shared.range = AttnMod{p.problem, w.q.length, w.k.length}.template q_blocks<kBlockM, kBlockN>(w.block);
    shared.stats_per_head = p.problem.cu_seqlens_q != nullptr ? p.problem.total_q : p.problem.seqlen_q;
    shared.q = row_pointer(p.q, w.b, w.q.start, h);
    shared.dout = row_pointer(p.dout, w.b, w.q.start, h);
    shared.stats = reinterpret_cast<const float2*>(p.row_stats) + stat;
    shared.dq_accum = p.dq_accum == nullptr ? nullptr : p.dq_accum + stat * D;
  }
  __syncthreads();
  const Work& w = shared.w;
  if (!w.active) return;

  const uint32_t smem = ptx::smem_address(smem_raw);
  const int key0 = pair * 16 * kKeyBlocks;  // this pair's keys inside the tile

  const auto load_queries = [&](int stage, int g, int m_block) {
    const int first = m_block * kBlockM, rows = w.q.length - first;
    const TileSource q{shared.q + g * p.q.head_stride + first * p.q.row_stride, p.q.row_stride, p.problem.head_dim,
                       p.q.aligned};
    load_tile<kBlockM, D, T::kThreads>(smem + T::kQAt + stage * T::kQBytes, q, rows, thread_idx);
    const TileSource dout{shared.dout + g * p.dout.head_stride + first * p.dout.row_stride, p.dout.row_stride,
                          p.problem.head_dim_v, p.dout.aligned};
    load_tile<kBlockM, D, T::kThreads>(smem + T::kDoAt + stage * T::kQBytes, dout, rows, thread_idx);
    // Rows past the end arrive as zeros: with q = dO = 0 they add nothing, whatever their lse.
    if (thread_idx < kBlockM) {
      const float2* stats = shared.stats + g * shared.stats_per_head + first + thread_idx;
      const bool in = thread_idx < rows;
      ptx::cp_async_8(smem + T::kStatsAt + stage * T::kStatsBytes + thread_idx * 8, in ? stats : shared.stats, in ? 8 : 0);
    }
  };

  const int tiles = shared.range.end - shared.range.begin;
  const int iterations = max(tiles, 0) * (p.problem.num_heads / p.problem.num_heads_k);
  float acc[kKeyBlocks][D / 8][4];  // dV of the first warp of a pair, dK of the second
  clear(acc);

  if (iterations > 0) {
    const int first = w.block * kBlockN, keys = w.k.length - first;
    const int h_k = w.h;
    const TileSource k{row_pointer(p.k, w.b, w.k.start + first, h_k), p.k.row_stride, p.problem.head_dim, p.k.aligned};
    const TileSource v{row_pointer(p.v, w.b, w.k.start + first, h_k), p.v.row_stride, p.problem.head_dim_v, p.v.aligned};
    load_tile<kBlockN, D, T::kThreads>(smem + T::kKAt, k, keys, thread_idx);
    load_tile<kBlockN, D, T::kThreads>(smem + T::kVAt, v, keys, thread_idx);
    if constexpr (T::kStages > 1) load_queries(0, 0, shared.range.begin);
    ptx::cp_async_commit();
  }

  // dQ of the iteration before (it, g, m_block), whose dS all pairs have written.
  const auto add_previous_dq = [&](int it, int g, int m_block) {
    add_dq<T>(smem + T::kDsAt + ((it - 1) & 1) * T::kDsBytes, smem + T::kKAt, warp, lane, [&]() -> DqRows {
      const bool first_tile = m_block == shared.range.begin;
      const int tile_g = first_tile ? g - 1 : g, row = (first_tile ? shared.range.end - 1 : m_block - 1) * kBlockM;
      return {shared.dq_accum + (tile_g * shared.stats_per_head + row) * D, w.q.length - row};
    });
  };

  int g = 0, m_block = shared.range.begin;  // head of the group and query tile of this iteration
#pragma unroll 1
  for (int it = 0; it < iterations; ++it) {
    const int stage = T::kStages > 1 ? it & 1 : 0;
    if constexpr (T::kStages == 1) {
      __syncthreads();  // everybody has left the Q and dO of the previous iteration
      load_queries(0, g, m_block);
      ptx::cp_async_commit();
    }
    ptx::cp_async_wait<0>();
    // Q, dO of this iteration and dS of the previous one are visible; the other stage and the P and dS
    // buffers of two iterations ago are free.
    __syncthreads();
    if constexpr (T::kStages > 1) {
      if (it + 1 < iterations) {
        const bool last_tile = m_block + 1 == shared.range.end;
        load_queries(stage ^ 1, last_tile ? g + 1 : g, last_tile ? shared.range.begin : m_block + 1);
        ptx::cp_async_commit();
      }
    }
    const uint32_t q_lane = T::Tile::lane_address(smem + T::kQAt + stage * T::kQBytes, lane);
    const uint32_t do_lane = T::Tile::lane_address(smem + T::kDoAt + stage * T::kQBytes, lane);
    const uint32_t stats = smem + T::kStatsAt + stage * T::kStatsBytes + (lane % 4) * 16;
    const uint32_t p_slot = smem + T::kPAt + pair * T::kPBytesOfPair + lane * 16;
    const auto previous_dq = [&] {
      if (it > 0 && shared.dq_accum != nullptr) add_previous_dq(it, g, m_block);
    };
    if (makes_p) {
      float acc_s[kKeyBlocks][kBlockM / 8][4];
      keys_by_queries<T>(acc_s, T::Tile::lane_address(smem + T::kKAt, lane) + key0 * T::Tile::kRowBytes, q_lane);
      const AttnMod mod{p.problem, w.q.length, w.k.length};
      const bool partial = mod.template kind<kBlockM, kBlockN>(m_block, w.block) == TileKind::kPartial;
#pragma unroll
      for (int mb = 0; mb < kBlockM / 8; ++mb) {
        float4 s2;  // (lse, delta) of two neighbouring queries
        asm volatile("ld.shared.v4.f32 {%0,%1,%2,%3}, [%4];\n"
                     : "=f"(s2.x), "=f"(s2.y), "=f"(s2.z), "=f"(s2.w)
                     : "r"(stats + mb * 64));
#pragma unroll
        for (int kb = 0; kb < kKeyBlocks; ++kb) {
          float(&s)[4] = acc_s[kb][mb];
          s[0] = ptx::ex2(fmaf(s[0], p.problem.scale_log2, -s2.x));
          s[1] = ptx::ex2(fmaf(s[1], p.problem.scale_log2, -s2.z));
          s[2] = ptx::ex2(fmaf(s[2], p.problem.scale_log2, -s2.x));
          s[3] = ptx::ex2(fmaf(s[3], p.problem.scale_log2, -s2.z));
        }
        if (partial) {
          const int row = m_block * kBlockM + mb * 8 + (lane % 4) * 2;
          const int col = w.block * kBlockN + key0 + lane / 4;
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            const VisibleKeys keys = mod.visible(row + c);
#pragma unroll
            for (int kb = 0; kb < kKeyBlocks; ++kb) {
              if (!keys.contains(col + kb * 16)) acc_s[kb][mb][c] = 0.f;
              if (!keys.contains(col + kb * 16 + 8)) acc_s[kb][mb][2 + c] = 0.f;
            }
          }
        }
#pragma unroll
        for (int kb = 0; kb < kKeyBlocks; ++kb) {
          const float(&s)[4] = acc_s[kb][mb];
          asm volatile("st.shared.v4.f32 [%0], {%1,%2,%3,%4};\n" ::"r"(p_slot + (kb * (kBlockM / 8) + mb) * 512),
                       "f"(s[0]), "f"(s[1]), "f"(s[2]), "f"(s[3])
                       : "memory");
        }
      }
      ptx::bar_arrive(1 + pair, 64);
      accumulate_keys<T>(acc, acc_s, do_lane);
      previous_dq();
    } else {
      previous_dq();
      float acc_dp[kKeyBlocks][kBlockM / 8][4];
      keys_by_queries<T>(acc_dp, T::Tile::lane_address(smem + T::kVAt, lane) + key0 * T::Tile::kRowBytes, do_lane);
      ptx::bar_sync(1 + pair, 64);
      const uint32_t ds = smem + T::kDsAt + (it & 1) * T::kDsBytes;
#pragma unroll
      for (int mb = 0; mb < kBlockM / 8; ++mb) {
        float4 s2;
        asm volatile("ld.shared.v4.f32 {%0,%1,%2,%3}, [%4];\n"
                     : "=f"(s2.x), "=f"(s2.y), "=f"(s2.z), "=f"(s2.w)
                     : "r"(stats + mb * 64));
#pragma unroll
        for (int kb = 0; kb < kKeyBlocks; ++kb) {
          float4 w4;
          asm volatile("ld.shared.v4.f32 {%0,%1,%2,%3}, [%4];\n"
                       : "=f"(w4.x), "=f"(w4.y), "=f"(w4.z), "=f"(w4.w)
                       : "r"(p_slot + (kb * (kBlockM / 8) + mb) * 512));
          float(&d)[4] = acc_dp[kb][mb];
          d[0] = w4.x * (d[0] - s2.y);
          d[1] = w4.y * (d[1] - s2.w);
          d[2] = w4.z * (d[2] - s2.y);
          d[3] = w4.w * (d[3] - s2.w);
          put_fragment<E, kBlockM>(ds, d, key0 + kb * 16, mb, lane, 1.f, 1.f);
        }
      }
      accumulate_keys<T>(acc, acc_dp, q_lane);
    }
    if (++m_block == shared.range.end) {
      m_block = shared.range.begin;
      ++g;
    }
  }

  __syncthreads();
  if (iterations > 0 && shared.dq_accum != nullptr) add_previous_dq(iterations, g, m_block);
  __syncthreads();
  // The K tile's place takes dK, the V tile's dV; a warp stores the rows it wrote itself.
  const uint32_t tile = smem + (makes_p ? T::kVAt : T::kKAt);
  const float scale = makes_p ? 1.f : p.problem.softmax_scale;
#pragma unroll
  for (int kb = 0; kb < kKeyBlocks; ++kb) {
#pragma unroll
    for (int db = 0; db < D / 8; ++db) put_fragment<E, D>(tile, acc[kb][db], key0 + kb * 16, db, lane, scale, scale);
  }
  __syncwarp();
  const int first = w.block * kBlockN;
  const StridedView& grad = makes_p ? p.dv : p.dk;
  const TileDestination dst{row_pointer(grad, w.b, w.k.start + first, w.h), grad.row_stride,
                            makes_p ? p.problem.head_dim_v : p.problem.head_dim, grad.aligned};
  store_tile<16 * kKeyBlocks, D, 32>(dst, tile, key0, w.k.length - first, lane);
}

template <typename T>
__global__ void __launch_bounds__(T::kThreads, 1)
    bwd_kernel(const __grid_constant__ BwdParams p, int64_t blocks, int heads_in_group) {
  if constexpr (kCompiledHere<T::kClass>) {
    bwd_body<T>(p, blocks, heads_in_group);
  } else {
    __trap();
  }
}

}  // namespace flash_ext::sm80
