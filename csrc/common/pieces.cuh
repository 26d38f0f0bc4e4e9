// Pieces of 16 bytes that do not begin on 16 bytes.
#pragma once

#include <cstdint>

namespace flash_ext {

// The 16 bytes that begin `bytes`, an even number below 16, behind the beginning of two neighbouring pieces.
__device__ __forceinline__ uint4 shifted_piece(const uint4& low, const uint4& high, int bytes) {
  uint32_t w[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
  if (bytes & 8) {
#pragma unroll
    for (int i = 0; i < 6; ++i) w[i] = w[i + 2];
  }
  if (bytes & 4) {
#pragma unroll
    for (int i = 0; i < 5; ++i) w[i] = w[i + 1];
  }
  if (bytes & 2) {
#pragma unroll
    for (int i = 0; i < 4; ++i) w[i] = __funnelshift_r(w[i], w[i + 1], 16);
  }
  return {w[0], w[1], w[2], w[3]};
}

}  // namespace flash_ext
