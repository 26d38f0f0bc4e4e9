#include "../sm90/fwd_fp8/launch.cuh"

namespace flash_ext::sm90 {
constexpr auto kFwdFp8Table = instances_of<kFp8Dims>(
    []<HeadDims x>(Constant<x>) { return FwdInstance{x.d, x.dv, launch_fwd_fp8<x.d, x.dv, false>}; });
const FwdInstances kFwdFp8 = kFwdFp8Table;
}  // namespace flash_ext::sm90
