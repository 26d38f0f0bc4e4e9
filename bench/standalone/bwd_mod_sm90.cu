// The Hopper backward with modifiers, without torch: against the portable kernels with modifiers, and timed beside the
// plain Hopper backward.
//
//   bwd_mod_sm90 test
//   bwd_mod_sm90 time [SEQLEN [ROUNDS]]
//
// bf16. -DHEAD_DIM=64 compiles another head_dim than 128, -DHEAD_DIM_V=64 another one of v, -DDETERMINISTIC the kernels
// without additions to memory, which are those above 128. Timing: batch 4, 16 heads.
#include "modifiers_timing.cuh"
#include "sm80/run_bwd_mod.cuh"
#include "sm80/run_fwd_mod.cuh"
#include "sm90/run_bwd_wide_mod.cuh"

#ifndef HEAD_DIM
#define HEAD_DIM 128
#endif
#ifndef HEAD_DIM_V
#define HEAD_DIM_V HEAD_DIM
#endif

namespace standalone {

constexpr int kD = HEAD_DIM, kDv = HEAD_DIM_V, kPadded = padded_head_dim(kD, kDv);
constexpr int kCompiledD = kPadded <= 64 ? 64 : kPadded <= 128 ? 128 : kPadded;
#ifdef DETERMINISTIC
constexpr bool kTwoKernels = true;
#else
constexpr bool kTwoKernels = kPadded > 128;
#endif

bool is_taken(const Problem& p, const Modifiers& m) {
  return kTwoKernels ? sm90::is_wide_mod_taken(p, m, true) : sm90::is_bwd_mod_taken(p, m);
}
std::string run_modified(const BwdParams& p, const Modifiers& m, const DeviceInfo& d) {
  if constexpr (kTwoKernels) {
    return sm90::run_bwd_wide_mod_as<bf16, kCompiledD>(p, m, d);
  } else {
    return sm90::run_bwd_mod_as<bf16, kCompiledD>(p, m, d);
  }
}
std::string run_plain(const BwdParams& p, const DeviceInfo& d) {
  if constexpr (kPadded > 128) {
    return sm90::run_bwd_wide_as<bf16, kPadded, kPadded>(p, d);
  } else {
    return sm90::run_bwd_as<bf16, kCompiledD, kTwoKernels>(p, d);
  }
}

// The portable backward without what its launcher does for gradients of a bias, which is another program's.
std::string run_portable(const BwdParams& p, const Modifiers& m, const DeviceInfo& d) {
  const int64_t rows = p.problem.total_q * p.problem.num_heads;
  const int64_t ctas = (rows * kPassLanes<kPadded> + kPassThreads - 1) / kPassThreads;
  const std::string error =
      launch("bwd_preprocess", bwd_preprocess_kernel<bf16, kPadded>, ctas, kPassThreads, 0, p.stream, p);
  if (!error.empty()) return error;
  return sm80::launch_bwd_mod<bf16, kPadded, SmemClass::kLarge>(p, m, d, Start::kInTurn);
}

// Bytes behind the pointers of a tensor's view do not matter to views of another length.
StridedView view_of(const void* x, int64_t seqlen, int heads, int dim) {
  return contiguous_view(const_cast<void*>(x), seqlen, heads, dim);
}

// ---- tests --------------------------------------------------------------------------------------

struct Gradients {
  bf16 *dq, *dk, *dv;
};

class Runner {
 public:
  explicit Runner(const DeviceInfo& device) : device_(device) {}

  BwdParams params_of(const Problem& p, const Gradients& to) {
    BwdParams b;
    b.problem = p;
    b.q = view_of(q_, p.seqlen_q, p.num_heads, kD);
    b.k = view_of(k_, p.seqlen_k, p.num_heads_k, kD);
    b.v = view_of(v_, p.seqlen_k, p.num_heads_k, kDv);
    b.out = view_of(out_, p.seqlen_q, p.num_heads, kDv);
    b.dout = view_of(dout_, p.seqlen_q, p.num_heads, kDv);
    b.dq = view_of(to.dq, p.seqlen_q, p.num_heads, kD);
    b.dk = view_of(to.dk, p.seqlen_k, p.num_heads_k, kD);
    b.dv = view_of(to.dv, p.seqlen_k, p.num_heads_k, kDv);
    b.lse = lse_;
    b.dlse = dlse_;
    b.row_stats = row_stats_;
    b.dq_accum = dq_accum_;
    return b;
  }

  void fill(const Case& c) {
    fill_normal<bf16>(q_, c.total_q() * c.heads * kD, 1, c.amplitude);
    fill_normal<bf16>(k_, c.total_k() * c.heads_k * kD, 2, 1.f);
    fill_normal<bf16>(v_, c.total_k() * c.heads_k * kDv, 3, 1.f);
    fill_normal<bf16>(dout_, c.total_q() * c.heads * kDv, 4, 1.f);
    fill_normal<float>(dlse_, c.total_q() * c.heads, 5, 1.f);
  }

  bool passes(const Case& c, const Named& named) {
    Modifiers m;
    named.set(m, c);
    const Problem p = problem_of(c, kD, kDv);
    m.unit_log2 = m.is_natural ? kLog2e : p.abs_scale_log2;
    FwdParams f;
    f.problem = p;
    f.q = view_of(q_, p.seqlen_q, p.num_heads, kD);
    f.k = view_of(k_, p.seqlen_k, p.num_heads_k, kD);
    f.v = view_of(v_, p.seqlen_k, p.num_heads_k, kDv);
    f.out = view_of(out_, p.seqlen_q, p.num_heads, kDv);
    f.lse = lse_;
    require(sm80::launch_fwd_mod<bf16, kPadded, SmemClass::kLarge>(f, m, device_));
    require(run_portable(params_of(p, want_), m, device_));
    for (const Gradients* x : {&got_, &again_}) {
      for (bf16* gradient : {x->dq, x->dk, x->dv}) CHECK_CUDA(cudaMemset(gradient, 0xff, kElements * sizeof(bf16)));
      CHECK_CUDA(cudaMemset(row_stats_, x == &got_ ? 0xff : 0x5a, kWorkspace / 4 * sizeof(float)));
      CHECK_CUDA(cudaMemset(dq_accum_, 0xff, kWorkspace * sizeof(float)));
      require(run_modified(params_of(p, *x), m, device_));
    }
    const size_t queries = p.total_q * c.heads, keys = p.total_k * c.heads_k;
    CHECK_CUDA(cudaMemset(errors_, 0, 6 * sizeof(Errors)));
    const auto compare = [&](const bf16* a, const bf16* b, size_t count, int at) {
      compare_kernel<<<kBlocks, kThreads>>>(a, b, count, errors_ + at);
    };
    compare(got_.dq, want_.dq, queries * kD, 0);
    compare(got_.dk, want_.dk, keys * kD, 1);
    compare(got_.dv, want_.dv, keys * kDv, 2);
    compare(again_.dq, got_.dq, queries * kD, 3);
    compare(again_.dk, got_.dk, keys * kD, 4);
    compare(again_.dv, got_.dv, keys * kDv, 5);
    CHECK_CUDA(cudaDeviceSynchronize());
    const std::vector<Errors> e = download(errors_, 6);
    double relative[3];
    bool ok = e[4].squares == 0. && e[5].squares == 0.;
    if (kTwoKernels) ok &= e[3].squares == 0.;  // else dQ is added in any order
    for (int i = 0; i < 3; ++i) {
      // Gradients that are 0, such as dq of rows that see one key, are judged by their absolute error.
      relative[i] = std::sqrt(e[i].squares) / std::max(1e-2, std::sqrt(e[i].want_squares));
      ok &= relative[i] < 1e-2;
      worst_ = std::max(worst_, relative[i]);
    }
    ok &= e[3].largest < 0.1 * std::max(1., e[0].largest) + 0.5;
    if (!ok) {
      std::printf("FAIL %s, %s: dq %.2e dk %.2e dv %.2e largest %.1e %.1e %.1e again %.1e %.1e %.1e\n", c.name.c_str(),
                  named.name.c_str(), relative[0], relative[1], relative[2], e[0].largest, e[1].largest, e[2].largest,
                  e[3].largest, e[4].largest, e[5].largest);
      std::fflush(stdout);
    }
    return ok;
  }

  double worst() const { return worst_; }

 private:
  static Gradients gradients() {
    return {device_alloc<bf16>(kElements), device_alloc<bf16>(kElements), device_alloc<bf16>(kElements)};
  }

  static constexpr size_t kElements = size_t{1} << 21, kWorkspace = size_t{1} << 23;
  DeviceInfo device_;
  bf16* q_ = device_alloc<bf16>(kElements);
  bf16* k_ = device_alloc<bf16>(kElements);
  bf16* v_ = device_alloc<bf16>(kElements);
  bf16* out_ = device_alloc<bf16>(kElements);
  bf16* dout_ = device_alloc<bf16>(kElements);
  Gradients want_ = gradients(), got_ = gradients(), again_ = gradients();
  float* lse_ = device_alloc<float>(kElements / 64);
  float* dlse_ = device_alloc<float>(kElements / 64);
  float* row_stats_ = device_alloc<float>(kWorkspace / 4);
  float* dq_accum_ = device_alloc<float>(kWorkspace);
  Errors* errors_ = device_alloc<Errors>(6);
  double worst_ = 0.;
};

int run_tests(const DeviceInfo& device) {
  Runner runner(device);
  int count = 0, failed = 0;
  for (const Case& c : cases()) {
    runner.fill(c);
    for (const Named& named : all_modifiers()) {
      Modifiers m;
      named.set(m, c);
      if (!is_taken(problem_of(c, kD, kDv), m)) continue;
      failed += !runner.passes(c, named);
      ++count;
    }
    std::printf("%s: %d so far, %d failed\n", c.name.c_str(), count, failed);
    std::fflush(stdout);
  }
  std::printf("%d tests, %d failed, largest relative difference %.2e\n", count, failed, runner.worst());
  return failed != 0;
}

// ---- timing -------------------------------------------------------------------------------------

class Timer {
 public:
  Timer(const DeviceInfo& device, int seqlen)
      : device_(device), seqlen_(seqlen), elements_(size_t{kBatch} * seqlen * kHeads * kD), biases_(seqlen, 9) {
    uint32_t seed = 0;
    for (bf16** x : {&q_, &k_, &v_, &dout_, &out_, &dq_, &dk_, &dv_}) {
      *x = device_alloc<bf16>(elements_);
      fill_normal<bf16>(*x, elements_, ++seed, x == &out_ ? 0.05f : 1.f);
    }
    const size_t rows = size_t{kBatch} * kHeads * seqlen;
    lse_ = device_alloc<float>(rows);
    upload(lse_, std::vector<float>(rows, std::log(seqlen * 0.7f) + 0.5f));
    row_stats_ = device_alloc<float>(4 * rows + 1024);
    dq_accum_ = device_alloc<float>(rows * std::max(128, kPadded));
  }

  void run(int rounds) {
    const double gflop = 5e-9 * (kD + kDv) * seqlen_ * static_cast<double>(seqlen_) * kBatch * kHeads;
    print_times(timed_cases(seqlen_, biases_), [&](const TimedCase& c) { return call_of(c); }, rounds, gflop);
  }

 private:
  BwdParams params(int window_right) const {
    BwdParams b;
    b.problem = timed_problem(seqlen_, kD, kDv, window_right);
    const auto view = [&](bf16* x, int dim) { return view_of(x, seqlen_, kHeads, dim); };
    b.q = view(q_, kD), b.k = view(k_, kD), b.v = view(v_, kDv), b.out = view(out_, kDv), b.dout = view(dout_, kDv);
    b.dq = view(dq_, kD), b.dk = view(dk_, kD), b.dv = view(dv_, kDv);
    b.lse = lse_;
    b.row_stats = row_stats_;
    b.dq_accum = dq_accum_;
    return b;
  }

  std::function<void()> call_of(const TimedCase& c) {
    const BwdParams p = params(c.window_right);
    if (c.set == nullptr) {
      return [=, this] { require(run_plain(p, device_)); };
    }
    Modifiers m;
    c.set(m);
    m.unit_log2 = m.is_natural ? kLog2e : p.problem.abs_scale_log2;
    if (c.portable || !is_taken(p.problem, m)) return [=, this] { require(run_portable(p, m, device_)); };
    return [=, this] { require(run_modified(p, m, device_)); };
  }

  DeviceInfo device_;
  int seqlen_;
  size_t elements_;
  BigBiases biases_;
  bf16 *q_, *k_, *v_, *dout_, *out_, *dq_, *dk_, *dv_;
  float *lse_, *row_stats_, *dq_accum_;
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
