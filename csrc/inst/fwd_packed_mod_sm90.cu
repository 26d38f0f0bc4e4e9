#include "../sm90/fwd_cached/launch.cuh"

namespace flash_ext::sm90 {
constexpr auto kFwdPackedModTable =
    instances_of<kFwdPackedModDims>([]<int D>(Constant<D>) { return FwdInstance{D, D, launch_fwd_packed<D, true>}; });
const FwdInstances kFwdPackedMod = kFwdPackedModTable;
}  // namespace flash_ext::sm90
