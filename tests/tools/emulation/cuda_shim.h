// CUDA without a GPU: what the kernels of csrc use of the language, for g++. A CTA is as many fibers on one CPU thread.
//
// A fiber runs until it waits: in __syncthreads, or in an operation of a whole warp. Warps take turns in random order,
// and some run far ahead of others, so that what is right only by luck of timing goes wrong. Copies of cp.async are
// done as early as allowed or, with emu::lazy, as late as allowed. Shared memory starts as NaN. What is wrong in itself
// (lanes in different operations, addresses out of range or not aligned, waits without end) ends the program.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <numeric>
#include <vector>

#define __device__
#define __host__
#define __global__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
#define __align__(n) alignas(n)

struct float2 {
  float x, y;
};
struct float4 {
  float x, y, z, w;
};
struct int2 {
  int x, y;
};
struct int4 {
  int x, y, z, w;
};
struct uint2 {
  uint32_t x, y;
};
struct uint4 {
  uint32_t x, y, z, w;
};
struct __half {
  uint16_t bits;
};
struct __nv_bfloat16 {
  uint16_t bits;
};
struct Dim {
  uint32_t x;
};

inline float __fmul_rn(float x, float y) { return x * y; }
inline float __fadd_rn(float x, float y) { return x + y; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline int2 make_int2(int x, int y) { return {x, y}; }
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
inline uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
inline uint32_t __float_as_uint(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  return bits;
}
inline float __uint_as_float(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof(x));
  return x;
}
using std::max;
using std::min;
using std::signbit;

inline Dim threadIdx, blockIdx, gridDim;

namespace emu {

inline constexpr int kSmemBytes = 232448;  // of a CTA on the largest GPU
inline constexpr int kStackBytes = 1 << 17;
inline constexpr int kSlotBytes = 64;  // what a lane gives to an operation of its warp

[[noreturn]] inline void fail(const char* what) {
  std::printf("FAIL: %s\n", what);
  std::fflush(stdout);
  std::_Exit(1);
}

struct Copy {
  uint32_t dst;
  const void* src;
  int size, bytes;  // written, and read; the rest is zeros
};

struct Fiber {
  ucontext_t context;  // to start it
  jmp_buf state;  // to go on: swapcontext asks the kernel for the signal mask, half of the time of a run
  std::vector<char> stack;
  bool started, done;
  std::vector<std::vector<Copy>> groups;  // committed, not waited for
  std::vector<Copy> open;  // not committed
};

struct Warp {
  int arrived, op;
  uint64_t generation;
  unsigned char slot[32][kSlotBytes];
};

alignas(1024) inline unsigned char smem[kSmemBytes];
inline bool lazy = false;  // copies land when they are waited for, not when they are issued
inline int fault = 0;  // which planted fault is active: see tests/kernels/test_emulation.py
inline std::vector<Fiber> fibers;
inline std::vector<Warp> warps;
inline int current;  // fiber that runs
inline jmp_buf scheduler;
inline std::function<void()> body;
inline uint64_t progress;  // waits that ended
inline int block_arrived;
inline uint64_t block_generation;

inline uint32_t random_state = 1;
inline uint32_t random_bits() {
  random_state ^= random_state << 13;
  random_state ^= random_state >> 17;
  return random_state ^= random_state << 5;
}

inline void yield() {
  if (_setjmp(fibers[current].state) == 0) _longjmp(scheduler, 1);
}

inline void warp_sync(int op) {
  Warp& warp = warps[current / 32];
  if (warp.arrived == 0) warp.op = op;
  if (warp.op != op) fail("lanes of a warp are in different operations");
  const uint64_t generation = warp.generation;
  if (++warp.arrived == 32) {
    warp.arrived = 0;
    ++warp.generation;
    ++progress;
    return;
  }
  while (warp.generation == generation) yield();
}

// An operation of a whole warp: f is given what every lane brought. `op` names it, and where it ends is -op.
template <typename In, typename F>
auto collective(int op, const In& in, const F& f) {
  static_assert(sizeof(In) <= kSlotBytes);
  Warp& warp = warps[current / 32];
  std::memcpy(warp.slot[current % 32], &in, sizeof(In));
  warp_sync(op);
  const auto result = f([&](int lane) {
    In x;
    std::memcpy(&x, warp.slot[lane], sizeof(In));
    return x;
  });
  warp_sync(-op);
  return result;
}

inline void block_sync() {
  const uint64_t generation = block_generation;
  if (++block_arrived == static_cast<int>(fibers.size())) {
    block_arrived = 0;
    ++block_generation;
    ++progress;
    return;
  }
  while (block_generation == generation) yield();
}

template <typename X>
X& shared_at(uint32_t address, uint32_t alignment = alignof(X)) {
  if (address % alignment != 0 || address + sizeof(X) > kSmemBytes) fail("bad address in shared memory");
  return *reinterpret_cast<X*>(smem + address);
}

inline void entry() {
  body();
  fibers[current].done = true;
  ++progress;
  _longjmp(scheduler, 1);
}

inline void start(Fiber& fiber) {
  fiber.stack.resize(kStackBytes);
  fiber.started = fiber.done = false;
  fiber.groups.clear();
  fiber.open.clear();
  getcontext(&fiber.context);
  fiber.context.uc_stack.ss_sp = fiber.stack.data();
  fiber.context.uc_stack.ss_size = fiber.stack.size();
  fiber.context.uc_link = nullptr;
  makecontext(&fiber.context, entry, 0);
}

inline void resume(int index) {
  current = index;
  threadIdx.x = index;
  Fiber& fiber = fibers[index];
  if (_setjmp(scheduler) != 0) return;
  if (fiber.started) _longjmp(fiber.state, 1);
  fiber.started = true;
  setcontext(&fiber.context);
}

// Runs a CTA of so many threads, blockIdx and gridDim being set.
inline void run_cta(int threads, std::function<void()> kernel) {
  body = std::move(kernel);
  fibers.resize(threads);
  warps.assign(threads / 32, Warp{});
  block_arrived = 0;
  std::memset(smem, 0xff, kSmemBytes);
  for (Fiber& fiber : fibers) start(fiber);
  std::vector<int> order(threads / 32);
  std::iota(order.begin(), order.end(), 0);
  uint64_t last = progress;
  for (int left = threads, idle = 0; left > 0;) {
    for (int i = threads / 32 - 1; i > 0; --i) std::swap(order[i], order[random_bits() % (i + 1)]);
    left = 0;
    for (const int warp : order) {
      const int turns = random_bits() % 4 == 0 ? 40 : 1;  // one warp in four runs ahead
      for (int turn = 0; turn < turns; ++turn) {
        for (int i = warp * 32; i < warp * 32 + 32; ++i) {
          if (!fibers[i].done) resume(i);
        }
      }
      for (int i = warp * 32; i < warp * 32 + 32; ++i) left += !fibers[i].done;
    }
    idle = progress == last ? idle + 1 : 0;
    last = progress;
    if (idle > 3) fail("threads wait for each other without end");
  }
}

}  // namespace emu

inline void __syncthreads() { emu::block_sync(); }
inline void __syncwarp() { emu::warp_sync(1); }
inline uint32_t __ballot_sync(uint32_t, bool x) {
  return emu::collective(2, x, [](const auto& of) {
    uint32_t bits = 0;
    for (int lane = 0; lane < 32; ++lane) bits |= uint32_t{of(lane)} << lane;
    return bits;
  });
}
inline bool __any_sync(uint32_t mask, bool x) { return __ballot_sync(mask, x) != 0; }
inline bool __all_sync(uint32_t mask, bool x) { return __ballot_sync(mask, x) == ~0u; }
template <typename X>
X __shfl_sync(uint32_t, X x, int lane) {
  return emu::collective(3, x, [&](const auto& of) { return of(lane & 31); });
}
template <typename X>
X __shfl_xor_sync(uint32_t, X x, int mask) {
  const int lane = emu::current % 32;
  return emu::collective(4, x, [&](const auto& of) { return of(lane ^ mask); });
}
inline uint32_t __reduce_max_sync(uint32_t, uint32_t x) {
  for (int mask = 16; mask > 0; mask /= 2) x = std::max(x, __shfl_xor_sync(0, x, mask));
  return x;
}
inline uint32_t __reduce_add_sync(uint32_t, uint32_t x) {
  for (int mask = 16; mask > 0; mask /= 2) x += __shfl_xor_sync(0, x, mask);
  return x;
}
inline uint32_t __byte_perm(uint32_t x, uint32_t y, uint32_t selector) {
  const uint64_t both = uint64_t{y} << 32 | x;
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i) result |= static_cast<uint32_t>(both >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
  return result;
}
inline int __popc(uint32_t x) { return __builtin_popcount(x); }
inline int __ffs(uint32_t x) { return __builtin_ffs(x); }
inline void __trap() { emu::fail("trap"); }
