#include "../sm80/run_fwd_mod.cuh"

namespace flash_ext::sm80 {
const FwdInstances kFwdModSmall = kFwdModTable<SmemClass::kSmall>;
}  // namespace flash_ext::sm80
