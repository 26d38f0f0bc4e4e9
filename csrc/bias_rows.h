// A bias whose rows do not begin on 16 bytes, copied so that they do. No CUDA, no torch.
#pragma once

#include <cstdint>
#include <string>

namespace flash_ext {

struct BiasRows {
  const void* from;
  void* to;  // rows one behind the other, zeros behind their columns
  int64_t strides[4];  // of `from`, in elements: batch entries, heads, rows, columns
  int64_t sizes[4];
  int element_bytes;  // 2 or 4

  static constexpr int kPieceBytes = 16;
  int64_t pieces() const { return (sizes[3] * element_bytes + kPieceBytes - 1) / kPieceBytes; }  // of a row of `to`
};

// csrc/inst/passes.cu; the error's text, empty where there is none.
std::string align_bias_rows(const BiasRows& rows, void* stream);

}  // namespace flash_ext
