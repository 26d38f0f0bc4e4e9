#include "../sm80/run_fwd.cuh"

namespace flash_ext::sm80 {
std::string run_fwd_large_hd64(const FwdParams& p, const DeviceInfo& d) {
  return run_fwd_hd<64, SmemClass::kLarge>(p, d);
}
std::string run_fwd_large_hd96(const FwdParams& p, const DeviceInfo& d) {
  return run_fwd_hd<96, SmemClass::kLarge>(p, d);
}
std::string run_fwd_large_hd128(const FwdParams& p, const DeviceInfo& d) {
  return run_fwd_hd<128, SmemClass::kLarge>(p, d);
}
std::string run_fwd_large_hd192(const FwdParams& p, const DeviceInfo& d) {
  return run_fwd_hd<192, SmemClass::kLarge>(p, d);
}
std::string run_fwd_large_hd256(const FwdParams& p, const DeviceInfo& d) {
  return run_fwd_hd<256, SmemClass::kLarge>(p, d);
}
}  // namespace flash_ext::sm80
