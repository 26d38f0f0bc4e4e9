#include "../sm80/run_fwd.cuh"

namespace flash_ext::sm80 {
const FwdInstances kFwdSmall = kFwdTable<SmemClass::kSmall>;
}  // namespace flash_ext::sm80
