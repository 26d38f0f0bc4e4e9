#include "../sm80/fwd/launch_cached.cuh"

namespace flash_ext::sm80 {
const FwdInstances kFwdCachedLarge = kFwdCachedTable<SmemClass::kLarge>;
}  // namespace flash_ext::sm80
