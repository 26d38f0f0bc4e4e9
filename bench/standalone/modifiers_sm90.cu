// The Hopper forward with modifiers, without torch: against the portable kernel with modifiers, and timed beside the
// plain Hopper forward.
//
//   modifiers_sm90 test
//   modifiers_sm90 time [SEQLEN [ROUNDS]]
//
// bf16. -DHEAD_DIM=64 compiles another head_dim than 128, -DHEAD_DIM_V=64 another one of v. Timing: batch 4, 16 heads.
#include "modifiers_timing.cuh"
#include "sm80/run_fwd_mod.cuh"
#include "sm90/run_fwd_mod.cuh"

#ifndef HEAD_DIM
#define HEAD_DIM 128
#endif
#ifndef HEAD_DIM_V
#define HEAD_DIM_V HEAD_DIM
#endif

namespace standalone {

constexpr int kD = HEAD_DIM, kDv = HEAD_DIM_V, kPadded = padded_head_dim(kD, kDv);
constexpr int kCompiledD = kD <= 64 ? 64 : kD <= 128 ? 128 : kD <= 192 ? 192 : 256;
constexpr int kCompiledDv = kCompiledD == 192 && kDv <= 128 ? 128 : kCompiledD;

// ---- runs ---------------------------------------------------------------------------------------

struct Outputs {
  bf16* out;
  float *lse, *row_max;
};

__global__ void compare_stats_kernel(const float* a, const float* b, size_t count, Errors* errors) {
  for (size_t i = first_index(); i < count; i += index_step()) {
    const double difference = a[i] == b[i] ? 0. : fabs(double{a[i]} - b[i]) / fmax(1., fabs(double{b[i]}));
    atomic_max(&errors->largest_lse, difference < 1e30 ? difference : 1e30);
  }
}

class Runner {
 public:
  explicit Runner(const DeviceInfo& device) : device_(device) {}

  FwdParams params_of(const Case& c) {
    FwdParams f;
    f.problem = problem_of(c, kD, kDv);
    const Problem& p = f.problem;
    f.q = contiguous_view(q_, p.seqlen_q, c.heads, kD);
    f.k = contiguous_view(k_, p.seqlen_k, c.heads_k, kD);
    f.v = contiguous_view(v_, p.seqlen_k, c.heads_k, kDv);
    f.out = contiguous_view(want_.out, p.seqlen_q, c.heads, kDv);
    return f;
  }

  void fill(const Case& c) {
    fill_normal<bf16>(q_, c.total_q() * c.heads * kD, 1, c.amplitude);
    fill_normal<bf16>(k_, c.total_k() * c.heads_k * kD, 2, 1.f);
    fill_normal<bf16>(v_, c.total_k() * c.heads_k * kDv, 3, 1.f);
  }

  std::string run(FwdParams f, Modifiers m, const Outputs& to, bool portable, bool want_max, bool drawn) {
    m.unit_log2 = m.is_natural ? kLog2e : f.problem.abs_scale_log2;
    f.out.ptr = to.out;
    f.lse = to.lse;
    m.row_max = want_max ? to.row_max : nullptr;
    if (portable) return sm80::launch_fwd_mod<bf16, kPadded, SmemClass::kLarge>(f, m, device_);
    f.schedule = drawn ? counter_ : nullptr;
    return sm90::launch_fwd_mod<bf16, kCompiledD, kCompiledDv>(f, m, device_);
  }

  bool passes(const Case& c, const Named& named, bool want_max) {
    Modifiers m;
    named.set(m, c);
    const FwdParams f = params_of(c);
    const size_t rows = c.total_q() * c.heads, elements = rows * kDv;
    for (const Outputs* x : {&want_, &got_, &again_}) {
      CHECK_CUDA(cudaMemset(x->out, 0xff, elements * sizeof(bf16)));
      CHECK_CUDA(cudaMemset(x->lse, 0xff, rows * sizeof(float)));
      CHECK_CUDA(cudaMemset(x->row_max, 0, rows * sizeof(float)));
    }
    CHECK_CUDA(cudaMemset(counter_, 0x5a, sizeof(*counter_)));
    CHECK_CUDA(cudaMemset(errors_, 0, 3 * sizeof(Errors)));
    require(run(f, m, want_, true, want_max, false));
    require(run(f, m, got_, false, want_max, true));
    require(run(f, m, again_, false, want_max, false));
    compare_kernel<<<kBlocks, kThreads>>>(got_.out, want_.out, elements, errors_);
    compare_stats_kernel<<<kBlocks, kThreads>>>(got_.lse, want_.lse, rows, errors_);
    compare_stats_kernel<<<kBlocks, kThreads>>>(got_.row_max, want_.row_max, rows, errors_ + 1);
    compare_kernel<<<kBlocks, kThreads>>>(again_.out, got_.out, elements, errors_ + 2);
    CHECK_CUDA(cudaDeviceSynchronize());
    const std::vector<Errors> e = download(errors_, 3);
    const double relative = std::sqrt(e[0].squares / (e[0].want_squares > 0. ? e[0].want_squares : 1.));
    const bool ok = relative < 6e-3 && e[0].largest_lse < 1e-4 && e[1].largest_lse < 1e-4 && e[2].squares == 0.;
    if (!ok) {
      std::printf("FAIL %s, %s: relative %.2e largest %.2e lse %.2e max %.2e repeats %.2e\n", c.name.c_str(),
                  named.name.c_str(), relative, e[0].largest, e[0].largest_lse, e[1].largest_lse, e[2].largest);
      std::fflush(stdout);
    }
    worst_ = std::max(worst_, relative);
    return ok;
  }

  double worst() const { return worst_; }

 private:
  static Outputs outputs() {
    return {device_alloc<bf16>(kElements), device_alloc<float>(kElements / 64), device_alloc<float>(kElements / 64)};
  }

  static constexpr size_t kElements = size_t{1} << 21;
  DeviceInfo device_;
  bf16* q_ = device_alloc<bf16>(kElements);
  bf16* k_ = device_alloc<bf16>(kElements);
  bf16* v_ = device_alloc<bf16>(kElements);
  Outputs want_ = outputs(), got_ = outputs(), again_ = outputs();
  sm90::Counter* counter_ = device_alloc<sm90::Counter>(1);
  Errors* errors_ = device_alloc<Errors>(3);
  double worst_ = 0.;
};

int run_tests(const DeviceInfo& device) {
  Runner runner(device);
  int count = 0, failed = 0;
  for (const Case& c : cases()) {
    runner.fill(c);
    for (const Named& named : all_modifiers()) {
      failed += !runner.passes(c, named, count % 3 == 0);
      ++count;
    }
  }
  std::printf("%d tests, %d failed, largest relative difference %.2e\n", count, failed, runner.worst());
  return failed != 0;
}

// ---- timing -------------------------------------------------------------------------------------

class Timer {
 public:
  Timer(const DeviceInfo& device, int seqlen)
      : device_(device), seqlen_(seqlen), elements_(size_t{kBatch} * seqlen * kHeads * kD), biases_(seqlen, 5) {
    uint32_t seed = 0;
    for (bf16** x : {&q_, &k_, &v_, &out_}) {
      *x = device_alloc<bf16>(elements_);
      fill_normal<bf16>(*x, elements_, ++seed);
    }
    lse_ = device_alloc<float>(size_t{kBatch} * kHeads * seqlen);
  }

  void run(int rounds) {
    const double gflop = 2e-9 * (kD + kDv) * seqlen_ * static_cast<double>(seqlen_) * kBatch * kHeads;
    print_times(timed_cases(seqlen_, biases_), [&](const TimedCase& c) { return call_of(c); }, rounds, gflop);
  }

 private:
  FwdParams params(int window_right) const {
    FwdParams f;
    f.problem = timed_problem(seqlen_, kD, kDv, window_right);
    f.q = contiguous_view(q_, seqlen_, kHeads, kD);
    f.k = contiguous_view(k_, seqlen_, kHeads, kD);
    f.v = contiguous_view(v_, seqlen_, kHeads, kDv);
    f.out = contiguous_view(out_, seqlen_, kHeads, kDv);
    f.lse = lse_;
    f.schedule = counter_;
    return f;
  }

  std::function<void()> call_of(const TimedCase& c) {
    FwdParams f = params(c.window_right);
    if (c.set == nullptr) {
      if (!sm90::draws_items(f.problem)) f.schedule = nullptr;
      return [=, this] { require(sm90::launch_fwd<bf16, kCompiledD, kCompiledDv>(f, device_)); };
    }
    Modifiers m;
    c.set(m);
    m.unit_log2 = m.is_natural ? kLog2e : f.problem.abs_scale_log2;
    if (c.portable) {
      return [=, this] { require(sm80::launch_fwd_mod<bf16, kPadded, SmemClass::kLarge>(f, m, device_)); };
    }
    return [=, this] { require(sm90::launch_fwd_mod<bf16, kCompiledD, kCompiledDv>(f, m, device_)); };
  }

  DeviceInfo device_;
  int seqlen_;
  size_t elements_;
  BigBiases biases_;
  bf16 *q_, *k_, *v_, *out_;
  float* lse_;
  sm90::Counter* counter_ = device_alloc<sm90::Counter>(1);
};

}  // namespace standalone

int main(int argc, char** argv) {
  using namespace standalone;
  const DeviceInfo device = this_device();
  if (argument(argc, argv, 1, "test") == "test") return run_tests(device);
  const int seqlen = std::atoi(argument(argc, argv, 2, "4096").c_str());
  Timer(device, seqlen).run(std::atoi(argument(argc, argv, 3, "7").c_str()));
  return 0;
}
