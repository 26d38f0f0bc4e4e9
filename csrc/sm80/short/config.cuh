// What the kernels of short sequences share: which heads a CTA walks, and a bias that stays for all of them.
#pragma once

#include <algorithm>

#include "../../common/dropout.cuh"
#include "../../common/float_results.cuh"
#include "../../common/fragments.cuh"
#include "../../common/hide.cuh"
#include "../../common/own_bias.cuh"
#include "../../mask_kinds.h"
#include "../../short_tiles.h"

namespace flash_ext::sm80 {

// The bias of a group of heads. kAhead: bytes for one that comes ahead.
template <int R, int kAhead>
struct ShortBias : OwnBias<2 * R, R / 8> {
  using Own = OwnBias<2 * R, R / 8>;
  static constexpr bool kTakesAll = true;
  static_assert(Own::kBytes == ShortTile{R, 0}.bias());

  template <typename E>
  __device__ static void load(uint32_t stage, const Problem& p, const BiasView& x, int b, int h) {
    const int thread = ptx::fresh_thread_idx(), lane = thread % 32;
    Own::template load<E>(stage, thread, x, b, h, thread / 32 * 16 + lane / 4, 2 * (lane % 4), min(x.rows, p.seqlen_q),
                          min(x.cols, p.seqlen_k));
  }

  // Whether the bias of a head fits as it lies into the place for one that comes ahead. Loaded when its head
  // begins, the bias is what all wait for. Evidence: short.
  __device__ static bool comes_ahead(const BiasView& x, const Problem& p, const ShortGrid& g) {
    return kAhead > 0 && x.ptr != nullptr && g.items == 1 && !x.is_float && x.col_stride == 1 &&
           bytes_of(x, p) + 16 <= kAhead;
  }

  // Whole 16 bytes from those on in which the bias begins; no byte behind its end.
  __device__ static void load_ahead(uint32_t to, const Problem& p, const BiasView& x, int b, int h) {
    const char* const first = head_of(x, b, h);
    const int behind = behind_16(first), bytes = behind + static_cast<int>(bytes_of(x, p));
    for (int at = 16 * ptx::fresh_thread_idx(); at < bytes; at += 16 * 2 * R) {
      ptx::cp_async_16(to + at, first - behind + at, min(16, bytes - at));
    }
  }

  // What load() does, from where load_ahead() has put it.
  template <typename E>
  __device__ static void take(uint32_t stage, const unsigned char* from, const Problem& p, const BiasView& x, int b,
                              int h) {
    BiasView here = x;
    here.ptr = from + behind_16(head_of(x, b, h));
    here.is_float = false;
    here.col_stride = 1;
    load<E>(stage, p, here, 0, 0);
  }

  // acc = acc * scale + bias.
  template <typename E, bool kT, int kN>
  __device__ static void add(float (&acc)[1][kN][4], float scale, uint32_t stage) {
    static_assert(!kT && kN == R / 8);
#pragma unroll
    for (int n = 0; n < kN; ++n) {
      const float4 bias = ptx::load_shared(Own::at(stage, ptx::fresh_thread_idx(), n));
      acc[0][n][0] = fmaf(acc[0][n][0], scale, bias.x);
      acc[0][n][1] = fmaf(acc[0][n][1], scale, bias.y);
      acc[0][n][2] = fmaf(acc[0][n][2], scale, bias.z);
      acc[0][n][3] = fmaf(acc[0][n][3], scale, bias.w);
    }
  }

 private:
  __device__ static const char* head_of(const BiasView& x, int b, int h) {
    return static_cast<const char*>(x.ptr) + 2 * (b * x.batch_stride + h * x.head_stride);
  }
  __device__ static int behind_16(const char* at) { return static_cast<int>(reinterpret_cast<uintptr_t>(at) % 16); }
  // From the first element to behind the last.
  __device__ static int64_t bytes_of(const BiasView& x, const Problem& p) {
    return 2 * ((min(x.rows, p.seqlen_q) - 1) * x.row_stride + min(x.cols, p.seqlen_k));
  }
};

template <typename E, int D, int R>
struct ShortTraits {
  using Element = E;
  using Tile = SmemTile<D>;
  static constexpr ShortTile kSizes{R, D};
  using WeightTile = SmemTile<R>;
  using Bias = ShortBias<R, kSizes.bias_ahead()>;
  static constexpr int kRows = R, kHeadDim = D, kThreads = kSizes.threads(), kTileBytes = kSizes.tile();
  static constexpr int kFwdCtas = kSizes.fwd_ctas(), kFwdStages = kSizes.fwd_stages(), kBwdCtas = kSizes.bwd_ctas();
  // Of the backward: Q, K, V and dO come first.
  static constexpr int kPAt = 4 * kTileBytes, kDsAt = kPAt + kSizes.weights();
  static constexpr int kStatsAt = kPAt + kSizes.o_or_weights(), kBiasAt = kStatsAt + 8 * R;

  // acc[16 rows][R keys] = A B^T. a_lane is by_rows, b_lane by_cols.
  __device__ static void multiply(float (&acc)[1][R / 8][4], uint32_t a_lane, uint32_t b_lane) {
    multiply_transposed<E, D, 2>(acc, a_lane, b_lane);
  }
};

// Where a CTA is on its walk, and what comes next.
struct ShortWalk {
  int group, item;

  ShortWalk() = default;

  __device__ explicit ShortWalk(const ShortGrid& g) {
    group = static_cast<int>(divide(blockIdx.x, g.part_count));
    item = part(g);
  }
  __device__ static int part(const ShortGrid& g) {
    return static_cast<int>(blockIdx.x) - static_cast<int>(divide(blockIdx.x, g.part_count)) * g.parts;
  }
  __device__ bool has_head(const ShortGrid& g) const { return group < g.groups; }
  __device__ bool begins_group(const ShortGrid& g) const { return item < g.parts; }
  __device__ bool ends_group(const ShortGrid& g) const { return item + g.parts >= g.items; }
  __device__ void next(const ShortGrid& g) {
    const bool ends = ends_group(g);
    item = ends ? part(g) : item + g.parts;
    group += ends ? g.group_step : 0;
  }

  struct Head {
    int b, h;
    int bias_b, bias_h;  // entry of the bias
  };
  __device__ Head head(const ShortGrid& g) const {
    Head x;
    x.bias_b = static_cast<int>(divide(static_cast<uint32_t>(group), g.bias_head_count));
    x.bias_h = group - x.bias_b * g.bias_heads;
    const int entry = static_cast<int>(divide(static_cast<uint32_t>(item), g.heads));
    x.b = g.shares_batch ? entry : x.bias_b;
    x.h = g.bias_heads == 1 ? item - entry * static_cast<int>(g.heads.divisor) : x.bias_h;
    return x;
  }
};

// Which tests scores need: rows and keys that are no more are hidden like any other, so there is always the first.
__device__ __forceinline__ TileTests short_tests(const Modifiers& m) {
  TileTests tests = kTestInterval;
  if (asks_any<kKnownByRows>(m)) tests |= kTestRows;
  if (asks_any<kKnownByKeys>(m)) tests |= kTestKeys;
  return tests;
}

__device__ __forceinline__ SeqInfo short_seq_info(const Problem& p, const Modifiers& m, int b) {
  const int prefix = m.prefix_lens == nullptr ? 0 : min(max(m.prefix_lens[b], 0), p.seqlen_k);
  return {b, p.seqlen_q, p.seqlen_k, 0, 0, prefix};
}

// Loads rows of a head; those beyond the last are 0.
template <typename T>
__device__ __forceinline__ void load_short(uint32_t tile, const StridedView& x, int b, int h, int rows, int columns) {
  const TileSource source{row_pointer(x, b, 0, h), x.row_stride, columns, x.aligned};
  load_tile<T::kRows, T::kHeadDim, T::kThreads>(tile, source, rows, ptx::fresh_thread_idx());
}

// Scores of this warp's queries, hidden ones -inf. put_slope: ScoreMod::modify().
template <typename T, typename PutSlope>
__device__ __forceinline__ void short_scores(float (&acc)[1][T::kRows / 8][4], const ScoreMod& score_mod,
                                             uint32_t q_lane, uint32_t k_lane, uint32_t bias,
                                             const PutSlope& put_slope) {
  using E = typename T::Element;
  const int row0 = ptx::fresh_thread_idx() / 32 * 16;
  const TileTests tests = short_tests(score_mod.m);
  const auto words = fetch_mask<16, T::kRows>(score_mod, row0, 0, tests);
  T::multiply(acc, q_lane, k_lane);
  score_mod.template modify<E, false, typename T::Bias>(acc, row0, 0, bias, put_slope);
  hide(acc, score_mod, row0, 0, tests, words);
}

// Rounds 16 rows of a warp into their rows of a tile that nobody else reads any more, and stores them.
template <typename E, int D>
__device__ __forceinline__ void store_short(float (&acc)[D / 8][4], const StridedView& to, int b, int h, int rows,
                                            int columns, uint32_t tile) {
  if (to.ptr == nullptr) return;  // not wanted
  const int lane = ptx::fresh_lane(), row0 = ptx::fresh_thread_idx() / 32 * 16;
  if (to.is_float) {
    store_float_rows<D / 8, false>(to, b, Span{0, rows}, h, row0 + lane / 4, columns, lane,
                                   [&](int j, int i) { return acc[j][i]; });
    return;
  }
  using Tile = SmemTile<D>;
  const uint32_t at = Tile::by_rows(tile, lane) + row0 * Tile::kRowBytes;
#pragma unroll
  for (int db = 0; db < D / 16; ++db) put_block<E>(Tile::block(at, 0, db), acc[2 * db], acc[2 * db + 1], lane);
  __syncwarp();
  store_tile<16, D, 32>(TileDestination{row_pointer(to, b, 0, h), to.row_stride, columns, to.aligned}, tile, row0, rows,
                        lane);
  __syncwarp();
}

}  // namespace flash_ext::sm80
