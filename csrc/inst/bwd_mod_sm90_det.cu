#include "../sm90/bwd_split/launch_mod.cuh"

namespace flash_ext::sm90 {
constexpr auto kBwdSplitModUpTo128Table =
    instances_of<kModDimsUpTo128>([]<int D>(Constant<D>) { return BwdInstance{D, D, launch_bwd_split_mod<D>}; });
const BwdInstances kBwdSplitModUpTo128 = kBwdSplitModUpTo128Table;
}  // namespace flash_ext::sm90
