// The sm90 backward without torch: against an fp32 reference, and timed.
//
//   bwd_sm90 test [HEAD_DIMS]
//   bwd_sm90 time [HEAD_DIMS [SEQLENS [REPS]]]
//   bwd_sm90 repeat [HEAD_DIMS [SEQLENS [RUNS]]]  (of the deterministic kernels, which must give the same bits)
//
// Lists have commas. VERBOSE=1 in the environment prints tests that pass as well, DETERMINISTIC=1 chooses the
// deterministic kernels, whose tests also compare the bits of many runs, DQ_RING=1 accumulators in a ring wherever they
// can be, 0 none, TWO_KERNELS=1 the two kernels of few rows (head_dim 128), NUM_SMS=7 as many CTAs. Of what is timed,
// WINDOW=1024 hides earlier keys, GROUP=4 shares key heads, PACKED=1 packs the sequences. -DONLY=128 compiles one
// head_dim; 192 stands for both sizes of v.
#include "sm90/run_bwd.cuh"
#include "sm90/run_bwd_short.cuh"
#include "sm90/run_bwd_wide.cuh"

#include "bwd_cases.cuh"
#include "bwd_reference.cuh"
#include "bwd_repeats.cuh"

namespace standalone {

namespace sm90 = flash_ext::sm90;
using bf16 = __nv_bfloat16;

using Run = std::string (*)(const BwdParams&, const DeviceInfo&);

struct Variant {
  int head_dim, head_dim_v;
  Run run;  // as the operator does
  std::vector<std::pair<const char*, Run>> parts;  // bf16, timed one by one
};

template <int D>
Variant variant() {
  if constexpr (D == sm90::kShortHeadDim) {
    if (std::getenv("TWO_KERNELS") != nullptr) {
      return {D, D, sm90::run_bwd_short, {{"dK, dV", sm90::launch_short_keys<bf16, D>},
                                          {"dQ", sm90::launch_wide_queries<bf16, D, D>}}};
    }
  }
  return {D, D, sm90::run_bwd_hd<D>, {{"main kernel", sm90::launch_bwd<bf16, D>}}};
}

template <int D, int Dv>
Variant wide_variant() {
  return {D, Dv, sm90::run_bwd_wide_hd<D, Dv>, {{"dK, dV", sm90::launch_wide_keys<bf16, D, Dv>},
                                                {"dQ", sm90::launch_wide_queries<bf16, D, Dv>}}};
}

std::vector<Variant> compiled_variants() {
  std::vector<Variant> all;
#if !defined(ONLY) || ONLY == 64
  all.push_back(variant<64>());
#endif
#if !defined(ONLY) || ONLY == 96
  all.push_back(variant<96>());
#endif
#if !defined(ONLY) || ONLY == 128
  all.push_back(variant<128>());
#endif
#if !defined(ONLY) || ONLY == 192
  all.push_back(wide_variant<192, 192>());
  all.push_back(wide_variant<192, 128>());
#endif
#if !defined(ONLY) || ONLY == 256
  all.push_back(wide_variant<256, 256>());
#endif
  return all;
}

constexpr int kTokens = 16384;
constexpr size_t kElements = size_t{kTokens} * 4096;  // 2048 of them are timed, tests need more
// Tiles of the workspace are 64 whole rows, so that odd lengths and packed sequences need more than their rows.
constexpr size_t kWorkspace = kElements + (8 << 20);

struct Buffers {
  void* q = device_alloc<uint16_t>(kElements);
  void* k = device_alloc<uint16_t>(kElements);
  void* v = device_alloc<uint16_t>(kElements);
  void* out = device_alloc<uint16_t>(kElements);
  void* dout = device_alloc<uint16_t>(kElements);
  void* dq = device_alloc<uint16_t>(kElements);
  void* dk = device_alloc<uint16_t>(kElements);
  void* dv = device_alloc<uint16_t>(kElements);
  float* lse = device_alloc<float>(2 << 20);
  float* dlse = device_alloc<float>(2 << 20);
  float* row_stats = device_alloc<float>(4 << 20);
  float* dq_accum = device_alloc<float>(kWorkspace);
  Scores scores = {device_alloc<float>(64 << 20), device_alloc<float>(64 << 20)};
  int* cu_seqlens_q = device_alloc<int>(1024);
  int* cu_seqlens_k = device_alloc<int>(1024);
  Errors* errors = device_alloc<Errors>(3);  // of dq, dk, dv
};

class Harness {
 public:
  explicit Harness(const DeviceInfo& device) : device_(device) {}

  template <typename E>
  bool passes(const Variant& v, const Case& c);
  bool repeats(const Variant& v, const Case& c, int runs);
  bool repeats_at_length(const Variant& v, bool causal, int seqlen, int runs);
  void print_time(const Variant& v, bool causal, int seqlen, int reps);

 private:
  BwdParams params_of(const Case& c, DType dtype);
  void fill_for_timing(const BwdParams& p, const Case& c);
  template <typename E>
  void fill(const BwdParams& p, const Case& c);
  template <typename E>
  std::vector<Errors> errors_of(const BwdParams& p, const std::vector<Sequence>& sequences);

  DeviceInfo device_;
  Buffers buffers_;
  ColdCache cold_;
  bool deterministic_ = std::getenv("DETERMINISTIC") != nullptr;
};

void set_lengths(Problem& r, const Case& c, Buffers& buffers) {
  if (c.lengths_q.empty()) {
    r.batch = c.batch;
    r.seqlen_q = c.seqlen_q;
    r.seqlen_k = c.seqlen_k;
    r.total_q = static_cast<int64_t>(c.batch) * c.seqlen_q;
    r.total_k = static_cast<int64_t>(c.batch) * c.seqlen_k;
    return;
  }
  const std::vector<int> sums_q = running_sums(c.lengths_q), sums_k = running_sums(c.lengths_k);
  upload(buffers.cu_seqlens_q, sums_q);
  upload(buffers.cu_seqlens_k, sums_k);
  r.batch = static_cast<int>(c.lengths_q.size());
  r.total_q = sums_q.back();
  r.total_k = sums_k.back();
  r.cu_seqlens_q = buffers.cu_seqlens_q;
  r.cu_seqlens_k = buffers.cu_seqlens_k;
}

BwdParams Harness::params_of(const Case& c, DType dtype) {
  BwdParams p;
  Problem& r = p.problem;
  r.dtype = dtype;
  r.num_heads = c.heads;
  r.num_heads_k = c.heads_k;
  r.head_dim = c.head_dim;
  r.head_dim_v = c.dv();
  r.softmax_scale = c.scale;
  r.window_left = c.window_left;
  r.window_right = c.window_right;
  set_lengths(r, c, buffers_);
  r.prepare();
  const auto queries = [&](void* x, int dim) { return contiguous_view(x, r.seqlen_q, c.heads, dim); };
  const auto keys = [&](void* x, int dim) { return contiguous_view(x, r.seqlen_k, c.heads_k, dim); };
  p.q = queries(buffers_.q, c.head_dim);
  p.k = keys(buffers_.k, c.head_dim);
  p.v = keys(buffers_.v, c.dv());
  p.out = queries(buffers_.out, c.dv());
  p.dout = queries(buffers_.dout, c.dv());
  p.dq = queries(buffers_.dq, c.head_dim);
  p.dk = keys(buffers_.dk, c.head_dim);
  p.dv = keys(buffers_.dv, c.dv());
  p.lse = buffers_.lse;
  p.dlse = c.has_dlse ? buffers_.dlse : nullptr;
  p.row_stats = buffers_.row_stats;
  p.dq_accum = buffers_.dq_accum;
  p.deterministic = deterministic_;
  return p;
}

// Inputs are random; what the kernels write starts as NaN.
template <typename E>
void Harness::fill(const BwdParams& p, const Case& c) {
  const size_t rows = static_cast<size_t>(p.problem.total_q) * c.heads;
  const size_t queries = rows * c.head_dim;
  const size_t keys = static_cast<size_t>(p.problem.total_k) * c.heads_k * c.head_dim;
  fill_normal<E>(buffers_.q, queries, 1, c.amplitude);
  fill_normal<E>(buffers_.k, keys, 2);
  fill_normal<E>(buffers_.v, keys, 3);
  fill_normal<E>(buffers_.dout, queries, 4);
  fill_normal<float>(buffers_.dlse, rows, 5);
  CHECK_CUDA(cudaMemset(buffers_.dq, 0xff, queries * sizeof(E)));
  CHECK_CUDA(cudaMemset(buffers_.dk, 0xff, keys * sizeof(E)));
  CHECK_CUDA(cudaMemset(buffers_.dv, 0xff, keys * sizeof(E)));
  CHECK_CUDA(cudaMemset(buffers_.row_stats, 0xff, (4 << 20) * sizeof(float)));
  CHECK_CUDA(cudaMemset(buffers_.dq_accum, 0xff, kWorkspace * sizeof(float)));
}

template <typename E>
std::vector<Errors> Harness::errors_of(const BwdParams& p, const std::vector<Sequence>& sequences) {
  const unsigned heads = p.problem.num_heads, heads_k = p.problem.num_heads_k;
  CHECK_CUDA(cudaMemset(buffers_.errors, 0, 3 * sizeof(Errors)));
  for (const Sequence& s : sequences) {
    const dim3 rows(s.seqlen_q, heads), keys(s.seqlen_k, heads_k);
    if (s.seqlen_q > 0) check_dq_kernel<E><<<rows, 128>>>(p, s, buffers_.scores, buffers_.errors);
    if (s.seqlen_k > 0) check_dkv_kernel<E><<<keys, 128>>>(p, s, buffers_.scores, buffers_.errors + 1);
    CHECK_CUDA(cudaGetLastError());
  }
  return download(buffers_.errors, 3);
}

// Runs it twice: the second time the workspace holds what the first has left.
template <typename E>
bool Harness::passes(const Variant& v, const Case& c) {
  const BwdParams p = params_of(c, kDTypeOf<E>);
  fill<E>(p, c);
  const std::vector<Sequence> sequences = sequences_of(c);
  for (const Sequence& s : sequences) {
    const dim3 rows(s.seqlen_q, c.heads);
    if (s.seqlen_q > 0) reference_rows_kernel<E><<<rows, 128>>>(p, buffers_.lse, s, buffers_.scores);
    CHECK_CUDA(cudaGetLastError());
  }
  for (int run = 0; run < 2; ++run) require(v.run(p, device_));
  CHECK_CUDA(cudaDeviceSynchronize());
  bool ok = true;
  std::string text;
  for (const Errors& e : errors_of<E>(p, sequences)) {
    // Gradients that are 0, such as dq of rows that see one key, are judged by their absolute error.
    const double relative = std::sqrt(e.squares) / std::max(1e-2, std::sqrt(e.want_squares));
    ok &= relative < (kDTypeOf<E> == DType::kFloat16 ? 2e-3 : 1.2e-2) || e.largest < 1e-5;
    char part[64];
    std::snprintf(part, sizeof(part), " %.2e (largest %.1e)", relative, e.largest);
    text += part;
  }
  if (ok && std::getenv("VERBOSE") == nullptr) return true;
  std::printf("%s d%d/%d in %d/%d %s b%d h%d/%d sq%d sk%d window (%d, %d) scale %.3g q x %.3g%s%s: dq, dk, dv%s\n",
              ok ? "ok  " : "FAIL", c.head_dim, c.dv(), v.head_dim, v.head_dim_v,
              kDTypeOf<E> == DType::kFloat16 ? "fp16" : "bf16",
              p.problem.batch, c.heads, c.heads_k, c.seqlen_q, c.seqlen_k, c.window_left, c.window_right, c.scale,
              c.amplitude, c.has_dlse ? " dlse" : "", c.lengths_q.empty() ? "" : " packed", text.c_str());
  std::fflush(stdout);
  return ok;
}

// Whether all runs give the same bits: with fewer CTAs, beside a kernel that takes some of the multiprocessors away for
// a while, and with anything in the workspace. The inputs are those that are there.
bool Harness::repeats(const Variant& v, const Case& c, int runs) {
  if (!deterministic_) return true;
  const BwdParams p = params_of(c, DType::kBFloat16);
  Repeats repeats(p, c.head_dim);
  bool same = true;
  for (int run = 0; run < runs; ++run) {
    DeviceInfo device = device_;
    if (run % 4 == 3) device.num_sms = 1 + run * 37 % device_.num_sms;
    if (run % 3 == 1) {
      CHECK_CUDA(cudaMemset(buffers_.row_stats, run, (4 << 20) * sizeof(float)));
      CHECK_CUDA(cudaMemset(buffers_.dq_accum, run, kWorkspace * sizeof(float)));
    }
    if (run % 2 == 1) repeats.disturb(run);
    require(v.run(p, device));
    CHECK_CUDA(cudaDeviceSynchronize());
    same &= repeats.same_bits(p);
  }
  if (!same) std::printf("FAIL: other bits, d%d sq%d sk%d\n", c.head_dim, c.seqlen_q, c.seqlen_k);
  std::fflush(stdout);
  return same;
}

Case case_of_length(const Variant& v, bool causal, int seqlen) {
  const int d = v.head_dim, heads = 2048 / d;
  const float scale = 1.f / std::sqrt(static_cast<float>(d));
  Case c{kTokens / seqlen, heads, heads, seqlen, seqlen, d, -1, causal ? 0 : -1, scale};
  c.head_dim_v = v.head_dim_v;
  if (const char* window = std::getenv("WINDOW"); window != nullptr) c.window_left = std::atoi(window);
  if (const char* group = std::getenv("GROUP"); group != nullptr) {
    if (heads % std::atoi(group) != 0) require("GROUP has to divide the " + std::to_string(heads) + " heads");
    c.heads_k = heads / std::atoi(group);
  }
  if (std::getenv("PACKED") != nullptr) {
    c.lengths_q = std::vector<int>(static_cast<size_t>(c.batch), seqlen);
    c.lengths_k = c.lengths_q;
  }
  return c;
}

// Random outputs of about the right size, and an lse near that of N(0, 1) scores.
void Harness::fill_for_timing(const BwdParams& p, const Case& c) {
  fill<bf16>(p, c);
  const size_t rows = static_cast<size_t>(kTokens) * c.heads;
  fill_normal<bf16>(buffers_.out, rows * c.head_dim, 6, 0.05f);
  upload(buffers_.lse, std::vector<float>(rows, std::log(c.seqlen_q * 0.7f) + 0.5f));
}

bool Harness::repeats_at_length(const Variant& v, bool causal, int seqlen, int runs) {
  deterministic_ = true;
  const Case c = case_of_length(v, causal, seqlen);
  fill_for_timing(params_of(c, DType::kBFloat16), c);
  return repeats(v, c, runs);
}

void Harness::print_time(const Variant& v, bool causal, int seqlen, int reps) {
  const int d = v.head_dim, heads = 2048 / d;
  const Case c = case_of_length(v, causal, seqlen);
  const BwdParams p = params_of(c, DType::kBFloat16);
  fill_for_timing(p, c);
  const auto all = [&] { require(v.run(p, device_)); };
  time_calls(all, 2, nullptr);
  const double all_ms = median(time_calls(all, reps, &cold_));
  // Of a window, rows that see less at their start count as well.
  const double keys = c.window_left >= 0 ? c.window_left + 1 + (causal ? 0 : seqlen / 2) : seqlen * (causal ? .5 : 1.);
  const double gflop = 5e-9 * c.batch * heads * (d + v.head_dim_v) * seqlen * keys;
  std::printf("d%d/%d %s %-6d all %.0f TFLOP/s (%.3f ms)", d, v.head_dim_v, causal ? "causal" : "full  ", seqlen,
              gflop / all_ms, all_ms);
  for (const auto& [name, run] : v.parts) {
    const bool in_ring = v.head_dim <= 128 && v.parts.size() == 1 && sm90::dq_ring(p.problem, device_, deterministic_);
    if (deterministic_ || in_ring) break;  // words by which CTAs wait for each other are good for one run
    // Not cold: the pass before it has just read what it reads.
    const double ms = median(time_calls([&] { require(run(p, device_)); }, reps, nullptr));
    std::printf("  %s %.0f TFLOP/s (%.3f ms)", name, gflop / ms, ms);
  }
  std::printf("\n");
  std::fflush(stdout);
}

int run_tests(Harness& harness, const Variant& v) {
  const std::vector<Case> cases = cases_of(v.head_dim, v.head_dim_v);
  int failed = 0;
  for (size_t i = 0; i < cases.size(); ++i) {
    failed += i % 3 == 2 ? !harness.passes<__half>(v, cases[i])
                         : !harness.passes<bf16>(v, cases[i]) || !harness.repeats(v, cases[i], 20);
  }
  std::printf("d%d/%d: %zu tests, %d failed\n", v.head_dim, v.head_dim_v, cases.size(), failed);
  return failed;
}

void run_timing(Harness& harness, const Variant& v, const std::vector<int>& seqlens, int reps) {
  for (bool causal : {false, true}) {
    for (int seqlen : seqlens) harness.print_time(v, causal, seqlen, reps);
  }
}

int run_repeats(Harness& harness, const Variant& v, const std::vector<int>& seqlens, int runs) {
  int failed = 0;
  for (bool causal : {false, true}) {
    for (int seqlen : seqlens) failed += !harness.repeats_at_length(v, causal, seqlen, runs);
  }
  std::printf("d%d: %d runs of %zu lengths, %d failed\n", v.head_dim, runs, 2 * seqlens.size(), failed);
  return failed;
}

}  // namespace standalone

int main(int argc, char** argv) {
  using namespace standalone;
  Harness harness(this_device());
  const std::string command = argument(argc, argv, 1, "test");
  const std::vector<int> head_dims = split_numbers(argument(argc, argv, 2, "128,64,96"));
  const std::vector<int> seqlens = split_numbers(argument(argc, argv, 3, kSeqlens));
  const int reps = std::atoi(argument(argc, argv, 4, "10").c_str());
  int failed = 0, found = 0;
  for (const Variant& v : compiled_variants()) {
    if (std::find(head_dims.begin(), head_dims.end(), v.head_dim) == head_dims.end()) continue;
    ++found;
    if (command == "test") failed += run_tests(harness, v);
    if (command == "time") run_timing(harness, v, seqlens, reps);
    if (command == "repeat") failed += run_repeats(harness, v, seqlens, reps);
  }
  return found == 0 || failed != 0;
}
