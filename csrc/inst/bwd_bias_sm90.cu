#include "../sm90/run_bwd_bias.cuh"

namespace flash_ext::sm90 {
constexpr auto kDbiasTable = instances_of<kModDimsUpTo128>([]<int D>(Constant<D>) { return BwdInstance{D, D, launch_dbias<D>}; });
const BwdInstances kDbias = kDbiasTable;
}  // namespace flash_ext::sm90
