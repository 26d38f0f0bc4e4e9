#include "../sm90/run_fwd.cuh"

namespace flash_ext::sm90 {
std::string run_fwd_hd256(const FwdParams& p, const DeviceInfo& d) { return run_fwd_hd<256, 256>(p, d); }
}  // namespace flash_ext::sm90
