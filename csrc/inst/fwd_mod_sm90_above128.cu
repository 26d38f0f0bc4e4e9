#include "../sm90/run_fwd_mod.cuh"

namespace flash_ext::sm90 {
std::string run_fwd_mod_hd192(const FwdParams& p, const Modifiers& m, const DeviceInfo& d) {
  return run_fwd_mod_hd<192, 192>(p, m, d);
}
std::string run_fwd_mod_hd256(const FwdParams& p, const Modifiers& m, const DeviceInfo& d) {
  return run_fwd_mod_hd<256, 256>(p, m, d);
}
}  // namespace flash_ext::sm90
