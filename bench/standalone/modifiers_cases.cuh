// The sets of modifiers and the shapes that modifiers_sm90 tests.
#pragma once

#include <cmath>

#include "harness.cuh"
#include "modifiers.h"

namespace standalone {

using namespace flash_ext;
using bf16 = __nv_bfloat16;
#if FP16
using Element = __half;
#else
using Element = bf16;
#endif

struct Case {
  std::string name;
  int batch = 2, heads = 3, heads_k = 3, seqlen_q = 300, seqlen_k = 300;
  int window_left = -1, window_right = -1;
  std::vector<int> lengths_q = {}, lengths_k = {};  // packed
  float amplitude = 1.f;

  bool is_packed() const { return !lengths_q.empty(); }
  int sequences() const { return is_packed() ? static_cast<int>(lengths_q.size()) : batch; }
  static int sum(const std::vector<int>& x) {
    int all = 0;
    for (int i : x) all += i;
    return all;
  }
  int64_t total_q() const { return is_packed() ? sum(lengths_q) : int64_t{1} * batch * seqlen_q; }
  int64_t total_k() const { return is_packed() ? sum(lengths_k) : int64_t{1} * batch * seqlen_k; }
  // What masks and biases of any sequence span.
  int rows() const { return is_packed() ? *std::max_element(lengths_q.begin(), lengths_q.end()) : seqlen_q; }
  int cols() const { return is_packed() ? *std::max_element(lengths_k.begin(), lengths_k.end()) : seqlen_k; }
};

uint32_t next_random() {
  static uint32_t state = 12345;
  state = state * 1664525u + 1013904223u;
  return state >> 8;
}
int below(int n) { return static_cast<int>(next_random() % static_cast<uint32_t>(n)); }

template <typename T>
T* on_device(const std::vector<T>& x) {
  T* to = device_alloc<T>(std::max<size_t>(x.size(), 1));
  upload(to, x);
  return to;
}

Problem problem_of(const Case& c, int head_dim, int head_dim_v) {
  Problem p;
  p.batch = c.sequences();
  p.num_heads = c.heads;
  p.num_heads_k = c.heads_k;
  p.head_dim = head_dim;
  p.head_dim_v = head_dim_v;
  p.seqlen_q = c.is_packed() ? 0 : c.seqlen_q;
  p.seqlen_k = c.is_packed() ? 0 : c.seqlen_k;
  p.total_q = c.total_q();
  p.total_k = c.total_k();
  p.softmax_scale = 1.f / std::sqrt(static_cast<float>(head_dim));
  p.window_left = c.window_left;
  p.window_right = c.window_right;
  if (c.is_packed()) {
    p.cu_seqlens_q = on_device(running_sums(c.lengths_q));
    p.cu_seqlens_k = on_device(running_sums(c.lengths_k));
  }
  p.prepare();
  return p;
}

template <typename E>
__global__ void compare_kernel(const E* a, const E* b, size_t count, Errors* errors) {
  for (size_t i = first_index(); i < count; i += index_step()) {
    tally(errors, static_cast<float>(a[i]), static_cast<float>(b[i]));
  }
}

// seen(b, h, row, col) as packed bits, with the summaries of 64 rows. batch and heads may be 1, rows as well.
template <typename Seen>
void set_mask(Modifiers& m, int batch, int heads, int rows, int cols, const Seen& seen) {
  const int words = (cols + 31) / 32, groups = (rows + 63) / 64;
  std::vector<uint32_t> bits(size_t{1} * batch * heads * rows * words);
  std::vector<uint32_t> any(size_t{1} * batch * heads * groups * words), all(any.size(), ~0u);
  for (int bh = 0; bh < batch * heads; ++bh) {
    for (int row = 0; row < rows; ++row) {
      for (int w = 0; w < words; ++w) {
        uint32_t word = 0;
        for (int i = 0; i < 32 && w * 32 + i < cols; ++i) {
          word |= static_cast<uint32_t>(seen(bh / heads, bh % heads, row, w * 32 + i)) << i;
        }
        bits[(size_t{1} * bh * rows + row) * words + w] = word;
        any[(size_t{1} * bh * groups + row / 64) * words + w] |= word;
        all[(size_t{1} * bh * groups + row / 64) * words + w] &= word;
      }
    }
  }
  m.mask.words = on_device(bits);
  m.mask_any = on_device(any);
  m.mask_all = on_device(all);
  m.mask.rows = rows == 1 ? BitRows::kAny : rows;
  m.mask.num_words = words;
  m.mask.word_stride = 1;
  m.mask.row_stride = rows == 1 ? 0 : words;
  m.mask.head_stride = heads == 1 ? 0 : int64_t{1} * rows * words;
  m.mask.batch_stride = batch == 1 ? 0 : int64_t{1} * heads * rows * words;
  m.mask_group_stride = rows == 1 ? 0 : words;
  m.mask_group_head_stride = heads == 1 ? 0 : int64_t{1} * groups * words;
  m.mask_group_batch_stride = batch == 1 ? 0 : int64_t{1} * heads * groups * words;
}

void set_random_mask(Modifiers& m, int batch, int heads, int rows, int cols) {
  std::vector<int> kind(64);  // of squares of 64: hidden, whole, mixed
  for (int& k : kind) k = below(3);
  set_mask(m, batch, heads, rows, cols, [&](int b, int h, int row, int col) {
    const int k = kind[(row / 64 * 7 + col / 64 + 3 * b + 5 * h) % 64];
    return k == 1 || (k == 2 && below(3) != 0);
  });
}

template <typename Seen>
void set_blocks(Modifiers& m, int heads, int rows, int cols, const Seen& seen) {
  const int granules = (rows + 15) / 16, granule_cols = (cols + 15) / 16, words = (granule_cols + 31) / 32;
  std::vector<uint32_t> bits(size_t{1} * heads * granules * words);
  for (int h = 0; h < heads; ++h) {
    for (int r = 0; r < granules; ++r) {
      for (int c = 0; c < granule_cols; ++c) {
        if (seen(h, r, c)) bits[(size_t{1} * h * granules + r) * words + c / 32] |= 1u << (c % 32);
      }
    }
  }
  m.blocks.words = on_device(bits);
  m.blocks.rows = granules;
  m.blocks.num_words = words;
  m.blocks.word_stride = 1;
  m.blocks.row_stride = words;
  m.blocks.head_stride = heads == 1 ? 0 : int64_t{1} * granules * words;
}

Labels make_labels(int sequences, int length, const std::function<int(int, int)>& id) {
  const int groups = (length + 31) / 32;
  std::vector<int32_t> ids(size_t{1} * sequences * length), bounds(size_t{1} * sequences * groups * 2);
  for (int b = 0; b < sequences; ++b) {
    for (int i = 0; i < length; ++i) {
      const int label = id(b, i);
      ids[size_t{1} * b * length + i] = label;
      int32_t* bound = &bounds[(size_t{1} * b * groups + i / 32) * 2];
      bound[0] = i % 32 == 0 ? label : std::min(bound[0], label);
      bound[1] = i % 32 == 0 ? label : std::max(bound[1], label);
    }
  }
  return {on_device(ids), on_device(bounds), length, groups};
}

HiddenIntervals make_intervals(int sequences, int length, int count, int other) {
  const int groups = (length + 31) / 32;
  std::vector<int32_t> bounds(size_t{1} * sequences * length * count * 2);
  std::vector<int32_t> summary(size_t{1} * sequences * groups * count * 4);
  for (int b = 0; b < sequences; ++b) {
    for (int i = 0; i < length; ++i) {
      for (int k = 0; k < count; ++k) {
        const bool wide = i / 64 % 2 == 0;  // hides whole tiles
        const int first = wide ? 64 * k : below(other), last = wide ? 64 * k + 100 : first + below(60);
        const size_t at = (size_t{1} * b * length + i) * count + k;
        bounds[2 * at] = first;
        bounds[2 * at + 1] = last;
        int32_t* g = &summary[((size_t{1} * b * groups + i / 32) * count + k) * 4];
        const bool begins = i % 32 == 0;
        g[0] = begins ? first : std::min(g[0], first);
        g[1] = begins ? first : std::max(g[1], first);
        g[2] = begins ? last : std::min(g[2], last);
        g[3] = begins ? last : std::max(g[3], last);
      }
    }
  }
  HiddenIntervals x;
  x.bounds = on_device(bounds);
  x.groups = on_device(summary);
  x.batch_stride = int64_t{2} * length * count;
  x.group_batch_stride = int64_t{1} * groups * count;
  x.count = count;
  return x;
}

// A bias of `rows` x `cols`, rows `pitch` elements apart; `fill` overwrites what random numbers gave.
template <typename E>
void set_bias(Modifiers& m, int batch, int heads, int rows, int cols, int pitch,
              const std::function<float(int, int, float)>& fill) {
  std::vector<E> x(size_t{1} * batch * heads * rows * pitch);
  for (size_t i = 0; i < x.size(); ++i) {
    const float random = static_cast<float>(below(2001) - 1000) / 500.f;
    x[i] = E(fill(static_cast<int>(i / pitch % rows), static_cast<int>(i % pitch), random));
  }
  m.is_natural = true;
  m.bias.ptr = on_device(x);
  m.bias.rows = rows == 1 ? BitRows::kAny : rows;
  m.bias.cols = cols;
  m.bias.row_stride = rows == 1 ? 0 : pitch;
  m.bias.col_stride = 1;
  m.bias.head_stride = heads == 1 ? 0 : int64_t{1} * rows * pitch;
  m.bias.batch_stride = batch == 1 ? 0 : int64_t{1} * heads * rows * pitch;
  m.bias.is_float = std::is_same_v<E, float>;
  m.bias.staged = !m.bias.is_float && pitch % 8 == 0;
}
float as_is(int, int, float x) { return x; }

void set_softcap(Modifiers& m, float cap) {
  m.is_natural = true;
  m.softcap = cap;
  m.inv_softcap = 1.f / cap;
}

void set_slopes(Modifiers& m, int heads) {
  std::vector<float> slopes(heads);
  for (int h = 0; h < heads; ++h) slopes[h] = 0.5f / static_cast<float>(1 << h % 8);
  m.is_natural = true;
  m.slopes = on_device(slopes);
}

void set_dropout(Modifiers& m, int below_65536) {
  static int64_t* rng = on_device(std::vector<int64_t>{1234, 5});
  m.rng = rng;
  m.drop_below = below_65536;
  m.keep_scale = 65536.f / static_cast<float>(65536 - below_65536);
}

void set_sinks(Modifiers& m, int heads) {
  std::vector<float> sinks(heads);
  for (int h = 0; h < heads; ++h) sinks[h] = static_cast<float>(h) - 1.f;
  m.sinks = on_device(sinks);
}

void set_chunk(Modifiers& m, int size) {
  m.chunk = size;
  m.chunk_divisor = Divisor(size);
}

struct Named {
  std::string name;
  std::function<void(Modifiers&, const Case&)> set;
};

std::vector<Named> all_modifiers() {
  const float lowest = std::is_same_v<Element, __half> ? -65504.f : -3.3e38f;
  return {
      {"none", [](Modifiers&, const Case&) {}},
      {"mask b1qk", [](Modifiers& m, const Case& c) { set_random_mask(m, c.sequences(), 1, c.rows(), c.cols()); }},
      {"mask 1hqk", [](Modifiers& m, const Case& c) { set_random_mask(m, 1, c.heads, c.rows(), c.cols()); }},
      {"key padding",
       [](Modifiers& m, const Case& c) {
         const int cols = c.cols();
         set_mask(m, c.sequences(), 1, 1, cols, [=](int b, int, int, int col) { return col < cols * (b + 1) / 4; });
       }},
      {"blocks",
       [](Modifiers& m, const Case& c) {
         const auto seen = [](int h, int r, int q) { return (r / 4 * 3 + q / 4 + h) % 3 == 0 || below(20) == 0; };
         set_blocks(m, c.heads, c.rows(), c.cols(), seen);
       }},
      {"blocks of 64",
       [](Modifiers& m, const Case& c) {
         set_blocks(m, 1, c.rows(), c.cols(), [](int, int r, int q) { return (r / 4 + q / 4) % 3 == 1; });
       }},
      {"documents",
       [](Modifiers& m, const Case& c) {
         const int n = c.is_packed() ? 1 : c.batch;
         const int rows = static_cast<int>(c.total_q()) / n, cols = static_cast<int>(c.total_k()) / n;
         m.document_q = make_labels(n, rows, [](int b, int i) { return i / (70 + 30 * b); });
         m.document_k = make_labels(n, cols, [](int b, int i) { return i % 97 == 96 ? -1 : i / (70 + 30 * b); });
         if (c.is_packed()) m.document_q.batch_stride = m.document_k.batch_stride = 0;
         if (c.is_packed()) m.document_q.group_batch_stride = m.document_k.group_batch_stride = 0;
       }},
      {"hidden rows",
       [](Modifiers& m, const Case& c) {
         const int n = c.is_packed() ? 1 : c.batch;
         m.hidden_rows = make_intervals(n, static_cast<int>(c.total_k()) / n, 2, c.rows());
       }},
      {"hidden keys",
       [](Modifiers& m, const Case& c) {
         const int n = c.is_packed() ? 1 : c.batch;
         m.hidden_keys = make_intervals(n, static_cast<int>(c.total_q()) / n, 1, c.cols());
       }},
      {"prefix and sink tokens",
       [](Modifiers& m, const Case& c) {
         std::vector<int32_t> lens;
         for (int b = 0; b < c.sequences(); ++b) lens.push_back(b * 70 - 10);
         m.prefix_lens = on_device(lens);
         m.sink_tokens = 5;
       }},
      {"chunk", [](Modifiers& m, const Case&) { set_chunk(m, 50); }},
      {"top left", [](Modifiers& m, const Case&) { m.top_left = true; }},
      {"bias bhqk",
       [](Modifiers& m, const Case& c) {
         set_bias<Element>(m, c.sequences(), c.heads, c.rows(), c.cols(), (c.cols() + 15) / 8 * 8, as_is);
       }},
      {"bias 1hqk",
       [](Modifiers& m, const Case& c) {
         set_bias<Element>(m, 1, c.heads, c.rows(), c.cols(), (c.cols() + 7) / 8 * 8, as_is);
         m.batch_fastest = !c.is_packed() && c.batch > 1;
         m.batches = Divisor(c.batch);
       }},
      {"bias smaller",
       [](Modifiers& m, const Case& c) {
         const int rows = std::max(2, c.rows() / 2), cols = std::max(8, c.cols() / 2);
         set_bias<Element>(m, 1, 1, rows, cols, (c.cols() + 7) / 8 * 8, as_is);
       }},
      {"bias odd",
       [](Modifiers& m, const Case& c) {
         set_bias<Element>(m, 1, c.heads, c.rows(), c.cols(), c.cols() | 1, as_is);
       }},
      {"bias bh1k",
       [](Modifiers& m, const Case& c) {
         set_bias<Element>(m, c.sequences(), c.heads, 1, c.cols(), (c.cols() + 7) / 8 * 8, as_is);
       }},
      {"bias fp32",
       [](Modifiers& m, const Case& c) {
         set_bias<float>(m, 1, c.heads, c.rows(), c.cols(), (c.cols() + 1) / 2 * 2, as_is);
       }},
      {"bias finfo.min",
       [=](Modifiers& m, const Case& c) {
         const auto fill = [=](int row, int col, float x) {
           return row % 5 == 0 || (row / 3 + col / 40) % 3 != 0 ? lowest : x;
         };
         set_bias<Element>(m, 1, c.heads, c.rows(), c.cols(), (c.cols() + 7) / 8 * 8, fill);
       }},
      {"bias fp32 finfo.min",
       [=](Modifiers& m, const Case& c) {
         const auto fill = [=](int row, int col, float x) {
           return row % 5 == 0 || col < 130 || (row / 3 + col / 40) % 3 != 0 ? lowest : x;
         };
         set_bias<float>(m, 1, c.heads, c.rows(), c.cols(), c.cols(), fill);
       }},
      {"alibi", [](Modifiers& m, const Case& c) { set_slopes(m, c.heads); }},
      {"alibi of a batch, small, 0, negative",
       [](Modifiers& m, const Case& c) {
         std::vector<float> slopes;
         for (int i = 0; i < c.sequences() * c.heads; ++i) slopes.push_back(i % 4 == 1 ? 0.f : .003f * (1 - i % 4));
         m.is_natural = true;
         m.slopes = on_device(slopes);
         m.slopes_batch_stride = c.heads;
       }},
      {"alibi, large",
       [](Modifiers& m, const Case& c) {
         std::vector<float> slopes;
         for (int h = 0; h < c.heads; ++h) slopes.push_back(h % 2 == 0 ? 3.7f : 1000.f);
         m.is_natural = true;
         m.slopes = on_device(slopes);
       }},
      {"alibi and what hides",
       [](Modifiers& m, const Case& c) {
         const int cols = c.cols(), n = c.is_packed() ? 1 : c.batch;
         set_slopes(m, c.heads);
         set_mask(m, c.sequences(), 1, 1, cols, [=](int b, int, int, int col) { return col < cols * (b + 2) / 4; });
         m.hidden_keys = make_intervals(n, static_cast<int>(c.total_q()) / n, 1, cols);
         set_sinks(m, c.heads);
       }},
      {"alibi and documents, top left",
       [](Modifiers& m, const Case& c) {
         const int n = c.is_packed() ? 1 : c.batch;
         set_slopes(m, c.heads);
         m.top_left = true;
         m.document_q = make_labels(n, static_cast<int>(c.total_q()) / n, [](int, int i) { return i / 170; });
         m.document_k = make_labels(n, static_cast<int>(c.total_k()) / n, [](int, int i) { return i / 170; });
         if (c.is_packed()) m.document_q.batch_stride = m.document_k.batch_stride = 0;
         if (c.is_packed()) m.document_q.group_batch_stride = m.document_k.group_batch_stride = 0;
       }},
      {"softcap 30", [](Modifiers& m, const Case&) { set_softcap(m, 30.f); }},
      {"softcap 1", [](Modifiers& m, const Case&) { set_softcap(m, 1.f); }},
      {"softcap 300", [](Modifiers& m, const Case&) { set_softcap(m, 300.f); }},
      {"sinks", [](Modifiers& m, const Case& c) { set_sinks(m, c.heads); }},
      {"sinks and mask",
       [](Modifiers& m, const Case& c) {
         set_sinks(m, c.heads);
         set_random_mask(m, 1, 1, c.rows(), c.cols());
       }},
      {"dropout", [](Modifiers& m, const Case&) { set_dropout(m, 20000); }},
      {"alibi and dropout",
       [](Modifiers& m, const Case& c) {
         set_slopes(m, c.heads);
         set_dropout(m, 20000);
       }},
      {"bias, mask and dropout",
       [](Modifiers& m, const Case& c) {
         set_bias<Element>(m, 1, c.heads, c.rows(), c.cols(), (c.cols() + 7) / 8 * 8, as_is);
         set_random_mask(m, 1, 1, c.rows(), c.cols());
         set_dropout(m, 20000);
       }},
      {"all that adds",
       [](Modifiers& m, const Case& c) {
         set_softcap(m, 5.f);
         set_slopes(m, c.heads);
         set_bias<Element>(m, 1, c.heads, c.rows(), c.cols(), (c.cols() + 7) / 8 * 8, as_is);
         set_sinks(m, c.heads);
         set_dropout(m, 6554);
       }},
      {"all that hides",
       [](Modifiers& m, const Case& c) {
         set_mask(m, 1, 1, c.rows(), c.cols(), [](int, int, int row, int col) { return (row + col) % 7 != 0; });
         set_blocks(m, 1, c.rows(), c.cols(), [](int, int r, int q) { return (r + q) % 5 != 0; });
         const int n = c.is_packed() ? 1 : c.batch;
         m.hidden_keys = make_intervals(n, static_cast<int>(c.total_q()) / n, 2, c.cols());
         m.hidden_rows = make_intervals(n, static_cast<int>(c.total_k()) / n, 1, c.rows());
         m.sink_tokens = 3;
         set_chunk(m, 200);
         set_slopes(m, c.heads);
       }},
  };
}

std::vector<Case> cases() {
  return {{"square"},
          {"causal", 1, 2, 1, 513, 513, -1, 0},
          {"long", 1, 2, 2, 200, 1500},
          {"causal long", 2, 4, 2, 130, 700, -1, 0},
          {"tall", 1, 2, 2, 700, 100, -1, 0},
          {"window", 1, 2, 2, 900, 900, 100, 20},
          {"large scores", 1, 2, 2, 400, 400, -1, -1, {}, {}, 8.f},
          {"packed", 1, 2, 2, 0, 0, -1, -1, {100, 0, 300, 64, 5}, {120, 30, 270, 0, 500}},
          {"packed causal", 1, 4, 2, 0, 0, -1, 0, {1, 500, 0, 64, 77, 400}, {1, 500, 10, 64, 77, 600}},
          {"one row", 3, 2, 2, 1, 777},
          {"many tiles", 1, 4, 2, 1000, 2600},
          {"many tiles, causal", 2, 2, 1, 1400, 1400, -1, 0}};
}

}  // namespace standalone
