#include "../sm90/fwd_latent/launch.cuh"

namespace flash_ext::sm90 {
constexpr auto kFwdLatentTable =
    instances_of<kLatentDims>([]<HeadDims x>(Constant<x>) { return FwdInstance{x.d, x.dv, launch_fwd_latent}; });
const FwdInstances kFwdLatent = kFwdLatentTable;
}  // namespace flash_ext::sm90
