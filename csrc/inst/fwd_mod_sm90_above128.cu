#include "../sm90/fwd_mod/launch.cuh"

namespace flash_ext::sm90 {
constexpr auto kFwdModAbove128Table =
    instances_of<kModDimsAbove128>([]<int D>(Constant<D>) { return FwdInstance{D, D, launch_fwd_mod<D>}; });
const FwdInstances kFwdModAbove128 = kFwdModAbove128Table;
}  // namespace flash_ext::sm90
