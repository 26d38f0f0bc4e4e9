// The portable kernels that csrc/inst/ compiles, in tables with a launcher for each head size. No CUDA, no torch.
// Small tiles: for any GPU from Ampere on. Large ones: with the shared memory of Hopper.
#pragma once

#include "../call.h"

namespace flash_ext::sm80 {

extern const FwdInstances kFwdSmall, kFwdLarge, kFwdModSmall, kFwdModLarge;  // kHeadDims
extern const FwdInstances kFwdShort;                                         // kShortHeadDims
extern const FwdInstances kFwdSplit, kFwdSplitMod, kFwdSplitCached, kFwdSplitCachedMod, kFwdSplitQuantized,
    kFwdCachedSmall, kFwdCachedLarge;  // kSplitHeadDims
extern const BwdInstances kBwdSmall, kBwdLarge, kBwdModSmall, kBwdModLarge;  // kHeadDims
extern const BwdInstances kBwdShort;  // kShortHeadDims

// Gradients of a bias and of slopes: any head size.
std::string launch_dbias_small(const BwdCall& c, const Launch& l);
std::string launch_dbias_large(const BwdCall& c, const Launch& l);

}  // namespace flash_ext::sm80
