#include "../sm80/run_bwd_bias.cuh"

namespace flash_ext::sm80 {
std::string run_bwd_bias(const BwdParams& p, const Modifiers& m, const BiasGradient& g, const DeviceInfo& d) {
  return launch_bwd_bias_as<SmemClass::kSmall>(p, m, g, d);
}
}  // namespace flash_ext::sm80
