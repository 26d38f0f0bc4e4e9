// Philox4x32 with seven rounds, the fewest that pass BigCrush (Salmon et al. 2011, "Parallel random numbers: as
// easy as 1, 2, 3"). Dropout asks for one block per 8 scores; three rounds less are a third of its cost.
#pragma once

#include <cstdint>

namespace flash_ext {

inline constexpr int kPhiloxRounds = 7;

// key_of(round) gives the key of a round.
template <typename KeyOf>
__device__ __forceinline__ uint4 philox(uint4 counter, const KeyOf& key_of) {
#pragma unroll
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const uint2 key = key_of(round);
    const uint64_t a = uint64_t{0xD2511F53u} * counter.x, b = uint64_t{0xCD9E8D57u} * counter.z;
    counter = make_uint4(static_cast<uint32_t>(b >> 32) ^ counter.y ^ key.x, static_cast<uint32_t>(b),
                         static_cast<uint32_t>(a >> 32) ^ counter.w ^ key.y, static_cast<uint32_t>(a));
  }
  return counter;
}

}  // namespace flash_ext
