// What a score gets by the distance of its row and its key, said once for all kernels. They ask which part of a tile's
// additions is linear in the distance, and add that in the way that costs them least; where there is no such part they let
// add_bent() add to each score its own.
//
// distance = row + shift - key: above 0 where the key lies before the row.
#pragma once

#include "../modifiers.h"
#include "../ptx/sm80.cuh"
#include "fragments.cuh"

namespace flash_ext {

// What is added in a tile: constant + per_distance * distance, where it does not bend.
struct TileDistances {
  int side;  // of the rows: 1 behind all keys, -1 before them; 0: it bends, or nothing is added
  bool bends;
  float constant, per_distance;
};

// Of one head, in the unit of its scores. Kernels keep it in shared memory, so what all heads share stays outside.
struct HeadDistances {
  float slope;

  __device__ __forceinline__ static HeadDistances of(const DistanceBias& x, int b, int h, float unit) {
    HeadDistances r{};
    if (x.slopes != nullptr) r.slope = x.slopes[b * x.slopes_batch_stride + h] * unit;
    return r;
  }

  // Of rows from `centre` (row + shift) on and keys from `key` on.
  __device__ __forceinline__ TileDistances over(const DistanceBias&, int centre, int rows, int key, int keys) const {
    const bool behind = centre - (key + keys - 1) >= 0, before = key - (centre + rows - 1) >= 0;
    const int side = behind ? 1 : before ? -1 : 0;
    return {side, side == 0 && slope != 0.f, 0.f, side > 0 ? -slope : side < 0 ? slope : 0.f};
  }

  // acc += what each score gets, `unit` times an entry. kT: keys lie along the 16 rows of a block, as in
  // common/modifiers.cuh; `first` is the distance of this thread's first score.
  template <bool kT, int kA, int kN>
  __device__ __forceinline__ void add_bent(float (&acc)[kA][kN][4], const DistanceBias&, int, int, int first,
                                           float) const {
    const float distance0 = static_cast<float>(first);
#pragma unroll
    for (int few = 0; few < 2 * kA; ++few) {
#pragma unroll
      for (int many = 0; many < 2 * kN; ++many) {
        const int step = few * 8 - (many / 2 * 8 + many % 2);  // from the first score
        float& s = acc[few / 2][many / 2][few % 2 * 2 + many % 2];
        s = fmaf(-slope, fabsf(distance0 + static_cast<float>(kT ? -step : step)), s);
      }
    }
  }
};

// Distance of a thread's first score of a block whose first row and key are (centre, key).
template <bool kT>
__device__ __forceinline__ int first_distance(int centre, int key) {
  const int lane = ptx::fresh_lane(), few = lane / 4, many = 2 * (lane % 4);
  return centre - key + (kT ? many - few : few - many);
}

}  // namespace flash_ext
