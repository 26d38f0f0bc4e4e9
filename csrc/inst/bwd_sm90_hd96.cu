#include "../sm90/run_bwd.cuh"

namespace flash_ext::sm90 {
std::string run_bwd_hd96(const BwdParams& p, const DeviceInfo& d) { return run_bwd_hd<96>(p, d); }
}  // namespace flash_ext::sm90
