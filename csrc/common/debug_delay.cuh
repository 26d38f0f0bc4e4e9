// Random pauses of warps around barriers, in debug builds: what is right only by luck of timing then goes wrong.
//
// The environment variable FLASH_EXT_DEBUG_DELAY_SEED, read at every launch, chooses the pauses; without it, or with
// 0, there are none. tests/tools/race_delays.py compares 200 seeds with that. No time-outs go with it: the sm80 kernels
// wait in hardware barriers and for cp.async groups, never in a loop of their own; the pass that does has one itself.
#pragma once

#include <cuda_runtime.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <cstdlib>

#include "../ptx/sm80.cuh"

namespace flash_ext {

#if FLASH_EXT_DEBUG

// One per translation unit, like the kernels that read it.
static __device__ uint32_t debug_delay_seed;

// Copied when it has changed only, and waited for: a copy between two kernels would keep the second from beginning
// early.
inline cudaError_t set_debug_delays(void* stream) {
  static std::array<std::atomic<uint32_t>, 64> known{};  // of each device, 0 as there
  const char* text = std::getenv("FLASH_EXT_DEBUG_DELAY_SEED");
  const uint32_t seed = text == nullptr ? 0 : static_cast<uint32_t>(std::strtoul(text, nullptr, 10));
  int device = 0;
  cudaError_t err = cudaGetDevice(&device);
  if (err != cudaSuccess || known[device % 64] == seed) return err;
  err = cudaMemcpyToSymbolAsync(debug_delay_seed, &seed, sizeof(seed), 0, cudaMemcpyHostToDevice,
                                static_cast<cudaStream_t>(stream));
  if (err == cudaSuccess) err = cudaStreamSynchronize(static_cast<cudaStream_t>(stream));
  if (err == cudaSuccess) known[device % 64] = seed;
  return err;
}

// All lanes of a warp together. One warp in four pauses, for up to 4 microseconds: longer than any tile takes, so that
// a warp may fall a whole iteration behind.
__device__ __forceinline__ void debug_delay() {
  const uint32_t seed = debug_delay_seed;
  if (seed == 0) return;
  const uint32_t now = __shfl_sync(ptx::kFullWarp, static_cast<uint32_t>(clock64()), 0);
  uint32_t x = seed * 0x9e3779b9u ^ blockIdx.x * 0x85ebca6bu ^ threadIdx.x / 32 * 0xc2b2ae35u ^ now;
  x = (x ^ x >> 15) * 0x2c1b3c6du;
  x = (x ^ x >> 12) * 0x297a2d39u;
  x ^= x >> 15;
  if (x % 4 == 0) __nanosleep(x >> 8 & 4095);
  __syncwarp();
}

#else

inline cudaError_t set_debug_delays(void*) { return cudaSuccess; }
__device__ __forceinline__ void debug_delay() {}

#endif

}  // namespace flash_ext
