// From a forward request with modifiers to a launch, for one compiled head dim. Included by the instantiation files
// only.
#pragma once

#include <cfloat>
#include <cmath>

#include "fwd_mod.cuh"
#include "run_fwd.cuh"

namespace flash_ext::sm90 {

// From the terms of tanh(t) / t in t^2, good for |t| <= limit.
template <typename Series>
Series series_of(const double (&terms)[Series::kTerms], double limit, double unit, const Problem& p,
                 const Modifiers& m) {
  Series series{};
  series.limit = -1.f;
  const double factor = static_cast<double>(p.softmax_scale) * m.inv_softcap;
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

// Rows of a tile of bias as TMA brings it: all, 1 where rows are broadcast, 0 where TMA cannot read the bias. One row
// for all knows no end, behind which a bias would add 0.
inline int staged_bias_rows(const BiasView& x, const Problem& p, int block_m) {
  if (x.ptr == nullptr || !x.staged) return 0;
  if (x.row_stride != 0) return block_m;
  return x.rows >= (p.is_varlen() ? p.total_q : p.seqlen_q) ? 1 : 0;
}

inline std::string encode_bias_map(CUtensorMap& map, const BiasView& x, const Problem& p, int box_rows) {
  static const EncodeTiled encode = find_encoder();
  if (encode == nullptr) return "the driver has no cuTensorMapEncodeTiled";
  // As encode_map() has it: a broadcast dimension has one entry.
  const int element = x.is_float ? 4 : 2;
  const auto bytes = [=](int64_t stride) { return static_cast<cuuint64_t>(stride == 0 ? 16 : element * stride); };
  const auto size = [](int64_t stride, int64_t n) { return static_cast<cuuint64_t>(stride == 0 ? 1 : n); };
  const cuuint64_t dims[5] = {static_cast<cuuint64_t>(x.cols), size(x.row_stride, x.rows),
                              size(x.head_stride, p.num_heads), size(x.batch_stride, p.batch), 1};
  const cuuint64_t strides[4] = {bytes(x.row_stride), bytes(x.head_stride), bytes(x.batch_stride), 16};
  const cuuint32_t box[5] = {static_cast<cuuint32_t>(128 / element), static_cast<cuuint32_t>(box_rows), 1, 1, 1}, ones[5] = {1, 1, 1, 1, 1};
  const CUtensorMapDataType type = x.is_float ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32 : map_type_of(p.dtype);
  const CUresult result = encode(&map, type, 5, const_cast<void*>(x.ptr), dims, strides, box, ones,
                                 CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                 CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result == CUDA_SUCCESS) return {};
  return cuda_error_text(static_cast<cudaError_t>(result), "cuTensorMapEncodeTiled");
}

// Whether add_far_bias() may read a bias in fp32 by pairs: the second element of the last one of a row may belong to no
// key, but must be in the memory of the tensor and must not be added to a key.
inline bool has_pairs(const BiasView& x, const Problem& p) {
  return x.aligned && x.has_room && (x.cols % 2 == 0 || (!p.is_varlen() && x.cols >= p.seqlen_k));
}

template <typename E, int D, int Dv, FwdModKind kKind>
std::string launch_fwd_mod_of(const FwdParams& p, const Modifiers& m, const DeviceInfo& d) {
  using T = FwdModTraits<E, D, Dv, kKind>;
  const Problem& r = p.problem;
  const bool unequal = p.schedule != nullptr && draws_items(r, m);
  const bool drawn = unequal || (p.schedule != nullptr && draws_short_tiles(r, d, T::kBlockM));
  FwdModArgs a{};
  std::string error = make_fwd_args(a.plain, p, fwd_grid(r, d, T::kBlockM, unequal), drawn);
  a.m = m;
  a.m.bias.aligned = has_pairs(m.bias, r);
  if (T::kLog2Maxima) a.m.unit_log2 = 1.f;  // of the maxima
  const double unit = T::kLog2Maxima ? kLog2e : 1.;
  a.cap = cap_series(unit, r, m);
  a.short_cap = short_cap_series(unit, r, m);
  a.scale_log2 = m.is_natural ? r.softmax_scale * kLog2e : m.unit_log2;
  a.bias_rows = staged_bias_rows(m.bias, r, T::kBlockM);
  a.bias_steps = {m.bias.head_stride != 0, m.bias.batch_stride != 0};
  a.q_slots = !T::kModTile.bias_apart && a.bias_rows > 0 ? 1 : T::kQSlots;
  FwdModMaps maps{};
  if (error.empty()) error = encode_fwd_maps<T>(maps.plain, p);
  if (error.empty() && a.bias_rows > 0) error = encode_bias_map(maps.bias, m.bias, r, a.bias_rows);
  if (!error.empty()) return "fwd_mod_sm90: " + error;
  const int64_t ctas = std::min<int64_t>(a.plain.grid.ctas, d.num_sms);
  return launch("fwd_mod_sm90", fwd_mod_sm90_kernel<T>, ctas, T::kThreads, T::kSmemBytes, p.stream, a, maps);
}

template <typename E, int D, int Dv>
std::string launch_fwd_mod(const FwdParams& p, const Modifiers& m, const DeviceInfo& d) {
  const bool changes = m.is_natural || p.problem.score_factor != 1.f;
  // Kernels of their own are compiled for 25 s. Others would gain 0.03 to 0.08 of plain for dropout (head_dim 64, 192, 256)
  // and 0.1 for a bias that TMA cannot read; what slopes, softcaps and biases would gain at other sizes is not measured.
  if constexpr (has_tall_changes(D)) {
    if (prefers_tall_slopes(p.problem, m, d)) return launch_fwd_mod_of<E, D, Dv, FwdModKind::kTallSlopes>(p, m, d);
    if (prefers_tall_cap(p.problem, m, d)) return launch_fwd_mod_of<E, D, Dv, FwdModKind::kTallCap>(p, m, d);
    if (prefers_tall_drops(p.problem, m, d)) return launch_fwd_mod_of<E, D, Dv, FwdModKind::kTallDrops>(p, m, d);
  }
  if constexpr (D == 128) {
    const bool bias = m.bias.ptr != nullptr;
    const bool alone = (m.softcap > 0.f) + (m.slopes != nullptr) + bias == 1 && m.rng == nullptr;
    if (alone && !bias) return launch_fwd_mod_of<E, D, Dv, FwdModKind::kExponents>(p, m, d);
    constexpr int kBlockM = FwdModTraits<E, D, Dv, FwdModKind::kBias>::kBlockM;
    if (alone && staged_bias_rows(m.bias, p.problem, kBlockM) > 0) {
      return launch_fwd_mod_of<E, D, Dv, FwdModKind::kBias>(p, m, d);
    }
    if (m.rng != nullptr && !changes) return launch_fwd_mod_of<E, D, Dv, FwdModKind::kDrops>(p, m, d);
  }
  if (changes || m.rng != nullptr) return launch_fwd_mod_of<E, D, Dv, FwdModKind::kAll>(p, m, d);
  if constexpr (has_tall_tiles(D)) {
    if (prefers_tall_tiles(p.problem, m, d)) return launch_fwd_mod_of<E, D, Dv, FwdModKind::kTall>(p, m, d);
  }
  return launch_fwd_mod_of<E, D, Dv, FwdModKind::kHides>(p, m, d);
}

template <int D, int Dv>
std::string run_fwd_mod_hd(const FwdParams& p, const Modifiers& m, const DeviceInfo& d) {
  return dispatch_dtype(p.problem.dtype, [&]<typename E>() { return launch_fwd_mod<E, D, Dv>(p, m, d); });
}

}  // namespace flash_ext::sm90
