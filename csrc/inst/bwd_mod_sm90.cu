#include "../sm90/bwd_mod/launch.cuh"

namespace flash_ext::sm90 {
constexpr auto kBwdFusedModTable =
    instances_of<kModDimsUpTo128>([]<int D>(Constant<D>) { return BwdInstance{D, D, launch_bwd_fused_mod<D>}; });
const BwdInstances kBwdFusedMod = kBwdFusedModTable;
}  // namespace flash_ext::sm90
