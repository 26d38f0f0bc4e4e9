// The sm90 forward without torch: against an fp32 reference, and timed.
//
//   fwd_sm90 test [NAME]
//   fwd_sm90 time [NAMES [SEQLENS [REPS [ROUNDS [SCHEDULES]]]]]
//
// NAME is part of a variant's name (d128, h64, d192v128); lists have commas. SCHEDULES are of `dynamic` and `static`:
// whether CTAs draw their tiles or take every n-th. WINDOW=1024 in the environment hides earlier keys of causal calls
// that are timed. -DONLY=128 compiles the variants of one head_dim.
#include "sm90/run_fwd.cuh"

#include <cstring>

#include "fwd_cases.cuh"
#include "fwd_reference.cuh"

namespace standalone {

using flash_ext::sm90::launch_fwd;
using bf16 = __nv_bfloat16;

struct Variant {
  const char* name;
  int head_dim;
  int head_dim_v;
  DType dtype;
  std::string (*run)(const FwdParams&, const DeviceInfo&);
};

template <typename E, int D, int Dv>
Variant variant(const char* name) {
  return {name, D, Dv, kDTypeOf<E>, launch_fwd<E, D, Dv>};
}

std::vector<Variant> compiled_variants() {
  std::vector<Variant> all;
#ifndef ONLY
#define COMPILES(d) 1
#else
#define COMPILES(d) (ONLY == d)
#endif
#if COMPILES(128)
  all.push_back(variant<bf16, 128, 128>("d128"));
  all.push_back(variant<__half, 128, 128>("h128"));
#endif
#if COMPILES(64)
  all.push_back(variant<bf16, 64, 64>("d64"));
  all.push_back(variant<__half, 64, 64>("h64"));
#endif
#if COMPILES(96)
  all.push_back(variant<bf16, 96, 96>("d96"));
#endif
#if COMPILES(192)
  all.push_back(variant<bf16, 192, 192>("d192"));
  all.push_back(variant<bf16, 192, 128>("d192v128"));
#endif
#if COMPILES(256)
  all.push_back(variant<bf16, 256, 256>("d256"));
#endif
  return all;
}

constexpr size_t kTokens = 16384;
constexpr size_t kElements = kTokens * 2048 * 2;
constexpr int kMaxSequences = 1023;

struct Buffers {
  void* q = device_alloc<uint16_t>(kElements);
  void* k = device_alloc<uint16_t>(kElements);
  void* v = device_alloc<uint16_t>(kElements);
  void* out = device_alloc<uint16_t>(kElements);
  void* out_again = device_alloc<uint16_t>(kElements);
  float* lse = device_alloc<float>(4 << 20);
  flash_ext::sm90::Counter* counter = device_alloc<flash_ext::sm90::Counter>(1);
  int* cu_seqlens_q = device_alloc<int>(kMaxSequences + 1);
  int* cu_seqlens_k = device_alloc<int>(kMaxSequences + 1);
  SampledRow* samples = device_alloc<SampledRow>(3000);
  Errors* errors = device_alloc<Errors>(1);
  int* differences = device_alloc<int>(1);
};

class Harness {
 public:
  explicit Harness(const DeviceInfo& device) : device_(device) {}

  FwdParams params_of(const Case& c, DType dtype);
  void launch(const Variant& v, FwdParams p, bool dynamic) {
    p.schedule = dynamic ? buffers_.counter : nullptr;
    require(v.run(p, device_));
  }
  template <typename E>
  void fill(const Case& c);
  template <typename E>
  bool passes(const Variant& v, const Case& c, bool dynamic);
  double tflops(const Variant& v, const Case& c, bool dynamic, int reps);

 private:
  template <typename E>
  Errors errors_of(const FwdParams& p, const Case& c);
  int differences_of(size_t elements);

  DeviceInfo device_;
  Buffers buffers_;
  ColdCache cold_;
};

FwdParams Harness::params_of(const Case& c, DType dtype) {
  FwdParams p;
  Problem& r = p.problem;
  const bool packed = !c.lengths_q.empty();
  r.dtype = dtype;
  r.batch = packed ? static_cast<int>(c.lengths_q.size()) : c.batch;
  r.num_heads = c.heads;
  r.num_heads_k = c.heads_k;
  r.head_dim = c.head_dim;
  r.head_dim_v = c.head_dim_v;
  r.seqlen_q = packed ? 0 : c.seqlen_q;
  r.seqlen_k = packed ? 0 : c.seqlen_k;
  r.total_q = static_cast<int64_t>(c.batch) * c.seqlen_q;
  r.total_k = static_cast<int64_t>(c.batch) * c.seqlen_k;
  r.softmax_scale = c.scale;
  r.window_left = c.window_left;
  r.window_right = c.window_right;
  if (packed) {
    upload(buffers_.cu_seqlens_q, running_sums(c.lengths_q));
    upload(buffers_.cu_seqlens_k, running_sums(c.lengths_k));
    r.cu_seqlens_q = buffers_.cu_seqlens_q;
    r.cu_seqlens_k = buffers_.cu_seqlens_k;
  }
  r.prepare();
  p.q = contiguous_view(buffers_.q, r.seqlen_q, c.heads, c.head_dim);
  p.k = contiguous_view(buffers_.k, r.seqlen_k, c.heads_k, c.head_dim);
  p.v = contiguous_view(buffers_.v, r.seqlen_k, c.heads_k, c.head_dim_v);
  p.out = contiguous_view(buffers_.out, r.seqlen_q, c.heads, c.head_dim_v);
  p.lse = buffers_.lse;
  return p;
}

template <typename E>
void Harness::fill(const Case& c) {
  const size_t query_rows = static_cast<size_t>(c.batch) * c.seqlen_q * c.heads;
  const size_t key_rows = static_cast<size_t>(c.batch) * c.seqlen_k * c.heads_k;
  fill_normal<E>(buffers_.v, key_rows * c.head_dim_v, 3);
  if (c.data == Data::kNormal) {
    fill_normal<E>(buffers_.q, query_rows * c.head_dim, 1, c.amplitude);
    fill_normal<E>(buffers_.k, key_rows * c.head_dim, 2);
    return;
  }
  fill_queries_kernel<<<kBlocks, kThreads>>>(static_cast<E*>(buffers_.q), query_rows * c.head_dim, c.head_dim);
  fill_keys_kernel<<<kBlocks, kThreads>>>(static_cast<E*>(buffers_.k), key_rows * c.head_dim, c.data, c.amplitude,
                                          int64_t{1} * c.heads_k * c.head_dim, c.head_dim, c.seqlen_k);
  CHECK_CUDA(cudaGetLastError());
}

template <typename E>
Errors Harness::errors_of(const FwdParams& p, const Case& c) {
  const std::vector<SampledRow> samples = sample_rows(c.batch, c.heads, c.seqlen_q);
  upload(buffers_.samples, samples);
  CHECK_CUDA(cudaMemset(buffers_.errors, 0, sizeof(Errors)));
  const int smem = c.seqlen_k * static_cast<int>(sizeof(float));
  CHECK_CUDA(cudaFuncSetAttribute(check_rows_kernel<E>, cudaFuncAttributeMaxDynamicSharedMemorySize, smem));
  check_rows_kernel<E><<<samples.size(), 128, smem>>>(p, buffers_.samples, buffers_.errors);
  CHECK_CUDA(cudaGetLastError());
  return download(buffers_.errors, 1)[0];
}

int Harness::differences_of(size_t elements) {
  CHECK_CUDA(cudaMemset(buffers_.differences, 0, sizeof(int)));
  count_differences_kernel<<<kBlocks, kThreads>>>(static_cast<uint32_t*>(buffers_.out),
                                                  static_cast<uint32_t*>(buffers_.out_again), elements / 2,
                                                  buffers_.differences);
  CHECK_CUDA(cudaGetLastError());
  return download(buffers_.differences, 1)[0];
}

// Right, and the same bits the second time. Outputs start as NaN and the counter as garbage.
template <typename E>
bool Harness::passes(const Variant& v, const Case& c, bool dynamic) {
  fill<E>(c);
  const FwdParams p = params_of(c, v.dtype);
  const size_t rows = static_cast<size_t>(c.batch) * c.seqlen_q * c.heads;
  CHECK_CUDA(cudaMemset(buffers_.out, 0xff, rows * c.head_dim_v * sizeof(E)));
  CHECK_CUDA(cudaMemset(buffers_.out_again, 0xff, rows * c.head_dim_v * sizeof(E)));
  CHECK_CUDA(cudaMemset(buffers_.lse, 0xff, rows * sizeof(float)));
  CHECK_CUDA(cudaMemset(buffers_.counter, 0x5a, sizeof(*buffers_.counter)));
  launch(v, p, dynamic);
  FwdParams again = p;
  again.out.ptr = buffers_.out_again;
  launch(v, again, dynamic);
  CHECK_CUDA(cudaDeviceSynchronize());
  const int differences = differences_of(rows * c.head_dim_v);
  const Errors e = errors_of<E>(p, c);
  const double relative = std::sqrt(e.squares / (e.want_squares > 0. ? e.want_squares : 1.));
  const double gate = v.dtype == DType::kFloat16 ? 1.2e-3 : 6e-3;
  const bool ok = relative < gate && e.largest_lse < 1e-4 && differences == 0;
  std::printf("%s %s %s ", ok ? "ok  " : "FAIL", v.name, dynamic ? "dynamic" : "static");
  print_case(c);
  std::printf("relative %.2e largest %.2e lse %.2e, %d words differ\n", relative, e.largest, e.largest_lse,
              differences);
  std::fflush(stdout);
  return ok;
}

// Matrix products only; a causal square is half of the full one, of a window rows at its start count as the others.
double Harness::tflops(const Variant& v, const Case& c, bool dynamic, int reps) {
  const FwdParams p = params_of(c, v.dtype);
  const auto call = [&] { launch(v, p, dynamic); };
  time_calls(call, 2, nullptr);
  const double milliseconds = median(time_calls(call, reps, &cold_));
  const double keys = c.window_left >= 0 ? c.window_left + 1. : c.seqlen_k * (c.window_right == 0 ? .5 : 1.);
  const double pairs = 1. * c.batch * c.heads * c.seqlen_q * keys;
  return 2. * pairs * (c.head_dim + c.head_dim_v) / milliseconds * 1e-9;
}

int run_tests(Harness& harness, const std::string& name) {
  int count = 0, failed = 0;
  for (const Variant& v : compiled_variants()) {
    if (std::strstr(v.name, name.c_str()) == nullptr) continue;
    for (const Case& c : cases_of(v.head_dim, v.head_dim_v)) {
      const bool dynamic = count++ % 2 != 0;
      const bool half = v.dtype == DType::kFloat16;
      failed += half ? !harness.passes<__half>(v, c, dynamic) : !harness.passes<bf16>(v, c, dynamic);
    }
  }
  std::printf("%d tests, %d failed\n", count, failed);
  return count == 0 || failed != 0;
}

bool is_named(const Variant& v, const std::string& names) {
  const std::vector<std::string> parts = split(names);
  const auto is_in_name = [&](const std::string& part) { return std::strstr(v.name, part.c_str()) != nullptr; };
  return std::any_of(parts.begin(), parts.end(), is_in_name);
}

struct Timing {
  std::string names;
  std::vector<int> seqlens;
  int reps;
  int rounds;
  std::vector<std::string> schedules;
};

// One line per mask and length: median over rounds, and the best round. Columns take turns within a round.
void print_line(Harness& harness, const Timing& t, bool causal, int seqlen) {
  std::vector<Variant> variants;
  for (const Variant& v : compiled_variants()) {
    if (v.dtype == DType::kBFloat16 && is_named(v, t.names)) variants.push_back(v);
  }
  std::vector<std::vector<double>> found(variants.size() * t.schedules.size());
  for (int round = 0; round < t.rounds; ++round) {
    for (size_t i = 0; i < found.size(); ++i) {
      const Variant& v = variants[i / t.schedules.size()];
      const int heads = 2048 / v.head_dim;
      Case c{static_cast<int>(kTokens) / seqlen, heads, heads, seqlen, seqlen, v.head_dim, -1, causal ? 0 : -1,
             1.f / std::sqrt(static_cast<float>(v.head_dim))};
      c.head_dim_v = v.head_dim_v;
      if (const char* window = std::getenv("WINDOW"); window != nullptr && causal) c.window_left = std::atoi(window);
      found[i].push_back(harness.tflops(v, c, t.schedules[i % t.schedules.size()] == "dynamic", t.reps));
    }
  }
  std::printf("%s %-6d", causal ? "causal" : "full  ", seqlen);
  for (size_t i = 0; i < found.size(); ++i) {
    std::printf("  %s/%s %.0f (%.0f)", variants[i / t.schedules.size()].name,
                t.schedules[i % t.schedules.size()].c_str(), median(found[i]),
                *std::max_element(found[i].begin(), found[i].end()));
  }
  std::printf("\n");
  std::fflush(stdout);
}

int run_timing(Harness& harness, const Timing& t) {
  std::printf("TFLOP/s, median of rounds (best round)\n");
  Case largest{1, 16, 16, static_cast<int>(kTokens), static_cast<int>(kTokens), 128, -1, -1, 1.f};
  largest.head_dim_v = 128;
  harness.fill<bf16>(largest);
  for (bool causal : {false, true}) {
    for (int seqlen : t.seqlens) print_line(harness, t, causal, seqlen);
  }
  return 0;
}

}  // namespace standalone

int main(int argc, char** argv) {
  using namespace standalone;
  Harness harness(this_device());
  const std::string command = argument(argc, argv, 1, "test");
  if (command == "test") return run_tests(harness, argument(argc, argv, 2, ""));
  return run_timing(harness, {argument(argc, argv, 2, ""), split_numbers(argument(argc, argv, 3, kSeqlens)),
                              std::atoi(argument(argc, argv, 4, "10").c_str()),
                              std::atoi(argument(argc, argv, 5, "3").c_str()),
                              split(argument(argc, argv, 6, "dynamic"))});
}
