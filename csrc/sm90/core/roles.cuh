// Who does what in a CTA of the sm90 kernels: the first warpgroup produces, a warp a job; the others consume. The last
// ones convert what comes, in kernels that say so (kConverterGroups, kConverterRegs).
#pragma once

#include "../../ptx/sm80.cuh"
#include "../../ptx/sm90.cuh"

namespace flash_ext::sm90 {

struct NoConverters {
  static constexpr int kConverterGroups = 0, kConverterRegs = 0;
};
template <typename T>
using ConvertersOf = std::conditional_t<requires { T::kConverterGroups; }, T, NoConverters>;
struct NoConverter {
  __device__ __forceinline__ void operator()(int) const {}
};

// Sets up the barriers and runs produce(warp) in the warps of the first warpgroup, consume(group) in the others, whose
// numbers begin with 1, convert(index) in the last ones where they convert. Registers move to those that consume.
template <typename T, typename Barriers, typename Produce, typename Consume, typename Convert = NoConverter>
__device__ __forceinline__ void play_roles(const Barriers& bars, const Produce& produce, const Consume& consume,
                                           const Convert& convert = {}) {
  constexpr int kGroups = T::kThreads / 128;
  constexpr int kConverters = ConvertersOf<T>::kConverterGroups, kConverterRegs = ConvertersOf<T>::kConverterRegs;
  constexpr int kConsumers = kGroups - 1 - kConverters;
  static_assert(T::kProducerRegs + kConsumers * T::kConsumerRegs + kConverters * kConverterRegs <=
                ptx::kRegisterBudget<kGroups>);
  if (threadIdx.x == 0) bars.init();
  __syncthreads();
  const int group = __shfl_sync(ptx::kFullWarp, threadIdx.x / 128, 0);
  if (group == 0) {
    ptx::setmaxnreg_dec<T::kProducerRegs>();
    produce(__shfl_sync(ptx::kFullWarp, static_cast<int>(threadIdx.x / 32), 0));
  } else if (kConverters > 0 && group > kConsumers) {
    if constexpr (kConverters > 0) ptx::setmaxnreg_dec<kConverterRegs>();
    convert(group - kConsumers - 1);
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
  __device__ __forceinline__ void operator()(const auto&, int) const {}
};

// The body of a kernel: prepare(cta) in all threads, then the roles, produce(cta, warp), consume(cta, group) and
// convert(cta, index). As they take `const auto&`, they are compiled for sm_90a alone.
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
        [&](int index) { convert(cta, index); });
  } else {
    __trap();
  }
}

// The same where there is nothing to prepare, and a ring of work tiles.
template <typename T, typename Shared, typename Barriers, typename Produce, typename Consume,
          typename Convert = NoConverterOfCta>
__device__ __forceinline__ void run_cta(const Produce& produce, const Consume& consume, const Convert& convert = {}) {
  run_cta<T, Shared, Barriers>(T::kWorkAt, T::kBarriersAt, [](const auto&) {}, produce, consume, convert);
}

}  // namespace flash_ext::sm90
