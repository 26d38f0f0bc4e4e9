#include "../sm90/run_fwd_mod.cuh"

namespace flash_ext::sm90 {
std::string run_fwd_mod_hd256(const FwdParams& p, const Modifiers& m, const DeviceInfo& d) {
  return run_fwd_mod_hd<256, 256>(p, m, d);
}
}  // namespace flash_ext::sm90
