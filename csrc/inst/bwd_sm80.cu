#include "../sm80/run_bwd.cuh"

namespace flash_ext::sm80 {
const BwdInstances kBwdSmall = kBwdTable<SmemClass::kSmall>;
}  // namespace flash_ext::sm80
