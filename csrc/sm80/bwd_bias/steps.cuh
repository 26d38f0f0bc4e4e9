// What the warps of bwd_bias/kernel.cuh do with one step: loads, products, score gradients.
#pragma once

#include "../../common/bias_stage.cuh"
#include "../../common/fragments.cuh"
#include "../../heuristics.h"
#include "../../mask_kinds.h"
#include "../core/score_gradients.cuh"
#include "search.cuh"

namespace flash_ext::sm80 {

template <typename E, SmemClass kSmemClass>
struct BwdBiasTraits {
  using Element = E;
  static constexpr SmemClass kClass = kSmemClass;
  static constexpr BwdBiasTile kTile = bwd_bias_tile_sm80(kClass);
  static constexpr int kBlockM = kTile.block_m(), kBlockN = kTile.block_n(), kStages = kTile.stages;
  static_assert(kBlockM == kBlockN, "one loop loads both");
  static constexpr int kThreads = kTile.threads(), kWarps = kTile.warps(), kWarpN = kTile.warp_n, kParts = kWarpN / 32;
  static constexpr int kSlice = BwdBiasTile::kSlice;
  static constexpr int kOperandBytes = 2 * kSlice * kBlockM, kStageBytes = 2 * kOperandBytes;
  using Tile = SmemTile<kSlice>;
  using Stage = BiasStage<32, kWarpN>;
  static constexpr int kBiasAt = kStages * kStageBytes, kBiasBytes = kWarps * Stage::kBytes;
  static constexpr int kStatsAt = kBiasAt + 2 * kBiasBytes, kStatsBytes = 8 * kBlockM;
  static constexpr int kMaskAt = kStatsAt + 2 * kStatsBytes, kMaskBytes = kWarps * kParts * 128;
  static constexpr int kSumsAt = kMaskAt + 2 * kMaskBytes;
  static constexpr int kStepsAt = kSumsAt + kTile.sums_bytes(), kSmemBytes = kTile.smem_bytes();
  static_assert(kStepsAt + BwdBiasTile::kSteps * sizeof(BiasStep) == kSmemBytes);
  // What a warp holds of a tile: units of 16 queries x 32 keys, those of its first 32 keys first.
  static constexpr int kUnits = 2 * kParts;
};

// This warp's part of a step: its first query and key in the tile, and where it finds what was loaded for it. Thread
// indices are read anew every time: over the products there is no register left for what comes of them.
template <typename T>
struct BiasPart {
  uint32_t smem, step;

  __device__ static int warp() { return ptx::fresh_thread_idx() / 32; }
  __device__ static int row() { return warp() % T::kTile.warps_m * 32; }
  __device__ static int key() { return warp() / T::kTile.warps_m * T::kWarpN; }
  __device__ uint32_t bias() const { return smem + T::kBiasAt + step % 2 * T::kBiasBytes + warp() * T::Stage::kBytes; }
  __device__ uint32_t stats() const { return smem + T::kStatsAt + step % 2 * T::kStatsBytes; }  // of the tile
  __device__ uint32_t mask() const { return smem + T::kMaskAt + step % 2 * T::kMaskBytes + warp() * (T::kParts * 128); }
  // Of a row of the part; the mask's word of 32 keys.
  __device__ float2 stats_of(int r) const { return ptx::load_shared_pair(stats() + (row() + r) * 8); }
  __device__ uint32_t mask_word(int r, int w) const { return ptx::load_shared_word(mask() + (r * T::kParts + w) * 4); }
};

template <typename T>
using BiasUnits = float[T::kUnits][1][4][4];

template <typename T>
__device__ __forceinline__ void clear_units(BiasUnits<T>& acc) {
#pragma unroll
  for (auto& unit : acc) clear(unit);
}

// acc += A B^T over 16 kSteps columns of a slice: 32 queries, 32 kParts keys, in units of 16 x 32.
template <typename T, int kSteps>
__device__ __forceinline__ void multiply_columns(BiasUnits<T>& acc, uint32_t a_lane, uint32_t b_lane) {
  constexpr int kAhead = 3, kBlocks = 2 * T::kParts, kSlots = kLeftSlots<kAhead, kBlocks>;
  uint32_t a[kSlots][2][4];
  stream_fragments<kSteps * kBlocks, kAhead>(
      [&](int i, uint32_t (&b)[4]) {
        const int ks = i / kBlocks, nb = i % kBlocks;
        if (nb == 0) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            ptx::ldmatrix_x4(a[ks % kSlots][half], T::Tile::block(a_lane, half * 16, ks));
          }
        }
        ptx::ldmatrix_x4(b, T::Tile::block(b_lane, nb * 16, ks));
      },
      [&](int i, const uint32_t (&b)[4]) {
        const int ks = i / kBlocks, nb = i % kBlocks;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float (&unit)[4][4] = acc[nb / 2 * 2 + half][0];
          ptx::mma_m16n8k16<typename T::Element>(unit[nb % 2 * 2], a[ks % kSlots][half], b[0], b[1]);
          ptx::mma_m16n8k16<typename T::Element>(unit[nb % 2 * 2 + 1], a[ks % kSlots][half], b[2], b[3]);
        }
      });
}

// The same over as many columns as the slice has: 64, or 32.
template <typename T>
__device__ __forceinline__ void multiply_slice(BiasUnits<T>& acc, uint32_t a_lane, uint32_t b_lane, int cols) {
  if (cols > T::kSlice / 2) [[likely]] {
    multiply_columns<T, T::kSlice / 16>(acc, a_lane, b_lane);
  } else {
    multiply_columns<T, T::kSlice / 32>(acc, a_lane, b_lane);
  }
}

// Asynchronous loads of a slice; with the last one of a step come its row stats and this warp's bias and mask
// words.
template <typename T>
__device__ __forceinline__ void load_slice(const BwdParams& p, const Modifiers& m, const BiasGrid& grid,
                                           const BiasStep& step, uint32_t smem, uint32_t stage, int slice,
                                           uint32_t it) {
  const bool qk = slice < grid.slices_qk;
  const int col = T::kSlice * (qk ? slice : slice - grid.slices_qk);
  if (step.whole) [[likely]] {
    constexpr int kChunks = T::kSlice / 8, kRowStep = T::kThreads / kChunks;
    const int row = ptx::fresh_thread_idx() / kChunks, chunk = ptx::fresh_thread_idx() % kChunks;
    const uint32_t to = stage + T::Tile::offset(row, chunk);
#pragma unroll
    for (int operand = 0; operand < 2; ++operand) {
      const bool queries = operand == 0;
      const int64_t stride =
          queries ? (qk ? p.q.row_stride : p.dout.row_stride) : (qk ? p.k.row_stride : p.v.row_stride);
      const uint16_t* first = queries ? (qk ? step.q : step.dout) : (qk ? step.k : step.v);
      const uint16_t* from = first + col + chunk * 8 + row * stride;
#pragma unroll
      for (int i = 0; i < T::kBlockM / kRowStep; ++i) {
        ptx::cp_async_16(to + operand * T::kOperandBytes + i * kRowStep * T::Tile::kRowBytes, from, 16);
        from += kRowStep * stride;
      }
    }
  } else {
    const int cols = (qk ? p.problem.head_dim : p.problem.head_dim_v) - col;
#pragma unroll 1
    for (int operand = 0; operand < 2; ++operand) {
      const bool queries = operand == 0;
      const StridedView& view = queries ? (qk ? p.q : p.dout) : (qk ? p.k : p.v);
      const uint16_t* first = queries ? (qk ? step.q : step.dout) : (qk ? step.k : step.v);
      const TileSource source{first + col, view.row_stride, cols, view.aligned};
      load_tile<T::kBlockM, T::kSlice, T::kThreads>(stage + operand * T::kOperandBytes, source,
                                                    queries ? step.rows : step.keys, ptx::fresh_thread_idx());
    }
  }
  if (slice + 1 < grid.slices) return;
  const BiasPart<T> part{smem, it};
  // Queries past the end get zeros, and their scores -inf by the tests of the tile.
  if (const int row = ptx::fresh_thread_idx(); row < T::kBlockM) {
    const bool in = row < step.rows;
    ptx::cp_async_8(part.stats() + row * 8, in ? step.stats + row : step.stats, in ? 8 : 0);
  }
  const int row0 = step.row0 + part.row(), col0 = step.col0 + part.key();
  if (m.bias.ptr != nullptr && m.bias.staged) {
    T::Stage::load(part.bias(), ScoreMod{p.problem, m, step.seq, step.h}, row0, col0);
  }
  if (m.mask.words != nullptr && (step.tests & kTestRows)) {
#pragma unroll
    for (int i = 0; i < T::kParts; ++i) {
      const int index = i * 32 + ptx::fresh_lane(), row = row0 + index / T::kParts, w = col0 / 32 + index % T::kParts;
      const bool in = row < min(m.mask.rows, step.seq.seqlen_q) && w < m.mask.num_words;
      const int64_t at = step.seq.b * m.mask.batch_stride + step.h * m.mask.head_stride + row * m.mask.row_stride +
                         w * m.mask.word_stride;
      ptx::cp_async_4(part.mask() + index * 4, m.mask.words + (in ? at : 0), in ? 4 : 0);
    }
  }
}

// Do the tests of a tile ask for intervals of rows and the mask tensor only?
__device__ __forceinline__ bool is_light(const Modifiers& m, TileTests tests) {
  return (tests & kTestKeys) == 0 && ((tests & kTestRows) == 0 || !asks_any<kMadeRowWords>(m));
}

// acc += dS of this warp's part of a tile, times |distance| for slopes, whose gradient is less the sum of that. For
// what most calls ask: no soft cap, no dropout, light tests, a staged bias or (kByDistance) one by distance. Each thing
// is done for all units before the next, so there are few branches, and code that is not needed lies apart: with a
// branch a unit the walk through the code cost twice the arithmetic.
template <typename T, bool kByDistance>
__device__ __forceinline__ void add_light_gradients(BiasUnits<T>& acc, BiasUnits<T>& acc_s, BiasUnits<T>& acc_dp,
                                                    const ScoreMod& score_mod, const BiasStep& step,
                                                    const BiasPart<T>& part, bool is_slope) {
  const Modifiers& m = score_mod.m;
  const float scale = score_mod.p.scale;
  // f(unit, half, row, key): row 8 half + lane / 4 of a unit and the first of its eight keys, counted in the part.
  const auto for_rows = [](const auto& f) {
    const int lane = ptx::fresh_lane();
#pragma unroll
    for (int unit = 0; unit < T::kUnits; ++unit) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        f(unit, half, unit % 2 * 16 + half * 8 + lane / 4, unit / 2 * 32 + 2 * (lane % 4));
      }
    }
  };
  const int centre0 = step.row0 + part.row() + score_mod.shift(), col0 = step.col0 + part.key();
  const auto distance = [&](int row, int key) { return static_cast<float>(centre0 + row - col0 - key); };
  const auto of_key = [](int i) { return i / 2 * 8 + i % 2; };  // of eight, from the first
  if constexpr (kByDistance) {
    const HeadDistances x = HeadDistances::of(m.by_distance, score_mod.seq.b, score_mod.h, 1.f);
    const TileDistances tile = x.over(m.by_distance, centre0, 32, col0, T::kWarpN);
    for_rows([&](int unit, int half, int row, int key) {
      const float base = fmaf(tile.per_distance, distance(row, key), tile.constant);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        float& s = acc_s[unit][0][i / 2][2 * half + i % 2];
        s = fmaf(s, scale, fmaf(-tile.per_distance, static_cast<float>(of_key(i)), base));
      }
    });
    if (tile.bends) {
#pragma unroll
      for (int unit = 0; unit < T::kUnits; ++unit) {
        x.add_bent<false>(acc_s[unit], m.by_distance, score_mod.seq.b, score_mod.h,
                          first_distance<false>(centre0 + unit % 2 * 16, col0 + unit / 2 * 32), 1.f);
      }
    }
  } else {
    const uint32_t bias_at = part.bias();
#pragma unroll
    for (int unit = 0; unit < T::kUnits; ++unit) {
      T::Stage::template add<typename T::Element, false>(acc_s[unit], scale,
                                                         bias_at + unit % 2 * 16 * T::Stage::kPitch + unit / 2 * 64);
    }
  }
  if (step.tests != 0) [[unlikely]] {
    for_rows([&](int unit, int half, int row, int) {
      const uint32_t word = part.mask_word(row, unit / 2);
      uint32_t bits = (step.tests & kTestRows) ? word : ~0u;
      if (step.tests & kTestInterval) {
        const RowKeys keys = score_mod.row_keys(step.row0 + part.row() + row);
        bits &= interval_word(keys, step.col0 + part.key() + unit / 2 * 32);
      }
      bits >>= 2 * (ptx::fresh_lane() % 4);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        if ((bits & (1u << of_key(i))) == 0) acc_s[unit][0][i / 2][2 * half + i % 2] = -INFINITY;
      }
    });
  }
  for_rows([&](int unit, int half, int row, int key) {
    const float2 stats = part.stats_of(row);
    const float first = is_slope ? distance(row, key) : 1.f, per_key = is_slope ? 1.f : 0.f;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      float weight = ptx::ex2(fmaf(acc_s[unit][0][i / 2][2 * half + i % 2], m.unit_log2, -stats.x));
      const float gradient = acc_dp[unit][0][i / 2][2 * half + i % 2] - stats.y;
      float& sum = acc[unit][0][i / 2][2 * half + i % 2];
      if constexpr (kByDistance) weight *= fabsf(fmaf(-per_key, static_cast<float>(of_key(i)), first));
      sum = fmaf(weight, gradient, sum);
    }
  });
}

// The mask words of one block of rows and 32 keys, as hide() asks for them.
template <typename Word>
struct MaskOfUnit {
  const Word& of;
  __device__ uint32_t word(int block, int row, int) const { return of(8 * block + row); }
};

// The same for everything that a call may ask for, a unit at a time.
template <typename T>
__device__ __forceinline__ void add_gradients(BiasUnits<T>& acc, BiasUnits<T>& acc_s, BiasUnits<T>& acc_dp,
                                              const ScoreMod& score_mod, const BiasStep& step, const BiasPart<T>& part,
                                              bool is_slope, const DropKeys& drop_keys) {
#pragma unroll
  for (int unit = 0; unit < T::kUnits; ++unit) {
    const int row = unit % 2 * 16, row0 = step.row0 + part.row() + row, col0 = step.col0 + part.key() + unit / 2 * 32;
    float2 stats[2];  // (lse * log2 e, delta) of this thread's rows
#pragma unroll
    for (int half = 0; half < 2; ++half) stats[half] = part.stats_of(row + half * 8 + ptx::fresh_lane() / 4);
    const auto word = [&](int row_in_unit) { return part.mask_word(row + row_in_unit, unit / 2); };
    modified_score_gradients<typename T::Element, typename T::Stage, false>(
        acc_s[unit], acc_dp[unit], score_mod, stats, step.tests, MaskOfUnit<decltype(word)>{word}, row0, col0,
        part.bias() + row * T::Stage::kPitch + unit / 2 * 64, drop_keys);
    if (is_slope) {
      ScoreMod::for_each(acc_s[unit], row0 + score_mod.shift(), col0,
                         [](float& s, int centre, int key) { s *= fabsf(static_cast<float>(centre - key)); });
    }
#pragma unroll
    for (int nb = 0; nb < 4; ++nb) {
#pragma unroll
      for (int i = 0; i < 4; ++i) acc[unit][0][nb][i] += acc_s[unit][0][nb][i];
    }
  }
}

}  // namespace flash_ext::sm80
