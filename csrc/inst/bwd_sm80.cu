#include "../sm80/run_bwd.cuh"

namespace flash_ext::sm80 {
std::string run_bwd_hd64(const BwdParams& p, const DeviceInfo& d) { return run_bwd_hd<64, SmemClass::kSmall>(p, d); }
std::string run_bwd_hd96(const BwdParams& p, const DeviceInfo& d) { return run_bwd_hd<96, SmemClass::kSmall>(p, d); }
std::string run_bwd_hd128(const BwdParams& p, const DeviceInfo& d) { return run_bwd_hd<128, SmemClass::kSmall>(p, d); }
std::string run_bwd_hd192(const BwdParams& p, const DeviceInfo& d) { return run_bwd_hd<192, SmemClass::kSmall>(p, d); }
std::string run_bwd_hd256(const BwdParams& p, const DeviceInfo& d) { return run_bwd_hd<256, SmemClass::kSmall>(p, d); }
}  // namespace flash_ext::sm80
