#include "../sm80/bwd_bias/launch.cuh"

namespace flash_ext::sm80 {
std::string launch_dbias_large(const BwdCall& c, const Launch& l) { return launch_dbias<SmemClass::kLarge>(c, l); }
}  // namespace flash_ext::sm80
