#include "../sm80/fwd/launch_cached.cuh"

namespace flash_ext::sm80 {
const FwdInstances kFwdCachedSmall = kFwdCachedTable<SmemClass::kSmall>;
}  // namespace flash_ext::sm80
