// Launches of the forward for few queries with modifiers. Included by its instantiation file only.
#pragma once

#include "../../launch.h"
#include "../instances.h"
#include "mod.cuh"

namespace flash_ext::sm80 {

template <int D>
std::string launch_fwd_split_mod(const FwdCall& c, const Launch& l) {
  FwdParams p = c.p;
  p.schedule = part_of<void>(c.workspace, c.plan.workspace.kv_partials);
  const SplitGrid& g = c.plan.split_kv;
  return dispatch_dtype(p.problem.dtype, [&]<typename E>() {
    const auto launch_tile = [&]<typename T>(std::type_identity<T>) {
      return launch_planned(l, fwd_split_mod_kernel<T>, T::kThreads, T::kTile.smem_bytes(D), p.stream, p, g,
                            c.modifiers);
    };
    return g.rows == 16 ? launch_tile(std::type_identity<SplitTraits<E, D, 16>>())
                        : launch_tile(std::type_identity<SplitTraits<E, D, 64>>());
  });
}

}  // namespace flash_ext::sm80
