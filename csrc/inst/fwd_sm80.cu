#include "../sm80/run_fwd.cuh"

namespace flash_ext::sm80 {
std::string run_fwd_hd64(const FwdParams& p, const DeviceInfo& d) { return run_fwd_hd<64, SmemClass::kSmall>(p, d); }
std::string run_fwd_hd96(const FwdParams& p, const DeviceInfo& d) { return run_fwd_hd<96, SmemClass::kSmall>(p, d); }
std::string run_fwd_hd128(const FwdParams& p, const DeviceInfo& d) { return run_fwd_hd<128, SmemClass::kSmall>(p, d); }
std::string run_fwd_hd192(const FwdParams& p, const DeviceInfo& d) { return run_fwd_hd<192, SmemClass::kSmall>(p, d); }
std::string run_fwd_hd256(const FwdParams& p, const DeviceInfo& d) { return run_fwd_hd<256, SmemClass::kSmall>(p, d); }
}  // namespace flash_ext::sm80
