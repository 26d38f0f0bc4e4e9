// Launches of the forward for few queries over a cache of 8 bits. Included by its instantiation file only.
#pragma once

#include "../../launch.h"
#include "../instances.h"
#include "launch_parts.cuh"
#include "quantized.cuh"

namespace flash_ext::sm80 {

template <int D>
std::string launch_fwd_split_quantized(const FwdCall& c, const Launch& l) {
  const FwdParams p = params_of(c);
  const auto launch_tile = [&]<typename T>() {
    const auto kernel = l.variant == ScoreVariant::kAll ? fwd_split_quantized_kernel<T, Knows::kMasks>
                                                        : fwd_split_quantized_kernel<T, Knows::kTree>;
    return launch_planned(l, kernel, T::kThreads, T::kTile.smem_bytes(D), p.stream, p, c.plan.split_kv, c.cache,
                          c.plan.kv_cache, l.rows, c.modifiers, c.quantized);
  };
  const auto launch_type = [&]<CacheType kType>() {
    return l.block_m == 16 ? launch_tile.template operator()<QuantizedTraits<kType, D, 16>>()
                           : launch_tile.template operator()<QuantizedTraits<kType, D, 64>>();
  };
  switch (l.cache_type) {
    case CacheType::kE4m3: return launch_type.template operator()<CacheType::kE4m3>();
    case CacheType::kInt8: return launch_type.template operator()<CacheType::kInt8>();
    case CacheType::k16Bit: break;
  }
  return not_compiled(l);
}

}  // namespace flash_ext::sm80
