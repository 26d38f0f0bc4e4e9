// The sm90 path on the host: what a Hopper GPU runs. Its own kernels are forwards and backwards; the rest runs in the
// sm80 kernels, and the plan of such a call names those.
#include <algorithm>
#include <array>
#include <cstring>

#include "build_info.h"
#include "heuristics.h"
#include "paths.h"
#include "short_tiles.h"
#include "sm80/instances.h"
#include "sm90/bwd_wide_mod_tiles.h"
#include "sm90/instances.h"
#include "splits.h"

namespace flash_ext::sm90 {
namespace {

using RunForward = std::string (*)(const FwdParams&, const DeviceInfo&);
struct Instance {
  int head_dim, head_dim_v;
  RunForward run, run_lower;  // with tiles of 128 queries, null where there are no others

  bool is_lower(const Problem& p, const DeviceInfo& d) const {
    return run_lower != nullptr && takes_lower_tiles(p, d);
  }
};
constexpr std::array<Instance, 6> kInstances = {
    {{64, 64, run_fwd_hd64, run_fwd_lower_hd64},
     {96, 96, run_fwd_hd96, run_fwd_lower_hd96},
     {128, 128, run_fwd_hd128, run_fwd_lower_hd128},
     {192, 128, run_fwd_hd192_v128, nullptr},
     {192, 192, run_fwd_hd192, nullptr},
     {256, 256, run_fwd_hd256, nullptr}}};

// The first that holds both; callers have made sure that there is one.
const Instance& instance_of(const Problem& p) {
  return *std::find_if(kInstances.begin(), kInstances.end() - 1, [&](const Instance& i) {
    return p.head_dim <= i.head_dim && p.head_dim_v <= i.head_dim_v;
  });
}

struct ModInstance {
  int head_dim, head_dim_v;
  std::string (*run)(const FwdParams&, const Modifiers&, const DeviceInfo&);
};
constexpr std::array<ModInstance, 4> kModInstances = {{{64, 64, run_fwd_mod_hd64},
                                                       {128, 128, run_fwd_mod_hd128},
                                                       {192, 192, run_fwd_mod_hd192},
                                                       {256, 256, run_fwd_mod_hd256}}};

// Whether the forward kernels here take it: TMA reads tensors that are ready for it only, and the rows of the output,
// which is contiguous, start on 16 bytes only if head_dim_v is a multiple of 8.
bool is_taken(const Problem& p) { return p.tma_ready && p.head_dim_v % 8 == 0; }

// Few queries of many keys are for the portable kernel that splits the keys, which memory bounds: rows == 0 where they
// are not. What it gains was measured beside tiles of 192 queries, 1.25 times as slow there as lower ones.
SplitGrid split_grid(const Problem& p, const DeviceInfo& d) {
  const SplitGrid g = make_split_grid(p, d);
  return g.rows > 0 && g.gain < 1.25 && is_taken(p) && instance_of(p).is_lower(p, d) ? SplitGrid{} : g;
}
// Whether its backward runs in two kernels (bwd_split.cuh), whose results do not depend on any order.
bool is_wide(const Problem& p) { return padded_head_dim(p.head_dim, p.head_dim_v) > 128; }

// The first that holds both, null for what the portable kernels take: also rows with sinks and no keys at all, because
// TMA wants an address.
const ModInstance* mod_instance_of(const Problem& p, const DeviceInfo& d) {
  if (!is_taken(p) || p.total_k == 0 || is_short_mod(p, d)) return nullptr;
  return &*std::find_if(kModInstances.begin(), kModInstances.end() - 1, [&](const ModInstance& i) {
    return p.head_dim <= i.head_dim && p.head_dim_v <= i.head_dim_v;
  });
}

// Whether the backward kernels here take it; dq and dk, contiguous like the output, want the same of head_dim.
bool is_bwd_taken(const Problem& p, const DeviceInfo& d) {
  return is_taken(p) && p.head_dim % 8 == 0 && !is_short_bwd(p, d);
}

// Head dims of the backward above 128.
struct WideInstance {
  int head_dim, head_dim_v;
  std::string (*run)(const BwdParams&, const DeviceInfo&);
};
constexpr std::array<WideInstance, 3> kWideInstances = {{{192, 128, run_bwd_hd192_v128},
                                                         {192, 192, run_bwd_hd192},
                                                         {256, 256, run_bwd_hd256}}};

const WideInstance& wide_instance_of(const Problem& p) {
  return *std::find_if(kWideInstances.begin(), kWideInstances.end() - 1, [&](const WideInstance& i) {
    return p.head_dim <= i.head_dim && p.head_dim_v <= i.head_dim_v;
  });
}

// The backward with modifiers that adds dQ to memory.
struct BwdModInstance {
  int head_dim;
  std::string (*run)(const BwdParams&, const Modifiers&, const DeviceInfo&);
  std::string (*run_bias)(const BwdParams&, const Modifiers&, const BiasGradient&, const DeviceInfo&);
};
constexpr auto kBwdModInstances =
    std::to_array<BwdModInstance>({{64, run_bwd_mod_hd64, run_bwd_bias_hd64},
                                   {128, run_bwd_mod_hd128, run_bwd_bias_hd128}});

// Whether TMA can read all that a backward with modifiers reads, but for a bias.
bool is_bwd_mod_ready(const Problem& p, const DeviceInfo& d) { return is_bwd_taken(p, d) && p.total_k > 0; }

// Null for larger head dims and what TMA cannot read.
const BwdModInstance* bwd_mod_instance_of(const Problem& p, const DeviceInfo& d) {
  if (!is_bwd_mod_ready(p, d) || is_wide(p)) return nullptr;
  return &*std::find_if(kBwdModInstances.begin(), kBwdModInstances.end() - 1,
                        [&](const BwdModInstance& i) { return bwd_mod_size(p) == i.head_dim; });
}

// And that in two kernels: above head_dim 128, in a fixed order, and with a bias that only those read.
struct TwoKernelInstance {
  int head_dim;
  std::string (*run)(const BwdParams&, const Modifiers&, const DeviceInfo&);
};
constexpr auto kTwoKernelInstances =
    std::to_array<TwoKernelInstance>({{64, run_bwd_mod_det_hd64},
                                      {128, run_bwd_mod_det_hd128},
                                      {192, run_bwd_mod_hd192},
                                      {256, run_bwd_mod_hd256}});
bool wants_two_kernels(const Problem& p, bool deterministic, const DeviceInfo& d) {
  return is_wide(p) || (deterministic && !has_whole_keys(p, d));
}
// The backward without modifiers in the kernel for them, where that stores dq at once.
const BwdModInstance* whole_keys_instance_of(const Problem& p, const DeviceInfo& d) {
  return prefers_whole_keys(p, d) ? bwd_mod_instance_of(p, d) : nullptr;
}

// Which kernels compute dq, dk and dv: at most one of them is not null, neither where the portable ones do.
struct BwdModChoice {
  const BwdModInstance* one = nullptr;
  const TwoKernelInstance* two = nullptr;
};
BwdModChoice choose_bwd_mod(const Problem& p, bool deterministic, const BwdExtras& x, const DeviceInfo& d) {
  BwdModChoice choice;
  if (!x.need_qkv || !is_bwd_mod_ready(p, d)) return choice;
  if (!wants_two_kernels(p, deterministic, d) && is_bwd_mod_taken(p, *x.modifiers)) {
    choice.one = bwd_mod_instance_of(p, d);
  } else if (is_wide_mod_taken(p, *x.modifiers, deterministic)) {
    choice.two = &*std::find_if(kTwoKernelInstances.begin(), kTwoKernelInstances.end() - 1,
                                [&](const TwoKernelInstance& i) { return wide_mod_size(p) == i.head_dim; });
  }
  return choice;
}

std::string why_not_device(const DeviceInfo& d) {
  if (d.cc_major != 9 || d.cc_minor != 0) {
    const std::string found = std::to_string(d.cc_major) + "." + std::to_string(d.cc_minor);
    return "compute capability " + found + " is not 9.0 (Hopper)";
  }
  if (std::strstr(build_info().archs, "9.0a") == nullptr) {
    return std::string("built for ") + build_info().archs + ", without 9.0a";
  }
  if (d.smem_per_block < kSmemLimitLarge) {
    return std::to_string(d.smem_per_block) + " bytes of shared memory per block, " + std::to_string(kSmemLimitLarge) +
           " needed";
  }
  return {};
}

}  // namespace

std::string why_not_fwd(const Problem& p, const DeviceInfo& d) {
  const std::string reason = why_not_device(d);
  return reason.empty() ? sm80::why_not_fwd(p, d) : reason;
}

std::string why_not_bwd(const Problem& p, const DeviceInfo& d) {
  const std::string reason = why_not_device(d);
  return reason.empty() ? sm80::why_not_bwd(p, d) : reason;
}

std::string run_fwd(const FwdParams& p, const DeviceInfo& d) {
  // Here the machine code is that of sm_90a, in which the second of its kernels waits for the first by itself.
  if (is_short(p.problem, d)) return sm80::run_fwd(p, d);
  if (const SplitGrid g = split_grid(p.problem, d); g.rows > 0) return sm80::run_fwd_split(p, g, true);
  if (!is_taken(p.problem)) return sm80::run_fwd(p, d);
  FwdParams prepared = p;
  prepared.problem.prepare();
  const Instance& i = instance_of(p.problem);
  return i.is_lower(p.problem, d) ? i.run_lower(prepared, d) : i.run(prepared, d);
}

std::string run_bwd(const BwdParams& p, const DeviceInfo& d) {
  if (!is_bwd_taken(p.problem, d)) return sm80::run_bwd(p, d);
  BwdParams prepared = p;
  prepared.problem.prepare();
  if (is_wide(p.problem)) return wide_instance_of(p.problem).run(prepared, d);
  if (const BwdModInstance* i = whole_keys_instance_of(p.problem, d)) {
    Modifiers none;
    none.unit_log2 = prepared.problem.abs_scale_log2;
    return i->run(prepared, none, d);
  }
  if (prefers_two_kernels(p.problem, d)) return run_bwd_short_hd128(prepared, d);
  prepared.deterministic = p.deterministic || prefers_order(p.problem, d);
  const int size = padded_head_dim(p.problem.head_dim, p.problem.head_dim_v);
  return size == 64 ? run_bwd_hd64(prepared, d) : size == 96 ? run_bwd_hd96(prepared, d) : run_bwd_hd128(prepared, d);
}

std::string run_fwd_mod(const FwdParams& p, const Modifiers& modifiers, const DeviceInfo& d) {
  const ModInstance* i = mod_instance_of(p.problem, d);
  if (i == nullptr) return sm80::run_fwd_mod(p, modifiers, d);
  FwdParams prepared = p;
  prepared.problem.prepare();
  Modifiers m = modifiers;
  m.unit_log2 = m.is_natural ? kLog2e : prepared.problem.abs_scale_log2;
  return i->run(prepared, m, d);
}

std::string run_bwd_mod(const BwdParams& p, const BwdExtras& x, const DeviceInfo& d) {
  const BwdModInstance* i = bwd_mod_instance_of(p.problem, d);
  const BwdModChoice choice = choose_bwd_mod(p.problem, p.deterministic, x, d);
  const bool has_qkv_kernel = choice.one != nullptr || choice.two != nullptr;
  const bool has_bias_kernel =
      i != nullptr && x.bias != nullptr && is_bias_gradient_taken(p.problem, *x.modifiers, *x.bias);
  // The other gradients are those of the portable kernels, and so are the statistics that they come from.
  if (!has_qkv_kernel || x.bias != nullptr || x.slopes != nullptr || x.modifiers->sinks != nullptr) {
    BwdParams rest = p;
    BwdExtras others = x;
    if (has_qkv_kernel) rest.dq_accum = nullptr;
    others.need_qkv = x.need_qkv && !has_qkv_kernel;
    if (has_bias_kernel) others.bias = nullptr;
    const std::string error = sm80::run_bwd_mod(rest, others, d);
    if (!error.empty()) return error;
  }
  BwdParams prepared = p;
  prepared.problem.prepare();
  Modifiers m = *x.modifiers;
  m.unit_log2 = m.is_natural ? kLog2e : prepared.problem.abs_scale_log2;
  if (has_bias_kernel) {
    const std::string error = i->run_bias(prepared, m, *x.bias, d);
    if (!error.empty()) return error;
  }
  if (!has_qkv_kernel) return {};
  prepared.row_stats += portable_stats_elements(p.problem);
  return choice.one != nullptr ? choice.one->run(prepared, m, d) : choice.two->run(prepared, m, d);
}

}  // namespace flash_ext::sm90
