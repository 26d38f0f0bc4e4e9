// Matrix products of one warp whose B operand streams from a shared tile through a small ring of fragments.
//
// A fragment is asked for kAhead steps before its mma. ptxas schedules ldmatrix by itself and mostly ignores
// that order (the same register counts with and without), but kAhead decides whether D = 128 spills.
#pragma once

#include "tiles.cuh"

namespace flash_ext {

// use(i, fragment of step i) for i in [0, kSteps), each loaded by load(i, fragment) kAhead steps earlier.
template <int kSteps, int kAhead, typename Load, typename Use>
__device__ __forceinline__ void stream_fragments(const Load& load, const Use& use) {
  uint32_t ring[kAhead + 1][4];
#pragma unroll
  for (int i = 0; i < kAhead && i < kSteps; ++i) load(i, ring[i]);
#pragma unroll
  for (int i = 0; i < kSteps; ++i) {
    if (i + kAhead < kSteps) load(i + kAhead, ring[(i + kAhead) % (kAhead + 1)]);
    use(i, ring[i % (kAhead + 1)]);
  }
}

// How many A fragments are alive at once when one serves kBlocks consecutive steps.
template <int kAhead, int kBlocks>
inline constexpr int kLeftSlots = (kAhead + kBlocks - 1) / kBlocks + 1;

// use(element, its three indices) for all of an accumulator.
template <int kN, int kM, typename Use>
__device__ __forceinline__ void for_each_element(float (&acc)[kN][kM][4], const Use& use) {
#pragma unroll
  for (int n = 0; n < kN; ++n) {
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int i = 0; i < 4; ++i) use(acc[n][m][i], n, m, i);
    }
  }
}

template <int kN, int kM>
__device__ __forceinline__ void clear(float (&acc)[kN][kM][4]) {
  for_each_element(acc, [](float& x, int, int, int) { x = 0.f; });
}

// acc[16 kA rows x 8 kN columns] = A B^T, both tiles row-major with D columns: S = Q K^T and its kin.
// a_lane is SmemTile::by_rows, b_lane by_cols of the first row.
template <typename E, int D, int kAhead, int kA, int kN>
__device__ __forceinline__ void multiply_transposed(float (&acc)[kA][kN][4], uint32_t a_lane, uint32_t b_lane) {
  using Tile = SmemTile<D>;
  constexpr int kBlocks = kN / 2;  // 16-row blocks of B
  clear(acc);
  constexpr int kSlots = kLeftSlots<kAhead, kBlocks>;
  uint32_t a[kSlots][kA][4];
  stream_fragments<D / 16 * kBlocks, kAhead>(
      [&](int i, uint32_t (&b)[4]) {
        const int ks = i / kBlocks, nb = i % kBlocks;
        if (nb == 0) {
#pragma unroll
          for (int m = 0; m < kA; ++m) ptx::ldmatrix_x4(a[ks % kSlots][m], Tile::block(a_lane, m * 16, ks));
        }
        ptx::ldmatrix_x4(b, Tile::block(b_lane, nb * 16, ks));
      },
      [&](int i, const uint32_t (&b)[4]) {
        const int ks = i / kBlocks, nb = i % kBlocks;
#pragma unroll
        for (int m = 0; m < kA; ++m) {
          ptx::mma_m16n8k16<E>(acc[m][2 * nb], a[ks % kSlots][m], b[0], b[1]);
          ptx::mma_m16n8k16<E>(acc[m][2 * nb + 1], a[ks % kSlots][m], b[2], b[3]);
        }
      });
}

// acc[16 kA rows x D] += W B: W is held in accumulator layout, which is that of an A operand once packed,
// and has 8 kK columns; B is a row-major tile of D columns: O += P V and its kin. b_lane is by_rows. kPositive: what is
// negative in W counts as 0.
template <typename E, int D, int kAhead, bool kPositive = false, int kA, int kK>
__device__ __forceinline__ void multiply_accumulate(float (&acc)[kA][D / 8][4], const float (&weights)[kA][kK][4],
                                                    uint32_t b_lane) {
  using Tile = SmemTile<D>;
  constexpr int kBlocks = D / 16;
  const auto pack = [](float lo, float hi) {
    return kPositive ? ptx::pack2_positive<E>(lo, hi) : ptx::pack2<E>(lo, hi);
  };
  uint32_t a[kA][4];
  stream_fragments<kK / 2 * kBlocks, kAhead>(
      [&](int i, uint32_t (&b)[4]) { ptx::ldmatrix_x4_trans(b, Tile::block(b_lane, i / kBlocks * 16, i % kBlocks)); },
      [&](int i, const uint32_t (&b)[4]) {
        const int ks = i / kBlocks, db = i % kBlocks;
        if (db == 0) {
#pragma unroll
          for (int m = 0; m < kA; ++m) {
            const float (&lo)[4] = weights[m][2 * ks];
            const float (&hi)[4] = weights[m][2 * ks + 1];
            a[m][0] = pack(lo[0], lo[1]);
            a[m][1] = pack(lo[2], lo[3]);
            a[m][2] = pack(hi[0], hi[1]);
            a[m][3] = pack(hi[2], hi[3]);
          }
        }
#pragma unroll
        for (int m = 0; m < kA; ++m) {
          ptx::mma_m16n8k16<E>(acc[m][2 * db], a[m], b[0], b[1]);
          ptx::mma_m16n8k16<E>(acc[m][2 * db + 1], a[m], b[2], b[3]);
        }
      });
}

// The same for weights that are packed already: [..][8 keys][rows lane / 4 and 8 further], two keys each.
template <typename E, int D, int kAhead, int kA, int kK>
__device__ __forceinline__ void multiply_packed(float (&acc)[kA][D / 8][4], const uint32_t (&weights)[kA][kK][2],
                                                uint32_t b_lane) {
  using Tile = SmemTile<D>;
  constexpr int kBlocks = D / 16;
  stream_fragments<kK / 2 * kBlocks, kAhead>(
      [&](int i, uint32_t (&b)[4]) { ptx::ldmatrix_x4_trans(b, Tile::block(b_lane, i / kBlocks * 16, i % kBlocks)); },
      [&](int i, const uint32_t (&b)[4]) {
        const int ks = i / kBlocks, db = i % kBlocks;
#pragma unroll
        for (int m = 0; m < kA; ++m) {
          const uint32_t (&lo)[2] = weights[m][2 * ks];
          const uint32_t (&hi)[2] = weights[m][2 * ks + 1];
          const uint32_t a[4] = {lo[0], lo[1], hi[0], hi[1]};
          ptx::mma_m16n8k16<E>(acc[m][2 * db], a, b[0], b[1]);
          ptx::mma_m16n8k16<E>(acc[m][2 * db + 1], a, b[2], b[3]);
        }
      });
}

}  // namespace flash_ext
