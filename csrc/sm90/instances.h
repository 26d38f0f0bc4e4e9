// The kernels for Hopper that csrc/inst/ compiles, in tables with a launcher for each pair of head sizes. No CUDA, no
// torch.
#pragma once

#include "../call.h"

namespace flash_ext::sm90 {

// Those of the forwards in fp8: fwd_fp8/tiles.h.
inline constexpr HeadDims kFwdDims[] = {{64, 64}, {96, 96}, {128, 128}, {192, 128}, {192, 192}, {256, 256}};
inline constexpr int kFwdPartsDims[] = {64, 96, 128}, kFwdPackedDims[] = {64, 128, 256};
// With modifiers or over 8 bits. Outputs of 256 columns leave neither the registers.
inline constexpr int kFwdPackedModDims[] = {64, 128};
inline constexpr HeadDims kLatentDims[] = {{576, 512}};
inline constexpr int kModDimsUpTo128[] = {64, 128}, kModDimsAbove128[] = {192, 256};
inline constexpr int kBwdFusedDims[] = {64, 96, 128};
inline constexpr HeadDims kBwdSplitDims[] = {{64, 64}, {128, 128}, {192, 128}, {192, 192}, {256, 256}};
inline constexpr HeadDims kRowStatsDims[] = {{64, 64}, {128, 128}, {192, 128}, {192, 192}, {256, 256}};

extern const FwdInstances kFwd, kFwdCached, kFwdPacked, kFwdPackedMod, kFwdPackedQuantized, kFwdPackedQuantizedMod,
    kFwdParts, kFwdFp8, kFwdSmallFp8, kFwdMixed, kFwdLatent, kFwdModUpTo128, kFwdModAbove128;
extern const BwdInstances kBwdFused, kBwdSplit, kRowStats;
extern const BwdInstances kBwdFusedMod, kBwdSplitModUpTo128, kBwdSplitModAbove128, kDbias;

}  // namespace flash_ext::sm90
