// Tile shapes of the sm90 backward with modifiers, for the host and the kernels alike. No CUDA, no torch.
#pragma once

#include "../mask_kinds.h"
#include "../modifiers.h"
#include "bwd_tiles.h"

namespace flash_ext::sm90 {

// As the plain backward whose warpgroups work together: 128 keys, 64 each. A tile of a bias has its own place: of 16 bits,
// and where there is room of 32.
struct BwdModTile {
  int slots;  // tiles of Q and of dO in the ring

  static constexpr int kBlockM = 64, kBlockN = 128, kThreads = 384, kDsSlots = 3;
  static constexpr bool has_float_bias(int d) { return d <= 64; }
  static constexpr int bias_bytes(int d) { return kBlockM * kBlockN * (has_float_bias(d) ? 4 : 2); }
  static constexpr int kStageBytes = 8 * 4096;  // for each consumer warp 32 floats a lane
  constexpr int control_bytes() const { return slots > 2 ? 3072 : 2048; }
  constexpr BwdTile plain() const { return {false, slots, true}; }
  constexpr int smem_bytes(int d) const {
    return plain().smem_bytes(d) - plain().finishing_bytes() - BwdTile::kControlBytes + bias_bytes(d) + control_bytes();
  }
};

constexpr BwdModTile bwd_mod_tile(int d) { return {d <= 64 ? 4 : 2}; }

static_assert(bwd_mod_tile(64).smem_bytes(64) <= kSmemLimitLarge &&
              bwd_mod_tile(128).smem_bytes(128) <= kSmemLimitLarge);

// The compiled head_dim that a problem of up to 128 runs in.
inline int bwd_mod_size(const Problem& p) { return std::max(p.head_dim, p.head_dim_v) <= 64 ? 64 : 128; }

// Whether all keys of a sequence lie in one block: what a step gives of dQ is then all of it, and is stored at once,
// without sums in memory, a pass that zeroes and one that converts. Up to head_dim 64 calls without modifiers take this
// kernel for it, in which both warpgroups have keys: 128 rows, causal, head_dim 32 938 us for
// 1267.
inline bool has_whole_keys(const Problem& p, const DeviceInfo& d) {
  return d.short_kernels != 0 && !p.is_varlen() && p.seqlen_k <= BwdModTile::kBlockN &&
         std::max(p.head_dim, p.head_dim_v) <= 128;
}
inline bool prefers_whole_keys(const Problem& p, const DeviceInfo& d) {
  return has_whole_keys(p, d) && bwd_mod_size(p) == 64 && d.dq_ring < 0;
}

// Whether every tile of queries sees some key, so that a step visits it.
inline bool visits_all_queries(const Problem& p, const Modifiers& m) {
  const bool hides = asks_any<kHidingKinds>(m) || p.window_left >= 0;
  return !hides && (p.window_right < 0 || m.top_left || p.seqlen_q <= p.seqlen_k);
}

// Not what there is no kernel for: a softcap together with dropout or with anything that is added to scores. Nor a bias
// that TMA cannot read and that differs from row to row: read from global memory it is slower here.
inline bool is_bwd_mod_taken(const Problem& p, const Modifiers& m) {
  const bool adds = m.slopes != nullptr || m.bias.ptr != nullptr;
  if (m.softcap > 0.f && (adds || m.rng != nullptr)) return false;
  if (m.bias.ptr == nullptr) return true;
  if (m.bias.is_float && m.bias.row_stride != 0) return m.bias.aligned && BwdModTile::has_float_bias(bwd_mod_size(p));
  return m.bias.row_stride != 0 ? m.bias.staged : m.bias.rows >= (p.is_varlen() ? p.total_q : p.seqlen_q);
}

// What bwd_bias.cuh computes: the gradient of a bias, element by element, of dense calls that hide keys by intervals only
// and add nothing else.
inline bool is_bias_gradient_taken(const Problem& p, const Modifiers& m, const BiasGradient& g) {
  const bool is_elementwise = !g.is_slope && !g.sum_rows && !g.sum_cols;
  const bool is_whole = g.rows == p.seqlen_q && g.cols == p.seqlen_k;
  const bool is_alone = m.bias.row_stride != 0 && m.slopes == nullptr && m.softcap == 0.f && m.rng == nullptr;
  return !p.is_varlen() && is_elementwise && is_whole && is_alone && asks_only<kSharedIntervals>(m);
}

// fp32 elements of the rows' statistics as the portable kernels have them, for gradients of biases, slopes and sinks. Those
// of this path follow, on 16 bytes, then counters for two kernels (Workspace in plan.h).
inline int64_t portable_stats_elements(const Problem& p) { return (2 * p.total_q * p.num_heads + 3) / 4 * 4; }

}  // namespace flash_ext::sm90
