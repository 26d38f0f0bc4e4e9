#include "../sm80/run_bwd_bias.cuh"

namespace flash_ext::sm80 {
std::string launch_dbias_small(const BwdCall& c, const Launch& l) { return launch_dbias<SmemClass::kSmall>(c, l); }
}  // namespace flash_ext::sm80
