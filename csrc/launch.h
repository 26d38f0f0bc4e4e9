// One helper owns the shared-memory attribute, the launch and the error text. Included by .cu files only.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <string>

#include "common/debug_delay.cuh"

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
    case cudaErrorECCUncorrectable:
      return true;
    default:
      return false;
  }
}

inline std::string cuda_error_text(cudaError_t err, const char* what) {
  const std::string text = std::string(what) + ": " + cudaGetErrorName(err) + ": " + cudaGetErrorString(err);
  if (!loses_context(err)) return text;
  return text + "; an earlier kernel failed and the CUDA context is lost: only a new process can use the GPU again";
}

// Launches a one-dimensional grid. Returns an empty string, or the error with the kernel's name.
template <typename Kernel, typename... Args>
std::string launch(const char* name, Kernel kernel, int64_t grid, int threads, int smem_bytes, void* stream,
                   const Args&... args) {
  if (grid <= 0) return {};
  if (grid > INT32_MAX) return std::string(name) + ": the problem needs more than 2^31 - 1 thread blocks";
  // The default limit of 48 KB counts the few hundred bytes of static shared memory too.
  if (smem_bytes > 40 * 1024) {
    const cudaError_t err =
        cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize, smem_bytes);
    if (err != cudaSuccess) {
      cudaGetLastError();
      return cuda_error_text(err, name);
    }
  }
  if (const cudaError_t err = set_debug_delays(stream); err != cudaSuccess) return cuda_error_text(err, name);
  kernel<<<dim3(static_cast<unsigned>(grid)), dim3(threads), smem_bytes, static_cast<cudaStream_t>(stream)>>>(args...);
  const cudaError_t err = cudaGetLastError();
  return err == cudaSuccess ? std::string() : cuda_error_text(err, name);
}

}  // namespace flash_ext
