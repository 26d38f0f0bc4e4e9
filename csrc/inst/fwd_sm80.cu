#include "../sm80/fwd/launch.cuh"

namespace flash_ext::sm80 {
const FwdInstances kFwdSmall = kFwdTable<SmemClass::kSmall>;
}  // namespace flash_ext::sm80
