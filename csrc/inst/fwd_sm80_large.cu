#include "../sm80/run_fwd.cuh"

namespace flash_ext::sm80 {
const FwdInstances kFwdLarge = kFwdTable<SmemClass::kLarge>;
}  // namespace flash_ext::sm80
