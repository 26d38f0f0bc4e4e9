// One function per PTX instruction of Hopper (sm_90a), named after it.
// Reference: PTX ISA (mbarrier, cp.async.bulk.tensor, wgmma, setmaxnreg).
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace flash_ext::ptx {

// ---- mbarrier -----------------------------------------------------------------------------------

// Racecheck of compute-sanitizer does not follow a lane that arrives for its warp. In debug builds every lane arrives
// for itself, and whoever arrives alone counts as many.
#if FLASH_EXT_DEBUG
inline constexpr uint32_t kArrivalsOfOne = 32;
#else
inline constexpr uint32_t kArrivalsOfOne = 1;
#endif

__device__ __forceinline__ void mbarrier_init(uint32_t bar, uint32_t count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;\n" ::"r"(bar), "r"(count * kArrivalsOfOne) : "memory");
}

// Makes initialised barriers visible to the asynchronous proxy; a barrier of the CTA must follow.
__device__ __forceinline__ void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;\n" ::: "memory");
}

__device__ __forceinline__ void mbarrier_arrive(uint32_t bar) {
  if constexpr (kArrivalsOfOne == 1) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];\n" ::"r"(bar) : "memory");
  } else {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;\n" ::"r"(bar), "n"(kArrivalsOfOne) : "memory");
  }
}

// Once for a warp all of whose lanes come here, after __syncwarp().
__device__ __forceinline__ void mbarrier_arrive_for_warp(uint32_t bar, bool is_first) {
  if constexpr (kArrivalsOfOne == 1) {
    if (is_first) mbarrier_arrive(bar);
  } else {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];\n" ::"r"(bar) : "memory");
  }
}
// The same without a branch: behind one that lanes take apart ptxas no longer sees what all of them have in common, and
// keeps stages and descriptors in registers of each.
__device__ __forceinline__ void mbarrier_arrive_for_warp_flat(uint32_t bar, bool is_first) {
  asm volatile("{\n.reg .pred p;\n"
               "setp.ne.b32 p, %1, 0;\n"
               "@p mbarrier.arrive.shared::cta.b64 _, [%0];\n}\n" ::"r"(bar),
               "r"(static_cast<uint32_t>(is_first || kArrivalsOfOne > 1))
               : "memory");
}

__device__ __forceinline__ void mbarrier_expect_tx(uint32_t bar, uint32_t bytes) {
  asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;\n" ::"r"(bar), "r"(bytes) : "memory");
}

__device__ __forceinline__ void mbarrier_arrive_expect_tx(uint32_t bar, uint32_t bytes) {
  if constexpr (kArrivalsOfOne == 1) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;\n" ::"r"(bar), "r"(bytes) : "memory");
  } else {
    mbarrier_expect_tx(bar, bytes);
    mbarrier_arrive(bar);
  }
}

__device__ __forceinline__ bool mbarrier_try_wait(uint32_t bar, uint32_t parity) {
  uint32_t done;
  asm volatile("{\n.reg .pred p;\n"
               "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
               "selp.u32 %0, 1, 0, p;\n}\n"
               : "=r"(done)
               : "r"(bar), "r"(parity)
               : "memory");
  return done != 0;
}

// Without waiting.
__device__ __forceinline__ bool mbarrier_test_wait(uint32_t bar, uint32_t parity) {
  uint32_t done;
  asm volatile("{\n.reg .pred p;\n"
               "mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\n"
               "selp.u32 %0, 1, 0, p;\n}\n"
               : "=r"(done)
               : "r"(bar), "r"(parity)
               : "memory");
  return done != 0;
}

// ---- TMA ----------------------------------------------------------------------------------------

// Box at (c0 .. c4), innermost first, to shared memory; completes `bar` by the bytes of the whole box.
__device__ __forceinline__ void tma_load_5d(uint32_t dst, const CUtensorMap* map, uint32_t bar, int c0, int c1, int c2,
                                            int c3, int c4) {
  asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
               " [%0], [%1, {%3, %4, %5, %6, %7}], [%2];\n" ::"r"(dst),
               "l"(map), "r"(bar), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
               : "memory");
}

// Box at (c0 .. c4) from shared memory to global memory; rows and columns outside the tensor are dropped.
__device__ __forceinline__ void tma_store_5d(const CUtensorMap* map, uint32_t src, int c0, int c1, int c2, int c3,
                                             int c4) {
  asm volatile(
      "cp.async.bulk.tensor.5d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5, %6}], [%1];\n" ::"l"(map),
      "r"(src), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
      : "memory");
}

// Neighbouring bytes, a multiple of 16 and aligned to that.
__device__ __forceinline__ void bulk_load(uint32_t dst, const void* src, int bytes, uint32_t bar) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];\n" ::"r"(dst),
               "l"(src), "r"(bytes), "r"(bar)
               : "memory");
}

// Adds neighbouring floats in shared memory to global memory, 16-byte aligned.
__device__ __forceinline__ void bulk_add_f32(float* dst, uint32_t src, int bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;\n" ::"l"(dst), "r"(src),
               "r"(bytes)
               : "memory");
}

// Copies neighbouring bytes from shared memory to global memory, 16-byte aligned.
__device__ __forceinline__ void bulk_store(float* dst, uint32_t src, int bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;\n" ::"l"(dst), "r"(src), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void bulk_commit() { asm volatile("cp.async.bulk.commit_group;\n" ::: "memory"); }

// Until shared memory of all bulk stores of this thread has been read.
__device__ __forceinline__ void bulk_wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;\n" ::: "memory"); }

// The same for all but the group committed last.
__device__ __forceinline__ void bulk_wait_read_all_but_one() {
  asm volatile("cp.async.bulk.wait_group.read 1;\n" ::: "memory");
}

// Until all bulk stores of this thread have been done, for whoever learns of it.
__device__ __forceinline__ void bulk_wait() { asm volatile("cp.async.bulk.wait_group 0;\n" ::: "memory"); }

// Orders ordinary accesses to shared memory before those of TMA and wgmma.
__device__ __forceinline__ void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory"); }

// The same for global memory. Without a state space it would be a fence of the device as well, 700 clocks.
__device__ __forceinline__ void fence_proxy_async_global() { asm volatile("fence.proxy.async.global;\n" ::: "memory"); }

// Four 8x8 matrices of 16-bit elements; lane l gives the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void stmatrix(uint32_t address, const uint32_t (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};\n" ::"r"(address), "r"(r[0]), "r"(r[1]),
               "r"(r[2]), "r"(r[3])
               : "memory");
}

// The same, each matrix transposed on its way.
__device__ __forceinline__ void stmatrix_trans(uint32_t address, uint32_t r0, uint32_t r1, uint32_t r2, uint32_t r3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};\n" ::"r"(address), "r"(r0), "r"(r1),
               "r"(r2), "r"(r3)
               : "memory");
}

// Adds four neighbouring floats, 16-byte aligned, in one transaction.
__device__ __forceinline__ void red_add_f32x4(float* address, float x, float y, float z, float w) {
  asm volatile("red.global.add.v4.f32 [%0], {%1,%2,%3,%4};\n" ::"l"(address), "f"(x), "f"(y), "f"(z), "f"(w)
               : "memory");
}

// x = what lies where writes of the device meet, not in L1, if `condition`; without a branch, and nobody waits for it
// before x is used.
__device__ __forceinline__ void load_relaxed_if(float& x, const float* address, bool condition) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, %2, 0;\n@p ld.relaxed.gpu.global.f32 %0, [%1];\n}\n"
               : "+f"(x)
               : "l"(address), "r"(static_cast<uint32_t>(condition))
               : "memory");
}

// Of words by which CTAs tell each other how far they are; load_acquire() reads them.
__device__ __forceinline__ void store_relaxed(uint32_t* address, uint32_t x) {
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;\n" ::"l"(address), "r"(x) : "memory");
}

__device__ __forceinline__ void fence_gpu() { asm volatile("fence.acq_rel.gpu;\n" ::: "memory"); }

// ---- warps and registers ------------------------------------------------------------------------

// bar.arrive in every build, for barriers at which the arriving side must not wait.
__device__ __forceinline__ void bar_arrive_only(int id, int threads) {
  asm volatile("bar.arrive %0, %1;\n" ::"r"(id), "r"(threads) : "memory");
}

// Registers a thread of each warpgroup, all together, that a launch of so many warpgroups gets and setmaxnreg shares
// out, with so many CTAs a multiprocessor.
template <int kWarpgroups, int kCtas = 1>
inline constexpr int kRegisterBudget = kWarpgroups * (512 / (kWarpgroups * kCtas) / 8 * 8);

template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;\n" ::"n"(kRegisters));
}

template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;\n" ::"n"(kRegisters));
}

// ---- wgmma --------------------------------------------------------------------------------------

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;\n" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;\n" ::: "memory"); }

template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;\n" ::"n"(kPending) : "memory");
}

// Keeps the compiler from moving uses of registers that an asynchronous product reads or writes across this point.
template <int kCount>
__device__ __forceinline__ void warpgroup_fence_operand(float (&x)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(x[i])::"memory");
}
template <int kCount>
__device__ __forceinline__ void warpgroup_fence_operand(uint32_t (&x)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+r"(x[i])::"memory");
}

// Upper word of a matrix descriptor: 128-byte swizzle, 1024 bytes between groups of 8 rows.
inline constexpr uint32_t kDescriptorHigh = (1u << 30) | (1024 / 16);

// Descriptors come as their lower words: the upper one is the same for all (kDescriptorHigh), and 32-bit sums of an
// address are cheap. A and B from shared memory, both K-major; p decides between D = A B and D += A B.
#include "operand_lists.cuh"
#define FX_WGMMA_SS(N, COUNT, A, B, H, P, TYPE, TB) \
  asm volatile("{\n.reg .pred p;\n.reg .b64 a, b;\nmov.b64 a, {%" #A ", %" #H "};\nmov.b64 b, {%" #B ", %" #H \
               "};\nsetp.ne.b32 p, %" #P ", 0;\n" \
               "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" FX_NAMES_##COUNT \
               "}, a, b, p, 1, 1, 0, " #TB ";\n}\n" \
               : FX_REGS_##COUNT \
               : "r"(low_a), "r"(low_b), "n"(kDescriptorHigh), "n"(kAccumulate ? 1 : 0))
// A from registers, B from shared memory with keys as rows (MN-major).
#define FX_WGMMA_RS(N, COUNT, A0, A1, A2, A3, B, H, TYPE) \
  asm volatile("{\n.reg .b64 b;\nmov.b64 b, {%" #B ", %" #H "};\n" \
               "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" FX_NAMES_##COUNT \
               "}, {%" #A0 ", %" #A1 ", %" #A2 ", %" #A3 "}, b, 1, 1, 1, 1;\n}\n" \
               : FX_REGS_##COUNT \
               : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(low_b), "n"(kDescriptorHigh))

// A from registers, B K-major.
#define FX_WGMMA_RS_K(N, COUNT, A0, A1, A2, A3, B, H, P, TYPE) \
  asm volatile("{\n.reg .pred p;\n.reg .b64 b;\nmov.b64 b, {%" #B ", %" #H "};\nsetp.ne.b32 p, %" #P ", 0;\n" \
               "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" FX_NAMES_##COUNT \
               "}, {%" #A0 ", %" #A1 ", %" #A2 ", %" #A3 "}, b, p, 1, 1, 0;\n}\n" \
               : FX_REGS_##COUNT \
               : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(low_b), "n"(kDescriptorHigh), "n"(kAccumulate ? 1 : 0))

#define FX_WGMMA_SS_TYPED(N, COUNT, A, B, H, P) \
  if constexpr (std::is_same_v<E, __half>) { \
    FX_WGMMA_SS(N, COUNT, A, B, H, P, "f16", 0); \
  } else { \
    static_assert(std::is_same_v<E, __nv_bfloat16>, "another element type"); \
    FX_WGMMA_SS(N, COUNT, A, B, H, P, "bf16", 0); \
  }
#define FX_WGMMA_RS_TYPED(N, COUNT, A0, A1, A2, A3, B, H) \
  if constexpr (std::is_same_v<E, __half>) { \
    FX_WGMMA_RS(N, COUNT, A0, A1, A2, A3, B, H, "f16"); \
  } else { \
    static_assert(std::is_same_v<E, __nv_bfloat16>, "another element type"); \
    FX_WGMMA_RS(N, COUNT, A0, A1, A2, A3, B, H, "bf16"); \
  }

#define FX_WGMMA_RS_K_TYPED(N, COUNT, A0, A1, A2, A3, B, H, P) \
  if constexpr (std::is_same_v<E, __half>) { \
    FX_WGMMA_RS_K(N, COUNT, A0, A1, A2, A3, B, H, P, "f16"); \
  } else { \
    static_assert(std::is_same_v<E, __nv_bfloat16>, "another element type"); \
    FX_WGMMA_RS_K(N, COUNT, A0, A1, A2, A3, B, H, P, "bf16"); \
  }

// d (64 x 2 kCount, fp32) = or += A (64 x 16) B (16 x 2 kCount).
template <typename E, bool kAccumulate, int kCount>
__device__ __forceinline__ void wgmma_ss(float (&d)[kCount], uint32_t low_a, uint32_t low_b) {
  if constexpr (kCount == 24) {
    FX_WGMMA_SS_TYPED(48, 24, 24, 25, 26, 27)
  } else if constexpr (kCount == 32) {
    FX_WGMMA_SS_TYPED(64, 32, 32, 33, 34, 35)
  } else if constexpr (kCount == 40) {
    FX_WGMMA_SS_TYPED(80, 40, 40, 41, 42, 43)
  } else if constexpr (kCount == 48) {
    FX_WGMMA_SS_TYPED(96, 48, 48, 49, 50, 51)
  } else if constexpr (kCount == 56) {
    FX_WGMMA_SS_TYPED(112, 56, 56, 57, 58, 59)
  } else if constexpr (kCount == 64) {
    FX_WGMMA_SS_TYPED(128, 64, 64, 65, 66, 67)
  } else if constexpr (kCount == 72) {
    FX_WGMMA_SS_TYPED(144, 72, 72, 73, 74, 75)
  } else if constexpr (kCount == 80) {
    FX_WGMMA_SS_TYPED(160, 80, 80, 81, 82, 83)
  } else if constexpr (kCount == 88) {
    FX_WGMMA_SS_TYPED(176, 88, 88, 89, 90, 91)
  } else {
    static_assert(kCount == 96);
    FX_WGMMA_SS_TYPED(192, 96, 96, 97, 98, 99)
  }
}

// If bits are set: x = 0, y = other. The compiler in front of ptxas would shift each bit to the lowest place, three
// instructions a score; ptxas makes predicates of seven bits at once (R2P).
__device__ __forceinline__ void clear_and_replace_if(uint32_t bits, float& x, float& y, float other) {
  asm("{\n.reg .pred p;\nsetp.ne.u32 p, %2, 0;\nselp.f32 %0, 0f00000000, %0, p;\nselp.f32 %1, %3, %1, p;\n}\n"
      : "+f"(x), "+f"(y)
      : "r"(bits), "f"(other));
}

// d (64 x 2 kCount, fp32) += A (64 x 16, registers) B (16 x 2 kCount).
template <typename E, int kCount>
__device__ __forceinline__ void wgmma_rs(float (&d)[kCount], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                                         uint32_t low_b) {
  if constexpr (kCount == 32) {
    FX_WGMMA_RS_TYPED(64, 32, 32, 33, 34, 35, 36, 37)
  } else if constexpr (kCount == 48) {
    FX_WGMMA_RS_TYPED(96, 48, 48, 49, 50, 51, 52, 53)
  } else if constexpr (kCount == 64) {
    FX_WGMMA_RS_TYPED(128, 64, 64, 65, 66, 67, 68, 69)
  } else if constexpr (kCount == 96) {
    FX_WGMMA_RS_TYPED(192, 96, 96, 97, 98, 99, 100, 101)
  } else {
    static_assert(kCount == 128);
    FX_WGMMA_RS_TYPED(256, 128, 128, 129, 130, 131, 132, 133)
  }
}

// d (64 x 2 kCount, fp32) += A (64 x 16, bf16) B (16 x 2 kCount). A: rows that are the same, of which a thread has `a`
// of the first 8 columns, 0 behind. B, with its columns side by side: 8 rows, which serve twice.
inline constexpr uint32_t kDescriptorHighOneGroup = 1u << 30;  // 0 bytes between groups of 8 rows
#define FX_WGMMA_RS_ONE_GROUP(N, COUNT, A, ZERO, B, H) \
  asm volatile("{\n.reg .b64 b;\nmov.b64 b, {%" #B ", %" #H "};\n" \
               "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" FX_NAMES_##COUNT \
               "}, {%" #A ", %" #A ", %" #ZERO ", %" #ZERO "}, b, 1, 1, 1, 1;\n}\n" \
               : FX_REGS_##COUNT \
               : "r"(a), "r"(0), "r"(low_b), "n"(kDescriptorHighOneGroup))
template <int kCount>
__device__ __forceinline__ void wgmma_rs_one_group(float (&d)[kCount], uint32_t a, uint32_t low_b) {
  if constexpr (kCount == 32) {
    FX_WGMMA_RS_ONE_GROUP(64, 32, 32, 33, 34, 35);
  } else {
    static_assert(kCount == 64);
    FX_WGMMA_RS_ONE_GROUP(128, 64, 64, 65, 66, 67);
  }
}

// d (64 x 2 kCount, fp32) = or += A (64 x 16, registers) B (16 x 2 kCount), B K-major.
template <typename E, bool kAccumulate, int kCount>
__device__ __forceinline__ void wgmma_rs_k(float (&d)[kCount], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                                           uint32_t low_b) {
  if constexpr (kCount == 24) {
    FX_WGMMA_RS_K_TYPED(48, 24, 24, 25, 26, 27, 28, 29, 30)
  } else {
    static_assert(kCount == 32);
    FX_WGMMA_RS_K_TYPED(64, 32, 32, 33, 34, 35, 36, 37, 38)
  }
}

// d (64 x 2 kCount, fp32) = or += A (64 x 16) B (16 x 2 kCount), B with its columns side by side (MN-major).
template <typename E, bool kAccumulate, int kCount>
__device__ __forceinline__ void wgmma_ss_rows(float (&d)[kCount], uint32_t low_a, uint32_t low_b) {
  if constexpr (kCount == 16) {
    if constexpr (std::is_same_v<E, __half>) {
      FX_WGMMA_SS(32, 16, 16, 17, 18, 19, "f16", 1);
    } else {
      static_assert(std::is_same_v<E, __nv_bfloat16>, "another element type");
      FX_WGMMA_SS(32, 16, 16, 17, 18, 19, "bf16", 1);
    }
  } else {
    static_assert(kCount == 32);
    if constexpr (std::is_same_v<E, __half>) {
      FX_WGMMA_SS(64, 32, 32, 33, 34, 35, "f16", 1);
    } else {
      static_assert(std::is_same_v<E, __nv_bfloat16>, "another element type");
      FX_WGMMA_SS(64, 32, 32, 33, 34, 35, "bf16", 1);
    }
  }
}

#undef FX_WGMMA_SS
#undef FX_WGMMA_RS
#undef FX_WGMMA_RS_K
#undef FX_WGMMA_RS_ONE_GROUP
#undef FX_WGMMA_SS_TYPED
#undef FX_WGMMA_RS_TYPED
#undef FX_WGMMA_RS_K_TYPED
#include "operand_lists_end.cuh"

// Asks for the line at an address, for the L1 cache.
__device__ __forceinline__ void prefetch(const void* address) {
  asm volatile("prefetch.global.L1 [%0];" ::"l"(address));
}

}  // namespace flash_ext::ptx
