// Tile shapes of the fp8 forward for Hopper, for the host and the kernels alike. No CUDA, no torch.
#pragma once

#include "../../fp8.h"
#include "../fwd/tiles.h"

namespace flash_ext::sm90 {

// From the smallest on.
inline constexpr HeadDims kFp8Dims[] = {{64, 64}, {96, 96}, {128, 128}, {192, 128}, {192, 192}, {256, 256}};
inline constexpr HeadDims kMixedDims[] = {{64, 64}, {96, 96}, {128, 128}};
// With scores in fp16. At head_dim 64 they gain nothing.
inline constexpr HeadDims kSmallFp8Dims[] = {{96, 96}, {128, 128}, {192, 128}, {192, 192}, {256, 256}};

// Rows of 128 bytes: 128 columns of e4m3, 64 of 16-bit elements.
constexpr int fp8_chunks_of(int d, bool mixed) { return mixed ? chunks_of(d) : (d + 127) / 128; }

// Weights take longer than products. Of three warpgroups some make weights at any time, so v of up to 128 columns has
// three. Evidence: m192. From 65 columns on tiles have 64 keys, and the accumulator in fp32 lies in shared memory, a
// part for each warp: registers hold scores, the product's own accumulator and weights. The output leaves through the
// same place. Scores in fp16 leave registers for 128 keys, which is faster. A tile of keys has one factor, because
// blocks of keys hold whole tiles.
struct Fp8Tile {
  int consumers, kv_stages, block_n, q_stages;
  bool shared_total;

  constexpr FwdTile plain() const { return {block_n, consumers, kv_stages, q_stages}; }
  constexpr int q_bytes(int d, bool mixed) const { return plain().block_m() * fp8_chunks_of(d, mixed) * 128; }
  constexpr int stage_bytes(int d, int dv, bool mixed) const {
    const int k = block_n * fp8_chunks_of(d, mixed) * 128, v = dv * block_n;
    return k > v ? k : v;
  }
  // Of a warp: 16 rows of 128 bytes each.
  constexpr int staging_chunks(int dv) const { return shared_total ? dv / 32 : plain().staging_chunks(dv); }
  constexpr int staging_bytes(int dv) const { return 4 * consumers * staging_chunks(dv) * 16 * 128; }
  constexpr int smem_bytes(int d, int dv, bool mixed) const {
    return kv_stages * stage_bytes(d, dv, mixed) + q_stages * q_bytes(d, mixed) + staging_bytes(dv) + kControlBytes;
  }
};

constexpr Fp8Tile fp8_tile(int d, int dv, Operands operands) {
  if (operands == Operands::kSmallFp8) {
    if (d <= 128) return {3, 5, 128, 2, true};
    return {dv > 128 ? 2 : 3, dv == 192 ? 3 : 2, 128, 1, true};
  }
  if (dv > 128) return {2, 4, 64, d > 192 ? 1 : 2, true};
  if (d == 64) return {3, 8, 128, 2, false};
  const bool wide = operands == Operands::kMixed || d > 128;  // two chunks a row
  return {3, wide ? 4 : 8, 64, wide ? 1 : 2, true};
}

constexpr bool fp8_tiles_fit() {
  const auto fits = [](HeadDims x, Operands operands) {
    return fp8_tile(x.d, x.dv, operands).smem_bytes(x.d, x.dv, operands == Operands::kMixed) <= kSmemLimitLarge;
  };
  for (HeadDims x : kFp8Dims) {
    if (!fits(x, Operands::kFp8)) return false;
  }
  for (HeadDims x : kSmallFp8Dims) {
    if (!fits(x, Operands::kSmallFp8)) return false;
  }
  for (HeadDims x : kMixedDims) {
    if (!fits(x, Operands::kMixed)) return false;
  }
  return true;
}
static_assert(fp8_tiles_fit());

}  // namespace flash_ext::sm90
