// Launches of the fused Hopper backward with modifiers, for one compiled head dim. Included by the instantiation files
// only.
#pragma once

#include "../bwd/launch.cuh"
#include "../fwd_mod/launch.cuh"
#include "kernel.cuh"

namespace flash_ext::sm90 {

// tanh(t) / t in t^2, fitted for the smallest relative error (4e-7) on |t| <= 1/4.
inline KeyCap key_cap(const Problem& p, const Modifiers& m) {
  constexpr double kTerms[KeyCap::kTerms] = {0.9999996043, -0.3332190823, 0.1284161343};
  KeyCap cap{};
  const double factor = static_cast<double>(p.scale) * m.inv_softcap;
  cap.factor_log2 = static_cast<float>(2. * kLog2e * factor);
  cap.limit = -1.f;
  double power = factor;
  for (int k = 0; k < KeyCap::kTerms; ++k) {
    const double c = kTerms[k] * power;
    if (std::fabs(c) > FLT_MAX) return cap;  // the largest x such a factor is made for are next to 0
    cap.c[k] = static_cast<float>(c);
    power *= factor * factor;
  }
  cap.limit = static_cast<float>(std::fmin(0.25 / std::fabs(factor), FLT_MAX));
  return cap;
}

// Parts lie as the plan counts them: of batch entries, of heads, of splits, where the result has one sum for all.
inline KeySums key_sums_of(const BiasGradient& g, const Problem& p, int splits) {
  const int64_t part = int64_t{1} * g.batch * g.heads * g.cols;
  KeySums x;
  x.to = static_cast<float*>(g.out);
  x.cols = g.cols;
  x.split_stride = part;
  x.head_stride = g.heads > 1 ? g.cols : splits * part;
  x.batch_stride = g.batch > 1 ? int64_t{1} * g.heads * g.cols : (g.heads > 1 ? 1 : p.num_heads) * splits * part;
  return x;
}

// Mask tiles, of 16 keys each, by groups of rows (condensed.h).
inline std::string encode_mask_tiles(CUtensorMap& map, const Modifiers& m, const Problem& p, int keys) {
  constexpr int kWords = 32, kBytes = 4, kGroup = Modifiers::kMaskGroup;  // of a tile, of a word; rows
  const cuuint64_t tiles = cuuint64_t{2} * m.mask.num_words, groups = (p.seqlen_q + kGroup - 1) / kGroup;
  const cuuint64_t dims[5] = {kWords, tiles, groups, map_size(m.mask.head_stride, p.num_heads),
                              map_size(m.mask.batch_stride, p.batch)};
  const cuuint64_t strides[4] = {kWords * kBytes, tiles * kWords * kBytes, map_stride(m.mask.head_stride, kBytes),
                                 map_stride(m.mask.batch_stride, kBytes)};
  return encode(map, const_cast<uint32_t*>(m.mask_tiles), CU_TENSOR_MAP_DATA_TYPE_UINT32, dims, strides,
                {kWords, keys / 16, kBytes, 1, false});
}

template <typename T>
std::string launch_bwd_fused_mod_as(const BwdCall& c, const Launch& l) {
  const Problem& r = c.p.problem;
  const Modifiers& m = c.modifiers;
  BwdModArgs a{};
  a.plain = make_bwd_args(c, l, T::kBlockM);
  a.splits = Divisor(static_cast<uint32_t>(c.plan.q_splits));
  a.m = m;
  if (T::kCaps) a.cap = key_cap(r, m);
  a.unit = T::kCaps ? m.softcap * kLog2e : r.scale * kLog2e;
  a.brings_bias = m.bias.ptr != nullptr && m.bias.row_stride != 0;
  a.brings_words = brings_mask_tiles(r, m);
  a.stores_dq = l.dq == DqMode::kStored;
  if (c.plan.dbias_with_dk && !c.dbias.sum_rows) a.dbias = c.dbias;
  if (c.plan.dbias_with_dk && c.dbias.sum_rows) a.key_sums = key_sums_of(c.dbias, r, c.plan.q_splits);
  a.adds_to_keys = m.by_distance || (m.bias.ptr != nullptr && !a.brings_bias);
  a.bias_steps = {m.bias.head_stride != 0, m.bias.batch_stride != 0};
  a.mask_steps = {m.mask.head_stride != 0, m.mask.batch_stride != 0};
  BwdModMaps maps{};
  std::string error = encode_bwd_maps(maps.plain, c.p, T::kBlockM, T::kBlockN);
  if (error.empty() && a.brings_bias) error = encode_bias_map(maps.bias, m.bias, r, T::kBlockM);
  if (error.empty() && a.brings_words) error = encode_mask_tiles(maps.mask_tiles, m, r, T::kBlockN);
  if (!error.empty()) return "bwd_mod_sm90: " + error;
  return launch_planned(l, bwd_mod_sm90_kernel<T>, T::kThreads, T::kSmemBytes, c.p.stream, a, maps);
}

template <typename E, int D>
std::string launch_bwd_fused_mod_kind(const BwdCall& c, const Launch& l) {
  if constexpr (D == kWideModHeadDim) {
    if (l.block_n == wide_bwd_mod_tile(BesideScores::kWords).block_n()) {
      switch (l.variant) {
        case ScoreVariant::kCap: return launch_bwd_fused_mod_as<BwdModTraits<E, D, ScoreKind::kCapping, true>>(c, l);
        case ScoreVariant::kDrop: return launch_bwd_fused_mod_as<BwdModTraits<E, D, ScoreKind::kDropping, true>>(c, l);
        case ScoreVariant::kAdd: return launch_bwd_fused_mod_as<BwdModTraits<E, D, ScoreKind::kAdding, true>>(c, l);
        case ScoreVariant::kHide: return launch_bwd_fused_mod_as<BwdModTraits<E, D, ScoreKind::kHiding, true>>(c, l);
        default: return not_compiled(l);
      }
    }
  }
  switch (l.variant) {
    case ScoreVariant::kCap: return launch_bwd_fused_mod_as<BwdModTraits<E, D, ScoreKind::kCapping>>(c, l);
    case ScoreVariant::kAddDrop: return launch_bwd_fused_mod_as<BwdModTraits<E, D, ScoreKind::kAddingDropping>>(c, l);
    case ScoreVariant::kDrop: return launch_bwd_fused_mod_as<BwdModTraits<E, D, ScoreKind::kDropping>>(c, l);
    case ScoreVariant::kAdd: return launch_bwd_fused_mod_as<BwdModTraits<E, D, ScoreKind::kAdding>>(c, l);
    case ScoreVariant::kAddFloat: return launch_bwd_fused_mod_as<BwdModTraits<E, D, ScoreKind::kAddingFloat>>(c, l);
    case ScoreVariant::kHide: return launch_bwd_fused_mod_as<BwdModTraits<E, D, ScoreKind::kHiding>>(c, l);
    default: return not_compiled(l);
  }
}

template <int D>
std::string launch_bwd_fused_mod(const BwdCall& c, const Launch& l) {
  return dispatch_dtype(c.p.problem.dtype, [&]<typename E>() { return launch_bwd_fused_mod_kind<E, D>(c, l); });
}

}  // namespace flash_ext::sm90
