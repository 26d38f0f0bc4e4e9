// Sparse block maps in the sm80 kernels as they are and in trials that spend less outside their tiles, without torch.
//
//   blocks_sm80 [ROUNDS [SEQLEN]]
//
// First every trial is checked against the kernels as they are, then all are timed in turn: batch 4, 16 heads, bf16,
// head_dim 128, L2 cold, on all blocks of 128 and on a quarter of them, as many in every row ("even") or drawn one by
// one ("drawn"). Ratios: time per visited block over that of the same row with all blocks, and over that of the
// kernels as they are; then speed on visited blocks over that of the plain kernel.
#include <cmath>
#include <cstring>

#include "bwd_late_pass.cuh"
#include "bwd_onward_sm80.cuh"
#include "fwd_onward_sm80.cuh"
#include "item_order.cuh"
#include "modifiers_cases.cuh"
#include "passes/mask_passes.cuh"
#include "sm80/run_bwd.cuh"
#include "sm80/run_fwd.cuh"
#include "sm80/run_fwd_mod.cuh"

namespace standalone {

constexpr int kHeadDim = 128;
constexpr SmemClass kClass = SmemClass::kLarge;

using FwdAsIs = sm80::FwdModTraits<bf16, kHeadDim, kClass, FwdModKind::kHides>;
using BwdAsIs = sm80::BwdTraits<bf16, kHeadDim, kClass, true, false>;

template <typename Base>
struct InOrder : Base {
  static constexpr bool kInOrder = true;
};
template <typename Base>
struct Counting : Base {
  static constexpr bool kCounts = true;
};

// ---- calls ----

struct Call {
  explicit Call(const Problem& p, const DeviceInfo& d) : problem(p), device(d) {
    const size_t q = p.total_q * p.num_heads * kHeadDim, k = p.total_k * p.num_heads_k * kHeadDim;
    const size_t rows = p.total_q * p.num_heads;
    // Items of any grid here: tiles of 64 rows are the smallest, and one more a head where they do not fill it.
    const size_t items = (q + k) / kHeadDim / 64 + p.batch * (p.num_heads + p.num_heads_k);
    uint32_t seed = 0;
    for (void** x : {&f.q.ptr, &f.k.ptr, &f.v.ptr, &f.out.ptr, &dout, &dq, &dk, &dv}) {
      *x = device_alloc<bf16>(std::max(q, k));
      fill_normal<bf16>(*x, std::max(q, k), ++seed);
    }
    const auto view = [&](void* ptr, bool keys) {
      return contiguous_view(ptr, keys ? p.seqlen_k : p.seqlen_q, keys ? p.num_heads_k : p.num_heads, kHeadDim);
    };
    f.problem = p;
    f.q = view(f.q.ptr, false), f.k = view(f.k.ptr, true), f.v = view(f.v.ptr, true), f.out = view(f.out.ptr, false);
    f.lse = device_alloc<float>(rows);
    w.problem = p;
    w.q = f.q, w.k = f.k, w.v = f.v, w.out = f.out;
    w.dout = view(dout, false), w.dq = view(dq, false), w.dk = view(dk, true), w.dv = view(dv, true);
    w.lse = f.lse;
    w.row_stats = device_alloc<float>(2 * rows + p.batch * p.num_heads_k + items);
    w.dq_accum = device_alloc<float>(q);
    schedule = device_alloc<uint32_t>(2 + items);
    counts = device_alloc<uint32_t>(items);
    CHECK_CUDA(cudaMemset(schedule, 0, (2 + items) * sizeof(uint32_t)));
  }
  ~Call() {
    for (void* x : {f.q.ptr, f.k.ptr, f.v.ptr, f.out.ptr, dout, dq, dk, dv}) cudaFree(x);
    for (float* x : {f.lse, w.row_stats, w.dq_accum}) cudaFree(x);
    for (uint32_t* x : {schedule, counts}) cudaFree(x);
  }
  Call(const Call&) = delete;

  Problem problem;
  DeviceInfo device;
  FwdParams f;
  BwdParams w;
  void *dout = nullptr, *dq = nullptr, *dk = nullptr, *dv = nullptr;
  uint32_t *schedule = nullptr, *counts = nullptr;
  int most_ctas = INT32_MAX;  // of trials whose CTAs go on from item to item
};

Grid fwd_grid(const Call& c) { return make_grid(c.problem, c.device, true, FwdAsIs::kBlockM); }
Grid bwd_grid(const Call& c) { return make_grid(c.problem, c.device, false, BwdAsIs::kBlockN); }

enum class Order { kOfGrid, kSorted, kKnown };  // known: sorted by an earlier call

void fwd_plain(const Call& c) { require(sm80::launch_fwd<bf16, kHeadDim, kClass>(c.f, c.device)); }

void fwd_as_is(const Call& c, const Modifiers& m, Order order) {
  const Grid g = fwd_grid(c);
  const auto run = [&](auto kernel, const FwdParams& p) {
    require(launch("fwd_mod_sm80", kernel, g.ctas, FwdAsIs::kThreads, FwdAsIs::kSmemBytes, p.stream, p, m, g));
  };
  if (order == Order::kOfGrid) return run(sm80::fwd_mod_kernel<FwdAsIs>, c.f);
  FwdParams p = c.f;
  p.schedule = c.schedule + 2;
  if (order == Order::kSorted) require(sm80::sort_items<FwdAsIs, true>(p, m, g, c.counts, c.schedule + 2));
  run(sm80::fwd_mod_kernel<InOrder<FwdAsIs>>, p);
}

void fwd_onward(const Call& c, const Modifiers& m, Order order) {
  const Grid g = fwd_grid(c);
  FwdParams p = c.f;
  p.schedule = c.schedule;
  const int64_t ctas = std::min<int64_t>({g.ctas, 2 * c.device.num_sms, c.most_ctas});
  const auto run = [&](auto kernel) {
    require(launch("fwd_onward", kernel, ctas, FwdAsIs::kThreads, FwdAsIs::kSmemBytes, p.stream, p, m, g));
  };
  if (order == Order::kOfGrid) return run(sm80::fwd_onward_kernel<sm80::OnwardTraits<FwdAsIs>>);
  if (order == Order::kSorted) require(sm80::sort_items<FwdAsIs, true>(p, m, g, c.counts, c.schedule + 2));
  run(sm80::fwd_onward_kernel<sm80::SortedOnwardTraits<FwdAsIs>>);
}

// The kernel over keys between the passes; `late`: the second pass begins with its last CTAs.
template <typename Kernel>
void between_passes(const Call& c, bool late, const Kernel& kernel) {
  const Problem& r = c.problem;
  const int64_t rows = r.total_q * r.num_heads;
  const int64_t ctas = (rows * kPassLanes<kHeadDim> + kPassThreads - 1) / kPassThreads;
  const auto begin = [&](auto pass) { require(launch("begin", pass, ctas, kPassThreads, 0, c.w.stream, c.w)); };
  if (late) begin(bwd_preprocess_kernel<bf16, kHeadDim, true>);
  else begin(bwd_preprocess_kernel<bf16, kHeadDim>);
  kernel();
  if (!late) {
    require(launch("end", bwd_postprocess_kernel<bf16, kHeadDim>, ctas, kPassThreads, 0, c.w.stream, c.w));
    return;
  }
  const int tiles = (r.seqlen_q + sm80::kLateRows - 1) / sm80::kLateRows;
  const uint32_t ctas_per_head = bwd_grid(c).blocks;
  require(launch_at(Start::kEarly, "late end", sm80::bwd_late_postprocess_kernel<bf16, kHeadDim>,
                    int64_t{1} * tiles * r.batch * r.num_heads, kPassThreads, 0, c.w.stream, c.w, tiles,
                    ctas_per_head));
}

void bwd_plain(const Call& c, bool late) {
  using T = sm80::BwdTraits<bf16, kHeadDim, kClass>;
  const Grid g = bwd_grid(c);
  const auto run = [&](auto kernel) {
    require(launch("bwd_sm80", kernel, g.ctas, T::kThreads, T::kSmemBytes, c.w.stream, c.w, g));
  };
  between_passes(c, late, [&] {
    if (late) run(sm80::bwd_kernel<Counting<T>>);
    else run(sm80::bwd_kernel<T>);
  });
}

void bwd_as_is(const Call& c, const Modifiers& m, bool late, Order order) {
  const Grid g = bwd_grid(c);
  const auto run = [&](auto kernel) {
    require(launch("bwd_mod_sm80", kernel, g.ctas, BwdAsIs::kThreads, BwdAsIs::kSmemBytes, c.w.stream, c.w, m, g));
  };
  between_passes(c, late, [&] {
    if (order == Order::kSorted) require(sm80::sort_items<BwdAsIs, false>(c.w, m, g, c.counts, sm80::item_order(c.w)));
    if (order == Order::kOfGrid) {
      if (late) run(sm80::bwd_mod_kernel<Counting<BwdAsIs>>);
      else run(sm80::bwd_mod_kernel<BwdAsIs>);
    } else {
      if (late) run(sm80::bwd_mod_kernel<InOrder<Counting<BwdAsIs>>>);
      else run(sm80::bwd_mod_kernel<InOrder<BwdAsIs>>);
    }
  });
}

void bwd_onward(const Call& c, const Modifiers& m, bool late) {
  const Grid g = bwd_grid(c);
  const int64_t ctas = std::min<int64_t>({g.ctas, c.device.num_sms, c.most_ctas});
  auto* schedule = reinterpret_cast<sm80::OnwardSchedule*>(c.schedule);
  const auto run = [&](auto kernel) {
    require(
        launch("bwd_onward", kernel, ctas, BwdAsIs::kThreads, BwdAsIs::kSmemBytes, c.w.stream, c.w, m, g, schedule));
  };
  between_passes(c, late, [&] {
    if (late) run(sm80::bwd_onward_kernel<sm80::BwdOnwardTraits<Counting<BwdAsIs>>>);
    else run(sm80::bwd_onward_kernel<sm80::BwdOnwardTraits<BwdAsIs>>);
  });
}

struct Trial {
  const char* name;
  bool forward;
  std::function<void(const Call&, const Modifiers&)> run;
};

// The first of each direction is what the others are compared with.
std::vector<Trial> trials() {
  using C = const Call&;
  using M = const Modifiers&;
  return {{"fwd as it is", true, [](C c, M m) { fwd_as_is(c, m, Order::kOfGrid); }},
          {"fwd sorted", true, [](C c, M m) { fwd_as_is(c, m, Order::kSorted); }},
          {"fwd order known", true, [](C c, M m) { fwd_as_is(c, m, Order::kKnown); }},
          {"fwd onward", true, [](C c, M m) { fwd_onward(c, m, Order::kOfGrid); }},
          {"fwd onward, sorted", true, [](C c, M m) { fwd_onward(c, m, Order::kSorted); }},
          {"fwd onward, known", true, [](C c, M m) { fwd_onward(c, m, Order::kKnown); }},
          {"bwd as it is", false, [](C c, M m) { bwd_as_is(c, m, false, Order::kOfGrid); }},
          {"bwd late pass", false, [](C c, M m) { bwd_as_is(c, m, true, Order::kOfGrid); }},
          {"bwd sorted", false, [](C c, M m) { bwd_as_is(c, m, false, Order::kSorted); }},
          {"bwd sorted, late", false, [](C c, M m) { bwd_as_is(c, m, true, Order::kSorted); }},
          {"bwd order known", false, [](C c, M m) { bwd_as_is(c, m, false, Order::kKnown); }},
          {"bwd onward", false, [](C c, M m) { bwd_onward(c, m, false); }},
          {"bwd onward, late", false, [](C c, M m) { bwd_onward(c, m, true); }}};
}

// ---- checks ----

struct Checked {
  const char* name;
  int batch, heads, heads_k, seqlen_q, seqlen_k;
  int window_left, window_right;
  std::function<void(Modifiers&)> set;
};

double relative_error(const std::vector<bf16>& got, const std::vector<bf16>& want) {
  double squares = 0., all = 0.;
  for (size_t i = 0; i < got.size(); ++i) {
    const double a = __bfloat162float(got[i]), b = __bfloat162float(want[i]);
    squares += std::isfinite(a) ? (a - b) * (a - b) : 1e30;
    all += b * b;
  }
  return std::sqrt(squares / std::max(all, 1e-30));
}

std::vector<Checked> checked_cases() {
  const auto blocks = [](int heads, int rows, int cols, int side, int percent) {
    return [=](Modifiers& m) {
      std::vector<bool> seen(64 * 64 * heads);
      for (auto&& x : seen) x = below(100) < percent;
      set_blocks(m, heads, rows, cols, [&](int h, int r, int c) {
        return seen[(h * 64 + r / side % 64) * 64 + c / side % 64];
      });
    };
  };
  const auto mask = [](Modifiers& m) { set_random_mask(m, 1, 1, 700, 900); };
  const auto both = [=](Modifiers& m) {
    mask(m);
    blocks(2, 700, 900, 4, 40)(m);
  };
  return {{"quarter of 128", 2, 3, 3, 1024, 1024, -1, -1, blocks(3, 1024, 1024, 8, 25)},
          {"few of 128", 1, 4, 4, 2048, 2048, -1, -1, blocks(4, 2048, 2048, 8, 8)},
          {"half of 64", 2, 2, 2, 777, 1000, -1, -1, blocks(2, 777, 1000, 4, 50)},
          {"most of 16, causal", 2, 2, 2, 900, 900, -1, 0, blocks(2, 900, 900, 1, 85)},
          {"third of 32, window", 1, 2, 2, 1500, 1300, 300, 100, blocks(1, 1500, 1300, 2, 33)},
          {"grouped heads", 2, 4, 2, 640, 700, -1, -1, blocks(4, 640, 700, 8, 30)},
          {"no block", 1, 2, 2, 512, 512, -1, -1, blocks(1, 512, 512, 8, 0)},
          {"no modifiers, causal", 2, 2, 2, 1111, 1111, -1, 0, [](Modifiers&) {}},
          {"mask", 2, 2, 2, 700, 900, -1, -1, mask},
          {"mask and blocks", 1, 2, 2, 700, 900, -1, -1, both},
          {"long", 1, 1, 1, 9000, 20000, -1, -1, blocks(1, 9000, 20000, 8, 25)}};
}

// Trials differ in the order of CTAs, so all but dq, which is a sum by atomic additions, is the same bit by bit.
int check(const DeviceInfo& d) {
  int wrong = 0;
  for (const Checked& x : checked_cases()) {
    Problem p;
    p.batch = x.batch, p.num_heads = x.heads, p.num_heads_k = x.heads_k;
    p.head_dim = p.head_dim_v = kHeadDim;
    p.seqlen_q = x.seqlen_q, p.seqlen_k = x.seqlen_k;
    p.total_q = int64_t{x.batch} * x.seqlen_q, p.total_k = int64_t{x.batch} * x.seqlen_k;
    p.softmax_scale = 1.f / std::sqrt(static_cast<float>(kHeadDim));
    p.window_left = x.window_left, p.window_right = x.window_right;
    p.prepare();
    Modifiers m;
    x.set(m);
    m.unit_log2 = p.abs_scale_log2;
    Call c(p, d);
    const size_t q = p.total_q * p.num_heads * kHeadDim, k = p.total_k * p.num_heads_k * kHeadDim;
    std::vector<std::vector<bf16>> want;
    std::vector<float> want_lse;
    bool is_forward = false;
    const auto all = trials();
    fwd_as_is(c, m, Order::kOfGrid);
    for (const Trial& t : all) {
      for (int most_ctas : {3, 7, INT32_MAX}) {
        c.most_ctas = most_ctas;
        for (void* to : t.forward ? std::vector<void*>{c.f.out.ptr} : std::vector<void*>{c.dq, c.dk, c.dv}) {
          CHECK_CUDA(cudaMemset(to, 0xff, sizeof(bf16) * (to == c.dk || to == c.dv ? k : q)));
        }
        t.run(c, m);
        CHECK_CUDA(cudaDeviceSynchronize());
        std::vector<std::vector<bf16>> got;
        if (t.forward) {
          got = {download(static_cast<bf16*>(c.f.out.ptr), q)};
        } else {
          got = {download(static_cast<bf16*>(c.dk), k), download(static_cast<bf16*>(c.dv), k),
                 download(static_cast<bf16*>(c.dq), q)};
        }
        const std::vector<float> lse = download(c.f.lse, p.total_q * p.num_heads);
        if (is_forward != t.forward || want.empty()) want = got, want_lse = lse, is_forward = t.forward;
        for (size_t i = 0; i < got.size(); ++i) {
          const double error = relative_error(got[i], want[i]);
          const bool same = std::memcmp(got[i].data(), want[i].data(), got[i].size() * sizeof(bf16)) == 0;
          if (same || (i == 2 && error < 5e-3)) continue;
          std::printf("WRONG %s, %s, at most %d CTAs: result %zu off by %.3g\n", x.name, t.name, most_ctas, i, error);
          ++wrong;
        }
        if (std::memcmp(lse.data(), want_lse.data(), lse.size() * sizeof(float)) != 0) {
          std::printf("WRONG %s, %s, at most %d CTAs: lse\n", x.name, t.name, most_ctas);
          ++wrong;
        }
      }
    }
  }
  std::printf("%zu cases, %zu trials: %d wrong\n", checked_cases().size(), trials().size(), wrong);
  return wrong;
}

// ---- times ----

struct Map {
  const char* name;
  Modifiers modifiers;
  double share;  // of the blocks, visited
};

// even: as many blocks in every row and every column, as bench/features.py has them.
Map make_map(const char* name, int seqlen, int heads, double share, bool even) {
  const int n = seqlen / 128;
  std::vector<bool> seen(size_t{1} * heads * n * n);
  for (int h = 0; h < heads; ++h) {
    std::vector<int> order(n);
    for (int i = 0; i < n; ++i) order[i] = i;
    for (int i = n - 1; i > 0; --i) std::swap(order[i], order[below(i + 1)]);
    for (int r = 0; r < n; ++r) {
      for (int c = 0; c < n; ++c) {
        const bool taken = even ? order[(c - r + n) % n] < std::lround(n * share) : below(10000) < 10000 * share;
        seen[(size_t{1} * h * n + r) * n + c] = taken;
      }
    }
  }
  Map map{name, {}, std::count(seen.begin(), seen.end(), true) / static_cast<double>(seen.size())};
  set_blocks(map.modifiers, heads, seqlen, seqlen,
             [&](int h, int r, int c) { return seen[(size_t{1} * h * n + r / 8) * n + c / 8]; });
  return map;
}

void time_all(const DeviceInfo& d, int seqlen, int rounds) {
  constexpr int kBatch = 4, kHeads = 16;
  Problem p;
  p.batch = kBatch, p.num_heads = p.num_heads_k = kHeads;
  p.head_dim = p.head_dim_v = kHeadDim;
  p.seqlen_q = p.seqlen_k = seqlen;
  p.total_q = p.total_k = int64_t{kBatch} * seqlen;
  p.softmax_scale = 1.f / std::sqrt(static_cast<float>(kHeadDim));
  p.prepare();
  Call c(p, d);
  std::vector<Map> maps = {
      make_map("all", seqlen, kHeads, 1., true), make_map("quarter, even", seqlen, kHeads, .25, true),
      make_map("quarter, drawn", seqlen, kHeads, .25, false), make_map("half, even", seqlen, kHeads, .5, true)};
  for (Map& map : maps) map.modifiers.unit_log2 = p.abs_scale_log2;

  // The pass in front of both directions, as the operator runs it.
  const int n = seqlen / 128, words = seqlen / 512;
  BoolView view;
  view.ptr = device_alloc<bool>(size_t{1} * kHeads * n * n);
  CHECK_CUDA(cudaMemset(const_cast<bool*>(view.ptr), 1, size_t{1} * kHeads * n * n));
  view.sizes[1] = kHeads, view.sizes[2] = view.sizes[3] = n;
  view.strides[1] = int64_t{n} * n, view.strides[2] = n, view.strides[3] = 1;
  uint32_t* packed = device_alloc<uint32_t>(size_t{1} * kHeads * seqlen / 16 * words);
  const int64_t pack_ctas = (int64_t{kHeads} * seqlen / 16 * words + kMaskThreads - 1) / kMaskThreads;
  const auto pack = [=] {
    require(launch("pack_blocks", pack_blocks_kernel, pack_ctas, kMaskThreads, 0, nullptr, view, packed, seqlen / 16,
                   words, 8, 8));
  };

  struct Row {
    std::string name;
    size_t map;
    bool forward;
    std::function<void()> call;
    std::vector<float> times = {};
  };
  std::vector<Row> rows = {{"fwd plain", 0, true, [&] { fwd_plain(c); }},
                           {"bwd plain", 0, false, [&] { bwd_plain(c, false); }},
                           {"bwd plain, late pass", 0, false, [&] { bwd_plain(c, true); }},
                           {"pack of the map", 0, true, pack},
                           {"pack, fwd as it is", 1, true,
                            [&] {
                              pack();
                              fwd_as_is(c, maps[1].modifiers, Order::kOfGrid);
                            }}};
  const auto all = trials();
  for (const Trial& t : all) {
    for (size_t i = 0; i < maps.size(); ++i) {
      rows.push_back({t.name, i, t.forward, [&c, &t, m = maps[i].modifiers] { t.run(c, m); }});
    }
  }
  ColdCache cold;
  const auto prepare = [&](const Row& row) {  // a known order is that of the row's map
    if (row.name.find("known") == std::string::npos) return;
    if (row.forward) fwd_as_is(c, maps[row.map].modifiers, Order::kSorted);
    else bwd_as_is(c, maps[row.map].modifiers, false, Order::kSorted);
  };
  for (int round = 0; round <= rounds; ++round) {
    for (Row& row : rows) {
      prepare(row);
      const float ms = time_calls(row.call, 1, &cold)[0];
      if (round > 0) row.times.push_back(ms);
    }
  }
  const auto time_of = [&](const std::string& name, size_t map) {
    for (const Row& row : rows) {
      if (row.name == name && row.map == map) return median(row.times);
    }
    return 0.;
  };
  for (const Row& row : rows) {
    const float ms = median(row.times);
    const double share = maps[row.map].share, own = time_of(row.name, 0);
    const double first = time_of(row.forward ? "fwd as it is" : "bwd as it is", 0);
    const double plain = time_of(row.forward ? "fwd plain" : "bwd plain", 0);
    std::printf("%-22s %-15s %8.4f ms  %.3f and %.3f of all  %.3f of plain\n", row.name.c_str(), maps[row.map].name, ms,
                own > 0. ? ms / share / own : 0., ms / share / first, plain * share / ms);
  }
}

}  // namespace standalone

int main(int argc, char** argv) {
  using namespace standalone;
  const DeviceInfo device = this_device();
  const int rounds = std::atoi(argument(argc, argv, 1, "9").c_str());
  const int seqlen = std::atoi(argument(argc, argv, 2, "4096").c_str());
  if (rounds <= 0 || seqlen <= 0 || seqlen % 512 != 0) {
    std::printf("ROUNDS must be at least 1, SEQLEN a multiple of 512\n");
    return 2;
  }
  const int wrong = check(device);
  time_all(device, seqlen, rounds);
  return wrong == 0 ? 0 : 1;
}
