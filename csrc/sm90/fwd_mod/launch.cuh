// Launches of the Hopper forward with modifiers, for one compiled head dim. Included by the instantiation files only.
#pragma once

#include <cfloat>
#include <cmath>

#include "../fwd/launch.cuh"
#include "kernel.cuh"

namespace flash_ext::sm90 {

// From the terms of tanh(t) / t in t^2, good for |t| <= limit.
template <typename Series>
Series series_of(const double (&terms)[Series::kTerms], double limit, double unit, const Problem& p,
                 const Modifiers& m) {
  Series series{};
  series.limit = -1.f;
  const double factor = static_cast<double>(p.scale) * m.inv_softcap;
  double power = factor * m.softcap * unit;
  for (int k = 0; k < Series::kTerms; ++k) {
    const double c = terms[k] * power;
    if (std::fabs(c) > FLT_MAX) return series;  // the largest x such a factor is made for are next to 0
    series.c[k] = static_cast<float>(c);
    power *= factor * factor;
  }
  series.limit = static_cast<float>(std::fmin(limit / std::fabs(factor), FLT_MAX));
  return series;
}

// Fitted for the smallest relative error (3e-8) on |t| <= 3/4.
inline CapSeries cap_series(double unit, const Problem& p, const Modifiers& m) {
  constexpr double kTerms[CapSeries::kTerms] = {0.999999971,   -0.3333295888, 0.1332540602,
                                                -0.0533444302, 0.01958290834, -0.004716257368};
  return series_of<CapSeries>(kTerms, 0.75, unit, p, m);
}

// The same to 1.05e-7 on |t| <= 1/5.
inline ShortCapSeries short_cap_series(double unit, const Problem& p, const Modifiers& m) {
  constexpr double kTerms[ShortCapSeries::kTerms] = {0.9999998948, -0.333285909, 0.1301540755};
  return series_of<ShortCapSeries>(kTerms, 0.2, unit, p, m);
}

inline std::string encode_bias_map(CUtensorMap& map, const BiasView& x, const Problem& p, int box_rows) {
  // As encode_map() has it: a broadcast dimension has one entry.
  const int element = x.is_float ? 4 : 2;
  const cuuint64_t dims[5] = {static_cast<cuuint64_t>(x.cols), map_size(x.row_stride, x.rows),
                              map_size(x.head_stride, p.num_heads), map_size(x.batch_stride, p.batch), 1};
  const cuuint64_t strides[4] = {map_stride(x.row_stride, element), map_stride(x.head_stride, element),
                                 map_stride(x.batch_stride, element), 16};
  const CUtensorMapDataType type = x.is_float ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32 : map_type_of(p.dtype);
  return encode(map, const_cast<void*>(x.ptr), type, dims, strides, {128 / element, box_rows, element});
}

// Whether add_far_bias() may read a bias in fp32 by pairs: the second element of the last one of a row may belong to no
// key, but must be in the memory of the tensor and must not be added to a key.
inline bool has_pairs(const BiasView& x, const Problem& p) {
  return x.aligned && x.has_room && (x.cols % 2 == 0 || (!p.is_varlen() && x.cols >= p.seqlen_k));
}

template <typename T>
std::string launch_fwd_mod_as(const FwdCall& c, const Launch& l) {
  const Problem& r = c.p.problem;
  const Modifiers& m = c.modifiers;
  FwdModArgs a{};
  a.plain = make_fwd_args(c, l);
  a.m = m;
  a.m.bias.aligned = has_pairs(m.bias, r);
  if (T::kLog2Maxima) a.m.unit_log2 = 1.f;  // of the maxima
  const double unit = T::kLog2Maxima ? kLog2e : 1.;
  a.cap = cap_series(unit, r, m);
  a.short_cap = short_cap_series(unit, r, m);
  a.scale_log2 = m.has_score_mod ? r.scale * kLog2e : m.unit_log2;
  a.bias_rows = l.bias_rows;
  a.bias_steps = {m.bias.head_stride != 0, m.bias.batch_stride != 0};
  a.q_stages = !T::kModTile.bias_has_place && a.bias_rows > 0 ? 1 : T::kQStages;
  FwdModMaps maps{};
  std::string error = encode_fwd_maps<T>(maps.plain, c.p);
  if (error.empty() && a.bias_rows > 0 && !T::kLoose) error = encode_bias_map(maps.bias, m.bias, r, a.bias_rows);
  if (!error.empty()) return "fwd_mod_sm90: " + error;
  return launch_planned(l, fwd_mod_sm90_kernel<T>, T::kThreads, T::kSmemBytes, c.p.stream, a, maps);
}

template <typename E, int D>
std::string launch_fwd_mod_kind(const FwdCall& c, const Launch& l) {
  const auto of_kind = [&]<FwdModKind kKind, bool kWide = false>() {
    return launch_fwd_mod_as<FwdModTraits<E, D, D, kKind, kWide>>(c, l);
  };
  if (l.block_m > 128) {
    if constexpr (has_m192(D)) {
      constexpr bool kHasWide = has_wide_m192(D);
      if (l.variant == ScoreVariant::kDrop) return of_kind.template operator()<FwdModKind::kM192Drops, kHasWide>();
      if (l.variant == ScoreVariant::kWords) return of_kind.template operator()<FwdModKind::kM192Words, kHasWide>();
    }
    const auto of_width = [&]<bool kWide>() {
      if (l.variant == ScoreVariant::kSlopes) return of_kind.template operator()<FwdModKind::kM192Slopes, kWide>();
      if (l.variant == ScoreVariant::kCap) return of_kind.template operator()<FwdModKind::kM192Cap, kWide>();
      if (l.variant == ScoreVariant::kHide) return of_kind.template operator()<FwdModKind::kM192Hides, kWide>();
      if (l.variant == ScoreVariant::kBias) return of_kind.template operator()<FwdModKind::kM192Bias, kWide>();
      return not_compiled(l);
    };
    if constexpr (has_wide_m192(D)) {
      if (l.block_n == 128) return of_width.template operator()<true>();
    }
    if constexpr (has_m192_float_bias(D)) {
      if (l.variant == ScoreVariant::kFloatBias) return of_kind.template operator()<FwdModKind::kM192FloatBias>();
    }
    if constexpr (has_m192(D)) {
      if (l.variant == ScoreVariant::kLooseBias) return of_kind.template operator()<FwdModKind::kM192LooseBias>();
      return of_width.template operator()<false>();
    }
    return not_compiled(l);
  }
  if constexpr (D == 128) {
    if (l.variant == ScoreVariant::kExponents) return of_kind.template operator()<FwdModKind::kExponents>();
    if (l.variant == ScoreVariant::kDrop) return of_kind.template operator()<FwdModKind::kDrops>();
  }
  if constexpr (has_bias_kinds(D)) {
    if (l.variant == ScoreVariant::kBias) return of_kind.template operator()<FwdModKind::kBias>();
    if (l.variant == ScoreVariant::kLooseBias) return of_kind.template operator()<FwdModKind::kLooseBias>();
    if (l.variant == ScoreVariant::kFloatBias) return of_kind.template operator()<FwdModKind::kFloatBias>();
  }
  if (l.variant == ScoreVariant::kHide) return of_kind.template operator()<FwdModKind::kHides>();
  if (l.variant == ScoreVariant::kAll) return of_kind.template operator()<FwdModKind::kAll>();
  return not_compiled(l);
}

template <int D>
std::string launch_fwd_mod(const FwdCall& c, const Launch& l) {
  return dispatch_dtype(c.p.problem.dtype, [&]<typename E>() { return launch_fwd_mod_kind<E, D>(c, l); });
}

}  // namespace flash_ext::sm90
