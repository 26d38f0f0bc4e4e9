// FlashAttention (Dao et al. 2022, Algorithm 1): key blocks outside, query blocks inside; O, l and m go to memory and come
// back for every pair of blocks.
//
// One CTA takes a head. Its warps share the keys of a block ("split-K"): each has the scores of all rows with its own
// keys, so maxima, sums and outputs of the warps must meet in shared memory before a row is complete. Numbered comments
// are the lines of the algorithm.
#pragma once

#include "problem.cuh"

namespace flash_ext::ladder {

// kSlice: how many columns of the output meet in shared memory at a time.
template <int D_, int kBlockM_, int kBlockN_, int kWarps_, int kSlice_>
struct Flash1 {
  static constexpr int D = D_, kBlockM = kBlockM_, kBlockN = kBlockN_, kWarps = kWarps_, kSlice = kSlice_;
  static constexpr int kThreads = 32 * kWarps, kMBlocks = kBlockM / 16, kKeys = kBlockN / kWarps;
  static constexpr int kPitch = kSlice + 8;  // floats; the eight rows of a store fall into different banks
  static constexpr int kKvBytes = kBlockN * D * 2, kQBytes = kBlockM * D * 2;
  static constexpr int kPartsBytes = kWarps * kBlockM * kPitch * 4;
  static constexpr int kSmemBytes = 2 * kKvBytes + 2 * kQBytes + kPartsBytes + (2 * kWarps + 1) * kBlockM * 4;
  static constexpr int kAhead = 1;
  // Four columns of a row are one thread's: it reads, merges and writes them.
  static constexpr int kColumns = kSlice / 4, kRowStep = kThreads / kColumns, kRowsOfThread = kBlockM / kRowStep;
  static constexpr int kSlices = D / kSlice;
  static_assert(kBlockM % kRowStep == 0 && kKeys % 16 == 0 && D % kSlice == 0);
};

// What memory holds of a thread's rows before a step: nothing yet, for the first key block.
template <typename T>
struct OldState {
  float4 out[T::kSlices][T::kRowsOfThread];
  float row_max[T::kRowsOfThread], row_sum[T::kRowsOfThread];
};

template <typename T>
__device__ __forceinline__ void load_old(OldState<T>& old, const Problem& p, int64_t head, int first_row, bool is_first,
                                         int thread) {
#pragma unroll
  for (int i = 0; i < T::kRowsOfThread; ++i) {
    const int row = first_row + thread / T::kColumns + i * T::kRowStep;
    const bool there = !is_first && row < p.seqlen_q;
    const int64_t at = head * p.seqlen_q + row;
    old.row_max[i] = there ? p.row_max[at] : -INFINITY;
    old.row_sum[i] = there ? p.row_sum[at] : 0.f;
#pragma unroll
    for (int s = 0; s < T::kSlices; ++s) {
      const float* const from = p.acc + at * T::D + s * T::kSlice + thread % T::kColumns * 4;
      old.out[s][i] = there ? *reinterpret_cast<const float4*>(from) : make_float4(0.f, 0.f, 0.f, 0.f);
    }
  }
}

// Where the warps of a CTA meet.
template <typename T>
struct Meeting {
  float* parts;  // (kWarps, kBlockM, kPitch): a warp's share of P V
  float* maxima;  // (kWarps, kBlockM)
  float* sums;  // (kWarps, kBlockM)
  float* block_max;  // (kBlockM): over all warps

  __device__ __forceinline__ explicit Meeting(unsigned char* smem)
      : parts(reinterpret_cast<float*>(smem)),
        maxima(parts + T::kPartsBytes / 4),
        sums(maxima + T::kWarps * T::kBlockM),
        block_max(sums + T::kWarps * T::kBlockM) {}
};

// 11 to 13, for the columns of one slice.
template <typename T>
__device__ __forceinline__ void merge(const Problem& p, const Meeting<T>& meet, const OldState<T>& old, int64_t head,
                                      int first_row, int slice, bool is_last, int thread) {
  const int column = thread % T::kColumns * 4;
#pragma unroll
  for (int i = 0; i < T::kRowsOfThread; ++i) {
    const int r = thread / T::kColumns + i * T::kRowStep, row = first_row + r;
    if (row >= p.seqlen_q) continue;
    float4 product = make_float4(0.f, 0.f, 0.f, 0.f);
    float block_sum = 0.f;
#pragma unroll
    for (int w = 0; w < T::kWarps; ++w) {
      const int at = w * T::kBlockM + r;
      const float4 part = *reinterpret_cast<const float4*>(meet.parts + at * T::kPitch + column);
      product.x += part.x, product.y += part.y, product.z += part.z, product.w += part.w;
      block_sum += meet.sums[at];
    }
    const float block_max = meet.block_max[r], new_max = max(old.row_max[i], block_max);
    const float of_old = old.row_sum[i] * ptx::ex2((old.row_max[i] - new_max) * p.scale * kLog2e);
    const float of_new = ptx::ex2((block_max - new_max) * p.scale * kLog2e);
    const float new_sum = of_old + of_new * block_sum;  // 11
    const float a = of_old / new_sum, b = of_new / new_sum;
    const float4 x = old.out[slice][i];
    const float4 y = make_float4(a * x.x + b * product.x, a * x.y + b * product.y, a * x.z + b * product.z,
                                 a * x.w + b * product.w);  // 12
    const int64_t at = head * p.seqlen_q + row, place = at * T::D + slice * T::kSlice + column;
    if (is_last) {
      uint32_t* const to = reinterpret_cast<uint32_t*>(p.out + place);
      to[0] = ptx::pack2<Element>(y.x, y.y), to[1] = ptx::pack2<Element>(y.z, y.w);
    } else {
      *reinterpret_cast<float4*>(p.acc + place) = y;
    }
    if (slice == 0 && column == 0) p.row_max[at] = new_max, p.row_sum[at] = new_sum;  // 13
  }
}

// 9 and 10 for a warp's keys, and the meeting of all warps.
template <typename T>
__device__ __forceinline__ void step(const Problem& p, const Meeting<T>& meet, const OldState<T>& old, uint32_t smem_q,
                                     uint32_t smem_k, uint32_t smem_v, int64_t head, int first_row, int keys,
                                     bool is_last, int thread) {
  using Tile = SmemTile<T::D>;
  const int warp = thread / 32, lane = thread % 32;
  const float scale_log2 = p.scale * kLog2e;
  float s[T::kMBlocks][T::kKeys / 8][4];
  const uint32_t own = warp * T::kKeys * Tile::kRowBytes;
  multiply_transposed<Element, T::D, T::kAhead>(s, Tile::by_rows(smem_q, lane), Tile::by_cols(smem_k + own, lane));
  if (keys < T::kBlockN) hide_tail(s, keys - warp * T::kKeys, lane);
#pragma unroll
  for (int r = 0; r < 2 * T::kMBlocks; ++r) {
    const float of_warp = quad_max(largest(s[r / 2], r % 2));
    if (lane % 4 == 0) meet.maxima[warp * T::kBlockM + r * 8 + lane / 4] = of_warp;
  }
  __syncthreads();
#pragma unroll
  for (int r = 0; r < 2 * T::kMBlocks; ++r) {
    const int row = r * 8 + lane / 4;
    float block_max = meet.maxima[row];
#pragma unroll
    for (int w = 1; w < T::kWarps; ++w) block_max = max(block_max, meet.maxima[w * T::kBlockM + row]);
    const float sum = quad_sum(exponentials(s[r / 2], r % 2, scale_log2, block_max * scale_log2));
    if (lane % 4 == 0) {
      meet.sums[warp * T::kBlockM + row] = sum;
      if (warp == 0) meet.block_max[row] = block_max;
    }
  }
  float acc[T::kMBlocks][T::D / 8][4];
  clear(acc);
  multiply_accumulate<Element, T::D, T::kAhead>(acc, s, Tile::by_rows(smem_v + own, lane));
#pragma unroll
  for (int slice = 0; slice < T::kSlices; ++slice) {
    if (slice > 0) __syncthreads();  // the slice before is merged
#pragma unroll
    for (int m = 0; m < T::kMBlocks; ++m) {
#pragma unroll
      for (int j = 0; j < T::kSlice / 8; ++j) {
        const float (&block)[4] = acc[m][slice * T::kSlice / 8 + j];
        const int row = warp * T::kBlockM + m * 16 + lane / 4;
        float* const to = meet.parts + row * T::kPitch + j * 8 + lane % 4 * 2;
        *reinterpret_cast<float2*>(to) = make_float2(block[0], block[1]);
        *reinterpret_cast<float2*>(to + 8 * T::kPitch) = make_float2(block[2], block[3]);
      }
    }
    __syncthreads();
    merge(p, meet, old, head, first_row, slice, is_last, thread);
  }
}

template <typename T>
__global__ void __launch_bounds__(T::kThreads) flash1_kernel(const Problem p) {
  constexpr int D = T::D;
  extern __shared__ __align__(128) unsigned char smem_raw[];
  const uint32_t smem_k = ptx::smem_address(smem_raw), smem_v = smem_k + T::kKvBytes, smem_q = smem_v + T::kKvBytes;
  const Meeting<T> meet(smem_raw + 2 * T::kKvBytes + 2 * T::kQBytes);
  const int thread = static_cast<int>(threadIdx.x);
  const int64_t head = static_cast<int>(blockIdx.x);
  const int num_m = ceil_div(p.seqlen_q, T::kBlockM), num_n = ceil_div(p.seqlen_k, T::kBlockN);
  const auto load_queries = [&](int m) {
    if (m < num_m) {
      load_tile<T::kBlockM, D, T::kThreads>(smem_q + (m & 1) * T::kQBytes,
                                            rows_of<D>(p.q, head, p.seqlen_q, m * T::kBlockM),
                                            p.seqlen_q - m * T::kBlockM, thread);
    }
    ptx::cp_async_commit();
  };

  for (int n = 0; n < num_n; ++n) {  // 5
    const int keys = p.seqlen_k - n * T::kBlockN;
    __syncthreads();  // the key block before is done with shared memory
    load_tile<T::kBlockN, D, T::kThreads>(smem_k, rows_of<D>(p.k, head, p.seqlen_k, n * T::kBlockN), keys, thread);
    load_tile<T::kBlockN, D, T::kThreads>(smem_v, rows_of<D>(p.v, head, p.seqlen_k, n * T::kBlockN), keys,
                                          thread);  // 6
    load_queries(0);
    for (int m = 0; m < num_m; ++m) {  // 7
      OldState<T> old;
      load_old(old, p, head, m * T::kBlockM, n == 0, thread);  // 8
      ptx::cp_async_wait<0>();
      __syncthreads();
      load_queries(m + 1);
      step<T>(p, meet, old, smem_q + (m & 1) * T::kQBytes, smem_k, smem_v, head, m * T::kBlockM, keys, n == num_n - 1,
              thread);
    }
    ptx::cp_async_wait<0>();
  }
}

}  // namespace flash_ext::ladder
