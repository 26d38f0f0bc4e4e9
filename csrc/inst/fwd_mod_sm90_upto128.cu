#include "../sm90/fwd_mod/launch.cuh"

namespace flash_ext::sm90 {
constexpr auto kFwdModUpTo128Table =
    instances_of<kModDimsUpTo128>([]<int D>(Constant<D>) { return FwdInstance{D, D, launch_fwd_mod<D>}; });
const FwdInstances kFwdModUpTo128 = kFwdModUpTo128Table;
}  // namespace flash_ext::sm90
