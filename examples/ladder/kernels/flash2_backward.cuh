// The backward of FlashAttention-2 (Dao 2023, Algorithm 2): a CTA for each key block of each head, which walks the queries.
//
// dK and dV never leave the registers of the warp that owns the keys. dQ is a sum over key blocks, so CTAs add to it in
// memory, in fp32. Within a CTA the warps leave dS, in 16 bits, for all, and each then takes its own part of dQ over all
// keys: no sums meet. Numbered comments are the lines of the algorithm.
#pragma once

#include "backward.cuh"

namespace flash_ext::ladder {

template <int D, int kWarps, int kPart>
struct Flash2Backward : BackwardTiles<D, 64, 128, kWarps, kPart> {
  using Base = BackwardTiles<D, 64, 128, kWarps, kPart>;
  static constexpr int kSmemBytes = Base::kSharedBytes;
  // A warp's part of dQ.
  static constexpr int kRows = 32, kRowWarps = Base::kBlockM / kRows, kColumns = D * kRowWarps / kWarps;
  static_assert(kWarps % kRowWarps == 0 && (kColumns == 16 || kColumns == 32 || kColumns == 64));
};
template <int D>
using Flash2BackwardOf = Flash2Backward<D, D == 64 ? 4 : 8, D == 64 ? 32 : 64>;

// 15, for a query block: the warp's part, added to what other CTAs add.
template <typename T>
__device__ __forceinline__ void add_queries(const BackwardProblem& p, uint32_t smem, int64_t head, int first_row) {
  const int warp = ptx::fresh_thread_idx() / 32, lane = ptx::fresh_lane();
  const int row = warp % T::kRowWarps * T::kRows, column = warp / T::kRowWarps * T::kColumns;
  float acc[T::kRows / 16][T::kColumns / 8][4];
  multiply_keys<T, T::kBlockN>(acc, T::DsTile::block(T::DsTile::by_cols(smem + T::kDsAt, lane), 0, row / 16),
                               T::Tile::block(T::Tile::by_rows(smem, lane), 0, column / 16));
  const int there = p.seqlen_q - first_row - row - lane / 4;
  float* const to = p.acc + (head * p.seqlen_q + first_row + row + lane / 4) * T::D + column + lane % 4 * 2;
#pragma unroll
  for (int r = 0; r < T::kRows / 8; ++r) {
    if (r * 8 >= there) break;
#pragma unroll
    for (int j = 0; j < T::kColumns / 8; ++j) {
      const float (&block)[4] = acc[r / 2][j];
      ptx::red_add_f32x2(to + r * 8 * T::D + j * 8, block[r % 2 * 2], block[r % 2 * 2 + 1]);
    }
  }
}

template <typename T>
__global__ void __launch_bounds__(T::kThreads, 256 / T::kThreads) flash2_backward_kernel(const BackwardProblem p) {
  extern __shared__ __align__(128) unsigned char smem_raw[];
  const uint32_t smem = ptx::smem_address(smem_raw);
  const int num_n = ceil_div(p.seqlen_k, T::kBlockN);
  const int64_t head = static_cast<int>(blockIdx.x) / num_n;
  const int first = static_cast<int>(blockIdx.x) % num_n * T::kBlockN;  // 5
  load_keys<T>(p, smem, head, first, ptx::fresh_thread_idx());  // 6
  load_queries<T>(p, smem, head, 0, ptx::fresh_thread_idx());
  KeyGradient<T> dk, dv;
  clear(dk), clear(dv);  // 7
  for (int m = 0; m * T::kBlockM < p.seqlen_q; ++m) {  // 8
    ptx::cp_async_wait<0>();
    __syncthreads();  // this block is there, and the one before is done with shared memory
    load_queries<T>(p, smem, head, m + 1, ptx::fresh_thread_idx());  // 9
    add_keys<T>(dk, dv, smem, m & 1, p.seqlen_k - first, p.scale);  // 10 to 14, and 16
    __syncthreads();  // dS of all warps
    add_queries<T>(p, smem, head, m * T::kBlockM);
  }
  ptx::cp_async_wait<0>();
  __syncthreads();  // K, which all read for dQ
  write_keys<T>(dk, p.scale, smem, p.dk, head, p.seqlen_k, first);  // 18
  write_keys<T>(dv, 1.f, smem + T::kVAt, p.dv, head, p.seqlen_k, first);
}

}  // namespace flash_ext::ladder
