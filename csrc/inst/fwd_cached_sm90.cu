#include "../sm90/fwd_cached/launch.cuh"

namespace flash_ext::sm90 {
constexpr auto kFwdCachedTable = instances_of<kFwdDims>(
    []<HeadDims x>(Constant<x>) { return FwdInstance{x.d, x.dv, launch_fwd_cached<x.d, x.dv>}; });
const FwdInstances kFwdCached = kFwdCachedTable;
}  // namespace flash_ext::sm90
