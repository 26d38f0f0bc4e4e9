// Sparse block maps in the sm80 kernels at head_dim 128, against what these were before: a backward whose CTAs have one
// item each and whose last pass begins when it is over, a slower pass over the map, launches in turn. Without torch.
//
//   blocks_sm80 [ROUNDS [SEQLEN]]
//
// First, results of both are compared, over all modifiers that add nothing to scores, shapes, dtypes, fp32 results, the
// deterministic mode, few CTAs for many items, and kernels launched early behind the pass over a map. dk, dv and a
// deterministic dq have to be the same bits, since tiles and their order are; dq otherwise is a sum in any order.
//
// Then times, in turn, median of ROUNDS: batch 4, 16 heads, bf16, L2 cold, on all blocks of 128, half and a quarter of
// them, as many in every row ("even") or drawn one by one. Ratios: time per visited block over that of the same row
// with all blocks; speed on visited blocks over that of the plain kernel, which has no map.
#include <cmath>
#include <cstring>
#include <memory>

#include "modifiers_cases.cuh"
#include "passes/mask_passes.cuh"
#include "sm80/run_bwd.cuh"
#include "sm80/run_bwd_mod.cuh"
#include "sm80/run_fwd.cuh"
#include "sm80/run_fwd_mod.cuh"

namespace flash_ext::sm80 {

// Gradients of a bias are another program's.
std::string run_bwd_bias(const BwdParams&, const Modifiers&, const BiasGradient&, const DeviceInfo&) { return "no"; }
std::string run_bwd_bias_large(const BwdParams&, const Modifiers&, const BiasGradient&, const DeviceInfo&) {
  return "no";
}

}  // namespace flash_ext::sm80

namespace standalone {

constexpr int kD = 128;
constexpr SmemClass kClass = SmemClass::kLarge;

// ---- what was before ----

// A thread looks at the block of each of its 32 bits, by divisions of 64 bits.
__global__ void __launch_bounds__(kMaskThreads) slow_pack_kernel(const __grid_constant__ BoolView x, uint32_t* words,
                                                                 int granule_rows, int num_words, int rows_per_block,
                                                                 int cols_per_block) {
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kMaskThreads + threadIdx.x;
  if (index >= int64_t{1} * x.sizes[0] * x.sizes[1] * granule_rows * num_words) return;
  const int w = static_cast<int>(index % num_words);
  const int64_t row = index / num_words;
  const int64_t r = row % granule_rows / rows_per_block, h = row / granule_rows % x.sizes[1];
  const int64_t b = row / granule_rows / x.sizes[1];
  uint32_t word = 0;
  if (r < x.sizes[2]) {
    const bool* at = x.ptr + b * x.strides[0] + h * x.strides[1] + r * x.strides[2];
    for (int i = 0; i < 32; ++i) {
      const int64_t col = (int64_t{w} * 32 + i) / cols_per_block;
      if (col < x.sizes[3] && at[col * x.strides[3]]) word |= 1u << i;
    }
  }
  words[index] = word;
}

template <typename E>
void bwd_before(const BwdParams& p, const Modifiers& m, const DeviceInfo& d) {
  using T = sm80::BwdTraits<E, kD, kClass, true, false>;
  const int64_t ctas = (p.problem.total_q * p.problem.num_heads * kPassLanes<kD> + kPassThreads - 1) / kPassThreads;
  const Grid g = make_grid(p.problem, d, false, T::kBlockN);
  require(launch("begin", bwd_preprocess_kernel<E, kD>, ctas, kPassThreads, 0, p.stream, p));
  require(launch("bwd", sm80::bwd_mod_kernel<T>, g.ctas, T::kThreads, T::kSmemBytes, p.stream, p, m, g));
  require(sm80::finish_bwd_mod<E, kD>(p, m, d));
}

template <typename E>
void bwd_now(const BwdParams& p, const Modifiers& m, const DeviceInfo& d) {
  BwdExtras x;
  x.modifiers = &m;
  require(sm80::run_bwd_mod_as<E, kD, kClass>(p, x, d));
}

template <typename E>
void fwd_mod(const FwdParams& p, const Modifiers& m, const DeviceInfo& d) {
  if (m.rng == nullptr) require(sm80::launch_fwd_mod_kind<E, kD, kClass, FwdModKind::kHides>(p, m, d));
  else require(sm80::launch_fwd_mod_kind<E, kD, kClass, FwdModKind::kDrops>(p, m, d));
}

// ---- a block map as the operator gets it, and its pass ----

struct BlockMap {
  BoolView view;
  uint32_t* words = nullptr;
  int granule_rows = 0, num_words = 0, rows_per_block = 0, cols_per_block = 0;

  int64_t count() const { return int64_t{1} * view.sizes[0] * view.sizes[1] * granule_rows * num_words; }

  // As csrc/inst/passes.cu has it.
  void pack() const {
    const PackedBlocks to(view, granule_rows, num_words, rows_per_block, cols_per_block);
    require(launch("pack_blocks", pack_blocks_kernel, to.ctas, kMaskThreads, 0, nullptr, view, words, to));
  }
  void pack_slowly() const {
    require(launch("slow_pack", slow_pack_kernel, (count() + kMaskThreads - 1) / kMaskThreads, kMaskThreads, 0, nullptr,
                   view, words, granule_rows, num_words, rows_per_block, cols_per_block));
  }

  void use(Modifiers& m) const {
    m.blocks.words = words;
    m.blocks.rows = granule_rows;
    m.blocks.num_words = num_words;
    m.blocks.word_stride = 1;
    m.blocks.row_stride = num_words;
    m.blocks.head_stride = view.sizes[1] == 1 ? 0 : int64_t{1} * granule_rows * num_words;
    m.blocks.batch_stride = view.sizes[0] == 1 ? 0 : int64_t{1} * view.sizes[1] * granule_rows * num_words;
  }
};

BlockMap make_map(int batch, int heads, int rows, int cols, int block_rows, int block_cols,
                  const std::function<bool(int, int, int)>& seen) {
  BlockMap map;
  std::vector<uint8_t> bytes;
  for (int bh = 0; bh < batch * heads; ++bh) {
    for (int r = 0; r < rows; ++r) {
      for (int c = 0; c < cols; ++c) bytes.push_back(seen(bh, r, c));
    }
  }
  map.view.ptr = reinterpret_cast<const bool*>(on_device(bytes));
  map.view.sizes[0] = batch, map.view.sizes[1] = heads, map.view.sizes[2] = rows, map.view.sizes[3] = cols;
  map.view.strides[3] = 1, map.view.strides[2] = cols, map.view.strides[1] = int64_t{1} * rows * cols;
  map.view.strides[0] = heads * map.view.strides[1];
  map.rows_per_block = block_rows / 16, map.cols_per_block = block_cols / 16;
  map.granule_rows = rows * map.rows_per_block;
  map.num_words = (cols * map.cols_per_block + 31) / 32;
  map.words = device_alloc<uint32_t>(map.count());
  return map;
}

int check_pack() {
  int wrong = 0, cases = 0;
  for (int block_rows : {16, 48, 128}) {
    for (int block_cols : {16, 32, 48, 128, 208, 512, 1040}) {
      for (int cols : {1, 3, 32, 37}) {
        BlockMap map = make_map(2, 3, 5, cols, block_rows, block_cols, [](int, int, int) { return below(2) == 0; });
        for (int strides : {0, 1, 2}) {  // as it is, rows and columns exchanged, heads broadcast
          if (strides == 1) std::swap(map.view.strides[2], map.view.strides[3]);
          if (strides == 1) std::swap(map.view.sizes[2], map.view.sizes[3]);
          if (strides == 2) map.view.strides[1] = 0;
          map.granule_rows = map.view.sizes[2] * map.rows_per_block;
          map.num_words = (map.view.sizes[3] * map.cols_per_block + 31) / 32;
          cudaFree(map.words);
          map.words = device_alloc<uint32_t>(map.count());
          map.pack_slowly();
          const std::vector<uint32_t> want = download(map.words, map.count());
          CHECK_CUDA(cudaMemset(map.words, 0x5a, map.count() * sizeof(uint32_t)));
          map.pack();
          ++cases;
          if (download(map.words, map.count()) == want) continue;
          std::printf("WRONG pack of %d blocks of %d x %d, strides %d\n", cols, block_rows, block_cols, strides);
          ++wrong;
        }
        cudaFree(map.words);
        cudaFree(const_cast<bool*>(map.view.ptr));
      }
    }
  }
  std::printf("%d maps packed: %d wrong\n", cases, wrong);
  return wrong;
}

// ---- calls ----

template <typename E>
struct Call {
  Call(const Problem& p, bool wide) : problem(p) {
    const size_t q = p.total_q * p.num_heads * kD, k = p.total_k * p.num_heads_k * kD, most = std::max(q, k);
    bytes = most * (wide ? 4 : 2);
    rows = p.total_q * p.num_heads;
    uint32_t seed = 0;
    const auto view = [&](bool keys, bool result) {
      void* at = device_alloc<char>(result ? bytes : most * 2);
      if (!result) fill_normal<E>(at, most, ++seed);
      owned.push_back(at);
      StridedView x = contiguous_view(at, keys ? p.seqlen_k : p.seqlen_q, keys ? p.num_heads_k : p.num_heads, kD);
      x.is_float = result && wide;
      return x;
    };
    f.problem = w.problem = p;
    f.problem.dtype = w.problem.dtype = kDTypeOf<E>;
    w.q = f.q = view(false, false), w.k = f.k = view(true, false), w.v = f.v = view(true, false);
    w.out = f.out = view(false, false), w.dout = view(false, false);
    w.dq = view(false, true), w.dk = view(true, true), w.dv = view(true, true);
    w.lse = f.lse = device_alloc<float>(rows);
    stats = 2 * rows + bwd_schedule_words(p);
    w.row_stats = device_alloc<float>(stats);
    w.dq_accum = dq_accum = device_alloc<float>(q);
    elements_q = q, elements_k = k;
    owned.insert(owned.end(), {f.lse, w.row_stats, w.dq_accum});
  }
  ~Call() {
    for (void* x : owned) cudaFree(x);
  }
  Call(const Call&) = delete;

  void poison(int byte) {
    for (const StridedView* x : {&w.dq, &w.dk, &w.dv}) CHECK_CUDA(cudaMemset(x->ptr, 0xff, bytes));
    CHECK_CUDA(cudaMemset(w.row_stats, byte, stats * sizeof(float)));
    CHECK_CUDA(cudaMemset(dq_accum, byte, elements_q * sizeof(float)));
  }

  size_t size() const { return w.dq.is_float ? 4 : 2; }  // of an element of a result

  // dk, dv, dq and their elements.
  std::vector<std::pair<const void*, size_t>> results() const {
    return {{w.dk.ptr, elements_k}, {w.dv.ptr, elements_k}, {w.dq.ptr, elements_q}};
  }

  Problem problem;
  FwdParams f;
  BwdParams w;
  float* dq_accum = nullptr;
  size_t bytes = 0, rows = 0, stats = 0, elements_q = 0, elements_k = 0;
  std::vector<void*> owned;
};

// ---- checks ----

struct Difference {
  unsigned long long elements;
  double squares, want_squares;
};

template <typename E>
__global__ void difference_kernel(const E* got, const E* want, size_t count, Difference* to) {
  Difference own{0, 0., 0.};
  for (size_t i = first_index(); i < count; i += index_step()) {
    const float a = static_cast<float>(got[i]), b = static_cast<float>(want[i]);
    const double off = fabsf(a - b) < 1e30f ? a - b : 1e15;
    own.elements += a != b;
    own.squares += off * off;
    own.want_squares += static_cast<double>(b) * b;
  }
  if (own.elements > 0) atomicAdd(&to->elements, own.elements);
  if (own.squares > 0.) atomicAdd(&to->squares, own.squares);
  if (own.want_squares > 0.) atomicAdd(&to->want_squares, own.want_squares);
}

// Copies of results to compare later ones with.
template <typename E>
struct Wanted {
  explicit Wanted(const Call<E>& c) {
    for (const auto& [from, count] : c.results()) {
      copies.push_back(device_alloc<char>(count * c.size()));
      CHECK_CUDA(cudaMemcpyAsync(copies.back(), from, count * c.size(), cudaMemcpyDeviceToDevice));
    }
  }
  ~Wanted() {
    for (void* x : copies) cudaFree(x);
  }
  Wanted(const Wanted&) = delete;

  int compare(const Call<E>& c, const std::string& what) const {
    static Difference* const differences = device_alloc<Difference>(3);
    CHECK_CUDA(cudaMemset(differences, 0, 3 * sizeof(Difference)));
    const auto all = c.results();
    for (size_t i = 0; i < 3; ++i) {
      const auto run = [&]<typename X>(const X* got) {
        difference_kernel<<<kBlocks, kThreads>>>(got, static_cast<const X*>(copies[i]), all[i].second, differences + i);
      };
      if (c.w.dq.is_float) run(static_cast<const float*>(all[i].first));
      else run(static_cast<const E*>(all[i].first));
    }
    const std::vector<Difference> found = download(differences, 3);
    int wrong = 0;
    for (size_t i = 0; i < 3; ++i) {
      if (found[i].elements == 0) continue;
      const double error = std::sqrt(found[i].squares / std::max(found[i].want_squares, 1e-30));
      if (i == 2 && c.w.dq_accum != nullptr && error < (c.w.dq.is_float ? 1e-5 : 2e-3)) continue;
      const char* const names[] = {"dk", "dv", "dq"};
      std::printf("WRONG %s: %llu elements of %s, off by %.3g\n", what.c_str(), found[i].elements, names[i], error);
      ++wrong;
    }
    return wrong;
  }

  std::vector<void*> copies;
};

std::vector<Case> more_cases() {
  std::vector<Case> all = cases();
  all.push_back({"grouped", 2, 8, 2, 640, 700});
  all.push_back({"one key head, causal", 1, 8, 1, 1024, 1024, -1, 0});
  all.push_back({"many segments", 1, 16, 1, 3000, 2200});
  all.push_back({"granules above the threads", 1, 2, 2, 4600, 1500});
  all.push_back({"packed grouped", 1, 6, 2, 0, 0, -1, -1, {700, 3, 64, 1300}, {500, 128, 0, 1400}});
  all.push_back({"even", 2, 4, 4, 2048, 2048});
  return all;
}

std::vector<Named> hiding_modifiers() {
  std::vector<Named> all;
  for (const Named& x : all_modifiers()) {
    Modifiers m;
    x.set(m, {"probe", 1, 3, 3, 64, 64});
    if (!m.is_natural) all.push_back(x);
  }
  const auto blocks = [](int side, int percent, bool drops) {
    return [=](Modifiers& m, const Case& c) {
      std::vector<bool> seen(64 * 64 * c.heads);
      for (auto&& x : seen) x = below(100) < percent;
      set_blocks(m, c.heads, c.rows(), c.cols(), [&](int h, int r, int q) {
        return seen[(h * 64 + r / side % 64) * 64 + q / side % 64];
      });
      if (drops) set_dropout(m, 6554);
    };
  };
  all.push_back({"quarter of 128", blocks(8, 25, false)});
  all.push_back({"few of 128", blocks(8, 6, false)});
  all.push_back({"most of 16", blocks(1, 85, false)});
  all.push_back({"no block", blocks(8, 0, false)});
  all.push_back({"quarter of 128 and dropout", blocks(8, 25, true)});
  all.push_back({"quarter of 128 and a mask", [=](Modifiers& m, const Case& c) {
                   blocks(8, 25, false)(m, c);
                   set_random_mask(m, 1, 1, c.rows(), c.cols());
                 }});
  return all;
}

template <typename E>
int check(const DeviceInfo& device, const char* dtype) {
  int wrong = 0, runs = 0;
  for (const Case& x : more_cases()) {
    Problem p = problem_of(x, kD, kD);
    for (const Named& named : hiding_modifiers()) {
      Modifiers m;
      named.set(m, x);
      m.unit_log2 = p.abs_scale_log2;
      for (bool wide : {false, true}) {
        Call<E> c(p, wide);
        fwd_mod<E>(c.f, m, device);
        for (bool deterministic : {false, true}) {
          c.w.dq_accum = deterministic ? nullptr : c.dq_accum;
          c.poison(0xff);
          bwd_before<E>(c.w, m, device);
          const Wanted<E> want(c);
          for (int sms : {device.num_sms, 1, 3, 10}) {
            DeviceInfo d = device;
            d.num_sms = sms;
            c.poison(sms == 3 ? 0x5a : 0xff);
            bwd_now<E>(c.w, m, d);
            CHECK_CUDA(cudaDeviceSynchronize());
            wrong += want.compare(c, std::string(dtype) + ", " + x.name + ", " + named.name + (wide ? ", wide" : "") +
                                         (deterministic ? ", deterministic" : "") + ", " + std::to_string(sms) +
                                         " CTAs");
            ++runs;
          }
        }
      }
    }
  }
  std::printf("%s: %d backwards: %d wrong\n", dtype, runs, wrong);
  return wrong;
}

// Kernels that begin while the pass over the map still runs. Two maps take turns in the same words, inputs are written
// just before, and everything is overwritten right behind.
int check_early(const DeviceInfo& d) {
  int wrong = 0;
  for (const auto& [seqlen, heads] : {std::pair{256, 2}, std::pair{1024, 4}, std::pair{2048, 16}}) {
    const int n = seqlen / 128;
    Problem p = problem_of({"early", 2, heads, heads, seqlen, seqlen}, kD, kD);
    Call<bf16> c(p, false);
    BlockMap maps[2];
    for (BlockMap& map : maps) {
      map = make_map(1, heads, n, n, 128, 128, [](int, int, int) { return below(4) == 0; });
    }
    maps[1].words = maps[0].words;
    const size_t count = c.elements_q;
    bf16 *q = device_alloc<bf16>(count), *outs = device_alloc<bf16>(count);
    std::vector<std::unique_ptr<Wanted<bf16>>> want;
    std::vector<bf16> want_out[2];
    CHECK_CUDA(cudaMemcpy(q, c.f.q.ptr, count * 2, cudaMemcpyDeviceToDevice));
    for (int repeat = 0; repeat < 60; ++repeat) {
      const BlockMap& map = maps[repeat % 2];
      const bool early = repeat > 1;
      Modifiers m;
      map.use(m);
      m.unit_log2 = p.abs_scale_log2;
      m.follows_pass = early;
      const auto pack = [&] {
        CHECK_CUDA(cudaMemsetAsync(map.words, 0xff, map.count() * sizeof(uint32_t)));
        if (early) map.pack();
        else map.pack_slowly();
      };
      c.poison(0x5a);
      fill_normal<bf16>(c.f.q.ptr, count, 77);
      pack();
      fwd_mod<bf16>(c.f, m, d);
      CHECK_CUDA(cudaMemcpyAsync(outs, c.f.out.ptr, count * 2, cudaMemcpyDeviceToDevice));
      pack();
      if (early) bwd_now<bf16>(c.w, m, d);
      else bwd_before<bf16>(c.w, m, d);
      CHECK_CUDA(cudaMemsetAsync(map.words, 0, map.count() * sizeof(uint32_t)));
      for (const StridedView* x : {&c.f.q, &c.f.out}) CHECK_CUDA(cudaMemsetAsync(x->ptr, 0xff, count * 2));
      CHECK_CUDA(cudaDeviceSynchronize());
      const std::vector<bf16> out = download(outs, count);
      if (!early) {
        want.push_back(std::make_unique<Wanted<bf16>>(c));
        want_out[repeat] = out;
        continue;
      }
      if (std::memcmp(out.data(), want_out[repeat % 2].data(), count * 2) != 0) {
        std::printf("WRONG early, length %d, repeat %d: out\n", seqlen, repeat);
        ++wrong;
      }
      wrong += want[repeat % 2]->compare(c, "early, length " + std::to_string(seqlen));
    }
    for (void* x : std::vector<void*>{q, outs, maps[0].words}) cudaFree(x);
  }
  std::printf("early launches: %d wrong\n", wrong);
  return wrong;
}

// ---- times ----

struct TimedMap {
  const char* name;
  BlockMap map;
  double share;  // of the blocks, visited
};

// even: as many blocks in every row and every column, as bench/features.py has them.
TimedMap timed_map(const char* name, int seqlen, int heads, double share, bool even) {
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
  return {name,
          make_map(1, heads, n, n, 128, 128,
                   [&](int h, int r, int c) { return seen[(size_t{1} * h * n + r) * n + c]; }),
          std::count(seen.begin(), seen.end(), true) / static_cast<double>(seen.size())};
}

void time_all(const DeviceInfo& d, int seqlen, int rounds) {
  constexpr int kBatch = 4, kHeads = 16;
  const Problem p = problem_of({"timed", kBatch, kHeads, kHeads, seqlen, seqlen}, kD, kD);
  Call<bf16> c(p, false);
  std::vector<TimedMap> maps = {
      timed_map("all", seqlen, kHeads, 1., true), timed_map("half, even", seqlen, kHeads, .5, true),
      timed_map("quarter, even", seqlen, kHeads, .25, true), timed_map("quarter, drawn", seqlen, kHeads, .25, false)};
  struct Row {
    std::string name;
    size_t map;
    std::function<void()> call;
    std::vector<float> times = {};
  };
  std::vector<Row> rows = {
      {"fwd plain", 0, [&] { require(sm80::launch_fwd<bf16, kD, kClass>(c.f, d)); }},
      {"bwd plain", 0, [&] { require(sm80::run_bwd_as<bf16, kD, kClass>(c.w, d)); }},
      {"pack before", 0, [&] { maps[0].map.pack_slowly(); }},
      {"pack now", 0, [&] { maps[0].map.pack(); }},
  };
  for (size_t i = 0; i < maps.size(); ++i) {
    const BlockMap& map = maps[i].map;
    Modifiers m;
    map.use(m);
    m.unit_log2 = p.abs_scale_log2;
    map.pack();
    const auto add = [&](const char* name, const std::function<void()>& call) { rows.push_back({name, i, call}); };
    Modifiers early = m;
    early.follows_pass = true;
    add("fwd, map packed", [&c, &d, m] { fwd_mod<bf16>(c.f, m, d); });
    add("fwd before", [&c, &d, &map, m] { map.pack_slowly(), fwd_mod<bf16>(c.f, m, d); });
    add("fwd, pack now, in turn", [&c, &d, &map, m] { map.pack(), fwd_mod<bf16>(c.f, m, d); });
    add("fwd now", [&c, &d, &map, early] { map.pack(), fwd_mod<bf16>(c.f, early, d); });
    add("bwd before", [&c, &d, &map, m] { map.pack_slowly(), bwd_before<bf16>(c.w, m, d); });
    add("bwd, map packed", [&c, &d, m] { bwd_now<bf16>(c.w, m, d); });
    add("bwd now", [&c, &d, &map, early] { map.pack(), bwd_now<bf16>(c.w, early, d); });
  }
  ColdCache cold;
  for (int round = 0; round <= rounds; ++round) {
    for (Row& row : rows) {
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
    const double ms = median(row.times), share = maps[row.map].share;
    const double plain = time_of(row.name[0] == 'f' ? "fwd plain" : "bwd plain", 0);
    std::printf("%-24s %-15s %8.4f ms  %.3f of all  %.3f of plain\n", row.name.c_str(), maps[row.map].name, ms,
                ms / share / time_of(row.name, 0), plain * share / ms);
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
  int wrong = check_pack() + check_early(device);
  time_all(device, seqlen, rounds);
  wrong += check<bf16>(device, "bf16") + check<__half>(device, "fp16");
  return wrong == 0 ? 0 : 1;
}
