#include "../sm80/run_bwd_mod.cuh"

namespace flash_ext::sm80 {
std::string run_bwd_mod_hd64(const BwdParams& p, const BwdExtras& x, const DeviceInfo& d) {
  return run_bwd_mod_hd<64, SmemClass::kSmall>(p, x, d);
}
std::string run_bwd_mod_hd96(const BwdParams& p, const BwdExtras& x, const DeviceInfo& d) {
  return run_bwd_mod_hd<96, SmemClass::kSmall>(p, x, d);
}
std::string run_bwd_mod_hd128(const BwdParams& p, const BwdExtras& x, const DeviceInfo& d) {
  return run_bwd_mod_hd<128, SmemClass::kSmall>(p, x, d);
}
std::string run_bwd_mod_hd192(const BwdParams& p, const BwdExtras& x, const DeviceInfo& d) {
  return run_bwd_mod_hd<192, SmemClass::kSmall>(p, x, d);
}
std::string run_bwd_mod_hd256(const BwdParams& p, const BwdExtras& x, const DeviceInfo& d) {
  return run_bwd_mod_hd<256, SmemClass::kSmall>(p, x, d);
}
}  // namespace flash_ext::sm80
