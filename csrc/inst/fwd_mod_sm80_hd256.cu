#include "../sm80/run_fwd_mod.cuh"

namespace flash_ext::sm80 {
std::string run_fwd_mod_hd256(const FwdParams& p, const Modifiers& m, SmemClass c, const DeviceInfo& d) {
  return run_fwd_mod_hd<256>(p, m, c, d);
}
}  // namespace flash_ext::sm80
