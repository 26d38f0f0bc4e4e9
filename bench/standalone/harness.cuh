// What the standalone programs share: error checks, device memory, random data, a cold L2 and timing.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <type_traits>
#include <vector>

#include "paths.h"

namespace flash_ext {
inline void note_launch(const DoneLaunch&) {}  // nobody compares these with a plan
}  // namespace flash_ext

namespace standalone {

using flash_ext::DeviceInfo;
using flash_ext::DType;
using flash_ext::StridedView;

inline void check_cuda(cudaError_t status, const char* call, const char* file, int line) {
  if (status == cudaSuccess) return;
  std::printf("%s:%d: %s: %s\n", file, line, call, cudaGetErrorString(status));
  std::exit(1);
}
#define CHECK_CUDA(call) ::standalone::check_cuda((call), #call, __FILE__, __LINE__)

// Launchers return an empty string, or what went wrong.
inline void require(const std::string& error) {
  if (error.empty()) return;
  std::printf("%s\n", error.c_str());
  std::exit(1);
}

template <typename E>
inline constexpr DType kDTypeOf = std::is_same_v<E, __half> ? DType::kFloat16 : DType::kBFloat16;

// ---- memory ----

template <typename T>
T* device_alloc(size_t count) {
  void* found = nullptr;
  CHECK_CUDA(cudaMalloc(&found, count * sizeof(T)));
  return static_cast<T*>(found);
}

template <typename T>
void upload(T* to, const std::vector<T>& from) {
  CHECK_CUDA(cudaMemcpy(to, from.data(), from.size() * sizeof(T), cudaMemcpyHostToDevice));
}

template <typename T>
std::vector<T> download(const T* from, size_t count) {
  std::vector<T> to(count);
  CHECK_CUDA(cudaMemcpy(to.data(), from, count * sizeof(T), cudaMemcpyDeviceToHost));
  return to;
}

inline DeviceInfo this_device() {
  cudaDeviceProp found;
  CHECK_CUDA(cudaGetDeviceProperties(&found, 0));
  DeviceInfo d;
  d.cc_major = found.major;
  d.cc_minor = found.minor;
  d.num_sms = found.multiProcessorCount;
  if (const char* x = std::getenv("NUM_SMS")) d.num_sms = std::atoi(x);  // as if the GPU had so many
  if (const char* x = std::getenv("DQ_RING")) d.dq_ring = std::atoi(x);  // 0 never, 1 wherever it is possible
  d.smem_per_block = static_cast<int>(found.sharedMemPerBlockOptin);
  d.l2_bytes = found.l2CacheSize;
  std::printf("%s, %d SMs, L2 of %d MB\n", found.name, d.num_sms, d.l2_bytes >> 20);
  return d;
}

// (batch, seqlen, heads, head_dim), contiguous. Packed tensors are those of seqlen 0, which have no batch stride.
inline StridedView contiguous_view(void* ptr, int64_t seqlen, int64_t heads, int64_t head_dim) {
  StridedView view;
  view.ptr = ptr;
  view.batch_stride = seqlen * heads * head_dim;
  view.row_stride = heads * head_dim;
  view.head_stride = head_dim;
  view.aligned = true;
  return view;
}

// ---- random data ----

inline constexpr int kThreads = 256;
inline constexpr int kBlocks = 1024;

template <typename E>
__device__ E from_float(float x) {
  if constexpr (std::is_same_v<E, __half>) return __float2half(x);
  if constexpr (std::is_same_v<E, __nv_bfloat16>) return __float2bfloat16(x);
  if constexpr (std::is_same_v<E, float>) return x;
}

__device__ __forceinline__ uint32_t hash32(uint32_t x) {
  x ^= x >> 16;
  x *= 0x7feb352du;
  x ^= x >> 15;
  x *= 0x846ca68bu;
  return x ^ x >> 16;
}

// N(0, 1) by Box and Muller, the same for the same index and seed.
__device__ __forceinline__ float normal(size_t index, uint32_t seed) {
  constexpr float kUnit = 1.f / 4294967296.f;
  const uint32_t first = static_cast<uint32_t>(index) * 2;
  const float u = (static_cast<float>(hash32(first + seed * 7919u)) + 1.f) * kUnit;
  const float v = static_cast<float>(hash32(first + 1 + seed * 104729u)) * kUnit;
  return sqrtf(-2.f * logf(u)) * cospif(2.f * v);
}

__device__ __forceinline__ size_t first_index() { return blockIdx.x * static_cast<size_t>(blockDim.x) + threadIdx.x; }
__device__ __forceinline__ size_t index_step() { return gridDim.x * static_cast<size_t>(blockDim.x); }

template <typename E>
__global__ void fill_normal_kernel(E* x, size_t count, uint32_t seed, float amplitude) {
  for (size_t i = first_index(); i < count; i += index_step()) x[i] = from_float<E>(amplitude * normal(i, seed));
}

template <typename E>
void fill_normal(void* x, size_t count, uint32_t seed, float amplitude = 1.f) {
  fill_normal_kernel<<<kBlocks, kThreads>>>(static_cast<E*>(x), count, seed, amplitude);
  CHECK_CUDA(cudaGetLastError());
}

// ---- references ----

// Sum or largest value over 128 threads, given to all of them.
template <typename Combine>
__device__ float block_reduce(float x, Combine combine) {
  __shared__ float partial[128];
  __syncthreads();
  partial[threadIdx.x] = x;
  __syncthreads();
  for (int step = 64; step > 0; step /= 2) {
    if (threadIdx.x < step) partial[threadIdx.x] = combine(partial[threadIdx.x], partial[threadIdx.x + step]);
    __syncthreads();
  }
  return partial[0];
}

struct Largest {
  __device__ float operator()(float a, float b) const { return fmaxf(a, b); }
};
struct Sum {
  __device__ float operator()(float a, float b) const { return a + b; }
};

struct Errors {
  double squares;       // of the differences
  double want_squares;  // of what was wanted
  double largest;
  double largest_lse;   // relative where above 1
};

// For values that are not negative, whose bits are ordered as they are.
__device__ __forceinline__ void atomic_max(double* to, double x) {
  atomicMax(reinterpret_cast<unsigned long long*>(to), static_cast<unsigned long long>(__double_as_longlong(x)));
}

// NaN and infinity count as a huge error: a comparison with NaN would let them pass.
__device__ __forceinline__ void tally(Errors* errors, float got, float want) {
  const float found = fabsf(got - want);
  const double difference = found < 1e30f ? found : 1e15;
  atomicAdd(&errors->squares, difference * difference);
  atomicAdd(&errors->want_squares, static_cast<double>(want) * want);
  atomic_max(&errors->largest, difference);
}

// ---- timing ----

template <typename T>
double median(std::vector<T> x) {
  std::sort(x.begin(), x.end());
  return x[x.size() / 2];
}

// Overwrites twice the L2 of an H100 between launches, which otherwise start with inputs in cache.
class ColdCache {
 public:
  void flush() { CHECK_CUDA(cudaMemsetAsync(buffer_, ++value_, kBytes)); }

 private:
  static constexpr size_t kBytes = size_t{128} << 20;
  char* buffer_ = device_alloc<char>(kBytes);
  int value_ = 0;
};

// Milliseconds of each of `reps` calls, all queued before any is waited for. Without `cold` the L2 stays as it is.
inline std::vector<float> time_calls(const std::function<void()>& call, int reps, ColdCache* cold) {
  std::vector<cudaEvent_t> events(2 * reps);
  for (cudaEvent_t& event : events) CHECK_CUDA(cudaEventCreate(&event));
  for (int i = 0; i < reps; ++i) {
    if (cold != nullptr) cold->flush();
    CHECK_CUDA(cudaEventRecord(events[2 * i]));
    call();
    CHECK_CUDA(cudaEventRecord(events[2 * i + 1]));
  }
  CHECK_CUDA(cudaDeviceSynchronize());
  std::vector<float> times(reps);
  for (int i = 0; i < reps; ++i) CHECK_CUDA(cudaEventElapsedTime(&times[i], events[2 * i], events[2 * i + 1]));
  for (cudaEvent_t event : events) CHECK_CUDA(cudaEventDestroy(event));
  return times;
}

// ---- command line ----

inline std::string argument(int argc, char** argv, int index, const char* otherwise) {
  return argc > index ? argv[index] : otherwise;
}

inline std::vector<std::string> split(const std::string& text) {
  std::vector<std::string> parts;
  size_t start = 0;
  while (start <= text.size()) {
    const size_t end = std::min(text.find(',', start), text.size());
    parts.push_back(text.substr(start, end - start));
    start = end + 1;
  }
  return parts;
}

inline std::vector<int> split_numbers(const std::string& text) {
  std::vector<int> numbers;
  for (const std::string& part : split(text)) numbers.push_back(std::atoi(part.c_str()));
  return numbers;
}

inline constexpr const char* kSeqlens = "512,1024,2048,4096,8192,16384";

// Where packed sequences of these lengths begin, and the last one ends.
inline std::vector<int> running_sums(const std::vector<int>& lengths) {
  std::vector<int> sums = {0};
  for (int length : lengths) sums.push_back(sums.back() + length);
  return sums;
}

}  // namespace standalone
