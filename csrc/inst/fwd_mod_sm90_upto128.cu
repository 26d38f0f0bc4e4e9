#include "../sm90/run_fwd_mod.cuh"

namespace flash_ext::sm90 {
std::string run_fwd_mod_hd64(const FwdParams& p, const Modifiers& m, const DeviceInfo& d) {
  return run_fwd_mod_hd<64, 64>(p, m, d);
}
std::string run_fwd_mod_hd128(const FwdParams& p, const Modifiers& m, const DeviceInfo& d) {
  return run_fwd_mod_hd<128, 128>(p, m, d);
}
}  // namespace flash_ext::sm90
