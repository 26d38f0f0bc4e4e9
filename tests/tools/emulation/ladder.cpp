// The kernels of examples/ladder on emulated warps, against plain loops in float64. Built by tests/examples/test_ladder_kernels.py.
#include <random>

#include "examples/ladder/kernels/flash1.cuh"
#include "examples/ladder/kernels/flash1_backward.cuh"
#include "examples/ladder/kernels/flash2.cuh"
#include "examples/ladder/kernels/flash2_backward.cuh"
#include "examples/ladder/kernels/softmax.cuh"

namespace flash_ext::ladder {
namespace {

std::mt19937 generator(7);
float normal() { return std::normal_distribution<float>(0, 1)(generator); }

struct Case {
  int64_t heads;
  int seqlen_q, seqlen_k;
};

// Everything lies in vectors between which nothing is written: a NaN that is read shows.
template <int D>
struct Data {
  Case c;
  std::vector<uint16_t> q, k, v, out;
  std::vector<float> lse, acc, row_max, row_sum;
  Problem p{};

  explicit Data(const Case& of) : c(of) {
    fill(q, c.seqlen_q), fill(k, c.seqlen_k), fill(v, c.seqlen_k);
    out.assign(c.heads * c.seqlen_q * D, 0x7fff);
    acc.assign(out.size(), NAN);
    for (std::vector<float>* x : {&lse, &row_max, &row_sum}) x->assign(c.heads * c.seqlen_q, NAN);
    p = {.q = q.data(),
         .k = k.data(),
         .v = v.data(),
         .out = out.data(),
         .heads = c.heads,
         .seqlen_q = c.seqlen_q,
         .seqlen_k = c.seqlen_k,
         .scale = 0.3f,
         .lse = lse.data(),
         .ctas_per_head = 1,
         .acc = acc.data(),
         .row_max = row_max.data(),
         .row_sum = row_sum.data()};
  }
  void fill(std::vector<uint16_t>& x, int seqlen) {
    for (int64_t i = 0; i < c.heads * seqlen * D; ++i) x.push_back(ptx::narrow<Element>(normal()));
  }

  // The largest errors of the output and of the log of the sum of exponentials.
  std::pair<double, double> errors(bool has_lse) const {
    double of_out = 0, of_lse = 0;
    for (int64_t row = 0; row < c.heads * c.seqlen_q; ++row) {
      const int64_t first_key = row / c.seqlen_q * c.seqlen_k;
      std::vector<double> weights(c.seqlen_k), expected(D, 0.);
      double sum = 0;
      for (int j = 0; j < c.seqlen_k; ++j) {
        double score = 0;
        for (int x = 0; x < D; ++x) score += double{at(q, row, x)} * at(k, first_key + j, x);
        sum += weights[j] = std::exp(score * p.scale);
      }
      for (int j = 0; j < c.seqlen_k; ++j) {
        for (int x = 0; x < D; ++x) expected[x] += weights[j] / sum * at(v, first_key + j, x);
      }
      for (int x = 0; x < D; ++x) {
        const double error = std::abs(at(out, row, x) - expected[x]);
        of_out = error <= of_out ? of_out : error;  // NaN stays
      }
      const double found = has_lse ? lse[row] : row_max[row] * p.scale + std::log(row_sum[row]);
      const double error = std::abs(found - std::log(sum));
      of_lse = error <= of_lse ? of_lse : error;
    }
    return {of_out, of_lse};
  }
  float at(const std::vector<uint16_t>& x, int64_t row, int column) const {
    return ptx::widen<Element>(x[row * D + column]);
  }
};

int runs = 0, wrong = 0;
const char* only = "";  // kernels whose names begin so

bool is_left_out(const char* name) { return std::strncmp(name, only, std::strlen(only)) != 0; }

void report(bool good, const char* name, const Case& c, double of_out, double of_lse) {
  std::printf("%s %-28s %d heads, %d queries, %d keys, copies %s: errors %.1e, %.1e\n", good ? "ok  " : "FAIL", name,
              static_cast<int>(c.heads), c.seqlen_q, c.seqlen_k, emu::lazy ? "late" : "early", of_out, of_lse);
  std::fflush(stdout);
  ++runs, wrong += !good;
  if (emu::fault != 0 && !good) std::exit(1);  // noticed
}

template <int D, bool kNormaliseEachStep>
void flash2(const char* name, const Case& c, bool one_cta) {
  if (is_left_out(name)) return;
  using T = Flash2<D, kNormaliseEachStep>;
  Data<D> x(c);
  x.p.ctas_per_head = one_cta ? 1 : (c.seqlen_q + T::kBlockM - 1) / T::kBlockM;
  for (blockIdx.x = 0; blockIdx.x < c.heads * x.p.ctas_per_head; ++blockIdx.x) {
    emu::run_cta(T::kThreads, [&] { flash2_kernel<T>(x.p); });
  }
  const auto [of_out, of_lse] = x.errors(true);
  report(of_out < 3e-2 && of_lse < 1e-4, name, c, of_out, of_lse);
}

template <typename T>
void flash1(const char* name, const Case& c) {
  if (is_left_out(name)) return;
  Data<T::D> x(c);
  for (blockIdx.x = 0; blockIdx.x < c.heads; ++blockIdx.x) {
    emu::run_cta(T::kThreads, [&] { flash1_kernel<T>(x.p); });
  }
  const auto [of_out, of_lse] = x.errors(false);
  report(of_out < 3e-2 && of_lse < 1e-4, name, c, of_out, of_lse);
}

// Gradients of rows of D, in float64, and what a kernel needs of the forward.
template <int D>
struct BackwardData {
  Case c;
  std::vector<uint16_t> q, k, v, out, dout, dq, dk, dv;
  std::vector<float> lse, stats, acc;
  std::vector<double> true_dq, true_dk, true_dv;
  BackwardProblem p{};

  // far_below: every score is about -120, so that exp(-lse) is infinite.
  BackwardData(const Case& of, bool far_below) : c(of) {
    const int64_t queries = c.heads * c.seqlen_q, keys = c.heads * c.seqlen_k;
    for (std::vector<uint16_t>* x : {&q, &dout}) fill(*x, queries);
    for (std::vector<uint16_t>* x : {&k, &v}) fill(*x, keys);
    for (size_t i = 0; far_below && i < q.size(); i += D) q[i] = ptx::narrow<Element>(-16.f);
    for (size_t i = 0; far_below && i < k.size(); i += D) k[i] = ptx::narrow<Element>(25.f);
    for (std::vector<uint16_t>* x : {&out, &dq}) x->assign(queries * D, 0x7fff);
    for (std::vector<uint16_t>* x : {&dk, &dv}) x->assign(keys * D, 0x7fff);
    lse.assign(queries, NAN), stats.assign(2 * queries, NAN), acc.assign(queries * D, NAN);
    true_dq.assign(queries * D, 0.), true_dk.assign(keys * D, 0.), true_dv.assign(keys * D, 0.);
    p = {.q = q.data(),
         .k = k.data(),
         .v = v.data(),
         .out = out.data(),
         .lse = lse.data(),
         .dout = dout.data(),
         .dq = dq.data(),
         .dk = dk.data(),
         .dv = dv.data(),
         .stats = stats.data(),
         .acc = acc.data(),
         .heads = c.heads,
         .seqlen_q = c.seqlen_q,
         .seqlen_k = c.seqlen_k,
         .scale = 0.3f};
    for (int64_t row = 0; row < queries; ++row) differentiate(row);
  }
  void fill(std::vector<uint16_t>& x, int64_t rows) {
    for (int64_t i = 0; i < rows * D; ++i) x.push_back(ptx::narrow<Element>(normal()));
  }
  double at(const std::vector<uint16_t>& x, int64_t row, int column) const {
    return ptx::widen<Element>(x[row * D + column]);
  }
  double dot(const std::vector<uint16_t>& x, int64_t row, const std::vector<uint16_t>& y, int64_t other) const {
    double sum = 0;
    for (int i = 0; i < D; ++i) sum += at(x, row, i) * at(y, other, i);
    return sum;
  }
  void differentiate(int64_t row) {
    const int64_t first_key = row / c.seqlen_q * c.seqlen_k;
    std::vector<double> weights(c.seqlen_k), expected(D, 0.);
    double sum = 0, delta = 0;
    for (int j = 0; j < c.seqlen_k; ++j) sum += weights[j] = std::exp(dot(q, row, k, first_key + j) * p.scale);
    lse[row] = static_cast<float>(std::log(sum));
    for (int j = 0; j < c.seqlen_k; ++j) {
      weights[j] /= sum;
      for (int x = 0; x < D; ++x) expected[x] += weights[j] * at(v, first_key + j, x);
    }
    for (int x = 0; x < D; ++x) {
      out[row * D + x] = ptx::narrow<Element>(static_cast<float>(expected[x]));
      delta += expected[x] * at(dout, row, x);
    }
    for (int j = 0; j < c.seqlen_k; ++j) {
      const int64_t key = first_key + j;
      const double ds = weights[j] * (dot(dout, row, v, key) - delta) * p.scale;
      for (int x = 0; x < D; ++x) {
        true_dq[row * D + x] += ds * at(k, key, x);
        true_dk[key * D + x] += ds * at(q, row, x);
        true_dv[key * D + x] += weights[j] * at(dout, row, x);
      }
    }
  }
  // Of the largest element of what is expected.
  double error(const std::vector<uint16_t>& found, const std::vector<double>& expected) const {
    double worst = 0, largest = 0;
    for (size_t i = 0; i < expected.size(); ++i) {
      const double error = std::abs(ptx::widen<Element>(found[i]) - expected[i]);
      worst = error <= worst ? worst : error;  // NaN stays
      largest = std::max(largest, std::abs(expected[i]));
    }
    return worst / largest;
  }
};

void run_grid(int64_t ctas, int threads, const std::function<void()>& kernel) {
  for (blockIdx.x = 0; blockIdx.x < ctas; ++blockIdx.x) emu::run_cta(threads, kernel);
}

template <int kVersion, int D>
void backward(const char* name, const Case& c, bool far_below = false) {
  if (is_left_out(name)) return;
  BackwardData<D> x(c, far_below);
  const int64_t rows = c.heads * c.seqlen_q, passes = (rows + kPassRows - 1) / kPassRows;
  run_grid(passes, kPassThreads, [&] { stats_kernel<D>(x.p); });
  if constexpr (kVersion == 1) {
    using T = Flash1BackwardOf<D>;
    run_grid(c.heads, T::kThreads, [&] { flash1_backward_kernel<T>(x.p); });
  } else {
    using T = Flash2BackwardOf<D>;
    std::fill(x.acc.begin(), x.acc.end(), 0.f);
    run_grid(c.heads * ((c.seqlen_k + T::kBlockN - 1) / T::kBlockN), T::kThreads,
             [&] { flash2_backward_kernel<T>(x.p); });
    run_grid(passes, kPassThreads, [&] { round_kernel<D>(x.p); });
  }
  const double of_dq = x.error(x.dq, x.true_dq), of_dk = x.error(x.dk, x.true_dk), of_dv = x.error(x.dv, x.true_dv);
  const double of_keys = of_dk <= of_dv || std::isnan(of_dv) ? of_dv : of_dk;
  // With the large column, what dS is rounded by counts 16 to 25 times.
  const double limit = far_below ? 0.3 : 1e-2;
  report(of_dq < limit && of_keys < limit, name, c, of_dq, of_keys);
}

template <Passes kPasses>
void softmax(const char* name, int rows, int length, bool starts_hidden) {
  if (is_left_out(name)) return;
  alignas(16) static float x[1 << 14], out[1 << 14];
  std::fill(std::begin(out), std::end(out), NAN);
  for (int i = 0; i < rows * length; ++i) x[i] = starts_hidden && i % length < 9 ? -INFINITY : 30 * normal();
  for (blockIdx.x = 0; blockIdx.x < static_cast<uint32_t>(rows); ++blockIdx.x) {
    emu::run_cta(kSoftmaxThreads, [&] {
      softmax_kernel<kPasses>(reinterpret_cast<const float4*>(x), reinterpret_cast<float4*>(out), length / 4);
    });
  }
  double worst = 0;
  for (int row = 0; row < rows; ++row) {
    const float* of = x + row * length;
    const double largest = *std::max_element(of, of + length);
    double sum = 0;
    for (int i = 0; i < length; ++i) sum += std::exp(of[i] - largest);
    for (int i = 0; i < length; ++i) {
      const double error = std::abs(out[row * length + i] - std::exp(of[i] - largest) / sum);
      worst = error <= worst ? worst : error;
    }
  }
  report(worst < 1e-5, name, {rows, 1, length}, worst, 0);
}

void run_all() {
  for (const bool lazy : {false, true}) {
    emu::lazy = lazy;
    flash2<64, false>("flash2 64", {2, 130, 150}, false);
    flash2<64, true>("flash2 64, divided each step", {1, 100, 200}, false);
    flash2<128, false>("flash2 128, one CTA a head", {1, 260, 129}, true);
    flash2<128, true>("flash2 128, both", {1, 140, 64}, true);
    flash1<Flash1<64, 32, 256, 8, 64>>("flash1 64, 32 x 256", {1, 70, 300});
    flash1<Flash1<64, 64, 256, 8, 32>>("flash1 64, 64 x 256", {2, 65, 257});
    flash1<Flash1<64, 32, 128, 4, 64>>("flash1 64, 32 x 128", {1, 33, 400});
    flash1<Flash1<128, 32, 256, 8, 64>>("flash1 128, 32 x 256", {1, 40, 257});
    flash1<Flash1<128, 32, 128, 4, 64>>("flash1 128, 32 x 128", {1, 64, 128});
    flash1<Flash1<128, 16, 128, 4, 128>>("flash1 128, 16 x 128", {1, 50, 140});
    backward<1, 64>("flash1 backward 64", {2, 70, 300});
    backward<1, 128>("flash1 backward 128", {1, 45, 257});
    backward<2, 64>("flash2 backward 64", {2, 130, 150});
    backward<2, 128>("flash2 backward 128", {1, 75, 200});
  }
  backward<2, 64>("flash2 backward, far below 0", {1, 20, 100}, true);
  softmax<Passes::kThree>("softmax in three passes", 2, 4000, true);
  softmax<Passes::kTwo>("softmax in two", 2, 4000, true);
  softmax<Passes::kBlocks>("softmax in blocks", 2, 4000, true);
  softmax<Passes::kOnChip>("softmax on chip", 2, 4000, true);
  std::printf("%d of %d runs are wrong\n", wrong, runs);
}

}  // namespace
}  // namespace flash_ext::ladder

int main(int argc, char** argv) {
  // --fault NUMBER KERNELS: until it is noticed.
  if (argc == 4 && std::strcmp(argv[1], "--fault") == 0) {
    emu::fault = std::atoi(argv[2]);
    flash_ext::ladder::only = argv[3];
  }
  flash_ext::ladder::run_all();
  return flash_ext::ladder::wrong == 0 ? 0 : 1;
}
