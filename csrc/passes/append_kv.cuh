// Writes new keys and values into a cache, keys turned by their positions where that is asked for. A thread has 8
// features of a key or of a value. Where tokens go behind the keys of their sequence, the same launch finds their
// places, writes the new lengths and turns queries. By torch's operators that takes 15 launches, with queries 32.
#pragma once

#include <cuda_fp8.h>

#include "../append_kv.h"
#include "../common/seqlen.cuh"
#include "../dtype.cuh"
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
  return ptx::to_float<E>(*reinterpret_cast<const E*>(&x));
}

template <typename E>
__device__ __forceinline__ float factor_at(const void* factors, bool is_float, int64_t i) {
  return is_float ? static_cast<const float*>(factors)[i] : widen<E>(static_cast<const uint16_t*>(factors)[i]);
}

// Feature `col` of a key or query of type X, turned; sums and products are rounded one by one, as torch does.
template <typename E, typename X = E>
__device__ __forceinline__ uint16_t turned(const uint16_t* key, int col, const Rotary& r, int64_t position) {
  const int half = r.dim / 2;
  const int pair = r.interleaved ? col / 2 : col % half;
  const bool is_second = r.interleaved ? col % 2 != 0 : col >= half;
  const int other = r.interleaved ? col ^ 1 : is_second ? col - half : col + half;
  const float x = widen<X>(key[col]), y = widen<X>(key[other]);
  const float c = factor_at<E>(r.cos, r.is_float, position * r.cos_stride + pair);
  const float s = factor_at<E>(r.sin, r.is_float, position * r.sin_stride + pair);
  // (a, b) becomes (a c - b s, a s + b c).
  const float z = is_second ? __fadd_rn(__fmul_rn(y, s), __fmul_rn(x, c)) : __fsub_rn(__fmul_rn(x, c), __fmul_rn(y, s));
  return static_cast<uint16_t>(ptx::pack2<X>(z, 0.f));
}

__device__ __forceinline__ int64_t length_of(const AppendEnds& e, uint32_t b) {
  return number_at(e.lengths, e.is_wide, b * e.lengths_stride);
}

// Keys that sequence b has before the call.
__device__ __forceinline__ int64_t keys_before(const AppendEnds& e, uint32_t b) {
  return min(max(length_of(e, b), int64_t{0}), int64_t{e.room});
}

// Whether sequence b has this entry of a dense cache.
__device__ __forceinline__ bool has_entry(const AppendEnds& e, uint32_t b, int64_t entry) {
  bool is_there = entry >= 0 && entry < e.num_pages;
  if (e.new_tokens == 0) return is_there;
  for (uint32_t before = 0; before < b; ++before) is_there &= e.table[before * e.table_stride] != entry;
  return is_there;
}

// A thread of the grid has the length of one sequence beside its other work: append_kv() makes it large enough.
__device__ __forceinline__ void write_length(const AppendEnds& e, int64_t b) {
  if (b >= e.batch) return;
  const auto own = static_cast<uint32_t>(b);
  int64_t keys = min(keys_before(e, own) + e.new_tokens, int64_t{e.room});
  if (e.of_entries && !has_entry(e, own, e.table[own * e.table_stride])) keys = 0;
  e.new_lengths[own] = static_cast<int32_t>(keys);
}

__device__ __forceinline__ int64_t factor_row(const Rotary& r, int64_t position) {
  return min(max(position, int64_t{0}), int64_t{r.positions} - 1);
}

// Where a token goes, unless it is left out.
struct AppendPlace {
  int64_t page, in_page;
  bool is_there;
  uint32_t sequence, row;  // of the new keys: 0 and the token where slots are given
  int64_t position;  // in its sequence; where slots are given Rotary::of_token has it

  __device__ static AppendPlace of(const AppendParams& p, uint32_t token) {
    if (token >= p.tokens) return {};
    if (p.ends.lengths != nullptr) return behind(p, token);
    const int64_t slot = number_at(p.slots, p.is_wide, token);
    if (slot < 0 || slot >= p.num_slots) return {};
    const uint32_t page = divide(static_cast<uint32_t>(slot), p.page_size);
    return {page, slot - int64_t{page} * p.page_size.divisor, true, 0, token, 0};
  }
  __device__ static AppendPlace behind(const AppendParams& p, uint32_t token) {
    const AppendEnds& e = p.ends;
    const uint32_t b = divide(token, e.count), row = token - b * e.count.divisor;
    const int64_t position = keys_before(e, b) + row;
    if (position >= e.room) return {};
    const uint32_t number = divide(static_cast<uint32_t>(position), p.page_size);
    const int64_t page = e.table == nullptr ? int64_t{b} : int64_t{e.table[b * e.table_stride + number]};
    if (page < 0 || page >= e.num_pages) return {};
    if (e.of_entries && !has_entry(e, b, page)) return {};
    return {page, position - int64_t{number} * p.page_size.divisor, true, b, row, position};
  }
  template <typename View>
  __device__ int64_t offset(const View& x, int h) const {
    return page * x.batch_stride + in_page * x.row_stride + h * x.head_stride;
  }
  __device__ const uint16_t* source(const StridedView& x, int h) const {
    return row_pointer(x, static_cast<int>(sequence), row, h);
  }
  // The row of factors by which the key is turned.
  __device__ int64_t turns_by(const AppendParams& p) const {
    const Rotary& r = p.rotary;
    return factor_row(r, p.ends.lengths != nullptr ? position : number_at(r.of_token, r.is_wide, row));
  }
};

// The sequence of a packed row, as searchsorted() of torch finds it: the first that ends behind the row, else the last.
__device__ __forceinline__ uint32_t sequence_of(const int32_t* cu_seqlens, int32_t batch, int64_t row) {
  int32_t lo = 0, hi = max(batch - 1, 0);
  while (lo < hi) {
    const int32_t mid = lo + (hi - lo) / 2;
    if (cu_seqlens[mid + 1] > row) hi = mid;
    else lo = mid + 1;
  }
  return static_cast<uint32_t>(lo);
}

// 8 features of a query of type X; E is that of new keys, which factors have unless they are floats.
template <typename E, typename X>
__device__ __forceinline__ void turn_query(const AppendParams& p, int64_t item) {
  const TurnedQueries& t = p.queries;
  const uint32_t row = divide(static_cast<uint32_t>(item), t.chunks);
  const int first = static_cast<int>(static_cast<uint32_t>(item) - row * t.chunks.divisor) * 8;
  const uint32_t token = divide(row, t.heads);
  if (token >= t.tokens) return;
  const int h = static_cast<int>(row - token * t.heads.divisor);
  const bool packed = t.cu_seqlens != nullptr;
  const uint32_t b = packed ? sequence_of(t.cu_seqlens, p.ends.batch, token) : divide(token, t.rows);
  const uint32_t in_batch = packed ? token : token - b * t.rows.divisor;
  const uint16_t* source = row_pointer(t.from, packed ? 0 : static_cast<int>(b), in_batch, h);
  uint16_t* const to = t.to + int64_t{row} * p.head_dim + first;
  int64_t position = 0;
  if (first < p.rotary.dim && p.ends.batch > 0) {  // packed rows may be of no sequence
    const int64_t steps = !t.counts ? 0 : packed ? int64_t{token} - t.cu_seqlens[b] : int64_t{in_batch};
    position = factor_row(p.rotary, length_of(p.ends, b) + steps);
  }
  uint16_t x[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int col = first + i;
    if (col < p.head_dim) x[i] = col < p.rotary.dim ? turned<E, X>(source, col, p.rotary, position) : source[col];
  }
  if (t.aligned && first + 8 <= p.head_dim) {
    const auto word = [&](int i) { return x[2 * i] | static_cast<uint32_t>(x[2 * i + 1]) << 16; };
    *reinterpret_cast<uint4*>(to) = make_uint4(word(0), word(1), word(2), word(3));
    return;
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (first + i < p.head_dim) to[i] = x[i];
  }
}

// What a thread does beside new keys and values. Returns whether its block has none of these.
template <typename E>
__device__ __forceinline__ bool does_other_work(const AppendParams& p) {
  write_length(p.ends, static_cast<int64_t>(blockIdx.x) * kAppendThreads + threadIdx.x);
  if (blockIdx.x < p.query_block) return false;
  const int64_t item = (blockIdx.x - p.query_block) * kAppendThreads + threadIdx.x;
  with_dtype(p.queries.dtype, [&]<typename X>() { turn_query<E, X>(p, item); });
  return true;
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
  if (does_other_work<E>(p)) return;
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
  const uint16_t* source = place.source(from, h);
  const bool turns = is_key && p.rotary.cos != nullptr;
  const int64_t position = turns ? place.turns_by(p) : 0;
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
    const int64_t of = p.ends.lengths != nullptr ? place.sequence : place.row;
    factor = factors.ptr[of * factors.batch_stride + h * factors.head_stride];
  }
  uint8_t* out = static_cast<uint8_t*>(to.ptr) + place.offset(to, h) + first;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (first + i < columns) out[i] = static_cast<uint8_t>(byte_of(p.cache_type, x[i], factor));
  }
}

template <typename E>
__global__ void __launch_bounds__(kAppendThreads) append_kv_kernel(const __grid_constant__ AppendParams p) {
  if (does_other_work<E>(p)) return;
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
  const uint16_t* source = where.source(from, h);
  uint16_t* place = static_cast<uint16_t*>(to.ptr) + where.offset(to, h);
  const bool whole = first + 8 <= columns;
  const bool turns = is_key && first < p.rotary.dim && p.rotary.cos != nullptr;
  if (!turns && whole && from.aligned && to.aligned) {
    *reinterpret_cast<uint4*>(place + first) = *reinterpret_cast<const uint4*>(source + first);
    return;
  }
  uint16_t x[8];
  const int64_t position = turns ? where.turns_by(p) : 0;
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
