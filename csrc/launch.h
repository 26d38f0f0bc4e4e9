// One helper owns the shared-memory attribute, the launch and the error text. Included by .cu files only.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "common/debug_delay.cuh"
#include "dtype.cuh"
#include "plan.h"

namespace flash_ext {

// Errors of the device after which no call of this process reaches it any more.
inline bool loses_context(cudaError_t err) {
  switch (err) {
    case cudaErrorIllegalAddress:
    case cudaErrorLaunchTimeout:
    case cudaErrorAssert:
    case cudaErrorHardwareStackError:
    case cudaErrorIllegalInstruction:
    case cudaErrorMisalignedAddress:
    case cudaErrorInvalidAddressSpace:
    case cudaErrorInvalidPc:
    case cudaErrorLaunchFailure:
    case cudaErrorECCUncorrectable: return true;
    default: return false;
  }
}

inline std::string cuda_error_text(cudaError_t err, const char* what) {
  const std::string text = std::string(what) + ": " + cudaGetErrorName(err) + ": " + cudaGetErrorString(err);
  if (!loses_context(err)) return text;
  return text + "; an earlier kernel failed and the CUDA context is lost: only a new process can use the GPU again";
}

// A function of the running driver, or null: there is no link to libcuda.
template <typename Function>
Function driver_function(const char* name) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result;
  const cudaError_t status = cudaGetDriverEntryPointByVersion(name, &found, 12000, cudaEnableDefault, &result);
  if (status != cudaSuccess) cudaGetLastError();
  return status == cudaSuccess && result == cudaDriverEntryPointSuccess ? reinterpret_cast<Function>(found) : nullptr;
}

// Raises a kernel's limit of shared memory on the current device, once for each thread and size.
inline cudaError_t allow_shared_memory(const void* kernel, int bytes) {
  struct Allowed {
    const void* kernel;
    int device, bytes;
  };
  thread_local std::vector<Allowed> known;
  int device = 0;
  if (const cudaError_t err = cudaGetDevice(&device); err != cudaSuccess) return err;
  const auto is_this = [&](const Allowed& a) { return a.kernel == kernel && a.device == device && a.bytes == bytes; };
  if (std::any_of(known.begin(), known.end(), is_this)) return cudaSuccess;
  const cudaError_t err = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (err == cudaSuccess) known.push_back({kernel, device, bytes});
  return err;
}

// When a kernel begins (CUDA C++ programming guide, programmatic dependent launch).
enum class Start {
  kInStreamOrder,  // when the kernel before it in the stream is over
  // When all CTAs of that one have called ptx::allow_next_kernel() or ended; ptx::wait_for_kernel_before()
  kProgrammatic,
  // waits for the rest. In turn where the machine code has no such wait
};

// Whether a kernel's machine code, on the current device, was made for sm_90 or newer: older code, and what a driver
// makes of older PTX on a newer device, has no instructions for programmatic dependent launches.
inline bool can_wait_itself(const void* kernel) {
  struct Known {
    const void* kernel;
    int device;
    bool can;
  };
  thread_local std::vector<Known> known;
  int device = 0;
  cudaFuncAttributes attributes{};
  if (cudaGetDevice(&device) == cudaSuccess) {
    for (const Known& k : known) {
      if (k.kernel == kernel && k.device == device) return k.can;
    }
    if (cudaFuncGetAttributes(&attributes, kernel) == cudaSuccess) {
      known.push_back({kernel, device, attributes.ptxVersion >= 90});
      return known.back().can;
    }
  }
  cudaGetLastError();
  return false;
}

template <typename... Params>
bool can_wait_itself(void (*kernel)(Params...)) {
  return can_wait_itself(reinterpret_cast<const void*>(kernel));
}

// Launches a one-dimensional grid. Returns an empty string, or the error with the kernel's name.
template <typename... Params, typename... Args>
std::string launch_at(Start start, const char* name, void (*kernel)(Params...), int64_t grid, int threads,
                      int smem_bytes, void* stream, const Args&... args) {
  if (grid <= 0) return {};
  if (grid > INT32_MAX) return std::string(name) + ": the problem needs more than 2^31 - 1 thread blocks";
  // The default limit of 48 KB counts the few hundred bytes of static shared memory too.
  if (smem_bytes > 40 * 1024) {
    const cudaError_t err = allow_shared_memory(reinterpret_cast<const void*>(kernel), smem_bytes);
    if (err != cudaSuccess) {
      cudaGetLastError();
      return cuda_error_text(err, name);
    }
  }
  if (const cudaError_t err = set_debug_delays(stream); err != cudaSuccess) return cuda_error_text(err, name);
  cudaLaunchAttribute pdl{};
  pdl.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  pdl.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(grid));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = static_cast<size_t>(smem_bytes);
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = &pdl;
  config.numAttrs = start == Start::kProgrammatic && can_wait_itself(kernel) ? 1 : 0;
  note_launch({name, grid, threads, smem_bytes, start == Start::kProgrammatic});
  const cudaError_t err = cudaLaunchKernelEx(&config, kernel, static_cast<Params>(args)...);
  if (err == cudaSuccess) return {};
  cudaGetLastError();
  return cuda_error_text(err, name);
}

// A launch of a plan by a kernel that was compiled for so many threads and so much shared memory.
template <typename... Params, typename... Args>
std::string launch_planned(const Launch& l, void (*kernel)(Params...), int threads, int smem_bytes, void* stream,
                           const Args&... args) {
  if (l.tiles > INT32_MAX) return name_of(l) + ": the problem needs more than 2^31 - 1 tiles";
  if (l.threads != threads || l.smem_bytes != smem_bytes) {
    return name_of(l) + ": planned with " + std::to_string(l.threads) + " threads and " + std::to_string(l.smem_bytes) +
           " bytes of shared memory, compiled for " + std::to_string(threads) + " and " + std::to_string(smem_bytes);
  }
  return launch_at(l.pdl ? Start::kProgrammatic : Start::kInStreamOrder, stem_of(l.kernel), kernel, l.ctas, threads,
                   smem_bytes, stream, args...);
}

// Of an instance that has no such kernel.
inline std::string not_compiled(const Launch& l) { return name_of(l) + " is not compiled"; }

template <typename... Params, typename... Args>
std::string launch(const char* name, void (*kernel)(Params...), int64_t grid, int threads, int smem_bytes, void* stream,
                   const Args&... args) {
  return launch_at(Start::kInStreamOrder, name, kernel, grid, threads, smem_bytes, stream, args...);
}

}  // namespace flash_ext
