// Stands in for csrc/ptx/sm80.cuh: the same functions on the fibers of cuda_shim.h, as the PTX manual defines them.
#pragma once

#include "cuda_shim.h"

namespace flash_ext::ptx {

inline constexpr unsigned kFullWarp = 0xffffffffu;

inline uint32_t smem_address(const void* p) {
  return static_cast<uint32_t>(static_cast<const unsigned char*>(p) - emu::smem);
}
inline int fresh_thread_idx() { return emu::current; }
inline int fresh_lane() { return emu::current % 32; }
// Kernels are run one after the other.
inline void allow_next_kernel() {}
inline void wait_for_kernel_before() {}

inline void do_copy(const emu::Copy& copy) {
  if (copy.dst % copy.size != 0 || copy.dst + copy.size > emu::kSmemBytes) emu::fail("bad destination of cp.async");
  if (copy.bytes > 0 && reinterpret_cast<uintptr_t>(copy.src) % copy.size != 0) emu::fail("bad source of cp.async");
  std::memset(emu::smem + copy.dst, 0, copy.size);
  std::memcpy(emu::smem + copy.dst, copy.src, copy.bytes);
}
inline void cp_async(const emu::Copy& copy) {
  if (emu::lazy) {
    emu::fibers[emu::current].open.push_back(copy);
  } else {
    do_copy(copy);
  }
}
inline void cp_async_16(uint32_t dst, const void* src, int bytes) { cp_async({dst, src, 16, bytes}); }
inline void cp_async_8(uint32_t dst, const void* src, int bytes) { cp_async({dst, src, 8, bytes}); }
inline void cp_async_4(uint32_t dst, const void* src, int bytes) { cp_async({dst, src, 4, bytes}); }
inline void cp_async_commit() {
  emu::Fiber& fiber = emu::fibers[emu::current];
  fiber.groups.push_back(fiber.open);
  fiber.open.clear();
}
template <int kPending>
void cp_async_wait() {
  std::vector<std::vector<emu::Copy>>& groups = emu::fibers[emu::current].groups;
  while (groups.size() > kPending) {
    for (const emu::Copy& copy : groups.front()) do_copy(copy);
    groups.erase(groups.begin());
  }
}

template <typename X>
X load_late(const void* address) {
  X x;
  std::memcpy(&x, address, sizeof(X));
  return x;
}
inline float4 load_shared(uint32_t address) { return emu::shared_at<float4>(address, 16); }
inline float2 load_shared_pair(uint32_t address) { return emu::shared_at<float2>(address, 8); }
inline uint32_t load_shared_word(uint32_t address) { return emu::shared_at<uint32_t>(address); }
inline void store_shared(uint32_t address, float4 x) { emu::shared_at<float4>(address, 16) = x; }
// What csrc/common/tiles.cuh says in assembly of its own.
inline void store_word(uint32_t address, uint32_t x) { emu::shared_at<uint32_t>(address) = x; }
inline void store_words(uint32_t address, const uint32_t (&x)[4]) {
  emu::shared_at<uint4>(address, 16) = {x[0], x[1], x[2], x[3]};
}

// Lane 8 i + j brings the address of row j of matrix i; register i holds two elements of matrix i.
template <bool kTrans>
void ldmatrix(uint32_t (&r)[4], uint32_t address) {
  emu::shared_at<float4>(address, 16);  // checks it
  const int major = fresh_lane() / 4, minor = fresh_lane() % 4 * 2;
  const uint4 x = emu::collective(kTrans ? 6 : 5, address, [&](const auto& of) {
    uint32_t word[4];
    for (int i = 0; i < 4; ++i) {
      const auto element = [&](int row, int col) { return emu::shared_at<uint16_t>(of(8 * i + row) + 2 * col); };
      const uint32_t low = kTrans ? element(minor, major) : element(major, minor);
      const uint32_t high = kTrans ? element(minor + 1, major) : element(major, minor + 1);
      word[i] = low | high << 16;
    }
    return uint4{word[0], word[1], word[2], word[3]};
  });
  r[0] = x.x, r[1] = x.y, r[2] = x.z, r[3] = x.w;
}
inline void ldmatrix_x4(uint32_t (&r)[4], uint32_t address) { ldmatrix<false>(r, address); }
inline void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t address) { ldmatrix<true>(r, address); }

template <typename E>
float widen(uint16_t bits);
template <>
inline float widen<__nv_bfloat16>(uint16_t bits) {
  const uint32_t word = uint32_t{bits} << 16;
  float x;
  std::memcpy(&x, &word, 4);
  return x;
}
template <>
inline float widen<__half>(uint16_t bits) {
  _Float16 x;
  std::memcpy(&x, &bits, 2);
  return x;
}
template <typename E>
uint16_t narrow(float x);
template <>
inline uint16_t narrow<__nv_bfloat16>(float x) {
  if (std::isnan(x)) return 0x7fff;
  uint32_t word;
  std::memcpy(&word, &x, 4);
  return static_cast<uint16_t>((word + 0x7fff + (word >> 16 & 1)) >> 16);  // to nearest, ties to even
}
template <>
inline uint16_t narrow<__half>(float x) {
  const _Float16 rounded = static_cast<_Float16>(x);
  uint16_t bits;
  std::memcpy(&bits, &rounded, 2);
  return bits;
}

// d[2 i + j] is element (lane / 4 + 8 i, 2 (lane % 4) + j). Sums are of fp32, in another order than a GPU's.
template <typename E>
void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  struct In {
    uint32_t a[4], b[2];
  };
  const In in{{a[0], a[1], a[2], a[3]}, {b0, b1}};
  const int row = fresh_lane() / 4, col = fresh_lane() % 4 * 2;
  const float4 x = emu::collective(7, in, [&](const auto& of) {
    float sum[4] = {};
    for (int k = 0; k < 16; ++k) {  // in registers of half k / 8, of lane k % 8 / 2 of a quad, element k % 2
      const int half = k / 8, quad = k % 8 / 2, shift = k % 2 * 16;
      const In of_row = of(4 * row + quad);
      for (int j = 0; j < 2; ++j) {
        const float right = widen<E>(of(4 * (col + j) + quad).b[half] >> shift);
        for (int i = 0; i < 2; ++i) sum[2 * i + j] += widen<E>(of_row.a[2 * half + i] >> shift) * right;
      }
    }
    return float4{sum[0], sum[1], sum[2], sum[3]};
  });
  d[0] += x.x, d[1] += x.y, d[2] += x.z, d[3] += x.w;
}

// Threads run one after the other.
inline void red_add_f32x2(float* address, float x, float y) {
  if (reinterpret_cast<uintptr_t>(address) % 8 != 0) emu::fail("bad address of red");
  address[0] += x, address[1] += y;
}

inline float reciprocal(float x) { return 1.f / x; }
inline float ex2(float x) { return std::exp2(x); }
template <typename E>
uint32_t pack2(float lo, float hi) {
  return narrow<E>(lo) | uint32_t{narrow<E>(hi)} << 16;
}
template <typename E>
uint32_t pack2_positive(float lo, float hi) {
  return pack2<E>(lo < 0.f ? 0.f : lo, hi < 0.f ? 0.f : hi);
}
template <typename E>
float to_float(E x) {
  return widen<E>(x.bits);
}
template <typename E>
float2 unpack2(uint32_t pair) {
  return {widen<E>(pair & 0xffff), widen<E>(pair >> 16)};
}
// e4m3: sign, 4 bits of exponent with bias 7, 3 of mantissa; no infinities.
inline float widen_e4m3(uint8_t bits) {
  const int exponent = bits >> 3 & 15, mantissa = bits & 7;
  const float size = (bits & 0x7f) == 0x7f ? NAN
                     : exponent == 0       ? std::ldexp(mantissa, -9)
                                           : std::ldexp(8 + mantissa, exponent - 10);
  return bits & 0x80 ? -size : size;
}
template <bool kInt8>
uint2 bytes_as_half(uint32_t bytes) {
  const auto half = [&](int i) -> uint32_t {
    const uint8_t byte = bytes >> 8 * i & 0xff;
    return narrow<__half>(kInt8 ? static_cast<int8_t>(byte) : widen_e4m3(byte));
  };
  return {half(0) | half(1) << 16, half(2) | half(3) << 16};
}

}  // namespace flash_ext::ptx
