#include "../sm80/short/launch_bwd.cuh"

namespace flash_ext::sm80 {
constexpr auto kBwdShortTable =
    instances_of<kShortHeadDims>([]<int D>(Constant<D>) { return BwdInstance{D, D, launch_bwd_short<D>}; });
const BwdInstances kBwdShort = kBwdShortTable;
}  // namespace flash_ext::sm80
