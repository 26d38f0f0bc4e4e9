// Sinks: each head has the logit of a key without a value, which takes part in the sums of its rows. -inf is none.
#pragma once

#include "../ptx/sm80.cuh"
#include "attn_mod.cuh"

namespace flash_ext {

// lse becomes that of the row and its head's sink, which is not -inf. Returns the share of the row's own sum in both.
__device__ __forceinline__ float add_sink(float& lse, float sink) {
  const float top = fmaxf(lse, sink);
  const float own = ptx::ex2((lse - top) * kLog2e), both = own + ptx::ex2((sink - top) * kLog2e);
  lse = top + logf(both);
  return own * ptx::reciprocal(both);
}

}  // namespace flash_ext
