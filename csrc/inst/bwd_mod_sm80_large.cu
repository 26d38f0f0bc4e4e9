#include "../sm80/run_bwd_mod.cuh"

namespace flash_ext::sm80 {
const BwdInstances kBwdModLarge = kBwdModTable<SmemClass::kLarge>;
}  // namespace flash_ext::sm80
