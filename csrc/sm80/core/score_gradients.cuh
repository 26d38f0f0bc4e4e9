// dS from S and dP with modifiers, for kernels that hold queries along the rows: bwd_dq/kernel.cuh and
// bwd_bias/kernel.cuh.
#pragma once

#include "../../common/bias_stage.cuh"
#include "../../common/dropout.cuh"
#include "../../common/fragments.cuh"
#include "../../common/hide.cuh"

namespace flash_ext::sm80 {

// dS of 16 kA rows and 8 kN keys of a warp, in place of the raw products S; dP is used up. kThroughSoftcap: the
// gradient of the products, else that of the scores, which a bias has too. `bias` is what the warp has staged of it.
template <typename E, typename Stage, bool kThroughSoftcap, int kA, int kN, typename Mask>
__device__ __forceinline__ void modified_score_gradients(float (&acc_s)[kA][kN][4], float (&acc_dp)[kA][kN][4],
                                                         const ScoreMod& score_mod, const float2 (&stats)[2 * kA],
                                                         TileTests tests, const Mask& mask, int row0, int col0,
                                                         uint32_t bias, const DropKeys& drop_keys) {
  const Modifiers& m = score_mod.m;
  float slope[kA][kN][4];  // written and read only with a softcap
  score_mod.template modify<E, false, Stage>(acc_s, row0, col0, bias, [&](int a, int nb, const float (&x)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) slope[a][nb][i] = x[i];
  });
  if (tests != 0) hide(acc_s, score_mod, row0, col0, tests, mask);
  for_each_element(acc_s,
                   [&](float& s, int a, int, int i) { s = ptx::ex2(fmaf(s, m.unit_log2, -stats[2 * a + i / 2].x)); });
  if (m.rng != nullptr) drop<false, true>(acc_s, m, row0, col0, drop_keys);
  for_each_element(acc_s, [&](float& s, int a, int nb, int i) {
    const float dp = acc_dp[a][nb][i], delta = stats[2 * a + i / 2].y;
    s = fabsf(s) * (signbit(s) ? -delta : fmaf(dp, m.keep_scale, -delta));
    if (kThroughSoftcap && m.softcap > 0.f) s *= slope[a][nb][i];
  });
}

}  // namespace flash_ext::sm80
