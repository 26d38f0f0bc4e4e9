// The Hopper kernel for the gradient of a bias, without torch: against the portable one, and timed beside it.
//
//   bwd_bias_sm90 test
//   bwd_bias_sm90 time [SEQLEN [ROUNDS]]
//
// bf16. -DHEAD_DIM=64 compiles another head_dim than 128. Timing: batch 4, 16 heads.
#include "modifiers_timing.cuh"
#include "sm80/run_bwd_bias.cuh"
#include "sm80/run_fwd_mod.cuh"
#include "sm90/bwd_mod_tiles.h"
#include "sm90/run_bwd_bias.cuh"

#ifndef HEAD_DIM
#define HEAD_DIM 128
#endif

namespace standalone {

constexpr int kD = HEAD_DIM, kPadded = padded_head_dim(kD, kD), kCompiledD = kPadded <= 64 ? 64 : 128;

StridedView view_of(const void* x, int64_t seqlen, int heads) {
  return contiguous_view(const_cast<void*>(x), seqlen, heads, kD);
}

std::string preprocess(const BwdParams& p) {
  const int64_t rows = p.problem.total_q * p.problem.num_heads;
  const int64_t ctas = (rows * kPassLanes<kPadded> + kPassThreads - 1) / kPassThreads;
  return launch("bwd_preprocess", bwd_preprocess_kernel<bf16, kPadded>, ctas, kPassThreads, 0, p.stream, p);
}

// Tensors for `elements` of q, out and dout and of k and v each.
struct Tensors {
  bf16 *q, *k, *v, *out, *dout;
  float *lse, *row_stats;
  Tensors(size_t elements, size_t rows) {
    uint32_t seed = 0;
    for (bf16** x : {&q, &k, &v, &out, &dout}) {
      *x = device_alloc<bf16>(elements);
      fill_normal<bf16>(*x, elements, ++seed, 1.f);
    }
    lse = device_alloc<float>(rows);
    row_stats = device_alloc<float>(2 * rows);
  }

  BwdParams params(const Problem& p) const {
    BwdParams b;
    b.problem = p;
    b.q = view_of(q, p.seqlen_q, p.num_heads);
    b.k = view_of(k, p.seqlen_k, p.num_heads_k);
    b.v = view_of(v, p.seqlen_k, p.num_heads_k);
    b.out = view_of(out, p.seqlen_q, p.num_heads);
    b.dout = view_of(dout, p.seqlen_q, p.num_heads);
    b.lse = lse;
    b.row_stats = row_stats;
    return b;
  }
};

BiasGradient gradient_of(bf16* out, int batch, int heads, int rows, int cols) {
  BiasGradient g;
  g.out = out;
  g.batch = batch;
  g.heads = heads;
  g.rows = rows;
  g.cols = cols;
  return g;
}

int run_tests(const DeviceInfo& device) {
  constexpr size_t kResult = size_t{1} << 24;
  const Tensors t(size_t{1} << 20, size_t{1} << 14);
  bf16 *got = device_alloc<bf16>(kResult), *want = device_alloc<bf16>(kResult);
  Errors* errors = device_alloc<Errors>(1);
  int count = 0, failed = 0;
  double worst = 0.;
  for (Case c : cases()) {
    if (c.is_packed() || c.seqlen_q == 1) continue;
    c.seqlen_k = (c.seqlen_k + 7) / 8 * 8;
    for (int shape = 0; shape < 4; ++shape) {
      for (const bool chunks : {false, true}) {
        const int batch = shape % 2 == 0 ? c.batch : 1, heads = shape < 2 ? c.heads : 1;
        const Problem p = problem_of(c, kD, kD);
        Modifiers m;
        set_bias<bf16>(m, batch, heads, c.seqlen_q, c.seqlen_k, c.seqlen_k, as_is);
        m.unit_log2 = kLog2e;
        if (chunks) set_chunk(m, 200), m.sink_tokens = 3;
        FwdParams f;
        const BwdParams b = t.params(p);
        f.problem = p;
        f.q = b.q, f.k = b.k, f.v = b.v, f.out = b.out;
        f.lse = t.lse;
        require(sm80::launch_fwd_mod<bf16, kPadded, SmemClass::kLarge>(f, m, device));
        require(preprocess(b));
        const size_t elements = size_t{1} * batch * heads * c.seqlen_q * c.seqlen_k;
        for (bf16* x : {got, want}) CHECK_CUDA(cudaMemset(x, 0xff, elements * sizeof(bf16)));
        const BiasGradient g = gradient_of(got, batch, heads, c.seqlen_q, c.seqlen_k);
        if (!sm90::is_bias_gradient_taken(p, m, g)) continue;
        require(sm90::launch_bwd_bias<bf16, kCompiledD>(b, m, g, device));
        require(sm80::launch_bwd_bias_as<SmemClass::kLarge>(
            b, m, gradient_of(want, batch, heads, c.seqlen_q, c.seqlen_k), device));
        CHECK_CUDA(cudaMemset(errors, 0, sizeof(Errors)));
        compare_kernel<<<kBlocks, kThreads>>>(got, want, elements, errors);
        CHECK_CUDA(cudaDeviceSynchronize());
        const Errors e = download(errors, 1)[0];
        const double relative = std::sqrt(e.squares) / std::max(1e-2, std::sqrt(e.want_squares));
        worst = std::max(worst, relative);
        ++count;
        if (relative < 1e-2) continue;
        ++failed;
        std::printf("FAIL %s, shape %d, chunks %d: %.2e, largest %.1e\n", c.name.c_str(), shape, chunks, relative,
                    e.largest);
      }
    }
  }
  std::printf("%d tests, %d failed, largest relative difference %.2e\n", count, failed, worst);
  return failed != 0;
}

void run_times(const DeviceInfo& device, int seqlen, int rounds) {
  const Tensors t(size_t{kBatch} * seqlen * kHeads * kD, size_t{kBatch} * kHeads * seqlen);
  upload(t.lse, std::vector<float>(size_t{kBatch} * kHeads * seqlen, std::log(seqlen * 0.7f) + 0.5f));
  const BigBiases biases(seqlen, 9);
  bf16* out = device_alloc<bf16>(size_t{kBatch} * kHeads * seqlen * seqlen);
  struct Row {
    const char* name;
    bool has_batch;
    int window_right;
  };
  for (const Row& row : {Row{"1hqk", false, -1}, Row{"bhqk", true, -1}, Row{"1hqk causal", false, 0}}) {
    const BwdParams p = t.params(timed_problem(seqlen, kD, kD, row.window_right));
    Modifiers m;
    biases.set(m, false, row.has_batch);
    m.unit_log2 = kLog2e;
    const BiasGradient g = gradient_of(out, row.has_batch ? kBatch : 1, kHeads, seqlen, seqlen);
    require(preprocess(p));
    const std::function<void()> calls[2] = {
        [=] { require(sm90::launch_bwd_bias<bf16, kCompiledD>(p, m, g, device)); },
        [=] { require(sm80::launch_bwd_bias_as<SmemClass::kLarge>(p, m, g, device)); }};
    ColdCache cold;
    std::vector<float> times[2];
    for (int round = 0; round < rounds + 1; ++round) {
      for (int i = 0; i < 2; ++i) times[i].push_back(time_calls(calls[i], 1, &cold)[0]);
    }
    std::printf("%-12s sm90 %.3f ms, sm80 %.3f ms\n", row.name, median(times[0]), median(times[1]));
    std::fflush(stdout);
  }
}

}  // namespace standalone

int main(int argc, char** argv) {
  using namespace standalone;
  const DeviceInfo device = this_device();
  if (argument(argc, argv, 1, "test") == "test") return run_tests(device);
  run_times(device, std::atoi(argument(argc, argv, 2, "4096").c_str()),
            std::atoi(argument(argc, argv, 3, "5").c_str()));
  return 0;
}
