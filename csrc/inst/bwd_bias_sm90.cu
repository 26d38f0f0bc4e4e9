#include "../sm90/run_bwd_bias.cuh"

namespace flash_ext::sm90 {
std::string run_bwd_bias_hd64(const BwdParams& p, const Modifiers& m, const BiasGradient& g, const DeviceInfo& d) {
  return run_bwd_bias_hd<64>(p, m, g, d);
}
std::string run_bwd_bias_hd128(const BwdParams& p, const Modifiers& m, const BiasGradient& g, const DeviceInfo& d) {
  return run_bwd_bias_hd<128>(p, m, g, d);
}
}  // namespace flash_ext::sm90
