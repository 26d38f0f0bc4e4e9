#include "../sm80/fwd_mod/launch.cuh"

namespace flash_ext::sm80 {
const FwdInstances kFwdModLarge = kFwdModTable<SmemClass::kLarge>;
}  // namespace flash_ext::sm80
