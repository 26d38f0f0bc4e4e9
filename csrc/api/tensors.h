// From tensors to what the kernel paths take: shared by the operators with and without modifiers.
#pragma once

#include <c10/core/DeviceGuard.h>

#include <limits>

#include "../call.h"
#include "../path_choice.h"
#include "api.h"

#if __has_include(<nvtx3/nvtx3.hpp>)
#include <nvtx3/nvtx3.hpp>
#endif

namespace flash_ext {

#if __has_include(<nvtx3/nvtx3.hpp>)
struct NvtxDomain {
  static constexpr char const* name{"flash_ext"};
};
using ProfilerRange = nvtx3::scoped_range_in<NvtxDomain>;
#else
struct ProfilerRange {
  explicit ProfilerRange(const char*) {}
};
#endif

int32_t clamp_to_int32(int64_t value);

// The window of a problem that has its lengths. Of a dense one, a bound that hides nothing from any row is none, so
// that the call runs as one without it. `top_left`: Modifiers::top_left.
void set_window(Problem& p, int64_t left, int64_t right, bool top_left = false);

// That kernels are compiled for; others are refused.
DType dtype_of(at::ScalarType type);
inline DType dtype_of(const Tensor& t) { return dtype_of(t.scalar_type()); }

// Whether TMA can read it (Problem::tma_ready).
bool is_tma_ready(const Tensor& t);
bool is_row_aligned(const Tensor& t);  // every row starts on 16 bytes

// Whether a backward is deterministic: where it is asked for (api/api.h), and in the batch-invariant mode, because
// which order of additions pays depends on the batch.
inline bool is_deterministic(bool asked, const DeviceInfo& info) {
  return info.batch_invariant || is_deterministic(asked);
}

inline constexpr double kMinusInfinity = -std::numeric_limits<double>::infinity();

// A dimension of size 1 has no meaningful stride, so it neither counts nor travels.
inline int64_t stride_or_zero(const Tensor& t, int64_t dim) { return t.size(dim) > 1 ? t.stride(dim) : 0; }

// `aligned` holds when every row starts on a 16-byte boundary.
StridedView view_of(const Tensor& t);

// Of a cache and its factors: none, or fp32 as k_descale has them.
CacheType cache_type_of(const Tensor& k);
CacheFactors factors_of(const OptionalTensor& t);

// What a problem has of the heads of its tensors, and whether TMA can read them; without lengths.
Problem heads_of(const Tensor& q, const Tensor& k, const Tensor& v);
void set_lengths(Problem& p, const Tensor& q, const Tensor& k, const OptionalTensor& cu_seqlens_q,
                 const OptionalTensor& cu_seqlens_k);
Problem problem_of(const Tensor& q, const Tensor& k, const Tensor& v, const CallArgs& args);

// Of a forward or a backward, which both read these.
template <typename Params>
Params params_of(const Problem& problem, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out) {
  Params p;
  p.problem = problem;
  p.q = view_of(q), p.k = view_of(k), p.v = view_of(v), p.out = view_of(out);
  return p;
}

// As at::empty and at::empty_strided, whose headers take 3 s to read in each file.
Tensor new_tensor(at::IntArrayRef sizes, const at::TensorOptions& options);
Tensor new_tensor(at::IntArrayRef sizes, at::IntArrayRef strides, const at::TensorOptions& options);

// Those of a result that belongs to `t`: its own, or with fp32 for a wide one.
at::TensorOptions result_options(const Tensor& t, bool wide);

// out and lse, not filled; an lse that is not wanted has no elements.
Tensor empty_out(const Tensor& q, const Tensor& v, bool wide);
Tensor empty_lse(const Tensor& q, bool wanted = true);
c10::DimVector lse_sizes(const Tensor& q);

// Where kernels write it: null where it is not wanted.
inline float* lse_pointer(const Tensor& lse, bool wanted) { return wanted ? lse.mutable_data_ptr<float>() : nullptr; }

// lse of rows that see nothing but the sink of their head: of sequences alone.
void fill_with_sinks(const Tensor& lse, const Tensor& sinks, const OptionalTensor& cu_seqlens_q);

// What `backend=` says, which check_fwd() or check_bwd() has accepted.
Choice choice_of(OptionalName backend);

// The path that will run; raises with the reasons of every path when none can.
const Path& required_path(const Problem& p, const DeviceInfo& info, const Choice& wanted);

// The plan of a request; raises where no kernel is left that its constraints allow.
Plan required_plan(const Path& path, const Request& request, const DeviceInfo& info);
// The same of a forward. Boxes of packed tiles have several heads of q, which TMA cannot read from one that is
// expanded.
Plan required_forward_plan(const Path& path, Request request, const DeviceInfo& info, const Tensor& q);

// While it lives, the device of `t` is the current one, for torch and for the driver.
class OnDevice {
 public:
  explicit OnDevice(const Tensor& t);

 private:
  c10::OptionalDeviceGuard guard_;
};

void* stream_handle(const c10::Device& device);
DeviceInfo device_info_of(const Tensor& q);
bool should_launch();

// Whether what runs on the current stream of q's device goes into a CUDA graph.
bool is_capturing(const Tensor& q);

// The workspace of a plan: bytes, undefined where it needs none.
Tensor workspace_of(const Plan& plan, const Tensor& q);
inline std::byte* pointer_to(const Tensor& workspace) {
  return workspace.defined() ? static_cast<std::byte*>(workspace.mutable_data_ptr()) : nullptr;
}

// Notes the plan of a call where tests ask for it, and runs it unless they ask not to. `follows`: whether the plan goes
// with the one noted before.
void launch(const Path& path, const FwdCall& call);
void launch(const Path& path, const BwdCall& call, bool follows = false);

// The modifiers of a call as kernels read them, and the tensors made for that, kept until the kernels are launched.
struct Prepared {
  Modifiers modifiers;
  std::vector<Tensor> kept;
  void* stream = nullptr;
};

// A mask's tensor in the form that kernels read, by passes on a stream, below the dispatcher and behind
// check_condense() (api/condense.cpp).
Tensor condense(const Tensor& x, int64_t block_rows, int64_t block_cols, void* stream);

// Runs the passes over masks that `request` needs, whose modifiers are still missing (api/modifiers.cpp).
Prepared prepare(const Request& request, const CallArgs& args, void* stream);

// The gradient of a bias of shape (batch|1, h|1, rows|1, cols|1), or of slopes.
BiasGradient gradient_of(at::IntArrayRef shape, bool is_slope);

// Where it is summed: in its parts of the workspace, else in `result`.
Tensor place_gradient(BiasGradient& g, int splits, const Part& part, const Tensor& workspace, const Tensor& result);

// Modifiers of which only the kind is known, as plans look at them: pointers that are not null, and numbers. Masks are
// prepared, no pass runs in front of the kernels.
struct NamedModifiers {
  Modifiers modifiers;
  BiasGradient dbias, dslopes;
  bool wants_dbias = false, wants_dslopes = false, wants_dsinks = false;

  // Raises std::invalid_argument for a name that is not known, or that does not go with a cache or without one.
  NamedModifiers(const std::vector<std::string>& names, const Problem& p, bool has_cache);
  bool wants_gradient() const { return wants_dbias || wants_dslopes || wants_dsinks; }
};

}  // namespace flash_ext
