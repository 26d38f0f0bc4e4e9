// Sequences of at most 80 queries and keys: a CTA holds all of one head, and walks heads that share a bias. There are
// kernels for 16, 32, 64 and, up to head_dim 128, 80 rows: a larger CTA leaves warps and memory idle where there are
// fewer. Which calls run so, and how their heads are shared out, for the host and the kernels alike. No CUDA, no torch.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <iterator>

#include "divisor.h"
#include "heuristics.h"
#include "modifiers.h"
#include "paths.h"

namespace flash_ext {

inline constexpr int kShortHeadDims[] = {32, 64, 80, 128, 256};

// The smallest compiled head_dim that holds both.
inline int short_head_dim(const Problem& p) {
  return *std::find_if(std::begin(kShortHeadDims), std::end(kShortHeadDims) - 1,
                       [&](int size) { return std::max(p.head_dim, p.head_dim_v) <= size; });
}

// `rows` queries and keys, 16 queries a warp. Sizes in bytes.
struct ShortTile {
  int rows, head_dim;

  constexpr int threads() const { return 2 * rows; }
  constexpr int tile() const { return 2 * head_dim * rows; }  // of Q, K, V, O or dO
  constexpr int bias() const { return 4 * rows * rows; }  // fp32
  constexpr int weights() const { return 2 * rows * rows; }  // P or dS in shared memory
  // So many CTAs a multiprocessor have room in its registers and shared memory.
  constexpr int fwd_ctas() const {
    const bool fits = head_dim <= 128;
    // With three, shared memory is short at 80 and 128.
    if (rows == 80) return head_dim <= 64 ? 3 : 2;
    return rows == 16 ? (fits ? 16 : 8) : rows == 32 ? (fits ? 7 : 4) : fits ? 3 : 2;
  }
  constexpr int bwd_ctas() const {
    const bool fits = head_dim <= 64;
    if (head_dim > 128) return rows == 16 ? 5 : rows == 32 ? 2 : 1;
    return rows == 16 ? (fits ? 16 : 10) : rows == 32 ? (fits ? 8 : 5) : rows == 64 && head_dim <= 80 ? 3 : 2;
  }
  // The next head's tiles come while one is worked on, where there is room for both.
  constexpr int fwd_stages() const { return head_dim <= (rows > 64 ? 32 : 64) ? 2 : 1; }
  // A bias of one head alone as it lies, ahead of its head. With 16 rows, and with 64 of head_dim 256, it would take
  // the room of a CTA, which every call would miss.
  constexpr int bias_ahead() const { return rows == 16 || rows * head_dim > 128 * 80 ? 0 : 2 * rows * rows + 16; }
  // Q, K, V; a bias; one that comes ahead.
  constexpr int fwd_smem() const { return 3 * fwd_stages() * tile() + bias() + bias_ahead(); }
  // Q, K, V, dO; O, then P and dS in its place; (lse, delta); a bias.
  constexpr int o_or_weights() const { return std::max(tile(), 2 * weights()); }
  constexpr int bwd_smem() const { return 4 * tile() + o_or_weights() + 8 * rows + bias(); }
};

// Most queries and keys of a call.
constexpr int short_rows(int head_dim) { return head_dim <= 128 ? 80 : 64; }
constexpr int short_bwd_rows(int head_dim) { return head_dim <= 80 ? 80 : 64; }

// As many CTAs as are planned fit into the shared memory of a multiprocessor of Hopper, 1 KiB of it taken by each.
static_assert(std::ranges::all_of(kShortHeadDims, [](int d) {
  return std::ranges::all_of(std::array{16, 32, 64, 80}, [d](int rows) {
    const ShortTile t{rows, d};
    const auto fit = [](int ctas, int bytes) { return ctas * (bytes + 1024) <= kSmemLimitLarge + 1024; };
    return (rows > short_rows(d) || fit(t.fwd_ctas(), t.fwd_smem())) &&
           (rows > short_bwd_rows(d) || fit(t.bwd_ctas(), t.bwd_smem()));
  });
}));

inline ShortTile short_tile(const Problem& p) {
  const int rows = std::max(p.seqlen_q, p.seqlen_k);
  return {rows <= 16 ? 16 : rows <= 32 ? 32 : rows <= 64 ? 64 : 80, short_head_dim(p)};
}

// Neither the batch nor the number of heads decides, so that a sequence has the same bits in every batch.
inline bool is_short_mod(const Problem& p, const DeviceInfo& d, const Constraints& c) {
  return c.short_kernels && !p.is_varlen() && p.total_q > 0 && p.total_k > 0 &&
         std::max(p.seqlen_q, p.seqlen_k) <= short_rows(short_head_dim(p)) &&
         int64_t{1} * p.batch * p.num_heads < (1 << 30) && short_tile(p).fwd_smem() + 1024 <= d.smem_per_block;
}

// Wide heads of many rows without modifiers are faster in the other kernels. Evidence: short.
inline bool is_short(const Problem& p, const DeviceInfo& d, const Constraints& c) {
  const ShortTile tile = short_tile(p);
  return is_short_mod(p, d, c) && tile.rows <= (tile.head_dim <= 64 ? 80 : tile.head_dim <= 128 ? 64 : 32);
}

// A CTA of the backward makes dk and dv of a key head from one query head.
inline bool is_short_bwd(const Problem& p, const DeviceInfo& d, const Constraints& c) {
  const ShortTile tile = short_tile(p);
  return is_short_mod(p, d, c) && tile.rows <= short_bwd_rows(tile.head_dim) && p.num_heads == p.num_heads_k &&
         tile.bwd_smem() + 1024 <= d.smem_per_block;
}

// Heads that share a bias are a group: entry (b', h') of the bias. The heads of a group are counted head first, then
// batch entry. Without a bias there is one group. CTA i begins with item i % parts of group i / parts.
struct ShortGrid {
  int32_t groups = 1;
  int32_t items = 0;  // heads of a group
  int32_t parts = 1;  // CTAs that share a group
  int32_t group_step = 1;  // from one group of a CTA to the next
  int32_t bias_heads = 1;  // entries of the bias along heads, 1: shared by all
  bool shares_batch = true;  // all batch entries have one bias
  Divisor heads;  // of a group, in one batch entry
  Divisor part_count, bias_head_count;
  Divisor shared;  // query heads per key head
  int64_t ctas = 0;
};

// `of_bias`: the gradient of the bias, null where none is wanted, so that batch entries and heads share a bias wherever
// they read the same one.
inline ShortGrid short_grid(const Problem& p, const BiasView& bias, const BiasGradient* of_bias, int wanted_ctas) {
  ShortGrid g;
  if (p.batch == 0 || p.num_heads == 0) return g;
  const int bias_batch = of_bias != nullptr ? of_bias->batch : bias.batch_stride != 0 ? p.batch : 1;
  g.bias_heads = of_bias != nullptr ? of_bias->heads : bias.head_stride != 0 ? p.num_heads : 1;
  const int heads = g.bias_heads == 1 ? p.num_heads : 1;
  g.shares_batch = bias_batch == 1;
  g.groups = bias_batch * g.bias_heads;
  g.items = (g.shares_batch ? p.batch : 1) * heads;
  g.parts = std::clamp(wanted_ctas / g.groups, 1, g.items);
  g.group_step = g.parts > 1 ? g.groups : std::min(g.groups, wanted_ctas);
  g.heads = Divisor(heads);
  g.part_count = Divisor(g.parts);
  g.bias_head_count = Divisor(g.bias_heads);
  g.shared = Divisor(p.num_heads / p.num_heads_k);
  g.ctas = int64_t{1} * g.group_step * g.parts;
  return g;
}

inline ShortGrid short_fwd_grid(const Problem& p, const BiasView& bias, const DeviceInfo& d) {
  return short_grid(p, bias, nullptr, d.num_sms * short_tile(p).fwd_ctas());
}
inline ShortGrid short_bwd_grid(const Problem& p, const BiasView& bias, const BiasGradient* of_bias,
                                const DeviceInfo& d) {
  return short_grid(p, bias, of_bias, d.num_sms * short_tile(p).bwd_ctas());
}

}  // namespace flash_ext
