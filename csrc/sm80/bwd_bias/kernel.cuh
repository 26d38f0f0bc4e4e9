// Gradient of an additive bias, and of ALiBi slopes, on mma.sync. A CTA owns a tile of the result and walks
// whatever the bias is broadcast over, recomputing the scores, so that every element is summed by one thread in a
// fixed order and memory is that of the result:
//
//   dS = P * (keep * dO V^T - delta),  dbias = sum of dS over broadcast dimensions,
//   dslope = -sum of dS * |row + shift - key|
//
// The gradient of a table by distance is summed over all rows and keys, too. A CTA keeps the sum of tiles at one
// distance from the diagonal, and adds its diagonals to the entries when the next tile lies elsewhere; all tiles beyond
// the table's reach are one such sum.
//
// Two matrix products more than a backward without it. Where a bias is broadcast there may be few tiles, so what they
// sum over is split into parts that the caller adds in order.
//
// A step is one tile of scores. Q and K, then dO and V, pass through a ring of slices of 64 columns, so neither
// registers nor shared memory depend on head_dim, and one kernel serves all of them. CTAs are as many as fit the GPU;
// each takes tile after tile, and loads the first slices of one while it finishes the one before.
//
// Shared memory (bytes):
//   slices  [kStages][2 kBlockM][64]   of Q or dO, then of K or V
//   bias    [2][a warp's queries][its keys], rows padded
//   stats   [2][kBlockM]               8 a row
//   mask    [2][kBlockM][kBlockN / 32] words
//   sums    of warps beside or below each other, where columns or rows are summed
//   steps   [kSteps]                   found, and not yet taken
#pragma once

#include "../../common/debug_delay.cuh"
#include "../core/compiled_here.cuh"
#include "search.cuh"
#include "steps.cuh"

namespace flash_ext::sm80 {

// Where the tile of a step lies: its first key less its first row's place, beyond the reach of a table all the same.
template <typename T>
__device__ __forceinline__ int band_of(const BiasGradient& g, const Modifiers& m, const BiasStep& step) {
  if (g.reach < 0) return 0;
  const int shift = m.top_left ? 0 : step.seq.seqlen_k - step.seq.seqlen_q, far = g.reach + T::kBlockM - 1;
  return min(max(step.col0 - step.row0 - shift, -far), far);
}

// Adds the diagonals of a sum of tiles to the entries of a table, which no other CTA touches. `stage`: this warp's
// place for a bias, which such calls have none of; `stages`: that of the first warp.
//
// A lane sums what it holds of each diagonal of 8 x 8 blocks, then a diagonal of the warp's part is the sum of 8 such
// sums, of different lanes.
template <typename T>
__device__ __forceinline__ void add_to_table(const BiasUnits<T>& acc, const BiasGradient& g, const BiasTile& tile,
                                             int band, unsigned char* stages, float* sums) {
  constexpr int kBlocks = 4 * T::kParts, kDiagonals = kBlocks + 3;  // of blocks
  constexpr int kPitch = 36;  // of the sums of 32 lanes; without conflicts of banks
  constexpr int kWarpDiagonals = 32 + T::kWarpN;  // from key - row = -31 on, and one more
  static_assert((2 * kDiagonals * kPitch + kWarpDiagonals) * 4 <= T::Stage::kBytes);
  static_assert(2 * T::kBlockM * 4 <= T::kStepsAt - T::kSumsAt);
  const int thread_idx = ptx::fresh_thread_idx(), lane = ptx::fresh_lane(), warp = thread_idx / 32;
  const auto stage_of = [&](int w) { return reinterpret_cast<float*>(stages + w * T::Stage::kBytes); };
  float* const own = stage_of(warp);
  __syncwarp();
#pragma unroll
  for (int diagonal = 0; diagonal < kDiagonals; ++diagonal) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      float sum = 0.f;
#pragma unroll
      for (int few = 0; few < 4; ++few) {  // rows 8 few + lane / 4
        const int many = diagonal - 3 + few;
        if (many >= 0 && many < kBlocks) sum += acc[many / 4 * 2 + few / 2][0][many % 4][few % 2 * 2 + c];
      }
      own[(2 * diagonal + c) * kPitch + lane] = sum;
    }
  }
  __syncwarp();
#pragma unroll
  for (int first = 0; first < kWarpDiagonals; first += 32) {
    const int from = first + lane + 1;  // key - row + 32
    const int block = from / 8 - 1, offset = from % 8;
    float sum = 0.f;
#pragma unroll
    for (int row = 0; row < 8; ++row) {
      const int key = row + offset, diagonal = block + key / 8;
      if (diagonal < 0 || diagonal >= kDiagonals) continue;
      sum += own[(2 * diagonal + key % 2) * kPitch + 4 * row + key % 8 / 2];
    }
    own[2 * kDiagonals * kPitch + first + lane] = sum;
  }
  debug_delay();
  __syncthreads();
  debug_delay();
  float* const entries = static_cast<float*>(g.out) + g.reach +
                         ((static_cast<int64_t>(tile.split) * g.batch + tile.b) * g.heads + tile.h) * g.cols;
#pragma unroll 1
  for (int i = thread_idx; i < 2 * T::kBlockM; i += T::kThreads) {  // key - row = i - (kBlockM - 1)
    float sum = 0.f;
#pragma unroll 1
    for (int w = 0; w < T::kWarps; ++w) {
      const int at = i - (T::kBlockM - 1) + 31 + w % T::kTile.warps_m * 32 - w / T::kTile.warps_m * T::kWarpN;
      if (at >= 0 && at < kWarpDiagonals - 1) sum += stage_of(w)[2 * kDiagonals * kPitch + at];
    }
    sums[i] = sum;
    const int distance = band + i - (T::kBlockM - 1);
    if (abs(distance) < g.reach) entries[distance] += sum;
  }
  debug_delay();
  __syncthreads();
  debug_delay();
  // What lies at the ends of the table and beyond, by one warp each.
  if (warp >= 2) return;
  float sum = 0.f;
#pragma unroll 1
  for (int i = lane; i < 2 * T::kBlockM - 1; i += 32) {
    const int distance = band + i - (T::kBlockM - 1);
    if (warp == 0 ? distance >= g.reach || g.reach == 0 : distance <= -g.reach) sum += sums[i];
  }
#pragma unroll
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(ptx::kFullWarp, sum, step);
  if (lane == 0 && warp == 0) entries[g.reach] += sum;
  if (lane == 0 && warp == 1 && g.reach > 0) entries[-g.reach] += sum;
}

// Writes a tile of the result. `stage` is what this warp has staged of the bias, no longer needed.
template <typename T>
__device__ __forceinline__ void write_bias_tile(const BiasUnits<T>& acc, const BiasGradient& g, const BiasTile& tile,
                                                uint32_t stage, float* sums) {
  using E = typename T::Element;
  const int thread_idx = ptx::fresh_thread_idx(), lane = ptx::fresh_lane(), warp = thread_idx / 32;
  const int warp_m = warp % T::kTile.warps_m, warp_n = warp / T::kTile.warps_m;
  const int row0 = tile.m * T::kBlockM + warp_m * 32, col0 = tile.n * T::kBlockN + warp_n * T::kWarpN;
  const int64_t head = ((static_cast<int64_t>(tile.split) * g.batch + tile.b) * g.heads + tile.h) * g.rows * g.cols;
  if (!g.sum_rows && !g.sum_cols && !g.is_float && g.cols % 8 == 0) {
    __syncwarp();
#pragma unroll
    for (int unit = 0; unit < T::kUnits; ++unit) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = unit % 2 * 16 + lane % 16, col = unit / 2 * 32 + half * 16 + lane / 16 * 8;
        const uint32_t at = stage + row * T::Stage::kPitch + col * 2;
        put_block<E>(at, acc[unit][0][2 * half], acc[unit][0][2 * half + 1], lane);
      }
    }
    __syncwarp();
    constexpr int kChunks = T::kWarpN / 8, kRowStep = 32 / kChunks;
    const int row = row0 + lane / kChunks, col = col0 + lane % kChunks * 8;
    uint16_t* out = static_cast<uint16_t*>(g.out) + head + static_cast<int64_t>(row) * g.cols + col;
#pragma unroll
    for (int i = 0; i < 32 / kRowStep; ++i) {
      const int in_part = lane / kChunks + i * kRowStep;
      const float4 x = ptx::load_shared(stage + in_part * T::Stage::kPitch + lane % kChunks * 16);
      if (col < g.cols && row + i * kRowStep < g.rows) *reinterpret_cast<float4*>(out) = x;
      out += static_cast<int64_t>(kRowStep) * g.cols;
    }
    return;
  }
  const auto put = [&](int row, int col, float x) {
    if (row >= g.rows || col >= g.cols) return;
    const int64_t at = head + static_cast<int64_t>(row) * g.cols + col;
    if (g.is_slope) x = -x;
    if (g.is_float) {
      static_cast<float*>(g.out)[at] = x;
    } else {
      static_cast<uint16_t*>(g.out)[at] = static_cast<uint16_t>(ptx::pack2<E>(x, 0.f));
    }
  };
  if (!g.sum_rows && !g.sum_cols) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {  // rows lane / 4 + 8 i
#pragma unroll
      for (int nb = 0; nb < 4 * T::kParts; ++nb) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const float x = acc[nb / 4 * 2 + i / 2][0][nb % 4][i % 2 * 2 + c];
          put(row0 + i * 8 + lane / 4, col0 + nb * 8 + 2 * (lane % 4) + c, x);
        }
      }
    }
    return;
  }
  if (!g.sum_rows) {  // columns only: a row lies in the four lanes of a quad
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float sum = 0.f;
#pragma unroll
      for (int nb = 0; nb < 4 * T::kParts; ++nb) {
        sum += acc[nb / 4 * 2 + i / 2][0][nb % 4][i % 2 * 2] + acc[nb / 4 * 2 + i / 2][0][nb % 4][i % 2 * 2 + 1];
      }
      sum += __shfl_xor_sync(ptx::kFullWarp, sum, 1);
      sum += __shfl_xor_sync(ptx::kFullWarp, sum, 2);
      if (lane % 4 == 0) sums[warp_n * T::kBlockM + warp_m * 32 + i * 8 + lane / 4] = sum;
    }
  } else {
#pragma unroll
    for (int nb = 0; nb < 4 * T::kParts; ++nb) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        float sum = 0.f;
#pragma unroll
        for (int i = 0; i < 4; ++i) sum += acc[nb / 4 * 2 + i / 2][0][nb % 4][i % 2 * 2 + c];
#pragma unroll
        for (int step = 4; step < 32; step *= 2) sum += __shfl_xor_sync(ptx::kFullWarp, sum, step);
        if (lane < 4) sums[warp_m * T::kBlockN + warp_n * T::kWarpN + nb * 8 + 2 * lane + c] = sum;
      }
    }
  }
  debug_delay();
  __syncthreads();
  debug_delay();
  if (g.sum_rows && g.sum_cols) {
    if (warp > 0) return;
    float sum = 0.f;
    for (int i = lane; i < T::kTile.warps_m * T::kBlockN; i += 32) sum += sums[i];
#pragma unroll
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(ptx::kFullWarp, sum, step);
    if (lane == 0) put(0, 0, sum);
  } else if (thread_idx < T::kBlockM) {
    float sum = 0.f;
    const int count = g.sum_rows ? T::kTile.warps_m : T::kTile.warps_n;
    for (int i = 0; i < count; ++i) sum += sums[i * T::kBlockM + thread_idx];
    const int at = (g.sum_rows ? tile.n : tile.m) * T::kBlockM + thread_idx;
    put(g.sum_rows ? 0 : at, g.sum_rows ? at : 0, sum);
  }
}

template <typename T>
__device__ __forceinline__ void bwd_bias_body(const BwdParams& p, const Modifiers& m, const BiasGradient& g,
                                              const BiasGrid& grid) {
  constexpr int kAhead = T::kStages - 1;
  extern __shared__ __align__(128) unsigned char smem_raw[];
  __shared__ BiasSearch search;
  __shared__ DropKeys drop_keys[2];
  const uint32_t smem = ptx::smem_address(smem_raw);
  const BiasSteps<T> steps{p, m, g, grid, search, reinterpret_cast<BiasStep*>(smem_raw + T::kStepsAt)};
  if (threadIdx.x < 32) {
    if (ptx::fresh_lane() == 0) steps.begin();
    __syncwarp();
    steps.find(2, ptx::fresh_lane());
  }
  debug_delay();
  __syncthreads();
  debug_delay();
  if (steps[0].tests == kSkipTile) return;

  // Loads what comes kAhead slices after slice `slice` of step `it`, which lies in stage `stage`.
  const auto load_ahead = [&](uint32_t it, int slice, uint32_t stage) {
    int ahead = slice + kAhead;
#pragma unroll
    for (int i = 0; i < (kAhead + 1) / 2; ++i) {  // a step has two slices at least
      if (ahead >= grid.slices) ahead -= grid.slices, ++it;
    }
    const BiasStep& step = steps[it];
    if (step.tests != kSkipTile) {
      load_slice<T>(p, m, grid, step, smem, smem + (stage + kAhead) % T::kStages * T::kStageBytes, ahead, it);
    }
    ptx::cp_async_commit();
  };
#pragma unroll 1
  for (int i = 0; i < kAhead; ++i) load_ahead(0, i - kAhead, i + T::kStages - kAhead);

  BiasUnits<T> acc;
  clear_units<T>(acc);
#pragma unroll 1
  for (uint32_t it = 0, more = true; more; ++it) {
    // What these write is read behind the next barrier, and what they overwrite was read before the last one.
    if (BiasPart<T>::warp() == 0) steps.find(it + 3, ptx::fresh_lane());
    if (m.rng != nullptr && ptx::fresh_thread_idx() == T::kThreads - 1) {
      drop_keys[it % 2].make(m, steps[it].seq.b, steps[it].h);
    }
    BiasUnits<T> acc_s, acc_dp;
    clear_units<T>(acc_s);
    clear_units<T>(acc_dp);
#pragma unroll 1
    for (int slice = 0; slice < grid.slices; ++slice) {
      ptx::cp_async_wait<kAhead - 1>();
      debug_delay();
      __syncthreads();  // this slice is there, and everybody has left the one before it
      debug_delay();
      const uint32_t stage = (it * grid.slices + slice) % T::kStages;
      // Half of the warps load first and the others multiply first: tensor cores work while addresses are made.
#pragma unroll 1
      for (int turn = 0; turn < 2; ++turn) {
        if ((turn == 0) == (BiasPart<T>::warp() < T::kWarps / 2)) {
          load_ahead(it, slice, stage);
          continue;
        }
        const bool qk = slice < grid.slices_qk;
        const int cols =
            qk ? p.problem.head_dim - T::kSlice * slice : p.problem.head_dim_v - T::kSlice * (slice - grid.slices_qk);
        const uint32_t a = smem + stage * T::kStageBytes, b = a + T::kOperandBytes;
        const uint32_t a_lane = T::Tile::by_rows(a, ptx::fresh_lane()) + BiasPart<T>::row() * T::Tile::kRowBytes;
        const uint32_t b_lane = T::Tile::by_cols(b, ptx::fresh_lane()) + BiasPart<T>::key() * T::Tile::kRowBytes;
        if (qk) {
          multiply_slice<T>(acc_s, a_lane, b_lane, cols);
        } else {
          multiply_slice<T>(acc_dp, a_lane, b_lane, cols);
        }
      }
    }

    const BiasPart<T> part{smem, it};
    const BiasStep& step = steps[it];
    const ScoreMod score_mod{p.problem, m, step.seq, step.h};
    const bool light = m.softcap == 0.f && m.rng == nullptr && is_light(m, step.tests);
    if (light && !m.by_distance && m.bias.staged) {
      add_light_gradients<T, false>(acc, acc_s, acc_dp, score_mod, step, part, false);
    } else if (light && m.by_distance && m.bias.ptr == nullptr) {
      add_light_gradients<T, true>(acc, acc_s, acc_dp, score_mod, step, part, g.is_slope);
    } else {
      add_gradients<T>(acc, acc_s, acc_dp, score_mod, step, part, g.is_slope, drop_keys[it % 2]);
    }

    const BiasStep& next = steps[it + 1];
    more = next.tests != kSkipTile;
    const bool ends = !more || next.tile.index != step.tile.index;
    float* const sums = reinterpret_cast<float*>(smem_raw + T::kSumsAt);
    if (g.reach >= 0) {
      const int band = band_of<T>(g, m, step);
      if (!ends && band == band_of<T>(g, m, next)) continue;
      add_to_table<T>(acc, g, step.tile, band, smem_raw + T::kBiasAt, sums);
      clear_units<T>(acc);
    } else if (ends) {
      write_bias_tile<T>(acc, g, step.tile, part.bias(), sums);
      clear_units<T>(acc);
    }
  }
}

template <typename T>
__global__ void __launch_bounds__(T::kThreads, T::kTile.ctas_per_sm)
    bwd_bias_kernel(const __grid_constant__ BwdParams p, const __grid_constant__ Modifiers m,
                    const __grid_constant__ BiasGradient g, const __grid_constant__ BiasGrid grid) {
  if constexpr (kCompiledHere<T::kClass>) bwd_bias_body<T>(p, m, g, grid);
  else __trap();
}

}  // namespace flash_ext::sm80
