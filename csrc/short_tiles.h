// Sequences of at most 64 queries and keys: a CTA holds all of one head, and walks heads that share a bias.
// Which calls run so, and how their heads are shared out, for the host and the kernels alike. No CUDA, no torch.
#pragma once

#include <algorithm>
#include <cstdint>
#include <iterator>

#include "divisor.h"
#include "heuristics.h"
#include "modifiers.h"
#include "paths.h"

namespace flash_ext {

inline constexpr int kShortRows = 64;
inline constexpr int kShortHeadDims[] = {32, 64, 128, 256};

// The smallest compiled head_dim that holds both.
inline int short_head_dim(const Problem& p) {
  return *std::find_if(std::begin(kShortHeadDims), std::end(kShortHeadDims) - 1,
                       [&](int size) { return std::max(p.head_dim, p.head_dim_v) <= size; });
}

// Four warps of 16 queries each.
struct ShortTile {
  static constexpr int kThreads = 128;
  static constexpr int kScoreBytes = 4 * kShortRows * kShortRows;  // fp32
  static constexpr int tile_bytes(int d) { return 2 * d * kShortRows; }
  // Registers for so many CTAs a multiprocessor, of 65536.
  static constexpr int fwd_ctas(int d) { return d <= 128 ? 3 : 2; }
  static constexpr int bwd_ctas(int d) { return d <= 64 ? 3 : 2; }
  // The next head's tiles come while one is worked on, where there is room for both.
  static constexpr int fwd_stages(int d) { return d <= 64 ? 2 : 1; }
  // Q, K, V; a bias in fp32.
  static constexpr int fwd_smem_bytes(int d) { return 3 * fwd_stages(d) * tile_bytes(d) + kScoreBytes; }
  // Q, K, V, dO; O, then P and dS in its place; (lse, delta); a bias.
  static constexpr int bwd_smem_bytes(int d) { return 4 * tile_bytes(d) + kScoreBytes + 8 * kShortRows + kScoreBytes; }
};
static_assert(ShortTile::tile_bytes(128) <= ShortTile::kScoreBytes, "O lies where P and dS do");
static_assert(ShortTile::bwd_smem_bytes(128) + 1024 <= kSmemLimitSmall);

// Neither the batch nor the number of heads decides, so that a sequence has the same bits in every batch.
inline bool is_short_mod(const Problem& p, const DeviceInfo& d) {
  return d.short_kernels != 0 && !p.is_varlen() && p.total_q > 0 && p.total_k > 0 && p.seqlen_q <= kShortRows &&
         p.seqlen_k <= kShortRows && int64_t{1} * p.batch * p.num_heads < (1 << 30) &&
         ShortTile::fwd_smem_bytes(short_head_dim(p)) + 1024 <= d.smem_per_block;
}

// Above head_dim 128 calls without modifiers are faster in the other kernels (256, 49 rows: 151 us for 183).
inline bool is_short(const Problem& p, const DeviceInfo& d) { return is_short_mod(p, d) && short_head_dim(p) <= 128; }

// A CTA of the backward makes dk and dv of a key head from one query head.
inline bool is_short_bwd(const Problem& p, const DeviceInfo& d) {
  return is_short(p, d) && p.num_heads == p.num_heads_k;
}

// Heads that share a bias are a group: entry (b', h') of the bias. The heads of a group are counted head first, then
// batch entry. Without a bias there is one group. CTA i begins with item i % parts of group i / parts.
struct ShortGrid {
  int32_t groups = 1;
  int32_t items = 0;         // heads of a group
  int32_t parts = 1;         // CTAs that share a group
  int32_t group_step = 1;    // from one group of a CTA to the next
  int32_t bias_heads = 1;    // entries of the bias along heads, 1: shared by all
  bool shares_batch = true;  // all batch entries have one bias
  Divisor heads;             // of a group, in one batch entry
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
  return short_grid(p, bias, nullptr, d.num_sms * ShortTile::fwd_ctas(short_head_dim(p)));
}
inline ShortGrid short_bwd_grid(const Problem& p, const BiasView& bias, const BiasGradient* of_bias, const DeviceInfo& d) {
  return short_grid(p, bias, of_bias, d.num_sms * ShortTile::bwd_ctas(short_head_dim(p)));
}

}  // namespace flash_ext
