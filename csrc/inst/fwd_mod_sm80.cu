#include "../sm80/run_fwd_mod.cuh"

namespace flash_ext::sm80 {
std::string run_fwd_mod_hd64(const FwdParams& p, const Modifiers& m, const DeviceInfo& d) {
  return run_fwd_mod_hd<64, SmemClass::kSmall>(p, m, d);
}
std::string run_fwd_mod_hd96(const FwdParams& p, const Modifiers& m, const DeviceInfo& d) {
  return run_fwd_mod_hd<96, SmemClass::kSmall>(p, m, d);
}
std::string run_fwd_mod_hd128(const FwdParams& p, const Modifiers& m, const DeviceInfo& d) {
  return run_fwd_mod_hd<128, SmemClass::kSmall>(p, m, d);
}
std::string run_fwd_mod_hd192(const FwdParams& p, const Modifiers& m, const DeviceInfo& d) {
  return run_fwd_mod_hd<192, SmemClass::kSmall>(p, m, d);
}
std::string run_fwd_mod_hd256(const FwdParams& p, const Modifiers& m, const DeviceInfo& d) {
  return run_fwd_mod_hd<256, SmemClass::kSmall>(p, m, d);
}
}  // namespace flash_ext::sm80
