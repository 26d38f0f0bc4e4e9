// The operators of fp8 attention for GPUs (api/fp8.cpp).
#pragma once

namespace torch {
class Library;
}

namespace flash_ext {

// Registers quantize_fp8 and fwd_fp8.
void implement_fp8(torch::Library& m);

}  // namespace flash_ext
