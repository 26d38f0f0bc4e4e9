// The forward of fwd.cuh with everything of common/modifiers.cuh: masks, biases, softcap, sinks, dropout.
//
// What differs: the tiles to visit come from a list (common/visits.cuh), a tile's keys are taken in parts of kPartN,
// whose scores leave registers for what is added to them, and each warp stages its own part of a 16-bit bias.
//
// Shared memory (bytes, D = padded head_dim):
//   Q     [kBlockM][D]             2 D kBlockM      (each warp reuses its own rows for the output)
//   K, V  [kStages][kBlockN][D]    2 x 2 D kBlockN kStages
//   bias  a warp's rows x kPartN   (2 kPartN + 16) kBlockM, where it fits
#pragma once

#include <type_traits>

#include "../common/bias_stage.cuh"
#include "../common/debug_delay.cuh"
#include "../common/float_results.cuh"
#include "../common/dropout.cuh"
#include "../common/fragments.cuh"
#include "../common/softmax.cuh"
#include "../common/visits.cuh"
#include "../heuristics.h"
#include "compiled_here.cuh"

namespace flash_ext::sm80 {

template <typename E, int D, SmemClass kSmemClass>
struct FwdModTraits {
  using Element = E;
  static constexpr SmemClass kClass = kSmemClass;
  static constexpr int kHeadDim = D;
  static constexpr FwdTile kTile = fwd_mod_tile_sm80(D, kSmemClass);
  static constexpr int kBlockM = kTile.block_m, kBlockN = kTile.block_n, kStages = kTile.stages;
  static constexpr int kPartN = kTile.part_n(), kParts = kBlockN / kPartN;
  static constexpr int kThreads = kTile.threads(), kMBlocks = kTile.m_blocks(), kRows = 2 * kMBlocks;
  static constexpr int kQBytes = 2 * D * kBlockM, kKvBytes = 2 * D * kBlockN;
  static constexpr int kAhead = kMBlocks == 1 && D < 256 ? 3 : 2;
  static constexpr int kBiasBytes =
      bias_stage_bytes(kTile.warps, 16 * kMBlocks, kPartN, kTile.smem_bytes(D), smem_limit(kSmemClass));
  static constexpr int kSmemBytes = kTile.smem_bytes(D) + kBiasBytes;
  using Stage = std::conditional_t<kBiasBytes != 0, BiasStage<16 * kMBlocks, kPartN>, NoBiasStage>;
  using Tile = SmemTile<D>;
  static constexpr int kTopBytes = 4 * kThreads * (kRows + 1);
  static_assert(kSmemBytes + kTopBytes + kModStatic <= smem_limit(kSmemClass));
};

// Raises the maxima and turns the scores of a part into weights in place. The exact maxima, which `state` only follows
// from a distance, go to `top` of this lane, if it is not null.
template <typename T>
__device__ __forceinline__ void weights_of_scores(float (&acc_s)[T::kMBlocks][T::kPartN / 8][4],
                                                  float (&acc_o)[T::kMBlocks][T::kHeadDim / 8][4],
                                                  SoftmaxState<T::kRows>& state, const Modifiers& m, float* top) {
  float tile_max[T::kRows], factor[T::kRows];
#pragma unroll
  for (int r = 0; r < T::kRows; ++r) {
    tile_max[r] = -INFINITY;
#pragma unroll
    for (int nb = 0; nb < T::kPartN / 8; ++nb) {
      tile_max[r] = fmaxf(tile_max[r], fmaxf(acc_s[r / 2][nb][(r % 2) * 2], acc_s[r / 2][nb][(r % 2) * 2 + 1]));
    }
  }
  const bool rescale = state.raise(tile_max, m.unit_log2, factor);
  if (top != nullptr) {
#pragma unroll
    for (int r = 0; r < T::kRows; ++r) top[r] = fmaxf(top[r], tile_max[r]);
  }
  if (rescale) {
#pragma unroll
    for (int mb = 0; mb < T::kMBlocks; ++mb) {
#pragma unroll
      for (int db = 0; db < T::kHeadDim / 8; ++db) scale_block(acc_o[mb][db], factor[2 * mb], factor[2 * mb + 1]);
    }
  }
  const auto weigh = [&](const auto& exponent) {
#pragma unroll
    for (int r = 0; r < T::kRows; ++r) {
#pragma unroll
      for (int nb = 0; nb < T::kPartN / 8; ++nb) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          float& s = acc_s[r / 2][nb][(r % 2) * 2 + c];
          s = ptx::ex2(exponent(s, r));
          state.row_sum[r] += s;
        }
      }
    }
  };
  if (m.bias.ptr != nullptr) {
    // Next to finfo.min the product inside an fma and the rounded one it is compared with are 1e31 apart, and the
    // product with log2(e) is infinite.
    float lowest = state.row_max[0];
#pragma unroll
    for (int r = 1; r < T::kRows; ++r) lowest = fminf(lowest, state.row_max[r]);
    if (__any_sync(0xffffffffu, lowest < kLowMaximum)) {
      weigh([&](float s, int r) { return (s - state.shift(r)) * m.unit_log2; });
      return;
    }
  }
  weigh([&](float s, int r) { return fmaf(s, m.unit_log2, -state.offset(r, m.unit_log2)); });
}

// Completes a row with its sink (-inf: none): returns the factor for the output, and the lse.
template <int kRows>
__device__ __forceinline__ float finish_row(SoftmaxState<kRows>& state, int r, float unit_log2, float sink, float& lse) {
  const float inverse = state.finish(r, unit_log2, lse);
  if (sink == -INFINITY) return inverse;
  // Both denominators, e^lse and e^sink, over the larger of the two.
  const float top = fmaxf(lse, sink);
  const float share = ptx::ex2((lse - top) * kLog2e), sum = share + ptx::ex2((sink - top) * kLog2e);
  lse = top + logf(sum);
  return inverse * share / sum;
}

struct FwdModWork {
  Work w;
  Seat seat;
  bool in_sequence;  // false for rows outside every sequence
  BlockRange range;
  const uint16_t* k;  // first key row of the CTA's sequence and head
  const uint16_t* v;
  Visits visits;
  DropKeys drop_keys;
};

template <typename T>
__device__ __forceinline__ void fwd_mod_body(const FwdParams& p, const Modifiers& m, const Grid& grid) {
  using E = typename T::Element;
  constexpr int D = T::kHeadDim, kBlockM = T::kBlockM, kBlockN = T::kBlockN;
  extern __shared__ __align__(128) unsigned char smem[];
  const int thread_idx = threadIdx.x, lane = thread_idx % 32, warp = thread_idx / 32;

  __shared__ FwdModWork shared;
  __shared__ float shared_top[T::kThreads][T::kRows + 1];
  if (thread_idx == 0) {
    int b = 0;
    Work w = decode_work<kBlockM, true, true>(p.problem, grid, &b);
    reorder_batch(m, w, p.problem.num_heads, b);
    const int h_k = static_cast<int>(divide(w.h, grid.shared));
    shared.w = w;
    shared.in_sequence = b >= 0 && b < p.problem.batch;
    shared.seat = make_seat(p.problem, m, w, b);
    shared.k = row_pointer(p.k, w.b, w.k.start, h_k);
    shared.v = row_pointer(p.v, w.b, w.k.start, h_k);
    shared.range = BlockRange{0, 0};
    if (w.active) shared.range = Scores{p.problem, m, shared.seat, w.h}.template kv_blocks<kBlockM, kBlockN>(w.block);
    shared.drop_keys.make(m, b, w.h);
  }
  __syncthreads();
  const Work& w = shared.w;
  if (!w.active) return;
  const Scores scores{p.problem, m, shared.seat, w.h};

  const uint32_t smem_q = ptx::smem_address(smem);
  const uint32_t smem_k = smem_q + T::kQBytes;
  const uint32_t smem_v = smem_k + T::kStages * T::kKvBytes;
  const int warp_row = warp * 16 * T::kMBlocks;
  const uint32_t stage_bias = smem_v + T::kStages * T::kKvBytes + warp * T::Stage::kBytes;
  const uint32_t q_lane = T::Tile::by_rows(smem_q, lane) + warp_row * T::Tile::kRowBytes;
  const uint32_t k_lane = T::Tile::by_cols(smem_k, lane);
  const uint32_t v_lane = T::Tile::by_rows(smem_v, lane);

  const auto load_k = [&](int stage, int n_block) {
    const int first = n_block * kBlockN;
    const TileSource src{shared.k + first * p.k.row_stride, p.k.row_stride, p.problem.head_dim, p.k.aligned};
    load_tile<kBlockN, D, T::kThreads>(smem_k + stage * T::kKvBytes, src, w.k.length - first, thread_idx);
  };
  const auto load_v = [&](int stage, int n_block) {
    const int first = n_block * kBlockN;
    const TileSource src{shared.v + first * p.v.row_stride, p.v.row_stride, p.problem.head_dim_v, p.v.aligned};
    load_tile<kBlockN, D, T::kThreads>(smem_v + stage * T::kKvBytes, src, w.k.length - first, thread_idx);
  };
  const bool stages_bias = T::Stage::kBytes > 0 && m.bias.ptr != nullptr && m.bias.staged;
  const auto load_bias = [&](int n_block, int part) {
    if (!stages_bias) return;
    T::Stage::load(stage_bias, scores, w.block * kBlockM + warp_row, n_block * kBlockN + part * T::kPartN);
    ptx::cp_async_commit();
  };

  float acc_o[T::kMBlocks][D / 8][4];
  clear(acc_o);
  SoftmaxState<T::kRows> state;
  if (m.row_max != nullptr) {
#pragma unroll
    for (int r = 0; r < T::kRows; ++r) shared_top[thread_idx][r] = -INFINITY;
  }

  bool has_q = false;
  int scanned = 0;
#pragma unroll 1
  do {
    // Last tile first, as in fwd.cuh.
    const int total = shared.range.end - shared.range.begin;
    if (warp == 0) {
      shared.visits.find(scanned, total, lane, [&](int x, VisitedTile& tile) {
        tile.block = shared.range.end - 1 - x;
        return scores.template visit<kBlockM, kBlockN>(w.block, tile.block);
      });
    }
    debug_delay();
    __syncthreads();
    debug_delay();
    scanned = shared.visits.scanned;
    const int count = shared.visits.count;
    if (count > 0) {
      if (!has_q) {
        const int first = w.block * kBlockM;
        const TileSource src{row_pointer(p.q, w.b, w.q.start + first, w.h), p.q.row_stride, p.problem.head_dim,
                             p.q.aligned};
        load_tile<kBlockM, D, T::kThreads>(smem_q, src, w.q.length - first, thread_idx);
        has_q = true;
      }
      load_k(0, shared.visits[0].block);
      if constexpr (T::kStages > 1) load_v(0, shared.visits[0].block);
      load_bias(shared.visits[0].block, 0);
      ptx::cp_async_commit();
    }
    int stage = 0;
#pragma unroll 1
    for (int it = 0; it < count; ++it) {
      debug_delay();
      ptx::cp_async_wait<0>();
      __syncthreads();
      debug_delay();
      const uint32_t kv_at = stage * T::kKvBytes;
      const VisitedTile tile = shared.visits[it];
      const bool more = it + 1 < count;
      if constexpr (T::kStages > 1) {
        stage ^= 1;
        if (more) {
          load_k(stage, shared.visits[it + 1].block);
          load_v(stage, shared.visits[it + 1].block);
          ptx::cp_async_commit();
        }
      } else {
        load_v(0, tile.block);
        ptx::cp_async_commit();
      }
#pragma unroll 1
      for (int part = 0; part < T::kParts; ++part) {
        const int row0 = w.block * kBlockM + warp_row, col0 = tile.block * kBlockN + part * T::kPartN;
        const uint32_t part_at = kv_at + part * T::kPartN * T::Tile::kRowBytes;
        const auto mask = scores.template fetch_mask<false, 16 * T::kMBlocks, T::kPartN>(row0, col0, tile.tests);
        float acc_s[T::kMBlocks][T::kPartN / 8][4];
        multiply_transposed<E, D, T::kAhead>(acc_s, q_lane, k_lane + part_at);
        if (part > 0 && stages_bias) {
          ptx::cp_async_wait<0>();
          __syncwarp();
        }
        scores.template modify<E, false, typename T::Stage>(acc_s, row0, col0, stage_bias,
                                                            [](int, int, const float(&)[4]) {});
        __syncwarp();
        if (part + 1 < T::kParts) {
          load_bias(tile.block, part + 1);
        } else if (more) {
          load_bias(shared.visits[it + 1].block, 0);
        }
        if (tile.tests != 0) scores.template hide<false>(acc_s, row0, col0, tile.tests, mask);
        weights_of_scores<T>(acc_s, acc_o, state, m, m.row_max != nullptr ? shared_top[thread_idx] : nullptr);
        if (m.rng != nullptr) drop<false, false>(acc_s, m, row0, col0, shared.drop_keys);
        if constexpr (T::kStages == 1) {
          static_assert(T::kParts == 1);
          debug_delay();
          ptx::cp_async_wait<0>();
          __syncthreads();
          debug_delay();
          if (more) {
            load_k(0, shared.visits[it + 1].block);
            ptx::cp_async_commit();
          }
        }
        multiply_accumulate<E, D, T::kAhead>(acc_o, acc_s, v_lane + part_at);
      }
    }
    debug_delay();
    __syncthreads();  // everybody has left this segment's list and tiles
  } while (scanned < shared.range.end - shared.range.begin);

  const int first_row = w.block * kBlockM, rows = w.q.length - first_row;
  const int64_t stat = row_stat_offset(p.problem, w, w.h) + first_row;
  const float sink = m.sinks != nullptr && shared.in_sequence ? m.sinks[w.h] : -INFINITY;
#pragma unroll
  for (int mb = 0; mb < T::kMBlocks; ++mb) {
    float inverse[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float row_lse;
      inverse[half] =
          finish_row(state, 2 * mb + half, m.unit_log2, sink, row_lse) * m.keep_scale;
      const int r = warp_row + mb * 16 + half * 8 + lane / 4;
      if (lane % 4 == 0 && r < rows) {
        p.lse[stat + r] = row_lse;
        if (m.row_max != nullptr) m.row_max[stat + r] = shared_top[thread_idx][2 * mb + half] * (m.unit_log2 * kLn2);
      }
    }
#pragma unroll
    for (int j = 0; j < D / 8; ++j) scale_block(acc_o[mb][j], inverse[0], inverse[1]);
  }
  if (p.out.is_float) {
#pragma unroll
    for (int mb = 0; mb < T::kMBlocks; ++mb) {
      store_float_rows<D / 8, false>(p.out, w.b, w.q, w.h, first_row + warp_row + mb * 16 + lane / 4,
                                     p.problem.head_dim_v, lane, [&](int j, int i) { return acc_o[mb][j][i]; });
    }
    return;
  }
#pragma unroll
  for (int mb = 0; mb < T::kMBlocks; ++mb) {
#pragma unroll
    for (int db = 0; db < D / 16; ++db) {
      put_block<E>(T::Tile::block(q_lane, mb * 16, db), acc_o[mb][2 * db], acc_o[mb][2 * db + 1], lane);
    }
  }
  __syncwarp();
  const TileDestination out{row_pointer(p.out, w.b, w.q.start + first_row, w.h), p.out.row_stride, p.problem.head_dim_v,
                            p.out.aligned};
  store_tile<16 * T::kMBlocks, D, 32>(out, smem_q, warp_row, rows, lane);
}

template <typename T>
__global__ void __launch_bounds__(T::kThreads, T::kTile.ctas_per_sm)
    fwd_mod_kernel(const __grid_constant__ FwdParams p, const __grid_constant__ Modifiers m,
                   const __grid_constant__ Grid grid) {
  if constexpr (kCompiledHere<T::kClass>) {
    fwd_mod_body<T>(p, m, grid);
  } else {
    __trap();
  }
}

}  // namespace flash_ext::sm80
