#include "../sm80/run_bwd_mod.cuh"

namespace flash_ext::sm80 {
std::string run_bwd_mod_large_hd64(const BwdParams& p, const BwdExtras& x, const DeviceInfo& d) {
  return run_bwd_mod_hd<64, SmemClass::kLarge>(p, x, d);
}
std::string run_bwd_mod_large_hd96(const BwdParams& p, const BwdExtras& x, const DeviceInfo& d) {
  return run_bwd_mod_hd<96, SmemClass::kLarge>(p, x, d);
}
std::string run_bwd_mod_large_hd128(const BwdParams& p, const BwdExtras& x, const DeviceInfo& d) {
  return run_bwd_mod_hd<128, SmemClass::kLarge>(p, x, d);
}
std::string run_bwd_mod_large_hd192(const BwdParams& p, const BwdExtras& x, const DeviceInfo& d) {
  return run_bwd_mod_hd<192, SmemClass::kLarge>(p, x, d);
}
std::string run_bwd_mod_large_hd256(const BwdParams& p, const BwdExtras& x, const DeviceInfo& d) {
  return run_bwd_mod_hd<256, SmemClass::kLarge>(p, x, d);
}
}  // namespace flash_ext::sm80
