#include "../sm90/run_bwd_mod.cuh"

namespace flash_ext::sm90 {
std::string run_bwd_mod_hd64(const BwdParams& p, const Modifiers& m, const DeviceInfo& d) {
  return run_bwd_mod_hd<64>(p, m, d);
}
std::string run_bwd_mod_hd128(const BwdParams& p, const Modifiers& m, const DeviceInfo& d) {
  return run_bwd_mod_hd<128>(p, m, d);
}
}  // namespace flash_ext::sm90
