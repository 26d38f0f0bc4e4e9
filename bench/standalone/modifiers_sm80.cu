// The sm80 kernels with modifiers against the plain ones, without torch: time, and how far from plain.
//
//   modifiers_sm80 [SEQLEN [ROUNDS]]
//
// Batch 4, 16 heads, bf16. SEQLEN is a multiple of 512, 4096 by default. -DHEAD_DIM=64 compiles another head_dim than
// 128, -DSMALL the tiles of GPUs with 99 KB of shared memory, -DFORWARD_ONLY no backward. Results are not checked: the
// mean magnitude printed beside each time only shows that two builds compute the same.
#include <cmath>

#include "harness.cuh"
#include "sm80/run_fwd.cuh"
#include "sm80/run_fwd_mod.cuh"
#ifndef FORWARD_ONLY
#include "sm80/run_bwd.cuh"
#include "sm80/run_bwd_mod.cuh"
#endif

#ifndef HEAD_DIM
#define HEAD_DIM 128
#endif

namespace standalone {

using namespace flash_ext;
using bf16 = __nv_bfloat16;

#ifdef SMALL
constexpr SmemClass kClass = SmemClass::kSmall;
#else
constexpr SmemClass kClass = SmemClass::kLarge;
#endif
constexpr int kBatch = 4;
constexpr int kHeads = 16;
constexpr int kHeadDim = HEAD_DIM;

__global__ void fill_bits_kernel(uint32_t* words, size_t count, uint32_t seed) {
  for (size_t i = first_index(); i < count; i += index_step()) words[i] = hash32(static_cast<uint32_t>(i) + seed);
}

__global__ void sum_magnitudes_kernel(const bf16* x, size_t count, double* sum) {
  double own = 0.;
  for (size_t i = first_index(); i < count; i += index_step()) own += fabsf(__bfloat162float(x[i]));
  atomicAdd(sum, own);
}

struct Buffers {
  explicit Buffers(size_t seqlen)
      : elements(kBatch * seqlen * kHeads * kHeadDim),
        rows(kBatch * kHeads * seqlen),
        scores(kHeads * seqlen * seqlen) {
    uint32_t seed = 0;
    for (bf16* x : {q, k, v, dout}) fill_normal<bf16>(x, elements, ++seed);
    fill_normal<bf16>(bias, scores, ++seed);
    fill_normal<float>(bias_fp32, scores, seed);
    fill_bits_kernel<<<kBlocks, kThreads>>>(mask, mask_words, ++seed);
    CHECK_CUDA(cudaGetLastError());
    // Every tile has both kinds of bits, which is what random bits give.
    CHECK_CUDA(cudaMemset(mask_any, 0xff, mask_words / 64 * sizeof(uint32_t)));
    CHECK_CUDA(cudaMemset(mask_all, 0, mask_words / 64 * sizeof(uint32_t)));
    upload(slopes, std::vector<float>(kHeads, 0.01f));
    upload(rng, std::vector<int64_t>{1234, 5});
  }

  size_t elements, rows, scores;
  size_t mask_words = scores / kHeads * kBatch / 32;
  bf16* q = device_alloc<bf16>(elements);
  bf16* k = device_alloc<bf16>(elements);
  bf16* v = device_alloc<bf16>(elements);
  bf16* out = device_alloc<bf16>(elements);
  bf16* dout = device_alloc<bf16>(elements);
  bf16* dq = device_alloc<bf16>(elements);
  bf16* dk = device_alloc<bf16>(elements);
  bf16* dv = device_alloc<bf16>(elements);
  float* lse = device_alloc<float>(rows);
  float* row_stats = device_alloc<float>(2 * rows + 1 + kBatch * kHeads);  // and bwd_schedule_words()
  float* dq_accum = device_alloc<float>(elements);
  bf16* bias = device_alloc<bf16>(scores);
  float* bias_fp32 = device_alloc<float>(scores);
  bf16* bias_gradient = device_alloc<bf16>(scores);
  uint32_t* mask = device_alloc<uint32_t>(mask_words);
  uint32_t* mask_any = device_alloc<uint32_t>(mask_words / 64);
  uint32_t* mask_all = device_alloc<uint32_t>(mask_words / 64);
  float* slopes = device_alloc<float>(kHeads);
  int64_t* rng = device_alloc<int64_t>(2);
};

struct Named {
  std::string name;
  Modifiers modifiers;
};

Modifiers with_mask(const Buffers& b, int seqlen) {
  Modifiers m;
  m.mask.words = b.mask;
  m.mask.batch_stride = int64_t{1} * seqlen * seqlen / 32;
  m.mask.row_stride = seqlen / 32;
  m.mask.word_stride = 1;
  m.mask.rows = seqlen;
  m.mask.num_words = seqlen / 32;
  m.mask_any = b.mask_any;
  m.mask_all = b.mask_all;
  m.mask_group_batch_stride = m.mask.batch_stride / Modifiers::kMaskGroup;
  m.mask_group_stride = seqlen / 32;
  return m;
}

Modifiers with_bias(const void* bias, bool is_float, int seqlen) {
  Modifiers m;
  m.is_natural = true;
  m.bias.ptr = bias;
  m.bias.is_float = is_float;
  m.bias.head_stride = int64_t{1} * seqlen * seqlen;
  m.bias.row_stride = seqlen;
  m.bias.col_stride = 1;
  m.bias.rows = m.bias.cols = seqlen;
  m.bias.staged = !is_float;  // as the operator has it
  m.batch_fastest = true;
  m.batches = Divisor(kBatch);
  return m;
}

Modifiers with_slopes(const float* slopes) {
  Modifiers m;
  m.is_natural = true;
  m.slopes = slopes;
  return m;
}

Modifiers with_softcap(float cap) {
  Modifiers m;
  m.is_natural = true;
  m.softcap = cap;
  m.inv_softcap = 1.f / cap;
  return m;
}

Modifiers with_dropout(const int64_t* rng) {
  Modifiers m;
  m.rng = rng;
  m.drop_below = 6554;  // of 65536: one in ten
  m.keep_scale = 65536.f / (65536 - 6554);
  return m;
}

Modifiers with_chunks(int size) {
  Modifiers m;
  m.chunk = size;
  m.chunk_divisor = Divisor(size);
  return m;
}

std::vector<Named> all_modifiers(const Buffers& b, const Problem& p) {
  const int seqlen = p.seqlen_q;
  std::vector<Named> all = {{"none", {}},
                            {"mask", with_mask(b, seqlen)},
                            {"bias", with_bias(b.bias, false, seqlen)},
                            {"bias fp32", with_bias(b.bias_fp32, true, seqlen)},
                            {"alibi", with_slopes(b.slopes)},
                            {"softcap", with_softcap(30.f)},
                            {"dropout", with_dropout(b.rng)},
                            {"chunks of 1/8", with_chunks(seqlen / 8)}};
  for (Named& x : all) x.modifiers.unit_log2 = x.modifiers.is_natural ? kLog2e : p.abs_scale_log2;
  return all;
}

Problem problem_of(int seqlen) {
  Problem p;
  p.batch = kBatch;
  p.num_heads = p.num_heads_k = kHeads;
  p.head_dim = p.head_dim_v = kHeadDim;
  p.seqlen_q = p.seqlen_k = seqlen;
  p.total_q = p.total_k = int64_t{kBatch} * seqlen;
  p.softmax_scale = 1.f / std::sqrt(static_cast<float>(kHeadDim));
  p.prepare();
  return p;
}

struct Row {
  std::string name;
  std::function<void()> call;
  const bf16* result;
  size_t count;
  std::vector<float> times = {};
};

double mean_magnitude(const Row& row) {
  static double* sum = device_alloc<double>(1);
  CHECK_CUDA(cudaMemset(sum, 0, sizeof(double)));
  sum_magnitudes_kernel<<<kBlocks, kThreads>>>(row.result, row.count, sum);
  return download(sum, 1)[0] / static_cast<double>(row.count);
}

// The first row is what the others are compared with. Rows take turns, so that clocks fall on all alike.
void time_rows(std::vector<Row>& rows, double gflop, int rounds, ColdCache& cold) {
  for (Row& row : rows) time_calls(row.call, 1, nullptr);
  for (int round = 0; round < rounds; ++round) {
    for (Row& row : rows) row.times.push_back(time_calls(row.call, 1, &cold)[0]);
  }
  for (const Row& row : rows) {
    const double ms = median(row.times);
    row.call();
    std::printf("%-18s %8.3f ms %6.0f TFLOP/s  %.3f of plain  mean %.6f\n", row.name.c_str(), ms, gflop / ms,
                median(rows[0].times) / ms, mean_magnitude(row));
  }
}

FwdParams fwd_params(const Buffers& b, const Problem& p) {
  const auto view = [&](void* x) { return contiguous_view(x, p.seqlen_q, kHeads, kHeadDim); };
  FwdParams f;
  f.problem = p;
  f.q = view(b.q);
  f.k = view(b.k);
  f.v = view(b.v);
  f.out = view(b.out);
  f.lse = b.lse;
  return f;
}

void time_forward(const Buffers& b, const Problem& p, const DeviceInfo& d, int rounds, ColdCache& cold) {
  const FwdParams f = fwd_params(b, p);
  std::vector<Row> rows;
  rows.push_back({"fwd plain", [=] { require(sm80::launch_fwd<bf16, kHeadDim, kClass>(f, d)); }, b.out, b.elements});
  for (const auto& [name, m] : all_modifiers(b, p)) {
    const auto call = [f, d, m = m] { require(sm80::launch_fwd_mod<bf16, kHeadDim, kClass>(f, m, d)); };
    rows.push_back({"fwd " + name, call, b.out, b.elements});
  }
  time_rows(rows, 4e-9 * kHeadDim * static_cast<double>(b.scores) * kBatch, rounds, cold);
}

#ifndef FORWARD_ONLY
BwdParams bwd_params(const Buffers& b, const Problem& p) {
  const auto view = [&](void* x) { return contiguous_view(x, p.seqlen_q, kHeads, kHeadDim); };
  const FwdParams f = fwd_params(b, p);
  BwdParams w;
  w.problem = p;
  w.q = f.q;
  w.k = f.k;
  w.v = f.v;
  w.out = f.out;
  w.dout = view(b.dout);
  w.dq = view(b.dq);
  w.dk = view(b.dk);
  w.dv = view(b.dv);
  w.lse = b.lse;
  w.row_stats = b.row_stats;
  w.dq_accum = b.dq_accum;
  return w;
}

Row backward_row(const std::string& name, const BwdParams& w, const Modifiers& m, const BiasGradient* gradient,
                 bool need_qkv, const DeviceInfo& d, const bf16* result, size_t count) {
  const auto call = [=] {
    BwdExtras extras;
    extras.modifiers = &m;
    extras.bias = gradient;
    extras.need_qkv = need_qkv;
    require(sm80::run_bwd_mod_as<bf16, kHeadDim, kClass>(w, extras, d));
  };
  return {name, call, result, count};
}

// All start from the output of the plain forward: times do not depend on it.
void time_backward(const Buffers& b, const Problem& p, const DeviceInfo& d, int rounds, ColdCache& cold) {
  require(sm80::launch_fwd<bf16, kHeadDim, kClass>(fwd_params(b, p), d));
  const BwdParams w = bwd_params(b, p);
  std::vector<Row> rows;
  rows.push_back({"bwd plain", [=] { require(sm80::run_bwd_as<bf16, kHeadDim, kClass>(w, d)); }, b.dq, b.elements});
  for (const auto& [name, m] : all_modifiers(b, p)) {
    rows.push_back(backward_row("bwd " + name, w, m, nullptr, true, d, b.dq, b.elements));
  }
  BiasGradient gradient;
  gradient.out = b.bias_gradient;
  gradient.heads = kHeads;
  gradient.rows = gradient.cols = p.seqlen_q;
  const Modifiers bias = all_modifiers(b, p)[2].modifiers;
  rows.push_back(backward_row("bwd bias + grad", w, bias, &gradient, true, d, b.bias_gradient, b.scores));
  rows.push_back(backward_row("bwd bias grad only", w, bias, &gradient, false, d, b.bias_gradient, b.scores));
  time_rows(rows, 10e-9 * kHeadDim * static_cast<double>(b.scores) * kBatch, rounds, cold);
}
#endif

}  // namespace standalone

int main(int argc, char** argv) {
  using namespace standalone;
  const DeviceInfo device = this_device();
  const int seqlen = std::atoi(argument(argc, argv, 1, "4096").c_str());
  const int rounds = std::atoi(argument(argc, argv, 2, "7").c_str());
  if (seqlen <= 0 || seqlen % 512 != 0 || rounds <= 0) {
    std::printf("SEQLEN must be a multiple of 512, ROUNDS at least 1\n");
    return 2;
  }
  const Buffers buffers(seqlen);
  ColdCache cold;
  time_forward(buffers, problem_of(seqlen), device, rounds, cold);
#ifndef FORWARD_ONLY
  time_backward(buffers, problem_of(seqlen), device, rounds, cold);
#endif
}
