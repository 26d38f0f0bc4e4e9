// The large tiles need more shared memory than any sm_8x device has: they are left out of its machine code.
#pragma once

#include "../../heuristics.h"

namespace flash_ext::sm80 {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
template <SmemClass kClass>
inline constexpr bool kCompiledHere = kClass == SmemClass::kSmall;
#else
template <SmemClass kClass>
inline constexpr bool kCompiledHere = true;
#endif

}  // namespace flash_ext::sm80
