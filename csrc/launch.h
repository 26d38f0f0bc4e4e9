// One helper owns the shared-memory attribute, the launch and the error text. Included by .cu files only.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <string>

namespace flash_ext {

inline std::string cuda_error_text(cudaError_t err, const char* what) {
  return std::string(what) + ": " + cudaGetErrorName(err) + ": " + cudaGetErrorString(err);
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
  kernel<<<dim3(static_cast<unsigned>(grid)), dim3(threads), smem_bytes, static_cast<cudaStream_t>(stream)>>>(args...);
  const cudaError_t err = cudaGetLastError();
  return err == cudaSuccess ? std::string() : cuda_error_text(err, name);
}

}  // namespace flash_ext
