// Products of e4m3 on Hopper (sm_90a), accumulated in fp32, and the rounding to e4m3.
// Reference: PTX ISA (wgmma.mma_async m64nNk32, cvt.rn.satfinite.e4m3x2).
//
// Both operands lie with the summed dimension side by side (K-major): there is no form that transposes bytes.
#pragma once

#include "sm90.cuh"

namespace flash_ext::ptx {

// Four floats as e4m3, the first in the lowest byte. Beyond 448 it saturates, and says nothing; NaN stays NaN.
__device__ __forceinline__ uint32_t pack4_e4m3(float x0, float x1, float x2, float x3) {
  uint32_t packed;
  asm("{\n.reg .b16 lo, hi;\n"
      "cvt.rn.satfinite.e4m3x2.f32 lo, %2, %1;\n"
      "cvt.rn.satfinite.e4m3x2.f32 hi, %4, %3;\n"
      "mov.b32 %0, {lo, hi};\n}\n"
      : "=r"(packed)
      : "f"(x0), "f"(x1), "f"(x2), "f"(x3));
  return packed;
}

// The same of two pairs of fp16.
__device__ __forceinline__ uint32_t pack4_e4m3(uint32_t first, uint32_t second) {
  uint32_t packed;
  asm("{\n.reg .b16 lo, hi;\n"
      "cvt.rn.satfinite.e4m3x2.f16x2 lo, %1;\n"
      "cvt.rn.satfinite.e4m3x2.f16x2 hi, %2;\n"
      "mov.b32 %0, {lo, hi};\n}\n"
      : "=r"(packed)
      : "r"(first), "r"(second));
  return packed;
}

// Pairs of fp16: a b + c, a + b, the larger ones, powers of two. -inf gives 0.
__device__ __forceinline__ uint32_t fma_pair(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t d;
  asm("fma.rn.f16x2 %0, %1, %2, %3;\n" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}
__device__ __forceinline__ uint32_t add_pair(uint32_t a, uint32_t b) {
  uint32_t d;
  asm("add.rn.f16x2 %0, %1, %2;\n" : "=r"(d) : "r"(a), "r"(b));
  return d;
}
__device__ __forceinline__ uint32_t max_pair(uint32_t a, uint32_t b) {
  uint32_t d;
  asm("max.f16x2 %0, %1, %2;\n" : "=r"(d) : "r"(a), "r"(b));
  return d;
}
// The lowest n bits, of n >= 32 all.
__device__ __forceinline__ uint32_t low_bits(int n) {
  uint32_t d;
  asm("bmsk.clamp.b32 %0, 0, %1;\n" : "=r"(d) : "r"(n));
  return d;
}
// The highest bit of byte j of a and of b, each 16 times.
__device__ __forceinline__ uint32_t spread_signs(uint32_t a, uint32_t b, int j) {
  uint32_t d;
  asm("prmt.b32 %0, %1, %2, %3;\n" : "=r"(d) : "r"(a), "r"(b), "r"(0x1111 * (8 + j) + 0x4400));
  return d;
}
// One by one: of a result of ex2.approx.f16x2 that is used twice ptxas puts the pair together twice.
__device__ __forceinline__ uint32_t ex2_pair(uint32_t a) {
  uint32_t d;
  asm("{\n.reg .b16 lo, hi, x, y;\n.reg .b32 u, v;\n"
      "mov.b32 {lo, hi}, %1;\n"
      "ex2.approx.f16 x, lo;\n"
      "ex2.approx.f16 y, hi;\n"
      "cvt.u32.u16 u, x;\n"
      "cvt.u32.u16 v, y;\n"
      "prmt.b32 %0, u, v, 0x5410;\n}\n"
      : "=r"(d)
      : "r"(a));
  return d;
}

// As kDescriptorHigh, of rows of 64 bytes: 64-byte swizzle, 512 bytes between groups of 8 rows.
inline constexpr uint32_t kDescriptorHigh64 = (1u << 31) | (512 / 16);

#include "operand_lists.cuh"
#define FX_QGMMA_SS(N, COUNT, A, B, H, P) \
  asm volatile("{\n.reg .pred p;\n.reg .b64 a, b;\nmov.b64 a, {%" #A ", %" #H "};\nmov.b64 b, {%" #B ", %" #H \
               "};\nsetp.ne.b32 p, %" #P ", 0;\n" \
               "wgmma.mma_async.sync.aligned.m64n" #N "k32.f32.e4m3.e4m3 {" FX_NAMES_##COUNT "}, a, b, p, 1, 1;\n}\n" \
               : FX_REGS_##COUNT \
               : "r"(low_a), "r"(low_b), "n"(kDescriptorHigh), "n"(kAccumulate ? 1 : 0))
#define FX_PAIRS_8(i) \
  "+r"(d[i]), "+r"(d[i + 1]), "+r"(d[i + 2]), "+r"(d[i + 3]), "+r"(d[i + 4]), "+r"(d[i + 5]), "+r"(d[i + 6]), \
      "+r"(d[i + 7])
#define FX_QGMMA_SS_HALF(N, COUNT, A, B, H, P, ...) \
  asm volatile("{\n.reg .pred p;\n.reg .b64 a, b;\nmov.b64 a, {%" #A ", %" #H "};\nmov.b64 b, {%" #B ", %" #H \
               "};\nsetp.ne.b32 p, %" #P ", 0;\n" \
               "wgmma.mma_async.sync.aligned.m64n" #N "k32.f16.e4m3.e4m3 {" FX_NAMES_##COUNT "}, a, b, p, 1, 1;\n}\n" \
               : __VA_ARGS__ \
               : "r"(low_a), "r"(low_b), "n"(kDescriptorHigh), "n"(kAccumulate ? 1 : 0))
#define FX_QGMMA_RS(N, COUNT, A0, A1, A2, A3, B, H) \
  asm volatile("{\n.reg .b64 b;\nmov.b64 b, {%" #B ", %" #H "};\n" \
               "wgmma.mma_async.sync.aligned.m64n" #N "k32.f32.e4m3.e4m3 {" FX_NAMES_##COUNT \
               "}, {%" #A0 ", %" #A1 ", %" #A2 ", %" #A3 "}, b, 1, 1, 1;\n}\n" \
               : FX_REGS_##COUNT \
               : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(low_b), "n"(kHigh))

// d (64 x 2 kCount, fp32) = or += A (64 x 32) B (32 x 2 kCount).
template <bool kAccumulate, int kCount>
__device__ __forceinline__ void wgmma_ss_e4m3(float (&d)[kCount], uint32_t low_a, uint32_t low_b) {
  if constexpr (kCount == 32) {
    FX_QGMMA_SS(64, 32, 32, 33, 34, 35);
  } else {
    static_assert(kCount == 64);
    FX_QGMMA_SS(128, 64, 64, 65, 66, 67);
  }
}

// d (64 x 128, pairs of fp16) = or += A (64 x 32) B (32 x 128).
template <bool kAccumulate>
__device__ __forceinline__ void wgmma_ss_e4m3(uint32_t (&d)[32], uint32_t low_a, uint32_t low_b) {
  FX_QGMMA_SS_HALF(128, 32, 32, 33, 34, 35, FX_PAIRS_8(0), FX_PAIRS_8(8), FX_PAIRS_8(16), FX_PAIRS_8(24));
}

// d (64 x 2 kCount, fp32) += A (64 x 32, registers) B (32 x 2 kCount, with rows as kHigh says).
template <uint32_t kHigh = kDescriptorHigh, int kCount>
__device__ __forceinline__ void wgmma_rs_e4m3(float (&d)[kCount], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                                              uint32_t low_b) {
  if constexpr (kCount == 32) {
    FX_QGMMA_RS(64, 32, 32, 33, 34, 35, 36, 37);
  } else if constexpr (kCount == 48) {
    FX_QGMMA_RS(96, 48, 48, 49, 50, 51, 52, 53);
  } else if constexpr (kCount == 64) {
    FX_QGMMA_RS(128, 64, 64, 65, 66, 67, 68, 69);
  } else if constexpr (kCount == 96) {
    FX_QGMMA_RS(192, 96, 96, 97, 98, 99, 100, 101);
  } else {
    static_assert(kCount == 128);
    FX_QGMMA_RS(256, 128, 128, 129, 130, 131, 132, 133);
  }
}

#undef FX_QGMMA_SS
#undef FX_QGMMA_SS_HALF
#undef FX_PAIRS_8
#undef FX_QGMMA_RS
#include "operand_lists_end.cuh"

}  // namespace flash_ext::ptx
