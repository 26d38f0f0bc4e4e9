#include "../sm80/run_fwd_split.cuh"

namespace flash_ext::sm80 {
std::string run_fwd_split_hd64(const FwdParams& p, const SplitGrid& g, bool early) {
  return run_fwd_split_hd<64>(p, g, early);
}
std::string run_fwd_split_hd128(const FwdParams& p, const SplitGrid& g, bool early) {
  return run_fwd_split_hd<128>(p, g, early);
}
std::string run_fwd_split_hd256(const FwdParams& p, const SplitGrid& g, bool early) {
  return run_fwd_split_hd<256>(p, g, early);
}
}  // namespace flash_ext::sm80
