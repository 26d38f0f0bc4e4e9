#include "../sm80/split_kv/launch_quantized.cuh"

namespace flash_ext::sm80 {
constexpr auto kFwdSplitQuantizedTable =
    instances_of<kSplitHeadDims>([]<int D>(Constant<D>) { return FwdInstance{D, D, launch_fwd_split_quantized<D>}; });
const FwdInstances kFwdSplitQuantized = kFwdSplitQuantizedTable;
}  // namespace flash_ext::sm80
