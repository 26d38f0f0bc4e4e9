// From a forward request with modifiers to launches. Included by the instantiation files only.
#pragma once

#include "../grid.h"
#include "../launch.h"
#include "fwd_mod.cuh"
#include "instances.h"

namespace flash_ext::sm80 {

// The kernel with the least beside what a call asks for.
inline FwdModKind fwd_mod_kind(const Problem& p, const Modifiers& m) {
  if (!m.is_natural) {
    if (p.score_factor != 1.f) return FwdModKind::kEverything;
    return m.rng == nullptr ? FwdModKind::kHides : FwdModKind::kDrops;
  }
  const bool far_bias = m.bias.ptr != nullptr && !m.bias.staged;
  if (m.rng != nullptr || far_bias || m.softcap > kFineSoftcap) return FwdModKind::kEverything;
  return FwdModKind::kChanges;
}

template <typename E, int D, SmemClass kClass, FwdModKind kKind>
std::string launch_fwd_mod_kind(const FwdParams& p, const Modifiers& m, const DeviceInfo& d) {
  using T = FwdModTraits<E, D, kClass, kKind>;
  const Grid g = make_grid(p.problem, d, true, T::kBlockM);
  return launch_at(early_if(m.follows_pass), "fwd_mod_sm80", fwd_mod_kernel<T>, g.ctas, T::kThreads, T::kSmemBytes,
                   p.stream, p, m, g);
}

template <typename E, int D, SmemClass kClass>
std::string launch_fwd_mod(const FwdParams& p, const Modifiers& m, const DeviceInfo& d) {
  if constexpr (has_fwd_mod_kinds(D, kClass)) {
    switch (fwd_mod_kind(p.problem, m)) {
      case FwdModKind::kHides: return launch_fwd_mod_kind<E, D, kClass, FwdModKind::kHides>(p, m, d);
      case FwdModKind::kDrops: return launch_fwd_mod_kind<E, D, kClass, FwdModKind::kDrops>(p, m, d);
      case FwdModKind::kChanges: return launch_fwd_mod_kind<E, D, kClass, FwdModKind::kChanges>(p, m, d);
      default: break;
    }
  }
  return launch_fwd_mod_kind<E, D, kClass, FwdModKind::kEverything>(p, m, d);
}

template <int D, SmemClass kClass>
std::string run_fwd_mod_hd(const FwdParams& p, const Modifiers& m, const DeviceInfo& d) {
  return dispatch_dtype(p.problem.dtype, [&]<typename E>() { return launch_fwd_mod<E, D, kClass>(p, m, d); });
}

}  // namespace flash_ext::sm80
