// What a score gets by the distance of its row and its key, said once for all kernels: ALiBi's slopes, and a table.
//
// A kernel asks over() what all scores of a tile get. Away from the diagonal that is linear in the distance, and the
// kernel adds it in the way that costs it least. Elsewhere the tile bends, and add_bent() adds to each score its own.
//
// distance = row + shift - key: above 0 where the key lies before the row.
#pragma once

#include "../modifiers.h"
#include "../ptx/sm80.cuh"
#include "fragments.cuh"

namespace flash_ext {

// What is added in a tile: constant + per_distance * distance, where it does not bend.
struct TileDistances {
  bool bends;
  float constant, per_distance;
};

// Of one head, in the unit of its scores. Kernels keep it in shared memory, so what all heads share stays outside.
struct HeadDistances {
  float slope;
  float low, high;  // what a table gives to all keys `reach` or more before the row, and behind it
  int reach;  // none is as far where those are not finite: they are then added score by score, because as constants
  // they would meet a maximum that is not finite either

  static constexpr int kNever = 1 << 29;

  __device__ __forceinline__ static HeadDistances of(const DistanceBias& x, int b, int h, float unit) {
    HeadDistances r{x.slopes == nullptr ? 0.f : x.slopes[b * x.slopes_batch_stride + h] * unit, 0.f, 0.f, 0};
    if (x.table != nullptr) {
      const int first = first_entry(x, b, h);
      r.low = x.table[first] * unit;
      r.high = x.table[first + x.last_entry] * unit;
      r.reach = fabsf(r.low) + fabsf(r.high) < INFINITY ? x.reach : kNever;
    }
    return r;
  }

  // Of rows from `centre` (row + shift) on and keys from `key` on.
  __device__ __forceinline__ TileDistances over(const DistanceBias& x, int centre, int rows, int key, int keys) const {
    // Read at once: behind branches each read waited for itself.
    uint32_t bits[3] = {__float_as_uint(slope), __float_as_uint(low), __float_as_uint(high)};
    int a_reach = reach;
    asm volatile("" : "+r"(bits[0]), "+r"(bits[1]), "+r"(bits[2]), "+r"(a_reach));
    const float a_slope = __uint_as_float(bits[0]), a_low = __uint_as_float(bits[1]), a_high = __uint_as_float(bits[2]);
    const bool behind = centre - (key + keys - 1) >= a_reach, before = key - (centre + rows - 1) >= a_reach;
    return {!behind && !before && (a_slope != 0.f || x.table != nullptr),
            behind   ? a_low
            : before ? a_high
                     : 0.f,
            behind   ? -a_slope
            : before ? a_slope
                     : 0.f};
  }
  // Of the rows: 1 behind all keys, -1 before them, else 0.
  __device__ __forceinline__ int side(int centre, int rows, int key, int keys) const {
    return centre - (key + keys - 1) >= reach ? 1 : key - (centre + rows - 1) >= reach ? -1 : 0;
  }

  // acc += what each score gets, `unit` times an entry. kT: keys lie along the 16 rows of a block, as in
  // common/modifiers.cuh; `first` is the distance of this thread's first score.
  template <bool kT, int kA, int kN>
  __device__ __forceinline__ void add_bent(float (&acc)[kA][kN][4], const DistanceBias& x, int b, int h, int first,
                                           float unit) const {
    if (slope != 0.f) add_slopes<kT>(acc, first);
    if (x.table == nullptr) return;
    int place = x.reach - first, of_head = first_entry(x, b, h);
    asm volatile("" : "+r"(place), "+r"(of_head));  // made once, in this order: a backward at head_dim 128 spilled
    add_table<kT>(acc, x, of_head, place, unit);
  }

 private:
  __device__ __forceinline__ static int first_entry(const DistanceBias& x, int b, int h) {
    return b * x.table_batch_stride + h * x.table_head_stride;
  }

  template <bool kT, int kA, int kN>
  __device__ __forceinline__ void add_slopes(float (&acc)[kA][kN][4], int first) const {
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

  // Scores on a diagonal of blocks of 8 x 8 have one distance, so an entry is read once for up to 2 kA of them.
  // `first`: the place of the first score's entry in the table, if that reached so far.
  template <bool kT, int kA, int kN>
  __device__ __forceinline__ static void add_table(float (&acc)[kA][kN][4], const DistanceBias& x, int of_head,
                                                   int first, float unit) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {  // the outer loop, so that no kernel spills
#pragma unroll
      for (int diagonal = 1 - 2 * kA; diagonal < kN; ++diagonal) {
        const int step = 8 * diagonal + c, entry_at = min(max(first + (kT ? -step : step), 0), x.last_entry);
        const float entry = ptx::load_late<float>(x.table + (of_head + entry_at));
#pragma unroll
        for (int few = 0; few < 2 * kA; ++few) {
          const int many = diagonal + few;
          if (many < 0 || many >= kN) continue;
          float& s = acc[few / 2][many][few % 2 * 2 + c];
          s = fmaf(entry, unit, s);
        }
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
