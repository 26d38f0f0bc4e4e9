#include "../sm90/fwd_cached/launch.cuh"

namespace flash_ext::sm90 {
constexpr auto kFwdPackedTable =
    instances_of<kFwdPackedDims>([]<int D>(Constant<D>) { return FwdInstance{D, D, launch_fwd_packed<D, false>}; });
const FwdInstances kFwdPacked = kFwdPackedTable;
}  // namespace flash_ext::sm90
