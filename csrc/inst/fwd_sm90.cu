#include "../sm90/fwd/launch.cuh"

namespace flash_ext::sm90 {
constexpr auto kFwdTable =
    instances_of<kFwdDims>([]<HeadDims x>(Constant<x>) { return FwdInstance{x.d, x.dv, launch_fwd<x.d, x.dv>}; });
const FwdInstances kFwd = kFwdTable;
}  // namespace flash_ext::sm90
