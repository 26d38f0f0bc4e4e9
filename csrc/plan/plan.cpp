// The first row that fits, GQA splits around it, and names.
#include "../plan.h"

#include "../bias_rows.h"
#include "../gqa_splits.h"
#include "table.h"

namespace flash_ext {
namespace {

using plans::Family;
using plans::Row;

// The row that a request asks for, if it is one of its own direction.
std::string_view row_for(const Request& r) {
  const bool is_backward = r.constraints.row.find("bwd") != std::string_view::npos;
  return is_backward == (r.direction == Direction::kBackward) ? r.constraints.row : std::string_view();
}

Plan plan_of_rows(const Request& r, const DeviceInfo& d, Arch arch) {
  const bool forward = r.direction == Direction::kForward;
  const bool modified = r.modifiers != nullptr;
  const bool is_fp8 = r.operands != Operands::k16Bit;
  const Family family = is_fp8               ? Family::kFwdFp8
                        : r.cache != nullptr ? Family::kFwdCached
                        : forward            ? (modified ? Family::kFwdMod : Family::kFwd)
                                             : (modified ? Family::kBwdMod : Family::kBwd);
  Plan p;
  p.arch = arch;
  for (const Row& row : forward ? plans::fwd_rows(arch) : plans::bwd_rows(arch)) {
    if (row.family != family || !row.supports(r, d)) continue;
    const std::string_view wanted = row_for(r);
    const bool is_asked_for = wanted.empty() ? row.preferred == nullptr || row.preferred(r, d) : wanted == row.name;
    if (!is_asked_for) continue;
    p.row = row.name, p.evidence = row.evidence;
    row.build(r, d, p);
    return p;
  }
  return p;
}

// Into how many parts a backward divides the query heads of a key head (gqa_splits.h).
int gqa_splits_of(const Request& r, const DeviceInfo& d, Arch arch) {
  if (r.direction == Direction::kForward || r.modifiers != nullptr || !can_split_gqa(r.problem)) return 1;
  if (r.constraints.gqa_splits) {
    const int group = r.problem.num_heads / r.problem.num_heads_k, wanted = *r.constraints.gqa_splits;
    return wanted > 0 && wanted <= group && group % wanted == 0 ? wanted : 1;
  }
  if (d.batch_invariant) return 1;  // how many pay depends on the whole call, and each is rounded by itself
  const Plan whole = plan_of_rows(r, d, arch);
  return whole.row.empty() || whole.q_splits > 1 ? 1
                                                 : best_gqa_splits(r.problem, whole.main_launch().block_n, d.num_sms);
}

// What tells instances of one name and head_dim apart.
const char* suffix_of(const Launch& l) {
  switch (l.kernel) {
    case KernelId::kFwdParts90: return "_parts";
    case KernelId::kFwd90: return l.block_m == 64 ? "_m64" : l.head_dim <= 128 && l.block_m == 128 ? "_m128" : "";
    case KernelId::kFwdFp890:
      return l.variant == ScoreVariant::kMixed ? "_mixed" : l.variant == ScoreVariant::kHalf ? "_half" : "";
    case KernelId::kFwdMod90: return l.block_m > 128 ? "_m192" : "";
    case KernelId::kFwdSplitCachedMod80: return l.variant == ScoreVariant::kAll ? "_all" : "";
    case KernelId::kFwdSplitQuantized80:
      if (l.variant == ScoreVariant::kAll) return l.cache_type == CacheType::kInt8 ? "_int8_all" : "_e4m3_all";
      return l.cache_type == CacheType::kInt8 ? "_int8" : "_e4m3";
    case KernelId::kFwdPackedQuantized90:
    case KernelId::kFwdPackedQuantizedMod90: return l.cache_type == CacheType::kInt8 ? "_int8" : "_e4m3";
    case KernelId::kBwdFused90:
      return l.dq == DqMode::kOrdered   ? "_det"
             : l.dq == DqMode::kPool    ? "_pool"
             : l.dq == DqMode::kStored  ? (l.threads > 256 ? "_stored" : "_stored1")
             : l.dq == DqMode::kDivided ? "_divided"
                                        : "";
    case KernelId::kBwdDkdvShort90: return "_dkdv";
    case KernelId::kBwdDkdvMod90: return l.head_dim <= 128 ? "_det" : "";
    default: return "";
  }
}

}  // namespace

const char* stem_of(KernelId k) {
  switch (k) {
    case KernelId::kNone: return "none";
    case KernelId::kFwd80: return "fwd_sm80";
    case KernelId::kFwdShort80: return "fwd_short_sm80";
    case KernelId::kFwdMod80: return "fwd_mod_sm80";
    case KernelId::kFwdSplitKv80: return "fwd_split_sm80";
    case KernelId::kFwdSplitMod80: return "fwd_split_mod_sm80";
    case KernelId::kFwdSplitCachedMod80: return "fwd_split_cached_mod_sm80";
    case KernelId::kFwdCombine80: return "fwd_combine_sm80";
    case KernelId::kFwdSplitQuantized80: return "fwd_split_quantized_sm80";
    case KernelId::kFwdSplitCached80: return "fwd_split_cached_sm80";
    case KernelId::kFwdMergeCached80: return "fwd_merge_cached_sm80";
    case KernelId::kFwdCached80: return "fwd_cached_sm80";
    case KernelId::kRowStats80: return "bwd_preprocess_sm80";
    case KernelId::kBwd80: return "bwd_sm80";
    case KernelId::kBwdShort80: return "bwd_short_sm80";
    case KernelId::kBwdMod80: return "bwd_mod_sm80";
    case KernelId::kBwdDq80: return "bwd_q_sm80";
    case KernelId::kBwdDqMod80: return "bwd_q_mod_sm80";
    case KernelId::kDqConvert80: return "bwd_postprocess_sm80";
    case KernelId::kDbias80: return "bwd_bias_sm80";
    case KernelId::kFwd90: return "fwd_sm90";
    case KernelId::kFwdParts90: return "fwd_sm90";
    case KernelId::kFwdFp890: return "fwd_fp8_sm90";
    case KernelId::kFwdMod90: return "fwd_mod_sm90";
    case KernelId::kRowStatsAndZero90: return "row_stats_and_zero_sm90";
    case KernelId::kRowStats90: return "row_stats_sm90";
    case KernelId::kBwdFused90: return "bwd_sm90";
    case KernelId::kDqConvert90: return "dq_convert_sm90";
    case KernelId::kBwdDkdv90: return "bwd_sm90";
    case KernelId::kBwdDq90: return "bwd_q_sm90";
    case KernelId::kBwdDkdvShort90: return "bwd_sm90";
    case KernelId::kBwdFusedMod90: return "bwd_mod_sm90";
    case KernelId::kBwdDkdvMod90: return "bwd_mod_sm90";
    case KernelId::kBwdDqMod90: return "bwd_q_mod_sm90";
    case KernelId::kDbias90: return "bwd_bias_sm90";
    case KernelId::kSumParts: return "sum_parts";
    case KernelId::kFwdCached90: return "fwd_cached_sm90";
    case KernelId::kFwdPacked90: return "fwd_packed_sm90";
    case KernelId::kFwdPackedQuantized90: return "fwd_packed_quantized_sm90";
    case KernelId::kFwdPackedMod90: return "fwd_packed_mod_sm90";
    case KernelId::kFwdPackedQuantizedMod90: return "fwd_packed_quantized_mod_sm90";
    case KernelId::kFwdLatent90: return "fwd_latent_sm90";
    case KernelId::kAlignBias: return "align_bias_rows";
  }
  return "?";
}

namespace {

// Whether the kernels of a plan take a bias whose rows do not begin on 16 bytes. They are all that read it.
bool reads_unaligned(const Plan& p) {
  for (const Launch& l : p.steps()) {
    switch (l.kernel) {
      case KernelId::kFwdShort80:
      case KernelId::kBwdShort80:
      case KernelId::kRowStats80:
      case KernelId::kRowStats90:
      case KernelId::kRowStatsAndZero90:
      case KernelId::kDqConvert80:
      case KernelId::kDqConvert90: break;
      case KernelId::kFwdMod90:
        if (l.variant != ScoreVariant::kLooseBias) return false;
        break;
      default: return false;
    }
  }
  return true;
}

}  // namespace

Plan plan(const Request& r, const DeviceInfo& d, Arch arch) {
  if (r.modifiers != nullptr && r.modifiers->bias.is_unaligned) {
    const BiasView& bias = r.modifiers->bias;
    const BiasRows rows = rows_of(bias, r.problem);
    Modifiers m = *r.modifiers;
    m.bias = copied(bias, rows, bias.ptr);
    m.bias.is_loose = is_loose(bias, r.problem);
    Request of_copy = r;
    of_copy.modifiers = &m;
    Plan p = plan(of_copy, d, arch);
    if (reads_unaligned(p)) return p;
    p.workspace.bias_rows = p.workspace.add(rows.bytes());
    std::copy_backward(p.launches.begin(), p.launches.end() - 1, p.launches.end());
    p.launches[0] = plans::pass(KernelId::kAlignBias, 0, 0, rows.ctas(), BiasRows::kThreads);
    ++p.num_launches;
    ++p.main;
    return p;
  }
  const int splits = gqa_splits_of(r, d, arch);
  if (splits == 1) return plan_of_rows(r, d, arch);
  Request parts = r;
  parts.problem = in_parts(r.problem, splits);
  parts.constraints.q_splits = 1;
  Plan p = plan_of_rows(parts, d, arch);
  p.gqa_splits = splits;
  plans::push_head_sums(r.problem, p, splits);
  return p;
}

std::vector<RowName> row_names() {
  std::vector<RowName> names;
  for (const Arch arch : {Arch::kSm90, Arch::kSm80}) {
    for (const auto rows : {plans::fwd_rows(arch), plans::bwd_rows(arch)}) {
      for (const Row& row : rows) names.push_back({arch, row.name, row.evidence});
    }
  }
  return names;
}

std::string_view name_of(Evidence e) {
  switch (e) {
    case Evidence::kNone: return "";
    case Evidence::kShort: return "short";
    case Evidence::kSplitKv: return "split-kv";
    case Evidence::kGrid: return "grid";
    case Evidence::kM64: return "m64";
    case Evidence::kM192: return "m192";
    case Evidence::kMaskedM192: return "masked-m192";
    case Evidence::kMaskedVariants: return "masked-variants";
    case Evidence::kSplitBwdWide: return "split-bwd-wide";
    case Evidence::kSplitBwdShort: return "split-bwd-short";
    case Evidence::kWholeKeys: return "whole-keys";
    case Evidence::kOrderedShort: return "ordered-short";
    case Evidence::kDqPool: return "dq-pool";
    case Evidence::kSplitBwdMod: return "split-bwd-mod";
    case Evidence::kFusedBwdMod: return "fused-bwd-mod";
    case Evidence::kFwdParts: return "fwd-parts";
    case Evidence::kPaged: return "paged";
  }
  return "?";
}

std::string name_of(const Launch& l) {
  std::string name = stem_of(l.kernel);
  if (l.head_dim > 0) name += "_hd" + std::to_string(l.head_dim);
  if (l.head_dim_v > 0 && l.head_dim_v != l.head_dim) name += "_v" + std::to_string(l.head_dim_v);
  return name + suffix_of(l);
}

std::string name_of(const Plan& p) {
  const std::string name = name_of(p.main_launch());
  const KernelId after =
      p.main + 1 < p.num_launches ? p.launches[static_cast<size_t>(p.main) + 1].kernel : KernelId::kNone;
  const size_t sm80 = name.find("_sm80");
  if (sm80 == std::string::npos) return name;
  if (after == KernelId::kBwdDq80) return name.substr(0, sm80) + "+bwd_q" + name.substr(sm80);
  if (after == KernelId::kBwdDqMod80) return name.substr(0, sm80) + "+bwd_q_mod" + name.substr(sm80);
  return name;
}

}  // namespace flash_ext
