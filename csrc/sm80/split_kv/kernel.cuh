// Forward for few queries of many keys, for sm_80 and newer: the keys of a head are shared out over CTAs ("flash
// decoding", Dao et al. 2023), and query heads of a key head are rows of one tile, so that K and V are read once.
//
// A CTA has kRows packed rows (query i and head j of the group are row i * group + j) and one part of the keys. Of its
// four warps, those with the same 16 rows share out the keys, those with the same keys share a ring of tiles in shared
// memory, K and V by turns: four warps of 16 rows each have a ring of their own and never wait for one another.
//
// Shared memory (bytes, D = padded head_dim):
//   rings  [kKeyWarps][kStages][kKeys][D]          2 D kKeys kStages kKeyWarps
//   then over them, when the keys are done, fp32: [kKeyWarps][kRows][D + 8]
//
// With one part the result leaves directly. Otherwise each part leaves its maximum, sum and output before the division,
// all fp32, and fwd_merge_kernel (merge.cuh) puts them together in the order of the parts: bits do not depend on
// timing.
#pragma once

#include "../../common/attn_mod.cuh"
#include "../../common/debug_delay.cuh"
#include "../../common/float_results.cuh"
#include "../../common/fragments.cuh"
#include "../../common/softmax.cuh"
#include "rows.cuh"

namespace flash_ext::sm80 {

template <typename T>
struct HeldOperands;

template <typename E, int D, int kPackedRows>
struct SplitTraits {
  using Element = E;
  using Operands = HeldOperands<SplitTraits>;
  static constexpr int kHeadDim = D;
  static constexpr SplitTile kTile = split_tile(D, kPackedRows);
  static constexpr int kRows = kTile.rows, kKeys = kTile.keys, kStages = kTile.stages, kBlockN = kTile.block_n();
  static constexpr int kRowWarps = kTile.row_warps(), kKeyWarps = kTile.key_warps(), kThreads = SplitTile::kThreads;
  static constexpr int kSharing = 32 * kRowWarps;  // threads of a ring
  static constexpr int kStageBytes = 2 * D * kKeys, kRingBytes = kStages * kStageBytes;
  static constexpr int kOutPitch = D + SplitTile::kOutPad;  // floats
  static constexpr int kAhead = 3;
  using Tile = SmemTile<D>;

  // Loaders count K and V in units of 16 bits.
  static constexpr int kLoadedDim = D;
  __device__ static int loaded(int columns) { return columns; }
};

// What a row of a part of the keys has come to; nothing seen: {-inf, 0}.
struct RowState {
  float largest;  // raw score
  float sum;

  __device__ bool is_empty() const { return largest == -INFINITY && sum == 0.f; }
  // The factor that brings it to the maximum of all parts. NaN stays NaN.
  __device__ float factor(float overall, float scale_log2) const {
    return overall == -INFINITY ? 1.f : ptx::ex2((largest - overall) * scale_log2);
  }
};

// Two neighbouring elements of a row, zeros from `columns` on.
__device__ __forceinline__ uint32_t load_pair(const uint16_t* row, int col, int columns, bool aligned) {
  if (aligned && col + 1 < columns) return *reinterpret_cast<const uint32_t*>(row + col);
  const uint32_t lo = col < columns ? row[col] : 0, hi = col + 1 < columns ? row[col + 1] : 0;
  return lo | hi << 16;
}

// Rows warp_row + 8 half + 0 .. 7 of Q for A operands, straight from global memory: once a CTA, and the rings leave no
// room for them. Of the pairs of 16 columns a lane has two, kApart columns from each other.
template <typename T, int kApart>
__device__ __forceinline__ void load_half_of_queries(uint32_t (&q)[T::kHeadDim / 16][4], const FwdParams& p,
                                                     const SplitGrid& g, const SplitWork& w, int warp_row, int half,
                                                     int lane) {
  const int r = warp_row + 8 * half + lane / 4;
  const RowPlace place = place_of(w, g, w.first + min(r, w.rows - 1));
  const uint16_t* row = row_pointer(p.q, place.b, place.row, place.h);
  const int columns = r < w.rows ? p.problem.head_dim : 0;
#pragma unroll
  for (int ks = 0; ks < T::kHeadDim / 16; ++ks) {
    const int col = 16 * ks + (kApart == 8 ? 2 : 4) * (lane % 4);
    q[ks][half] = load_pair(row, col, columns, p.q.aligned);
    q[ks][2 + half] = load_pair(row, col + kApart, columns, p.q.aligned);
  }
}

// The warp's 16 rows of Q as A operands.
template <typename T>
__device__ __forceinline__ void load_queries(uint32_t (&q)[T::kHeadDim / 16][4], const FwdParams& p, const SplitGrid& g,
                                             const SplitWork& w, int warp_row, int lane) {
#pragma unroll
  for (int half = 0; half < 2; ++half) load_half_of_queries<T, 8>(q, p, g, w, warp_row, half, lane);
}

// acc[16 x 8 kN] = Q K^T with the A operands in registers; k_lane is SmemTile::by_cols.
template <typename E, int D, int kAhead, int kN>
__device__ __forceinline__ void multiply_held(float (&acc)[1][kN][4], const uint32_t (&q)[D / 16][4], uint32_t k_lane) {
  using Tile = SmemTile<D>;
  constexpr int kBlocks = kN / 2;
  clear(acc);
  stream_fragments<D / 16 * kBlocks, kAhead>(
      [&](int i, uint32_t (&b)[4]) { ptx::ldmatrix_x4(b, Tile::block(k_lane, i % kBlocks * 16, i / kBlocks)); },
      [&](int i, const uint32_t (&b)[4]) {
        const int ks = i / kBlocks, nb = i % kBlocks;
        ptx::mma_m16n8k16<E>(acc[0][2 * nb], q[ks], b[0], b[1]);
        ptx::mma_m16n8k16<E>(acc[0][2 * nb + 1], q[ks], b[2], b[3]);
      });
}

// How a warp multiplies with tiles of K and V: its rows of Q stay in registers. quantized.cuh has the same for a cache
// of 8 bits.
template <typename T>
struct HeldOperands {
  using E = typename T::Element;
  static constexpr int D = T::kHeadDim;
  uint32_t q[D / 16][4];

  __device__ void begin(const FwdParams& p, const SplitGrid& g, const SplitWork& w, int warp_row, int lane) {
    load_queries<T>(q, p, g, w, warp_row, lane);
  }
  // Tiles of keys come from `first` on.
  __device__ void expect(int first) const {}
  // Raw scores of a tile, which begins at first_of(0), as the next one at first_of(1).
  template <int kN, typename First>
  __device__ void score(float (&s)[1][kN][4], uint32_t k_lane, const First& first_of) const {
    multiply_held<E, D, T::kAhead>(s, q, k_lane);
  }
  template <int kN>
  __device__ void add(float (&acc_o)[1][D / 8][4], const float (&weights)[1][kN][4], uint32_t v_lane) const {
    multiply_accumulate<E, D, T::kAhead>(acc_o, weights, v_lane);
  }
  // One of the thread's two rows of outputs goes to `row` in shared memory.
  __device__ static void leave(const Problem&, const float (&acc_o)[1][D / 8][4], int half, float* row, int lane) {
#pragma unroll
    for (int j = 0; j < D / 8; ++j) {
      *reinterpret_cast<float2*>(row + 8 * j + lane % 4 * 2) =
          make_float2(acc_o[0][j][2 * half], acc_o[0][j][2 * half + 1]);
    }
  }
  template <typename Store>
  __device__ static void with_result_type(const Problem&, const Store& store) {
    store.template operator()<E>();
  }
};

// Stores up to 4 neighbouring columns of a result.
template <typename E>
__device__ __forceinline__ void store_quad(const StridedView& out, const RowPlace& at, int col, int columns,
                                           const float (&x)[4]) {
  const bool whole = out.aligned && columns % 4 == 0;
  if (out.is_float) {
    float* to = float_row_pointer(out, at.b, at.row, at.h) + col;
    if (whole) {
      *reinterpret_cast<float4*>(to) = make_float4(x[0], x[1], x[2], x[3]);
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (col + i < columns) to[i] = x[i];
      }
    }
    return;
  }
  uint16_t* to = row_pointer(out, at.b, at.row, at.h) + col;
  const uint2 words = make_uint2(ptx::pack2<E>(x[0], x[1]), ptx::pack2<E>(x[2], x[3]));
  if (whole) {
    *reinterpret_cast<uint2*>(to) = words;
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (col + i < columns) to[i] = static_cast<uint16_t>((i < 2 ? words.x : words.y) >> 16 * (i % 2));
    }
  }
}

// The factor for a row's output and its lse, as SoftmaxState::finish.
__device__ __forceinline__ float finish_row(const RowState& s, float scale_log2, float& lse) {
  const float shift = s.largest == -INFINITY ? 0.f : s.largest;
  lse = s.is_empty() ? -INFINITY : shift * (scale_log2 * kLn2) + logf(s.sum);
  return s.is_empty() ? 0.f : 1.f / s.sum;
}

// What a thread's two rows see, and what becomes of their scores, in calls without modifiers. mod.cuh has the other
// one.
struct PlainRules {
  AttnMod mod;
  int first_query, last_query;
  VisibleKeys keys[2];

  __device__ PlainRules(const Problem& p, const SplitWork& w, const SplitRows& rows)
      : mod{p, w.q.length, w.k.length}, first_query(rows.query(0)), last_query(rows.query(rows.last())) {}
  // `row`: the thread's first one.
  __device__ void begin(const SplitRows& rows, int row) {
#pragma unroll
    for (int half = 0; half < 2; ++half) keys[half] = mod.visible(rows.query(row + 8 * half));
  }
  __device__ BlockRange range() const { return {mod.first_key_of(first_query), mod.last_key_of(last_query) + 1}; }
  template <int kBlockN>
  __device__ int first_key(int block) const {
    return block * kBlockN;
  }
  __device__ float unit_log2() const { return mod.p.abs_scale_log2; }

  // Scores in place; those of keys that a row does not see become -inf. The tile begins at `first`.
  template <typename E, int kN>
  __device__ void score(float (&s)[1][kN][4], int first) const {
    if (mod.kind_of(first_query, last_query, first, first + 8 * kN) == TileKind::kFull) return;
    const int col = first + ptx::fresh_lane() % 4 * 2;
#pragma unroll
    for (int nb = 0; nb < kN; ++nb) {
#pragma unroll
      for (int i = 0; i < 4; ++i) s[0][nb][i] = mod.score(s[0][nb][i], keys[i / 2], col + nb * 8 + i % 2);
    }
  }
  __device__ float slack_log2() const { return SoftmaxState<2>::kSlackLog2; }
  // The exponent of a score; `shift` is the row's.
  __device__ static float exponent(float x, float scale, float shift) { return fmaf(x, scale, -shift * scale); }
  // Stores lse; returns the factor for the output.
  __device__ float finish(const FwdParams& p, const RowState& state, const RowPlace& at, bool stores) const {
    float lse;
    const float inverse = finish_row(state, mod.p.abs_scale_log2, lse);
    if (stores && p.lse != nullptr) p.lse[at.lse_offset(p.problem)] = lse;
    return inverse;
  }
};

// Turns scores into weights in place and updates the running state. The tile's keys begin at `first`.
template <typename E, typename Rules, int kN, int kD>
__device__ __forceinline__ void weigh(float (&s)[1][kN][4], float (&acc_o)[1][kD][4], SoftmaxState<2>& state,
                                      const Rules& rules, int first) {
  const float scale = rules.unit_log2();
  float largest[2] = {-INFINITY, -INFINITY}, factor[2];
  rules.template score<E>(s, first);
#pragma unroll
  for (int nb = 0; nb < kN; ++nb) {
#pragma unroll
    for (int i = 0; i < 4; ++i) largest[i / 2] = fmaxf(largest[i / 2], s[0][nb][i]);
  }
  // Most tiles raise no maximum, and then the lanes need not exchange theirs.
  const bool may_raise = (largest[0] - state.row_max[0]) * scale > rules.slack_log2() ||
                         (largest[1] - state.row_max[1]) * scale > rules.slack_log2();
  if (__any_sync(ptx::kFullWarp, may_raise) && state.raise(largest, scale, factor, rules.slack_log2())) {
#pragma unroll
    for (int j = 0; j < kD; ++j) scale_block(acc_o[0][j], factor[0], factor[1]);
  }
  const float shift[2] = {state.shift(0), state.shift(1)};
#pragma unroll
  for (int nb = 0; nb < kN; ++nb) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float& x = s[0][nb][i];
      x = ptx::ex2(Rules::exponent(x, scale, shift[i / 2]));
      state.row_sum[i / 2] += x;
    }
  }
}

__device__ __forceinline__ RowState* row_states(const FwdParams& p, const SplitGrid& g, int part) {
  return static_cast<RowState*>(p.kept) + part * g.total_rows;
}
__device__ __forceinline__ float* partial_out(const FwdParams& p, const SplitGrid& g, int part) {
  return reinterpret_cast<float*>(static_cast<char*>(p.kept) + g.stats_bytes) + part * g.total_rows * g.pitch;
}

// Adds up what the warps of the same rows have found, and stores it: the result, or that of a part. `numbers`: of the
// rows, among those that have parts.
template <typename T, typename Rules, typename Numbers>
__device__ __forceinline__ void store_rows(const FwdParams& p, const SplitGrid& g, const SplitWork& w,
                                           const Rules& rules, bool is_whole, const Numbers& numbers,
                                           const RowState (&states)[T::kKeyWarps][T::kRows], const float* out) {
  constexpr int kQuads = T::kHeadDim / 4;
  const float scale = rules.unit_log2();
  const int columns = p.problem.head_dim_v;
#pragma unroll 1
  for (int i = threadIdx.x; i < min(T::kRows, w.rows) * kQuads; i += T::kThreads) {
    const int r = i / kQuads, col = i % kQuads * 4;
    RowState all{-INFINITY, 0.f};
#pragma unroll
    for (int n = 0; n < T::kKeyWarps; ++n) all.largest = fmaxf(all.largest, states[n][r].largest);
    float x[4] = {};
#pragma unroll
    for (int n = 0; n < T::kKeyWarps; ++n) {
      const float factor = states[n][r].factor(all.largest, scale);
      all.sum += states[n][r].sum * factor;
      const float4 y = *reinterpret_cast<const float4*>(out + (n * T::kRows + r) * T::kOutPitch + col);
      x[0] += y.x * factor, x[1] += y.y * factor, x[2] += y.z * factor, x[3] += y.w * factor;
    }
    const RowPlace at = place_of(w, g, w.first + r);
    if (is_whole) {
      const float inverse = rules.finish(p, all, at, col == 0);
#pragma unroll
      for (float& y : x) y *= inverse;
      if (col < columns) {
        T::Operands::with_result_type(p.problem, [&]<typename E>() { store_quad<E>(p.out, at, col, columns, x); });
      }
    } else {
      const int64_t row = numbers(at, r);
      if (col == 0) row_states(p, g, w.part)[row] = all;
      float* to = partial_out(p, g, w.part) + row * g.pitch + col;
      if (col < columns) *reinterpret_cast<float4*>(to) = make_float4(x[0], x[1], x[2], x[3]);
    }
  }
}

// One tile of rows and the blocks of keys of one part, none where begin >= end. load_rows() copies the thread's share
// of a tile of a ring, keys from `first` on.
template <typename T, typename Rules, typename LoadRows, typename Numbers>
__device__ __forceinline__ void attend(const FwdParams& p, const SplitGrid& g, const SplitWork& w, Rules& rules,
                                       const SplitRows& rows, const BlockRange& part, const uint16_t* k,
                                       const uint16_t* v, RowState (&states)[T::kKeyWarps][T::kRows], bool is_whole,
                                       const LoadRows& load_rows, const Numbers& numbers,
                                       typename T::Operands operands = {}) {
  using E = typename T::Element;
  constexpr int D = T::kHeadDim, kKeys = T::kKeys, kStages = T::kStages;
  extern __shared__ __align__(128) unsigned char smem[];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int ring = warp / T::kRowWarps, warp_row = warp % T::kRowWarps * 16, sharing_idx = threadIdx.x % T::kSharing;
  const int begin = part.begin, end = part.end;

  const uint32_t ring_at = ptx::smem_address(smem) + ring * T::kRingBytes;
  const auto first_key = [&](int block) { return rules.template first_key<T::kBlockN>(block) + ring * kKeys; };
  const auto load = [&](const uint16_t* from, const StridedView& view, int columns, int stage, int block) {
    if (block < end) {
      load_rows(ring_at + stage * T::kStageBytes, from, view, T::loaded(columns), first_key(block), sharing_idx);
    }
    ptx::cp_async_commit();
  };
  const auto load_k = [&](int stage, int block) { load(k, p.k, p.problem.head_dim, stage, block); };
  const auto load_v = [&](int stage, int block) { load(v, p.v, p.problem.head_dim_v, stage, block); };
#pragma unroll 1
  for (int i = 0; i < kStages - 1; ++i) {  // not unrolled: each copy of the loader takes the compiler 0.1 s
    const bool is_k = i % 2 == 0;
    load(is_k ? k : v, is_k ? p.k : p.v, is_k ? p.problem.head_dim : p.problem.head_dim_v, i, begin + i / 2);
  }

  operands.begin(p, g, w, warp_row, lane);
  if (begin < end) operands.expect(first_key(begin));
  rules.begin(rows, warp_row + lane / 4);

  float acc_o[1][D / 8][4];
  clear(acc_o);
  SoftmaxState<2> state;
  const uint32_t k_lane = T::Tile::by_cols(ring_at, lane), v_lane = T::Tile::by_rows(ring_at, lane);
  int stage = 0;
  // The tile in `stage` is there, and that before it is left by all: its place is free.
  const auto wait = [&] {
    debug_delay();
    ptx::cp_async_wait<kStages - 2>();
    if constexpr (T::kKeyWarps == 1) {
      __syncthreads();
    } else {
      static_assert(T::kRowWarps == 1);
      __syncwarp();
    }
    debug_delay();
    return stage == 0 ? kStages - 1 : stage - 1;
  };
  const auto step = [&] { stage = stage == kStages - 1 ? 0 : stage + 1; };
#pragma unroll 1
  for (int block = begin; block < end; ++block) {
    const int free_k = wait();
    if constexpr (kStages % 2 == 0) load_v(free_k, block + (kStages - 1) / 2);
    else load_k(free_k, block + (kStages - 1) / 2);
    float s[1][kKeys / 8][4];
    operands.score(s, k_lane + stage * T::kStageBytes, [&](int ahead) { return first_key(block + ahead); });
    weigh<E>(s, acc_o, state, rules, first_key(block));
    step();
    const int free_v = wait();
    if constexpr (kStages % 2 == 0) load_k(free_v, block + kStages / 2);
    else load_v(free_v, block + kStages / 2);
    operands.add(acc_o, s, v_lane + stage * T::kStageBytes);
    step();
  }

  ptx::allow_next_kernel();
  debug_delay();
  ptx::cp_async_wait<0>();
  __syncthreads();  // the rings are left by all
  float* out = reinterpret_cast<float*>(smem);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int r = warp_row + 8 * half + lane / 4;
    float sum = state.row_sum[half];
    sum += __shfl_xor_sync(ptx::kFullWarp, sum, 1);
    sum += __shfl_xor_sync(ptx::kFullWarp, sum, 2);
    if (lane % 4 == 0) states[ring][r] = {state.row_max[half], sum};
    operands.leave(p.problem, acc_o, half, out + (ring * T::kRows + r) * T::kOutPitch, lane);
  }
  __syncthreads();
  store_rows<T>(p, g, w, rules, is_whole, numbers, states, out);
}

// The blocks of a part of the keys [range.begin, range.end).
template <int kBlockN>
__device__ __forceinline__ BlockRange blocks_of_part(const BlockRange& range, int part, int parts) {
  const int first = range.begin / kBlockN, blocks = range.begin < range.end ? (range.end - 1) / kBlockN + 1 - first : 0;
  const int each = (blocks + parts - 1) / parts, begin = first + part * each;
  return {begin, min(begin + each, first + blocks)};
}

// Copies rows of the keys of a dense or packed sequence.
template <typename T>
struct SequenceRows {
  int length;

  __device__ void operator()(uint32_t tile, const uint16_t* from, const StridedView& view, int columns, int first,
                             int sharing_idx) const {
    const int rows = length - first;
    const TileSource src{rows > 0 ? from + first * view.row_stride : from, view.row_stride, columns, view.aligned};
    load_tile<T::kKeys, T::kHeadDim, T::kSharing>(tile, src, rows, sharing_idx);
  }
};

template <typename T>
__global__ void __launch_bounds__(T::kThreads, 2)
    fwd_split_kernel(const __grid_constant__ FwdParams p, const __grid_constant__ SplitGrid g) {
  __shared__ RowState states[T::kKeyWarps][T::kRows];
  const SplitWork w = split_work<T::kRows>(p.problem, g);
  if (w.rows <= 0) return;
  const SplitRows rows{g, w, T::kRows};
  PlainRules rules(p.problem, w, rows);
  attend<T>(p, g, w, rules, rows, blocks_of_part<T::kBlockN>(rules.range(), w.part, g.splits),
            row_pointer(p.k, w.b, w.k.start, w.h_k), row_pointer(p.v, w.b, w.k.start, w.h_k), states, g.splits == 1,
            SequenceRows<T>{w.k.length}, [&](const RowPlace& at, int) { return at.number(p.problem); });
}

}  // namespace flash_ext::sm80
