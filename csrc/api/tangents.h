// Forward-mode automatic differentiation, which nothing here has.
#pragma once

#include "api.h"

namespace flash_ext {

// Raises where t carries a tangent, which would be dropped.
inline void refuse_tangent(const Tensor& t) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      !t._fw_grad(/*level=*/0).defined(),
      "forward-mode automatic differentiation of attention is not implemented; use reverse mode.");
}

}  // namespace flash_ext
