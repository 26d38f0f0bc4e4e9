// What the rules of calls share (checks.cpp, checks_cached.cpp). Comparisons also work for sizes that are not known
// while tracing: those become run-time assertions.
#pragma once

#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

#include <initializer_list>
#include <limits>
#include <string>
#include <vector>

#include "api.h"

namespace flash_ext::checks {

constexpr int64_t kMaxHeadDim = 256;
constexpr int64_t kMaxInt32 = std::numeric_limits<int32_t>::max();

// What a dimension may be; nothing: any size.
using Sizes = std::vector<SymInt>;

bool equal(const SymInt& a, const SymInt& b);
bool at_most(const SymInt& a, const SymInt& b);

// For messages.
std::string dtype_name(const Tensor& t);
std::string shape_of(const Tensor& t);

bool is_reduced(c10::ScalarType dtype);  // fp16 or bf16
bool is_wide(c10::ScalarType dtype);  // fp32 or fp64, which the CPU takes

// The type of lse, and of what adds to scores in the precision of theirs.
inline c10::ScalarType statistic_of(const Tensor& q) {
  return q.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

// `like`: the tensor whose device t must be on, and its name.
void check_device(const Tensor& t, const char* name, const Tensor& like, const char* like_name = "q");
void check_devices(const Tensor& q, const Tensor& k, const Tensor& v);
void check_dtypes(const Tensor& q, const Tensor& k, const Tensor& v, bool autocasts = true);
void check_unit_stride(const Tensor& t, const char* name);
void check_cu_seqlens(const Tensor& cu, const char* name, const Tensor& q);
void check_shapes(const Tensor& q, const Tensor& k, const Tensor& v);
void check_head_dims(const Tensor& q, const Tensor& v);  // which GPUs limit
void check_options(const Tensor& q, const CallArgs& a);
// Of a tensor that is there: callers ask first, since the sizes cost more than all else that is checked of a decoding
// step.
void check_modifier(const OptionalTensor& t, const char* name, const Tensor& q,
                    std::initializer_list<c10::ScalarType> dtypes, const std::vector<Sizes>& sizes, bool contiguous);
void check_of_heads(const Tensor& q, const SymInt& batch, const CallArgs& a);
// Of any rows or keys where the sizes of these are empty. narrow: what a bias may be beside fp32.
void check_bias(const Tensor& q, const SymInt& batch, const OptionalTensor& bias, c10::ScalarType narrow,
                const Sizes& rows, const Sizes& keys);
void check_mask(const Tensor& q, const SymInt& batch, const OptionalTensor& mask, const Sizes& rows, const Sizes& keys);

}  // namespace flash_ext::checks
