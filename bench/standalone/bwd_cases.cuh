// The cases that bwd_sm90 tests: lengths around the tiles, windows, scales, grouped heads, packed sequences.
#pragma once

#include <cmath>

#include "bwd_reference.cuh"

namespace standalone {

struct Case {
  int batch, heads, heads_k, seqlen_q, seqlen_k, head_dim, window_left, window_right;
  float scale;
  float amplitude = 1.f;  // of q
  bool has_dlse = false;
  std::vector<int> lengths_q = {}, lengths_k = {};  // packed sequences
  int head_dim_v = 0;  // that of q and k where 0

  int dv() const { return head_dim_v == 0 ? head_dim : head_dim_v; }
};

std::vector<Sequence> sequences_of(const Case& c) {
  std::vector<Sequence> sequences;
  int64_t scores = 0;
  const auto add = [&](int batch, int start_q, int start_k, int seqlen_q, int seqlen_k) {
    sequences.push_back({batch, start_q, start_k, seqlen_q, seqlen_k, scores});
    scores += int64_t{1} * c.heads * seqlen_q * seqlen_k;
  };
  if (c.lengths_q.empty()) {
    for (int b = 0; b < c.batch; ++b) add(b, 0, 0, c.seqlen_q, c.seqlen_k);
    return sequences;
  }
  const std::vector<int> starts_q = running_sums(c.lengths_q), starts_k = running_sums(c.lengths_k);
  for (size_t i = 0; i < c.lengths_q.size(); ++i) add(0, starts_q[i], starts_k[i], c.lengths_q[i], c.lengths_k[i]);
  return sequences;
}

std::vector<Case> dense_cases(int d) {
  const float s = 1.f / std::sqrt(static_cast<float>(d));
  const int odd = d == 64 ? 8 : d == 96 ? 72 : d == 128 ? 104 : d == 192 ? 136 : 200;
  return {{1, 1, 1, 64, 128, d, -1, -1, s},       {1, 1, 1, 128, 128, d, -1, -1, s},
          {1, 2, 2, 256, 512, d, -1, -1, s},      {1, 1, 1, 1, 1, d, -1, -1, s},
          {1, 2, 2, 512, 512, d, -1, 0, s},       {1, 2, 1, 100, 77, d, -1, -1, s},
          {2, 2, 1, 77, 300, d, -1, 0, s, 1.f, true},
          {1, 2, 2, 700, 130, d, -1, 0, s},       {2, 8, 2, 600, 600, d, -1, 0, s},
          {2, 8, 2, 333, 777, d, -1, -1, s, 1.f, true},
          {2, 16, 16, 1024, 1024, d, -1, 0, s},   {4, 16, 16, 512, 512, d, -1, -1, s},
          {1, 4, 4, 1500, 1500, d, 200, 0, s},    {1, 4, 4, 1500, 1500, d, 100, 50, s},
          {1, 2, 2, 513, 2000, d, 64, 64, s},     {1, 2, 2, 2000, 513, d, 64, 64, s},
          {1, 4, 4, 900, 900, d, 0, 0, s},        {1, 4, 4, 1024, 1024, d, -1, 0, s, 8.f},
          {1, 4, 4, 1024, 1024, d, -1, -1, -s},   {1, 2, 2, 600, 600, d, -1, 0, 0.f},
          // Several rounds of heads for 132 multiprocessors.
          {15, 16, 16, 520, 520, d, -1, -1, s},   {30, 16, 8, 300, 400, d, -1, 0, s, 1.f, true},
          {20, 16, 16, 400, 380, d, 64, 0, s},    {40, 24, 24, 140, 260, d, -1, -1, s},
          {1, 4, 4, 800, 800, d, 100, -1, s},     {1, 4, 2, 500, 500, d - 8, -1, 0, s},
          {1, 4, 2, 500, 500, odd, -1, -1, s, 1.f, true}};
}

// v narrower than q and k by as much as the compiled sizes are.
std::vector<Case> cases_of(int d, int dv) {
  std::vector<Case> cases = dense_cases(d);
  for (int right : {-1, 0}) {
    for (int left : {-1, 90}) {
      Case c{1, 4, 2, 0, 0, d, left, right, 1.f / std::sqrt(static_cast<float>(d)), 1.f, true};
      c.lengths_q = {100, 1, 0, 333, 64, 700, 5};
      c.lengths_k = {130, 1, 10, 300, 0, 700, 257};
      cases.push_back(c);
    }
  }
  // More items than CTAs, those without tiles among the others.
  for (int right : {-1, 0}) {
    Case c{1, 32, 32, 0, 0, d, -1, right, 1.f / std::sqrt(static_cast<float>(d)), 1.f, true};
    c.lengths_q = {200, 0, 150, 300, 0, 400, 90, 0, 64};
    c.lengths_k = {300, 400, 0, 100, 333, 20, 128, 200, 0};
    cases.push_back(c);
  }
  for (Case& c : cases) c.head_dim_v = c.head_dim - (d - dv);
  return cases;
}

}  // namespace standalone
