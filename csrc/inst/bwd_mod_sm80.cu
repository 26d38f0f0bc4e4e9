#include "../sm80/run_bwd_mod.cuh"

namespace flash_ext::sm80 {
const BwdInstances kBwdModSmall = kBwdModTable<SmemClass::kSmall>;
}  // namespace flash_ext::sm80
