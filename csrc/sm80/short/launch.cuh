// What the launchers of both kernels for short sequences share.
#pragma once

#include "../../launch.h"
#include "../instances.h"
#include "config.cuh"

namespace flash_ext::sm80 {

// launch.operator()<Traits>() for the element type and the rows that a launch was planned for, at most kMostRows.
template <int D, int kMostRows, typename Launcher>
std::string at_short_rows(DType dtype, const Launch& l, const Launcher& launch) {
  return dispatch_dtype(dtype, [&]<typename E>() {
    if (l.block_m == 16) return launch.template operator()<ShortTraits<E, D, 16>>();
    if constexpr (kMostRows > 64) {
      if (l.block_m == 80) return launch.template operator()<ShortTraits<E, D, 80>>();
    }
    if (l.block_m == 64) return launch.template operator()<ShortTraits<E, D, 64>>();
    return launch.template operator()<ShortTraits<E, D, 32>>();
  });
}

}  // namespace flash_ext::sm80
