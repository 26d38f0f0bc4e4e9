#include "../sm90/run_bwd.cuh"
#include "../sm90/run_bwd_short.cuh"
#include "../sm90/run_bwd_wide.cuh"

namespace flash_ext::sm90 {
std::string run_bwd_hd64(const BwdParams& p, const DeviceInfo& d) { return run_bwd_hd<64>(p, d); }
std::string run_bwd_hd96(const BwdParams& p, const DeviceInfo& d) { return run_bwd_hd<96>(p, d); }
std::string run_bwd_hd128(const BwdParams& p, const DeviceInfo& d) { return run_bwd_hd<128>(p, d); }
std::string run_bwd_short_hd128(const BwdParams& p, const DeviceInfo& d) { return run_bwd_short(p, d); }
std::string run_bwd_hd192(const BwdParams& p, const DeviceInfo& d) { return run_bwd_wide_hd<192, 192>(p, d); }
std::string run_bwd_hd192_v128(const BwdParams& p, const DeviceInfo& d) { return run_bwd_wide_hd<192, 128>(p, d); }
std::string run_bwd_hd256(const BwdParams& p, const DeviceInfo& d) { return run_bwd_wide_hd<256, 256>(p, d); }
}  // namespace flash_ext::sm90
