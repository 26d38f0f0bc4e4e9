// The element types of q, k and v that kernels are compiled for. Included by .cu files only.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <string>

#include "params.h"

namespace flash_ext {

template <typename E>
struct DTypeOf;
template <>
struct DTypeOf<__half> {
  static constexpr DType value = DType::kFloat16;
};
template <>
struct DTypeOf<__nv_bfloat16> {
  static constexpr DType value = DType::kBFloat16;
};

// f.operator()<E>() with the type of `dtype`. No default: the build stops where a member of DType has no case.
template <typename F>
std::string dispatch_dtype(DType dtype, const F& f) {
  switch (dtype) {
    case DType::kFloat16: return f.template operator()<__half>();
    case DType::kBFloat16: return f.template operator()<__nv_bfloat16>();
  }
  return "no kernels for this element type";
}

// The same in a kernel. No compiler counts the cases there: they are those above.
template <typename F>
__device__ __forceinline__ void with_dtype(DType dtype, const F& f) {
  switch (dtype) {
    case DType::kFloat16: return f.template operator()<__half>();
    case DType::kBFloat16: return f.template operator()<__nv_bfloat16>();
  }
}

}  // namespace flash_ext
