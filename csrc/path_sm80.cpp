// The sm80 path on the host: what it accepts, how it would launch, and which instance runs.
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

std::string name(const char* kernel, int d) { return std::string(kernel) + "_sm80_hd" + std::to_string(d); }

LaunchPlan plan_of(const char* kernel, const Problem& p, const DeviceInfo& d, const FwdTile& t, int extra_smem) {
  const int size = padded_head_dim(p.head_dim, p.head_dim_v);
  return {"sm80", name(kernel, size), t.block_m, t.block_n, t.stages, t.threads(), t.smem_bytes(size) + extra_smem,
          make_grid(p, d, true, t.block_m).ctas};
}

LaunchPlan plan_of(const char* kernel, const Problem& p, const DeviceInfo& d, const BwdTile& t, int extra_smem) {
  const int size = padded_head_dim(p.head_dim, p.head_dim_v);
  return {"sm80", name(kernel, size), t.block_m, t.block_n(), t.stages, t.threads(), t.smem_bytes(size) + extra_smem,
          make_grid(p, d, false, t.block_n()).ctas};
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

LaunchPlan short_plan(const char* kernel, const ShortTile& tile, int smem_bytes, const ShortGrid& g) {
  return {"sm80", name(kernel, tile.head_dim), tile.rows, tile.rows, 1, tile.threads(), smem_bytes, g.ctas};
}
LaunchPlan short_fwd_plan(const Problem& p, const BiasView& bias, const DeviceInfo& d) {
  const ShortTile tile = short_tile(p);
  return short_plan("fwd_short", tile, tile.fwd_smem(), short_fwd_grid(p, bias, d));
}
LaunchPlan short_bwd_plan(const Problem& p, const BiasView& bias, const BiasGradient* of_bias, const DeviceInfo& d) {
  const ShortTile tile = short_tile(p);
  return short_plan("bwd_short", tile, tile.bwd_smem(), short_bwd_grid(p, bias, of_bias, d));
}

// Gradients of sinks and slopes alone come from the statistics of rows and the kernel of bias gradients.
bool is_short_bwd_mod(const Problem& p, const BwdExtras& x, const DeviceInfo& d) {
  return is_short_bwd(p, d) && (x.need_qkv || x.bias != nullptr);
}

}  // namespace

std::string why_not_fwd(const Problem& p, const DeviceInfo& d) { return why_not(p, d); }
std::string why_not_bwd(const Problem& p, const DeviceInfo& d) { return why_not(p, d); }

int64_t fwd_workspace(const Problem& p, const DeviceInfo& d) {
  if (is_short(p, d)) return 0;
  if (const SplitGrid g = make_split_grid(p, d); g.rows > 0) return g.workspace_bytes();
  if (!takes_stretches_sm80(p)) return 0;
  const int size = padded_head_dim(p.head_dim, p.head_dim_v);
  const FwdTile t = fwd_tile_sm80(size, class_of(d), takes_stretches_sm80(p));
  return 4 * make_grid(p, d, true, t.block_m).ctas * kept_floats_sm80(t, size);
}
int64_t fwd_mod_workspace(const Problem&, const DeviceInfo&) { return 0; }

BwdWorkspace bwd_workspace(const Problem& p, bool deterministic, const DeviceInfo& d) {
  const int64_t rows = p.total_q * p.num_heads;
  return {2 * rows, deterministic || is_short_bwd(p, d) ? 0 : rows * padded_head_dim(p.head_dim, p.head_dim_v)};
}

BwdWorkspace bwd_mod_workspace(const Problem& p, bool deterministic, const DeviceInfo& d) {
  BwdWorkspace w = bwd_workspace(p, deterministic, d);
  if (has_hiding_bwd_sm80(padded_head_dim(p.head_dim, p.head_dim_v), class_of(d))) {
    w.row_stats_elements += bwd_schedule_words(p);
  }
  return w;
}

LaunchPlan plan_fwd(const Problem& p, const DeviceInfo& d) {
  if (is_short(p, d)) return short_fwd_plan(p, {}, d);
  if (const SplitGrid g = make_split_grid(p, d); g.rows > 0) {
    const int size = padded_split_head_dim(p.head_dim, p.head_dim_v);
    const SplitTile t = split_tile(size, g.rows);
    return {"sm80", name("fwd_split", size), t.rows, t.block_n(), t.slots / 2, SplitTile::kThreads, t.smem_bytes(size),
            g.ctas, g.splits};
  }
  const int size = padded_head_dim(p.head_dim, p.head_dim_v);
  return plan_of("fwd", p, d, fwd_tile_sm80(size, class_of(d), takes_stretches_sm80(p)), 0);
}

LaunchPlan plan_fwd_mod(const Problem& p, const Modifiers& m, const DeviceInfo& d) {
  if (is_short_mod(p, d)) return short_fwd_plan(p, m.bias, d);
  const int size = padded_head_dim(p.head_dim, p.head_dim_v);
  const FwdTile t = fwd_mod_tile_sm80(size, class_of(d));
  return plan_of("fwd_mod", p, d, t,
                 bias_stage_bytes(t.warps, 16 * t.m_blocks(), t.part_n(), t.smem_bytes(size), smem_limit(class_of(d))));
}

// The deterministic mode runs the same kernel without its dQ, then bwd_q.
LaunchPlan plan_bwd(const Problem& p, bool deterministic, const DeviceInfo& d) {
  if (is_short_bwd(p, d)) return short_bwd_plan(p, {}, nullptr, d);
  const int size = padded_head_dim(p.head_dim, p.head_dim_v);
  return plan_of(deterministic ? "bwd+bwd_q" : "bwd", p, d, bwd_tile_sm80(size, class_of(d)), 0);
}

LaunchPlan plan_bwd_mod(const Problem& p, bool deterministic, const BwdExtras& extras, const DeviceInfo& d) {
  if (is_short_bwd_mod(p, extras, d)) return short_bwd_plan(p, extras.modifiers->bias, extras.bias, d);
  const int size = padded_head_dim(p.head_dim, p.head_dim_v);
  const SmemClass c = class_of(d);
  const bool adds = extras.modifiers == nullptr || extras.modifiers->is_natural || !has_hiding_bwd_sm80(size, c);
  LaunchPlan plan = plan_of(deterministic ? "bwd_mod+bwd_q_mod" : "bwd_mod", p, d, bwd_mod_tile_sm80(size, c, adds),
                            bwd_mod_extra_sm80(size, c, adds));
  if (!adds) plan.grid = std::min<int64_t>(plan.grid, d.num_sms);  // its CTAs go on from item to item
  return plan;
}

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
