// Gradient of a bias that differs from row to row, for the common calls: dense, hidden at most by intervals (causal,
// window, chunk, first keys, ends of sequences) and a bit mask. Everything else is the portable kernel's
// (sm80/bwd_bias/kernel.cuh), whose idea this is: a CTA owns a tile of the result, or a part of it, and walks what the
// bias is broadcast over, in order, computing scores and dP once more:
//
//   dbias = sum of P * (dO V^T - delta)
//
// A step is one batch entry and head: S = Q K^T and dP = dO V^T of 128 queries and 128 keys, 64 queries a warpgroup.
// Operands pass through a ring of pairs (Q with K, dO with V), in two halves above head_dim 128. A tile of the bias
// stays for all steps of its tile of the result: one of 16 bits that TMA can read comes and leaves as it does, others
// are read by those who need them.
//
// Shared memory, 128-byte swizzled tiles:
//   pairs  [kPairs][2][128 rows][up to 128 columns]
//   bias   [2][128 queries][64 keys], or [128][128] in fp32 (common/own_bias.cuh)
//   barriers
#pragma once

#include "../../common/modifiers.cuh"
#include "../../common/own_bias.cuh"
#include "../bwd/steps.cuh"
#include "../bwd_mod/tiles.h"
#include "../core/roles.cuh"

namespace flash_ext::sm90 {

struct BwdBiasMaps {
  BwdMaps plain;
  CUtensorMap bias;  // boxes of 64 keys and 128 queries
};

struct BwdBiasArgs {
  BwdParams p;
  Modifiers m;
  BiasGradient g;
  Steps q, k, v, dout, bias_steps;
  float unit;  // raw products times this are scores in log2
  int tiles_m, tiles_n;
  int64_t tiles;
  int stat_rows, stat_tiles;  // by tiles: rows of one, tiles of a head
};

// kOwnsBias: the bias is none that TMA can read. kTiles: row statistics are by tiles, as kernels behind it read them.
template <typename E, int D, bool kOwnsBias, bool kTiles = false>
struct BwdBiasTraits {
  using Element = E;
  static constexpr bool kOwn = kOwnsBias, kSharesStats = kTiles;
  static constexpr BwdBiasTile kTile = bwd_bias_tile(D, kOwnsBias);
  static constexpr int kHeadDim = D, kBlock = kTile.kBlock, kThreads = kTile.kThreads;
  // Columns of a pair. Where there are halves, the ring has no room for S and dP: S is made before the pairs of dP
  // come.
  static constexpr int kColumns = BwdBiasTile::columns(D), kHalves = D / kColumns;
  static constexpr int kChunks = chunks_of(kColumns), kConsumerWarps = 8;
  static constexpr int kConsumerRegs = 240, kProducerRegs = 24;
  static constexpr int kOperandBytes = tile_bytes(kBlock, kColumns), kPairBytes = 2 * kOperandBytes,
                       kPairs = kTile.pairs;
  using Own = OwnBias<256, kBlock / 8>;
  static constexpr int kBiasAt = kPairs * kPairBytes, kBiasChunkBytes = kBlock * 128;
  static constexpr int kBiasBytes = kTile.bias_bytes();
  static constexpr int kBarriersAt = kBiasAt + kBiasBytes, kSmemBytes = kTile.smem_bytes(D);
  static_assert(kBiasBytes == (kOwn ? Own::kBytes : 2 * kBiasChunkBytes));
  static_assert(kBarriersAt + 1024 == kSmemBytes && kSmemBytes <= kSmemLimitLarge);
};

template <typename T>
struct BwdBiasBarriers {
  uint32_t smem;
  __device__ uint32_t pair_full(int stage) const { return smem + T::kBarriersAt + 8 * stage; }
  __device__ uint32_t pair_empty(int stage) const { return pair_full(T::kPairs + stage); }
  __device__ uint32_t bias_full() const { return pair_full(2 * T::kPairs); }
  __device__ uint32_t bias_empty() const { return pair_full(2 * T::kPairs + 1); }
  __device__ void init() const {
    for (int i = 0; i < T::kPairs; ++i) {
      ptx::mbarrier_init(pair_full(i), 2);
      ptx::mbarrier_init(pair_empty(i), T::kConsumerWarps);
    }
    ptx::mbarrier_init(bias_full(), 1);
    ptx::mbarrier_init(bias_empty(), T::kConsumerWarps);
    ptx::fence_mbarrier_init();
  }
};

// A part of a tile of the result, and the steps that add to it: every splits-th of those of the tile.
struct BiasGradTile {
  int b, h, m, n, part;
  int steps;  // of the tile
  int heads;  // of a batch entry, from h on
  __device__ BiasGradTile(const BwdBiasArgs& a, int64_t index) {
    n = static_cast<int>(index % a.tiles_n);
    index /= a.tiles_n;
    m = static_cast<int>(index % a.tiles_m);
    index /= a.tiles_m;
    h = static_cast<int>(index % a.g.heads);
    index /= a.g.heads;
    b = static_cast<int>(index % a.g.batch);
    part = static_cast<int>(index / a.g.batch);
    heads = a.g.heads == 1 ? a.p.problem.num_heads : 1;
    steps = (a.g.batch == 1 ? a.p.problem.batch : 1) * heads;
  }
};

// What intervals of keys leave of a tile: part of it is seen, all of it is.
struct SeenOfTile {
  bool any, all;
  template <int kBlock>
  __device__ static SeenOfTile of(const ScoreMod& score_mod, int m, int n) {
    const int r0 = m * kBlock, r1 = min(r0 + kBlock, score_mod.seq.seqlen_q) - 1;
    const int c0 = n * kBlock, c1 = min(c0 + kBlock, score_mod.seq.seqlen_k) - 1;
    const RowKeys first = score_mod.row_keys(r0), last = score_mod.row_keys(r1);
    SeenOfTile x;
    x.any = (c0 < last.end && c1 >= first.begin) || c0 < last.always;
    x.all = c0 + kBlock <= score_mod.seq.seqlen_k && c1 < first.end && c0 >= last.begin;
    return x;
  }
};

// lse log2 e and delta of a row of one of all heads, from those by tiles.
__device__ __forceinline__ float2 tile_stats(const BwdBiasArgs& a, int64_t head, int row) {
  const int tile = row / a.stat_rows;
  const float* const stats = a.p.row_stats + ((head * a.stat_tiles + tile) * 2 - tile) * a.stat_rows + row;
  return make_float2(-stats[0], -stats[a.stat_rows]);
}

__device__ __forceinline__ SeqInfo dense_seq_info(const Problem& p) { return {0, p.seqlen_q, p.seqlen_k, 0, 0, 0}; }

template <typename T>
__device__ __forceinline__ void load_bias_steps(const BwdBiasArgs& a, const BwdBiasMaps& maps, uint32_t smem,
                                                BwdBiasBarriers<T> bars) {
  const Problem& p = a.p.problem;
  const SeqInfo seq = dense_seq_info(p);
  const ScoreMod score_mod{p, a.m, seq, 0};
  const int shared = p.num_heads / p.num_heads_k;
  PipelineState<T::kPairs> ring;
  ring.phase = 1;
  [[maybe_unused]] uint32_t bias_phase = 1;
#pragma unroll 1
  for (int64_t index = blockIdx.x; index < a.tiles; index += gridDim.x) {
    const BiasGradTile tile(a, index);
    if (!SeenOfTile::of<T::kBlock>(score_mod, tile.m, tile.n).any) continue;
    if constexpr (!T::kOwn) {
      wait(bars.bias_empty(), bias_phase);
      bias_phase ^= 1;
      ptx::mbarrier_arrive_expect_tx(bars.bias_full(), T::kBiasBytes);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        ptx::tma_load_5d(smem + T::kBiasAt + i * T::kBiasChunkBytes, &maps.bias, bars.bias_full(),
                         tile.n * T::kBlock + 64 * i, tile.m * T::kBlock, tile.h * a.bias_steps.head,
                         tile.b * a.bias_steps.batch, 0);
      }
    }
#pragma unroll 1
    for (int step = tile.part; step < tile.steps; step += a.g.splits) {
      const int b = tile.b + step / tile.heads, h = tile.h + step % tile.heads;
      const RowCoordinates queries{tile.m * T::kBlock, b, 0}, keys{tile.n * T::kBlock, b, 0};
      const auto load = [&](const CUtensorMap& of_rows, const Steps& row_steps, const CUtensorMap& of_keys,
                            const Steps& key_steps) {
#pragma unroll
        for (int half = 0; half < T::kHalves; ++half) {
          const int column = half * T::kColumns;
          wait(bars.pair_empty(ring.stage), ring.phase);
          const uint32_t to = smem + ring.stage * T::kPairBytes, full = bars.pair_full(ring.stage);
          copy_tile<T::kChunks, T::kBlock>(of_rows, row_steps, to, full, queries, h, column);
          copy_tile<T::kChunks, T::kBlock>(of_keys, key_steps, to + T::kOperandBytes, full, keys, h / shared, column);
          ring.advance();
        }
      };
      load(maps.plain.q, a.q, maps.plain.k, a.k);
      load(maps.plain.dout, a.dout, maps.plain.v, a.v);
    }
  }
}

// s = P of 16 rows and 128 keys, from raw products; the bias lies at `bias`, this warp's rows.
template <typename T>
__device__ __forceinline__ void form_bias_weights(float (&s)[64], uint32_t bias, const float (&minus_lse)[2],
                                                  float unit) {
  const int lane = ptx::fresh_lane();
  const uint32_t at = bias + lane % 16 * 128;
#pragma unroll
  for (int n = 0; n < 8; ++n) {
    uint32_t r[4];
    ptx::ldmatrix_x4(r, at + n / 4 * T::kBiasChunkBytes + (((n % 4 * 2 + lane / 16) ^ (lane % 8)) << 4));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 x = ptx::unpack2<typename T::Element>(r[i]);
      float* pair = &s[8 * n + 2 * i];
      pair[0] = ptx::ex2(fmaf(pair[0], unit, fmaf(x.x, kLog2e, minus_lse[i % 2])));
      pair[1] = ptx::ex2(fmaf(pair[1], unit, fmaf(x.y, kLog2e, minus_lse[i % 2])));
    }
  }
}

// The same from a thread's own bias.
template <typename T>
__device__ __forceinline__ void form_own_bias_weights(float (&s)[64], uint32_t bias, const float (&minus_lse)[2],
                                                      float unit) {
#pragma unroll
  for (int n = 0; n < 16; ++n) {
    const float4 x = ptx::load_shared(T::Own::at(bias, ptx::fresh_thread_idx() - 128, n));
    float* four = &s[4 * n];
    four[0] = ptx::ex2(fmaf(four[0], unit, fmaf(x.x, kLog2e, minus_lse[0])));
    four[1] = ptx::ex2(fmaf(four[1], unit, fmaf(x.y, kLog2e, minus_lse[0])));
    four[2] = ptx::ex2(fmaf(four[2], unit, fmaf(x.z, kLog2e, minus_lse[1])));
    four[3] = ptx::ex2(fmaf(four[3], unit, fmaf(x.w, kLog2e, minus_lse[1])));
  }
}

// Weights of keys that rows do not see become 0. `row` and `col` are those of s[0].
__device__ __forceinline__ void hide_by_intervals(float (&s)[64], const ScoreMod& score_mod, int row, int col) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const RowKeys keys = score_mod.row_keys(row + 8 * half);
#pragma unroll
    for (int j = 0; j < 16; ++j) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int key = col + 8 * j + c;
        if (!((key >= keys.begin && key < keys.end) || key < keys.always)) s[4 * j + 2 * half + c] = 0.f;
      }
    }
  }
}

// What a bit mask shows of a row of a tile, to one thread: bit 8 i + 2 j + c is key 32 i + 8 j + 2 (lane % 4) + c.
__device__ __forceinline__ uint32_t load_seen_keys(const BitRows& mask, int b, int h, int row, int n) {
  uint32_t seen = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t x = ScoreMod::word(mask, b, h, row, 4 * n + i) >> (2 * (ptx::fresh_lane() % 4)) & 0x03030303;
    seen |= ((x | x >> 6 | x >> 12 | x >> 18) & 0xff) << 8 * i;
  }
  return seen;
}

// Weights of keys that a mask hides become 0.
__device__ __forceinline__ void hide_by_mask(float (&s)[64], const uint32_t (&seen)[2]) {
#pragma unroll
  for (int i = 0; i < 64; ++i) {
    if ((seen[i / 2 % 2] >> (i / 4 * 2 + i % 2) & 1) == 0) s[i] = 0.f;
  }
}

// Stores a warp's 16 rows of the result where they are fp32 or do not begin on 16 bytes, from registers.
template <typename E>
__device__ __forceinline__ void store_bias_scalars(const BiasGradient& g, const BiasGradTile& tile,
                                                   const float (&x)[64], int row0, int col0) {
  const int lane = ptx::fresh_lane(), row = row0 + lane / 4, col = col0 + 2 * (lane % 4);
  const int64_t head = (int64_t{1} * tile.part * g.batch + tile.b) * g.heads + tile.h;
  const bool in_pairs = g.is_float && g.cols % 2 == 0;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int64_t first = (head * g.rows + row + 8 * half) * g.cols + col;
    const int left = row + 8 * half < g.rows ? g.cols - col : 0;
#pragma unroll
    for (int n = 0; n < 16; ++n) {
      const float lo = x[4 * n + 2 * half], hi = x[4 * n + 2 * half + 1];
      if (in_pairs) {
        if (8 * n < left) *reinterpret_cast<float2*>(static_cast<float*>(g.out) + first + 8 * n) = make_float2(lo, hi);
        continue;
      }
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        if (8 * n + c >= left) continue;
        const float value = c == 0 ? lo : hi;
        if (g.is_float) {
          static_cast<float*>(g.out)[first + 8 * n + c] = value;
        } else {
          static_cast<uint16_t*>(g.out)[first + 8 * n + c] = static_cast<uint16_t>(ptx::pack2<E>(value, 0.f));
        }
      }
    }
  }
}

// Where a warp's 16 rows of the result go, two rows of 16-byte pieces at a time; put(i) gives the i-th piece of a lane.
template <typename T, typename Put>
__device__ __forceinline__ void store_bias_rows(const BiasGradient& g, const BiasGradTile& tile, int row0,
                                                const Put& put) {
  const int lane = ptx::fresh_lane(), odd = lane / 16, col = tile.n * T::kBlock + lane % 16 * 8;
  const int64_t first = ((static_cast<int64_t>(tile.b) * g.heads + tile.h) * g.rows + row0 + odd) * g.cols + col;
  uint16_t* to = static_cast<uint16_t*>(g.out) + first;
  const int left = col < g.cols ? g.rows - row0 - odd : 0;
#pragma unroll
  for (int i = 0; i < 8; ++i, to += 2 * g.cols) {
    if (2 * i < left) *reinterpret_cast<float4*>(to) = put(i);
  }
}

// The same by way of the place of the rows' bias.
template <typename T>
__device__ __forceinline__ void store_bias_sums(const BiasGradient& g, const BiasGradTile& tile, const float (&x)[64],
                                                uint32_t place, int row0) {
  const int lane = ptx::fresh_lane(), odd = lane / 16, piece = lane % 16;
  __syncwarp();
#pragma unroll
  for (int n = 0; n < 8; ++n) {
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) words[i] = ptx::pack2<typename T::Element>(x[8 * n + 2 * i], x[8 * n + 2 * i + 1]);
    ptx::stmatrix(place + n / 4 * T::kBiasChunkBytes + lane % 16 * 128 + (((n % 4 * 2 + lane / 16) ^ (lane % 8)) << 4),
                  words);
  }
  __syncwarp();
  const uint32_t from = place + piece / 8 * T::kBiasChunkBytes + odd * 128;
  store_bias_rows<T>(g, tile, row0,
                     [&](int i) { return ptx::load_shared(from + i * 256 + (((piece ^ (2 * i + odd)) % 8) << 4)); });
  ptx::fence_proxy_async();  // the next bias comes by TMA
  __syncwarp();
}

template <typename T>
__device__ __forceinline__ void consume_bias_steps(const BwdBiasArgs& a, uint32_t smem, BwdBiasBarriers<T> bars,
                                                   int group) {
  using E = typename T::Element;
  constexpr int kBlock = T::kBlock;
  const Problem& p = a.p.problem;
  const int warp = (threadIdx.x / 32) % 4, warp_row = group * 64 + warp * 16;
  const uint32_t place = smem + T::kBiasAt + warp_row * 128;
  const uint32_t own = smem + T::kBiasAt;
  const bool in_pieces = !T::kOwn && !a.g.is_float && a.g.cols % 8 == 0;
  const SeqInfo seq = dense_seq_info(p);
  const ScoreMod score_mod{p, a.m, seq, 0};
  const auto arrive = [&](uint32_t bar) { ptx::mbarrier_arrive_for_warp(bar, ptx::fresh_lane() == 0); };
  PipelineState<T::kPairs> ring;
  [[maybe_unused]] uint32_t bias_phase = 0;
#pragma unroll 1
  for (int64_t index = blockIdx.x; index < a.tiles; index += gridDim.x) {
    const BiasGradTile tile(a, index);
    const SeenOfTile seen = SeenOfTile::of<kBlock>(score_mod, tile.m, tile.n);
    const int row0 = tile.m * kBlock + warp_row;
    const bool has_rows = tile.m * kBlock + group * 64 < p.seqlen_q;  // else this warpgroup passes pairs on
    float sum[64];
    clear(sum);
    if (!seen.any) {
      if (in_pieces) {
        store_bias_rows<T>(a.g, tile, row0, [](int) { return make_float4(0.f, 0.f, 0.f, 0.f); });
      } else {
        store_bias_scalars<E>(a.g, tile, sum, row0, tile.n * kBlock);
      }
      continue;
    }
    if constexpr (T::kOwn) {
      const BiasView& bias = a.m.bias;
      T::Own::template load<E>(own, ptx::fresh_thread_idx() - 128, bias, tile.b, tile.h, row0 + ptx::fresh_lane() / 4,
                               tile.n * kBlock + 2 * (ptx::fresh_lane() % 4), min(bias.rows, p.seqlen_q),
                               min(bias.cols, p.seqlen_k));
    } else {
      wait(bars.bias_full(), bias_phase);
      bias_phase ^= 1;
    }
#pragma unroll 1
    for (int step = tile.part; step < tile.steps; step += a.g.splits) {
      if (!has_rows) {
        for_steps<0, 2 * T::kHalves>([&](auto) {
          wait(bars.pair_full(ring.stage), ring.phase);
          arrive(bars.pair_empty(ring.stage));
          ring.advance();
        });
        continue;
      }
      const int b = tile.b + step / tile.heads, h = tile.h + step % tile.heads;
      const int row = row0 + ptx::fresh_lane() / 4;
      const int64_t head = static_cast<int64_t>(b) * p.num_heads + h;
      float minus_lse[2], minus_delta[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float2* stats = reinterpret_cast<const float2*>(a.p.row_stats) + head * p.seqlen_q + row;
        float2 x = make_float2(INFINITY, 0.f);
        if (row + 8 * half < p.seqlen_q) x = T::kSharesStats ? tile_stats(a, head, row + 8 * half) : stats[8 * half];
        minus_lse[half] = -x.x;
        minus_delta[half] = -x.y;
      }
      float s[64], dp[64];
      const auto issue = [&](float (&to)[64]) {
        ptx::warpgroup_fence_operand(to);
        for_steps<0, T::kHalves>([&](auto half) {
          wait(bars.pair_full(ring.stage), ring.phase);
          const uint32_t rows = smem + ring.stage * T::kPairBytes + group * 64 * 128;
          const uint32_t keys = smem + ring.stage * T::kPairBytes + T::kOperandBytes;
          ptx::wgmma_fence();
          issue_products<E, T::kColumns, kBlock, kBlock, (decltype(half)::value > 0)>(
              to, uniform(descriptor_low(rows, 16)), uniform(descriptor_low(keys, 16)));
          ring.advance();
        });
        ptx::wgmma_commit();
      };
      // Pairs of the products that end last but `ago`.
      const auto free_pairs = [&](int ago) {
#pragma unroll
        for (int i = 1; i <= T::kHalves; ++i) {
          const int stage = ring.stage - ago * T::kHalves - i;
          arrive(bars.pair_empty(stage < 0 ? stage + T::kPairs : stage));
        }
      };
      constexpr bool kBoth = T::kHalves == 1;
      ptx::warpgroup_fence_operand(sum);
      issue(s);
      if constexpr (kBoth) issue(dp);
      uint32_t seen_keys[2] = {~0u, ~0u};
      if (a.m.mask.words != nullptr) {
#pragma unroll
        for (int half = 0; half < 2; ++half) seen_keys[half] = load_seen_keys(a.m.mask, b, h, row + 8 * half, tile.n);
      }
      ptx::wgmma_wait<kBoth ? 1 : 0>();
      ptx::warpgroup_fence_operand(s);
      free_pairs(kBoth ? 1 : 0);
      if constexpr (!kBoth) issue(dp);
      if constexpr (T::kOwn) {
        form_own_bias_weights<T>(s, own, minus_lse, a.unit);
      } else {
        form_bias_weights<T>(s, place, minus_lse, a.unit);
      }
      if ((seen_keys[0] & seen_keys[1]) != ~0u) hide_by_mask(s, seen_keys);
      if (!seen.all) hide_by_intervals(s, score_mod, row, tile.n * kBlock + 2 * (ptx::fresh_lane() % 4));
#pragma unroll
      for (int i = 0; i < 64; ++i) sum[i] = fmaf(s[i], minus_delta[i / 2 % 2], sum[i]);
      ptx::warpgroup_fence_operand(s);
      ptx::warpgroup_fence_operand(sum);
      ptx::wgmma_wait<0>();
      ptx::warpgroup_fence_operand(dp);
      free_pairs(0);
#pragma unroll
      for (int i = 0; i < 64; ++i) sum[i] = fmaf(s[i], dp[i], sum[i]);
    }
    if (in_pieces) {
      store_bias_sums<T>(a.g, tile, sum, place, row0);
    } else {
      store_bias_scalars<E>(a.g, tile, sum, row0, tile.n * kBlock);
    }
    if constexpr (!T::kOwn) arrive(bars.bias_empty());
  }
}

template <typename T>
__global__ void __launch_bounds__(T::kThreads, 1)
    bwd_bias_sm90_kernel(const __grid_constant__ BwdBiasArgs a, const __grid_constant__ BwdBiasMaps maps) {
  const auto produce = [&](const auto& cta, int warp) {
    if (warp == 0 && threadIdx.x == 0) load_bias_steps<T>(a, maps, cta.smem, cta.bars);
  };
  run_cta<T, void, BwdBiasBarriers<T>>(
      0, 0, [](const auto&) {}, produce,
      [&](const auto& cta, int group) { consume_bias_steps<T>(a, cta.smem, cta.bars, group - 1); });
}

}  // namespace flash_ext::sm90
