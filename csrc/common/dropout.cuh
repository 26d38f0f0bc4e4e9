// Dropout of weights held in accumulator layout: which draw belongs to which weight, and what all draws share.
#pragma once

#include "../modifiers.h"
#include "../ptx/sm80.cuh"
#include "philox.cuh"

namespace flash_ext {

// What all draws of one head of one sequence share, made once and kept in shared memory: keys of all rounds and half
// of the counter. Made anew for every 32 scores of a thread they would be a third of dropout's cost.
struct __align__(16) DropKeys {
  uint2 rounds[kPhiloxRounds];
  uint2 counter;

  __device__ __forceinline__ void make(const Modifiers& m, int b, int h) {
    if (m.rng == nullptr) return;
    const int64_t seed = m.rng[0], offset = m.rng[1];
    const auto schedule = [](uint32_t x, uint32_t y) {
      return [=](int round) { return make_uint2(x + round * 0x9E3779B9u, y + round * 0xBB67AE85u); };
    };
    const uint4 head = philox(make_uint4(static_cast<uint32_t>(offset), static_cast<uint32_t>(offset >> 32),
                                         static_cast<uint32_t>(b), static_cast<uint32_t>(h)),
                              schedule(static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)));
    const auto key_of = schedule(head.x, head.y);
#pragma unroll
    for (int round = 0; round < kPhiloxRounds; ++round) rounds[round] = key_of(round);
    counter = make_uint2(head.z, head.w);
  }
  __device__ __forceinline__ uint4 draws(uint32_t row_id, uint32_t col_id) const {
    return philox(make_uint4(row_id, col_id, counter.x, counter.y), [&](int round) { return rounds[round]; });
  }
};

// Draws where a thread holds rows: for the one of row_id (row / 16 * 8 + row % 8), in the lower halves of the words,
// and the one 8 further, in the upper ones. Word q is for key 32 col_block + 8 q + 2 (lane % 4) + c.
struct RowDraws {
  uint32_t words[4];
  __device__ __forceinline__ RowDraws(const DropKeys& keys, uint32_t row_id, int col_block, int c, int lane) {
    const uint32_t col_id = static_cast<uint32_t>(col_block * 8 + 2 * (lane % 4) + c);
    const uint4 draws = keys.draws(row_id, col_id);
    words[0] = draws.x, words[1] = draws.y, words[2] = draws.z, words[3] = draws.w;
  }
};

// Marks dropped weights by their sign (kSign), or makes them 0. The draws depend on seed, offset, sequence,
// head, row and key only. One Philox block serves the rows r, r + 8 and the keys c, c + 8, c + 16, c + 24:
// the largest set that a thread owns both in S and in S^T.
template <bool kT, bool kSign, int kA, int kN>
__device__ __forceinline__ void drop(float (&acc)[kA][kN][4], const Modifiers& m, int row0, int col0,
                                     const DropKeys& keys) {
  const int lane = ptx::fresh_lane();
  // Both draws of a word are compared in its upper half; drop_below is not 0.
  const uint32_t highest = (m.drop_below << 16) - 1;
  const auto mark = [&](float& weight, uint32_t draw) {
    if (draw <= highest) weight = kSign ? -weight : 0.f;
  };
  if constexpr (kT) {
    static_assert(kA <= 2 && kN % 2 == 0);
    const uint32_t col_id = static_cast<uint32_t>(col0 / 32 * 8 + lane / 4);
    const int first_quarter = col0 % 32 / 8;
#pragma unroll
    for (int n2 = 0; n2 < kN / 2; ++n2) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const uint32_t row_id = static_cast<uint32_t>((row0 / 16 + n2) * 8 + 2 * (lane % 4) + c);
        const uint4 draws = keys.draws(row_id, col_id);
        const uint32_t words[4] = {draws.x, draws.y, draws.z, draws.w};
#pragma unroll
        for (int r = 0; r < 2 * kA; ++r) {
          const uint32_t draw = kA == 2 ? words[r] : (first_quarter == 0 ? words[r] : words[r + 2]);
          mark(acc[r / 2][2 * n2][r % 2 * 2 + c], draw << 16);
          mark(acc[r / 2][2 * n2 + 1][r % 2 * 2 + c], draw);
        }
      }
    }
  } else {
    static_assert(kN % 2 == 0);
#pragma unroll
    for (int a = 0; a < kA; ++a) {
#pragma unroll
      for (int n4 = 0; n4 < (kN + 3) / 4; ++n4) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const uint32_t row_id = static_cast<uint32_t>((row0 / 16 + a) * 8 + lane / 4);
          const RowDraws draws(keys, row_id, col0 / 32 + n4, c, lane);
#pragma unroll
          for (int q = 0; q < min(4, kN - 4 * n4); ++q) {
            mark(acc[a][4 * n4 + q][c], draws.words[q] << 16);
            mark(acc[a][4 * n4 + q][2 + c], draws.words[q]);
          }
        }
      }
    }
  }
}

}  // namespace flash_ext
