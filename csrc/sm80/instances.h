// The launchers that csrc/inst/ defines, but for the last one per direction, compiled head dim and class of tiles. No
// CUDA, no torch.
#pragma once

#include <string>

#include "../paths.h"
#include "../short_tiles.h"
#include "../splits.h"

namespace flash_ext::sm80 {

std::string run_fwd_hd64(const FwdParams& p, const DeviceInfo& d);
std::string run_fwd_hd96(const FwdParams& p, const DeviceInfo& d);
std::string run_fwd_hd128(const FwdParams& p, const DeviceInfo& d);
std::string run_fwd_hd192(const FwdParams& p, const DeviceInfo& d);
std::string run_fwd_hd256(const FwdParams& p, const DeviceInfo& d);

std::string run_fwd_large_hd64(const FwdParams& p, const DeviceInfo& d);
std::string run_fwd_large_hd96(const FwdParams& p, const DeviceInfo& d);
std::string run_fwd_large_hd128(const FwdParams& p, const DeviceInfo& d);
std::string run_fwd_large_hd192(const FwdParams& p, const DeviceInfo& d);
std::string run_fwd_large_hd256(const FwdParams& p, const DeviceInfo& d);

std::string run_bwd_hd64(const BwdParams& p, const DeviceInfo& d);
std::string run_bwd_hd96(const BwdParams& p, const DeviceInfo& d);
std::string run_bwd_hd128(const BwdParams& p, const DeviceInfo& d);
std::string run_bwd_hd192(const BwdParams& p, const DeviceInfo& d);
std::string run_bwd_hd256(const BwdParams& p, const DeviceInfo& d);

std::string run_bwd_large_hd64(const BwdParams& p, const DeviceInfo& d);
std::string run_bwd_large_hd96(const BwdParams& p, const DeviceInfo& d);
std::string run_bwd_large_hd128(const BwdParams& p, const DeviceInfo& d);
std::string run_bwd_large_hd192(const BwdParams& p, const DeviceInfo& d);
std::string run_bwd_large_hd256(const BwdParams& p, const DeviceInfo& d);

std::string run_fwd_mod_hd64(const FwdParams& p, const Modifiers& m, const DeviceInfo& d);
std::string run_fwd_mod_hd96(const FwdParams& p, const Modifiers& m, const DeviceInfo& d);
std::string run_fwd_mod_hd128(const FwdParams& p, const Modifiers& m, const DeviceInfo& d);
std::string run_fwd_mod_hd192(const FwdParams& p, const Modifiers& m, const DeviceInfo& d);
std::string run_fwd_mod_hd256(const FwdParams& p, const Modifiers& m, const DeviceInfo& d);

std::string run_fwd_mod_large_hd64(const FwdParams& p, const Modifiers& m, const DeviceInfo& d);
std::string run_fwd_mod_large_hd96(const FwdParams& p, const Modifiers& m, const DeviceInfo& d);
std::string run_fwd_mod_large_hd128(const FwdParams& p, const Modifiers& m, const DeviceInfo& d);
std::string run_fwd_mod_large_hd192(const FwdParams& p, const Modifiers& m, const DeviceInfo& d);
std::string run_fwd_mod_large_hd256(const FwdParams& p, const Modifiers& m, const DeviceInfo& d);

std::string run_bwd_mod_hd64(const BwdParams& p, const BwdExtras& x, const DeviceInfo& d);
std::string run_bwd_mod_hd96(const BwdParams& p, const BwdExtras& x, const DeviceInfo& d);
std::string run_bwd_mod_hd128(const BwdParams& p, const BwdExtras& x, const DeviceInfo& d);
std::string run_bwd_mod_hd192(const BwdParams& p, const BwdExtras& x, const DeviceInfo& d);
std::string run_bwd_mod_hd256(const BwdParams& p, const BwdExtras& x, const DeviceInfo& d);

std::string run_bwd_mod_large_hd64(const BwdParams& p, const BwdExtras& x, const DeviceInfo& d);
std::string run_bwd_mod_large_hd96(const BwdParams& p, const BwdExtras& x, const DeviceInfo& d);
std::string run_bwd_mod_large_hd128(const BwdParams& p, const BwdExtras& x, const DeviceInfo& d);
std::string run_bwd_mod_large_hd192(const BwdParams& p, const BwdExtras& x, const DeviceInfo& d);
std::string run_bwd_mod_large_hd256(const BwdParams& p, const BwdExtras& x, const DeviceInfo& d);

// Few queries of many keys, keys split as `g` says. early: the merge may be launched before the parts are done, for
// machine code of sm_90a alone.
std::string run_fwd_split(const FwdParams& p, const SplitGrid& g, bool early);  // path_sm80.cpp
std::string run_fwd_split_hd64(const FwdParams& p, const SplitGrid& g, bool early);
std::string run_fwd_split_hd128(const FwdParams& p, const SplitGrid& g, bool early);
std::string run_fwd_split_hd256(const FwdParams& p, const SplitGrid& g, bool early);

// Short sequences, with modifiers or without, and the gradient of a bias where bias.out is not null.
std::string run_fwd_short_hd32(const FwdParams& p, const Modifiers& m, const ShortGrid& g);
std::string run_fwd_short_hd64(const FwdParams& p, const Modifiers& m, const ShortGrid& g);
std::string run_fwd_short_hd128(const FwdParams& p, const Modifiers& m, const ShortGrid& g);
std::string run_fwd_short_hd256(const FwdParams& p, const Modifiers& m, const ShortGrid& g);
std::string run_bwd_short_hd32(const BwdParams& p, const Modifiers& m, const BiasGradient& bias, const ShortGrid& g);
std::string run_bwd_short_hd64(const BwdParams& p, const Modifiers& m, const BiasGradient& bias, const ShortGrid& g);
std::string run_bwd_short_hd128(const BwdParams& p, const Modifiers& m, const BiasGradient& bias, const ShortGrid& g);

// Any head dim.
std::string run_bwd_bias(const BwdParams& p, const Modifiers& m, const BiasGradient& g, const DeviceInfo& d);
std::string run_bwd_bias_large(const BwdParams& p, const Modifiers& m, const BiasGradient& g, const DeviceInfo& d);

}  // namespace flash_ext::sm80
