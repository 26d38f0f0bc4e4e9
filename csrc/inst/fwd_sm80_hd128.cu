#include "../sm80/run_fwd.cuh"

namespace flash_ext::sm80 {
std::string run_fwd_hd128(const FwdParams& p, SmemClass c, const DeviceInfo& d) { return run_fwd_hd<128>(p, c, d); }
}  // namespace flash_ext::sm80
