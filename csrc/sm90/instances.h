// The launchers that csrc/inst/ defines, one per compiled pair of head dims, and the grid they launch.
// No CUDA, no torch.
#pragma once

#include <string>

#include "../grid.h"
#include "bwd_mod_tiles.h"
#include "tiles.h"

namespace flash_ext::sm90 {

std::string run_fwd_hd64(const FwdParams& p, const DeviceInfo& d);
std::string run_fwd_hd96(const FwdParams& p, const DeviceInfo& d);
std::string run_fwd_hd128(const FwdParams& p, const DeviceInfo& d);
std::string run_fwd_lower_hd64(const FwdParams& p, const DeviceInfo& d);
std::string run_fwd_lower_hd96(const FwdParams& p, const DeviceInfo& d);
std::string run_fwd_lower_hd128(const FwdParams& p, const DeviceInfo& d);
std::string run_fwd_hd192(const FwdParams& p, const DeviceInfo& d);
std::string run_fwd_hd192_v128(const FwdParams& p, const DeviceInfo& d);
std::string run_fwd_hd256(const FwdParams& p, const DeviceInfo& d);
std::string run_fwd_mod_hd64(const FwdParams& p, const Modifiers& m, const DeviceInfo& d);
std::string run_fwd_mod_hd128(const FwdParams& p, const Modifiers& m, const DeviceInfo& d);
std::string run_fwd_mod_hd192(const FwdParams& p, const Modifiers& m, const DeviceInfo& d);
std::string run_fwd_mod_hd256(const FwdParams& p, const Modifiers& m, const DeviceInfo& d);
std::string run_bwd_mod_hd64(const BwdParams& p, const Modifiers& m, const DeviceInfo& d);
std::string run_bwd_mod_hd128(const BwdParams& p, const Modifiers& m, const DeviceInfo& d);
std::string run_bwd_mod_det_hd64(const BwdParams& p, const Modifiers& m, const DeviceInfo& d);
std::string run_bwd_mod_det_hd128(const BwdParams& p, const Modifiers& m, const DeviceInfo& d);
std::string run_bwd_mod_hd192(const BwdParams& p, const Modifiers& m, const DeviceInfo& d);
std::string run_bwd_mod_hd256(const BwdParams& p, const Modifiers& m, const DeviceInfo& d);
std::string run_bwd_bias_hd64(const BwdParams& p, const Modifiers& m, const BiasGradient& g, const DeviceInfo& d);
std::string run_bwd_bias_hd128(const BwdParams& p, const Modifiers& m, const BiasGradient& g, const DeviceInfo& d);
std::string run_bwd_hd64(const BwdParams& p, const DeviceInfo& d);
std::string run_bwd_hd96(const BwdParams& p, const DeviceInfo& d);
std::string run_bwd_hd128(const BwdParams& p, const DeviceInfo& d);
std::string run_bwd_short_hd128(const BwdParams& p, const DeviceInfo& d);
std::string run_bwd_hd192(const BwdParams& p, const DeviceInfo& d);
std::string run_bwd_hd192_v128(const BwdParams& p, const DeviceInfo& d);
std::string run_bwd_hd256(const BwdParams& p, const DeviceInfo& d);

// Items in the order in which CTAs take them; `ctas` counts items, of which a CTA takes many. `unequal`: in their keys.
inline Grid fwd_grid(const Problem& p, const DeviceInfo& d, int block_m, bool unequal) {
  Grid g = make_grid(p, d, true, block_m);
  if (g.ctas <= 0 || g.ctas > INT32_MAX) return g;
  int heads = heads_in_group(unequal, g.head_slots, g.blocks, g.heads_in_group.divisor, d.num_sms, p.is_varlen());
  if (!unequal && draws_short_tiles(p, d, block_m)) {
    // Few, so that their K and V come from memory once: 571 TFLOP/s with a sixth to a half of the CTAs in a group
    // (head_dim 128, 512 rows), 551 with twice as many CTAs, 532 with three times.
    heads = std::clamp(d.num_sms / static_cast<int>(4 * g.blocks), 1, static_cast<int>(g.head_slots));
    g.first_block = 0;
  }
  g.group_tiles = Divisor(g.blocks * static_cast<uint32_t>(heads));
  g.heads_in_group = Divisor(static_cast<uint32_t>(heads));
  return g;
}

inline Grid fwd_grid(const Problem& p, const DeviceInfo& d, int block_m) {
  return fwd_grid(p, d, block_m, draws_items(p));
}

}  // namespace flash_ext::sm90
