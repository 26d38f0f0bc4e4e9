// How output leaves the sm90 forward: row sums, lse, and a warp's 16 rows from its accumulators to global memory.
#pragma once

#include "../../common/float_results.cuh"
#include "config.cuh"
#include "weights.cuh"

namespace flash_ext::sm90 {

// Transposes 4 words across the 4 lanes of a quad: lane q ends with word q of every lane.
__device__ __forceinline__ void transpose_quad(uint32_t (&w)[4], int q) {
#pragma unroll
  for (int step = 1; step <= 2; step *= 2) {
    const bool upper = (q & step) != 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i & step) continue;
      const uint32_t away = upper ? w[i] : w[i | step];
      const uint32_t back = __shfl_xor_sync(ptx::kFullWarp, away, step);
      if (upper) {
        w[i] = back;
      } else {
        w[i | step] = back;
      }
    }
  }
}

// In calls over a cache the sink of a head joins a row: its sum, and its maximum, of which the sign is the other.
// Returns what becomes of its output. Of the logarithm of the sum, as add_sink() has it, kernels of head_dim 256 spill
// 96 bytes.
template <typename Args>
__device__ __forceinline__ float join_sink(const Args& a, int h, float& sum, float& minus_max) {
  if constexpr (requires { a.sinks; }) {
    const float minus_sink = a.sinks != nullptr ? -kLog2e * a.sinks[h] : INFINITY;
    if (minus_sink != INFINITY) {
      const float both = fminf(minus_max, minus_sink), factor = ptx::ex2(both - minus_max);
      sum = fmaf(sum, factor, ptx::ex2(both - minus_sink));
      minus_max = both;
      return factor;
    }
  }
  return 1.f;
}

// Completes two rows: stores lse where it is wanted, and returns the factors for the output, 0 for rows without keys.
// kAtOnce: logarithms come out as -inf without a choice, which would be a branch a row. Above head_dim 128, where
// registers are short, the plain kernel then takes 1.03 of the time.
template <bool kAtOnce, typename Args>
__device__ __forceinline__ void finish_rows(const Args& a, const Work& w, const RowState& state, int row, int lane,
                                            float (&inverse)[2]) {
  float* const to = a.p.lse + row_stat_offset(a.p.problem, w, w.h);
  const bool stores = a.p.lse != nullptr && lane % 4 == 0;
  float minus_max[2] = {state.minus_max[0], state.minus_max[1]};
  const auto is_empty = [&](int half, float sum) { return minus_max[half] == INFINITY && sum == 0.f; };
  if constexpr (!kAtOnce) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float sum = state.sum[half];
      sum += __shfl_xor_sync(ptx::kFullWarp, sum, 1);
      sum += __shfl_xor_sync(ptx::kFullWarp, sum, 2);
      const float factor = join_sink(a, w.h, sum, minus_max[half]);
      const bool empty = is_empty(half, sum);
      inverse[half] = empty ? 0.f : factor / sum;
      if (stores && row + 8 * half < w.q.length) {
        to[row + 8 * half] = empty ? -INFINITY : logf(sum) - minus_max[half] * kLn2;
      }
    }
    return;
  }
  float sum[2], lse[2];
  sum_over_quad(sum, state.sum);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float factor = join_sink(a, w.h, sum[half], minus_max[half]);
    inverse[half] = factor * ptx::reciprocal(is_empty(half, sum[half]) ? INFINITY : sum[half]);
    lse[half] = logf(sum[half]) - minus_max[half] * kLn2;
  }
  if (!stores) return;
  if (row < w.q.length) to[row] = lse[0];
  if (row + 8 < w.q.length) to[row + 8] = lse[1];
}

// Between stretches of keys (heuristics.h) each thread keeps what it holds of its rows: output, maxima and shares of
// the sums.
template <typename T>
__device__ __forceinline__ float* kept_place(const FwdArgs& a, int group) {
  constexpr int kThreads = 128 * T::kConsumers;
  return a.kept + blockIdx.x * (kThreads * (T::kHeadDimV / 2 + 4)) + group * 128 + threadIdx.x % 128;
}

template <typename T>
__device__ __forceinline__ void keep(float* own, const float (&o)[T::kHeadDimV / 2], const RowState& state) {
  constexpr int kThreads = 128 * T::kConsumers, kO = T::kHeadDimV / 2;
#pragma unroll
  for (int i = 0; i < kO; ++i) own[i * kThreads] = o[i];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    own[(kO + r) * kThreads] = state.minus_max[r];
    own[(kO + 2 + r) * kThreads] = state.sum[r];
  }
}

// Adds what was kept, by the larger of both maxima.
template <typename T>
__device__ __forceinline__ void join_kept(const float* own, float (&o)[T::kHeadDimV / 2], RowState& state) {
  constexpr int kThreads = 128 * T::kConsumers, kO = T::kHeadDimV / 2;
  const auto load = [&](int i) { return ptx::load_late<float>(own + i * kThreads); };
  float ours[2], theirs[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float kept = load(kO + r), lower = fminf(state.minus_max[r], kept);
    ours[r] = lower == INFINITY ? 1.f : ptx::ex2(lower - state.minus_max[r]);
    theirs[r] = lower == INFINITY ? 1.f : ptx::ex2(lower - kept);
    state.minus_max[r] = lower;
    state.sum[r] = fmaf(load(kO + 2 + r), theirs[r], state.sum[r] * ours[r]);
  }
#pragma unroll
  for (int i = 0; i < kO; ++i) o[i] = fmaf(load(i), theirs[i / 2 % 2], o[i] * ours[i / 2 % 2]);
}

// Stores a warp's 16 rows in fp32.
template <typename T>
__device__ __forceinline__ void store_float_output(const FwdArgs& a, const Work& w, const float (&o)[T::kHeadDimV / 2],
                                                   const float (&inverse)[2], int row, int lane) {
  store_float_rows<T::kHeadDimV / 8, true>(a.p.out, w.b, w.q, w.h, row, a.p.problem.head_dim_v, lane,
                                           [&](int j, int i) { return o[4 * j + i] * inverse[i / 2]; });
}

// Stores a warp's 16 rows straight from registers.
template <typename T>
__device__ __forceinline__ void store_direct(const FwdArgs& a, const Work& w, const float (&o)[T::kHeadDimV / 2],
                                             const float (&inverse)[2], int row, int lane) {
  if (a.p.out.is_float) return store_float_output<T>(a, w, o, inverse, row, lane);
  const int q = lane % 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    uint16_t* out = row_pointer(a.p.out, w.b, w.q.start + row + 8 * half, w.h);
#pragma unroll
    for (int j = 0; j < T::kHeadDimV / 32; ++j) {
      uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int at = 4 * (4 * j + i) + 2 * half;
        words[i] = ptx::pack2<typename T::Element>(o[at] * inverse[half], o[at + 1] * inverse[half]);
      }
      transpose_quad(words, q);
      const int column = 32 * j + 8 * q;
      if (row + 8 * half < w.q.length && column < a.p.problem.head_dim_v) {
        *reinterpret_cast<uint4*>(out + column) = make_uint4(words[0], words[1], words[2], words[3]);
      }
    }
  }
}

// Stores a warp's 16 rows by TMA from the warp's own part of shared memory; fp32 rows, for which it has no room, from
// registers.
template <typename T>
__device__ __forceinline__ void store_staged(const FwdArgs& a, const FwdMaps& maps, const Work& w,
                                             const float (&o)[T::kHeadDimV / 2], const float (&inverse)[2],
                                             uint32_t staging, int warp_row, int lane) {
  if (a.p.out.is_float) {
    return store_float_output<T>(a, w, o, inverse, w.block * T::kBlockM + warp_row + lane / 4, lane);
  }
  const RowCoordinates at = row_coordinates(a.p.problem, w.q, w.b, w.block * T::kBlockM + warp_row);
#pragma unroll
  for (int c = 0; c < T::kChunksV; ++c) {
    const uint32_t chunk = staging + (c % T::kStagingChunks) * 16 * 128;
    if (c % T::kStagingChunks == 0) {
      // Until the latest stores from here, of these rows or of the previous work tile's, have been read.
      if (lane == 0) ptx::bulk_wait_read();
      __syncwarp();
    }
#pragma unroll
    for (int j = 4 * c; j < 4 * (c + 1) && j < T::kHeadDimV / 16; ++j) {
      uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        words[i] =
            ptx::pack2<typename T::Element>(o[8 * j + 2 * i] * inverse[i % 2], o[8 * j + 2 * i + 1] * inverse[i % 2]);
      }
      ptx::stmatrix(chunk + lane % 16 * 128 + ((((j % 4) * 2 + lane / 16) ^ (lane % 8)) << 4), words);
    }
    ptx::fence_proxy_async();
    __syncwarp();
    if (lane == 0) {
      ptx::tma_store_5d(&maps.out, chunk, c * 64, at.row, w.h, at.outer, at.outermost);
      ptx::bulk_commit();
    }
  }
}

}  // namespace flash_ext::sm90
