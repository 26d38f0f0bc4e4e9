// What one warp of bwd/kernel.cuh does with one query tile: loads, weights, score gradients, and its share of dV, dK
// and dQ.
#pragma once

#include <type_traits>

#include "../../common/attn_mod.cuh"
#include "../../common/bias_stage.cuh"
#include "../../common/debug_delay.cuh"
#include "../../common/dropout.cuh"
#include "../../common/fragments.cuh"
#include "../../common/seqlen.cuh"
#include "../../common/tile_list.cuh"
#include "../../heuristics.h"
#include "mask_words.cuh"

namespace flash_ext::sm80 {

template <typename E, int D, SmemClass kSmemClass, bool kWithModifiers = false>
struct BwdTraits {
  using Element = E;
  static constexpr SmemClass kClass = kSmemClass;
  static constexpr bool kMods = kWithModifiers;
  static constexpr int kHeadDim = D;
  static constexpr BwdTile kTile = kMods ? bwd_mod_tile_sm80(D, kSmemClass) : bwd_tile_sm80(D, kSmemClass);
  static constexpr int kBlockM = kTile.block_m, kBlockN = kTile.block_n(), kStages = kTile.stages;
  static constexpr int kKeyWarps = kTile.key_warps, kKeyBlocks = kTile.key_blocks, kThreads = kTile.threads();
  static constexpr bool kPaired = kTile.paired;
  static constexpr int kDqRows = kBlockM / kTile.dq_warps_m, kDqWarpsD = kKeyWarps / kTile.dq_warps_m;
  static_assert(kDqRows % 16 == 0 && kKeyWarps % kTile.dq_warps_m == 0);
  // The first warps of the pairs take half of dQ's columns, in whole 16-column steps a warp. (Giving them more,
  // since the second ones wait for P, is slower: docs/benchmarks.md.) With modifiers they have those to work on.
  static constexpr int kDqSteps = kPaired ? 2 * 16 * kDqWarpsD : 1;
  static constexpr int kDqColsFirst = kMods ? 0 : kPaired ? (D + kDqSteps - 1) / kDqSteps * kDqSteps / 2 : D;
  static constexpr int kDqAhead = 2;
  // At head_dim 96 the registers are full of addresses: slopes of a softcap wait where P will be handed over, and the
  // words of seen keys lie where those of the mask came, of which every warp then has its own.
  static constexpr bool kSlopesWait = kMods && D == 96 && kTile.key_blocks == 2;
  static constexpr int kAhead = kPaired && kKeyBlocks == 2 ? 2 : 3;
  using Tile = SmemTile<D>;
  using DsTile = SmemTile<kBlockM>;  // rows are keys, columns queries

  static constexpr int kKBytes = 2 * D * kBlockN, kQBytes = 2 * D * kBlockM;
  static constexpr int kStatsBytes = 8 * kBlockM, kDsBytes = kTile.ds_bytes();
  // A warp takes the queries of a tile in parts where all of them at once would not fit its registers.
  static constexpr int kPartM = kTile.part_m < kBlockM ? kTile.part_m : kBlockM, kParts = kBlockM / kPartM;
  static_assert(!kPaired || kKeyWarps * kParts < 16, "one named barrier each, and barrier 0");
  static constexpr int kPBytesOfPart = kTile.p_bytes() / (kKeyWarps * kParts);
  static constexpr int kKAt = 0, kVAt = kKAt + kKBytes, kQAt = kVAt + kKBytes;
  static constexpr int kDoAt = kQAt + kStages * kQBytes;
  static constexpr int kPAt = kDoAt + kStages * kQBytes;
  static constexpr int kDsAt = kPAt + kTile.p_bytes();
  static constexpr int kStatsAt = kDsAt + 2 * kTile.ds_bytes();
  static_assert(kStatsAt + kStages * kStatsBytes == kTile.smem_bytes(D));
  // Words of a bit mask, those of a query for all keys side by side.
  static constexpr int kMaskWords = kBlockN / 32, kMaskBytes = kMods ? kTile.mask_bytes() / kStages : 0;
  static_assert(!kMods || (kBlockN % 32 == 0 && kBlockM * kMaskWords <= kThreads));
  static constexpr int kMaskAt = kTile.smem_bytes(D), kBiasAt = kMaskAt + kStages * kMaskBytes;
  static constexpr int kSmemBytes = kMaskAt + (kMods ? bwd_mod_extra_sm80(D, kSmemClass) : 0);
  static constexpr int kBiasBytes = kSmemBytes - kBiasAt;
  using Stage = std::conditional_t<kBiasBytes != 0, BiasStage<kBlockM, 16 * kKeyBlocks>, NoBiasStage>;
};

struct DqRows {
  float* first;
  int rows;
};

// dQ[queries x D] of one query tile, kCols of its columns from `first_col` on, spread over the key_warps warps
// of a role, added to the fp32 buffer (row pitch D). `destination()` gives the tile's first row and its number
// of rows; asked for late, they cost no registers while the matrix products run.
template <typename T, int kCols, typename Destination>
__device__ __forceinline__ void add_dq(int first_col, uint32_t ds_tile, uint32_t k_tile, int warp, int lane,
                                       const Destination& destination) {
  constexpr int kWarpCols = kCols / T::kDqWarpsD;
  // Columns in one go: as many as leave room beside dK or dV.
  constexpr int kStep = kWarpCols % 48 == 0 ? 48 : kWarpCols % 32 == 0 ? 32 : 16;
  static_assert(kCols % T::kDqWarpsD == 0 && kWarpCols % kStep == 0);
  const int row0 = warp % T::kTile.dq_warps_m * T::kDqRows;
  // dS is stored keys by queries, so a transposing load yields the queries-by-keys operand.
#pragma unroll 1
  for (int col0 = first_col + warp / T::kTile.dq_warps_m * kWarpCols, end = col0 + kWarpCols; col0 < end;
       col0 += kStep) {
    float acc[T::kDqRows / 16][kStep / 8][4];
    clear(acc);
    uint32_t a_at[T::kDqRows / 16], b_at[kStep / 16];
#pragma unroll
    for (int mb = 0; mb < T::kDqRows / 16; ++mb) {
      a_at[mb] = T::DsTile::block(T::DsTile::by_cols(ds_tile, lane), 0, row0 / 16 + mb);
    }
#pragma unroll
    for (int db = 0; db < kStep / 16; ++db) {
      b_at[db] = T::Tile::block(T::Tile::by_rows(k_tile, lane), 0, col0 / 16 + db);
    }
    constexpr int kBlocks = kStep / 16;
    constexpr int kSlots = kLeftSlots<T::kDqAhead, kBlocks>;
    uint32_t a[kSlots][T::kDqRows / 16][4];
    stream_fragments<T::kBlockN / 16 * kBlocks, T::kDqAhead>(
        [&](int i, uint32_t (&b)[4]) {
          const int ks = i / kBlocks, db = i % kBlocks;
          if (db == 0) {
#pragma unroll
            for (int mb = 0; mb < T::kDqRows / 16; ++mb) {
              ptx::ldmatrix_x4_trans(a[ks % kSlots][mb], a_at[mb] + ks * 16 * T::DsTile::kRowBytes);
            }
          }
          ptx::ldmatrix_x4_trans(b, b_at[db] + ks * 16 * T::Tile::kRowBytes);
        },
        [&](int i, const uint32_t (&b)[4]) {
          const int ks = i / kBlocks, db = i % kBlocks;
#pragma unroll
          for (int mb = 0; mb < T::kDqRows / 16; ++mb) {
            ptx::mma_m16n8k16<typename T::Element>(acc[mb][2 * db], a[ks % kSlots][mb], b[0], b[1]);
            ptx::mma_m16n8k16<typename T::Element>(acc[mb][2 * db + 1], a[ks % kSlots][mb], b[2], b[3]);
          }
        });
    const DqRows out = destination();
#pragma unroll
    for (int mb = 0; mb < T::kDqRows / 16; ++mb) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int r = row0 + mb * 16 + half * 8 + lane / 4;
        if (r < out.rows) {
          float* at = out.first + r * T::kHeadDim + col0 + (lane % 4) * 2;
#pragma unroll
          for (int db = 0; db < kStep / 8; ++db) {
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
  int iterations;          // those of all query heads that read them
  int64_t stats_per_head;  // rows between two heads of stats and dq_accum
  const uint16_t* q;       // row 0 of the sequence, first of the query heads that read these keys
  const uint16_t* dout;
  const float2* stats;     // (lse * log2 e, delta) of that row and head
  float* dq_accum;         // likewise, or null
};

struct BwdModWork : BwdWork {
  SeqInfo seq;
  int first_head;  // first of the query heads that read these keys
  TileList tile_list;
  // A warp of keys has its own, since it may be a tile ahead of another, and in grouped heads a head.
  static constexpr int kMaxKeyWarps = 4;
  DropKeys drop_keys[kMaxKeyWarps];
  int drop_head[kMaxKeyWarps];  // -1: none yet
};

template <typename T>
using WorkOf = std::conditional_t<T::kMods, BwdModWork, BwdWork>;

template <typename T>
using ModifiersOf = std::conditional_t<T::kMods, Modifiers, NoModifiers>;

// Asynchronous loads of the mask's words for a query tile and all keys of the CTA, one a thread; 0 where it has none.
template <typename T>
__device__ __forceinline__ void load_mask(const BwdParams& p, const Modifiers& m, const BwdModWork& work, uint32_t smem,
                                          int stage, const ListedTile& tile, int thread_idx) {
  if (m.mask.words == nullptr || !(tile.tests & kTestRows) || thread_idx >= T::kBlockM * T::kMaskWords) return;
  const int row = tile.block * T::kBlockM + thread_idx / T::kMaskWords;
  const int word = work.w.block * T::kMaskWords + thread_idx % T::kMaskWords;
  const bool in = row < min(m.mask.rows, work.seq.seqlen_q) && word < m.mask.num_words;
  const int64_t at = work.seq.b * m.mask.batch_stride + (work.first_head + tile.head) * m.mask.head_stride +
                     row * m.mask.row_stride + word * m.mask.word_stride;
  ptx::cp_async_4(smem + T::kMaskAt + stage * T::kMaskBytes + thread_idx * 4, m.mask.words + (in ? at : 0), in ? 4 : 0);
}

template <typename T>
__device__ __forceinline__ ScoreMod scores_of(const BwdParams& p, const Modifiers& m, const BwdModWork& work,
                                              const ListedTile& tile) {
  return {p.problem, m, work.seq, work.first_head + tile.head};
}

// Asynchronous loads of one query tile of head `g` of the group.
template <typename T>
__device__ __forceinline__ void load_queries(const BwdParams& p, const BwdWork& work, uint32_t smem, int stage, int g,
                                             int m_block, int thread_idx) {
  constexpr int D = T::kHeadDim, kBlockM = T::kBlockM;
  const int first = m_block * kBlockM, rows = work.w.q.length - first;
  const TileSource q{work.q + g * p.q.head_stride + first * p.q.row_stride, p.q.row_stride, p.problem.head_dim,
                     p.q.aligned};
  load_tile<kBlockM, D, T::kThreads>(smem + T::kQAt + stage * T::kQBytes, q, rows, thread_idx);
  const TileSource dout{work.dout + g * p.dout.head_stride + first * p.dout.row_stride, p.dout.row_stride,
                        p.problem.head_dim_v, p.dout.aligned};
  load_tile<kBlockM, D, T::kThreads>(smem + T::kDoAt + stage * T::kQBytes, dout, rows, thread_idx);
  // Rows past the end arrive as zeros: with q = dO = 0 they add nothing, whatever their lse.
  if (thread_idx < kBlockM) {
    const float2* stats = work.stats + g * work.stats_per_head + first + thread_idx;
    const bool in = thread_idx < rows;
    ptx::cp_async_8(smem + T::kStatsAt + stage * T::kStatsBytes + thread_idx * 8, in ? stats : work.stats, in ? 8 : 0);
  }
}

// (lse * log2 e, delta) of the queries 8 mb + 2 (lane % 4) and the next one.
__device__ __forceinline__ float4 load_stats(uint32_t stats, int mb, int lane) {
  return ptx::load_shared(stats + mb * 64 + (lane % 4) * 16);
}

// 2^(unit * score - lse), in place of the scores.
template <typename T>
__device__ __forceinline__ void exponentiate(float (&acc)[T::kKeyBlocks][T::kPartM / 8][4], float unit, uint32_t stats,
                                             int lane) {
#pragma unroll
  for (int mb = 0; mb < T::kPartM / 8; ++mb) {
    const float4 s = load_stats(stats, mb, lane);
#pragma unroll
    for (int kb = 0; kb < T::kKeyBlocks; ++kb) {
      float (&x)[4] = acc[kb][mb];
      x[0] = ptx::ex2(fmaf(x[0], unit, -s.x));
      x[1] = ptx::ex2(fmaf(x[1], unit, -s.z));
      x[2] = ptx::ex2(fmaf(x[2], unit, -s.x));
      x[3] = ptx::ex2(fmaf(x[3], unit, -s.z));
    }
  }
}

// P^T of kPartM queries and this warp's keys, in fp32.
template <typename T>
__device__ __forceinline__ void weights(float (&acc)[T::kKeyBlocks][T::kPartM / 8][4], const BwdParams& p,
                                        const Work& w, uint32_t smem, uint32_t smem_q, uint32_t stats, int m_block,
                                        int query0, int key0, int lane) {
  multiply_transposed<typename T::Element, T::kHeadDim, T::kAhead>(
      acc, T::Tile::by_rows(smem + T::kKAt, lane) + key0 * T::Tile::kRowBytes,
      T::Tile::by_cols(smem_q, lane) + query0 * T::Tile::kRowBytes);
  exponentiate<T>(acc, p.problem.scale_log2, stats, lane);
  const AttnMod mod{p.problem, w.q.length, w.k.length};
  if (mod.template kind<T::kBlockM, T::kBlockN>(m_block, w.block) == TileKind::kFull) return;
#pragma unroll
  for (int mb = 0; mb < T::kPartM / 8; ++mb) {
    const int row = m_block * T::kBlockM + query0 + mb * 8 + (lane % 4) * 2;
    const int col = w.block * T::kBlockN + key0 + lane / 4;
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const VisibleKeys keys = mod.visible(row + c);
#pragma unroll
      for (int kb = 0; kb < T::kKeyBlocks; ++kb) {
        if (!keys.contains(col + kb * 16)) acc[kb][mb][c] = 0.f;
        if (!keys.contains(col + kb * 16 + 8)) acc[kb][mb][2 + c] = 0.f;
      }
    }
  }
}

// The same with modifiers. Dropped weights come out negative; `slopes` receives the derivative of a softcap.
template <typename T>
__device__ __forceinline__ void modified_weights(float (&acc)[T::kKeyBlocks][T::kPartM / 8][4],
                                                 float (&slopes)[T::kKeyBlocks][T::kPartM / 8][4],
                                                 const ScoreMod& score_mod, uint32_t smem, uint32_t smem_q,
                                                 uint32_t stats, uint32_t mask, uint32_t bias, uint32_t p_slot,
                                                 TileTests tests, int row0, int col0, int key0,
                                                 const DropKeys& drop_keys, int lane) {
  multiply_transposed<typename T::Element, T::kHeadDim, T::kAhead>(
      acc, T::Tile::by_rows(smem + T::kKAt, lane) + key0 * T::Tile::kRowBytes, T::Tile::by_cols(smem_q, lane));
  // Words go through the slot that P will fill.
  const uint32_t words = T::kSlopesWait ? mask : p_slot - lane * 16;
  constexpr int kKeys = 16 * T::kKeyBlocks, kMaskPitch = 4 * T::kMaskWords, kPitch = T::kSlopesWait ? kMaskPitch : 4;
  const bool hides =
      tests != 0 && leave_seen_keys<T::kPartM, kKeys, kMaskPitch, kPitch>(words, score_mod, mask, row0, col0, tests);
  if constexpr (T::kMods) {
    score_mod.template modify<typename T::Element, true, typename T::Stage>(
        acc, row0, col0, bias, [&](int kb, int mb, const float (&slope)[4]) {
          if constexpr (T::kSlopesWait) {
            ptx::store_shared(p_slot + (mb * T::kKeyBlocks + kb) * 512,
                              make_float4(slope[0], slope[1], slope[2], slope[3]));
          } else {
#pragma unroll
            for (int i = 0; i < 4; ++i) slopes[kb][mb][i] = slope[i];
          }
        });
  } else if (score_mod.p.score_factor != 1.f) {
    ScoreMod::scale_all(acc, score_mod.p.score_factor);
  }
  if (hides) hide_unseen<kPitch>(acc, words);
  exponentiate<T>(acc, score_mod.m.unit_log2, stats, lane);
  if (score_mod.m.rng != nullptr) drop<true, true>(acc, score_mod.m, row0, col0, drop_keys);
}

// dS = P * (dP - delta) of one accumulator block, in place of dP.
__device__ __forceinline__ void score_gradient(float (&dp)[4], float4 weight, float4 stats) {
  dp[0] = weight.x * (dp[0] - stats.y);
  dp[1] = weight.y * (dp[1] - stats.w);
  dp[2] = weight.z * (dp[2] - stats.y);
  dp[3] = weight.w * (dp[3] - stats.w);
}

// The same where a negative weight is one that dropout hit: its dP counts nothing, that of others keep_scale times.
__device__ __forceinline__ void dropped_score_gradient(float (&dp)[4], float4 weight, float4 stats, float keep_scale) {
  const auto gradient = [keep_scale](float dp, float weight, float delta) {
    return fabsf(weight) * (signbit(weight) ? -delta : fmaf(dp, keep_scale, -delta));
  };
  dp[0] = gradient(dp[0], weight.x, stats.y);
  dp[1] = gradient(dp[1], weight.y, stats.w);
  dp[2] = gradient(dp[2], weight.z, stats.y);
  dp[3] = gradient(dp[3], weight.w, stats.w);
}

// Rounds this warp's part of dS into the shared dS tile (keys by queries).
template <typename T>
__device__ __forceinline__ void put_score_gradients(uint32_t ds_tile,
                                                    const float (&ds)[T::kKeyBlocks][T::kPartM / 8][4], int key0,
                                                    int query0, int lane) {
  const uint32_t at = T::DsTile::by_rows(ds_tile, lane) + key0 * T::DsTile::kRowBytes;
#pragma unroll
  for (int kb = 0; kb < T::kKeyBlocks; ++kb) {
#pragma unroll
    for (int mb = 0; mb < T::kPartM / 16; ++mb) {
      put_block<typename T::Element>(T::DsTile::block(at, kb * 16, query0 / 16 + mb), ds[kb][2 * mb],
                                     ds[kb][2 * mb + 1], lane);
    }
  }
}

}  // namespace flash_ext::sm80
