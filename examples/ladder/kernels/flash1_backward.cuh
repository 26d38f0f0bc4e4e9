// The backward of FlashAttention (Dao et al. 2022, Algorithm 4): key blocks outside, query blocks inside; dQ goes to memory
// and comes back for every pair of blocks.
//
// One CTA takes a head, and its warps share the keys of a block, as in the forward (flash1.cuh). dK and dV of a warp's keys
// are its own. Of dQ each warp has what its keys give to all rows: these shares meet in shared memory, in fp32. P comes from
// lse, which stands for the maximum and the sum of the paper. Numbered comments are the lines of the algorithm.
#pragma once

#include "backward.cuh"

namespace flash_ext::ladder {

// kSlice: how many columns of dQ meet in shared memory at a time.
template <int D, int kBlockM, int kBlockN, int kWarps, int kSlice_>
struct Flash1Backward : BackwardTiles<D, kBlockM, kBlockN, kWarps, kBlockM> {
  using Base = BackwardTiles<D, kBlockM, kBlockN, kWarps, kBlockM>;
  static constexpr int kSlice = kSlice_, kSlices = D / kSlice;
  static constexpr int kPitch = kSlice + 8;  // floats; the eight rows of a store fall into different banks
  static constexpr int kPartsAt = Base::kSharedBytes, kSmemBytes = kPartsAt + kWarps * kBlockM * kPitch * 4;
  // Four columns of a row are one thread's: it reads, merges and writes them.
  static constexpr int kColumns = kSlice / 4, kRowStep = Base::kThreads / kColumns, kRowsOfThread = kBlockM / kRowStep;
  static_assert(kBlockM % kRowStep == 0 && D % kSlice == 0);
};
template <int D>
using Flash1BackwardOf = Flash1Backward<D, 32, D == 64 ? 256 : 128, 8, 64>;

// What memory holds of a thread's columns of dQ: nothing yet, for the first key block.
template <typename T>
struct OldGradient {
  float4 dq[T::kSlices][T::kRowsOfThread];
};

template <typename T>
__device__ __forceinline__ void load_old(OldGradient<T>& old, const BackwardProblem& p, int64_t head, int first_row,
                                         bool is_first, int thread) {
#pragma unroll
  for (int i = 0; i < T::kRowsOfThread; ++i) {
    const int row = first_row + thread / T::kColumns + i * T::kRowStep;
#pragma unroll
    for (int s = 0; s < T::kSlices; ++s) {
      const float* const from = p.acc + (head * p.seqlen_q + row) * T::D + s * T::kSlice + thread % T::kColumns * 4;
      old.dq[s][i] =
          !is_first && row < p.seqlen_q ? *reinterpret_cast<const float4*>(from) : make_float4(0.f, 0.f, 0.f, 0.f);
    }
  }
}

// 21, for the columns of one slice.
template <typename T>
__device__ __forceinline__ void merge(const BackwardProblem& p, const float* parts, const OldGradient<T>& old,
                                      int64_t head, int first_row, int slice, bool is_last, int thread) {
  const int column = thread % T::kColumns * 4;
#pragma unroll
  for (int i = 0; i < T::kRowsOfThread; ++i) {
    const int r = thread / T::kColumns + i * T::kRowStep, row = first_row + r;
    if (row >= p.seqlen_q) continue;
    float4 sum = old.dq[slice][i];
#pragma unroll
    for (int w = 0; w < T::kWarps; ++w) {
      const float4 x = *reinterpret_cast<const float4*>(parts + (w * T::kBlockM + r) * T::kPitch + column);
      sum.x += x.x, sum.y += x.y, sum.z += x.z, sum.w += x.w;
    }
    const int64_t place = (head * p.seqlen_q + row) * T::D + slice * T::kSlice + column;
    if (is_last) {
      uint32_t* const to = reinterpret_cast<uint32_t*>(p.dq + place);
      to[0] = ptx::pack2<Element>(sum.x * p.scale, sum.y * p.scale);
      to[1] = ptx::pack2<Element>(sum.z * p.scale, sum.w * p.scale);
    } else {
      *reinterpret_cast<float4*>(p.acc + place) = sum;
    }
  }
}

// A warp's share of dQ for all rows of a block, the meeting of all warps, and what memory gets.
template <typename T>
__device__ __forceinline__ void add_queries(const BackwardProblem& p, uint32_t smem, float* parts, int64_t head,
                                            int first_row, bool is_first, bool is_last) {
  constexpr int kMBlocks = T::kBlockM / 16, kOwn = T::kKeys;
  const int thread = ptx::fresh_thread_idx(), warp = thread / 32, lane = thread % 32;
  OldGradient<T> old;
  load_old(old, p, head, first_row, is_first, thread);  // 10
  const uint32_t ds_lane = T::DsTile::by_cols(smem + T::kDsAt + warp * kOwn * T::DsTile::kRowBytes, lane);
  const uint32_t k_lane = T::Tile::by_rows(smem + warp * kOwn * T::Tile::kRowBytes, lane);
#pragma unroll
  for (int slice = 0; slice < T::kSlices; ++slice) {
    float acc[kMBlocks][T::kSlice / 8][4];
    multiply_keys<T, kOwn>(acc, ds_lane, T::Tile::block(k_lane, 0, slice * T::kSlice / 16));
    if (slice > 0) __syncthreads();  // the slice before is merged
#pragma unroll
    for (int m = 0; m < kMBlocks; ++m) {
#pragma unroll
      for (int j = 0; j < T::kSlice / 8; ++j) {
        const float (&block)[4] = acc[m][j];
        float* const to = parts + (warp * T::kBlockM + m * 16 + lane / 4) * T::kPitch + j * 8 + lane % 4 * 2;
        *reinterpret_cast<float2*>(to) = make_float2(block[0], block[1]);
        *reinterpret_cast<float2*>(to + 8 * T::kPitch) = make_float2(block[2], block[3]);
      }
    }
    __syncthreads();
    merge(p, parts, old, head, first_row, slice, is_last, thread);
  }
}

template <typename T>
__global__ void __launch_bounds__(T::kThreads) flash1_backward_kernel(const BackwardProblem p) {
  extern __shared__ __align__(128) unsigned char smem_raw[];
  const uint32_t smem = ptx::smem_address(smem_raw);
  float* const parts = reinterpret_cast<float*>(smem_raw + T::kPartsAt);
  const int64_t head = static_cast<int>(blockIdx.x);
  const int num_n = ceil_div(p.seqlen_k, T::kBlockN);

  for (int n = 0; n < num_n; ++n) {  // 6
    __syncthreads();  // the key block before is done with shared memory
    load_keys<T>(p, smem, head, n * T::kBlockN, ptx::fresh_thread_idx());  // 7
    load_queries<T>(p, smem, head, 0, ptx::fresh_thread_idx());
    KeyGradient<T> dk, dv;
    clear(dk), clear(dv);  // 8
    for (int m = 0; m * T::kBlockM < p.seqlen_q; ++m) {  // 9
      ptx::cp_async_wait<0>();
      __syncthreads();
      load_queries<T>(p, smem, head, m + 1, ptx::fresh_thread_idx());
      add_keys<T>(dk, dv, smem, m & 1, p.seqlen_k - n * T::kBlockN, p.scale);  // 11 to 20, and 22
      __syncwarp();  // dS, which no other warp reads
      add_queries<T>(p, smem, parts, head, m * T::kBlockM, n == 0, n == num_n - 1);
    }
    ptx::cp_async_wait<0>();
    // 24. A warp's rows of K and V are read by itself alone.
    __syncwarp();
    write_keys<T>(dk, p.scale, smem, p.dk, head, p.seqlen_k, n * T::kBlockN);
    write_keys<T>(dv, 1.f, smem + T::kVAt, p.dv, head, p.seqlen_k, n * T::kBlockN);
  }
}

}  // namespace flash_ext::ladder
