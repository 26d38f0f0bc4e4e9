// FlashAttention forward for Hopper with products in e4m3.
//
//   O_i = softmax(scale * Q_i K^T) V,  lse_i = log sum_j exp(scale * q_i . k_j)
//
// with q, k and v that are their e4m3 numbers times factors, plus offsets (fp8.h). Roles, schedule and shared memory
// are those of fwd/kernel.cuh; tiles of V lie transposed, [channels][keys].
#pragma once

#include "../fwd/consume.cuh"
#include "half_numbers.cuh"
#include "produce.cuh"

namespace flash_ext::sm90 {

template <typename T>
__global__ void __launch_bounds__(T::kThreads, 1)
    fwd_fp8_sm90_kernel(const __grid_constant__ Fp8Args a, const __grid_constant__ FwdMaps maps) {
  run_fwd_cta<T>(a, maps, [&](const auto& cta, int warp) {
    if (warp == 0) {
      schedule_fp8_work<T>(a, maps, cta.smem, cta.shared, cta.bars);
    } else if (warp == 1) {
      load_fp8_tiles<T>(a, maps, cta.smem, cta.shared, cta.bars);
    }
  });
}

}  // namespace flash_ext::sm90
