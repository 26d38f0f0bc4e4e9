// What modifiers_sm90 and bwd_mod_sm90 time, and how: batch 4, 16 heads, all rows in turn, L2 cold.
#pragma once

#include <cmath>
#include <functional>

#include "modifiers_cases.cuh"

namespace standalone {

constexpr int kBatch = 4, kHeads = 16;

inline Problem timed_problem(int seqlen, int head_dim, int head_dim_v, int window_right) {
  Problem p;
  p.batch = kBatch;
  p.num_heads = p.num_heads_k = kHeads;
  p.head_dim = head_dim;
  p.head_dim_v = head_dim_v;
  p.seqlen_q = p.seqlen_k = seqlen;
  p.total_q = p.total_k = int64_t{kBatch} * seqlen;
  p.softmax_scale = 1.f / std::sqrt(static_cast<float>(head_dim));
  p.window_right = window_right;
  p.prepare();
  return p;
}

using SetModifiers = std::function<void(Modifiers&)>;

// Biases of the scores' size, of all (batch, head) or of all heads.
class BigBiases {
 public:
  BigBiases(int seqlen, uint32_t seed) : seqlen_(seqlen) {
    wide_ = device_alloc<__nv_bfloat16>(scores() * kBatch * kHeads);
    fp32_ = device_alloc<float>(scores() * kHeads);
    fill_normal<__nv_bfloat16>(wide_, scores() * kBatch * kHeads, seed);
    fill_normal<float>(fp32_, scores() * kHeads, seed + 1);
  }

  void set(Modifiers& m, bool is_float, bool has_batch) const {
    m.is_natural = true;
    m.bias.ptr = is_float ? static_cast<const void*>(fp32_) : wide_;
    m.bias.is_float = is_float;
    m.bias.batch_stride = has_batch ? static_cast<int64_t>(scores()) * kHeads : 0;
    m.bias.head_stride = static_cast<int64_t>(scores());
    m.bias.row_stride = seqlen_;
    m.bias.col_stride = 1;
    m.bias.rows = m.bias.cols = seqlen_;
    m.bias.staged = !is_float;
    m.batch_fastest = !has_batch;
    m.batches = Divisor(kBatch);
  }

 private:
  size_t scores() const { return size_t{1} * seqlen_ * seqlen_; }

  int seqlen_;
  __nv_bfloat16* wide_;
  float* fp32_;
};

struct TimedCase {
  const char* name;
  double share;  // of the scores, in visited tiles
  SetModifiers set;  // none: the plain kernel
  int window_right = -1;
  bool portable = false;
  int window_left = -1;
};

inline std::vector<TimedCase> timed_cases(int seqlen, const BigBiases& biases) {
  const auto document_of = [=](int, int i) { return i / (seqlen / 4); };
  const auto blocks = [=](int side) -> SetModifiers {  // a quarter of them, `side` units of 16 wide
    return [=](Modifiers& m) {
      set_blocks(m, 1, seqlen, seqlen, [=](int, int r, int q) { return (r / side * 5 + q / side) % 4 == 0; });
    };
  };
  const auto softcap = [](float cap) -> SetModifiers { return [=](Modifiers& m) { set_softcap(m, cap); }; };
  const auto bias = [&](bool is_float, bool has_batch) -> SetModifiers {
    return [=, &biases](Modifiers& m) { biases.set(m, is_float, has_batch); };
  };
  const auto none = [](Modifiers&) {};
  const auto dropout = [](Modifiers& m) { set_dropout(m, 6554); };
  const auto slopes = [](Modifiers& m) { set_slopes(m, kHeads); };
  return {{"plain", 1., nullptr},
          {"none", 1., none},
          {"key padding 3/4", .75,
           [=](Modifiers& m) {
             set_mask(m, kBatch, 1, 1, seqlen, [=](int, int, int, int col) { return col < seqlen * 3 / 4 - 8; });
           }},
          {"mask random", 1.,
           [=](Modifiers& m) {
             set_mask(m, 1, 1, seqlen, seqlen, [](int, int, int, int) { return below(2) == 0; });
           }},
          {"blocks of 64, 1/4", .25, blocks(4)},
          {"blocks of 128, 1/4", .25, blocks(8)},
          {"4 documents", .25,
           [=](Modifiers& m) {
             m.document_q = make_labels(kBatch, seqlen, document_of);
             m.document_k = make_labels(kBatch, seqlen, document_of);
           }},
          {"alibi", 1., slopes},
          {"softcap 30", 1., softcap(30.f)},
          {"softcap 3", 1., softcap(3.f)},
          {"dropout", 1., dropout},
          {"sinks", 1., [](Modifiers& m) { set_sinks(m, kHeads); }},
          {"bias bhqk", 1., bias(false, true)},
          {"bias 1hqk", 1., bias(false, false)},
          {"bias 1hqk fp32", 1., bias(true, false)},
          {"plain causal", .5, nullptr, 0},
          {"alibi causal", .5, slopes, 0},
          {"portable none", 1., none, -1, true},
          {"portable dropout", 1., dropout, -1, true},
          {"portable bias bhqk", 1., bias(false, true), -1, true},
          {"portable bias fp32", 1., bias(true, false), -1, true}};
}

// call_of(case) is what runs; the first case is the plain kernel. `gflop` is what all scores cost.
template <typename CallOf>
void print_times(const std::vector<TimedCase>& cases, const CallOf& call_of, int rounds, double gflop) {
  std::vector<std::function<void()>> calls;
  for (const TimedCase& c : cases) calls.push_back(call_of(c));
  ColdCache cold;
  std::vector<std::vector<float>> times(cases.size());
  for (const auto& call : calls) time_calls(call, 1, nullptr);
  for (int round = 0; round < rounds; ++round) {
    for (size_t i = 0; i < calls.size(); ++i) times[i].push_back(time_calls(calls[i], 1, &cold)[0]);
  }
  const double plain = gflop / median(times[0]);
  for (size_t i = 0; i < cases.size(); ++i) {
    const double ms = median(times[i]), tflops = gflop * cases[i].share / ms;
    std::printf("%-20s %8.3f ms %6.0f TFLOP/s of visited scores  %.3f of plain\n", cases[i].name, ms, tflops,
                tflops / plain);
  }
}

}  // namespace standalone
