// The forward for few queries (sm80/fwd_split.cuh) without torch: against an fp32 reference, and timed.
//
//   fwd_split test [NAME]
//   fwd_split time [REPS [ROUNDS [SPLITS]]]
//
// NAME is part of a variant's name (d128, h64); -DONLY=128 compiles one head_dim. SPLITS are numbers of parts, 0 for
// the choice of the host. Times are those of both kernels with a cold L2; GB/s counts K and V once.
#include "sm80/run_fwd_split.cuh"

#include <cmath>
#include <cstring>

#include "fwd_cases.cuh"
#include "fwd_reference.cuh"

namespace standalone {

using flash_ext::make_split_grid;
using flash_ext::SplitGrid;
using bf16 = __nv_bfloat16;

struct Variant {
  const char* name;
  int head_dim;
  DType dtype;
  std::string (*run)(const FwdParams&, const SplitGrid&, bool);
};

template <typename E, int D>
Variant variant(const char* name) {
  return {name, D, kDTypeOf<E>, [](const FwdParams& p, const SplitGrid& g, bool early) {
            return g.rows == 16 ? flash_ext::sm80::launch_fwd_split<E, D, 16>(p, g, early)
                                : flash_ext::sm80::launch_fwd_split<E, D, 64>(p, g, early);
          }};
}

std::vector<Variant> compiled_variants() {
#ifdef ONLY
  return {variant<bf16, ONLY>("d"), variant<__half, ONLY>("h")};
#else
  return {variant<bf16, 64>("d64"),     variant<__half, 64>("h64"),   variant<bf16, 128>("d128"),
          variant<__half, 128>("h128"), variant<bf16, 256>("d256"), variant<__half, 256>("h256")};
#endif
}

// Null where it is not compiled.
const Variant* variant_for(const std::vector<Variant>& all, int head_dim) {
  const int size = flash_ext::padded_split_head_dim(head_dim, head_dim);
  const auto found = std::find_if(all.begin(), all.end(), [&](const Variant& v) { return size == v.head_dim; });
  return found == all.end() ? nullptr : &*found;
}

// Which views the tensors have: as they come, every row one element further, heads before rows.
enum class Layout { kContiguous, kMisaligned, kHeadsFirst };

struct Extra {
  Case c;
  Layout layout = Layout::kContiguous;
};

Case few(int batch, int heads, int heads_k, int seqlen_q, int seqlen_k, int d, int left = -1, int right = -1) {
  Case c{batch, heads, heads_k, seqlen_q, seqlen_k, d, left, right, 1.f / std::sqrt(static_cast<float>(d))};
  c.head_dim_v = d;
  return c;
}

std::vector<Extra> cases_of(int d) {
  std::vector<Extra> all = {
      {few(1, 1, 1, 1, 1, d)},           {few(1, 8, 2, 1, 77, d)},           {few(2, 4, 4, 1, 1000, d)},
      {few(2, 32, 8, 1, 4097, d)},       {few(1, 71, 1, 1, 777, d)},         {few(1, 128, 1, 1, 2048, d)},
      {few(3, 6, 3, 5, 1300, d, -1, 0)}, {few(2, 16, 2, 8, 2000, d, -1, 0)}, {few(1, 12, 4, 7, 3, d, -1, 0)},
      {few(2, 4, 2, 16, 4096, d, 100, 0)}, {few(2, 4, 2, 33, 900, d, 64, 64)}, {few(1, 4, 1, 300, 2000, d, -1, 0)},
      {few(1, 2, 2, 1000, 1000, d, -1, 0)}, {few(1, 2, 1, 1000, 130, d, -1, 0)}, {few(1, 4, 4, 40, 12000, d)},
      {few(2, 8, 2, 1, 3000, d, 500, -1)}, {few(2, 8, 2, 3, 3000, d, -1, -1), Layout::kMisaligned},
      {few(2, 8, 2, 20, 500, d, -1, 0), Layout::kMisaligned}, {few(2, 8, 2, 3, 3000, d, -1, -1), Layout::kHeadsFirst}};
  for (Data data : {Data::kGrowing, Data::kAlternating}) {
    for (float amplitude : {0.02f, 1.f, -1.f, 20.f}) {  // 20 * 2048 is in the range of fp16
      Case c = few(1, 8, 2, 3, 2048, d);
      c.scale = 1.f;
      c.data = data;
      c.amplitude = amplitude;
      all.push_back({c});
    }
  }
  for (float scale : {-0.1f, 0.f}) {
    Case c = few(1, 8, 2, 4, 1500, d, -1, 0);
    c.scale = scale;
    all.push_back({c});
  }
  std::vector<int> ones(40, 1), lengths, short_queries, short_keys;
  for (int i = 0; i < 40; ++i) lengths.push_back(1 + i * 379 % 1511), short_queries.push_back(i * 5 % 9);
  for (int length : lengths) short_keys.push_back(length % 3 == 0 ? 0 : length);
  all.push_back({packed_case(ones, lengths, 8, 2, d, -1, 0)});
  all.push_back({packed_case(short_queries, short_keys, 8, 2, d, -1, 0)});
  all.push_back({packed_case(short_queries, lengths, 6, 6, d, 100, 3)});
  all.push_back({packed_case({1, 1, 200, 0, 1}, {3000, 0, 900, 10, 5000}, 16, 2, d, -1, 0)});
  for (Extra& e : all) e.c.head_dim_v = d;
  for (int i : {3, 6, 9, 11, 16}) {  // between the compiled sizes
    Extra e = all[i];
    e.c.head_dim = d - 24;
    e.c.head_dim_v = d - 31;
    e.c.scale = 1.f / std::sqrt(static_cast<float>(d - 24));
    all.push_back(e);
    std::swap(e.c.head_dim, e.c.head_dim_v);
    if (i != 16) all.back().layout = Layout::kMisaligned;
    e.c.head_dim = d - 8;
    e.c.head_dim_v = d - 24;
    all.push_back(e);
  }
  return all;
}

constexpr size_t kCacheElements = size_t{64} * 8192 * 8 * 128;  // keys of the largest case that is timed
constexpr size_t kQueryElements = 8 << 20;
constexpr size_t kWorkspace = size_t{512} << 20;
constexpr int kMaxSequences = 1023;

struct Buffers {
  void* q = device_alloc<uint16_t>(kQueryElements);
  void* k = device_alloc<uint16_t>(kCacheElements);
  void* v = device_alloc<uint16_t>(kCacheElements);
  void* out = device_alloc<uint16_t>(kQueryElements);
  void* out_again = device_alloc<uint16_t>(kQueryElements);
  float* lse = device_alloc<float>(1 << 20);
  char* workspace = device_alloc<char>(kWorkspace);
  int* cu_seqlens_q = device_alloc<int>(kMaxSequences + 1);
  int* cu_seqlens_k = device_alloc<int>(kMaxSequences + 1);
  SampledRow* samples = device_alloc<SampledRow>(3000);
  Errors* errors = device_alloc<Errors>(1);
  int* differences = device_alloc<int>(1);
};

StridedView view_of(void* ptr, int64_t batch, int64_t rows, int64_t heads, int64_t cols, Layout layout) {
  StridedView x = contiguous_view(ptr, rows, heads, cols);
  if (layout == Layout::kMisaligned) {
    x = contiguous_view(static_cast<uint16_t*>(ptr) + 1, rows, heads, cols + 1);
  } else if (layout == Layout::kHeadsFirst) {
    x.row_stride = cols;
    x.head_stride = cols * rows;
  }
  if (batch == 1) x.batch_stride = 0;
  x.aligned = layout != Layout::kMisaligned && cols % 8 == 0;
  return x;
}

class Harness {
 public:
  explicit Harness(const DeviceInfo& device) : device_(device) {}

  FwdParams params_of(const Extra& e, DType dtype);
  SplitGrid grid_of(const FwdParams& p, int splits) const {
    DeviceInfo d = device_;
    d.splits = splits == 0 ? -1 : splits;
    return make_split_grid(p.problem, d);
  }
  template <typename E>
  bool passes(const Variant& v, const Extra& e, int splits);
  double milliseconds(const Variant& v, const Case& c, int splits, bool early, int reps);
  template <typename E>
  void fill(const Case& c);

 private:
  DeviceInfo device_;
  Buffers buffers_;
  ColdCache cold_;
};

FwdParams Harness::params_of(const Extra& e, DType dtype) {
  const Case& c = e.c;
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
  p.q = view_of(buffers_.q, c.batch, c.seqlen_q, c.heads, c.head_dim, e.layout);
  p.k = view_of(buffers_.k, c.batch, c.seqlen_k, c.heads_k, c.head_dim, e.layout);
  p.v = view_of(buffers_.v, c.batch, c.seqlen_k, c.heads_k, c.head_dim_v, e.layout);
  p.out = view_of(buffers_.out, c.batch, c.seqlen_q, c.heads, c.head_dim_v, Layout::kContiguous);
  p.lse = buffers_.lse;
  p.schedule = buffers_.workspace;
  return p;
}

// Keys and values of the whole buffer, so that every layout finds some; scores that grow need the shape.
template <typename E>
void Harness::fill(const Case& c) {
  const size_t query_rows = static_cast<size_t>(c.batch) * c.seqlen_q * c.heads;
  const size_t key_rows = static_cast<size_t>(c.batch) * c.seqlen_k * c.heads_k;
  const size_t queries = std::min(kQueryElements, query_rows * (c.head_dim + 2) + 64);
  const size_t keys = std::min(kCacheElements, key_rows * (c.head_dim + 2) + 64);
  fill_normal<E>(buffers_.v, std::min(kCacheElements, key_rows * (c.head_dim_v + 2) + 64), 3);
  if (c.data == Data::kNormal) {
    fill_normal<E>(buffers_.q, queries, 1, c.amplitude);
    fill_normal<E>(buffers_.k, keys, 2);
    return;
  }
  fill_queries_kernel<<<kBlocks, kThreads>>>(static_cast<E*>(buffers_.q), query_rows * c.head_dim, c.head_dim);
  fill_keys_kernel<<<kBlocks, kThreads>>>(static_cast<E*>(buffers_.k), key_rows * c.head_dim, c.data, c.amplitude,
                                          int64_t{1} * c.heads_k * c.head_dim, c.head_dim, c.seqlen_k);
  CHECK_CUDA(cudaGetLastError());
}

// Right, and the same bits the second time. Outputs and the workspace start as NaN.
template <typename E>
bool Harness::passes(const Variant& v, const Extra& e, int splits) {
  const Case& c = e.c;
  fill<E>(c);
  FwdParams p = params_of(e, v.dtype);
  const SplitGrid g = grid_of(p, splits);
  const size_t rows = static_cast<size_t>(c.batch) * c.seqlen_q * c.heads, elements = rows * c.head_dim_v;
  if (g.rows == 0) return true;
  if (static_cast<size_t>(g.workspace_bytes()) > kWorkspace) return std::printf("workspace too small\n"), false;
  for (void* out : {buffers_.out_again, buffers_.out}) {
    CHECK_CUDA(cudaMemset(out, 0xff, (elements * sizeof(E) + 3) / 4 * 4));
    CHECK_CUDA(cudaMemset(buffers_.lse, 0xff, rows * sizeof(float)));
    CHECK_CUDA(cudaMemset(buffers_.workspace, 0xff, std::max<int64_t>(16, g.workspace_bytes())));
    p.out.ptr = out;
    require(v.run(p, g, device_.cc_major == 9));
    CHECK_CUDA(cudaDeviceSynchronize());
  }
  CHECK_CUDA(cudaMemset(buffers_.differences, 0, sizeof(int)));
  count_differences_kernel<<<kBlocks, kThreads>>>(static_cast<uint32_t*>(buffers_.out),
                                                  static_cast<uint32_t*>(buffers_.out_again), elements / 2,
                                                  buffers_.differences);
  const int differences = download(buffers_.differences, 1)[0];
  const std::vector<SampledRow> samples = sample_rows(c.batch, c.heads, c.seqlen_q);
  upload(buffers_.samples, samples);
  CHECK_CUDA(cudaMemset(buffers_.errors, 0, sizeof(Errors)));
  const int smem = c.seqlen_k * static_cast<int>(sizeof(float));
  CHECK_CUDA(cudaFuncSetAttribute(check_rows_kernel<E>, cudaFuncAttributeMaxDynamicSharedMemorySize, smem));
  check_rows_kernel<E><<<samples.size(), 128, smem>>>(p, buffers_.samples, buffers_.errors);
  CHECK_CUDA(cudaGetLastError());
  const Errors found = download(buffers_.errors, 1)[0];
  const double relative = std::sqrt(found.squares / (found.want_squares > 0. ? found.want_squares : 1.));
  const double gate = v.dtype == DType::kFloat16 ? 1.2e-3 : 6e-3;
  const bool ok = relative < gate && found.largest_lse < 1e-4 && differences == 0;
  if (!ok || std::getenv("VERBOSE") != nullptr) {
    std::printf("%s %s rows %d splits %d layout %d ", ok ? "ok  " : "FAIL", v.name, g.rows, g.splits,
                static_cast<int>(e.layout));
    print_case(c);
    std::printf("relative %.2e largest %.2e lse %.2e, %d words differ\n", relative, found.largest, found.largest_lse,
                differences);
    std::fflush(stdout);
  }
  return ok;
}

double Harness::milliseconds(const Variant& v, const Case& c, int splits, bool early, int reps) {
  const FwdParams p = params_of({c}, v.dtype);
  const SplitGrid g = grid_of(p, splits);
  const auto call = [&] { require(v.run(p, g, early)); };
  time_calls(call, 2, nullptr);
  return median(time_calls(call, reps, &cold_));
}

int run_tests(Harness& harness, const std::string& name) {
  int count = 0, failed = 0;
  for (const Variant& v : compiled_variants()) {
    if (std::strstr(v.name, name.c_str()) == nullptr) continue;
    for (const Extra& e : cases_of(v.head_dim)) {
      for (int splits : {1, 2, 7, 100, 0}) {
        ++count;
        const bool half = v.dtype == DType::kFloat16;
        failed += half ? !harness.passes<__half>(v, e, splits) : !harness.passes<bf16>(v, e, splits);
      }
    }
  }
  std::printf("%d tests, %d failed\n", count, failed);
  return count == 0 || failed != 0;
}

std::vector<Case> timed_cases() {
  return {few(1, 32, 8, 1, 8192, 128),   few(1, 32, 8, 1, 131072, 128), few(16, 32, 8, 1, 8192, 128),
          few(16, 32, 8, 1, 32768, 128), few(64, 32, 8, 1, 8192, 128),  few(128, 32, 8, 1, 2048, 128),
          few(64, 32, 8, 1, 1024, 128),  few(4, 32, 32, 1, 8192, 128),  few(1, 32, 8, 8, 32768, 128, -1, 0),
          few(8, 32, 8, 16, 8192, 128, -1, 0), few(16, 32, 8, 1, 8192, 64), few(16, 16, 4, 1, 8192, 256),
          few(1, 16, 1, 1, 65536, 128),  few(1, 8, 8, 128, 32768, 128, -1, 0)};
}

// One line per case: the median over rounds for each number of parts, which take turns.
int run_timing(Harness& harness, int reps, int rounds, const std::vector<int>& splits) {
  const std::vector<Variant> variants = compiled_variants();
  std::printf("us (GB/s of K and V), median of rounds; parts: choice of the host first\n");
  Case largest = few(64, 32, 8, 1, 8192, 128);
  harness.fill<bf16>(largest);
  for (const Case& c : timed_cases()) {
    const Variant* compiled = variant_for(variants, c.head_dim);
    if (compiled == nullptr) continue;
    const Variant& v = *compiled;
    std::vector<std::vector<double>> found(splits.size() + 1);
    const int chosen = harness.grid_of(harness.params_of({c}, v.dtype), 0).splits;
    for (int round = 0; round < rounds; ++round) {
      for (size_t i = 0; i < splits.size(); ++i) {
        found[i].push_back(1e3 * harness.milliseconds(v, c, splits[i], true, reps));
      }
      found.back().push_back(1e3 * harness.milliseconds(v, c, 0, false, reps));
    }
    const double bytes = 2. * c.batch * c.seqlen_k * c.heads_k * (c.head_dim + c.head_dim_v);
    std::printf("b%-3d h%d/%d q%-3d k%-6d d%-3d parts %-3d", c.batch, c.heads, c.heads_k, c.seqlen_q, c.seqlen_k,
                c.head_dim, chosen);
    for (size_t i = 0; i < found.size(); ++i) {
      const double us = median(found[i]);
      if (i == splits.size()) {
        std::printf("  not early");
      } else {
        std::printf("  %d:", splits[i]);
      }
      std::printf(" %.1f (%.0f)", us, bytes / us * 1e-3);
    }
    std::printf("\n");
    std::fflush(stdout);
  }
  return 0;
}

}  // namespace standalone

int main(int argc, char** argv) {
  using namespace standalone;
  Harness harness(this_device());
  if (argument(argc, argv, 1, "test") == "test") return run_tests(harness, argument(argc, argv, 2, ""));
  return run_timing(harness, std::atoi(argument(argc, argv, 2, "8").c_str()),
                    std::atoi(argument(argc, argv, 3, "3").c_str()),
                    split_numbers(argument(argc, argv, 4, "0,1,2,4,8,16,32")));
}
