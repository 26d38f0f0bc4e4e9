#include "../sm90/bwd/launch.cuh"
#include "../sm90/bwd_split/launch.cuh"

namespace flash_ext::sm90 {
constexpr auto kBwdFusedTable =
    instances_of<kBwdFusedDims>([]<int D>(Constant<D>) { return BwdInstance{D, D, launch_bwd_fused<D>}; });
const BwdInstances kBwdFused = kBwdFusedTable;

constexpr auto kBwdSplitTable = instances_of<kBwdSplitDims>(
    []<HeadDims x>(Constant<x>) { return BwdInstance{x.d, x.dv, launch_bwd_split<x.d, x.dv>}; });
const BwdInstances kBwdSplit = kBwdSplitTable;

constexpr auto kRowStatsTable = instances_of<kRowStatsDims>(
    []<HeadDims x>(Constant<x>) { return BwdInstance{x.d, x.dv, launch_row_stats<x.d, x.dv>}; });
const BwdInstances kRowStats = kRowStatsTable;
}  // namespace flash_ext::sm90
