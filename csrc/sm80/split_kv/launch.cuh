// Launches of the forward for few queries: the parts of the keys, then what adds them up. Included by its instantiation
// file only.
#pragma once

#include "../../launch.h"
#include "../instances.h"
#include "merge.cuh"

namespace flash_ext::sm80 {

template <typename T>
std::string launch_fwd_split_as(const FwdParams& p, const SplitGrid& g, const Launch& l) {
  return launch_planned(l, fwd_split_kernel<T>, T::kThreads, T::kTile.smem_bytes(T::kHeadDim), p.stream, p, g);
}

inline RowEnding ending_of(const FwdCall& c) {
  switch (c.plan.main_launch().kernel) {
    case KernelId::kFwdSplitMod80: return RowEnding::of(c.modifiers);
    case KernelId::kFwdParts90: return {1.f};  // its maxima are scaled
    default: return {c.p.problem.abs_scale_log2};
  }
}

template <int D>
std::string launch_fwd_split(const FwdCall& c, const Launch& l) {
  FwdParams p = c.p;
  p.schedule = part_of<void>(c.workspace, c.plan.workspace.kv_partials);
  const SplitGrid& g = c.plan.split_kv;
  return dispatch_dtype(p.problem.dtype, [&]<typename E>() {
    if (l.kernel == KernelId::kFwdCombine80) {
      return launch_planned(l, fwd_merge_kernel<E>, SplitTile::kThreads, 0, p.stream, p, g, ending_of(c));
    }
    return g.rows == 16 ? launch_fwd_split_as<SplitTraits<E, D, 16>>(p, g, l)
                        : launch_fwd_split_as<SplitTraits<E, D, 64>>(p, g, l);
  });
}

}  // namespace flash_ext::sm80
