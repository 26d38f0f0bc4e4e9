// csrc/sm80/split_kv/kernel.cuh on a CPU against a model in float64. Built and run by tests/kernels/test_emulation.py.
//
//   fwd_split [--all] [--seed N] [--fault N]
//
// A few small cases, or with --all a list that reaches every branch; keys in one part and in several, copies as early
// and as late as allowed. Prints a line a run; returns 0 if all of them agree.
#include "ptx/sm80.cuh"

#include <random>
#include <string>

#include "plan/split_kv.h"
#include "sm80/split_kv/merge.cuh"

#include "arguments.h"  // behind what it sets

namespace flash_ext {
namespace {

std::mt19937 generator(7);

struct Case {
  std::string name;
  std::vector<int> lq = {1, 1}, lk = {300, 300};  // lengths, one a batch entry
  int heads = 4, heads_k = 2, d = 64, dv = 64;
  int left = -1, right = -1;
  float scale = 0.125f;
  bool packed = false, unaligned = false, fp32 = false;
  int outside = 0;  // rows of packed q before and after the sequences

  int rows() const { return std::accumulate(lq.begin(), lq.end(), packed ? 2 * outside : 0); }
  int keys() const { return std::accumulate(lk.begin(), lk.end(), 0); }
};

std::vector<Case> few_cases() {
  std::vector<Case> list(3);
  list[0].name = "one query";
  list[1].name = "causal", list[1].lq = {5, 5}, list[1].right = 0;
  list[2].name = "packed", list[2].lq = {1, 0, 30}, list[2].lk = {200, 9, 150}, list[2].packed = true;
  list[2].outside = 3, list[2].right = 0;
  return list;
}

std::vector<Case> all_cases() {
  std::vector<Case> list = few_cases();
  const auto add = [&](const char* name, const auto& change) {
    Case c;
    c.name = name;
    change(c);
    list.push_back(c);
  };
  add("d128", [](Case& c) { c.d = c.dv = 128; });
  add("d256", [](Case& c) { c.d = c.dv = 256, c.lq = {3}, c.lk = {200}; });
  add("d40/72", [](Case& c) { c.d = 40, c.dv = 72; });
  add("d133/17 odd rows", [](Case& c) { c.d = 133, c.dv = 17, c.unaligned = true; });
  add("71 heads of one", [](Case& c) { c.heads = 71, c.heads_k = 1, c.lq = {1}, c.lk = {100}; });
  add("many rows", [](Case& c) { c.lq = {70}, c.lk = {90}, c.right = 0; });
  add("many rows d128", [](Case& c) { c.lq = {40}, c.lk = {130}, c.d = c.dv = 128, c.right = 0; });
  add("many rows d256", [](Case& c) { c.lq = {40}, c.lk = {130}, c.d = c.dv = 256, c.left = 20; });
  add("rows without keys", [](Case& c) { c.lq = {9}, c.lk = {4}, c.right = 0; });
  add("window", [](Case& c) { c.lq = {7, 7}, c.lk = {500, 500}, c.left = 60, c.right = 3; });
  add("scale -1", [](Case& c) { c.scale = -1, c.right = 0, c.lq = {3, 3}; });
  add("scale 0", [](Case& c) { c.scale = 0; });
  add("unaligned", [](Case& c) { c.unaligned = true, c.lq = {5, 5}; });
  add("fp32", [](Case& c) { c.fp32 = true; });
  add("fp32, odd", [](Case& c) { c.fp32 = c.unaligned = true, c.dv = 37; });
  add("packed, uneven", [](Case& c) {
    c.packed = true, c.lq = {1, 1, 1, 0, 20}, c.lk = {0, 77, 400, 3, 130}, c.left = 90, c.heads = 6, c.outside = 1;
  });
  return list;
}

// Vectors that start on 16 bytes, or one element further.
struct Operand {
  std::vector<uint16_t> memory;
  StridedView view;

  template <typename E>
  void make(const Case& c, int batch, int rows, int heads, int columns) {
    const bool dense = !c.packed;
    const int odd = c.unaligned ? 1 : 0, pitch = columns + (8 - columns % 8) % 8 + odd;
    memory.assign(static_cast<size_t>(batch) * rows * heads * pitch + 16, 0x7fff);  // NaN between rows
    auto* start = reinterpret_cast<uint16_t*>((reinterpret_cast<uintptr_t>(memory.data()) + 15) / 16 * 16) + odd;
    view.ptr = start;
    view.head_stride = pitch;
    view.row_stride = int64_t{1} * heads * pitch;
    view.batch_stride = dense ? rows * view.row_stride : 0;
    view.aligned = !c.unaligned;
    for (int i = 0; i < batch * rows * heads; ++i) {
      for (int j = 0; j < columns; ++j) {
        start[int64_t{1} * i * pitch + j] = ptx::narrow<E>(std::normal_distribution<float>()(generator));
      }
    }
  }
  template <typename E>
  double at(int64_t element) const {
    return ptx::widen<E>(static_cast<const uint16_t*>(view.ptr)[element]);
  }
};

template <typename E>
struct Data {
  const Case& c;
  std::vector<int32_t> cu_q, cu_k{0};
  Operand q, k, v;
  std::vector<uint16_t> out16;
  std::vector<float> out32, lse;
  std::vector<uint64_t> workspace;
  FwdParams p;

  explicit Data(const Case& of) : c(of) {
    const int batch = static_cast<int>(c.lq.size());
    Problem& r = p.problem;
    r.dtype = std::is_same_v<E, __half> ? DType::kFloat16 : DType::kBFloat16;
    r.batch = batch;
    r.num_heads = c.heads;
    r.num_heads_k = c.heads_k;
    r.head_dim = c.d;
    r.head_dim_v = c.dv;
    r.scale = c.scale;
    r.window_left = c.left;
    r.window_right = c.right;
    r.total_q = c.rows();
    r.total_k = c.keys();
    if (c.packed) {
      cu_q.push_back(c.outside);
      for (int b = 0; b < batch; ++b) cu_q.push_back(cu_q[b] + c.lq[b]), cu_k.push_back(cu_k[b] + c.lk[b]);
      r.cu_seqlens_q = cu_q.data();
      r.cu_seqlens_k = cu_k.data();
    } else {
      r.seqlen_q = c.lq[0];
      r.seqlen_k = c.lk[0];
    }
    r.prepare();
    const int entries = c.packed ? 1 : batch;
    q.make<E>(c, entries, static_cast<int>(r.total_q) / entries, c.heads, c.d);
    k.make<E>(c, entries, static_cast<int>(r.total_k) / entries, c.heads_k, c.d);
    v.make<E>(c, entries, static_cast<int>(r.total_k) / entries, c.heads_k, c.dv);
    p.q = q.view;
    p.k = k.view;
    p.v = v.view;
    const int64_t elements = r.total_q * c.heads * c.dv;
    out16.assign(elements + 8, 0x7fff);
    out32.assign(elements + 4, NAN);
    lse.assign(r.total_q * c.heads, NAN);
    p.out = {c.fp32 ? static_cast<void*>(out32.data()) : out16.data(),
             int64_t{1} * r.seqlen_q * c.heads * c.dv,
             int64_t{1} * c.heads * c.dv,
             c.dv,
             !c.unaligned && c.dv % 8 == 0,
             c.fp32};
    p.lse = lse.data();
  }

  // The largest difference of out and lse from the model, 1e9 for NaN.
  double error() const {
    double worst = 0;
    const auto tally = [&](double got, double want) {
      const double off = got == want ? 0 : std::abs(got - want);
      worst = std::max(worst, off < 1e9 ? off : 1e9);
    };
    const int first = c.packed ? -1 : 0, last = static_cast<int>(c.lq.size()) + (c.packed ? 1 : 0);
    for (int b = first; b < last; ++b) {
      const bool inside = b >= 0 && b < static_cast<int>(c.lq.size());
      const int rows = inside ? c.lq[b] : c.outside;
      for (int i = 0; i < rows; ++i) {
        for (int h = 0; h < c.heads; ++h) check_row(b, i, h, inside, tally);
      }
    }
    return worst;
  }

  template <typename Tally>
  void check_row(int b, int i, int h, bool inside, const Tally& tally) const {
    const Problem& r = p.problem;
    const int entry = c.packed ? 0 : b, h_k = h / (c.heads / c.heads_k), keys = inside ? c.lk[b] : 0;
    const int64_t row = (c.packed ? (b < 0 ? 0 : cu_q[b]) : 0) + i, first_key = c.packed && inside ? cu_k[b] : 0;
    const int level = i + keys - (inside ? c.lq[b] : 0);
    std::vector<double> weights(keys, 0.), out(c.dv, 0.);
    double sum = 0;
    for (int j = 0; j < keys; ++j) {
      if ((c.right >= 0 && j > level + c.right) || (c.left >= 0 && j < level - c.left)) continue;
      double score = 0;
      for (int x = 0; x < c.d; ++x) {
        score += q.at<E>(entry * p.q.batch_stride + row * p.q.row_stride + h * p.q.head_stride + x) *
                 k.at<E>(entry * p.k.batch_stride + (first_key + j) * p.k.row_stride + h_k * p.k.head_stride + x);
      }
      weights[j] = std::exp(score * c.scale);
      sum += weights[j];
    }
    for (int j = 0; j < keys; ++j) {
      for (int x = 0; x < c.dv && weights[j] > 0; ++x) {
        out[x] += weights[j] / sum *
                  v.at<E>(entry * p.v.batch_stride + (first_key + j) * p.v.row_stride + h_k * p.v.head_stride + x);
      }
    }
    const int64_t at = entry * p.out.batch_stride + row * p.out.row_stride + h * p.out.head_stride;
    for (int x = 0; x < c.dv; ++x) {
      tally(c.fp32 ? out32[at + x] : ptx::widen<E>(out16[at + x]), out[x]);
    }
    tally(lse[c.packed ? h * r.total_q + row : (int64_t{1} * b * c.heads + h) * r.seqlen_q + row],
          sum > 0 ? std::log(sum) : -INFINITY);
  }
};

template <typename E, int D, int kRows>
void run(const FwdParams& p, const SplitGrid& g) {
  using T = sm80::SplitTraits<E, D, kRows>;
  for (blockIdx.x = 0; blockIdx.x < g.ctas; ++blockIdx.x) {
    emu::run_cta(T::kThreads, [&] { sm80::fwd_split_kernel<T>(p, g); });
  }
  for (blockIdx.x = 0; g.splits > 1 && blockIdx.x < g.total_rows; ++blockIdx.x) {
    emu::run_cta(SplitTile::kThreads,
                 [&] { sm80::fwd_merge_kernel<E>(p, g, sm80::RowEnding{p.problem.abs_scale_log2}); });
  }
}

template <typename E, int D>
void run(const FwdParams& p, const SplitGrid& g) {
  g.rows == 16 ? run<E, D, 16>(p, g) : run<E, D, 64>(p, g);
}

template <typename E>
bool agrees(const Case& c, int splits, bool lazy) {
  Data<E> x(c);
  DeviceInfo device;
  device.num_sms = 132;
  device.smem_per_block = kSmemLimitLarge;
  const SplitGrid g = make_split_grid(x.p.problem, device, splits);
  x.workspace.assign(g.workspace_bytes() / 8 + 2, ~uint64_t{0});  // NaN
  x.p.kept = reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(x.workspace.data()) + 15) / 16 * 16);
  emu::lazy = lazy;
  const int size = padded_split_head_dim(c.d, c.dv);
  const auto run_all = [&] {
    size == 64 ? run<E, 64>(x.p, g) : size == 128 ? run<E, 128>(x.p, g) : run<E, 256>(x.p, g);
  };
  run_all();
  const bool is_half = std::is_same_v<E, __half>;
  const double limit = is_half ? 4e-3 : 3e-2, found = x.error();
  bool good = found < limit;
  if (!lazy) {  // nobody wants lse: the same bits
    const std::vector<uint16_t> out16 = x.out16;
    const std::vector<float> out32 = x.out32;
    x.out16.assign(out16.size(), 0x7fff);
    x.out32.assign(out32.size(), NAN);
    x.p.lse = nullptr;
    run_all();
    good = good && x.out16 == out16 && std::memcmp(x.out32.data(), out32.data(), 4 * out32.size()) == 0;
  }
  std::printf("%s %-20s %s %2d rows, %d parts, copies %s, %lld CTAs, error %.1e\n", good ? "ok  " : "FAIL",
              c.name.c_str(), is_half ? "fp16" : "bf16", g.rows, g.splits, lazy ? "late" : "early",
              static_cast<long long>(g.ctas), found);
  std::fflush(stdout);
  return good;
}

int count_wrong(const std::vector<Case>& cases) {
  int wrong = 0, number = 0;
  for (const Case& c : cases) {
    if (emu::fault != 0 && wrong > 0) break;  // it is noticed
    wrong += !agrees<__nv_bfloat16>(c, 1, number % 2 != 0);
    wrong += !agrees<__half>(c, 2 + number % 4, number % 2 == 0);
    ++number;
  }
  std::printf("%d of %d runs are wrong\n", wrong, 2 * number);
  return wrong;
}

}  // namespace
}  // namespace flash_ext

int main(int argc, char** argv) {
  return emu::try_cases(argc, argv, flash_ext::generator, [](bool all) {
    return flash_ext::count_wrong(all ? flash_ext::all_cases() : flash_ext::few_cases());
  });
}
