// What the launchers need to know about a GPU, read once per device (the caller caches the answer).
#include <cuda_runtime.h>

#include "paths.h"

namespace flash_ext {

DeviceInfo query_device(int device_index) {
  DeviceInfo info;
  const struct {
    cudaDeviceAttr attribute;
    int* value;
  } wanted[] = {
      {cudaDevAttrComputeCapabilityMajor, &info.cc_major},
      {cudaDevAttrComputeCapabilityMinor, &info.cc_minor},
      {cudaDevAttrMultiProcessorCount, &info.num_sms},
      {cudaDevAttrMaxSharedMemoryPerBlockOptin, &info.smem_per_block},
      {cudaDevAttrL2CacheSize, &info.l2_bytes},
  };
  for (const auto& item : wanted) {
    const cudaError_t status = cudaDeviceGetAttribute(item.value, item.attribute, device_index);
    if (status != cudaSuccess) {
      info.error = "CUDA device " + std::to_string(device_index) + " could not be read: " +
                   cudaGetErrorString(status);
      cudaGetLastError();  // this runtime's error state must not leak into the next launch check
      break;
    }
  }
  return info;
}

}  // namespace flash_ext
