// Writes new keys and values into a cache, keys turned by their positions where that is asked for. A thread has 8
// features of a key or of a value.
#pragma once

#include <cuda_fp8.h>

#include <type_traits>

#include "../append_kv.h"
#include "../common/seqlen.cuh"
#include "../fp8.h"
#include "../ptx/sm80.cuh"

namespace flash_ext {

inline constexpr int kAppendThreads = 256;
inline constexpr float kInt8Max = 127.f;

__device__ __forceinline__ int64_t number_at(const void* numbers, bool is_wide, int64_t i) {
  return is_wide ? static_cast<const int64_t*>(numbers)[i] : static_cast<const int32_t*>(numbers)[i];
}

template <typename E>
__device__ __forceinline__ float widen(uint16_t x) {
  if constexpr (std::is_same_v<E, __half>) return __half2float(__ushort_as_half(x));
  else return __uint_as_float(static_cast<uint32_t>(x) << 16);
}

template <typename E>
__device__ __forceinline__ float factor_at(const void* factors, bool is_float, int64_t i) {
  return is_float ? static_cast<const float*>(factors)[i] : widen<E>(static_cast<const uint16_t*>(factors)[i]);
}

// Feature `col` of a key, turned; sums and products are rounded one by one, as torch does.
template <typename E>
__device__ __forceinline__ uint16_t turned(const uint16_t* key, int col, const Rotary& r, int64_t position) {
  const int half = r.dim / 2;
  const int pair = r.interleaved ? col / 2 : col % half;
  const bool is_second = r.interleaved ? col % 2 != 0 : col >= half;
  const int other = r.interleaved ? col ^ 1 : is_second ? col - half : col + half;
  const float x = widen<E>(key[col]), y = widen<E>(key[other]);
  const float c = factor_at<E>(r.cos, r.is_float, position * r.cos_stride + pair);
  const float s = factor_at<E>(r.sin, r.is_float, position * r.sin_stride + pair);
  // (a, b) becomes (a c - b s, a s + b c).
  const float z = is_second ? __fadd_rn(__fmul_rn(y, s), __fmul_rn(x, c)) : __fsub_rn(__fmul_rn(x, c), __fmul_rn(y, s));
  return static_cast<uint16_t>(ptx::pack2<E>(z, 0.f));
}

// Where a token goes, unless it is left out.
struct AppendPlace {
  int64_t page, in_page;
  bool is_there;

  __device__ static AppendPlace of(const AppendParams& p, uint32_t token) {
    if (token >= p.tokens) return {0, 0, false};
    const int64_t slot = number_at(p.slots, p.is_wide, token);
    if (slot < 0 || slot >= p.num_slots) return {0, 0, false};
    const uint32_t page = divide(static_cast<uint32_t>(slot), p.page_size);
    return {page, slot - int64_t{page} * p.page_size.divisor, true};
  }
  template <typename View>
  __device__ int64_t offset(const View& x, int h) const {
    return page * x.batch_stride + in_page * x.row_stride + h * x.head_stride;
  }
};

// The row of factors by which a token is turned.
__device__ __forceinline__ int64_t position_of(const Rotary& r, uint32_t token) {
  return min(max(number_at(r.of_token, r.is_wide, token), int64_t{0}), int64_t{r.positions} - 1);
}

// x / factor rounded to 8 bits, at most the largest number there is.
__device__ __forceinline__ uint32_t byte_of(CacheType type, float x, float factor) {
  const float y = __fdiv_rn(x, factor);
  if (type == CacheType::kE4m3) return __nv_cvt_float_to_fp8(y, __NV_SATFINITE, __NV_E4M3);
  return static_cast<uint32_t>(__float2int_rn(fminf(fmaxf(y, -kInt8Max), kInt8Max))) & 0xff;
}

// Into a cache of 8 bits: a warp has a key or a value of one head, a lane 8 features.
template <typename E>
__global__ void __launch_bounds__(kAppendThreads) append_bytes_kernel(const __grid_constant__ AppendParams p) {
  const uint32_t item = (blockIdx.x * kAppendThreads + threadIdx.x) / 32, row = item / 2;
  const int first = static_cast<int>(threadIdx.x % 32) * 8;
  const bool is_key = item % 2 == 0;
  const uint32_t token = divide(row, p.heads);
  const int h = static_cast<int>(row - token * p.heads.divisor);
  const AppendPlace place = AppendPlace::of(p, token);
  if (!place.is_there) return;
  const StridedView &from = is_key ? p.k_new : p.v_new, &to = is_key ? p.k_cache : p.v_cache;
  const CacheFactors& factors = is_key ? p.k_factors : p.v_factors;
  const int columns = is_key ? p.head_dim : p.head_dim_v;
  const uint16_t* source = row_pointer(from, 0, token, h);
  const bool turns = is_key && p.rotary.cos != nullptr;
  const int64_t position = turns ? position_of(p.rotary, token) : 0;
  float x[8];
  float largest = 0.f;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int col = first + i;
    x[i] = 0.f;
    if (col < columns) {
      const uint16_t y = turns && col < p.rotary.dim ? turned<E>(source, col, p.rotary, position) : source[col];
      x[i] = widen<E>(y);
    }
    largest = __uint_as_float(max(__float_as_uint(largest), __float_as_uint(x[i]) & 0x7fffffff));  // NaN above all
  }
  float factor = 1.f;
  if (factors.of_slots) {
    largest = __uint_as_float(__reduce_max_sync(ptx::kFullWarp, __float_as_uint(largest)));
    const float most = p.cache_type == CacheType::kE4m3 ? kFp8Max : kInt8Max;
    factor = largest == 0.f ? 1.f : __fdiv_rn(largest, most);
    if (first == 0) const_cast<float*>(factors.ptr)[place.offset(factors, h)] = factor;
  } else if (factors.ptr != nullptr) {
    factor = factors.ptr[token * factors.batch_stride + h * factors.head_stride];
  }
  uint8_t* out = static_cast<uint8_t*>(to.ptr) + place.offset(to, h) + first;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (first + i < columns) out[i] = static_cast<uint8_t>(byte_of(p.cache_type, x[i], factor));
  }
}

template <typename E>
__global__ void __launch_bounds__(kAppendThreads) append_kv_kernel(const __grid_constant__ AppendParams p) {
  const int64_t item = static_cast<int64_t>(blockIdx.x) * kAppendThreads + threadIdx.x;
  const uint32_t row = divide(static_cast<uint32_t>(item), p.chunks);
  const int piece = static_cast<int>(static_cast<uint32_t>(item) - row * p.chunks.divisor);
  const uint32_t token = divide(row, p.heads);
  const int h = static_cast<int>(row - token * p.heads.divisor);
  const AppendPlace where = AppendPlace::of(p, token);
  if (!where.is_there) return;

  const bool is_key = piece < p.key_chunks;
  const StridedView &from = is_key ? p.k_new : p.v_new, &to = is_key ? p.k_cache : p.v_cache;
  const int columns = is_key ? p.head_dim : p.head_dim_v, first = 8 * (is_key ? piece : piece - p.key_chunks);
  const uint16_t* source = row_pointer(from, 0, token, h);
  uint16_t* place = static_cast<uint16_t*>(to.ptr) + where.offset(to, h);
  const bool whole = first + 8 <= columns;
  const bool turns = is_key && first < p.rotary.dim && p.rotary.cos != nullptr;
  if (!turns && whole && from.aligned && to.aligned) {
    *reinterpret_cast<uint4*>(place + first) = *reinterpret_cast<const uint4*>(source + first);
    return;
  }
  uint16_t x[8];
  const int64_t position = turns ? position_of(p.rotary, token) : 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int col = first + i;
    if (col >= columns) continue;
    x[i] = turns && col < p.rotary.dim ? turned<E>(source, col, p.rotary, position) : source[col];
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (first + i < columns) place[first + i] = x[i];
  }
}

}  // namespace flash_ext
