// The cases that fwd_sm90 tests: lengths around the tiles, windows, scales, moving maxima, packed sequences.
#pragma once

#include <cmath>

#include "harness.cuh"

namespace standalone {

// What the scores look like. The last two move the maximum of a row from tile to tile.
enum class Data { kNormal, kGrowing, kAlternating };

struct Case {
  int batch, heads, heads_k, seqlen_q, seqlen_k, head_dim, window_left, window_right;
  float scale;
  Data data = Data::kNormal;
  float amplitude = 1.f;
  int head_dim_v = 0;
  std::vector<int> lengths_q = {}, lengths_k = {};  // packed sequences; seqlen_q and seqlen_k are their sums
};

// Scores of key row j are about j * amplitude (growing), or of a sign that changes every 128 rows (alternating).
template <typename E>
__global__ void fill_keys_kernel(E* k, size_t count, Data data, float amplitude, int64_t row_stride, int cols,
                                 int rows) {
  for (size_t i = first_index(); i < count; i += index_step()) {
    const int row = static_cast<int>(i / row_stride % rows);
    const float sign = row / 128 % 2 == 0 ? -1.f : 1.f;
    const float first = data == Data::kGrowing ? row * amplitude : sign * amplitude * (row / 128);
    k[i] = from_float<E>(i % cols == 0 ? first : 0.01f * normal(i, 2));
  }
}

template <typename E>
__global__ void fill_queries_kernel(E* q, size_t count, int cols) {
  for (size_t i = first_index(); i < count; i += index_step()) {
    q[i] = from_float<E>(i % cols == 0 ? 1.f : 0.01f * normal(i, 1));
  }
}

void print_case(const Case& c) {
  std::printf("%sb%d h%d/%d sq%d sk%d d%d/%d window (%d, %d) scale %.3g data %d x %.3g: ",
              c.lengths_q.empty() ? "" : "packed ", c.batch, c.heads, c.heads_k, c.seqlen_q, c.seqlen_k, c.head_dim,
              c.head_dim_v, c.window_left, c.window_right, c.scale, static_cast<int>(c.data), c.amplitude);
}

Case packed_case(const std::vector<int>& lengths_q, const std::vector<int>& lengths_k, int heads, int heads_k, int d,
                 int left, int right) {
  Case c{1, heads, heads_k, running_sums(lengths_q).back(), running_sums(lengths_k).back(), d, left, right,
         1.f / std::sqrt(static_cast<float>(d))};
  c.lengths_q = lengths_q;
  c.lengths_k = lengths_k;
  return c;
}

std::vector<Case> dense_cases(int d) {
  const float s = 1.f / std::sqrt(static_cast<float>(d));
  return {{1, 1, 1, 128, 128, d, -1, -1, s},      {1, 1, 1, 64, 64, d, -1, -1, s},
          {1, 2, 2, 256, 512, d, -1, -1, s},      {2, 3, 3, 512, 512, d, -1, 0, s},
          {1, 1, 1, 1, 1, d, -1, -1, s},          {1, 2, 1, 100, 77, d, -1, -1, s},
          {2, 2, 1, 77, 300, d, -1, 0, s},        {1, 2, 2, 700, 130, d, -1, 0, s},
          {2, 8, 2, 1000, 1000, d, -1, 0, s},     {4, 16, 4, 333, 777, d, -1, -1, s},
          {2, 16, 16, 2048, 2048, d, -1, 0, s},   {1, 4, 4, 1500, 1500, d, 200, 0, s},
          {1, 4, 4, 1500, 1500, d, 100, 50, s},   {1, 2, 2, 513, 2000, d, 64, 64, s},
          {1, 2, 2, 2000, 513, d, 64, 64, s},     {1, 4, 4, 900, 900, d, 0, 0, s},
          {1, 4, 4, 1024, 1024, d, -1, -1, -s},   {1, 2, 2, 600, 600, d, -1, 0, 0.f},
          {1, 4, 4, 1024, 1024, d, -1, 0, s, Data::kNormal, 20.f},
          {1, 4, 4, 1024, 1024, d, -1, -1, s, Data::kNormal, 200.f},
          {1, 2, 2, 1024, 2048, d, -1, -1, 1.f, Data::kGrowing, 0.02f},
          {1, 2, 2, 1024, 2048, d, -1, -1, 1.f, Data::kGrowing, 1.f},
          {1, 2, 2, 1024, 2048, d, -1, -1, 1.f, Data::kGrowing, -1.f},
          {1, 2, 2, 2048, 2048, d, -1, 0, 1.f, Data::kGrowing, -0.5f},
          {1, 2, 2, 1024, 2048, d, 300, 300, 1.f, Data::kGrowing, -20.f},
          {1, 2, 2, 1024, 2048, d, -1, -1, 1.f, Data::kAlternating, 60.f}};
}

std::vector<Case> packed_cases(int d) {
  std::vector<int> many;
  for (int i = 0; i < 60; ++i) many.push_back(1 + i * 37 % 211);
  return {packed_case({100, 200, 300}, {100, 200, 300}, 2, 2, d, -1, -1),
          packed_case({1, 500, 0, 64, 77, 1000}, {1, 500, 10, 64, 77, 1000}, 4, 2, d, -1, 0),
          packed_case({130, 5, 700}, {700, 0, 130}, 4, 4, d, -1, 0),
          packed_case({130, 5, 700, 3}, {333, 40, 130, 900}, 4, 1, d, 100, 30),
          packed_case(many, many, 8, 8, d, -1, 0),
          packed_case({2048, 2048}, {2048, 2048}, 8, 8, d, -1, 0)};
}

std::vector<Case> cases_of(int d, int dv) {
  std::vector<Case> cases = dense_cases(d);
  for (const Case& c : packed_cases(d)) cases.push_back(c);
  for (Case& c : cases) c.head_dim_v = dv;
  // Sizes between the compiled ones, which multiples of 8 reach by TMA's zeros.
  for (int i : {3, 7, 11, 15}) {
    if (d < 128) break;
    cases.push_back(cases[i]);
    cases.back().head_dim = d - 24;
    cases.back().head_dim_v = dv - 16;
    cases.back().scale = 1.f / std::sqrt(static_cast<float>(d - 24));
  }
  return cases;
}

}  // namespace standalone
