// What the launchers of the ladder share. They return null, or why nothing was launched, in words.
#pragma once

#include <cuda_runtime.h>

#define LADDER_API extern "C" __attribute__((visibility("default")))

namespace flash_ext::ladder {

template <typename... Parameters, typename... Arguments>
const char* launch(void (*kernel)(Parameters...), unsigned grid, int threads, int smem, void* stream,
                   const Arguments&... arguments) {
  cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, smem);
  if (error == cudaSuccess) {
    kernel<<<grid, threads, smem, static_cast<cudaStream_t>(stream)>>>(arguments...);
    error = cudaGetLastError();
  }
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

}  // namespace flash_ext::ladder
