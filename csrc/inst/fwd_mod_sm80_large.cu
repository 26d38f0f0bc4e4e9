#include "../sm80/run_fwd_mod.cuh"

namespace flash_ext::sm80 {
const FwdInstances kFwdModLarge = kFwdModTable<SmemClass::kLarge>;
}  // namespace flash_ext::sm80
