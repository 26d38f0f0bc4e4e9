// Launches of the split Hopper backward with modifiers, for one compiled head dim. Included by the instantiation files
// only.
#pragma once

#include "../bwd_mod/launch.cuh"
#include "kernel.cuh"

namespace flash_ext::sm90 {

template <typename T>
std::string launch_bwd_split_mod_as(const BwdCall& c, const Launch& l) {
  const Problem& r = c.p.problem;
  const Modifiers& m = c.modifiers;
  SplitModArgs a{};
  a.plain = make_bwd_args(c, l, T::kStatRows, T::kByQueries);
  a.m = m;
  if (T::kCaps) a.cap = key_cap(r, m);
  a.unit = T::kCaps ? m.softcap * kLog2e : m.has_score_mod ? kLog2e : r.scale * kLog2e;
  BwdMaps maps{};
  const std::string error = encode_bwd_maps(maps, c.p, T::kByQueries ? 64 : T::kBlockM, T::kBlockN);
  if (!error.empty()) return "bwd_mod_sm90: " + error;
  return launch_planned(l, bwd_split_sm90_kernel<T>, T::kThreads, T::kSmemBytes, c.p.stream, a, maps);
}

template <typename E, int D, ScoreKind kKind>
std::string launch_bwd_split_mod_kind(const BwdCall& c, const Launch& l) {
  return l.kernel == KernelId::kBwdDqMod90 ? launch_bwd_split_mod_as<DqTraits<E, D, D, kKind>>(c, l)
                                           : launch_bwd_split_mod_as<DkdvTraits<E, D, D, kKind>>(c, l);
}

template <int D>
std::string launch_bwd_split_mod(const BwdCall& c, const Launch& l) {
  return dispatch_dtype(c.p.problem.dtype, [&]<typename E>() -> std::string {
    switch (l.variant) {
      case ScoreVariant::kCap: return launch_bwd_split_mod_kind<E, D, ScoreKind::kCapping>(c, l);
      case ScoreVariant::kAddDrop: return launch_bwd_split_mod_kind<E, D, ScoreKind::kAddingDropping>(c, l);
      case ScoreVariant::kAdd: return launch_bwd_split_mod_kind<E, D, ScoreKind::kAdding>(c, l);
      case ScoreVariant::kHide: return launch_bwd_split_mod_kind<E, D, ScoreKind::kHiding>(c, l);
      default: return not_compiled(l);
    }
  });
}

}  // namespace flash_ext::sm90
