// A call on its way to the kernels: the plan and everything a launch adds to it. No torch, no CUDA headers.
#pragma once

#include <array>
#include <cstddef>
#include <span>
#include <string>
#include <utility>

#include "bias_rows.h"
#include "fp8.h"
#include "plan.h"

namespace flash_ext {

// A part of a workspace that begins at `workspace`, null where the plan has none.
template <typename T>
T* part_of(std::byte* workspace, const Part& part) {
  return part ? reinterpret_cast<T*>(workspace + part.offset) : nullptr;
}

struct FwdCall {
  const Plan& plan;
  FwdParams p;           // without p.kept, which each launch sets
  Modifiers modifiers;   // of plain calls none
  std::byte* workspace;  // of plan.workspace.bytes, on 128 bytes, holding anything
  KvCache cache = {};    // of calls with a cache
  QuantizedCache quantized = {};  // of those of 8 bits
  Fp8Operands fp8 = {};  // of requests whose operands are not all of 16 bits
  BiasRows bias_rows = {};  // what the pass copies that a plan may begin with
};

struct BwdCall {
  const Plan& plan;
  BwdParams p;          // without pointers into the workspace
  Modifiers modifiers;  // of plain calls none
  BiasGradient dbias, dslopes;
  std::byte* workspace;
  BiasRows bias_rows = {};
  BwdParams whole = {};  // with GQA splits: the call as it came, while `p` has the splits as key heads

  // As portable kernels see the workspace, and as those for Hopper do. `l`: the launch that is to read it.
  BwdParams portable(const Launch& l) const;
  BwdParams hopper() const;
};

// Runs the launches of a plan, in order. An empty string, or what went wrong.
std::string run(FwdCall call);
std::string run(BwdCall call);

// ---- instances ----------------------------------------------------------------------------------

// What csrc/inst/ compiles of a family of kernels for one pair of head sizes.
template <typename Call>
struct Instance {
  int head_dim, head_dim_v;
  std::string (*launch)(const Call&, const Launch&);
};
using FwdInstance = Instance<FwdCall>;
using BwdInstance = Instance<BwdCall>;
using FwdInstances = std::span<const FwdInstance>;
using BwdInstances = std::span<const BwdInstance>;

template <auto kValue>
struct Constant {};

#ifdef FLASH_EXT_LEFT_OUT
// No GPU that the build is for runs these kernels (csrc/build_backend/compile.py): the table is empty, and a launch
// from it is refused in words.
struct NoInstances {
  template <typename I>
  constexpr operator std::span<const I>() const {
    return {};
  }
};
template <const auto& kSizes, typename Make>
constexpr NoInstances instances_of(const Make&) {
  return {};
}
#else
// make(Constant<kSizes[i]>{}) for each i.
template <const auto& kSizes, typename Make>
constexpr auto instances_of(const Make& make) {
  return [&]<size_t... I>(std::index_sequence<I...>) {
    return std::to_array({make(Constant<kSizes[I]>{})...});
  }(std::make_index_sequence<std::size(kSizes)>());
}
#endif

}  // namespace flash_ext
