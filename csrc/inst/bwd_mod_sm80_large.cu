#include "../sm80/bwd/launch_mod.cuh"

namespace flash_ext::sm80 {
const BwdInstances kBwdModLarge = kBwdModTable<SmemClass::kLarge>;
}  // namespace flash_ext::sm80
