#include "../sm80/bwd/launch.cuh"

namespace flash_ext::sm80 {
const BwdInstances kBwdSmall = kBwdTable<SmemClass::kSmall>;
}  // namespace flash_ext::sm80
