// What the launches of the forwards for few queries share.
#pragma once

#include "../instances.h"
#include "merge.cuh"

namespace flash_ext::sm80 {

// With the place of what parts of the keys leave.
inline FwdParams params_of(const FwdCall& c) {
  FwdParams p = c.p;
  p.kept = part_of<void>(c.workspace, c.plan.workspace.kv_partials);
  return p;
}

// Of the parts that the main kernel of a plan leaves.
inline RowEnding ending_of(const FwdCall& c) {
  switch (c.plan.main_launch().kernel) {
    case KernelId::kFwdSplitMod80:
    case KernelId::kFwdSplitCachedMod80:
    case KernelId::kFwdSplitQuantized80:
    case KernelId::kFwdPackedMod90:
    case KernelId::kFwdPackedQuantizedMod90: return RowEnding::of(c.modifiers);
    case KernelId::kFwdParts90: return {1.f};  // its maxima are scaled
    default: return {c.p.problem.abs_scale_log2, c.modifiers.sinks};
  }
}

// launch<Traits>() of the tile of so many rows.
template <typename E, int D, typename LaunchTile>
std::string with_tile(int rows, const LaunchTile& launch) {
  return rows == 16 ? launch.template operator()<SplitTraits<E, D, 16>>()
                    : launch.template operator()<SplitTraits<E, D, 64>>();
}

}  // namespace flash_ext::sm80
