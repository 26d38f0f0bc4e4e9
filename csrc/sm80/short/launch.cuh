// What the launchers of both kernels for short sequences share.
#pragma once

#include "../../launch.h"
#include "../instances.h"
#include "config.cuh"

namespace flash_ext::sm80 {

// launch.operator()<Traits>() for the element type and the rows that a launch was planned for.
template <int D, typename Launcher>
std::string at_short_rows(DType dtype, const Launch& l, const Launcher& launch) {
  return dispatch_dtype(dtype, [&]<typename E>() {
    if (l.block_m == 16) return launch.template operator()<ShortTraits<E, D, 16>>();
    if (l.block_m == 32) return launch.template operator()<ShortTraits<E, D, 32>>();
    if constexpr (short_rows(D) > 64) {
      if (l.block_m == 80) return launch.template operator()<ShortTraits<E, D, 80>>();
    }
    return launch.template operator()<ShortTraits<E, D, 64>>();
  });
}

}  // namespace flash_ext::sm80
