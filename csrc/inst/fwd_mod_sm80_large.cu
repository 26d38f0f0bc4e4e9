#include "../sm80/run_fwd_mod.cuh"

namespace flash_ext::sm80 {
std::string run_fwd_mod_large_hd64(const FwdParams& p, const Modifiers& m, const DeviceInfo& d) {
  return run_fwd_mod_hd<64, SmemClass::kLarge>(p, m, d);
}
std::string run_fwd_mod_large_hd96(const FwdParams& p, const Modifiers& m, const DeviceInfo& d) {
  return run_fwd_mod_hd<96, SmemClass::kLarge>(p, m, d);
}
std::string run_fwd_mod_large_hd128(const FwdParams& p, const Modifiers& m, const DeviceInfo& d) {
  return run_fwd_mod_hd<128, SmemClass::kLarge>(p, m, d);
}
std::string run_fwd_mod_large_hd192(const FwdParams& p, const Modifiers& m, const DeviceInfo& d) {
  return run_fwd_mod_hd<192, SmemClass::kLarge>(p, m, d);
}
std::string run_fwd_mod_large_hd256(const FwdParams& p, const Modifiers& m, const DeviceInfo& d) {
  return run_fwd_mod_hd<256, SmemClass::kLarge>(p, m, d);
}
}  // namespace flash_ext::sm80
