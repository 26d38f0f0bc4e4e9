#include "../sm80/run_bwd.cuh"

namespace flash_ext::sm80 {
std::string run_bwd_hd64(const BwdParams& p, SmemClass c, const DeviceInfo& d) { return run_bwd_hd<64>(p, c, d); }
}  // namespace flash_ext::sm80
