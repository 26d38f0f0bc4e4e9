// What the bias gradient is: plain loops over every score, in float64.
#pragma once

#include "bias_data.h"

namespace flash_ext {

template <typename E>
struct BiasModel {
  BiasData<E>& x;
  const Case& c = x.c;

  // Whether row r of sequence b sees key j, for head h.
  bool sees(int b, int h, int r, int j) const {
    const int level = r + (c.top_left ? 0 : c.lk[b] - c.lq[b]);
    const bool right = c.right < 0 || j <= level + c.right;
    bool in = right && (c.left < 0 || j >= level - c.left);
    if (c.chunk > 0) in = in && level >= 0 && j / c.chunk == level / c.chunk;
    if (c.prefix) in = in || j < x.prefix[b];
    if (c.sink > 0) in = in || (j < c.sink && right);
    if (c.mask) in = in && x.bit(x.mask, int64_t{1} * b * x.longest_q + r, x.mask_words(), j);
    if (c.blocks) in = in && x.bit(x.blocks, int64_t{1} * h * x.block_rows() + r / 16, x.block_words(), j / 16);
    const int64_t token_q = x.first_q(b) + r, token_k = x.first_k(b) + j;
    if (c.documents) {
      const int32_t label = x.labels_q[token_q];
      in = in && label >= 0 && label == x.labels_k[token_k];
    }
    const auto hidden = [](const std::vector<int32_t>& bounds, int64_t at, int pos) {
      return pos >= bounds[2 * at] && pos < bounds[2 * at + 1];
    };
    for (int i = 0; i < c.hidden_rows; ++i) in = in && !hidden(x.row_bounds, token_k * c.hidden_rows + i, r);
    for (int i = 0; i < c.hidden_keys; ++i) in = in && !hidden(x.key_bounds, token_q * c.hidden_keys + i, j);
    return in;
  }

  static double dot(const StridedView& a, int64_t row_a, int head_a, const StridedView& b, int64_t row_b, int head_b,
                    int d) {
    const uint16_t* left = static_cast<const uint16_t*>(a.ptr) + row_a * a.row_stride + head_a * a.head_stride;
    const uint16_t* right = static_cast<const uint16_t*>(b.ptr) + row_b * b.row_stride + head_b * b.head_stride;
    double sum = 0;
    for (int i = 0; i < d; ++i) sum += double{ptx::widen<E>(left[i])} * ptx::widen<E>(right[i]);
    return sum;
  }

  double score(int b, int h, int r, int j) const {
    const int head_k = h / (c.heads / c.heads_k);
    double s = dot(x.params.q, x.first_q(b) + r, h, x.params.k, x.first_k(b) + j, head_k, c.d);
    s *= x.params.problem.scale;
    if (c.softcap > 0) s = c.softcap * std::tanh(s / c.softcap);
    if (c.slopes) s -= x.slope_at(b, h) * distance(b, r, j);
    if (c.reach >= 0) s += x.table[h * x.entries() + entry(b, r, j)];
    return s + x.bias_at(b, h, r, j);
  }
  int ahead(int b, int r, int j) const { return j - r - (c.top_left ? 0 : c.lk[b] - c.lq[b]); }
  int distance(int b, int r, int j) const { return std::abs(ahead(b, r, j)); }
  int entry(int b, int r, int j) const { return c.reach + std::clamp(ahead(b, r, j), -c.reach, c.reach); }

  // What dropout multiplies a probability with. The bits are those of the library's generator.
  double kept(const DropKeys& keys, int r, int j) const {
    const uint4 counter = make_uint4(r / 16 * 8 + r % 8, j / 32 * 8 + j % 8, keys.counter.x, keys.counter.y);
    const uint4 draws = philox(counter, [&](int i) { return keys.rounds[i]; });
    const uint32_t word[4] = {draws.x, draws.y, draws.z, draws.w};
    const uint32_t draw = word[j % 32 / 8] >> (r % 16 < 8 ? 0 : 16) & 0xffff;
    return draw < x.modifiers.drop_below ? 0 : x.modifiers.keep_scale;
  }

  // Adds the gradients of a row's scores to `sum`, which is laid out as g.out, and writes the row's (lse * log2 e,
  // delta); delta is random, as if of an output and its gradient that nobody needs.
  void add_row(std::vector<double>& sum, const BiasGradient& g, int b, int h, int r, const DropKeys& keys) {
    const int keys_here = c.lk[b];
    std::vector<double> s(keys_here, -INFINITY);
    for (int j = 0; j < keys_here; ++j) {
      if (sees(b, h, r, j)) s[j] = score(b, h, r, j);
    }
    const double largest = s.empty() ? -INFINITY : *std::max_element(s.begin(), s.end());
    double total = 0;
    for (const double of : s) total += of == -INFINITY ? 0 : std::exp(of - largest);
    const double lse = largest == -INFINITY ? INFINITY : largest + std::log(total), delta = normal();
    x.stats[2 * x.stat_at(b, h, r)] = static_cast<float>(lse / std::log(2.));
    x.stats[2 * x.stat_at(b, h, r) + 1] = static_cast<float>(delta);
    for (int j = 0; j < keys_here; ++j) {
      const int row = g.sum_rows ? 0 : r, col = g.reach >= 0 ? entry(b, r, j) : g.sum_cols ? 0 : j;
      if (s[j] == -INFINITY || row >= g.rows || col >= g.cols) continue;
      const int head_k = h / (c.heads / c.heads_k);
      double dp = dot(x.params.dout, x.first_q(b) + r, h, x.params.v, x.first_k(b) + j, head_k, c.dv);
      if (c.dropout) dp *= kept(keys, r, j);
      const double ds = std::exp(s[j] - lse) * (dp - static_cast<float>(delta));
      const int64_t head = int64_t{1} * (g.batch > 1 ? b : 0) * g.heads + (g.heads > 1 ? h : 0);
      sum[(head * g.rows + row) * g.cols + col] += g.is_slope ? -ds * distance(b, r, j) : ds;
    }
  }

  std::vector<double> gradient(const BiasGradient& g) {
    std::vector<double> sum(int64_t{1} * g.batch * g.heads * g.rows * g.cols);
    for (int b = 0; b < x.batch; ++b) {
      for (int h = 0; h < c.heads; ++h) {
        DropKeys keys;
        if (c.dropout) keys.make(x.modifiers, b, h);
        for (int r = 0; r < c.lq[b]; ++r) add_row(sum, g, b, h, r, keys);
      }
    }
    return sum;
  }
};

}  // namespace flash_ext
