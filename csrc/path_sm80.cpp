// The sm80 path on the host: what it accepts, and which instance runs.
#include <algorithm>
#include <array>

#include "grid.h"
#include "heuristics.h"
#include "paths.h"
#include "sm80/instances.h"
#include "splits.h"

namespace flash_ext::sm80 {
namespace {

SmemClass class_of(const DeviceInfo& d) { return smem_class(d.cc_major, d.smem_per_block); }

std::string why_not(const Problem& p, const DeviceInfo& d) {
  if (d.cc_major < 8) {
    return "compute capability " + std::to_string(d.cc_major) + "." + std::to_string(d.cc_minor) +
           " is below 8.0 (Ampere)";
  }
  if (d.smem_per_block < kSmemLimitSmall) {
    return std::to_string(d.smem_per_block) + " bytes of shared memory per block, " +
           std::to_string(kSmemLimitSmall) + " needed";
  }
  if (padded_head_dim(p.head_dim, p.head_dim_v) == 0) {
    return "head_dim " + std::to_string(std::max(p.head_dim, p.head_dim_v)) + " > 256";
  }
  const int64_t longest = p.is_varlen() ? std::max(p.total_q, p.total_k)
                                        : std::max<int64_t>(p.seqlen_q, p.seqlen_k);
  if (longest > Problem::kMaxSeqlen) {
    return "sequence length " + std::to_string(longest) + " > " + std::to_string(Problem::kMaxSeqlen);
  }
  return {};
}

// One for each of kHeadDims.
template <typename Instance>
using Instances = std::array<Instance, std::size(kHeadDims)>;

template <typename Params, typename Instance, typename... Extras>
std::string run(const Params& p, const DeviceInfo& d, const Instances<Instance>& small,
                const Instances<Instance>& large, const Extras&... extras) {
  Params prepared = p;
  prepared.problem.prepare();
  const int size = padded_head_dim(p.problem.head_dim, p.problem.head_dim_v);
  const Instances<Instance>& instances = class_of(d) == SmemClass::kLarge ? large : small;
  for (size_t i = 0; i < std::size(kHeadDims); ++i) {
    if (kHeadDims[i] == size) return instances[i](prepared, extras..., d);
  }
  return "sm80 path: head_dim > 256";
}

Modifiers with_unit(Modifiers m, Problem p) {
  p.prepare();
  m.unit_log2 = m.is_natural ? kLog2e : p.abs_scale_log2;
  return m;
}

// One of the instances of kShortHeadDims, or the first of them.
template <typename Params, typename Instances, typename... Args>
std::string run_short(Params p, const Instances& instances, const Args&... args) {
  p.problem.prepare();
  const auto size = std::find(std::begin(kShortHeadDims), std::end(kShortHeadDims), short_head_dim(p.problem));
  return instances[size - std::begin(kShortHeadDims)](p, args...);
}

std::string run_fwd_short(const FwdParams& p, const Modifiers& m, const DeviceInfo& d) {
  return run_short(p, std::to_array({run_fwd_short_hd32, run_fwd_short_hd64, run_fwd_short_hd128, run_fwd_short_hd256}), m,
                   short_fwd_grid(p.problem, m.bias, d));
}

std::string run_bwd_short(const BwdParams& p, const Modifiers& m, const BiasGradient* bias, const DeviceInfo& d) {
  return run_short(p, std::to_array({run_bwd_short_hd32, run_bwd_short_hd64, run_bwd_short_hd128}), m,
                   bias != nullptr ? *bias : BiasGradient{}, short_bwd_grid(p.problem, m.bias, bias, d));
}

// Gradients of sinks and slopes alone come from the statistics of rows and the kernel of bias gradients.
bool is_short_bwd_mod(const Problem& p, const BwdExtras& x, const DeviceInfo& d) {
  return is_short_bwd(p, d) && (x.need_qkv || x.bias != nullptr);
}

}  // namespace

std::string why_not_fwd(const Problem& p, const DeviceInfo& d) { return why_not(p, d); }
std::string why_not_bwd(const Problem& p, const DeviceInfo& d) { return why_not(p, d); }

std::string run_fwd_split(const FwdParams& p, const SplitGrid& g, bool early) {
  FwdParams prepared = p;
  prepared.problem.prepare();
  const int size = padded_split_head_dim(p.problem.head_dim, p.problem.head_dim_v);
  const auto instance = size == 64 ? run_fwd_split_hd64 : size == 128 ? run_fwd_split_hd128 : run_fwd_split_hd256;
  return instance(prepared, g, early);
}

std::string run_fwd(const FwdParams& p, const DeviceInfo& d) {
  if (is_short(p.problem, d)) return run_fwd_short(p, with_unit({}, p.problem), d);
  if (const SplitGrid g = make_split_grid(p.problem, d); g.rows > 0) return run_fwd_split(p, g, false);
  return run(p, d, std::to_array({run_fwd_hd64, run_fwd_hd96, run_fwd_hd128, run_fwd_hd192, run_fwd_hd256}),
             std::to_array({run_fwd_large_hd64, run_fwd_large_hd96, run_fwd_large_hd128, run_fwd_large_hd192,
                            run_fwd_large_hd256}));
}

std::string run_bwd(const BwdParams& p, const DeviceInfo& d) {
  if (is_short_bwd(p.problem, d)) return run_bwd_short(p, with_unit({}, p.problem), nullptr, d);
  return run(p, d, std::to_array({run_bwd_hd64, run_bwd_hd96, run_bwd_hd128, run_bwd_hd192, run_bwd_hd256}),
             std::to_array({run_bwd_large_hd64, run_bwd_large_hd96, run_bwd_large_hd128, run_bwd_large_hd192,
                            run_bwd_large_hd256}));
}

std::string run_fwd_mod(const FwdParams& p, const Modifiers& modifiers, const DeviceInfo& d) {
  const Modifiers m = with_unit(modifiers, p.problem);
  if (is_short_mod(p.problem, d)) return run_fwd_short(p, m, d);
  return run(p, d,
             std::to_array({run_fwd_mod_hd64, run_fwd_mod_hd96, run_fwd_mod_hd128, run_fwd_mod_hd192, run_fwd_mod_hd256}),
             std::to_array({run_fwd_mod_large_hd64, run_fwd_mod_large_hd96, run_fwd_mod_large_hd128,
                            run_fwd_mod_large_hd192, run_fwd_mod_large_hd256}),
             m);
}

std::string run_bwd_mod(const BwdParams& p, const BwdExtras& extras, const DeviceInfo& d) {
  const Modifiers m = with_unit(*extras.modifiers, p.problem);
  BwdExtras x = extras;
  x.modifiers = &m;
  if (is_short_bwd_mod(p.problem, x, d)) {
    const std::string error = run_bwd_short(p, m, x.bias, d);
    if (!error.empty() || x.slopes == nullptr) return error;
    BwdParams prepared = p;
    prepared.problem.prepare();
    return class_of(d) == SmemClass::kLarge ? run_bwd_bias_large(prepared, m, *x.slopes, d)
                                            : run_bwd_bias(prepared, m, *x.slopes, d);
  }
  return run(p, d,
             std::to_array({run_bwd_mod_hd64, run_bwd_mod_hd96, run_bwd_mod_hd128, run_bwd_mod_hd192, run_bwd_mod_hd256}),
             std::to_array({run_bwd_mod_large_hd64, run_bwd_mod_large_hd96, run_bwd_mod_large_hd128,
                            run_bwd_mod_large_hd192, run_bwd_mod_large_hd256}),
             x);
}

}  // namespace flash_ext::sm80
