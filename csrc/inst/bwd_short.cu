#include "../sm80/run_bwd_short.cuh"

namespace flash_ext::sm80 {
std::string run_bwd_short_hd32(const BwdParams& p, const Modifiers& m, const BiasGradient& bias, const ShortGrid& g) {
  return run_bwd_short_hd<32>(p, m, bias, g);
}
std::string run_bwd_short_hd64(const BwdParams& p, const Modifiers& m, const BiasGradient& bias, const ShortGrid& g) {
  return run_bwd_short_hd<64>(p, m, bias, g);
}
std::string run_bwd_short_hd128(const BwdParams& p, const Modifiers& m, const BiasGradient& bias, const ShortGrid& g) {
  return run_bwd_short_hd<128>(p, m, bias, g);
}
}  // namespace flash_ext::sm80
