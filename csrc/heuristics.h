// Tile shapes and shared-memory sizes, for the host and the kernels alike. No CUDA, no torch.
//
// Two shared-memory classes: kLarge wants the 227 KB a Hopper CTA may use, kSmall fits the 99 KB of sm_86,
// sm_89 and sm_120 (and runs everywhere).
#pragma once

#include <algorithm>
#include <cstdint>

#include "params.h"

namespace flash_ext {

enum class SmemClass : int { kSmall = 0, kLarge = 1 };

inline constexpr int kSmemLimitSmall = 101376;  // 99 KB
inline constexpr int kSmemLimitLarge = 232448;  // 227 KB
inline constexpr int kModStatic = 3072;         // what kernels with modifiers declare statically, at most

constexpr int smem_limit(SmemClass c) { return c == SmemClass::kLarge ? kSmemLimitLarge : kSmemLimitSmall; }

// Compiled head dims; a request runs in the smallest one that holds both head_dim and head_dim_v.
inline constexpr int kHeadDims[] = {64, 96, 128, 192, 256};

constexpr int padded_head_dim(int head_dim, int head_dim_v) {
  const int d = head_dim > head_dim_v ? head_dim : head_dim_v;
  for (int size : kHeadDims) {
    if (d <= size) return size;
  }
  return 0;
}

// Large tiles exist in the sm_90a machine code only; newer GPUs run the PTX of sm_80, which has the small ones.
constexpr SmemClass smem_class(int cc_major, int smem_per_block) {
  return cc_major == 9 && smem_per_block >= kSmemLimitLarge ? SmemClass::kLarge : SmemClass::kSmall;
}

// Forward on sm_80: warps split the rows of the Q tile, each holding m_blocks x 16 of them.
struct FwdTile {
  int block_m;
  int block_n;
  int warps;
  int stages;  // K/V buffers
  int ctas_per_sm;
  int keys_at_a_time = 0;  // whose scores a warp holds; 0: all of the tile
  int own_v_stages = 0;    // buffers of V where they are fewer than those of K; 0: as many

  constexpr int part_n() const { return keys_at_a_time > 0 ? keys_at_a_time : block_n; }
  constexpr int threads() const { return warps * 32; }
  constexpr int m_blocks() const { return block_m / (16 * warps); }
  constexpr int v_stages() const { return own_v_stages > 0 ? own_v_stages : stages; }
  constexpr int smem_bytes(int d) const { return 2 * d * (block_m + (stages + v_stages()) * block_n); }
};

// More than `above` keys are taken in stretches that begin at multiples of `keys`. Tensor cores cut off what does not
// fit their sums, to which they add 16 keys at a time. Between stretches output, maximum and sum of a row are kept in
// memory, where ordinary fp32 additions bring them together (docs/kernels.md#very-many-keys).
struct Stretches {
  int above;
  int keys;
};
// Each CTA of the grid has a place, 1 GB for a million rows of 256 columns: so for lengths at which the error shows,
// and not for more rows than this, over all heads.
inline constexpr Stretches kStretchesSm80{1 << 19, 1 << 16};
inline constexpr int64_t kStretchRowsSm80 = 1 << 18;
constexpr int kept_floats_sm80(const FwdTile& t, int d) {  // of a CTA
  return t.threads() * t.m_blocks() * (d / 2 + 4);
}

// In stretches a large tile leaves no register for their ends.
constexpr FwdTile fwd_tile_sm80(int d, SmemClass c, bool in_stretches = false) {
  const bool large = c == SmemClass::kLarge && !in_stretches;
  switch (d) {
    // 32 rows a warp where the registers allow it: every K/V fragment then feeds two mma, which halves the
    // shared-memory reads per FLOP.
    case 64: return {128, large ? 96 : 64, 4, 2, 2};
    case 96: return {128, 64, 4, large ? 2 : 1, 2};
    case 128: return {128, large ? 64 : 32, 4, 2, 2};
    // 16 rows a warp: the output alone takes head_dim / 2 registers per 16 rows.
    case 192: return large ? FwdTile{128, 64, 8, 2, 1} : FwdTile{64, 32, 4, 2, 1};
    default: return large ? FwdTile{64, 64, 4, 1, 2} : FwdTile{64, 32, 4, 2, 1};
  }
}

// What a kernel with modifiers is compiled for beside masks and sinks. Code that does not run costs, too.
enum class FwdModKind {
  kHides,    // nothing
  kDrops,    // dropout
  kChanges,  // softcap up to 100, slopes, a bias that can be staged
  kEverything,
};

// Where there is a kernel for each kind; elsewhere one holds everything. At 64 and 96 they would take
// 26 s to compile, for GPUs whose calls run in the kernels for Hopper.
constexpr bool has_fwd_mod_kinds(int d, SmemClass c) { return c == SmemClass::kLarge && d == 128; }

// With modifiers: scores of 32 rows and 64 keys leave too few registers for everything that may be asked of them, and
// enough for one kind.
constexpr FwdTile fwd_mod_tile_sm80(int d, SmemClass c, FwdModKind kind = FwdModKind::kEverything) {
  const bool large = c == SmemClass::kLarge;
  const bool everything = kind == FwdModKind::kEverything;
  switch (d) {
    case 64: return {128, 64, 4, 2, 2};
    case 96: return {128, large ? 64 : 32, 4, 2, 2, 32};
    case 128:
      if (everything) return {128, large ? 64 : 32, 4, 2, 2, 32};
      // The bias takes the room of a buffer of V.
      return {128, 64, 4, 2, 2, 0, kind == FwdModKind::kChanges ? 1 : 2};
    case 256: return large ? FwdTile{64, 32, 4, 2, 2} : FwdTile{64, 32, 4, 1, 1};
    default: return fwd_tile_sm80(d, c);
  }
}

// Backward over keys on sm_80: a CTA owns block_n keys, `key_warps` groups of 16 * key_blocks. A group is one
// warp, or with `paired` two: the first computes P and dV, the second dS and dK, because dK and dV together
// would not fit the registers of one.
struct BwdTile {
  int block_m;
  int key_warps;
  int key_blocks;
  bool paired;
  int part_m;  // queries a warp takes at a time
  int stages;  // Q/dO buffers
  int dq_warps_m;  // dQ's rows are split over this many warps, its columns over key_warps / dq_warps_m
  int ctas_per_sm;

  constexpr int warps() const { return paired ? 2 * key_warps : key_warps; }
  constexpr int threads() const { return 32 * warps(); }
  constexpr int block_n() const { return key_warps * 16 * key_blocks; }
  constexpr int p_bytes() const { return paired ? 4 * block_n() * block_m : 0; }  // fp32, between the two of a pair
  constexpr int ds_bytes() const { return 2 * block_n() * block_m; }              // one buffer
  constexpr int mask_bytes() const { return stages * block_m * block_n() / 8; }   // with modifiers: a bit a score
  constexpr int smem_bytes(int d) const {
    return 4 * d * block_n() + stages * (4 * d * block_m + 8 * block_m) + p_bytes() + 2 * ds_bytes();
  }
};

constexpr BwdTile bwd_tile_sm80(int d, SmemClass c) {
  const bool large = c == SmemClass::kLarge;
  switch (d) {
    case 64: return large ? BwdTile{64, 4, 2, false, 32, 2, 2, 2} : BwdTile{32, 4, 1, false, 32, 2, 2, 1};
    case 96: return large ? BwdTile{64, 4, 2, true, 64, 2, 2, 1} : BwdTile{32, 2, 2, true, 32, 2, 2, 1};
    case 128: return large ? BwdTile{64, 4, 2, true, 64, 2, 2, 1} : BwdTile{32, 4, 1, true, 32, 2, 2, 1};
    case 192: return large ? BwdTile{64, 4, 1, true, 32, 2, 2, 1} : BwdTile{32, 2, 1, true, 32, 2, 2, 1};
    default: return large ? BwdTile{64, 4, 1, true, 64, 2, 2, 1} : BwdTile{32, 2, 1, true, 32, 1, 2, 1};
  }
}

// With modifiers: always pairs, so that a warp holds one gradient beside the scores and their derivative, and 32
// queries at a time.
constexpr BwdTile bwd_mod_tile_sm80(int d, SmemClass c) {
  const bool large = c == SmemClass::kLarge;
  switch (d) {
    case 64: return large ? BwdTile{64, 4, 2, true, 32, 2, 2, 1} : BwdTile{32, 4, 1, true, 32, 2, 2, 1};
    case 96:
    case 128: return large ? BwdTile{64, 4, 2, true, 32, 2, 2, 1} : bwd_tile_sm80(d, c);
    case 256: return large ? BwdTile{32, 4, 1, true, 32, 2, 2, 1} : bwd_tile_sm80(d, c);
    default: return bwd_tile_sm80(d, c);
  }
}

// Backward over queries (dQ of the deterministic mode): 16 rows a warp, K/V streamed. Fits 99 KB throughout.
struct BwdQTile {
  int block_n;
  int warps;
  int stages;

  constexpr int threads() const { return warps * 32; }
  constexpr int block_m() const { return 16 * warps; }
  constexpr int smem_bytes(int d) const { return 4 * d * (block_m() + stages * block_n); }
};

constexpr BwdQTile bwd_q_tile_sm80(int d) {
  switch (d) {
    case 64: return {64, 8, 2};
    case 96: return {64, 4, 2};
    case 128: return {32, 4, 2};
    case 192: return {32, 4, 2};
    default: return {32, 4, 1};
  }
}

// Fewer keys at a time, or tiles in flight, where the derivative of a softcap takes the registers.
constexpr BwdQTile bwd_q_mod_tile_sm80(int d) {
  return d == 96 ? BwdQTile{32, 4, 2} : d == 192 ? BwdQTile{32, 4, 1} : bwd_q_tile_sm80(d);
}

// Bytes of the bias that `warps` warps stage, `rows` x `cols` each (common/bias_stage.cuh); 0 where it does not fit.
constexpr int bias_stage_bytes(int warps, int rows, int cols, int used, int limit) {
  const int bytes = warps * rows * (2 * cols + 16);
  return used + bytes <= limit - kModStatic ? bytes : 0;
}

// What the backward over keys has behind the tiles with modifiers: a staged bias, words of a bit mask.
constexpr int bwd_mod_extra_sm80(int d, SmemClass c) {
  const BwdTile t = bwd_mod_tile_sm80(d, c);
  const int used = t.smem_bytes(d) + t.mask_bytes();
  return t.mask_bytes() + bias_stage_bytes(t.key_warps, t.block_m, 16 * t.key_blocks, used, smem_limit(c));
}

// The passes around a backward (passes/bwd_passes.cuh): so many neighbouring lanes have a row, 8 elements each.
inline constexpr int kPassThreads = 256;
constexpr int pass_lanes(int d) { return d <= 64 ? 8 : d <= 128 ? 16 : 32; }
inline constexpr int kHeadSumThreads = 256;   // a thread adds four columns of a row over all GQA splits

// Gradient of a bias: the scores of a tile of queries and keys again, in slices of their columns. A warp holds 32
// queries x warp_n keys of S, of dP and of the sum: 3 x warp_n registers.
struct BwdBiasTile {
  int warps_m;
  int warps_n;
  int warp_n;
  int stages;  // slices of Q and K, or of dO and V
  int ctas_per_sm;

  static constexpr int kSlice = 64;                    // columns
  static constexpr int kSteps = 64, kStepBytes = 136;  // found ahead
  constexpr int warps() const { return warps_m * warps_n; }
  constexpr int threads() const { return 32 * warps(); }
  constexpr int block_m() const { return 32 * warps_m; }
  constexpr int block_n() const { return warp_n * warps_n; }
  constexpr int slice_bytes() const { return 2 * kSlice * (block_m() + block_n()); }
  constexpr int bias_bytes() const { return 2 * bias_stage_bytes(warps(), 32, warp_n, 0, kSmemLimitLarge); }
  constexpr int mask_bytes() const { return 4 * block_m() * block_n() / 32; }
  constexpr int sums_bytes() const { return 4 * std::max(warps_m * block_n(), warps_n * block_m()); }
  constexpr int smem_bytes() const {
    return stages * slice_bytes() + bias_bytes() + 2 * (8 * block_m() + mask_bytes()) + sums_bytes() +
           kSteps * kStepBytes;
  }
};

constexpr BwdBiasTile bwd_bias_tile_sm80(SmemClass c) {
  return c == SmemClass::kLarge ? BwdBiasTile{4, 2, 64, 4, 1} : BwdBiasTile{2, 2, 32, 3, 2};
}

// Forward for few queries of many keys: four warps hold 16 packed rows each (query heads of one key head times
// queries), the same rows where there are few. Warps with the same rows share out the keys, those with the same keys
// share a ring in shared memory, in which tiles of K and V alternate.
struct SplitTile {
  int rows;    // 16 or 64
  int keys;    // of one tile of the ring
  int stages;  // tiles in the ring, K and V counted apart
  int element_bytes = 2;

  static constexpr int kWarps = 4, kThreads = 32 * kWarps;
  static constexpr int kOutPad = 8;  // columns, against bank conflicts
  constexpr int row_warps() const { return rows / 16; }
  constexpr int key_warps() const { return kWarps / row_warps(); }
  constexpr int block_n() const { return keys * key_warps(); }
  constexpr int out_bytes(int d) const { return 4 * 16 * kWarps * (d + kOutPad); }  // fp32, over the rings
  constexpr int smem_bytes(int d) const { return std::max(element_bytes * d * block_n() * stages, out_bytes(d)); }
};

inline constexpr int kSplitHeadDims[] = {64, 128, 256};
inline constexpr int kMaxSplits = 256;
// Columns that the kernel which adds parts up has in its smaller instance.
inline constexpr int kMergedColumns = 256;

constexpr int padded_split_head_dim(int head_dim, int head_dim_v) {
  const int d = std::max(head_dim, head_dim_v);
  return d <= 64 ? 64 : d <= 128 ? 128 : 256;
}

// 64 KB on the way cover a latency of 2 us at a multiprocessor's share of 4.2 TB/s; at 256 there are no registers for
// more keys a tile. Evidence: split-kv.
constexpr SplitTile split_tile(int d, int rows) {
  if (rows <= 16) return d == 256 ? SplitTile{16, 16, 3} : SplitTile{16, 32, d == 64 ? 5 : 3};
  return d == 256 ? SplitTile{64, 16, 12} : SplitTile{64, 64, d == 64 ? 8 : 5};
}

// The same for a cache of 8 bits: as many bytes on the way.
constexpr SplitTile quantized_tile(int d, int rows) {
  if (rows <= 16) return d == 256 ? SplitTile{16, 16, 6, 1} : SplitTile{16, 64, d == 64 ? 5 : 3, 1};
  return d == 256 ? SplitTile{64, 16, 12, 1} : SplitTile{64, 64, d == 64 ? 12 : 9, 1};
}

constexpr bool tiles_fit(SmemClass c, int limit) {
  for (int d : kHeadDims) {
    if (fwd_tile_sm80(d, c).smem_bytes(d) > limit || bwd_tile_sm80(d, c).smem_bytes(d) > limit ||
        bwd_q_tile_sm80(d).smem_bytes(d) > kSmemLimitSmall) {
      return false;
    }
    if (fwd_mod_tile_sm80(d, c).smem_bytes(d) > limit - kModStatic ||
        bwd_mod_tile_sm80(d, c).smem_bytes(d) + bwd_mod_tile_sm80(d, c).mask_bytes() > limit - kModStatic ||
        bwd_q_mod_tile_sm80(d).smem_bytes(d) > kSmemLimitSmall - kModStatic ||
        bwd_bias_tile_sm80(c).smem_bytes() > limit - kModStatic) {
      return false;
    }
  }
  return true;
}
constexpr bool split_tiles_fit() {
  for (int d : kSplitHeadDims) {
    if (split_tile(d, 16).smem_bytes(d) > kSmemLimitSmall - 1024) return false;
    if (split_tile(d, 64).smem_bytes(d) > kSmemLimitSmall - 1024) return false;
    if (quantized_tile(d, 16).smem_bytes(d) > kSmemLimitSmall - 1024) return false;
    if (quantized_tile(d, 64).smem_bytes(d) > kSmemLimitSmall - 1024) return false;
  }
  return true;
}
static_assert(split_tiles_fit());
static_assert(tiles_fit(SmemClass::kSmall, kSmemLimitSmall));
static_assert(tiles_fit(SmemClass::kLarge, kSmemLimitLarge));

// Tile slots that hold every tile of a packed batch, whatever its lengths (common/seqlen.cuh tells why).
constexpr int64_t packed_slots(int64_t total, int batch, int block) { return total / block + batch + 2; }

// How many (batch, head) pairs run side by side before the grid moves on: as many as keep their K and V,
// read by every query tile, inside half of the L2 cache.
constexpr int heads_per_group(int64_t head_slots, int64_t bytes_per_head, int64_t l2_bytes) {
  const int64_t fit = std::max<int64_t>(1, l2_bytes / 2 / std::max<int64_t>(1, bytes_per_head));
  return static_cast<int>(std::min(head_slots, fit));
}

}  // namespace flash_ext
