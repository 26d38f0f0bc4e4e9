// Runs the launches of a plan: finds the instance of each and hands it its part of the workspace.
#include <algorithm>

#include "call.h"
#include "dense_cache.h"
#include "gqa_splits.h"
#include "sm80/instances.h"
#include "sm90/instances.h"

namespace flash_ext {
namespace {

// The unit that scores are kept in (Modifiers::unit_log2).
void prepare(Problem& p, Modifiers& m) {
  p.prepare();
  m.unit_log2 = m.has_score_mod ? kLog2e : p.abs_scale_log2;
}

template <typename Call>
std::string launch_in(std::initializer_list<std::span<const Instance<Call>>> tables, const Call& call,
                      const Launch& l) {
  for (const auto& table : tables) {
    for (const Instance<Call>& i : table) {
      if (i.head_dim == l.head_dim && i.head_dim_v == l.head_dim_v) return i.launch(call, l);
    }
  }
  return name_of(l) + " is not compiled for these head sizes";
}

std::string launch(const FwdCall& c, const Launch& l) {
  const bool large = l.smem_class == SmemClass::kLarge;
  switch (l.kernel) {
    case KernelId::kFwd80: return launch_in({large ? sm80::kFwdLarge : sm80::kFwdSmall}, c, l);
    case KernelId::kFwdMod80: return launch_in({large ? sm80::kFwdModLarge : sm80::kFwdModSmall}, c, l);
    case KernelId::kFwdShort80: return launch_in({sm80::kFwdShort}, c, l);
    case KernelId::kFwdSplitKv80:
    case KernelId::kFwdCombine80: return launch_in({sm80::kFwdSplit}, c, l);
    case KernelId::kFwdSplitMod80: return launch_in({sm80::kFwdSplitMod}, c, l);
    case KernelId::kFwdSplitCachedMod80: return launch_in({sm80::kFwdSplitCachedMod}, c, l);
    case KernelId::kFwdSplitQuantized80: return launch_in({sm80::kFwdSplitQuantized}, c, l);
    case KernelId::kFwdSplitCached80:
    case KernelId::kFwdMergeCached80: return launch_in({sm80::kFwdSplitCached}, c, l);
    case KernelId::kFwdCached80: return launch_in({large ? sm80::kFwdCachedLarge : sm80::kFwdCachedSmall}, c, l);
    case KernelId::kFwd90: return launch_in({sm90::kFwd}, c, l);
    case KernelId::kFwdCached90: return launch_in({sm90::kFwdCached}, c, l);
    case KernelId::kFwdPacked90: return launch_in({sm90::kFwdPacked}, c, l);
    case KernelId::kFwdPackedMod90: return launch_in({sm90::kFwdPackedMod}, c, l);
    case KernelId::kFwdPackedQuantized90: return launch_in({sm90::kFwdPackedQuantized}, c, l);
    case KernelId::kFwdPackedQuantizedMod90: return launch_in({sm90::kFwdPackedQuantizedMod}, c, l);
    case KernelId::kFwdParts90: return launch_in({sm90::kFwdParts}, c, l);
    case KernelId::kFwdLatent90: return launch_in({sm90::kFwdLatent}, c, l);
    case KernelId::kFwdFp890:
      return launch_in({l.variant == ScoreVariant::kMixed  ? sm90::kFwdMixed
                        : l.variant == ScoreVariant::kHalf ? sm90::kFwdSmallFp8
                                                           : sm90::kFwdFp8},
                       c, l);
    case KernelId::kFwdMod90: return launch_in({sm90::kFwdModUpTo128, sm90::kFwdModAbove128}, c, l);
    case KernelId::kAlignBias: return align_bias_rows(c.bias_rows, c.p.stream);
    default: return name_of(l) + " is no kernel of a forward";
  }
}

// Adds the parts of dk and dv, which stand in the places of gradients.
std::string sum_parts(const Launch& l, const BwdCall& c) {
  const Problem& whole = c.whole.problem;
  const PartsOfGradients parts{static_cast<const float*>(c.p.dk.ptr), static_cast<const float*>(c.p.dv.ptr)};
  if (c.plan.q_splits > 1) {
    return sum_heads(l, whole, whole.num_heads_k, c.plan.q_splits, parts, c.whole.dk, c.whole.dv, c.p.stream);
  }
  const int heads = whole.num_heads_k;
  return sum_heads(l, c.p.problem, 1, c.p.problem.num_heads_k, parts, grouped(c.whole.dk, whole, heads),
                   grouped(c.whole.dv, whole, heads), c.p.stream);
}

std::string launch(const BwdCall& c, const Launch& l) {
  const bool large = l.smem_class == SmemClass::kLarge;
  switch (l.kernel) {
    case KernelId::kRowStats80:
    case KernelId::kBwd80:
    case KernelId::kBwdDq80:
    case KernelId::kDqConvert80: return launch_in({large ? sm80::kBwdLarge : sm80::kBwdSmall}, c, l);
    case KernelId::kBwdMod80:
    case KernelId::kBwdDqMod80: return launch_in({large ? sm80::kBwdModLarge : sm80::kBwdModSmall}, c, l);
    case KernelId::kBwdShort80: return launch_in({sm80::kBwdShort}, c, l);
    case KernelId::kDbias80: return large ? sm80::launch_dbias_large(c, l) : sm80::launch_dbias_small(c, l);
    case KernelId::kRowStatsAndZero90:
    case KernelId::kBwdFused90:
    case KernelId::kDqConvert90: return launch_in({sm90::kBwdFused}, c, l);
    case KernelId::kRowStats90: return launch_in({sm90::kRowStats}, c, l);
    case KernelId::kBwdDkdvShort90:
    case KernelId::kBwdDkdv90:
    case KernelId::kBwdDq90: return launch_in({sm90::kBwdSplit}, c, l);
    case KernelId::kBwdFusedMod90: return launch_in({sm90::kBwdFusedMod}, c, l);
    case KernelId::kBwdDkdvMod90:
    case KernelId::kBwdDqMod90: return launch_in({sm90::kBwdSplitModUpTo128, sm90::kBwdSplitModAbove128}, c, l);
    case KernelId::kDbias90: return launch_in({sm90::kDbias}, c, l);
    case KernelId::kAlignBias: return align_bias_rows(c.bias_rows, c.p.stream);
    case KernelId::kSumParts: return sum_parts(l, c);
    default: return name_of(l) + " is no kernel of a backward";
  }
}

// Where the plan has a place for a copy of the bias, that is what kernels read.
template <typename Call>
void read_copied_bias(Call& call) {
  BiasView& bias = call.modifiers.bias;
  if (!call.plan.workspace.bias_rows) return;
  call.bias_rows = rows_of(bias, call.p.problem);
  call.bias_rows.to = part_of<std::byte>(call.workspace, call.plan.workspace.bias_rows);
  bias = copied(bias, call.bias_rows, call.bias_rows.to);
}

template <typename Call>
std::string run_all(Call& call) {
  read_copied_bias(call);
  for (const Launch& l : call.plan.steps()) {
    const std::string error = launch(call, l);
    if (!error.empty()) return error;
  }
  return {};
}

}  // namespace

std::string run(FwdCall call) {
  if (call.cache.max_keys == 0) call.cache = cache_of(call.p.problem);
  prepare(call.p.problem, call.modifiers);
  return run_all(call);
}

std::string run(BwdCall call) {
  const Workspace& w = call.plan.workspace;
  if (call.plan.gqa_splits > 1) {
    call.whole = call.p;
    call.p = in_parts(call.whole, call.plan.gqa_splits, part_of<float>(call.workspace, w.dk_partials),
                      part_of<float>(call.workspace, w.dv_partials));
  } else if (call.plan.q_splits > 1) {
    call.whole = call.p;
    call.p = in_query_splits(call.whole, call.plan.q_splits, part_of<float>(call.workspace, w.dk_partials),
                             part_of<float>(call.workspace, w.dv_partials));
  }
  prepare(call.p.problem, call.modifiers);
  return run_all(call);
}

BwdParams BwdCall::portable(const Launch& l) const {
  BwdParams x = p;
  const Workspace& w = plan.workspace;
  x.row_stats = part_of<float>(workspace, w.stats_portable);
  x.dq_accum = l.dq == DqMode::kAtomic ? part_of<float>(workspace, w.dq_accum) : nullptr;
  return x;
}

BwdParams BwdCall::hopper() const {
  BwdParams x = p;
  x.row_stats = part_of<float>(workspace, plan.workspace.row_stats);
  x.dq_accum = part_of<float>(workspace, plan.workspace.dq_accum);
  return x;
}

}  // namespace flash_ext
