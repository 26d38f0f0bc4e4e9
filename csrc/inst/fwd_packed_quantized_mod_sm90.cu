#include "../sm90/fwd_cached/launch_quantized.cuh"

namespace flash_ext::sm90 {
constexpr auto kFwdPackedQuantizedModTable = instances_of<kFwdPackedModDims>(
    []<int D>(Constant<D>) { return FwdInstance{D, D, launch_fwd_packed_quantized<D, true>}; });
const FwdInstances kFwdPackedQuantizedMod = kFwdPackedQuantizedModTable;
}  // namespace flash_ext::sm90
