#include "../sm80/bwd_bias/launch.cuh"

namespace flash_ext::sm80 {
std::string launch_dbias_small(const BwdCall& c, const Launch& l) { return launch_dbias<SmemClass::kSmall>(c, l); }
}  // namespace flash_ext::sm80
