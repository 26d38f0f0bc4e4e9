#include "../sm80/run_fwd_short.cuh"

namespace flash_ext::sm80 {
std::string run_fwd_short_hd32(const FwdParams& p, const Modifiers& m, const ShortGrid& g) {
  return run_fwd_short_hd<32>(p, m, g);
}
std::string run_fwd_short_hd64(const FwdParams& p, const Modifiers& m, const ShortGrid& g) {
  return run_fwd_short_hd<64>(p, m, g);
}
std::string run_fwd_short_hd128(const FwdParams& p, const Modifiers& m, const ShortGrid& g) {
  return run_fwd_short_hd<128>(p, m, g);
}
std::string run_fwd_short_hd256(const FwdParams& p, const Modifiers& m, const ShortGrid& g) {
  return run_fwd_short_hd<256>(p, m, g);
}
}  // namespace flash_ext::sm80
