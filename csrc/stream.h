// What the host asks about a stream. No torch, no CUDA.
#pragma once

namespace flash_ext {

// Whether what runs on the stream goes into a CUDA graph (csrc/device.cu).
bool is_capturing(void* stream);

}  // namespace flash_ext
