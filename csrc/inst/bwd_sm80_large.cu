#include "../sm80/bwd/launch.cuh"

namespace flash_ext::sm80 {
const BwdInstances kBwdLarge = kBwdTable<SmemClass::kLarge>;
}  // namespace flash_ext::sm80
