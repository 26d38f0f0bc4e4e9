// Stands in for csrc/launch.h and the CUDA headers of fp8: launches run on the fibers of cuda_shim.h.
#pragma once

#include <map>
#include <string>
#include <utility>

#include "dtype.cuh"
#include "fp8.h"
#include "heuristics.h"
#include "ptx/sm80.cuh"

#define __shared__ static

inline float rsqrtf(float x) { return 1.f / std::sqrt(x); }
// CTAs run one after the other, their threads in one thread of the CPU.
inline uint32_t atomicAdd(uint32_t* to, uint32_t x) { return std::exchange(*to, *to + x); }
inline void __threadfence() {}
inline float __ldcg(const float* from) { return *from; }

enum Saturation { __NV_SATFINITE };
enum Fp8Kind { __NV_E4M3 };

// To nearest, ties to even; what is beyond 448 is 448.
inline uint8_t e4m3_of(float x) {
  if (std::isnan(x)) return 0x7f;
  const uint8_t sign = std::signbit(x) ? 0x80 : 0;
  const float y = std::fabs(x);
  if (y >= 448.f) return sign | 0x7e;
  const int exponent = std::max(-6, y == 0.f ? -6 : std::ilogb(y));
  const float steps = std::nearbyint(std::ldexp(y, 3 - exponent));  // of 2^(exponent - 3), below 8 where subnormal
  return sign | static_cast<uint8_t>((exponent + 6) * 8 + static_cast<int>(steps));
}
inline uint32_t __nv_cvt_float2_to_fp8x2(float2 x, Saturation, Fp8Kind) { return e4m3_of(x.x) | e4m3_of(x.y) << 8; }
using __nv_fp8x2_storage_t = uint16_t;
struct __half2 {
  __half x, y;
};
struct __nv_bfloat162 {
  __nv_bfloat16 x, y;
};
inline __half2 __nv_cvt_fp8x2_to_halfraw2(__nv_fp8x2_storage_t pair, Fp8Kind) {
  const auto half_of = [](uint8_t x) {
    const bool is_nan = (x & 0x7f) == 0x7f;
    return __half{flash_ext::ptx::narrow<__half>(is_nan ? NAN : flash_ext::ptx::widen_e4m3(x))};
  };
  return {half_of(static_cast<uint8_t>(pair)), half_of(static_cast<uint8_t>(pair >> 8))};
}
inline float2 __half22float2(__half2 x) { return {flash_ext::ptx::to_float(x.x), flash_ext::ptx::to_float(x.y)}; }
// Of a number and NaN the number.
template <typename Pair>
Pair __hmin2(Pair a, Pair b) {
  const auto least = [](auto x, auto y) {
    const float u = flash_ext::ptx::to_float(x), v = flash_ext::ptx::to_float(y);
    return std::isnan(u) || v < u ? y : x;
  };
  return {least(a.x, b.x), least(a.y, b.y)};
}
template <typename Pair>
Pair __hmax2(Pair a, Pair b) {
  const auto most = [](auto x, auto y) {
    const float u = flash_ext::ptx::to_float(x), v = flash_ext::ptx::to_float(y);
    return std::isnan(u) || v > u ? y : x;
  };
  return {most(a.x, b.x), most(a.y, b.y)};
}

namespace flash_ext {

// Kept from launch to launch: to make the stacks of a CTA takes longer than to run it.
inline std::vector<emu::Fiber>& fibers_of(int threads) {
  static std::map<int, std::vector<emu::Fiber>> kept;
  return kept[threads];
}

template <typename... Params, typename... Args>
std::string launch(const char*, void (*kernel)(Params...), int64_t grid, int threads, int smem_bytes, void*,
                   const Args&... args) {
  if (smem_bytes > emu::kSmemBytes) return "too much shared memory";
  gridDim.x = static_cast<uint32_t>(grid);
  fibers_of(threads).swap(emu::fibers);
  for (int64_t i = 0; i < grid; ++i) {
    blockIdx.x = static_cast<uint32_t>(i);
    emu::run_cta(threads, [&] { kernel(args...); });
  }
  fibers_of(threads).swap(emu::fibers);
  return {};
}

}  // namespace flash_ext
