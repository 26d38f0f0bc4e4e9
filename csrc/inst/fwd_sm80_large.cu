#include "../sm80/fwd/launch.cuh"

namespace flash_ext::sm80 {
const FwdInstances kFwdLarge = kFwdTable<SmemClass::kLarge>;
}  // namespace flash_ext::sm80
