#include "../sm90/run_bwd_wide_mod.cuh"

namespace flash_ext::sm90 {
std::string run_bwd_mod_hd192(const BwdParams& p, const Modifiers& m, const DeviceInfo& d) {
  return run_bwd_wide_mod_hd<192>(p, m, d);
}
std::string run_bwd_mod_hd256(const BwdParams& p, const Modifiers& m, const DeviceInfo& d) {
  return run_bwd_wide_mod_hd<256>(p, m, d);
}
}  // namespace flash_ext::sm90
