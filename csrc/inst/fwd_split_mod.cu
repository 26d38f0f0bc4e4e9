#include "../sm80/split_kv/launch_mod.cuh"

namespace flash_ext::sm80 {
constexpr auto kFwdSplitModTable =
    instances_of<kSplitHeadDims>([]<int D>(Constant<D>) { return FwdInstance{D, D, launch_fwd_split_mod<D, false>}; });
const FwdInstances kFwdSplitMod = kFwdSplitModTable;
}  // namespace flash_ext::sm80
