#include "../sm90/fwd/launch_cached.cuh"

namespace flash_ext::sm90 {
constexpr auto kFwdCachedTable =
    instances_of<kSplitHeadDims>([]<int D>(Constant<D>) { return FwdInstance{D, D, launch_fwd_cached<D>}; });
const FwdInstances kFwdCached = kFwdCachedTable;
}  // namespace flash_ext::sm90
