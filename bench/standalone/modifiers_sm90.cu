// The Hopper forward with modifiers, without torch: against the portable kernel with modifiers, and timed beside the
// plain Hopper forward.
//
//   modifiers_sm90 test [CTAS]
//   modifiers_sm90 time [SEQLEN [ROUNDS]]
//   modifiers_sm90 tall [SEQLEN [ROUNDS]]
//
// `test` compares the kernel that a call gets and, where calls could get either, those of both heights of tiles, on at
// most CTAS multiprocessors. `tall` times both heights. bf16, with -DFP16=1 fp16. -DHEAD_DIM=64 compiles another
// head_dim than 128, -DHEAD_DIM_V=64 another one of v. Timing: batch 4, 16 heads.
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

constexpr DType kDType = std::is_same_v<Element, __half> ? DType::kFloat16 : DType::kBFloat16;
constexpr bool kHasTall = sm90::has_tall_tiles(kCompiledD) && kCompiledD == kCompiledDv;
constexpr bool kHasTallChanges = sm90::has_tall_changes(kCompiledD) && kCompiledD == kCompiledDv;
enum class Kernel { kChosen, kLow, kTall, kPortable };

bool hides_only(const Modifiers& m) { return !m.is_natural && m.rng == nullptr; }
bool slopes_only(const Modifiers& m) {
  return m.slopes != nullptr && m.softcap == 0.f && m.bias.ptr == nullptr && m.rng == nullptr;
}

bool cap_only(const Modifiers& m) {
  return m.softcap > 0.f && m.slopes == nullptr && m.bias.ptr == nullptr && m.rng == nullptr;
}
bool drops_only(const Modifiers& m) { return !m.is_natural && m.rng != nullptr; }

template <sm90::FwdModKind kKind>
std::string launch_kind(const FwdParams& f, const Modifiers& m, const DeviceInfo& d) {
  return sm90::launch_fwd_mod_of<Element, kCompiledD, kCompiledDv, kKind>(f, m, d);
}

std::string launch_kernel(Kernel kernel, const FwdParams& f, const Modifiers& m, const DeviceInfo& d) {
  if (kernel == Kernel::kPortable) return sm80::launch_fwd_mod<Element, kPadded, SmemClass::kLarge>(f, m, d);
  if constexpr (kHasTallChanges) {
    if (kernel == Kernel::kLow && slopes_only(m)) return launch_kind<sm90::FwdModKind::kExponents>(f, m, d);
    if (kernel == Kernel::kTall && slopes_only(m)) return launch_kind<sm90::FwdModKind::kTallSlopes>(f, m, d);
    if (kernel == Kernel::kLow && cap_only(m)) return launch_kind<sm90::FwdModKind::kExponents>(f, m, d);
    if (kernel == Kernel::kTall && cap_only(m)) return launch_kind<sm90::FwdModKind::kTallCap>(f, m, d);
    if (kernel == Kernel::kLow && drops_only(m)) return launch_kind<sm90::FwdModKind::kDrops>(f, m, d);
    if (kernel == Kernel::kTall && drops_only(m)) return launch_kind<sm90::FwdModKind::kTallDrops>(f, m, d);
  }
  if (kernel == Kernel::kLow) return launch_kind<sm90::FwdModKind::kHides>(f, m, d);
  if constexpr (kHasTall) {
    if (kernel == Kernel::kTall) return launch_kind<sm90::FwdModKind::kTall>(f, m, d);
  }
  return sm90::launch_fwd_mod<Element, kCompiledD, kCompiledDv>(f, m, d);
}

// ---- runs ---------------------------------------------------------------------------------------

struct Outputs {
  Element* out;
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
    f.problem.dtype = kDType;
    const Problem& p = f.problem;
    f.q = contiguous_view(q_, p.seqlen_q, c.heads, kD);
    f.k = contiguous_view(k_, p.seqlen_k, c.heads_k, kD);
    f.v = contiguous_view(v_, p.seqlen_k, c.heads_k, kDv);
    f.out = contiguous_view(want_.out, p.seqlen_q, c.heads, kDv);
    return f;
  }

  void fill(const Case& c) {
    fill_normal<Element>(q_, c.total_q() * c.heads * kD, 1, c.amplitude);
    fill_normal<Element>(k_, c.total_k() * c.heads_k * kD, 2, 1.f);
    fill_normal<Element>(v_, c.total_k() * c.heads_k * kDv, 3, 1.f);
  }

  std::string run(FwdParams f, Modifiers m, const Outputs& to, Kernel kernel, bool want_max, bool drawn) {
    m.unit_log2 = m.is_natural ? kLog2e : f.problem.abs_scale_log2;
    f.out.ptr = to.out;
    f.lse = to.lse;
    m.row_max = want_max ? to.row_max : nullptr;
    f.schedule = drawn && kernel != Kernel::kPortable ? counter_ : nullptr;
    return launch_kernel(kernel, f, m, device_);
  }

  // The number of kernels that fail.
  int failures(const Case& c, const Named& named, bool want_max) {
    Modifiers m;
    named.set(m, c);
    int failed = !passes(c, named.name, m, Kernel::kChosen, want_max);
    if ((kHasTall && hides_only(m)) || (kHasTallChanges && (slopes_only(m) || cap_only(m) || drops_only(m)))) {
      failed += !passes(c, named.name + " (low)", m, Kernel::kLow, want_max);
      failed += !passes(c, named.name + " (tall)", m, Kernel::kTall, want_max);
    }
    return failed;
  }

  double worst() const { return worst_; }
  int count() const { return count_; }

 private:
  bool passes(const Case& c, const std::string& name, const Modifiers& m, Kernel kernel, bool want_max) {
    ++count_;
    const FwdParams f = params_of(c);
    const size_t rows = c.total_q() * c.heads, elements = rows * kDv;
    for (const Outputs* x : {&want_, &got_, &again_}) {
      CHECK_CUDA(cudaMemset(x->out, 0xff, elements * sizeof(Element)));
      CHECK_CUDA(cudaMemset(x->lse, 0xff, rows * sizeof(float)));
      CHECK_CUDA(cudaMemset(x->row_max, 0, rows * sizeof(float)));
    }
    CHECK_CUDA(cudaMemset(counter_, 0x5a, sizeof(*counter_)));
    CHECK_CUDA(cudaMemset(errors_, 0, 3 * sizeof(Errors)));
    require(run(f, m, want_, Kernel::kPortable, want_max, false));
    require(run(f, m, got_, kernel, want_max, true));
    require(run(f, m, again_, kernel, want_max, false));
    compare_kernel<<<kBlocks, kThreads>>>(got_.out, want_.out, elements, errors_);
    compare_stats_kernel<<<kBlocks, kThreads>>>(got_.lse, want_.lse, rows, errors_);
    compare_stats_kernel<<<kBlocks, kThreads>>>(got_.row_max, want_.row_max, rows, errors_ + 1);
    compare_kernel<<<kBlocks, kThreads>>>(again_.out, got_.out, elements, errors_ + 2);
    CHECK_CUDA(cudaDeviceSynchronize());
    const std::vector<Errors> e = download(errors_, 3);
    const double relative = std::sqrt(e[0].squares / (e[0].want_squares > 0. ? e[0].want_squares : 1.));
    // Slopes of 1000 make scores of 1e6 whose maximum is next to 0: fp32 then leaves 3e-3.
    const double limit = name.find("alibi, large") == std::string::npos ? 1e-4 : 5e-3;
    const bool ok = relative < 6e-3 && e[0].largest_lse < limit && e[1].largest_lse < limit && e[2].squares == 0.;
    if (!ok) {
      std::printf("FAIL %s, %s: relative %.2e largest %.2e lse %.2e max %.2e repeats %.2e\n", c.name.c_str(),
                  name.c_str(), relative, e[0].largest, e[0].largest_lse, e[1].largest_lse, e[2].largest);
      std::fflush(stdout);
    }
    worst_ = std::max(worst_, relative);
    return ok;
  }

  static Outputs outputs() {
    return {device_alloc<Element>(kElements), device_alloc<float>(kElements / 64), device_alloc<float>(kElements / 64)};
  }

  static constexpr size_t kElements = size_t{1} << 21;
  DeviceInfo device_;
  Element* q_ = device_alloc<Element>(kElements);
  Element* k_ = device_alloc<Element>(kElements);
  Element* v_ = device_alloc<Element>(kElements);
  Outputs want_ = outputs(), got_ = outputs(), again_ = outputs();
  sm90::Counter* counter_ = device_alloc<sm90::Counter>(1);
  Errors* errors_ = device_alloc<Errors>(3);
  double worst_ = 0.;
  int count_ = 0;
};

int run_tests(DeviceInfo device, int most_ctas) {
  device.num_sms = std::min(device.num_sms, most_ctas);
  Runner runner(device);
  int calls = 0, failed = 0;
  for (const Case& c : cases()) {
    runner.fill(c);
    for (const Named& named : all_modifiers()) failed += runner.failures(c, named, calls++ % 3 == 0);
  }
  std::printf("%d tests, %d failed, largest relative difference %.2e\n", runner.count(), failed, runner.worst());
  return failed != 0;
}

// ---- timing -------------------------------------------------------------------------------------

// The same interval of keys hidden from all rows.
HiddenIntervals equal_intervals(int sequences, int length, int first, int end) {
  const int groups = (length + 31) / 32;
  std::vector<int32_t> bounds, summary;
  for (int i = 0; i < sequences * length; ++i) bounds.insert(bounds.end(), {first, end});
  for (int i = 0; i < sequences * groups; ++i) summary.insert(summary.end(), {first, first, end, end});
  HiddenIntervals x;
  x.bounds = on_device(bounds);
  x.groups = on_device(summary);
  x.batch_stride = int64_t{2} * length;
  x.group_batch_stride = groups;
  x.count = 1;
  return x;
}

// The share of pairs of positions with the same label.
double shared_pairs(int length, const std::function<int(int, int)>& id) {
  std::vector<int64_t> counts(size_t{1} * length);
  for (int i = 0; i < length; ++i) ++counts[id(0, i)];
  double pairs = 0.;
  for (int64_t n : counts) pairs += static_cast<double>(n) * n;
  return pairs / length / length;
}

// What leaves most tiles whole or hides them, in low and in tall tiles.
std::vector<TimedCase> tall_cases(int seqlen) {
  const auto padding = [=](Modifiers& m) {
    set_mask(m, kBatch, 1, 1, seqlen, [=](int, int, int, int col) { return col < seqlen * 3 / 4 - 8; });
  };
  const auto documents = [=](const std::function<int(int, int)>& id) -> SetModifiers {
    return [=](Modifiers& m) {
      m.document_q = make_labels(kBatch, seqlen, id);
      m.document_k = make_labels(kBatch, seqlen, id);
    };
  };
  const auto sinks = [](Modifiers& m) { set_sinks(m, kHeads); };
  const auto chunks = [=](Modifiers& m) { set_chunk(m, seqlen / 4); };
  const auto prefix = [=](Modifiers& m) { m.prefix_lens = on_device(std::vector<int32_t>(kBatch, seqlen / 4)); };
  const auto hidden = [=](Modifiers& m) { m.hidden_keys = equal_intervals(kBatch, seqlen, seqlen / 4, seqlen / 2); };
  const auto first_keys = [](Modifiers& m) { m.sink_tokens = 4; };
  const auto equal = [=](int, int i) { return i / (seqlen / 4); };
  const auto uneven = [=](int, int i) { return i * 100 / seqlen % 37 / 12 + i * 100 / seqlen / 37 * 4; };
  const auto none = [](Modifiers&) {};
  const double window = std::min(1., 1024. / seqlen), in_window = window - window * window / 2;
  std::vector<TimedCase> all = {{"plain", 1., nullptr},
                                {"plain causal", .5, nullptr, 0},
                                {"plain window", in_window, nullptr, 0, false, 1023}};
  const auto add = [&](const char* low, const char* tall, double share, const SetModifiers& set, int right = -1,
                       int left = -1) {
    all.push_back({low, share, set, right, false, left});
    all.push_back({tall, share, set, right, false, left});
  };
  add("low none", "tall none", 1., none);
  add("low none causal", "tall none causal", .5, none, 0);
  add("low key padding", "tall key padding", .75, padding);
  add("low padding causal", "tall padding causal", .46875, padding, 0);
  add("low sinks", "tall sinks", 1., sinks);
  add("low sinks causal", "tall sinks causal", .5, sinks, 0);
  add("low window, first", "tall window, first", in_window, first_keys, 0, 1023);
  add("low prefix", "tall prefix", .53125, prefix, 0);
  add("low chunks", "tall chunks", .125, chunks, 0);
  add("low hidden keys", "tall hidden keys", .75, hidden);
  add("low 4 documents", "tall 4 documents", .25, documents(equal));
  add("low 4 docs causal", "tall 4 docs causal", .125, documents(equal), 0);
  add("low documents", "tall documents", shared_pairs(seqlen, uneven), documents(uneven));
  const auto random_mask = [=](Modifiers& m) {
    set_mask(m, 1, 1, seqlen, seqlen, [](int, int, int, int) { return below(2) == 0; });
  };
  const auto blocks = [=](int of, int side) -> SetModifiers {  // one in `of`, `side` units of 16 wide
    return [=](Modifiers& m) {
      set_blocks(m, 1, seqlen, seqlen, [=](int, int r, int q) { return (r / side * 5 + q / side) % of == 0; });
    };
  };
  add("low mask random", "tall mask random", 1., random_mask);
  add("low blocks 128 all", "tall blocks 128 all", 1., blocks(1, 8));
  add("low blocks 128 1/2", "tall blocks 128 1/2", .5, blocks(2, 8));
  add("low blocks 128 1/4", "tall blocks 128 1/4", .25, blocks(4, 8));
  add("low blocks 64 1/2", "tall blocks 64 1/2", .5, blocks(2, 4));
  add("low blocks 64 1/4", "tall blocks 64 1/4", .25, blocks(4, 4));
  if (kHasTallChanges) {
    const auto slopes = [](Modifiers& m) { set_slopes(m, kHeads); };
    add("low alibi", "tall alibi", 1., slopes);
    add("low alibi causal", "tall alibi causal", .5, slopes, 0);
    add("low alibi window", "tall alibi window", in_window, slopes, 0, 1023);
    const auto cap = [](float c) { return [=](Modifiers& m) { set_softcap(m, c); }; };
    const auto drop = [](Modifiers& m) { set_dropout(m, 6554); };
    add("low softcap 30", "tall softcap 30", 1., cap(30.f));
    add("low softcap 3", "tall softcap 3", 1., cap(3.f));
    add("low softcap causal", "tall softcap causal", .5, cap(30.f), 0);
    add("low dropout", "tall dropout", 1., drop);
    add("low dropout causal", "tall dropout causal", .5, drop, 0);
    add("low drop, padding", "tall drop, padding", .75, [=](Modifiers& m) { drop(m), padding(m); });
    add("low alibi, padding", "tall alibi, padding", .75, [=](Modifiers& m) { slopes(m), padding(m); });
  }
  return all;
}

class Timer {
 public:
  Timer(const DeviceInfo& device, int seqlen)
      : device_(device), seqlen_(seqlen), elements_(size_t{kBatch} * seqlen * kHeads * kD), biases_(seqlen, 5) {
    uint32_t seed = 0;
    for (Element** x : {&q_, &k_, &v_, &out_}) {
      *x = device_alloc<Element>(elements_);
      fill_normal<Element>(*x, elements_, ++seed);
    }
    lse_ = device_alloc<float>(size_t{kBatch} * kHeads * seqlen);
  }

  void run(int rounds, bool tall) {
    const double gflop = 2e-9 * (kD + kDv) * seqlen_ * static_cast<double>(seqlen_) * kBatch * kHeads;
    const std::vector<TimedCase> cases = tall ? tall_cases(seqlen_) : timed_cases(seqlen_, biases_);
    print_times(cases, [&](const TimedCase& c) { return call_of(c); }, rounds, gflop);
  }

 private:
  FwdParams params(const TimedCase& c) const {
    FwdParams f;
    f.problem = timed_problem(seqlen_, kD, kDv, c.window_right);
    f.problem.dtype = kDType;
    f.problem.window_left = c.window_left;
    f.problem.prepare();
    f.q = contiguous_view(q_, seqlen_, kHeads, kD);
    f.k = contiguous_view(k_, seqlen_, kHeads, kD);
    f.v = contiguous_view(v_, seqlen_, kHeads, kDv);
    f.out = contiguous_view(out_, seqlen_, kHeads, kDv);
    f.lse = lse_;
    f.schedule = counter_;
    return f;
  }

  std::function<void()> call_of(const TimedCase& c) {
    FwdParams f = params(c);
    if (c.set == nullptr) {
      if (!sm90::draws_items(f.problem)) f.schedule = nullptr;
      return [=, this] { require(sm90::launch_fwd<Element, kCompiledD, kCompiledDv>(f, device_)); };
    }
    Modifiers m;
    c.set(m);
    m.unit_log2 = m.is_natural ? kLog2e : f.problem.abs_scale_log2;
    const std::string name = c.name;
    const Kernel kernel = c.portable                  ? Kernel::kPortable
                          : name.starts_with("low ")  ? Kernel::kLow
                          : name.starts_with("tall ") ? Kernel::kTall
                                                      : Kernel::kChosen;
    return [=, this] { require(launch_kernel(kernel, f, m, device_)); };
  }

  DeviceInfo device_;
  int seqlen_;
  size_t elements_;
  BigBiases biases_;
  Element *q_, *k_, *v_, *out_;
  float* lse_;
  sm90::Counter* counter_ = device_alloc<sm90::Counter>(1);
};

}  // namespace standalone

int main(int argc, char** argv) {
  using namespace standalone;
  const DeviceInfo device = this_device();
  const std::string what = argument(argc, argv, 1, "test");
  if (what == "test") return run_tests(device, std::atoi(argument(argc, argv, 2, "1000").c_str()));
  const int seqlen = std::atoi(argument(argc, argv, 2, "4096").c_str());
  Timer(device, seqlen).run(std::atoi(argument(argc, argv, 3, "7").c_str()), what == "tall");
  return 0;
}
