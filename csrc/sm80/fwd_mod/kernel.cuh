// The forward of fwd/kernel.cuh with everything of common/modifiers.cuh: masks, biases, softcap, sinks, dropout. For
// the large tiles up to head_dim 128 there is a kernel for each FwdModKind.
//
// What differs: the tiles to visit come from a list (common/tile_list.cuh), and a warp passes over those that none of
// its own rows sees (fwd_mod/mask_words.cuh); weights are formed with the maxima there are (fwd_mod/weights.cuh); where
// everything is compiled in, a tile's keys are taken in parts of kPartN, whose scores leave registers for what is added
// to them; each warp stages its own part of a 16-bit bias.
//
// Shared memory (bytes, D = padded head_dim):
//   Q     [kBlockM][D]             2 D kBlockM      (each warp reuses its own rows for the output)
//   K     [kStages][kBlockN][D]    2 D kBlockN kStages
//   V     [kVStages][kBlockN][D]   2 D kBlockN kVStages
//   bias  a warp's rows x kPartN   (2 kPartN + 16) kBlockM, where it fits
#pragma once

#include <type_traits>
#include <utility>

#include "../../common/bias_stage.cuh"
#include "../../common/debug_delay.cuh"
#include "../../common/fragments.cuh"
#include "../../common/tile_list.cuh"
#include "../../heuristics.h"
#include "../core/compiled_here.cuh"
#include "../core/wait_for_copies.cuh"
#include "../fwd/store.cuh"
#include "dropout.cuh"
#include "mask_words.cuh"
#include "weights.cuh"

namespace flash_ext::sm80 {

// Where a thread's own copies of K and V begin: its row of the first step of the first tile, its chunk.
struct __align__(16) KvLane {
  const uint16_t* k;
  const uint16_t* v;
};

// load_tile() for whole tiles of rows that are 16-byte aligned and whole chunks, from what a thread has once worked
// out: fewer instructions for an address, none for what is the same for all tiles.
template <int kBlockN, int D, int kThreads>
struct KvLoader {
  using Tile = SmemTile<D>;
  static constexpr int kRowStep = kFloorPowerOfTwo<kThreads / Tile::kChunks>;
  static constexpr bool kAllCopy = kThreads == kRowStep * Tile::kChunks;
  static constexpr int64_t kLongestRow = int64_t{1} << 28;  // elements: products with a step's rows stay below 2^32

  __device__ static const uint16_t* own(const uint16_t* first, int64_t row_stride, int columns, int thread_idx) {
    const int chunk = thread_idx % Tile::kChunks;
    return first + thread_idx / Tile::kChunks * row_stride + (chunk * 8 < columns ? chunk * 8 : 0);
  }

  __device__ static void copy(uint32_t tile, const uint16_t* own, uint32_t row_bytes, int first, int columns,
                              int thread_idx) {
    const int chunk = thread_idx % Tile::kChunks, row = thread_idx / Tile::kChunks;
    if (!kAllCopy && row >= kRowStep) return;
    const char* from = reinterpret_cast<const char*>(own) + uint64_t{static_cast<uint32_t>(first)} * row_bytes;
    const uint32_t to = tile + Tile::offset(row, chunk);
    const auto each = [&]<int... kSteps>(std::integer_sequence<int, kSteps...>) {
      (ptx::cp_async_16_or_zeros(kRowStep % 8 == 0 ? to + kSteps * kRowStep * Tile::kRowBytes
                                                   : tile + Tile::offset(row + kSteps * kRowStep, chunk),
                                 ptx::offset_by<kSteps * kRowStep>(from, row_bytes), chunk * 8 >= columns),
       ...);
    };
    each(std::make_integer_sequence<int, kBlockN / kRowStep>());
  }
};

template <typename E, int D, SmemClass kSmemClass, FwdModKind kOfKind>
struct FwdModTraits {
  using Element = E;
  static constexpr FwdModKind kKind = kOfKind;
  static constexpr bool kBias = kKind == FwdModKind::kChanges || kKind == FwdModKind::kEverything;
  static constexpr bool kSplitsTerms = kKind == FwdModKind::kChanges;
  static constexpr bool kDrops = kKind == FwdModKind::kDrops || kKind == FwdModKind::kEverything;
  static constexpr SmemClass kClass = kSmemClass;
  static constexpr int kHeadDim = D;
  static constexpr FwdTile kTile = fwd_mod_tile_sm80(D, kSmemClass, kKind);
  static constexpr int kBlockM = kTile.block_m, kBlockN = kTile.block_n, kStages = kTile.stages;
  static constexpr int kVStages = kTile.v_stages();
  static constexpr int kPartN = kTile.part_n(), kParts = kBlockN / kPartN;
  static constexpr int kThreads = kTile.threads(), kMBlocks = kTile.m_blocks(), kRows = 2 * kMBlocks;
  static constexpr int kQBytes = 2 * D * kBlockM, kKvBytes = 2 * D * kBlockN;
  static constexpr int kAhead = kMBlocks == 1 && D < 256 ? 3 : 2;
  static constexpr int kBiasBytes =
      !kBias ? 0 : bias_stage_bytes(kTile.warps, 16 * kMBlocks, kPartN, kTile.smem_bytes(D), smem_limit(kSmemClass));
  static constexpr int kSmemBytes = kTile.smem_bytes(D) + kBiasBytes;
  using Stage = std::conditional_t<kBiasBytes != 0, BiasStage<16 * kMBlocks, kPartN>, NoBiasStage>;
  using Tile = SmemTile<D>;
  using Loader = KvLoader<kBlockN, D, kThreads>;
  static constexpr bool kSteady = kKind != FwdModKind::kEverything;  // which has no shared memory left for it
  using Words = RowWords<16 * kMBlocks, kBlockN>;
  using Fetched = FetchedWords<16 * kMBlocks, kBlockN>;
  static constexpr int kLaneBytes = ((kSteady ? 16 : 0) + 4 * Fetched::kCount) * kThreads + kTile.warps * Words::kBytes;
  static_assert(kSmemBytes + kLaneBytes + kModStatic <= smem_limit(kSmemClass));
};

struct FwdModWork {
  Work w;
  SeqInfo seq;
  bool in_sequence;  // false for rows outside every sequence
  BlockRange range;
  const uint16_t* k;  // first key row of the CTA's sequence and head
  const uint16_t* v;
  const uint32_t* mask;  // of the CTA's sequence and head
  const uint32_t* blocks;
  bool steady;  // KvLoader serves K and V
  TileList tile_list;
  DropKeys drop_keys;
};

template <typename T>
__device__ __forceinline__ void fwd_mod_body(const FwdParams& p, const Modifiers& m, const Grid& grid) {
  using E = typename T::Element;
  constexpr int D = T::kHeadDim, kBlockM = T::kBlockM, kBlockN = T::kBlockN;
  extern __shared__ __align__(128) unsigned char smem[];
  const int thread_idx = threadIdx.x, lane = thread_idx % 32, warp = thread_idx / 32;

  __shared__ FwdModWork shared;
  __shared__ uint32_t fetched_words[T::kThreads][T::Fetched::kCount];
  __shared__ DropRow drop_rows[T::kDrops ? kBlockM / 2 : 1];
  __shared__ KvLane kv_lanes[T::kSteady ? T::kThreads : 1];
  __shared__ uint32_t ballots[T::kThreads / 32];
  __shared__ uint32_t seen_words[T::kTile.warps][T::Words::kBytes / 4];
  const auto seen_at = [&] { return ptx::smem_address(seen_words[ptx::fresh_thread_idx() / 32]); };
  // Three warps side by side, as one thread would be long about it.
  if (lane == 0 && warp < 3) {
    int b = 0;
    Work w = decode_work<kBlockM, true, true, true>(p.problem, grid, &b);
    reorder_batch(m, w, p.problem.num_heads, b);
    if (warp == 0) {
      const SeqInfo seq = make_seq_info(p.problem, m, w, b);
      shared.w = w;
      shared.in_sequence = b >= 0 && b < p.problem.batch;
      shared.seq = seq;
      shared.range = BlockRange{0, 0};
      if (w.active) shared.range = ScoreMod{p.problem, m, seq, w.h}.template kv_blocks<kBlockM, kBlockN>(w.block);
    } else if (warp == 1) {
      const int h_k = static_cast<int>(divide(w.h, grid.shared));
      shared.k = row_pointer(p.k, w.b, w.k.start, h_k);
      shared.v = row_pointer(p.v, w.b, w.k.start, h_k);
      shared.steady = p.k.aligned && p.v.aligned && (p.problem.head_dim | p.problem.head_dim_v) % 8 == 0 &&
                      max(p.k.row_stride, p.v.row_stride) < T::Loader::kLongestRow;
    } else {
      shared.tile_list.scanned = 0;
      shared.mask = T::Fetched::of_head(m.mask, b, w.h);
      shared.blocks = T::Fetched::of_head(m.blocks, b, w.h);
      if constexpr (T::kDrops) shared.drop_keys.make(m, b, w.h);
    }
  }
  __syncthreads();
  const Work& w = shared.w;
  if (!w.active) {
    ptx::wait_for_kernel_before();  // who waits for this kernel wants that one over as well
    return;
  }
  if constexpr (T::kDrops) {
    if (m.rng != nullptr && thread_idx < kBlockM / 2) {
      const int row_id = w.block * kBlockM / 2 + thread_idx;
      drop_rows[thread_idx] = make_drop_row(shared.drop_keys, static_cast<uint32_t>(row_id));
    }
  }
  if constexpr (T::kSteady) {
    kv_lanes[thread_idx] = {T::Loader::own(shared.k, p.k.row_stride, p.problem.head_dim, thread_idx),
                            T::Loader::own(shared.v, p.v.row_stride, p.problem.head_dim_v, thread_idx)};
  }
  const ScoreMod score_mod{p.problem, m, shared.seq, w.h};

  const uint32_t smem_q = ptx::smem_address(smem);
  const uint32_t smem_k = smem_q + T::kQBytes;
  const uint32_t smem_v = smem_k + T::kStages * T::kKvBytes;
  const int warp_row = warp * 16 * T::kMBlocks;
  const uint32_t stage_bias = smem_v + T::kVStages * T::kKvBytes + warp * T::Stage::kBytes;
  const uint32_t q_lane = T::Tile::by_rows(smem_q, lane) + warp_row * T::Tile::kRowBytes;
  // The others are made where they are used, for want of registers.
  const auto k_lane = [&] { return T::Tile::by_cols(ptx::smem_address(smem) + T::kQBytes, ptx::fresh_lane()); };
  const auto v_lane = [&] {
    return T::Tile::by_rows(ptx::smem_address(smem) + T::kQBytes + T::kStages * T::kKvBytes, ptx::fresh_lane());
  };

  const auto steady = [&](int n_block) {
    return T::kSteady && shared.steady && w.k.length - n_block * kBlockN >= kBlockN;
  };
  const auto copy = [&](uint32_t to, const uint16_t* own, const StridedView& view, int columns, int n_block) {
    T::Loader::copy(to, own, static_cast<uint32_t>(view.row_stride) * 2, n_block * kBlockN, columns,
                    ptx::fresh_thread_idx());
  };
  const auto load_slowly = [&](uint32_t to, const uint16_t* from, const StridedView& view, int columns, int n_block) {
    const int first = n_block * kBlockN;
    const TileSource src{from + first * view.row_stride, view.row_stride, columns, view.aligned};
    load_tile<kBlockN, D, T::kThreads>(to, src, w.k.length - first, ptx::fresh_thread_idx());
  };
  // What the copies read of shared memory is read before them: behind them it would wait for them.
  const auto load = [&](bool of_k, bool of_v, int stage, int n_block) {
    const uint32_t to_k = smem_k + stage * T::kKvBytes, to_v = smem_v + (T::kVStages == 1 ? 0 : stage) * T::kKvBytes;
    if (steady(n_block)) {
      const KvLane own = kv_lanes[ptx::fresh_thread_idx()];
      if (of_k) copy(to_k, own.k, p.k, p.problem.head_dim, n_block);
      if (of_v) copy(to_v, own.v, p.v, p.problem.head_dim_v, n_block);
    } else {
      if (of_k) load_slowly(to_k, shared.k, p.k, p.problem.head_dim, n_block);
      if (of_v) load_slowly(to_v, shared.v, p.v, p.problem.head_dim_v, n_block);
    }
  };
  const auto fetch_words = [&](const ListedTile& tile) {
    T::Fetched::fetch(ptx::smem_address(fetched_words[ptx::fresh_thread_idx()]), score_mod, shared.mask, shared.blocks,
                      w.block * kBlockM + warp_row, tile.block * kBlockN, tile.tests);
  };
  const bool stages_bias = T::Stage::kBytes > 0 && m.bias.ptr != nullptr && m.bias.staged;
  const auto load_bias = [&](int n_block, int part) {
    if (!stages_bias) return;
    T::Stage::load(stage_bias, score_mod, w.block * kBlockM + warp_row, n_block * kBlockN + part * T::kPartN);
    ptx::cp_async_commit();
  };

  float acc_o[T::kMBlocks][D / 8][4];
  clear(acc_o);
  GuessedSoftmax<T::kRows, T::kBias> state;
  // The exact maxima, which few calls want, are kept where they are wanted; each row's by one thread.
  const auto each_row_max = [&](const auto& change) {
    const int lane = ptx::fresh_lane(), first = w.block * kBlockM + ptx::fresh_thread_idx() / 32 * 16 * T::kMBlocks;
    if (m.row_max == nullptr || lane % 4 != 0) return;
    float* at = m.row_max + row_stat_offset(p.problem, w, w.h);
#pragma unroll
    for (int r = 0; r < T::kRows; ++r) {
      const int row = first + r * 8 + lane / 4;
      if (row < w.q.length) at[row] = change(at[row], r);
    }
  };
  each_row_max([](float, int) { return -INFINITY; });
  const auto note = [&](const float (&tile_max)[T::kRows]) {
    each_row_max([&](float old, int r) { return fmaxf(old, tile_max[r]); });
  };
  {
    const int first = w.block * kBlockM;
    const TileSource src{row_pointer(p.q, w.b, w.q.start + first, w.h), p.q.row_stride, p.problem.head_dim,
                         p.q.aligned};
    load_tile<kBlockM, D, T::kThreads>(smem_q, src, w.q.length - first, thread_idx);
    ptx::cp_async_commit();
  }
  // Up to here nothing is read that passes over masks have made.
  ptx::wait_for_kernel_before();
#pragma unroll 1
  do {
    // Last tile first, as in fwd/kernel.cuh.
    const int total = shared.range.end - shared.range.begin;
    debug_delay();
    const auto look = [&](int x, ListedTile& tile) {
      tile.block = shared.range.end - 1 - x;
      return score_mod.template classify<kBlockM, kBlockN, 4>(w.block, tile.block);
    };
    shared.tile_list.find_by_cta<T::kThreads>(shared.tile_list.scanned, total, ptx::fresh_thread_idx(), ballots, look);
    debug_delay();
    const int& count = shared.tile_list.count;
    if (count > 0) {
      fetch_words(shared.tile_list[0]);
      load(true, T::kVStages > 1, 0, shared.tile_list[0].block);
      load_bias(shared.tile_list[0].block, 0);
      ptx::cp_async_commit();
    }
#pragma unroll 1
    for (int it = 0; it < count; ++it) {
      wait_for_copies();
      [[maybe_unused]] const int stage = it % T::kStages, next_stage = (it + 1) % T::kStages;
      const uint32_t kv_at = stage * T::kKvBytes;
      const ListedTile tile = shared.tile_list[it];
      const bool more = it + 1 < count;
      const int row0 = w.block * kBlockM + warp_row, col0 = tile.block * kBlockN;
      Seen how = Seen::kAll;
      if (tile.tests != 0) {
        const auto seen = seen_keys<16 * T::kMBlocks, kBlockN>(
            score_mod, row0, col0, tile.tests, ptx::smem_address(fetched_words[ptx::fresh_thread_idx()]));
        how = how_much(seen);
        if (how == Seen::kSome) seen.put(seen_at());
      }
      if (more) fetch_words(shared.tile_list[it + 1]);
      if constexpr (T::kVStages == 1) {
        load(false, true, 0, tile.block);
        ptx::cp_async_commit();
      }
      if constexpr (T::kStages > 1) {
        if (more) load(true, T::kVStages > 1, next_stage, shared.tile_list[it + 1].block);
        ptx::cp_async_commit();
      }
#pragma unroll 1
      for (int part = 0; part < T::kParts; ++part) {
        const uint32_t part_at = kv_at + part * T::kPartN * T::Tile::kRowBytes;
        uint32_t weights[T::kMBlocks][T::kPartN / 8][2];
        if (part > 0 && stages_bias) {
          ptx::cp_async_wait<0>();
          __syncwarp();
        }
        if (how != Seen::kNothing) {
          bool again;
          do {
            float acc_s[T::kMBlocks][T::kPartN / 8][4];
            multiply_transposed<E, D, T::kAhead>(acc_s, q_lane, k_lane() + part_at);
            std::conditional_t<T::kSplitsTerms, RowTerms, NoRowTerms> terms;
            if constexpr (T::kSplitsTerms) {
              terms = change_scores<E, typename T::Stage>(acc_s, score_mod, row0, col0 + part * T::kPartN, stage_bias);
            } else if constexpr (T::kKind == FwdModKind::kEverything) {
              score_mod.template modify<E, false, typename T::Stage>(acc_s, row0, col0 + part * T::kPartN, stage_bias,
                                                                     [](int, int, const float (&)[4]) {});
            }
            if (how == Seen::kSome) hide_scores<typename T::Words>(acc_s, seen_at(), part * (T::kPartN / 32));
            again = !state.template weigh<E>(acc_s, weights, acc_o, m.unit_log2, terms, m.row_max != nullptr, note);
          } while (again);
        }
        __syncwarp();
        if (part + 1 < T::kParts) {
          load_bias(tile.block, part + 1);
        } else if (more) {
          load_bias(shared.tile_list[it + 1].block, 0);
        }
        if constexpr (T::kVStages == 1) {
          static_assert(T::kParts == 1);
          debug_delay();
          // Behind V lie the next K and, where load_bias() commits one, the next bias.
          if (T::kStages == 1) {
            ptx::cp_async_wait<0>();
          } else if (more && stages_bias) {
            ptx::cp_async_wait<2>();
          } else {
            ptx::cp_async_wait<1>();
          }
          __syncthreads();
          debug_delay();
          if (T::kStages == 1 && more) {
            load(true, false, 0, shared.tile_list[it + 1].block);
            ptx::cp_async_commit();
          }
        }
        if (how == Seen::kNothing) continue;
        if constexpr (T::kDrops) {
          if (T::kKind == FwdModKind::kDrops || m.rng != nullptr) {
            drop_weights(weights, m, col0 + part * T::kPartN, shared.drop_keys, drop_rows + warp_row / 2);
          }
        }
        multiply_packed<E, D, T::kAhead>(acc_o, weights, v_lane() + (T::kVStages == 1 ? 0 : part_at));
      }
    }
    debug_delay();
    ptx::cp_async_wait<0>();  // Q, where no tile is visited
    __syncthreads();  // everybody has left this segment's list and tiles
  } while (shared.tile_list.scanned < shared.range.end - shared.range.begin);

  each_row_max([&](float top, int) { return top * (m.unit_log2 * kLn2); });
  const float sink = m.sinks != nullptr && shared.in_sequence ? m.sinks[w.h] : -INFINITY;
  store_rows<T>(p, w, acc_o, smem_q, q_lane, warp_row, lane,
                [&](int r, float& lse) { return finish_row(state, r, m, sink, lse) * m.keep_scale; });
}

template <typename T>
__global__ void __launch_bounds__(T::kThreads, T::kTile.ctas_per_sm)
    fwd_mod_kernel(const __grid_constant__ FwdParams p, const __grid_constant__ Modifiers m,
                   const __grid_constant__ Grid grid) {
  if constexpr (kCompiledHere<T::kClass>) fwd_mod_body<T>(p, m, grid);
  else __trap();
}

}  // namespace flash_ext::sm80
