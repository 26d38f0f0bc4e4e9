// Whether a backward gives the same bits in every run.
#pragma once

#include "harness.cuh"

namespace standalone {

// Adds up the elements, each mixed with its place.
__global__ void digest_kernel(const uint16_t* x, size_t count, unsigned long long* digest) {
  unsigned long long sum = 0;
  for (size_t i = first_index(); i < count; i += index_step()) {
    sum += hash32(static_cast<uint32_t>(i) * 2654435761u ^ x[i]) * 0x9e3779b97f4a7c15ull;
  }
  atomicAdd(digest, sum);
}

// Keeps a multiprocessor for itself, by its shared memory, for a number of clocks.
__global__ void occupy_kernel(long long clocks) {
  extern __shared__ char keep[];
  keep[threadIdx.x] = 0;
  for (const long long start = clock64(); clock64() - start < clocks;) {
  }
}

class Repeats {
 public:
  Repeats(const flash_ext::BwdParams& p, int head_dim) {
    queries_ = static_cast<size_t>(p.problem.total_q) * p.problem.num_heads * head_dim;
    keys_ = static_cast<size_t>(p.problem.total_k) * p.problem.num_heads_k * head_dim;
    CHECK_CUDA(cudaStreamCreateWithFlags(&beside_, cudaStreamNonBlocking));
    CHECK_CUDA(cudaFuncSetAttribute(occupy_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kAll));
  }
  ~Repeats() {
    cudaFree(digests_);
    cudaStreamDestroy(beside_);
  }

  void disturb(int run) {
    occupy_kernel<<<1 + run * 53 % 128, 32, kAll, beside_>>>(20'000 + run % 5 * 60'000);
    CHECK_CUDA(cudaGetLastError());
  }

  // As in the first call.
  bool same_bits(const flash_ext::BwdParams& p) {
    CHECK_CUDA(cudaMemset(digests_, 0, 3 * sizeof(unsigned long long)));
    const auto digest = [&](const StridedView& x, size_t count, int place) {
      digest_kernel<<<kBlocks, kThreads>>>(static_cast<const uint16_t*>(x.ptr), count, digests_ + place);
    };
    digest(p.dq, queries_, 0);
    digest(p.dk, keys_, 1);
    digest(p.dv, keys_, 2);
    const std::vector<unsigned long long> found = download(digests_, 3);
    if (first_.empty()) first_ = found;
    return found == first_;
  }

 private:
  static constexpr int kAll = 220 << 10;
  size_t queries_, keys_;
  cudaStream_t beside_;
  unsigned long long* digests_ = device_alloc<unsigned long long>(3);
  std::vector<unsigned long long> first_;
};

}  // namespace standalone
