#include "../sm80/bwd/launch_mod.cuh"

namespace flash_ext::sm80 {
const BwdInstances kBwdModSmall = kBwdModTable<SmemClass::kSmall>;
}  // namespace flash_ext::sm80
