// The tables of the forwards over a cache.
#include "cached.h"
#include "split_kv.h"

#include "../dense_cache.h"
#include "../sm90/fwd_cached/tiles.h"
#include "../sm90/fwd_latent/tiles.h"

namespace flash_ext::plans {
namespace {

// Rows of a sequence up to which the tiles of 16 and of 64 take it. Where the host does not know which sequences there
// are, it launches all kernels that some sequence may want.
constexpr int kNarrowRows = 16, kLargerRows = 64, kDividedRows = 256;
// Beyond those rows packed tiles take so many queries. Of more, tiles of one head each are filled well enough.
constexpr int kPackedQueries = 128;

bool is_quantized(Req r) { return r.cache_type != CacheType::k16Bit; }
// Whether a call needs the instances with masks, documents and biases, which take up to 39 registers more.
bool has_masks(const Modifiers* m) {
  return m != nullptr && (asks_any<kOverCaches>(*m) || m->bias.ptr != nullptr || m->by_distance.table != nullptr);
}
// Not in the batch-invariant mode: the longest sequence of a call would decide how the others are added up. Beside
// masks, and beside modifiers and converters, there are no registers for the other tile.
bool shares_keys(Req r, Dev d, int64_t rows) {
  const bool is_only_one = has_masks(r.modifiers) || (r.modifiers != nullptr && is_quantized(r));
  return (rows <= 64 || is_only_one) && sm90::can_share_keys(split_padded(r.problem)) && !d.batch_invariant;
}
sm90::FwdTile packed_tile(Req r, Dev d, int64_t rows) {
  return sm90::packed_tile(split_padded(r.problem), shares_keys(r, d, rows));
}

// Rows of such a tile that are used: those of whole queries.
int packed_rows(Req r, Dev d, int64_t rows) {
  const int group = r.problem.num_heads / r.problem.num_heads_k;
  return packed_tile(r, d, rows).block_m() / group * group;
}

// A sequence of more has its keys in one part. Tiles of one head, which 16-bit caches have for those, are no other
// kernel's for 8 bits.
int64_t most_packed_rows(const Problem& p) {
  return std::max<int64_t>(kDividedRows, int64_t{kPackedQueries} * (p.num_heads / p.num_heads_k));
}

// CTAs that share out the tiles of a sequence, a key head and a part: as many as there may be tiles. Where that is
// beyond what is divided, as many as give each multiprocessor some, since nobody knows which sequences there are.
int64_t packed_row_tiles(Req r, Dev d, int64_t rows) {
  constexpr int kWaves = 4;
  const Problem& x = r.problem;
  const int of_tile = packed_rows(r, d, rows);
  const auto tiles = [&](int64_t n) { return (n + of_tile - 1) / of_tile; };
  if (rows <= most_packed_rows(x)) return tiles(rows);
  const int64_t items = std::max<int64_t>(1, int64_t{1} * x.batch * x.num_heads_k);
  return std::min(tiles(rows), std::max(tiles(most_packed_rows(x)), (kWaves * d.num_sms + items - 1) / items));
}

SplitTile tile_of(Req r, int rows) {
  const int size = split_padded(r.problem);
  return r.cache_type == CacheType::k16Bit ? split_tile(size, rows) : quantized_tile(size, rows);
}

// Keys that parts of a sequence divide, at most; one where there are no queries.
int64_t keys_of_parts(Req r, int64_t queries) {
  const Problem& x = r.problem;
  int64_t keys = r.cache->max_keys;
  if (r.most_keys > 0) keys = std::min(keys, r.most_keys);
  if (x.window_left >= 0 && x.window_right >= 0) {
    keys = std::min(keys, int64_t{0} + x.window_left + x.window_right + queries);
  }
  return std::max<int64_t>(keys, 1);
}

// What takes more rows than the tiles of 16 do: portable tiles of 64, or packed tiles on Hopper.
enum class Larger { kPortable, kPacked };

// Whether sequences may have different numbers of keys.
bool may_differ(Req r) { return r.problem.batch > 1 && r.cache->seqused_k != nullptr; }

// The parts of a sequence that a constraint or the batch-invariant mode sets, which are functions of lengths alone.
// False: the load of the GPU decides.
bool set_fixed_parts(Req r, Dev d, int64_t keys, KvCacheGrid& c) {
  constexpr int kKeysOfPart = 512;
  if (r.constraints.kv_splits) {
    c.splits = std::clamp(*r.constraints.kv_splits, 1, kMaxSplits);
  } else if (d.batch_invariant) {
    c.splits = static_cast<int>(std::clamp<int64_t>((keys + kKeysOfPart - 1) / kKeysOfPart, 1, kMaxSplits));
    c.keys_of_part = kKeysOfPart;
  }
  return r.constraints.kv_splits || d.batch_invariant;
}

// Parts of the keys for `items` tiles, of which `splits` would be best if all sequences were equally long. Nobody knows
// lengths here: where they may differ, up to `even` parts, as many CTAs in all as `ctas`, even out what the longest one
// would take.
void set_parts(Req r, int64_t keys, int64_t items, int64_t splits, int64_t ctas, int64_t even, KvCacheGrid& c) {
  if (may_differ(r)) {
    c.equal_splits = static_cast<int>(splits);
    c.seen_keys = static_cast<int>(keys);
    c.all_parts = static_cast<int>(std::max<int64_t>(ctas * r.problem.batch / items, 1));
    splits = std::max(splits, std::min(even, int64_t{kMaxSplits}));
  }
  c.splits = static_cast<int>(splits);
}

KvCacheGrid cached_grid(Req r, Dev d, int64_t rows, int64_t split_rows, Larger larger) {
  constexpr int kLeastKeys = 128, kLeastBytesOfWaves = 4096;
  const Problem& x = r.problem;
  const int64_t keys = keys_of_parts(r, rows / (x.num_heads / x.num_heads_k));
  KvCacheGrid c;
  c.rows = static_cast<int>(std::min(rows, split_rows));
  c.queries = std::max(1, c.rows / (x.num_heads / x.num_heads_k));
  c.part_rows = int64_t{1} * x.batch * x.num_heads_k * c.rows;
  if (!set_fixed_parts(r, d, keys, c)) {
    const SplitTile t = tile_of(r, rows <= kNarrowRows ? 16 : 64);
    // Packed tiles have a multiprocessor each, and as those of 16 rows they wait for memory.
    const bool packed = larger == Larger::kPacked;
    const int ctas_per_sm =
        packed ? 1 : std::clamp((d.smem_per_block + 1024) / (t.smem_bytes(split_padded(x)) + 1024), 1, 3);
    const int model_rows = packed ? 16 : t.rows;
    const double weight = (x.head_dim + x.head_dim_v) * t.element_bytes / 512.,
                 bytes = 4. * static_cast<double>(c.part_rows) * x.head_dim_v;
    const int64_t row_tiles = packed ? (rows + packed_rows(r, d, rows) - 1) / packed_rows(r, d, rows) : 1;
    const int64_t items = std::max<int64_t>(1, int64_t{1} * x.batch * x.num_heads_k * row_tiles);
    const int sms = std::max(1, d.num_sms);
    const double alone = packed ? kAlone : kAloneOverCache;
    int64_t splits = best_parts(items, (keys + 63) / 64, model_rows, weight, bytes, sms, ctas_per_sm, alone).parts;
    // What turns bytes into numbers keeps as many CTAs busy as a multiprocessor has room for.
    const int64_t wave = int64_t{1} * sms * ctas_per_sm;
    if (t.element_bytes == 1) {
      splits = std::max(splits, std::min({wave / items, keys / kLeastKeys, int64_t{kMaxSplits}}));
    }
    // Parts for several waves where lengths differ; of packed tiles two, since parts of many rows cost.
    const int64_t ctas = (packed ? 2 : 4) * wave, even = packed ? ctas / items : (ctas + items - 1) / items;
    set_parts(r, keys, items, splits, ctas, std::min(even, keys * t.element_bytes / kLeastBytesOfWaves), c);
    c.least_keys = kLeastKeys;
  }
  if (larger == Larger::kPacked) {
    c.tile_rows = packed_rows(r, d, rows);
    c.block_n = packed_tile(r, d, rows).block_n;
    c.scaled_maxima = r.modifiers == nullptr;
    // A part has no stretches of keys.
    c.most_keys = sm90::kStretches.above;
    const int least = static_cast<int>((keys + c.most_keys - 1) / c.most_keys);
    c.splits = std::max(c.splits, least);
    c.equal_splits = std::max(c.equal_splits, least);
  } else {
    c.block_n = tile_of(r, 64).block_n();
  }
  c.narrow_block_n = tile_of(r, 16).block_n();
  return c;
}

// Packed rows of a sequence, at most.
int64_t cached_rows(Req r) {
  const Problem& x = r.problem;
  const int64_t longest = x.is_varlen() ? x.total_q : x.seqlen_q;
  return x.num_heads / x.num_heads_k * (r.most_queries > 0 ? std::min(longest, r.most_queries) : longest);
}

void push_longer_portable(Req r, Dev d, RowRange served, Plan& p) {
  const Problem& x = r.problem;
  const int size = split_padded(x);
  const SmemClass c = class_of(d);
  const FwdTile t = fwd_tile_sm80(size, c);
  Launch& l = p.push(main_of(KernelId::kFwdCached80, size, size, t.block_m, t.block_n, t.stages, t.threads(),
                             t.smem_bytes(size), make_grid(x, d, true, t.block_m), 0));
  l.smem_class = c;
  l.rows = served;
}

void push_longer_hopper(Req r, Dev d, RowRange served, Plan& p) {
  const sm90::HeadDims x = hopper_dims(r.problem);
  const sm90::FwdTile t = sm90::fwd_tile(x.d, x.dv);
  Launch& l =
      p.push(main_of(KernelId::kFwdCached90, x.d, x.dv, t.block_m(), t.block_n, t.kv_stages / 2, t.threads(),
                     sm90::cached_smem_bytes(x.d, x.dv), sm90::fwd_grid(r.problem, d, t.block_m(), true), d.num_sms));
  set_dynamic(p, l, true);  // lengths differ, and nobody knows them here
  l.rows = served;
  add_stretches(p, r.cache->max_keys > sm90::kStretches.above, d.num_sms, t, x.dv);
}

// The grid of the parts of keys, with their place in the workspace.
void divide_keys(const Problem& x, const KvCacheGrid& c, Plan& p) {
  add_kv_partials(x, p, c.splits, c.part_rows);
  p.split_kv.heads_k = Divisor(static_cast<uint32_t>(x.num_heads_k));
  p.split_kv.group = Divisor(static_cast<uint32_t>(x.num_heads / x.num_heads_k));
  p.split_kv.queries = Divisor(static_cast<uint32_t>(c.queries));
  p.kv_cache = c;
}
// What adds the parts up, for sequences of more than `narrow_rows` rows by the larger tile.
void push_merge(const Problem& x, int size, int narrow_rows, Plan& p) {
  const KvCacheGrid& c = p.kv_cache;
  if (c.splits == 1) return;
  const int64_t merged = int64_t{1} * x.batch * x.num_heads * c.queries;
  Launch& l = p.push(pass(KernelId::kFwdMergeCached80, size, size, merge_ctas(merged, c.splits), SplitTile::kThreads,
                          p.arch == Arch::kSm90));
  l.rows = {narrow_rows, INT32_MAX};
  if (x.head_dim_v > kMergedColumns) l.variant = ScoreVariant::kLatents;
}

// Tiles of few rows, whose keys may be in parts. leaves_longer: sequences of more rows are another kernel's; the result
// says which these are.
RowRange push_few_cached(Req r, Dev d, bool leaves_longer, Plan& p, Larger kind = Larger::kPortable) {
  const Problem& x = r.problem;
  const int group = x.num_heads / x.num_heads_k;
  const int64_t rows = cached_rows(r);
  // Which sequences there are is known where all are equally long.
  const bool known = !x.is_varlen() || (x.batch == 1 && !d.batch_invariant);
  const bool larger = rows > kNarrowRows && !(known && leaves_longer);
  const bool narrow = group <= kNarrowRows && !(known && rows > kNarrowRows);
  const int size = split_padded(x);
  const RowRange others{larger ? kLargerRows : narrow ? kNarrowRows : 0, INT32_MAX};
  if (!narrow && !larger) return others;
  // No other kernel takes more rows with modifiers or of 8 bits. Few sequences divide them; a CTA walks 64 at a time.
  const bool few = int64_t{1} * x.batch * x.num_heads_k < 2 * d.num_sms && rows <= kDividedRows;
  const bool quantized = is_quantized(r);
  const bool divides = few && (r.modifiers != nullptr || quantized) && !d.batch_invariant;
  const int64_t divided = kind == Larger::kPacked ? std::min(rows, most_packed_rows(x))
                          : divides               ? kDividedRows
                          : larger                ? kLargerRows
                                                  : kNarrowRows;
  const KvCacheGrid c = cached_grid(r, d, rows, divided, kind);
  const int narrow_rows = narrow ? kNarrowRows : 0;  // sequences of up to so many have tiles of 16 rows
  divide_keys(x, c, p);
  const int64_t slots = x.batch + (x.is_varlen() ? 2 : 0);
  const KernelId kernel = quantized                ? KernelId::kFwdSplitQuantized80
                          : r.modifiers == nullptr ? KernelId::kFwdSplitCached80
                                                   : KernelId::kFwdSplitCachedMod80;
  const auto push_tile = [&](int tile_rows, RowRange served) {
    const SplitTile t = tile_of(r, tile_rows);
    Launch& l = p.push(main_of(kernel, size, size, t.rows, t.block_n(), t.stages / 2, SplitTile::kThreads,
                               t.smem_bytes(size), slots * x.num_heads_k * c.splits, 0));
    l.rows = served;
    l.cache_type = r.cache_type;
    if (has_masks(r.modifiers)) l.variant = ScoreVariant::kAll;
  };
  if (narrow) push_tile(16, {0, larger || leaves_longer ? narrow_rows : INT32_MAX});
  const RowRange many{narrow_rows, leaves_longer ? kLargerRows : INT32_MAX};
  if (larger && kind == Larger::kPacked) {
    const int dim = split_padded(x);
    const int64_t row_tiles = packed_row_tiles(r, d, rows);
    const int64_t tiles = slots * x.num_heads_k * c.splits * row_tiles;
    const sm90::FwdTile t = packed_tile(r, d, rows);
    Launch& l = p.push(main_of(KernelId::kFwdPacked90, dim, dim, t.block_m(), t.block_n, t.kv_stages / 2, t.threads(),
                               sm90::packed_smem_bytes(dim, t.shares_keys), tiles, d.num_sms));
    const bool modified = r.modifiers != nullptr;
    if (modified) l.kernel = KernelId::kFwdPackedMod90;
    if (quantized) {
      const sm90::ConvertedTile converted = sm90::converted_tile(dim, t.shares_keys, modified);
      l.kernel = modified ? KernelId::kFwdPackedQuantizedMod90 : KernelId::kFwdPackedQuantized90;
      l.stages = converted.raw_stages / 2, l.threads = converted.threads(), l.smem_bytes = converted.smem_bytes(dim);
    }
    l.grid.shared = p.split_kv.group;
    l.grid.blocks = static_cast<uint32_t>(row_tiles);
    set_dynamic(p, l, true);  // lengths differ, and nobody knows them here
    l.rows = many;
    l.cache_type = r.cache_type;
  } else if (larger) {
    push_tile(64, many);
  }
  push_merge(x, size, narrow_rows, p);
  return others;
}

}  // namespace

bool supports_cached(Req r, Dev) {
  return r.modifiers == nullptr && r.cache_type == CacheType::k16Bit && !r.has_latents;
}
bool supports_cached_mod(Req r, Dev) {
  return r.modifiers != nullptr && r.cache_type == CacheType::k16Bit && !r.has_latents;
}
bool supports_quantized(Req r, Dev) { return is_quantized(r); }
bool supports_cached_tma(Req r, Dev d) { return supports_cached(r, d) && tma_fwd(r) && cached_rows(r) > kLargerRows; }
// No part has more keys than a stretch, and tiles have numbers of 32 bits.
static bool supports_packed_tiles(Req r, Dev d) {
  const Problem& x = r.problem;
  const int64_t rows = cached_rows(r);
  if (!tma_fwd(r) || rows <= kNarrowRows) return false;
  if (x.num_heads / x.num_heads_k > packed_tile(r, d, rows).block_m()) return false;
  const int64_t tiles = (int64_t{2} + x.batch) * x.num_heads_k * packed_row_tiles(r, d, rows);
  return tiles <= INT32_MAX / kMaxSplits && r.cache->max_keys <= int64_t{kMaxSplits} * sm90::kStretches.above;
}
bool supports_packed(Req r, Dev d) {
  return supports_cached(r, d) && supports_packed_tiles(r, d) && cached_rows(r) <= most_packed_rows(r.problem);
}
// Beside modifiers and converters, outputs of 256 columns have no registers. No other kernel for Hopper takes more
// rows.
static bool supports_packed_rows(Req r, Dev d) {
  if (split_padded(r.problem) > 128) return false;
  const bool is_divided = cached_rows(r) <= most_packed_rows(r.problem);
  return supports_packed_tiles(r, d) && (is_divided || r.cache->max_keys <= sm90::kStretches.above);
}
bool supports_packed_mod(Req r, Dev d) { return supports_cached_mod(r, d) && supports_packed_rows(r, d); }
bool supports_packed_quantized(Req r, Dev d) {
  if (!supports_quantized(r, d) || (r.has_slot_factors && !holds_any_factor(r.problem.dtype))) return false;
  return supports_packed_rows(r, d);
}
// Which kernel takes a sequence must not follow from the longest one of the call.
bool prefers_packed_cached(Req, Dev d) { return !d.batch_invariant; }

// Latents are one head, so rows are many where queries are few. Up to 8 queries of 128 heads have their keys in parts;
// in the batch-invariant mode, which has as many parts as the cache has room for, up to 2, to bound what they take.
int64_t divided_latent_rows(Dev d) { return d.batch_invariant ? 256 : 1024; }

// CTAs that share out the tiles of a sequence and a part, as packed_row_tiles().
int64_t latent_row_tiles(Req r, Dev d) {
  constexpr int kWaves = 4, kRows = sm90::LatentTile::kRows;
  const int64_t rows = cached_rows(r), tiles = (rows + kRows - 1) / kRows, most = divided_latent_rows(d) / kRows;
  return std::min(tiles, std::max(most, kWaves * d.num_sms / std::max<int64_t>(1, r.problem.batch)));
}

bool supports_latents(Req r, Dev d) {
  const Problem& x = r.problem;
  const int64_t tiles = (int64_t{2} + x.batch) * latent_row_tiles(r, d);
  if (tiles > INT32_MAX / kMaxSplits) return false;
  const bool fits = x.head_dim == sm90::LatentTile::kHeadDim && x.head_dim_v == sm90::LatentTile::kHeadDimV;
  return r.has_latents && r.modifiers == nullptr && fits && x.num_heads_k == 1 && tma_fwd(r) &&
         x.total_q * x.num_heads <= 1 << 30;  // TMA counts rows of all heads in 32 bits
}
void build_latents(Req r, Dev d, Plan& p) {
  using Tile = sm90::LatentTile;
  constexpr int kLeastKeys = 256;
  const Problem& x = r.problem;
  const int64_t rows = cached_rows(r), row_tiles = latent_row_tiles(r, d);
  const int64_t keys = keys_of_parts(r, rows / x.num_heads);
  KvCacheGrid c;
  c.rows = static_cast<int>(std::min(rows, divided_latent_rows(d)));
  c.queries = std::max(1, c.rows / x.num_heads);
  c.part_rows = int64_t{1} * x.batch * c.rows;
  c.tile_rows = Tile::kRows, c.block_n = c.narrow_block_n = Tile::kKeys;
  c.scaled_maxima = true;
  if (!set_fixed_parts(r, d, keys, c)) {
    const int64_t items = std::max<int64_t>(1, x.batch * row_tiles), sms = std::max(1, d.num_sms);
    const double weight = Tile::kHeadDim * 2 / 512., bytes = 4. * static_cast<double>(c.part_rows) * x.head_dim_v;
    const int64_t splits = best_parts(items, (keys + 63) / 64, 16, weight, bytes, sms, 1).parts;
    set_parts(r, keys, items, splits, 2 * sms, std::min(2 * sms / items, keys / kLeastKeys), c);
  }
  c.least_keys = c.keys_of_part > 0 ? 0 : kLeastKeys;
  divide_keys(x, c, p);
  const int64_t slots = x.batch + (x.is_varlen() ? 2 : 0);
  Launch& l =
      p.push(main_of(KernelId::kFwdLatent90, Tile::kHeadDim, Tile::kHeadDimV, Tile::kRows, Tile::kKeys, Tile::kKvStages,
                     Tile::kThreads, Tile::kSmemBytes, slots * c.splits * row_tiles, d.num_sms));
  l.grid.shared = p.split_kv.group;
  l.grid.blocks = static_cast<uint32_t>(row_tiles);
  set_dynamic(p, l, true);
  push_merge(x, 256, 0, p);
}

void build_packed(Req r, Dev d, Plan& p) { push_few_cached(r, d, false, p, Larger::kPacked); }

// Without a cache, where all sequences are equally long.
bool supports_packed_dense(Req r, Dev d) {
  if (r.problem.is_varlen() && r.problem.batch != 1) return false;
  const KvCache keys = cache_of(r.problem);
  Request of_cache = r;
  of_cache.cache = &keys;
  return supports_packed(of_cache, d);
}
void build_packed_dense(Req r, Dev d, Plan& p) {
  const KvCache keys = cache_of(r.problem);
  Request of_cache = r;
  of_cache.cache = &keys;
  build_packed(of_cache, d, p);
}

void build_cached_hopper(Req r, Dev d, Plan& p) { push_longer_hopper(r, d, push_few_cached(r, d, true, p), p); }
void build_cached_portable(Req r, Dev d, Plan& p) {
  const bool has_longer = cached_rows(r) > kLargerRows;
  const RowRange others = push_few_cached(r, d, has_longer, p);
  if (has_longer) push_longer_portable(r, d, others, p);
}
// CTAs of parts share out the tiles of longer sequences.
void build_cached_mod(Req r, Dev d, Plan& p) { push_few_cached(r, d, false, p); }
void build_quantized(Req r, Dev d, Plan& p) { push_few_cached(r, d, false, p); }

}  // namespace flash_ext::plans
