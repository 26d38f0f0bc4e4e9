#include "../sm90/fwd_fp8/launch.cuh"

namespace flash_ext::sm90 {
constexpr auto kFwdMixedTable = instances_of<kMixedDims>(
    []<HeadDims x>(Constant<x>) { return FwdInstance{x.d, x.dv, launch_fwd_fp8<x.d, x.dv, Operands::kMixed>}; });
const FwdInstances kFwdMixed = kFwdMixedTable;
}  // namespace flash_ext::sm90
