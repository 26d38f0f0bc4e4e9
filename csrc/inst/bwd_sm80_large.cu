#include "../sm80/run_bwd.cuh"

namespace flash_ext::sm80 {
std::string run_bwd_large_hd64(const BwdParams& p, const DeviceInfo& d) {
  return run_bwd_hd<64, SmemClass::kLarge>(p, d);
}
std::string run_bwd_large_hd96(const BwdParams& p, const DeviceInfo& d) {
  return run_bwd_hd<96, SmemClass::kLarge>(p, d);
}
std::string run_bwd_large_hd128(const BwdParams& p, const DeviceInfo& d) {
  return run_bwd_hd<128, SmemClass::kLarge>(p, d);
}
std::string run_bwd_large_hd192(const BwdParams& p, const DeviceInfo& d) {
  return run_bwd_hd<192, SmemClass::kLarge>(p, d);
}
std::string run_bwd_large_hd256(const BwdParams& p, const DeviceInfo& d) {
  return run_bwd_hd<256, SmemClass::kLarge>(p, d);
}
}  // namespace flash_ext::sm80
