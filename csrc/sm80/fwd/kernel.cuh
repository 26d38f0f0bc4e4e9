// FlashAttention-2 forward on mma.sync (Dao 2023, Algorithm 1), for sm_80 and newer.
//
//   O_i = softmax(scale * Q_i K^T) V,  lse_i = log sum_j exp(scale * q_i . k_j)
//
// One CTA owns kBlockM query rows of one head; each warp owns 16 * kMBlocks of them and all keys, so a row's
// softmax never leaves its warp. K/V tiles stream through shared memory by cp.async.
//
// Shared memory (bytes, D = padded head_dim):
//   Q  [kBlockM][D]           2 D kBlockM      (each warp reuses its own rows for the output)
//   K  [kStages][kBlockN][D]  2 D kBlockN kStages
//   V  [kStages][kBlockN][D]  2 D kBlockN kStages
//
// Registers a thread, kMBlocks = 2, D = 128, kBlockN = 64: output 128, scores 64, fragments 12, state 8.
#pragma once

#include <type_traits>

#include "../../common/attn_mod.cuh"
#include "../../common/debug_delay.cuh"
#include "../../common/fragments.cuh"
#include "../../common/kv_rows.cuh"
#include "../../common/seqlen.cuh"
#include "../../common/sink.cuh"
#include "../../common/softmax.cuh"
#include "../../heuristics.h"
#include "../core/compiled_here.cuh"
#include "../core/wait_for_copies.cuh"
#include "store.cuh"

namespace flash_ext::sm80 {

template <typename E, int D, SmemClass kSmemClass, bool kInStretches = false, bool kFromCache = false>
struct FwdTraits {
  using Element = E;
  static constexpr SmemClass kClass = kSmemClass;
  static constexpr int kHeadDim = D;
  static constexpr bool kStretched = kInStretches;  // a kernel of its own: its registers would slow down the other one
  static constexpr bool kCached = kFromCache;  // keys lie as kv_cache.h says
  static constexpr FwdTile kTile = fwd_tile_sm80(D, kSmemClass, kStretched);
  static constexpr int kBlockM = kTile.block_m, kBlockN = kTile.block_n, kStages = kTile.stages;
  static constexpr int kThreads = kTile.threads(), kMBlocks = kTile.m_blocks();
  static constexpr int kQBytes = 2 * D * kBlockM, kKvBytes = 2 * D * kBlockN;
  // One fragment of K or V feeds 2 kMBlocks mma.
  static constexpr int kAhead = kMBlocks == 1 ? 3 : 2;
  // Of the last tile of 96 keys, 32 are taken where no row sees more: lengths of 2^n leave 32 or 64 over, and so does
  // the diagonal.
  static constexpr int kShortKeys = kBlockN % 64 == 0 ? kBlockN : 32;
  using Tile = SmemTile<D>;
};

// Applies the mask, updates the running state and turns scores of kKeys keys into weights in place.
template <typename T, int kKeys>
__device__ __forceinline__ void softmax_step(float (&acc_s)[T::kMBlocks][kKeys / 8][4],
                                             float (&acc_o)[T::kMBlocks][T::kHeadDim / 8][4],
                                             SoftmaxState<2 * T::kMBlocks>& state, const AttnMod& mod, TileKind kind,
                                             int first_row, int first_col) {
  if (kind == TileKind::kPartial) {
#pragma unroll
    for (int r = 0; r < 2 * T::kMBlocks; ++r) {
      const VisibleKeys keys = mod.visible(first_row + (r / 2) * 16 + (r % 2) * 8);
#pragma unroll
      for (int nb = 0; nb < kKeys / 8; ++nb) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          float& s = acc_s[r / 2][nb][(r % 2) * 2 + c];
          s = mod.score(s, keys, first_col + nb * 8 + c);
        }
      }
    }
  }
  float tile_max[2 * T::kMBlocks], factor[2 * T::kMBlocks];
  own_maxima(acc_s, tile_max);
  if (state.raise(tile_max, mod.p.abs_scale_log2, factor)) {
#pragma unroll
    for (int mb = 0; mb < T::kMBlocks; ++mb) {
#pragma unroll
      for (int db = 0; db < T::kHeadDim / 8; ++db) {
#pragma unroll
        for (int i = 0; i < 4; ++i) acc_o[mb][db][i] *= factor[2 * mb + i / 2];
      }
    }
  }
#pragma unroll
  for (int r = 0; r < 2 * T::kMBlocks; ++r) {
    const float offset = state.offset(r, mod.p.abs_scale_log2);
    float sum = 0.f;
#pragma unroll
    for (int nb = 0; nb < kKeys / 8; ++nb) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        float& s = acc_s[r / 2][nb][(r % 2) * 2 + c];
        s = ptx::ex2(fmaf(s, mod.p.abs_scale_log2, -offset));
        sum += s;
      }
    }
    state.row_sum[r] += sum;  // tile by tile: fewer roundings at the size of the whole sum
  }
}

// Between stretches of keys (heuristics.h) each thread keeps what it holds of its rows in memory: output, maxima and
// shares of the sums.
template <typename T>
struct KeptRows {
  static constexpr int kRows = 2 * T::kMBlocks, kO = T::kMBlocks * T::kHeadDim / 2;
  static_assert(kO + 2 * kRows == kept_floats_sm80(T::kTile, T::kHeadDim) / T::kThreads);
  float* own;

  __device__ explicit KeptRows(const FwdParams& p)
      : own(static_cast<float*>(p.kept) + static_cast<int64_t>(blockIdx.x) * ((kO + 2 * kRows) * T::kThreads) +
            ptx::fresh_thread_idx()) {}

  __device__ __forceinline__ void put(const float (&acc_o)[T::kMBlocks][T::kHeadDim / 8][4],
                                      const SoftmaxState<kRows>& state) const {
#pragma unroll
    for (int i = 0; i < kO; ++i) own[i * T::kThreads] = acc_o[i / (kO / T::kMBlocks)][i / 4 % (T::kHeadDim / 8)][i % 4];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      own[(kO + r) * T::kThreads] = state.row_max[r];
      own[(kO + kRows + r) * T::kThreads] = state.row_sum[r];
    }
  }

  // Adds them, by the larger of both maxima.
  __device__ __forceinline__ void join(float (&acc_o)[T::kMBlocks][T::kHeadDim / 8][4], SoftmaxState<kRows>& state,
                                       float scale_log2) const {
    const auto load = [&](int i) { return ptx::load_late<float>(own + i * T::kThreads); };
    float ours[kRows], theirs[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const float kept = load(kO + r), higher = fmaxf(state.row_max[r], kept);
      ours[r] = higher == -INFINITY ? 1.f : ptx::ex2((state.row_max[r] - higher) * scale_log2);
      theirs[r] = higher == -INFINITY ? 1.f : ptx::ex2((kept - higher) * scale_log2);
      state.row_max[r] = higher;
      state.row_sum[r] = fmaf(load(kO + kRows + r), theirs[r], state.row_sum[r] * ours[r]);
    }
#pragma unroll
    for (int i = 0; i < kO; ++i) {
      const int mb = i / (kO / T::kMBlocks), r = 2 * mb + i / 2 % 2;
      float& x = acc_o[mb][i / 4 % (T::kHeadDim / 8)][i % 4];
      x = fmaf(load(i), theirs[r], x * ours[r]);
    }
  }
};

struct FwdWork {
  Work w;
  const uint16_t* k;  // first key row of the CTA's sequence and head
  const uint16_t* v;
};
struct CachedFwdWork : FwdWork {  // k and v: first elements of the head
  CachedKeys keys;
  float sink;  // of the head; -inf: none
};
// What a kernel of keys in a cache is given beside the rest.
struct FromCache {
  KvCache cache;
  RowRange served;
  const float* sinks;  // (h), or null
};

template <typename T, typename Cache>
__device__ __forceinline__ void fwd_body(const FwdParams& p, const Grid& grid, const Cache& from) {
  using E = typename T::Element;
  constexpr int D = T::kHeadDim, kBlockM = T::kBlockM, kBlockN = T::kBlockN;
  extern __shared__ __align__(128) unsigned char smem[];
  const int thread_idx = threadIdx.x, lane = thread_idx % 32, warp = thread_idx / 32;

  // What the CTA works on is read back from shared memory where the loop and the epilogue need it: kept in
  // registers it would spill at D = 128, where output and scores take 192 of the 255.
  using KeptWork = std::conditional_t<T::kCached, CachedFwdWork, FwdWork>;
  __shared__ KeptWork shared;
  int sequence = 0;
  Work mine = decode_work<kBlockM, true, true, true>(p.problem, grid, T::kCached ? &sequence : nullptr);
  if (!mine.active) return;
  const int h_k = static_cast<int>(divide(mine.h, grid.shared));
  KeptWork work;
  if constexpr (T::kCached) {
    const bool outside = sequence < 0 || sequence == p.problem.batch;
    if (!outside && mine.q.length * static_cast<int>(grid.shared.divisor) <= from.served.above) return;
    work.keys = CachedKeys::of(p.problem, from.cache, sequence);
    mine.k = {0, work.keys.length};
    work.sink = from.sinks == nullptr || outside ? -INFINITY : from.sinks[mine.h];
    work.w = mine, work.k = row_pointer(p.k, 0, 0, h_k), work.v = row_pointer(p.v, 0, 0, h_k);
  } else {
    work = {mine, row_pointer(p.k, mine.b, mine.k.start, h_k), row_pointer(p.v, mine.b, mine.k.start, h_k)};
  }
  if (thread_idx == 0) shared = work;
  const Work& w = shared.w;
  const AttnMod everything{p.problem, mine.q.length, mine.k.length};
  const BlockRange range = everything.template kv_blocks<kBlockM, kBlockN>(mine.block);
  const int last_key = everything.template last_key<kBlockM>(mine.block);
  const int short_block = last_key % kBlockN < T::kShortKeys ? last_key / kBlockN : -1;

  const uint32_t smem_q = ptx::smem_address(smem);
  const uint32_t smem_k = smem_q + T::kQBytes;
  const uint32_t smem_v = smem_k + T::kStages * T::kKvBytes;
  const int warp_row = warp * 16 * T::kMBlocks;
  const uint32_t q_lane = T::Tile::by_rows(smem_q, lane) + warp_row * T::Tile::kRowBytes;
  const uint32_t k_lane = T::Tile::by_cols(smem_k, lane);
  const uint32_t v_lane = T::Tile::by_rows(smem_v, lane);

  const auto load = [&](uint32_t to, const StridedView& view, int head_dim, const KeptWork& work, const uint16_t* head,
                        int stage, int n_block) {
    const int first = n_block * kBlockN;
    if constexpr (T::kCached) {
      load_cached_tile<kBlockN, D, T::kThreads>(to + stage * T::kKvBytes, work.keys, from.cache, view, head, head_dim,
                                                first, thread_idx);
    } else {
      const TileSource src{head + first * view.row_stride, view.row_stride, head_dim, view.aligned};
      load_tile<kBlockN, D, T::kThreads>(to + stage * T::kKvBytes, src, work.w.k.length - first, thread_idx);
    }
  };
  const auto load_k = [&](const KeptWork& work, int stage, int n_block) {
    load(smem_k, p.k, p.problem.head_dim, work, work.k, stage, n_block);
  };
  const auto load_v = [&](const KeptWork& work, int stage, int n_block) {
    load(smem_v, p.v, p.problem.head_dim_v, work, work.v, stage, n_block);
  };

  [[maybe_unused]] constexpr int kStretch = kStretchesSm80.keys / kBlockN;
  float acc_o[T::kMBlocks][D / 8][4];
  clear(acc_o);
  SoftmaxState<2 * T::kMBlocks> state;

  if (range.begin < range.end) {
    // Last tile first: with a causal mask the tiles that need element tests come before the plain ones.
    const int first = mine.block * kBlockM;
    const TileSource src{row_pointer(p.q, mine.b, mine.q.start + first, mine.h), p.q.row_stride, p.problem.head_dim,
                         p.q.aligned};
    load_tile<kBlockM, D, T::kThreads>(smem_q, src, mine.q.length - first, thread_idx);
    load_k(work, 0, range.end - 1);
    if constexpr (T::kStages > 1) load_v(work, 0, range.end - 1);
    ptx::cp_async_commit();
  }
  int stage = 0;
#pragma unroll 1
  for (int n_block = range.end - 1; n_block >= range.begin; --n_block) {
    wait_for_copies();
    const uint32_t kv_at = stage * T::kKvBytes;
    if constexpr (T::kStages > 1) {
      // Everybody has left the other buffer, whose tile the previous iteration used.
      stage ^= 1;
      if (n_block > range.begin) {
        load_k(shared, stage, n_block - 1);
        load_v(shared, stage, n_block - 1);
        ptx::cp_async_commit();
      }
    } else {
      load_v(shared, 0, n_block);
      ptx::cp_async_commit();
    }
    const auto take = [&](auto keys) {
      constexpr int kKeys = decltype(keys)::value;
      float acc_s[T::kMBlocks][kKeys / 8][4];
      multiply_transposed<E, D, T::kAhead>(acc_s, q_lane, k_lane + kv_at);
      const AttnMod mod{p.problem, w.q.length, w.k.length};
      softmax_step<T, kKeys>(acc_s, acc_o, state, mod, mod.template kind<kBlockM, kBlockN>(w.block, n_block),
                             w.block * kBlockM + warp_row + lane / 4, n_block * kBlockN + (lane % 4) * 2);
      if constexpr (T::kStages == 1) {
        wait_for_copies();
        if (n_block > range.begin) {
          load_k(shared, 0, n_block - 1);
          ptx::cp_async_commit();
        }
      }
      multiply_accumulate<E, D, T::kAhead>(acc_o, acc_s, v_lane + kv_at);
    };
    const bool is_short = T::kShortKeys < kBlockN && n_block == short_block;
    if (is_short) {
      take(std::integral_constant<int, T::kShortKeys>{});
    } else {
      take(std::integral_constant<int, kBlockN>{});
    }
    if constexpr (T::kStretched) {
      if (n_block % kStretch == 0 && n_block > range.begin) {
        const KeptRows<T> kept(p);
        if (n_block + kStretch < range.end) kept.join(acc_o, state, p.problem.abs_scale_log2);
        kept.put(acc_o, state);
        clear(acc_o);
        state = {};
      }
    }
  }
  if constexpr (T::kStretched) {
    if ((range.end - 1) / kStretch * kStretch > range.begin) {
      KeptRows<T>(p).join(acc_o, state, p.problem.abs_scale_log2);
    }
  }

  debug_delay();
  if (range.begin >= range.end) __syncthreads();  // no tile's barrier has made `shared` visible
  store_rows<T>(p, w, acc_o, smem_q, q_lane, warp_row, lane, [&](int r, float& lse) {
    float inverse = state.finish(r, p.problem.abs_scale_log2, lse);
    if constexpr (T::kCached) {
      if (shared.sink != -INFINITY) inverse *= add_sink(lse, shared.sink);
    }
    return inverse;
  });
}

template <typename T>
__global__ void __launch_bounds__(T::kThreads, T::kTile.ctas_per_sm)
    fwd_kernel(const __grid_constant__ FwdParams p, const __grid_constant__ Grid grid) {
  if constexpr (kCompiledHere<T::kClass>) fwd_body<T>(p, grid, nullptr);
  else __trap();
}

template <typename T>
__global__ void __launch_bounds__(T::kThreads, T::kTile.ctas_per_sm)
    fwd_cached_kernel(const __grid_constant__ FwdParams p, const __grid_constant__ Grid grid,
                      const __grid_constant__ FromCache from) {
  if constexpr (kCompiledHere<T::kClass>) fwd_body<T>(p, grid, from);
  else __trap();
}

}  // namespace flash_ext::sm80
