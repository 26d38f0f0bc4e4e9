#include "../sm90/bwd_bias/launch.cuh"

namespace flash_ext::sm90 {
constexpr auto kDbiasTable =
    instances_of<kDbiasDims>([]<int D>(Constant<D>) { return BwdInstance{D, D, launch_dbias<D>}; });
const BwdInstances kDbias = kDbiasTable;
}  // namespace flash_ext::sm90
