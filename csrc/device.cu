// What the launchers need to know about a GPU, read once per device (the caller caches the answer), and about a stream.
#include <cuda_runtime.h>

#include "paths.h"
#include "stream.h"

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

bool is_capturing(void* stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  // The default stream, which no graph can capture, may not even be asked while another stream is captured.
  if (cudaStreamIsCapturing(static_cast<cudaStream_t>(stream), &status) != cudaSuccess) {
    cudaGetLastError();
    return false;
  }
  return status != cudaStreamCaptureStatusNone;
}

}  // namespace flash_ext
