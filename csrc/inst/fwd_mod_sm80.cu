#include "../sm80/fwd_mod/launch.cuh"

namespace flash_ext::sm80 {
const FwdInstances kFwdModSmall = kFwdModTable<SmemClass::kSmall>;
}  // namespace flash_ext::sm80
