// One function per PTX instruction of the Ampere generation, named after it.
// Reference: PTX ISA (cp.async, ldmatrix, mma.sync.m16n8k16, ex2.approx, bar, red).
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace flash_ext::ptx {

inline constexpr int kWarpThreads = 32, kWarpgroupThreads = 128;
inline constexpr unsigned kFullWarp = 0xffffffffu;  // the lanes of a shuffle or vote: all

__device__ __forceinline__ uint32_t smem_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// threadIdx.x, read anew at every call: what is derived from it then does not stay in registers in between.
__device__ __forceinline__ int fresh_thread_idx() {
  int x;
  asm volatile("mov.u32 %0, %%tid.x;\n" : "=r"(x));
  return x;
}

// The same for the lane, in one instruction.
__device__ __forceinline__ int fresh_lane() {
  int x;
  asm volatile("mov.u32 %0, %%laneid;\n" : "=r"(x));
  __builtin_assume(x >= 0 && x < 32);
  return x;
}

__device__ __forceinline__ uint32_t fresh_block_idx() {
  uint32_t x;
  asm volatile("mov.u32 %0, %%ctaid.x;\n" : "=r"(x));
  return x;
}

// Copies `bytes` (0..16) from global memory and zero-fills the rest of the 16-byte destination.
__device__ __forceinline__ void cp_async_16(uint32_t dst, const void* src, int bytes) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;\n" ::"r"(dst), "l"(src), "r"(bytes) : "memory");
}

// All 16 bytes, or zeros: a predicate, where a number of bytes costs two sums for each address.
__device__ __forceinline__ void cp_async_16_or_zeros(uint32_t dst, const void* src, bool zeros) {
  asm volatile("{\n.reg .pred zeros;\nsetp.ne.u32 zeros, %2, 0;\n"
               "cp.async.cg.shared.global.L2::128B [%0], [%1], 16, zeros;\n}\n" ::"r"(dst),
               "l"(src), "r"(static_cast<uint32_t>(zeros))
               : "memory");
}

// 8-byte form, zero-filled when bytes == 0. Goes through L1: .cg exists for 16 bytes only.
__device__ __forceinline__ void cp_async_8(uint32_t dst, const void* src, int bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;\n" ::"r"(dst), "l"(src), "r"(bytes) : "memory");
}

// The same for 4 bytes.
__device__ __forceinline__ void cp_async_4(uint32_t dst, const void* src, int bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;\n" ::"r"(dst), "l"(src), "r"(bytes) : "memory");
}

__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;\n" ::: "memory"); }

// Completes an arrival at `bar` when what this thread has copied is there; the arrival is one more than the barrier
// counts.
__device__ __forceinline__ void cp_async_mbarrier_arrive(uint32_t bar) {
  asm volatile("cp.async.mbarrier.arrive.shared.b64 [%0];\n" ::"r"(bar) : "memory");
}

template <int kPending>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;\n" ::"n"(kPending) : "memory");
}

__device__ __forceinline__ float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;\n" : "=f"(y) : "f"(x));
  return y;
}

// x = 2 or 4 bytes from global memory, if `condition`, without a branch. Stays where it is written.
template <typename X>
__device__ __forceinline__ void load_if(uint32_t& x, const void* address, bool condition) {
  static_assert(sizeof(X) == 2 || sizeof(X) == 4);
  if constexpr (sizeof(X) == 4) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, %2, 0;\n@p ld.global.b32 %0, [%1];\n}\n"
                 : "+r"(x)
                 : "l"(address), "r"(static_cast<uint32_t>(condition)));
  } else {
    asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, %2, 0;\n@p ld.global.u16 %0, [%1];\n}\n"
                 : "+r"(x)
                 : "l"(address), "r"(static_cast<uint32_t>(condition)));
  }
}

// Two floats from global memory, or zeros, without a branch. Stays where it is written.
__device__ __forceinline__ float2 load_pair_if(const void* address, bool condition) {
  float2 x;
  asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, %3, 0;\nmov.f32 %0, 0f00000000;\nmov.f32 %1, 0f00000000;\n"
               "@p ld.global.v2.f32 {%0, %1}, [%2];\n}\n"
               : "=&f"(x.x), "=&f"(x.y)
               : "l"(address), "r"(static_cast<uint32_t>(condition))
               : "memory");
  return x;
}

// A global load that stays where it is written: dozens of them hoisted together would spill.
template <typename X>
__device__ __forceinline__ X load_late(const void* address) {
  static_assert(sizeof(X) == 2 || sizeof(X) == 4 || sizeof(X) == 8);
  X x;
  if constexpr (sizeof(X) == 8) {
    uint64_t bits;
    asm volatile("ld.global.b64 %0, [%1];\n" : "=l"(bits) : "l"(address) : "memory");
    x = *reinterpret_cast<const X*>(&bits);
  } else if constexpr (sizeof(X) == 4) {
    uint32_t bits;
    asm volatile("ld.global.b32 %0, [%1];\n" : "=r"(bits) : "l"(address) : "memory");
    x = *reinterpret_cast<const X*>(&bits);
  } else {
    uint16_t bits;
    asm volatile("ld.global.b16 %0, [%1];\n" : "=h"(bits) : "l"(address) : "memory");
    x = *reinterpret_cast<const X*>(&bits);
  }
  return x;
}

__device__ __forceinline__ float4 load_shared(uint32_t address) {
  float4 x;
  asm volatile("ld.shared.v4.f32 {%0,%1,%2,%3}, [%4];\n" : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w) : "r"(address));
  return x;
}
__device__ __forceinline__ float2 load_shared_pair(uint32_t address) {
  float2 x;
  asm volatile("ld.shared.v2.f32 {%0,%1}, [%2];\n" : "=f"(x.x), "=f"(x.y) : "r"(address));
  return x;
}
// Loads that ptxas does not merge with others of the same address: merged, they would hold registers in between.
__device__ __forceinline__ uint4 load_shared_anew(uint32_t address) {
  uint4 x;
  asm volatile("ld.volatile.shared.v4.b32 {%0,%1,%2,%3}, [%4];\n"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "r"(address));
  return x;
}
__device__ __forceinline__ uint2 load_shared_pair_anew(uint32_t address) {
  uint2 x;
  asm volatile("ld.volatile.shared.v2.b32 {%0,%1}, [%2];\n" : "=r"(x.x), "=r"(x.y) : "r"(address));
  return x;
}
__device__ __forceinline__ uint32_t load_shared_word(uint32_t address) {
  uint32_t x;
  asm volatile("ld.shared.b32 %0, [%1];\n" : "=r"(x) : "r"(address));
  return x;
}
__device__ __forceinline__ uint16_t load_shared_half(uint32_t address) {
  uint16_t v;
  asm volatile("ld.shared.b16 %0, [%1];\n" : "=h"(v) : "r"(address));
  return v;
}
__device__ __forceinline__ uint2 load_shared_words(uint32_t address) {
  uint2 x;
  asm volatile("ld.shared.v2.b32 {%0,%1}, [%2];\n" : "=r"(x.x), "=r"(x.y) : "r"(address) : "memory");
  return x;
}
__device__ __forceinline__ void load_shared_words(uint32_t (&x)[4], uint32_t address) {
  asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];\n"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(address)
               : "memory");
}
__device__ __forceinline__ void store_shared_word(uint32_t address, uint32_t x) {
  asm volatile("st.shared.b32 [%0], %1;\n" ::"r"(address), "r"(x) : "memory");
}
__device__ __forceinline__ void store_shared(uint32_t address, float4 x) {
  asm volatile("st.shared.v4.f32 [%0], {%1,%2,%3,%4};\n" ::"r"(address), "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w)
               : "memory");
}

__device__ __forceinline__ void store_shared(uint32_t address, uint4 x) {
  asm volatile("st.shared.v4.b32 [%0], {%1,%2,%3,%4};\n" ::"r"(address), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w)
               : "memory");
}

__device__ __forceinline__ void ldmatrix_x4(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];\n"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address));
}

__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];\n"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address));
}

#if __CUDA_ARCH__ >= 900
__device__ __forceinline__ void stmatrix_x4(uint32_t address, const uint32_t (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};\n" ::"r"(address), "r"(r[0]), "r"(r[1]),
               "r"(r[2]), "r"(r[3])
               : "memory");
}
#endif

// d += a * b: a is 16x16 row-major, b is 16x8 column-major, d is 16x8 in fp32.
template <typename E>
__device__ __forceinline__ void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);

template <>
__device__ __forceinline__ void mma_m16n8k16<__half>(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
               "{%0,%1,%2,%3};\n"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

template <>
__device__ __forceinline__ void mma_m16n8k16<__nv_bfloat16>(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                                            uint32_t b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
               "{%0,%1,%2,%3};\n"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// The upper (kUpper) or lower halves of first and second become 0 where the lower and the upper half of x are below a
// bound, given as -bound << 16. The carry of a sum is a comparison, and takes the shift along.
template <bool kUpper>
__device__ __forceinline__ void clear_below_u16x2(uint32_t& first, uint32_t& second, uint32_t x, uint32_t minus_bound) {
  asm("{\n.reg .pred below;\n.reg .b32 shifted, sum, carry;\n"
      "shl.b32 shifted, %2, 16;\nadd.cc.u32 sum, shifted, %3;\naddc.u32 carry, 0, 0;\nsetp.eq.u32 below, carry, 0;\n"
      "@below and.b32 %0, %0, %4;\n"
      "add.cc.u32 sum, %2, %3;\naddc.u32 carry, 0, 0;\nsetp.eq.u32 below, carry, 0;\n"
      "@below and.b32 %1, %1, %4;\n}\n"
      : "+r"(first), "+r"(second)
      : "r"(x), "r"(minus_bound), "n"(kUpper ? 0x0000ffff : 0xffff0000));
}

// base + kFactor * x in one instruction; left to itself the compiler sums 64-bit numbers, two for each.
template <int kFactor>
__device__ __forceinline__ const void* offset_by(const void* base, uint32_t x) {
  uint64_t sum;
  asm("mad.wide.u32 %0, %1, %2, %3;\n" : "=l"(sum) : "r"(x), "n"(kFactor), "l"(base));
  return reinterpret_cast<const void*>(sum);
}

// 2^x, relative error about 2^-22; ex2(-inf) = 0. Denormal results flush to zero.
__device__ __forceinline__ float ex2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;\n" : "=f"(y) : "f"(x));
  return y;
}

// {lo, hi} rounded to nearest even and packed, lo in the lower half.
template <typename E>
__device__ __forceinline__ uint32_t pack2(float lo, float hi);

template <>
__device__ __forceinline__ uint32_t pack2<__half>(float lo, float hi) {
  uint32_t r;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;\n" : "=r"(r) : "f"(hi), "f"(lo));
  return r;
}

template <>
__device__ __forceinline__ uint32_t pack2<__nv_bfloat16>(float lo, float hi) {
  uint32_t r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;\n" : "=r"(r) : "f"(hi), "f"(lo));
  return r;
}

// The same with 0 for what is negative; NaN stays NaN.
template <typename E>
__device__ __forceinline__ uint32_t pack2_positive(float lo, float hi) {
  uint32_t r;
  if constexpr (std::is_same_v<E, __nv_bfloat16>) {
    asm("cvt.rn.relu.bf16x2.f32 %0, %1, %2;\n" : "=r"(r) : "f"(hi), "f"(lo));
  } else {
    static_assert(std::is_same_v<E, __half>, "another element type");
    asm("cvt.rn.relu.f16x2.f32 %0, %1, %2;\n" : "=r"(r) : "f"(hi), "f"(lo));
  }
  return r;
}

template <typename E>
__device__ __forceinline__ float to_float(E x);
template <>
__device__ __forceinline__ float to_float<__half>(__half x) {
  return __half2float(x);
}
template <>
__device__ __forceinline__ float to_float<__nv_bfloat16>(__nv_bfloat16 x) {
  return __bfloat162float(x);
}

// Both halves of a word, the lower first.
template <typename E>
__device__ __forceinline__ float2 unpack2(uint32_t pair) {
  if constexpr (std::is_same_v<E, __nv_bfloat16>) {
    return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
  } else {
    static_assert(std::is_same_v<E, __half>, "another element type");
    return __half22float2(*reinterpret_cast<const __half2*>(&pair));
  }
}

// Four bytes of e4m3 as fp16, exactly, without the instruction of sm_89 and newer. NaN stays NaN.
__device__ __forceinline__ uint2 e4m3_as_half_by_shifts(uint32_t bytes) {
  const auto widen = [](uint32_t x) {  // a byte in the upper half of each 16 bits: sign, exponent and mantissa in place
    const uint32_t bits = (x & 0x80008000) | (x >> 1 & 0x3f803f80);
    const __half2 y = __hmul2(*reinterpret_cast<const __half2*>(&bits), __float2half2_rn(256.f));
    return *reinterpret_cast<const uint32_t*>(&y) | __hgt2_mask(__habs2(y), __float2half2_rn(448.f));
  };
  return make_uint2(widen(__byte_perm(bytes, 0, 0x1404)), widen(__byte_perm(bytes, 0, 0x3424)));
}

// Four bytes as fp16, exactly: int8, or e4m3.
template <bool kInt8>
__device__ __forceinline__ uint2 bytes_as_half(uint32_t bytes) {
  if constexpr (kInt8) {  // x + 128 in the mantissa of 1024, less 1152
    const uint32_t raised = bytes ^ 0x80808080;
    const auto lower = [](uint32_t x) {
      const __half2 y = __hadd2(*reinterpret_cast<const __half2*>(&x), __float2half2_rn(-1152.f));
      return *reinterpret_cast<const uint32_t*>(&y);
    };
    return make_uint2(lower(__byte_perm(raised, 0x64646464, 0x4140)), lower(__byte_perm(raised, 0x64646464, 0x4342)));
  } else {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    uint2 x;
    asm("{\n.reg .b16 lo, hi;\nmov.b32 {lo, hi}, %2;\n"
        "cvt.rn.f16x2.e4m3x2 %0, lo;\ncvt.rn.f16x2.e4m3x2 %1, hi;\n}\n"
        : "=r"(x.x), "=r"(x.y)
        : "r"(bytes));
    return x;
#else
    return e4m3_as_half_by_shifts(bytes);
#endif
  }
}

// Named barriers of a CTA; 0 is that of __syncthreads(). Of the first three a kernel uses one.
enum NamedBarrier : int {
  kPingpongBarrier = 1,  // + consumer warpgroup: whose products are next
  kGroupBarrier = 1,  // + consumer warpgroup: its warps meet
  kPairBarrier = 1,  // + pair of warps: they meet
  kExchangeBarrier = 3,  // + 0 to 3: exchange of dQ, halves of an output, weights of latents, draws
  kConverterBarrier = 15,  // the two warps that convert dQ meet
};

// `threads`: how many arrive or wait, a multiple of 32.
__device__ __forceinline__ void bar_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;\n" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void bar_arrive(int id, int threads) {
#if FLASH_EXT_DEBUG
  // compute-sanitizer's racecheck does not follow bar.arrive and reports what it orders as races.
  bar_sync(id, threads);
#else
  asm volatile("bar.arrive %0, %1;\n" ::"r"(id), "r"(threads) : "memory");
#endif
}

// Adds two neighbouring floats; one 8-byte transaction where the vector form exists (sm_90 and newer).
__device__ __forceinline__ void red_add_f32x2(float* address, float x, float y) {
#if __CUDA_ARCH__ >= 900
  asm volatile("red.global.add.v2.f32 [%0], {%1, %2};\n" ::"l"(address), "f"(x), "f"(y) : "memory");
#else
  asm volatile("red.global.add.f32 [%0], %1;\n" ::"l"(address), "f"(x) : "memory");
  asm volatile("red.global.add.f32 [%0], %1;\n" ::"l"(address + 1), "f"(y) : "memory");
#endif
}

// Later reads of the thread, and of those that it then meets at a barrier, see what came before the value was written.
__device__ __forceinline__ uint32_t load_acquire(const uint32_t* address) {
  uint32_t x;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];\n" : "=r"(x) : "l"(address) : "memory");
  return x;
}

// Programmatic dependent launch: lets the next kernel of the stream begin where it is launched so, and waits until the
// kernel before is over and what it wrote is visible. Machine code older than sm_90 has neither, and launch_at() begins
// no kernel early that has such code.
__device__ __forceinline__ void allow_next_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;\n" ::: "memory");
#endif
}
__device__ __forceinline__ void wait_for_kernel_before() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;\n" ::: "memory");
#endif
}

}  // namespace flash_ext::ptx
