// Who does what in a CTA of the sm90 kernels: the first warpgroup produces, a warp a job; the others consume. The last one
// converts what comes, in kernels that say so (kConverterRegs).
#pragma once

#include "../../ptx/sm80.cuh"
#include "../../ptx/sm90.cuh"

namespace flash_ext::sm90 {

template <typename T>
inline constexpr int kConverterRegsOf = 0;
template <typename T>
  requires requires { T::kConverterRegs; }
inline constexpr int kConverterRegsOf<T> = T::kConverterRegs;
struct NoConverter {
  __device__ __forceinline__ void operator()() const {}
};

// Sets up the barriers and runs produce(warp) in the warps of the first warpgroup, consume(group) in the others, whose
// numbers begin with 1, convert() in the last one where it converts. Registers move to those that consume.
template <typename T, typename Barriers, typename Produce, typename Consume, typename Convert = NoConverter>
__device__ __forceinline__ void play_roles(const Barriers& bars, const Produce& produce, const Consume& consume,
                                           const Convert& convert = {}) {
  constexpr int kGroups = T::kThreads / 128, kConverterRegs = kConverterRegsOf<T>;
  constexpr int kConsumers = kGroups - 1 - (kConverterRegs > 0);
  static_assert(T::kProducerRegs + kConsumers * T::kConsumerRegs + kConverterRegs <= ptx::kRegisterBudget<kGroups>);
  if (threadIdx.x == 0) bars.init();
  __syncthreads();
  const int group = __shfl_sync(ptx::kFullWarp, threadIdx.x / 128, 0);
  if (group == 0) {
    ptx::setmaxnreg_dec<T::kProducerRegs>();
    produce(__shfl_sync(ptx::kFullWarp, static_cast<int>(threadIdx.x / 32), 0));
  } else if (kConverterRegs > 0 && group == kGroups - 1) {
    if constexpr (kConverterRegs > 0) ptx::setmaxnreg_dec<kConverterRegs>();
    convert();
  } else {
    ptx::setmaxnreg_inc<T::kConsumerRegs>();
    consume(group);
  }
}

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
template <typename T>
inline constexpr bool kHasWgmma = true;
#else
template <typename T>
inline constexpr bool kHasWgmma = false;  // it exists in sm_90a machine code only
#endif

// What the roles of a CTA have in common: dynamic shared memory, what lies there behind the tiles, and barriers.
template <typename Shared, typename Barriers>
struct Cta {
  unsigned char* bytes;
  uint32_t smem;
  Shared* shared;
  Barriers bars;
};

struct NoConverterOfCta {
  __device__ __forceinline__ void operator()(const auto&) const {}
};

// The body of a kernel: prepare(cta) in all threads, then the roles, produce(cta, warp), consume(cta, group) and
// convert(cta). As they take `const auto&`, they are compiled for sm_90a alone.
template <typename T, typename Shared, typename Barriers, typename Prepare, typename Produce, typename Consume,
          typename Convert = NoConverterOfCta>
__device__ __forceinline__ void run_cta(int shared_at, int barriers_at, const Prepare& prepare, const Produce& produce,
                                        const Consume& consume, const Convert& convert = {}) {
  if constexpr (kHasWgmma<T>) {
    extern __shared__ __align__(1024) unsigned char smem_bytes[];
    const uint32_t smem = ptx::smem_address(smem_bytes);
    const Cta<Shared, Barriers> cta{smem_bytes, smem, reinterpret_cast<Shared*>(smem_bytes + shared_at),
                                    Barriers{smem + barriers_at}};
    prepare(cta);
    play_roles<T>(
        cta.bars, [&](int warp) { produce(cta, warp); }, [&](int group) { consume(cta, group); },
        [&] { convert(cta); });
  } else {
    __trap();
  }
}

}  // namespace flash_ext::sm90
