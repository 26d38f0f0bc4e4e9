// Random inputs of one case, and the parameters that describe them to the kernel.
#pragma once

#include <random>

#include "bias_cases.h"
#include "sm80/bwd_bias/kernel.cuh"

namespace flash_ext {

inline std::mt19937 generator(7);
inline double uniform() { return std::uniform_real_distribution<double>(0, 1)(generator); }
inline float normal() { return std::normal_distribution<float>(0, 1)(generator); }
inline int integer(int low, int high) { return std::uniform_int_distribution<int>(low, high)(generator); }

// The first element of a vector that lies on a 16-byte boundary.
inline uint16_t* aligned(std::vector<uint16_t>& x) {
  return reinterpret_cast<uint16_t*>((reinterpret_cast<uintptr_t>(x.data()) + 15) / 16 * 16);
}

// Everything lies in vectors that are filled once: the parameters point into them.
template <typename E>
struct BiasData {
  const Case& c;
  const int batch = static_cast<int>(c.lq.size());
  const int longest_q = *std::max_element(c.lq.begin(), c.lq.end());
  const int longest_k = *std::max_element(c.lk.begin(), c.lk.end());
  std::vector<int32_t> cu_q{c.pad_q}, cu_k{0};
  int64_t total_q = int64_t{1} * batch * longest_q, total_k = int64_t{1} * batch * longest_k;
  std::vector<uint16_t> q, k, v, dout, bias16;
  std::vector<float> bias32, slopes, table, stats;
  std::vector<int32_t> prefix;
  std::vector<uint32_t> mask, mask_any, mask_all, blocks;
  // DocumentIds and intervals of tokens, and their bounds over 32 tokens.
  std::vector<int32_t> labels_q, label_groups_q, labels_k, label_groups_k;
  std::vector<int32_t> row_bounds, row_groups, key_bounds, key_groups;
  const int64_t rng[2] = {77, 5};
  BwdParams params;
  Modifiers modifiers;

  explicit BiasData(const Case& of) : c(of) {
    if (c.packed) {
      for (int b = 0; b < batch; ++b) cu_q.push_back(cu_q[b] + c.lq[b]), cu_k.push_back(cu_k[b] + c.lk[b]);
      total_q = cu_q[batch] + c.pad_q, total_k = cu_k[batch];
    }
    make_operands();
    Modifiers& m = modifiers;
    m.has_score_mod = true;
    m.unit_log2 = kLog2e;
    m.softcap = c.softcap;
    m.inv_softcap = c.softcap > 0 ? 1 / c.softcap : 0;
    m.top_left = c.top_left;
    m.chunk = c.chunk;
    if (c.chunk > 0) m.chunk_divisor = Divisor(c.chunk);
    m.sink_tokens = c.sink;
    if (c.dropout) m.rng = rng, m.drop_below = 20000, m.keep_scale = 65536.f / (65536 - 20000);
    if (c.has_bias) make_bias();
    if (c.slopes) {
      for (int i = 0; i < batch * c.heads; ++i) slopes.push_back(0.02f + 0.1f * static_cast<float>(uniform()));
      m.by_distance.slopes = slopes.data();
      m.by_distance.slopes_batch_stride = c.slopes_by_batch ? c.heads : 0;
    }
    if (c.reach >= 0) {
      for (int i = 0; i < c.heads * entries(); ++i) table.push_back(normal());
      m.by_distance.table = table.data();
      m.by_distance.reach = c.reach, m.by_distance.last_entry = 2 * c.reach;
      m.by_distance.table_head_stride = entries();
    }
    if (c.prefix) {
      for (int b = 0; b < batch; ++b) prefix.push_back(integer(0, longest_k));
      m.prefix_lens = prefix.data();
    }
    if (c.mask) make_mask();
    if (c.blocks) make_blocks();
    if (c.documents) {
      make_document_ids(tokens_q(), labels_q, label_groups_q, m.document_q);
      make_document_ids(tokens_k(), labels_k, label_groups_k, m.document_k);
    }
    if (c.hidden_rows > 0) {
      make_intervals(tokens_k(), longest_q, c.hidden_rows, row_bounds, row_groups, m.hidden_rows);
    }
    if (c.hidden_keys > 0) {
      make_intervals(tokens_q(), longest_k, c.hidden_keys, key_bounds, key_groups, m.hidden_keys);
    }
  }

  // Row of a sequence's first token in tensors of all of them, and in labels and intervals.
  int64_t first_q(int b) const { return c.packed ? cu_q[b] : int64_t{1} * b * longest_q; }
  int64_t first_k(int b) const { return c.packed ? cu_k[b] : int64_t{1} * b * longest_k; }
  int64_t tokens_q() const { return c.packed ? total_q : longest_q; }
  int64_t tokens_k() const { return c.packed ? total_k : longest_k; }
  int label_batch() const { return c.packed ? 1 : batch; }
  int64_t stat_at(int b, int h, int row) const {
    return c.packed ? h * total_q + cu_q[b] + row : (int64_t{1} * b * c.heads + h) * longest_q + row;
  }

  int bias_batch() const { return c.by_batch ? batch : 1; }
  int bias_heads() const { return c.by_head ? c.heads : 1; }
  int bias_rows() const { return !c.by_row ? 1 : c.bias_rows > 0 ? c.bias_rows : longest_q; }
  int bias_cols() const { return !c.by_col ? 1 : c.bias_cols > 0 ? c.bias_cols : longest_k; }
  int bias_pitch() const { return (bias_cols() + 7) / 8 * 8; }
  double bias_at(int b, int h, int row, int key) const {
    if (!c.has_bias || (c.by_row && row >= bias_rows()) || (c.by_col && key >= bias_cols())) return 0;
    const int64_t head = int64_t{1} * (c.by_batch ? b : 0) * bias_heads() + (c.by_head ? h : 0);
    const int64_t at = (head * bias_rows() + (c.by_row ? row : 0)) * bias_pitch() + (c.by_col ? key : 0);
    return c.bias_fp32 ? bias32[at] : ptx::widen<E>(static_cast<const uint16_t*>(modifiers.bias.ptr)[at]);
  }
  int entries() const { return 2 * c.reach + 1; }
  double slope_at(int b, int h) const { return slopes[(c.slopes_by_batch ? b * c.heads : 0) + h]; }

  static bool bit(const std::vector<uint32_t>& words, int64_t row, int words_per_row, int at) {
    return words[row * words_per_row + at / 32] >> (at % 32) & 1;
  }
  int mask_words() const { return (longest_k + 31) / 32; }
  int mask_groups() const { return (longest_q + 63) / 64; }
  int block_rows() const { return (longest_q + 15) / 16; }
  int block_words() const { return (longest_k + 511) / 512; }

 private:
  StridedView make_operand(std::vector<uint16_t>& storage, int64_t rows, int heads, int d, int rows_a_batch) {
    const int gap = c.unaligned ? 3 : (8 - heads * d % 8) % 8;
    StridedView view;
    view.row_stride = heads * d + gap;
    view.head_stride = d;
    view.batch_stride = c.packed ? 0 : rows_a_batch * view.row_stride;
    view.aligned = !c.unaligned && d % 8 == 0;
    storage.resize(rows * view.row_stride + 64);
    for (uint16_t& x : storage) x = ptx::narrow<E>(normal());
    view.ptr = aligned(storage);
    return view;
  }

  void make_operands() {
    BwdParams& p = params;
    p.q = make_operand(q, total_q, c.heads, c.d, longest_q);
    p.k = make_operand(k, total_k, c.heads_k, c.d, longest_k);
    p.v = make_operand(v, total_k, c.heads_k, c.dv, longest_k);
    p.dout = make_operand(dout, total_q, c.heads, c.dv, longest_q);
    stats.assign(2 * total_q * c.heads, NAN);
    p.row_stats = stats.data();
    Problem& x = p.problem;
    x.batch = batch;
    x.num_heads = c.heads, x.num_heads_k = c.heads_k;
    x.head_dim = c.d, x.head_dim_v = c.dv;
    x.seqlen_q = c.packed ? 0 : longest_q, x.seqlen_k = c.packed ? 0 : longest_k;
    x.total_q = total_q, x.total_k = total_k;
    if (c.packed) x.cu_seqlens_q = cu_q.data(), x.cu_seqlens_k = cu_k.data();
    x.scale = 1.f / std::sqrt(static_cast<float>(c.d));
    x.window_left = c.left, x.window_right = c.right;
    x.prepare();
  }

  void make_bias() {
    const int64_t size = int64_t{1} * bias_batch() * bias_heads() * bias_rows() * bias_pitch();
    bias16.resize(size + 8);
    bias32.resize(size);
    for (int64_t i = 0; i < size; ++i) {
      bias32[i] = normal();
      aligned(bias16)[i] = ptx::narrow<E>(bias32[i]);
    }
    BiasView& view = modifiers.bias;
    view.ptr = c.bias_fp32 ? static_cast<void*>(bias32.data()) : aligned(bias16);
    view.is_float = c.bias_fp32;
    const int64_t head = int64_t{1} * bias_rows() * bias_pitch();
    view.batch_stride = c.by_batch ? bias_heads() * head : 0;
    view.head_stride = c.by_head ? head : 0;
    view.row_stride = c.by_row ? bias_pitch() : 0;
    view.col_stride = c.by_col ? 1 : 0;
    view.rows = c.by_row ? bias_rows() : BitRows::kAny;
    view.cols = c.by_col ? bias_cols() : BitRows::kAny;
    view.staged = c.staged && !c.bias_fp32 && c.by_col;
  }

  // (b, 1, q, k). Of 64 x 64 scores all are hidden, all are seen, or six in ten.
  void make_mask() {
    const int words = mask_words(), groups = mask_groups();
    mask.resize(int64_t{1} * batch * longest_q * words);
    mask_any.assign(int64_t{1} * batch * groups * words, 0);
    mask_all.assign(mask_any.size(), ~0u);
    for (int i = 0; i < batch * longest_q * words; ++i) {
      const int w = i % words, row = i / words % longest_q, b = i / words / longest_q;
      const int kind = (row / 64 + w / 2 + b) % 5;
      for (int j = 0; j < 32 && w * 32 + j < longest_k; ++j) {
        mask[i] |= uint32_t{kind == 0 ? false : kind == 1 || uniform() < 0.6} << j;
      }
      const int64_t group = (int64_t{1} * b * groups + row / 64) * words + w;
      mask_any[group] |= mask[i];
      mask_all[group] &= mask[i];
    }
    Modifiers& m = modifiers;
    m.mask.words = mask.data();
    m.mask.batch_stride = int64_t{1} * longest_q * words;
    m.mask.row_stride = words;
    m.mask.word_stride = 1;
    m.mask.rows = longest_q;
    m.mask.num_words = words;
    m.mask_any = mask_any.data();
    m.mask_all = mask_all.data();
    m.mask_group_batch_stride = int64_t{1} * groups * words;
    m.mask_group_stride = words;
  }

  // (1, h, q / 16, k / 16). Every other 128 queries see keys of every other 128 only, at most.
  void make_blocks() {
    const int rows = block_rows(), words = block_words();
    blocks.resize(int64_t{1} * c.heads * rows * words);
    for (int i = 0; i < c.heads * rows * words; ++i) {
      for (int j = 0; j < 32 && (i % words * 32 + j) * 16 < longest_k; ++j) {
        blocks[i] |= uint32_t{uniform() < 0.5} << j;
      }
      if (i / words % rows / 8 % 2 == 1) blocks[i] &= 0xff00ff00;
    }
    BitRows& view = modifiers.blocks;
    view.words = blocks.data();
    view.head_stride = int64_t{1} * rows * words;
    view.row_stride = words;
    view.word_stride = 1;
    view.rows = rows;
    view.num_words = words;
  }

  // Documents of 50 tokens; one token in 97 belongs to none.
  void make_document_ids(int64_t tokens, std::vector<int32_t>& ids, std::vector<int32_t>& groups, DocumentIds& view) {
    for (int b = 0; b < label_batch(); ++b) {
      for (int i = 0; i < tokens; ++i) ids.push_back(i / 50 - (i % 97 == 3 ? 100 : 0));
      for (int64_t i = 0; i < tokens; i += 32) {
        const auto first = ids.begin() + b * tokens + i, last = first + std::min<int64_t>(32, tokens - i);
        const auto [low, high] = std::minmax_element(first, last);
        groups.insert(groups.end(), {*low, *high});
      }
    }
    view.ids = ids.data();
    view.groups = groups.data();
    view.batch_stride = c.packed ? 0 : tokens;
    view.group_batch_stride = c.packed ? 0 : (tokens + 31) / 32;
  }

  // Of every three times 128 tokens: random ones, everything, nothing.
  void make_intervals(int64_t tokens, int other, int count, std::vector<int32_t>& bounds, std::vector<int32_t>& groups,
                      HiddenIntervals& view) {
    for (int b = 0; b < label_batch(); ++b) {
      for (int64_t i = 0; i < tokens * count; ++i) {
        const int kind = static_cast<int>(i / count / 128 % 3), begin = integer(0, other);
        if (kind == 0) bounds.insert(bounds.end(), {begin, begin + integer(0, other / 3)});
        if (kind == 1) bounds.insert(bounds.end(), {0, other});
        if (kind == 2) bounds.insert(bounds.end(), {0, 0});
      }
      for (int64_t i = 0; i < (tokens + 31) / 32 * count; ++i) {
        int low[2] = {INT32_MAX, INT32_MAX}, high[2] = {INT32_MIN, INT32_MIN};  // of begins and ends
        for (int64_t t = i / count * 32; t < std::min(tokens, i / count * 32 + 32); ++t) {
          for (int end = 0; end < 2; ++end) {
            const int32_t x = bounds[((b * tokens + t) * count + i % count) * 2 + end];
            low[end] = std::min(low[end], x), high[end] = std::max(high[end], x);
          }
        }
        groups.insert(groups.end(), {low[0], high[0], low[1], high[1]});
      }
    }
    view.bounds = bounds.data();
    view.groups = groups.data();
    view.batch_stride = c.packed ? 0 : tokens * count * 2;
    view.group_batch_stride = c.packed ? 0 : (tokens + 31) / 32 * count;
    view.count = count;
  }
};

}  // namespace flash_ext
