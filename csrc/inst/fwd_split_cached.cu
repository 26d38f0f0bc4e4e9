#include "../sm80/split_kv/launch_cached.cuh"

namespace flash_ext::sm80 {
constexpr auto kFwdSplitCachedTable =
    instances_of<kSplitHeadDims>([]<int D>(Constant<D>) { return FwdInstance{D, D, launch_fwd_split_cached<D>}; });
const FwdInstances kFwdSplitCached = kFwdSplitCachedTable;
}  // namespace flash_ext::sm80
