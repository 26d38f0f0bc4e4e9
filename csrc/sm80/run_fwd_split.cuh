// From a forward request for few queries to launches. Included by its instantiation file only.
#pragma once

#include "../launch.h"
#include "fwd_split.cuh"
#include "instances.h"

namespace flash_ext::sm80 {

template <typename E, int D, int kRows>
std::string launch_fwd_split(const FwdParams& p, const SplitGrid& g, bool early) {
  using T = SplitTraits<E, D, kRows>;
  const std::string error =
      launch("fwd_split_sm80", fwd_split_kernel<T>, g.ctas, T::kThreads, T::kTile.smem_bytes(D), p.stream, p, g);
  if (!error.empty() || g.splits == 1) return error;
  return launch_at(early_if(early), "fwd_merge_sm80", fwd_merge_kernel<E>, g.total_rows, SplitTile::kThreads, 0,
                   p.stream, p, g);
}

template <int D, int kRows>
std::string run_fwd_split_rows(const FwdParams& p, const SplitGrid& g, bool early) {
  return dispatch_dtype(p.problem.dtype, [&]<typename E>() { return launch_fwd_split<E, D, kRows>(p, g, early); });
}

template <int D>
std::string run_fwd_split_hd(const FwdParams& p, const SplitGrid& g, bool early) {
  return g.rows == 16 ? run_fwd_split_rows<D, 16>(p, g, early) : run_fwd_split_rows<D, 64>(p, g, early);
}

}  // namespace flash_ext::sm80
