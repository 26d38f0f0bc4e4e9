#include "../sm90/run_fwd.cuh"

namespace flash_ext::sm90 {
std::string run_fwd_hd64(const FwdParams& p, const DeviceInfo& d) { return run_fwd_hd<64, 64>(p, d); }
std::string run_fwd_hd96(const FwdParams& p, const DeviceInfo& d) { return run_fwd_hd<96, 96>(p, d); }
std::string run_fwd_hd128(const FwdParams& p, const DeviceInfo& d) { return run_fwd_hd<128, 128>(p, d); }
std::string run_fwd_lower_hd64(const FwdParams& p, const DeviceInfo& d) { return run_fwd_hd<64, 64, true>(p, d); }
std::string run_fwd_lower_hd96(const FwdParams& p, const DeviceInfo& d) { return run_fwd_hd<96, 96, true>(p, d); }
std::string run_fwd_lower_hd128(const FwdParams& p, const DeviceInfo& d) { return run_fwd_hd<128, 128, true>(p, d); }
std::string run_fwd_hd192_v128(const FwdParams& p, const DeviceInfo& d) { return run_fwd_hd<192, 128>(p, d); }
std::string run_fwd_hd192(const FwdParams& p, const DeviceInfo& d) { return run_fwd_hd<192, 192>(p, d); }
std::string run_fwd_hd256(const FwdParams& p, const DeviceInfo& d) { return run_fwd_hd<256, 256>(p, d); }
}  // namespace flash_ext::sm90
