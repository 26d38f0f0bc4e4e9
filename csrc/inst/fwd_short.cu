#include "../sm80/short/launch_fwd.cuh"

namespace flash_ext::sm80 {
constexpr auto kFwdShortTable =
    instances_of<kShortHeadDims>([]<int D>(Constant<D>) { return FwdInstance{D, D, launch_fwd_short<D>}; });
const FwdInstances kFwdShort = kFwdShortTable;
}  // namespace flash_ext::sm80
