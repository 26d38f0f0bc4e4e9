#include "../sm90/fwd/launch.cuh"

namespace flash_ext::sm90 {
constexpr auto kFwdPartsTable =
    instances_of<kFwdPartsDims>([]<int D>(Constant<D>) { return FwdInstance{D, D, launch_fwd_parts<D>}; });
const FwdInstances kFwdParts = kFwdPartsTable;
}  // namespace flash_ext::sm90
