// A trial: the forward of sm80/fwd_mod.cuh for calls that only hide, whose CTAs go on from item to item. While the last
// tile of an item is worked on, the tiles of the next one are found and its first K and V are on their way: of what a
// CTA does outside its tiles the start, the search and the first wait for K and V go, and the wait for Q stays, since
// there is no room for a second one beside two CTAs a multiprocessor.
//
//   item i    Q -> tiles ... last but one           last tile                       output
//   item i+1  number drawn, place worked out;       list made, K, V of its          Q -> tiles ...
//             words of the block map fetched        first tile asked for
//
// The list is made ahead where a call has a block map and rules of intervals, of at most kThreads tiles a row, and at
// least two tiles in the item before; elsewhere when the item begins.
#pragma once

#include "onward_sm80.cuh"
#include "sm80/fwd_mod.cuh"

namespace flash_ext::sm80 {

template <typename Base>
struct OnwardTraits : Base {
  static_assert(Base::kKind == FwdModKind::kHides && Base::kStages == 2 && Base::kVStages == 2 && Base::kParts == 1);
  static_assert(Base::kBlockM == 128 && Base::kBlockN == 64, "a word of the block map holds 8 tiles of 8 granules");
  static constexpr bool kSorted = false;
  static constexpr int kExtraBytes = sizeof(FwdModWork) + 8 * Base::kThreads;
  static_assert(2 * (Base::kSmemBytes + Base::kLaneBytes + kModStatic + kExtraBytes + 1024) <= 228 * 1024);
};

template <typename Base>
struct SortedOnwardTraits : OnwardTraits<Base> {
  static constexpr bool kSorted = true;
};

template <typename T>
__device__ __forceinline__ void fwd_onward_body(const FwdParams& p, const Modifiers& m, const Grid& grid) {
  using E = typename T::Element;
  constexpr int D = T::kHeadDim, kBlockM = T::kBlockM, kBlockN = T::kBlockN;
  extern __shared__ __align__(128) unsigned char smem[];

  __shared__ FwdModWork shared, next;
  __shared__ bool next_exists, next_ahead;
  __shared__ uint32_t number;  // of the item behind `shared`
  __shared__ uint32_t fetched_words[T::kThreads][T::Fetched::kCount];
  __shared__ uint32_t next_words[T::kThreads];
  __shared__ KvLane kv_lanes[T::kThreads];
  __shared__ uint32_t ballots[T::kThreads / 32];
  __shared__ uint32_t seen_words[T::kTile.warps][T::Words::kBytes / 4];
  OnwardSchedule* const schedule = static_cast<OnwardSchedule*>(p.schedule);
  const auto seen_at = [&] { return ptx::smem_address(seen_words[ptx::fresh_thread_idx() / 32]); };
  const auto warp_row = [] { return ptx::fresh_thread_idx() / 32 * 16 * T::kMBlocks; };

  // By the first lanes of three warps side by side.
  const auto prepare = [&](FwdModWork& to, uint32_t n) {
    const int warp = ptx::fresh_thread_idx() / 32;
    if (ptx::fresh_lane() != 0 || warp >= 3) return;
    uint32_t item = n;
    if constexpr (T::kSorted) item = schedule->sorted_item(n);
    int b = 0;
    Work w = decode_index<kBlockM, true, true>(item, p.problem, grid, &b);
    reorder_batch(m, w, p.problem.num_heads, b);
    if (warp == 0) {
      const Seat seat = make_seat(p.problem, m, w, b);
      to.w = w;
      to.in_sequence = true;
      to.seat = seat;
      to.range = Scores{p.problem, m, seat, w.h}.template kv_blocks<kBlockM, kBlockN>(w.block);
    } else if (warp == 1) {
      const int h_k = static_cast<int>(divide(w.h, grid.shared));
      to.k = row_pointer(p.k, w.b, w.k.start, h_k);
      to.v = row_pointer(p.v, w.b, w.k.start, h_k);
      to.steady = p.k.aligned && p.v.aligned && (p.problem.head_dim | p.problem.head_dim_v) % 8 == 0 &&
                  max(p.k.row_stride, p.v.row_stride) < T::Loader::kLongestRow;
    } else {
      to.visits.scanned = 0;
      to.mask = T::Fetched::of_head(m.mask, b, w.h);
      to.blocks = T::Fetched::of_head(m.blocks, b, w.h);
    }
  };
  const auto draw = [&] { return gridDim.x + atomicAdd(&schedule->drawn, 1u); };
  const auto is_drawer = [] { return ptx::fresh_thread_idx() == T::kThreads - 32; };

  prepare(shared, blockIdx.x);
  if (is_drawer()) number = draw();
  __syncthreads();
  int phase = 0;      // the stage of an item's first tile
  bool ahead = false;  // its list is there, and its first tile is on its way
#pragma unroll 1
  while (true) {
    const Work& w = shared.w;
    const Scores scores{p.problem, m, shared.seat, w.h};
    const uint32_t smem_q = ptx::smem_address(smem), smem_k = smem_q + T::kQBytes;
    const uint32_t smem_v = smem_k + T::kStages * T::kKvBytes;
    const auto q_lane = [&] {
      return T::Tile::by_rows(ptx::smem_address(smem), ptx::fresh_lane()) + warp_row() * T::Tile::kRowBytes;
    };
    const auto k_lane = [&] { return T::Tile::by_cols(ptx::smem_address(smem) + T::kQBytes, ptx::fresh_lane()); };
    const auto v_lane = [&] {
      return T::Tile::by_rows(ptx::smem_address(smem) + T::kQBytes + T::kStages * T::kKvBytes, ptx::fresh_lane());
    };
    const auto is_steady = [&](const FwdModWork& of, int n_block) {
      return of.steady && of.w.k.length - n_block * kBlockN >= kBlockN;
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
    const auto load_steady = [&](int stage, int n_block) {
      const KvLane own = kv_lanes[ptx::fresh_thread_idx()];
      copy(smem_k + stage * T::kKvBytes, own.k, p.k, p.problem.head_dim, n_block);
      copy(smem_v + stage * T::kKvBytes, own.v, p.v, p.problem.head_dim_v, n_block);
    };
    const auto load = [&](int stage, int n_block) {
      if (is_steady(shared, n_block)) {
        load_steady(stage, n_block);
      } else {
        load_slowly(smem_k + stage * T::kKvBytes, shared.k, p.k, p.problem.head_dim, n_block);
        load_slowly(smem_v + stage * T::kKvBytes, shared.v, p.v, p.problem.head_dim_v, n_block);
      }
    };
    const auto keep_lanes = [&](const FwdModWork& of) {
      const int thread_idx = ptx::fresh_thread_idx();
      kv_lanes[thread_idx] = {T::Loader::own(of.k, p.k.row_stride, p.problem.head_dim, thread_idx),
                              T::Loader::own(of.v, p.v.row_stride, p.problem.head_dim_v, thread_idx)};
    };
    const auto fetch_words = [&](const FwdModWork& of, const VisitedTile& tile) {
      const Scores its{p.problem, m, of.seat, of.w.h};
      T::Fetched::fetch(ptx::smem_address(fetched_words[ptx::fresh_thread_idx()]), its, of.mask, of.blocks,
                        of.w.block * kBlockM + warp_row(), tile.block * kBlockN, tile.tests);
    };

    // Tile of the next item that a thread looks at: eight lanes side by side have tiles of one word of the block map.
    const auto next_tile = [&] { return (next.range.end + 7) / 8 * 8 - 1 - ptx::fresh_thread_idx(); };
    const auto fetch_next_words = [&] {
      if (m.blocks.words == nullptr) return;
      const int tile = next_tile(), r0 = next.w.block * kBlockM, r1 = min(r0 + kBlockM, next.seat.seqlen_q) - 1;
      const int row = min(r0 / 16 + ptx::fresh_lane() % 8, r1 / 16), word = tile / 8;
      const bool in = tile >= 0 && row < m.blocks.rows && word < m.blocks.num_words;
      const int64_t at = row * m.blocks.row_stride + word * m.blocks.word_stride;
      ptx::cp_async_4(ptx::smem_address(&next_words[ptx::fresh_thread_idx()]), in ? next.blocks + at : next.blocks,
                      in ? 4 : 0);
    };
    // All threads; barriers inside.
    const auto find_next = [&] {
      const int thread_idx = ptx::fresh_thread_idx(), tile = next_tile();
      TileTests tests = kSkipTile;
      if (tile >= next.range.begin && tile < next.range.end) {
        tests = interval_tests<kBlockM, kBlockN>(Scores{p.problem, m, next.seat, next.w.h}, next.w.block, tile);
      }
      if (m.blocks.words != nullptr) {
        uint32_t any = ptx::load_shared_word(ptx::smem_address(&next_words[thread_idx])), all = any;
#pragma unroll
        for (int step = 1; step < 8; step *= 2) {
          any |= __shfl_xor_sync(0xffffffffu, any, step);
          all &= __shfl_xor_sync(0xffffffffu, all, step);
        }
        if (tests != kSkipTile) {
          const int c0 = tile * kBlockN, c1 = min(c0 + kBlockN, next.seat.seqlen_k) - 1;
          const uint32_t wanted = ((1u << (c1 / 16 - c0 / 16 + 1)) - 1) << (c0 / 16 % 32);
          if ((any & wanted) == 0) tests = kSkipTile;
          else if ((all & wanted) != wanted) tests |= kTestRows;
        }
      }
      const uint32_t visited = __ballot_sync(0xffffffffu, tests != kSkipTile);
      if (thread_idx % 32 == 0) ballots[thread_idx / 32] = visited;
      __syncthreads();
      int at = __popc(visited & ((1u << thread_idx % 32) - 1)), found = 0;
#pragma unroll
      for (int i = 0; i < T::kThreads / 32; ++i) {
        const int of_warp = __popc(ballots[i]);
        at += i < thread_idx / 32 ? of_warp : 0;
        found += of_warp;
      }
      if (tests != kSkipTile) {
        next.visits.tiles[at] = static_cast<uint32_t>(tests);
        next.visits.blocks[at] = tile;
      }
      if (thread_idx == 0) {
        next.visits.count = found;
        next.visits.scanned = next.range.end - next.range.begin;
      }
      __syncthreads();
    };

    float acc_o[T::kMBlocks][D / 8][4];
    clear(acc_o);
    GuessedSoftmax<T::kRows, T::kBias> state;
    const auto each_row_max = [&](const auto& change) {
      const int lane = ptx::fresh_lane(), first = w.block * kBlockM + warp_row();
      if (m.row_max == nullptr || lane % 4 != 0) return;
      float* at = m.row_max + row_stat_offset(p.problem, w, w.h);
#pragma unroll
      for (int r = 0; r < T::kRows; ++r) {
        const int row = first + r * 8 + lane / 4;
        if (row < w.q.length) at[row] = change(at[row], r);
      }
    };
    each_row_max([](float, int) { return -INFINITY; });
    const auto note = [&](const float(&tile_max)[T::kRows]) {
      each_row_max([&](float old, int r) { return fmaxf(old, tile_max[r]); });
    };
    {
      const int first = w.block * kBlockM;
      const TileSource src{row_pointer(p.q, w.b, w.q.start + first, w.h), p.q.row_stride, p.problem.head_dim,
                           p.q.aligned};
      load_tile<kBlockM, D, T::kThreads>(smem_q, src, w.q.length - first, ptx::fresh_thread_idx());
      ptx::cp_async_commit();
    }
    // While Q is on its way.
    {
      const uint32_t n = number;
      const bool exists = n < static_cast<uint32_t>(grid.ctas);
      if (exists) prepare(next, n);
      if (ptx::fresh_thread_idx() == 0) {
        next_exists = exists;
        next_ahead = exists && looks_up_blocks_only(m) && (next.range.end + 7) / 8 * 8 <= T::kThreads;
      }
    }
    if (!ahead) keep_lanes(shared);
#pragma unroll 1
    do {
      const int total = shared.range.end - shared.range.begin;
      if (!ahead) {
        const auto look = [&](int x, VisitedTile& tile) {
          tile.block = shared.range.end - 1 - x;
          return scores.template visit<kBlockM, kBlockN, 4>(w.block, tile.block);
        };
        shared.visits.find_together<T::kThreads>(shared.visits.scanned, total, ptx::fresh_thread_idx(), ballots, look);
        if (shared.visits.count > 0) {
          fetch_words(shared, shared.visits[0]);
          load(phase, shared.visits[0].block);
          ptx::cp_async_commit();
        }
      }
      ahead = false;
      const int& count = shared.visits.count;
#pragma unroll 1
      for (int it = 0; it < count; ++it) {
        ptx::cp_async_wait<0>();
        __syncthreads();
        const int stage = (it + phase) & 1;
        const VisitedTile tile = shared.visits[it];
        const bool more = it + 1 < count;
        const int row0 = w.block * kBlockM + warp_row(), col0 = tile.block * kBlockN;
        Seen how = Seen::kAll;
        if (tile.tests != 0) {
          const auto seen = seen_keys<16 * T::kMBlocks, kBlockN>(
              scores, row0, col0, tile.tests, ptx::smem_address(fetched_words[ptx::fresh_thread_idx()]));
          how = how_much(seen);
          if (how == Seen::kSome) seen.put(seen_at());
        }
        if (more) fetch_words(shared, shared.visits[it + 1]);
        if (next_ahead && count > 1 && shared.visits.scanned >= total) {
          if (it + 2 == count) fetch_next_words();
          if (!more) {
            find_next();
            ahead = next.visits.count > 0 && is_steady(next, next.visits[0].block);
            if (ahead) {
              fetch_words(next, next.visits[0]);
              keep_lanes(next);
              load_steady(stage ^ 1, next.visits[0].block);
            } else if (ptx::fresh_thread_idx() == 0) {
              next.visits.scanned = 0;  // as if it had not been looked for
            }
          }
        }
        if (more) load(stage ^ 1, shared.visits[it + 1].block);
        ptx::cp_async_commit();
        if (how == Seen::kNothing) continue;
        uint32_t weights[T::kMBlocks][T::kPartN / 8][2];
        bool again;
        do {
          float acc_s[T::kMBlocks][T::kPartN / 8][4];
          multiply_transposed<E, D, T::kAhead>(acc_s, q_lane(), k_lane() + stage * T::kKvBytes);
          if (how == Seen::kSome) hide_scores<typename T::Words>(acc_s, seen_at(), 0);
          again =
              !state.template weigh<E>(acc_s, weights, acc_o, m.unit_log2, NoRowTerms{}, m.row_max != nullptr, note);
        } while (again);
        __syncwarp();
        multiply_packed<E, D, T::kAhead>(acc_o, weights, v_lane() + stage * T::kKvBytes);
      }
      if (ahead) {
        phase = (count + phase) & 1;
      } else {
        phase = 0;
        ptx::cp_async_wait<0>();  // Q, where no tile is visited
      }
      __syncthreads();
    } while (shared.visits.scanned < shared.range.end - shared.range.begin);

    uint32_t drawn = 0;
    if (is_drawer() && next_exists) drawn = draw();
    each_row_max([&](float top, int) { return fmaf(top, m.unit_log2 * kLn2, m.score_shift); });
    const int first_row = w.block * kBlockM, rows = w.q.length - first_row, lane = ptx::fresh_lane();
    const int64_t stat = row_stat_offset(p.problem, w, w.h) + first_row;
    const float sink = m.sinks != nullptr ? m.sinks[w.h] : -INFINITY;
#pragma unroll
    for (int mb = 0; mb < T::kMBlocks; ++mb) {
      float inverse[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float row_lse;
        inverse[half] = finish_row(state, 2 * mb + half, m, sink, row_lse);
        const int r = warp_row() + mb * 16 + half * 8 + lane / 4;
        if (lane % 4 == 0 && r < rows) p.lse[stat + r] = row_lse;
      }
#pragma unroll
      for (int j = 0; j < D / 8; ++j) scale_block(acc_o[mb][j], inverse[0], inverse[1]);
    }
#pragma unroll
    for (int mb = 0; mb < T::kMBlocks; ++mb) {
#pragma unroll
      for (int db = 0; db < D / 16; ++db) {
        put_block<E>(T::Tile::block(q_lane(), mb * 16, db), acc_o[mb][2 * db], acc_o[mb][2 * db + 1], lane);
      }
    }
    __syncwarp();
    const TileDestination out{row_pointer(p.out, w.b, w.q.start + first_row, w.h), p.out.row_stride,
                              p.problem.head_dim_v, p.out.aligned};
    store_tile<16 * T::kMBlocks, D, 32>(out, smem_q, warp_row(), rows, lane);

    if (is_drawer()) number = drawn;
    __syncthreads();  // everybody has left Q and what is shared of this item
    if (!next_exists) break;
    static_assert(sizeof(FwdModWork) % 4 == 0);
    const uint32_t* from = reinterpret_cast<const uint32_t*>(&next);
    uint32_t* to = reinterpret_cast<uint32_t*>(&shared);
    constexpr int kWords = sizeof(FwdModWork) / 4;
    for (int i = ptx::fresh_thread_idx(); i < kWords; i += T::kThreads) to[i] = from[i];
    __syncthreads();
  }
  if (threadIdx.x == 0 && atomicAdd(&schedule->ended, 1u) + 1 == gridDim.x) {
    schedule->drawn = 0;
    schedule->ended = 0;
  }
}

template <typename T>
__global__ void __launch_bounds__(T::kThreads, T::kTile.ctas_per_sm)
    fwd_onward_kernel(const __grid_constant__ FwdParams p, const __grid_constant__ Modifiers m,
                      const __grid_constant__ Grid grid) {
  fwd_onward_body<T>(p, m, grid);
}

}  // namespace flash_ext::sm80
