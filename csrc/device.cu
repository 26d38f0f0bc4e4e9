// What the launchers need to know about a GPU, read once per device (the caller caches the answer), and about a stream;
// and how a thread comes to the device's context.
#include <cuda.h>
#include <cuda_runtime.h>

#include "launch.h"
#include "paths.h"
#include "stream.h"

namespace flash_ext {
namespace {

struct Contexts {
  template <typename... Args>
  using Call = CUresult(CUDAAPI*)(Args...);
  Call<CUcontext*> current = driver_function<Call<CUcontext*>>("cuCtxGetCurrent");
  Call<CUdevice*> device_of_current = driver_function<Call<CUdevice*>>("cuCtxGetDevice");
  Call<CUcontext> set_current = driver_function<Call<CUcontext>>("cuCtxSetCurrent");
  Call<CUcontext*, CUdevice> retain = driver_function<Call<CUcontext*, CUdevice>>("cuDevicePrimaryCtxRetain");
  Call<CUdevice> release = driver_function<Call<CUdevice>>("cuDevicePrimaryCtxRelease");

  bool are_there() const {
    return current != nullptr && device_of_current != nullptr && set_current != nullptr && retain != nullptr &&
           release != nullptr;
  }
};

}  // namespace

std::string bind_context(int device_index) {
  static const Contexts contexts;
  if (!contexts.are_there()) return "the driver has no functions for contexts";
  // The driver is asked each time: others may have changed it since the last call of this thread.
  // Where there is none the second question would be an error, which memcheck reports.
  CUcontext now = nullptr, primary = nullptr;
  CUdevice device = -1;
  const bool is_bound = contexts.current(&now) == CUDA_SUCCESS && now != nullptr &&
                        contexts.device_of_current(&device) == CUDA_SUCCESS && device == device_index;
  if (is_bound) return {};
  CUresult status = contexts.retain(&primary, device_index);
  if (status == CUDA_SUCCESS) {
    status = contexts.set_current(primary);
    contexts.release(device_index);  // whoever made the tensors holds it as well
  }
  // The driver's codes are those of the runtime.
  return status == CUDA_SUCCESS ? std::string() : cuda_error_text(static_cast<cudaError_t>(status), "primary context");
}

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
      info.error = "CUDA device " + std::to_string(device_index) + " could not be read: " + cudaGetErrorString(status);
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
