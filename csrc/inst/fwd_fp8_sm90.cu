#include "../sm90/fwd_fp8/launch.cuh"

namespace flash_ext::sm90 {
constexpr auto kFwdFp8Table = instances_of<kFp8Dims>(
    []<HeadDims x>(Constant<x>) { return FwdInstance{x.d, x.dv, launch_fwd_fp8<x.d, x.dv, Operands::kFp8>}; });
constexpr auto kFwdSmallFp8Table = instances_of<kSmallFp8Dims>(
    []<HeadDims x>(Constant<x>) { return FwdInstance{x.d, x.dv, launch_fwd_fp8<x.d, x.dv, Operands::kSmallFp8>}; });
const FwdInstances kFwdFp8 = kFwdFp8Table, kFwdSmallFp8 = kFwdSmallFp8Table;
}  // namespace flash_ext::sm90
