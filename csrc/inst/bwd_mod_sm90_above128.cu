#include "../sm90/bwd_split/launch_mod.cuh"

namespace flash_ext::sm90 {
constexpr auto kBwdSplitModAbove128Table =
    instances_of<kModDimsAbove128>([]<int D>(Constant<D>) { return BwdInstance{D, D, launch_bwd_split_mod<D>}; });
const BwdInstances kBwdSplitModAbove128 = kBwdSplitModAbove128Table;
}  // namespace flash_ext::sm90
