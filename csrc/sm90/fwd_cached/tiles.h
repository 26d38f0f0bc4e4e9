// Tiles of the packed Hopper forward over a cache of 8 bits, for the host and the kernels alike. No CUDA, no torch.
#pragma once

#include "../fwd/tiles.h"

namespace flash_ext::sm90 {

// Copies bring bytes to a ring of their own, from which a warpgroup turns them into elements of the ring that is multiplied.
// Bytes on their way hide the latency of memory, so the larger part of what shared memory has is theirs.
struct ConvertedTile {
  FwdTile plain;   // of the elements
  int raw_stages;  // tiles of bytes

  static constexpr int kControlBytes = 1024;
  constexpr int threads() const { return plain.threads() + 128; }
  // Of a tile of bytes, and of the factors of its slots behind it.
  constexpr int raw_bytes(int d) const { return plain.block_n * d; }
  constexpr int factor_bytes() const { return plain.block_n * 4; }
  // Output leaves from registers.
  constexpr int smem_bytes(int d) const {
    return plain.kv_stages * tile_bytes(plain.block_n, d) + plain.q_stages * tile_bytes(plain.block_m(), d) +
           raw_stages * (raw_bytes(d) + factor_bytes()) + kControlBytes;
  }
};

// Of head dims 64 and 128. Four warpgroups have 128 registers a thread when they are compiled, and a product of 256 columns
// wants 158.
constexpr ConvertedTile converted_tile(int d) {
  if (d == 64) return {{128, 2, 6, 2}, 8};
  return {{128, 2, 3, 2}, 4};
}

static_assert(converted_tile(64).smem_bytes(64) <= kSmemLimitLarge);
static_assert(converted_tile(128).smem_bytes(128) <= kSmemLimitLarge);

}  // namespace flash_ext::sm90
