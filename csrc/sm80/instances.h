// The launchers that csrc/inst/ defines, one per direction and compiled head dim but for the last. No CUDA, no torch.
#pragma once

#include <string>

#include "../heuristics.h"
#include "../paths.h"

namespace flash_ext::sm80 {

std::string run_fwd_hd64(const FwdParams& p, SmemClass c, const DeviceInfo& d);
std::string run_fwd_hd96(const FwdParams& p, SmemClass c, const DeviceInfo& d);
std::string run_fwd_hd128(const FwdParams& p, SmemClass c, const DeviceInfo& d);
std::string run_fwd_hd192(const FwdParams& p, SmemClass c, const DeviceInfo& d);
std::string run_fwd_hd256(const FwdParams& p, SmemClass c, const DeviceInfo& d);

std::string run_bwd_hd64(const BwdParams& p, SmemClass c, const DeviceInfo& d);
std::string run_bwd_hd96(const BwdParams& p, SmemClass c, const DeviceInfo& d);
std::string run_bwd_hd128(const BwdParams& p, SmemClass c, const DeviceInfo& d);
std::string run_bwd_hd192(const BwdParams& p, SmemClass c, const DeviceInfo& d);
std::string run_bwd_hd256(const BwdParams& p, SmemClass c, const DeviceInfo& d);

std::string run_fwd_mod_hd64(const FwdParams& p, const Modifiers& m, SmemClass c, const DeviceInfo& d);
std::string run_fwd_mod_hd96(const FwdParams& p, const Modifiers& m, SmemClass c, const DeviceInfo& d);
std::string run_fwd_mod_hd128(const FwdParams& p, const Modifiers& m, SmemClass c, const DeviceInfo& d);
std::string run_fwd_mod_hd192(const FwdParams& p, const Modifiers& m, SmemClass c, const DeviceInfo& d);
std::string run_fwd_mod_hd256(const FwdParams& p, const Modifiers& m, SmemClass c, const DeviceInfo& d);

std::string run_bwd_mod_hd64(const BwdParams& p, const BwdExtras& x, SmemClass c, const DeviceInfo& d);
std::string run_bwd_mod_hd96(const BwdParams& p, const BwdExtras& x, SmemClass c, const DeviceInfo& d);
std::string run_bwd_mod_hd128(const BwdParams& p, const BwdExtras& x, SmemClass c, const DeviceInfo& d);
std::string run_bwd_mod_hd192(const BwdParams& p, const BwdExtras& x, SmemClass c, const DeviceInfo& d);
std::string run_bwd_mod_hd256(const BwdParams& p, const BwdExtras& x, SmemClass c, const DeviceInfo& d);

// Any head dim.
std::string run_bwd_bias(const BwdParams& p, const Modifiers& m, const BiasGradient& g, SmemClass c,
                         const DeviceInfo& d);

}  // namespace flash_ext::sm80
