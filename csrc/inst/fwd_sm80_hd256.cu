#include "../sm80/run_fwd.cuh"

namespace flash_ext::sm80 {
std::string run_fwd_hd256(const FwdParams& p, SmemClass c, const DeviceInfo& d) { return run_fwd_hd<256>(p, c, d); }
}  // namespace flash_ext::sm80
