// Division by a number known before a launch, for kernels. No CUDA, no torch.
#pragma once

#include <cstdint>

namespace flash_ext {

// Division of n < 2^31 by a fixed d as (n * factor) >> shift: with shift = 31 + ceil(log2 d) and factor =
// floor(2^shift / d) + 1 the quotient is off by less than n / 2^shift <= 1 / d, so its floor is exact.
struct Divisor {
  uint32_t divisor = 1;
  uint32_t factor = (1u << 31) + 1;
  uint32_t shift = 31;

  Divisor() = default;
  explicit Divisor(uint32_t d) : divisor(d) {
    uint32_t log2 = 0;
    while ((uint64_t{1} << log2) < d) ++log2;
    shift = 31 + log2;
    factor = static_cast<uint32_t>((uint64_t{1} << shift) / d + 1);
  }
};

}  // namespace flash_ext
