// Which backward the tables prefer on Hopper, by measurement. No CUDA, no torch.
#pragma once

#include "hopper.h"

namespace flash_ext::sm90 {

// Whether tiles of 128 keys and of 128 queries of short sequences have a multiprocessor each. Evidence:
// split-bwd-short.
inline bool has_few_tiles(const Problem& p, const DeviceInfo& d) {
  if (p.is_varlen() || d.batch_invariant || std::max(p.seqlen_q, p.seqlen_k) > 1024) return false;
  const auto tiles = [&](int64_t rows, int64_t heads) { return (rows + 127) / 128 * heads * p.batch; };
  return tiles(p.seqlen_k, p.num_heads_k) + tiles(p.seqlen_q, p.num_heads) <= d.num_sms;
}

// Whether all keys of a sequence lie in one block: what a step gives of dQ is then all of it, and is stored at once,
// without sums in memory, a pass that zeroes and one that converts. Calls without modifiers take this kernel for it as
// well (prefers_whole_keys()), in which both warpgroups have keys. Evidence: whole-keys, grid.
inline bool has_whole_keys(const Problem& p, const Constraints& c) {
  return c.short_kernels && !p.is_varlen() && p.seqlen_k <= bwd_mod_tile(64, false).block_n() &&
         std::max(p.head_dim, p.head_dim_v) <= 128;
}
// The same of packed sequences that are so short on average: each whose keys are in one block has its dQ stored, and
// others, which only the device knows, add theirs.
inline bool has_short_sequences(const Problem& p, const DeviceInfo& d, const Constraints& c) {
  return c.short_kernels && p.is_varlen() && !d.batch_invariant &&
         p.total_k <= int64_t{bwd_mod_tile(64, false).block_n()} * p.batch && std::max(p.head_dim, p.head_dim_v) <= 128;
}
inline bool stores_dq(const Problem& p, const DeviceInfo& d, const Constraints& c, bool deterministic) {
  return has_whole_keys(p, c) || (!deterministic && has_short_sequences(p, d, c));
}
// The same in the kernel without modifiers, with two warpgroups that have 128 keys each, or above head_dim 64 share
// 128, whose dQ is then of 16 bits.
inline bool has_stored_dq(const Problem& p, const Constraints& c, bool wide) {
  const int size = padded_head_dim(p.head_dim, p.head_dim_v);
  if (!c.short_kernels || p.is_varlen() || p.total_k <= 0 || !has_stored_tile(size)) return false;
  const bool has_room = p.seqlen_q / BwdTile::kBlockM < kStoredTiles - 1 && p.num_heads < 128 * p.num_heads_k;
  return p.seqlen_k <= stored_tile(size).block_n() && (size <= 64 || (!wide && has_room));
}
// The same with one warpgroup that has all keys of a sequence, or of packed ones on average.
inline bool has_stored_short(const Problem& p) {
  const int64_t keys = stored_short_tile(padded_head_dim(p.head_dim, p.head_dim_v)).block_n();
  return p.is_varlen() ? p.total_k <= keys * p.batch : p.seqlen_k <= keys;
}
// The fastest number of parts, at most 16; 1 where none takes less than `share` of its time.
template <typename TimeOf>
int fastest_splits(int64_t steps, double share, const TimeOf& time_of) {
  int best = 1;
  for (int splits = 2; splits <= std::min<int64_t>(steps, 16); ++splits) {
    const double time = time_of(splits);
    if (time < share * time_of(1) && time < time_of(best)) best = splits;
  }
  return best;
}

// Among how many CTAs the queries of a head are divided where one warpgroup has all its keys. Time is counted in steps
// of 64 queries. Begin and end of a CTA cost two steps. The sums cost two, and 0.15 for each part. CTAs that have a
// multiprocessor to themselves are faster. Evidence: q-splits.
inline int q_splits_of_short(const Problem& p, const DeviceInfo& d, const Constraints& c, int64_t tiles) {
  constexpr double kEnds = 2., kSums = 2., kPerPart = 0.15, kAlone = 0.7, kLastAlone = 0.85, kShare = 0.9;
  const int64_t steps = (p.seqlen_q + 63) / 64;
  if (p.is_varlen() || p.num_heads != p.num_heads_k || tiles <= 0 || tiles > INT32_MAX / 64) return 1;
  if (c.q_splits) return static_cast<int>(std::clamp<int64_t>(steps, 1, *c.q_splits));
  if (d.batch_invariant || has_unequal_tiles(p) || d.num_sms <= 0) return 1;
  const auto time_of = [&](int splits) {
    const int64_t ctas = tiles * splits, left = ctas % (2 * d.num_sms);
    const double alone = ctas == left ? kAlone : kLastAlone;
    const double last = left == 0 ? 0. : left <= d.num_sms ? alone : 1.;
    const double rounds = static_cast<double>(ctas / (2 * d.num_sms)) + last;
    const double sums = splits > 1 ? kSums + kPerPart * splits : 0.;
    return rounds * (static_cast<double>((steps + splits - 1) / splits) + kEnds) + sums;
  };
  return fastest_splits(steps, kShare, time_of);
}
// Many queries of few blocks of keys must be shared out. Evidence: whole-keys.
inline bool prefers_stored_short(const Problem& p, const DeviceInfo& d, const Constraints& c) {
  if (d.batch_invariant || c.dq_pool) return false;
  const int size = padded_head_dim(p.head_dim, p.head_dim_v);
  const int64_t blocks = make_grid(p, d, false, stored_short_tile(size).block_n()).ctas;
  const int splits = q_splits_of_short(p, d, c, blocks);
  if (c.q_splits.value_or(1) > splits) return false;
  const bool has_few_queries = p.total_q <= int64_t{128} * p.batch;
  // Blocks that cannot be divided must go round. One that has a multiprocessor alone is as fast as two warpgroups.
  const bool may_divide = !p.is_varlen() && p.num_heads == p.num_heads_k && !has_unequal_tiles(p) && c.q_splits != 1;
  const int64_t least = may_divide ? (d.num_sms + 1) / 2 : d.num_sms;
  return (p.seqlen_k <= 64 || splits > 1 || !has_few_tiles(p, d)) && (has_few_queries || blocks * splits >= least);
}

// Whether the portable kernel for short sequences is faster, which does nothing for rows that are not there, but takes
// 10 to 25 us for one head. Evidence: short.
inline bool prefers_short_sm80(const Problem& p, const DeviceInfo& d) {
  const int size = std::max(p.head_dim, p.head_dim_v), rows = std::max(p.seqlen_q, p.seqlen_k);
  if (size > 128) return rows <= 32;
  if (d.batch_invariant) return true;
  const bool many = int64_t{p.batch} * p.num_heads >= 1024;
  // Above head_dim 64 one warpgroup of Hopper has up to 64 keys.
  if (size > 64) return many && (rows <= 32 || std::min(p.seqlen_q, p.seqlen_k) > 64);
  const int of_many = p.seqlen_q > 64 ? 80 : 64;  // head_dim 32; up to 64 queries are one tile of the Hopper kernel
  return rows <= (size <= 32 ? (many ? of_many : 32) : many ? 32 : 16);
}

// Blocks of 256 keys, 128 a warpgroup, in the fused backward with modifiers. One takes 7/4 of the time of one of 128.
// Equal blocks run in whole rounds of the multiprocessors; unequal ones fill them from two a multiprocessor on. Masks
// must leave most of them whole, but bit masks whose words TMA brings: those pay from fewer keys on, where no bound
// cuts tiles as well. Loaders are too slow to make words of bit masks. Evidence: fused-bwd-mod.
inline constexpr int kLeastBroughtKeys = 512;
inline bool prefers_wide_mod(const Problem& p, const Modifiers& m, const DeviceInfo& d, const Constraints& c) {
  if (c.wide_tiles) return *c.wide_tiles;
  const int64_t wide = make_grid(p, d, false, 256).ctas, others = make_grid(p, d, false, 128).ctas, sms = d.num_sms;
  const bool hides = asks_any<kHidingKinds>(m), equal = !hides && !has_unequal_tiles(p);
  if (d.batch_invariant || c.q_splits || sms <= 0 || wide < sms || m.blocks.words != nullptr) return false;
  const auto cost = [&](int64_t blocks) { return equal ? (blocks + sms - 1) / sms * sms : std::max(blocks, 2 * sms); };
  const bool makes_words = has_row_words(m) && !brings_mask_tiles(p, m);
  const bool only_words = has_row_words(m) && p.window_left < 0 && p.window_right < 0;
  const int least_keys = only_words ? kLeastBroughtKeys : hides ? kLeastCutKeys : 0;
  return 7 * cost(wide) < 4 * cost(others) && !makes_words && !has_short_window(p) && average_keys(p) >= least_keys;
}

// Among how many CTAs the queries of a block of keys are divided, where there are few blocks: each makes dK and dV of
// its queries in fp32, and one more kernel adds them. Counted in steps of 64 queries, of which a block that begins and
// ends costs one and a half, and the sums three. Evidence: q-splits.
inline int q_splits_of(const Problem& p, const DeviceInfo& d, const Constraints& c, int64_t tiles, bool dynamic) {
  const int64_t steps = (p.seqlen_q + 63) / 64 * int64_t{p.num_heads / std::max(1, p.num_heads_k)};
  if (p.is_varlen() || tiles <= 0 || tiles > INT32_MAX / 64) return 1;
  if (c.q_splits) return static_cast<int>(std::clamp<int64_t>(steps, 1, *c.q_splits));
  if (d.batch_invariant || !has_whole_keys(p, c) || dynamic || d.num_sms <= 0) return 1;
  const auto time_of = [&](int64_t splits) {
    const int64_t rounds = (tiles * splits + d.num_sms - 1) / d.num_sms;
    return rounds * (2 * ((steps + splits - 1) / splits) + 3) + (splits > 1 ? 6 : 0);  // in half steps
  };
  return fastest_splits(steps, 0.95, time_of);
}

// Whether the kernel with modifiers stores dQ of a plain call. From head_dim 65 to 96 the kernel without them is faster
// but where queries are shared out, and has dQ in 16 bits alone; whichever runs, results have the same bits. Evidence:
// whole-keys.
inline bool prefers_whole_keys(const Problem& p, const DeviceInfo& d, const Constraints& c, bool wide) {
  const bool few = has_few_tiles(p, d);  // where the number of parts is asked for, they still run here
  if (c.dq_pool || (few && !c.q_splits)) return false;
  if (few || std::max(p.head_dim, p.head_dim_v) <= 64 || !has_stored_dq(p, c, wide)) return true;
  const int size = padded_head_dim(p.head_dim, p.head_dim_v);
  const int64_t tiles = make_grid(p, d, false, stored_tile(size).block_n()).ctas;
  return q_splits_of(p, d, c, tiles, has_unequal_tiles(p)) > 1;
}

// Whether additions to dQ in a fixed order are faster than others, so that calls get them that did not ask: their first
// one needs no zeros, and where few blocks of keys see a tile of queries they hardly wait for each other. Grouped
// heads, whose CTAs hold the same tiles of queries at a time, wait sooner. Evidence: ordered-short, grid.
inline bool prefers_order(const Problem& p, const DeviceInfo& d, const Constraints& c) {
  const int size = padded_head_dim(p.head_dim, p.head_dim_v);
  if (p.is_varlen() || size <= 64 || size > 128 || c.dq_pool) return false;
  const bool grouped = p.num_heads != p.num_heads_k;
  const auto is_short = [&] {
    if (p.window_left >= 0 && p.window_right >= 0) return !grouped && int64_t{p.window_left} + p.window_right <= 384;
    if (p.window_left < 0 && p.window_right == 0) return p.seqlen_k <= std::min(grouped ? 256 : 320, p.seqlen_q);
    return p.seqlen_k <= (grouped ? 256 : 384);
  };
  return is_short() && make_grid(p, d, false, bwd_tile(size).block_n()).ctas >= 3 * d.num_sms;
}

// Whether dK and dV on the one hand and dQ on the other are faster in kernels of their own, with 7 products instead of
// 5 but without a dQ in fp32 that one pass zeroes and another one converts, which few rows notice. Where tiles are few
// the two run side by side, and head sizes from 65 on go as 128 too. The batch-invariant mode does not take it, because
// it depends on the number of heads. Evidence: split-bwd-short, grid.
inline bool prefers_split_bwd(const Problem& p, const DeviceInfo& d, const Constraints& c) {
  if (p.is_varlen() || c.dq_pool || d.batch_invariant) return false;
  if (has_few_tiles(p, d)) return true;
  if (padded_head_dim(p.head_dim, p.head_dim_v) != kShortHeadDim || p.window_left >= 0) return false;
  const bool causal = p.window_right == 0;
  if (p.window_right > 0 || std::max(p.seqlen_q, p.seqlen_k) > (causal ? 768 : 512)) return false;
  if (causal) return true;
  const int64_t ctas = make_grid(p, d, false, kShortKeysTile.block_n()).ctas;
  return 2 * std::min<int64_t>(ctas, INT32_MAX) * (p.num_heads / p.num_heads_k) >= 5 * int64_t{d.num_sms};
}

// Whether the kernels of a backward behind its first begin before the one before them is over, which saves a few
// microseconds: that counts up to 1k rows. Where tiles are long they take multiprocessors from the kernel before them.
// Evidence: pdl-short.
inline bool prefers_pdl(const Problem& p) { return p.total_q <= 1024 * static_cast<int64_t>(p.batch); }

// The compiled head dims that a problem runs in where dQ has a kernel of its own; of few rows up to 128.
inline HeadDims split_short_dims(const Problem& p) {
  return padded_head_dim(p.head_dim, p.head_dim_v) == 64 ? HeadDims{64, 64} : HeadDims{128, 128};
}
inline HeadDims split_dims(const Problem& p) {
  if (p.head_dim > 192 || p.head_dim_v > 192) return {256, 256};
  return p.head_dim_v > 128 ? HeadDims{192, 192} : HeadDims{192, 128};
}

// Where a pool pays: not where short tiles leave no time to convert. Evidence: dq-pool, grid.
inline bool prefers_dq_pool(const Problem& p, int size) {
  if (p.seqlen_k > 4096 || p.seqlen_k <= 256) return false;
  const bool causal = p.window_left < 0 && p.window_right == 0;
  return !has_unequal_tiles(p) || (causal && size == 128 && p.seqlen_k >= 1536 && p.seqlen_k < 4096);
}

// How long a backward takes whose CTAs divide the last work tiles among them (StreamK in bwd/config.cuh), where 1 is
// its time with whole ones, of which the last ones leave multiprocessors idle. Counted in steps, of which a work tile
// that begins and ends costs four. Not of grouped heads: CTAs then read different query heads at a time, which the L2
// cache does not hold. Evidence: stream-k.
inline double time_with_stream_k(const Problem& p, const DeviceInfo& d, int64_t tiles) {
  const int64_t ctas = d.num_sms, steps = query_tiles_per_head(p), most = int64_t{INT32_MAX} / 2;
  if (p.num_heads != p.num_heads_k || has_unequal_tiles(p) || d.batch_invariant || ctas <= 0) return 1;
  if (tiles <= ctas || tiles > most || tiles % ctas == 0 || steps <= 0 || steps > most / (2 * ctas)) return 1;
  const int64_t rounds = tiles / ctas;
  const DividedTiles divided = divided_tiles(p, tiles, ctas);
  // A thread of the pass in front zeroes a word.
  if (query_tiles(p) * kPassThreads < divided.tiles) return 1;
  constexpr int64_t kEnds = 4;
  const int64_t time = (rounds - 1) * (steps + kEnds) + divided.share + 3 * kEnds;
  return static_cast<double>(time) / static_cast<double>((rounds + 1) * (steps + kEnds));
}
// Less is not worth the memory.
inline bool prefers_stream_k(const Problem& p, const DeviceInfo& d, int64_t tiles) {
  return time_with_stream_k(p, d, tiles) < 0.975;
}

// A round has a tile for each CTA. All rounds that have a place have to fit the L2 cache. Evidence: dq-pool.
inline DqPool dq_pool_of(const Problem& p, const DeviceInfo& d, const Constraints& c) {
  const int size = padded_head_dim(p.head_dim, p.head_dim_v);
  const bool asked = c.dq_pool == true;
  if (c.dq_pool == false || p.is_varlen() || size > 128 || d.num_sms <= 0) return {};
  if (!asked && !prefers_dq_pool(p, size)) return {};
  const Grid g = make_grid(p, d, false, bwd_tile(size).block_n());
  if (g.ctas <= 0 || g.ctas > INT32_MAX || query_tiles(p) > INT32_MAX) return {};
  // A pool gains a tenth at most.
  if (!asked && time_with_stream_k(p, d, g.ctas) < 0.9) return {};
  const auto quotient = [](int64_t x, int64_t y) { return (x + y - 1) / y; };
  DqPool pool;
  pool.heads_in_group = heads_in_group(false, g.head_slots, g.blocks, 1, d.num_sms);
  const int64_t in_a_group = int64_t{g.blocks} * pool.heads_in_group;
  pool.round_heads = static_cast<int>(pool.heads_in_group * quotient(d.num_sms, in_a_group));
  pool.all_rounds = static_cast<int>(quotient(g.head_slots, pool.round_heads));
  const int64_t l2 = d.l2_bytes > 0 ? d.l2_bytes : int64_t{50} << 20;
  const int64_t round_bytes = pool.round_tiles(p) * BwdTile::kBlockM * size * 4;
  pool.rounds = DqPool::kRounds;
  if (!asked && 5 * pool.rounds * round_bytes > 4 * l2) --pool.rounds;
  if (!asked && 5 * pool.rounds * round_bytes > 4 * l2) return {};
  return pool.all_rounds > pool.rounds ? pool : DqPool{};
}

// Work tiles as bwd_grid() has them, for a pool.
inline Grid pool_grid(const Problem& p, const DeviceInfo& d, int block_n, const DqPool& pool) {
  Grid g = make_grid(p, d, false, block_n);
  set_heads_in_group(g, pool.heads_in_group);
  return g;
}

// Not what there is no kernel for: a softcap together with dropout or with anything that is added to scores. Nor a bias
// that TMA cannot read and that differs from row to row: read from global memory it is slower here.
inline bool is_bwd_mod_taken(const Problem& p, const Modifiers& m) {
  if (m.softcap > 0.f && (m.adds() || m.rng != nullptr)) return false;
  if (m.bias.ptr == nullptr) return true;
  if (m.bias.is_float && m.bias.row_stride != 0) return m.bias.aligned;
  return m.bias.row_stride != 0 ? m.bias.staged : m.bias.rows >= (p.is_varlen() ? p.total_q : p.seqlen_q);
}

// What bwd_bias/kernel.cuh computes: the gradient of a bias, element by element, of dense calls that hide keys by
// intervals and a bit mask only and add nothing else.
inline bool is_bias_gradient_taken(const Problem& p, const Modifiers& m, const BiasGradient& g) {
  constexpr MaskSet kTaken = kSharedIntervals | kinds_where([](const MaskTraits& t) { return t.word_is_stored; });
  const bool is_elementwise = !g.is_slope && !g.sum_rows && !g.sum_cols;
  const bool is_whole = g.rows == p.seqlen_q && g.cols == p.seqlen_k;
  const bool is_alone = m.bias.row_stride != 0 && !m.by_distance && m.softcap == 0.f && m.rng == nullptr;
  return !p.is_varlen() && is_elementwise && is_whole && is_alone && asks_only<kTaken>(m);
}

// What is left to the portable kernels: a softcap together with dropout or with anything that is added to scores; and a
// bias that differs from row to row and whose rows cannot be asked for ahead. Not deterministic up to head_dim 128,
// what kernels that add in any order do faster: a 16-bit bias there is taken before, by bwd_mod/kernel.cuh or by those.
inline bool is_split_mod_taken(const Problem& p, const Modifiers& m, bool deterministic) {
  if (m.softcap > 0.f && (m.adds() || m.rng != nullptr)) return false;
  if (m.bias.ptr == nullptr || m.bias.row_stride == 0 || (m.bias.is_float && m.bias.col_stride == 1)) return true;
  return m.bias.staged && (deterministic || split_mod_size(p) > 128);
}

}  // namespace flash_ext::sm90
