// Writes new keys and values into a cache, keys turned by their positions where that is asked for. A thread has 8
// features of a key or of a value.
#pragma once

#include <type_traits>

#include "../append_kv.h"
#include "../common/seqlen.cuh"
#include "../ptx/sm80.cuh"

namespace flash_ext {

inline constexpr int kAppendThreads = 256;

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

template <typename E>
__global__ void __launch_bounds__(kAppendThreads) append_kv_kernel(const __grid_constant__ AppendParams p) {
  const int64_t item = static_cast<int64_t>(blockIdx.x) * kAppendThreads + threadIdx.x;
  const uint32_t row = divide(static_cast<uint32_t>(item), p.chunks);
  const int piece = static_cast<int>(static_cast<uint32_t>(item) - row * p.chunks.divisor);
  const uint32_t token = divide(row, p.heads);
  const int h = static_cast<int>(row - token * p.heads.divisor);
  if (token >= p.tokens) return;
  const int64_t slot = number_at(p.slots, p.is_wide, token);
  if (slot < 0 || slot >= p.num_slots) return;
  const uint32_t page = divide(static_cast<uint32_t>(slot), p.page_size);
  const int64_t in_page = slot - int64_t{page} * p.page_size.divisor;

  const bool is_key = piece < p.key_chunks;
  const StridedView &from = is_key ? p.k_new : p.v_new, &to = is_key ? p.k_cache : p.v_cache;
  const int columns = is_key ? p.head_dim : p.head_dim_v, first = 8 * (is_key ? piece : piece - p.key_chunks);
  const uint16_t* source = row_pointer(from, 0, token, h);
  uint16_t* place =
      static_cast<uint16_t*>(to.ptr) + page * to.batch_stride + in_page * to.row_stride + h * to.head_stride;
  const bool whole = first + 8 <= columns;
  const bool turns = is_key && first < p.rotary.dim && p.rotary.cos != nullptr;
  if (!turns && whole && from.aligned && to.aligned) {
    *reinterpret_cast<uint4*>(place + first) = *reinterpret_cast<const uint4*>(source + first);
    return;
  }
  uint16_t x[8];
  const int64_t position = turns ? min(max(number_at(p.rotary.of_token, p.rotary.is_wide, token), int64_t{0}),
                                       int64_t{p.rotary.positions} - 1)
                                 : 0;
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
