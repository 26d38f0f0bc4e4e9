#include "../sm90/fwd_cached/launch_quantized.cuh"

namespace flash_ext::sm90 {
constexpr auto kFwdPackedQuantizedTable = instances_of<kFwdPackedModDims>(
    []<int D>(Constant<D>) { return FwdInstance{D, D, launch_fwd_packed_quantized<D, false>}; });
const FwdInstances kFwdPackedQuantized = kFwdPackedQuantizedTable;
}  // namespace flash_ext::sm90
