#include "../sm80/split_kv/launch.cuh"

namespace flash_ext::sm80 {
constexpr auto kFwdSplitTable =
    instances_of<kSplitHeadDims>([]<int D>(Constant<D>) { return FwdInstance{D, D, launch_fwd_split<D>}; });
const FwdInstances kFwdSplit = kFwdSplitTable;
}  // namespace flash_ext::sm80
