// drop() of common/dropout.cuh for the forward, the same draws. The first three rounds of Philox are products of the
// row's counter or of the key's, seldom of both: a row's come from shared memory, made once, a key's serve two rows.
#pragma once

#include "../../common/dropout.cuh"

namespace flash_ext::sm80 {

// What the third round wants of a row: of 8 rows and the 8 behind them in a block of 16.
struct __align__(16) DropRow {
  uint32_t second_w, third_y, third_high, third_low;
};

__device__ __forceinline__ uint2 drop_product(uint32_t factor, uint32_t x) {
  const uint64_t product = uint64_t{factor} * x;
  return make_uint2(static_cast<uint32_t>(product), static_cast<uint32_t>(product >> 32));
}
inline constexpr uint32_t kPhiloxX = 0xD2511F53u, kPhiloxZ = 0xCD9E8D57u;

// row_id: row / 16 * 8 + row % 8.
__device__ __forceinline__ DropRow make_drop_row(const DropKeys& keys, uint32_t row_id) {
  const uint2 first_x = drop_product(kPhiloxX, row_id), first_z = drop_product(kPhiloxZ, keys.counter.x);
  const uint2 second_z = drop_product(kPhiloxZ, first_x.y ^ keys.counter.y ^ keys.rounds[0].y);
  const uint2 third_x = drop_product(kPhiloxX, second_z.y ^ first_z.x ^ keys.rounds[1].x);
  return {first_x.x, second_z.x ^ keys.rounds[2].x, third_x.y ^ keys.rounds[2].y, third_x.x};
}

// The same of eight keys, for one lane.
struct DropKey {
  uint32_t second_z, third_w;
};
__device__ __forceinline__ DropKey make_drop_key(const DropKeys& keys, uint32_t first_high, uint32_t col_id) {
  const uint2 second_x = drop_product(kPhiloxX, first_high ^ col_id);
  return {second_x.y ^ keys.rounds[1].y, second_x.x};
}

// The four words of a row's and a key's counter.
__device__ __forceinline__ uint4 drop_words(const uint4& row, const DropKey& key, uint32_t rounds) {
  const uint2 third_z = drop_product(kPhiloxZ, key.second_z ^ row.x);
  uint4 c = make_uint4(third_z.y ^ row.y, third_z.x, row.z ^ key.third_w, row.w);
  const auto next = [&](uint32_t key_x, uint32_t key_y) {
    const uint2 a = drop_product(kPhiloxX, c.x), b = drop_product(kPhiloxZ, c.z);
    c = make_uint4(b.y ^ c.y ^ key_x, b.x, a.y ^ c.w ^ key_y, a.x);
  };
  static_assert(kPhiloxRounds == 7);
  const uint2 third = ptx::load_shared_pair_anew(rounds + 24), last = ptx::load_shared_pair_anew(rounds + 48);
  const uint4 between = ptx::load_shared_anew(rounds + 32);
  next(third.x, third.y);
  next(between.x, between.y);
  next(between.z, between.w);
  next(last.x, last.y);
  return c;
}

// Clears the key's half of those pairs of weights, packed[16 rows][8 keys][rows lane / 4 and 8 further], whose draw is
// below m.drop_below. `rows` has 8 entries for every 16 rows of the warp, whose keys begin at col0.
template <int kA, int kN>
__device__ __forceinline__ void drop_weights(uint32_t (&packed)[kA][kN][2], const Modifiers& m, int col0,
                                             const DropKeys& keys, const DropRow* rows) {
  const int lane = ptx::fresh_lane();
  const uint32_t minus_bound = 0u - (m.drop_below << 16);  // drop_below is not 0
  const uint32_t first_high = drop_product(kPhiloxZ, keys.counter.x).y ^ keys.rounds[0].x;
#pragma unroll
  for (int n4 = 0; n4 < kN / 4; ++n4) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const uint32_t col_id = static_cast<uint32_t>((col0 / 32 + n4) * 8 + 2 * (lane % 4) + c);
      const DropKey key = make_drop_key(keys, first_high, col_id);
#pragma unroll
      for (int a = 0; a < kA; ++a) {
        const uint4 row = ptx::load_shared_anew(ptx::smem_address(rows + 8 * a + lane / 4));
        const uint4 draws = drop_words(row, key, ptx::smem_address(keys.rounds));
        const uint32_t words[4] = {draws.x, draws.y, draws.z, draws.w};
#pragma unroll
        for (int q = 0; q < 4; ++q) {
          uint32_t (&pair)[2] = packed[a][4 * n4 + q];
          if (c == 0) {
            ptx::clear_below_u16x2<0>(pair[0], pair[1], words[q], minus_bound);
          } else {
            ptx::clear_below_u16x2<1>(pair[0], pair[1], words[q], minus_bound);
          }
        }
      }
    }
  }
}

}  // namespace flash_ext::sm80
