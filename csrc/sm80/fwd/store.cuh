// How output leaves the portable forwards: a warp's rows, divided by their sums, and lse.
#pragma once

#include "../../common/float_results.cuh"
#include "../../common/fragments.cuh"
#include "../../params.h"

namespace flash_ext::sm80 {

// finish(r, lse) completes row r of a thread: it returns the factor for the output, and the lse. 16-bit rows pass
// through the warp's own rows of Q in shared memory, which nobody else reads; q_lane is where this lane finds them.
template <typename T, typename Finish>
__device__ __forceinline__ void store_rows(const FwdParams& p, const Work& w,
                                           float (&acc_o)[T::kMBlocks][T::kHeadDim / 8][4], uint32_t smem_q,
                                           uint32_t q_lane, int warp_row, int lane, const Finish& finish) {
  using E = typename T::Element;
  constexpr int D = T::kHeadDim;
  const int first_row = w.block * T::kBlockM, rows = w.q.length - first_row;
  float* lse = p.lse + row_stat_offset(p.problem, w, w.h) + first_row;
#pragma unroll
  for (int mb = 0; mb < T::kMBlocks; ++mb) {
    float inverse[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float row_lse;
      inverse[half] = finish(2 * mb + half, row_lse);
      const int r = warp_row + mb * 16 + half * 8 + lane / 4;
      if (p.lse != nullptr && lane % 4 == 0 && r < rows) lse[r] = row_lse;
    }
#pragma unroll
    for (int j = 0; j < D / 8; ++j) scale_block(acc_o[mb][j], inverse[0], inverse[1]);
  }
  // Asked once: a branch beside every block is slower.
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

}  // namespace flash_ext::sm80
