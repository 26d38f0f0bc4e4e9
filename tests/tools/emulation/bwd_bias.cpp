// csrc/sm80/bwd_bias/kernel.cuh on a CPU against a model in float64. Built and run by tests/kernels/test_emulation.py.
//
//   bwd_bias [--all] [--seed N] [--fault N]
//
// A few small cases, or with --all a list that reaches every branch; each with both types and both classes of shared
// memory, with copies as early and as late as allowed. Prints a line a run; returns 0 if all of them agree.
#include "bias_model.h"

#include "arguments.h"  // behind what it sets

namespace flash_ext {
namespace {

template <typename E>
BiasGradient wanted(const BiasData<E>& x) {
  const Case& c = x.c;
  BiasGradient g;
  g.batch = c.want_slopes ? (c.slopes_by_batch ? x.batch : 1) : x.bias_batch();
  g.heads = c.want_slopes ? c.heads : x.bias_heads();
  const bool has_table = c.reach >= 0;
  g.rows = c.want_slopes || has_table ? 1 : x.bias_rows();
  g.cols = c.want_slopes ? 1 : has_table ? x.entries() : x.bias_cols();
  g.sum_rows = g.rows == 1;
  g.sum_cols = g.cols == 1 || has_table;
  g.is_slope = c.want_slopes;
  g.reach = c.reach;
  g.splits = g.sum_rows ? c.splits : 1;
  g.is_float = c.bias_fp32 || c.want_slopes || has_table || g.splits > 1;
  return g;
}

// Relative error of the result in the 2-norm.
template <typename E>
double error(const BiasGradient& g, const std::vector<double>& want) {
  double error = 0, norm = 0;
  for (size_t i = 0; i < want.size(); ++i) {
    double got = 0;
    for (int split = 0; split < g.splits; ++split) {
      const size_t at = split * want.size() + i;
      got += g.is_float ? static_cast<float*>(g.out)[at] : ptx::widen<E>(static_cast<uint16_t*>(g.out)[at]);
    }
    error += (got - want[i]) * (got - want[i]);
    norm += want[i] * want[i];
  }
  return std::sqrt(norm > 0 ? error / norm : error);
}

template <typename E, SmemClass kClass>
bool agrees(const Case& c, int ctas, bool lazy) {
  using T = sm80::BwdBiasTraits<E, kClass>;
  BiasData<E> x(c);
  BiasGradient g = wanted(x);
  const std::vector<double> want = BiasModel<E>{x}.gradient(g);
  std::vector<float> out32(want.size() * g.splits, g.reach < 0 ? NAN : 0.f);
  std::vector<uint16_t> out16(want.size() + 8, 0x7fff);  // NaN of both types
  g.out = g.is_float ? static_cast<void*>(out32.data()) : aligned(out16);
  const sm80::BiasGrid grid = sm80::BiasGrid::of<T>(x.params, g);
  emu::lazy = lazy;
  gridDim.x = static_cast<uint32_t>(std::min<int64_t>(grid.tiles, ctas));
  for (blockIdx.x = 0; blockIdx.x < gridDim.x; ++blockIdx.x) {
    emu::run_cta(T::kThreads, [&] { sm80::bwd_bias_kernel<T>(x.params, x.modifiers, g, grid); });
  }
  const bool is_half = std::is_same_v<E, __half>;
  // The rounding of the result to its type, or of fp32 sums. With two seeds the worst of all cases were 2.0e-3 (bf16),
  // 2.5e-4 (fp16) and 6.6e-6 (fp32).
  const double limit = g.is_float ? 2e-5 : is_half ? 6e-4 : 4e-3, found = error<E>(g, want);
  const bool good = found < limit;  // false for NaN
  std::printf("%s %-32s %s %s %s %3lld tiles, error %.1e\n", good ? "ok  " : "FAIL", c.name.c_str(),
              is_half ? "fp16" : "bf16", kClass == SmemClass::kLarge ? "227 KB" : " 99 KB", lazy ? "late " : "early",
              static_cast<long long>(grid.tiles), found);
  std::fflush(stdout);
  return good;
}

// Early and late copies meet both classes and both types; how many CTAs share the tiles varies as well.
int count_wrong(const std::vector<Case>& cases) {
  int wrong = 0, number = 0;
  for (const Case& c : cases) {
    if (emu::fault != 0 && wrong > 0) break;  // it is noticed
    wrong += !agrees<__nv_bfloat16, SmemClass::kLarge>(c, c.ctas, false);
    wrong += !agrees<__half, SmemClass::kLarge>(c, c.ctas, true);
    wrong += !agrees<__half, SmemClass::kSmall>(c, 1 + (number + 2) % 4, false);
    wrong += !agrees<__nv_bfloat16, SmemClass::kSmall>(c, 1 + (number + 3) % 4, true);
    ++number;
  }
  std::printf("%d of %d runs are wrong\n", wrong, 4 * number);
  return wrong;
}

}  // namespace
}  // namespace flash_ext

int main(int argc, char** argv) {
  return emu::try_cases(argc, argv, flash_ext::generator,
                        [](bool all) { return flash_ext::count_wrong(all ? all_cases() : few_cases()); });
}
