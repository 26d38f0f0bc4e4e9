// A trial: the backward over keys of sm80/bwd.cuh for calls that only hide, whose CTAs go on from item to item. There
// is one CTA a multiprocessor, so nothing else hides what it does outside its tiles. While its last tile is worked on,
// the list of the next item is made; K, V and the first Q and dO of that are on their way while dK and dV leave, which
// go through the buffers of P and dS instead of those of K and V.
//
// The list is made ahead where a call has a block map and rules of intervals, no grouped heads, at most kThreads
// granules of queries a head, and at least three tiles in the item before; elsewhere when the item begins.
#pragma once

#include "onward_sm80.cuh"
#include "sm80/bwd.cuh"

namespace flash_ext::sm80 {

template <typename Base>
struct BwdOnwardTraits : Base {
  static_assert(Base::kMods && !Base::kAdds && Base::kPaired && Base::kStages == 2);
  static_assert(Base::kTile.p_bytes() == Base::kKBytes && 2 * Base::kTile.ds_bytes() == Base::kKBytes);
  static constexpr bool kSorted = false;
  static_assert(Base::kSmemBytes + 2 * sizeof(BwdModWork) + 4 * Base::kThreads + 1024 <= smem_limit(Base::kClass));
};

template <typename T>
__device__ __forceinline__ void bwd_onward_body(const BwdParams& p, const Modifiers& m, const Grid& grid,
                                                OnwardSchedule* schedule) {
  constexpr int D = T::kHeadDim, kBlockM = T::kBlockM, kBlockN = T::kBlockN, kKeyBlocks = T::kKeyBlocks;
  extern __shared__ __align__(128) unsigned char smem_raw[];
  __shared__ BwdModWork work, next;
  __shared__ bool next_exists, next_ahead;
  __shared__ uint32_t number;  // of the item behind `work`
  __shared__ uint32_t next_words[T::kThreads];
  __shared__ int counts[T::kThreads / 32];
  if constexpr (T::kCounts) allow_late_pass();

  // By the first lanes of three second warps side by side, which wait for the first ones anyway.
  const auto prepare = [&](BwdModWork& to, uint32_t n) {
    const int warp = ptx::fresh_thread_idx() / 32 - T::kKeyWarps;
    if (ptx::fresh_lane() != 0 || warp < 0 || warp >= 3) return;
    uint32_t item = n;
    if constexpr (T::kSorted) item = schedule->sorted_item(n);
    int b = 0;
    Work w = decode_index<kBlockN, false, false>(item, p.problem, grid, &b);
    reorder_batch(m, w, p.problem.num_heads_k, b);
    const int group = static_cast<int>(grid.shared.divisor), h = w.h * group;
    if (warp == 0) {
      const Seat seat = make_seat(p.problem, m, w, b);
      const BlockRange range = Scores{p.problem, m, seat, h}.template q_blocks<kBlockM, kBlockN>(w.block);
      to.w = w;
      to.seat = seat;
      to.first_head = h;
      to.range = range;
      to.iterations = max(range.end - range.begin, 0) * group;
    } else if (warp == 1) {
      to.q = row_pointer(p.q, w.b, w.q.start, h);
      to.dout = row_pointer(p.dout, w.b, w.q.start, h);
    } else {
      const int64_t stat = row_stat_offset(p.problem, w, h);
      to.stats_per_head = p.problem.seqlen_q;
      to.stats = reinterpret_cast<const float2*>(p.row_stats) + stat;
      to.dq_accum = p.dq_accum + stat * D;
      for (int& head : to.drop_head) head = -1;
      to.visits.scanned = to.visits.count = 0;
    }
  };
  const auto draw = [&] { return gridDim.x + atomicAdd(&schedule->drawn, 1u); };
  const auto is_drawer = [] { return ptx::fresh_thread_idx() == T::kThreads - 32; };
  const auto prepare_next = [&] {
    const uint32_t n = number;
    const bool exists = n < static_cast<uint32_t>(grid.ctas);
    if (exists) prepare(next, n);
    if (ptx::fresh_thread_idx() == 32 * T::kKeyWarps) {
      next_exists = exists;
      next_ahead = exists && looks_up_blocks_only(m) && grid.shared.divisor == 1 &&
                   (next.range.end - next.range.begin) * (kBlockM / 16) <= T::kThreads;
    }
  };
  const auto fetch_next_words = [&] {
    if (m.blocks.words == nullptr) return;
    const int thread_idx = ptx::fresh_thread_idx(), word = next.w.block * kBlockN / 512;
    const int row = min(next.range.begin * (kBlockM / 16) + thread_idx, (next.seat.seqlen_q - 1) / 16);
    const bool in = row < m.blocks.rows && word < m.blocks.num_words;
    const uint32_t* of_head = m.blocks.words + next.seat.b * m.blocks.batch_stride + next.w.h * m.blocks.head_stride;
    const int64_t at = row * m.blocks.row_stride + word * m.blocks.word_stride;
    ptx::cp_async_4(ptx::smem_address(&next_words[thread_idx]), in ? of_head + at : of_head, in ? 4 : 0);
  };
  // By one warp, from words that all threads have fetched.
  const auto list_next = [&] {
    const int lane = ptx::fresh_lane();
    const Scores scores{p.problem, m, next.seat, next.w.h};
    const int c0 = next.w.block * kBlockN, c1 = min(c0 + kBlockN, next.seat.seqlen_k) - 1;
    const uint32_t wanted = ((1u << (c1 / 16 - c0 / 16 + 1)) - 1) << (c0 / 16 % 32);
    int found = 0;
#pragma unroll 1
    for (int first = next.range.begin; first < next.range.end; first += 32) {
      const int tile = first + lane;
      TileTests tests = kSkipTile;
      if (tile < next.range.end) {
        tests = interval_tests<kBlockM, kBlockN>(scores, tile, next.w.block);
        if (m.blocks.words != nullptr && tests != kSkipTile) {
          uint32_t any = 0, all = ~0u;
#pragma unroll
          for (int i = 0; i < kBlockM / 16; ++i) {
            const uint32_t word = next_words[(tile - next.range.begin) * (kBlockM / 16) + i];
            any |= word;
            all &= word;
          }
          if ((any & wanted) == 0) tests = kSkipTile;
          else if ((all & wanted) != wanted) tests |= kTestRows;
        }
      }
      const uint32_t visited = __ballot_sync(0xffffffffu, tests != kSkipTile);
      if (tests != kSkipTile) {
        const int at = found + __popc(visited & ((1u << lane) - 1));
        next.visits.tiles[at] = static_cast<uint32_t>(tests);
        next.visits.blocks[at] = tile;
      }
      found += __popc(visited);
    }
    if (lane == 0) {
      next.visits.count = found;
      next.visits.scanned = next.iterations;
    }
  };

  prepare(work, blockIdx.x);
  if (is_drawer()) number = draw();
  __syncthreads();
  const uint32_t smem = ptx::smem_address(smem_raw);
  const auto load_keys = [&](const BwdModWork& of) {
    const int first = of.w.block * kBlockN, keys = of.w.k.length - first;
    const TileSource k{row_pointer(p.k, of.w.b, of.w.k.start + first, of.w.h), p.k.row_stride, p.problem.head_dim,
                       p.k.aligned};
    const TileSource v{row_pointer(p.v, of.w.b, of.w.k.start + first, of.w.h), p.v.row_stride, p.problem.head_dim_v,
                       p.v.aligned};
    load_tile<kBlockN, D, T::kThreads>(smem + T::kKAt, k, keys, ptx::fresh_thread_idx());
    load_tile<kBlockN, D, T::kThreads>(smem + T::kVAt, v, keys, ptx::fresh_thread_idx());
  };
  const auto load_first_queries = [&](const BwdModWork& of) {
    const VisitedTile tile = of.visits[0];
    load_queries<T>(p, of, smem, 0, tile.head, tile.block, ptx::fresh_thread_idx());
    load_mask<T>(p, m, of, smem, 0, tile, ptx::fresh_thread_idx());
  };
  load_keys(work);
  ptx::cp_async_commit();
  // A count that the compiler knows to be the same for all lanes keeps the loops inside in uniform registers: 20 bytes
  // spilled less.
#pragma unroll 1
  for (uint32_t turn = 0; turn < static_cast<uint32_t>(grid.ctas); ++turn) {
    float acc[1][kKeyBlocks][D / 8][4];
    clear(acc[0]);
#pragma unroll 1
    do {
      // A list that was made ahead is whole, and its first tile is on its way.
      if (work.visits.scanned < work.iterations) {
        const int length = work.range.end - work.range.begin;
        find_together<T::kThreads / 32>(work.visits, counts, work.iterations, [&](int x, VisitedTile& tile) {
          tile.head = x / length;
          tile.block = work.range.begin + x - tile.head * length;
          return scores_of<T>(p, m, work, tile).template visit<kBlockM, kBlockN>(tile.block, work.w.block);
        });
        if (work.visits.count > 0) load_first_queries(work);
        ptx::cp_async_commit();
      }
      if (work.visits.count > 0) {
        walk_queries<T>(acc, p, m, work, smem, [&](int it) {
          const int left = work.visits.count - it;
          if (it == 0) {
            prepare_next();
          } else if (left <= 2 && next_ahead && work.visits.scanned >= work.iterations) {
            if (left == 2) fetch_next_words();
            else if (it > 1 && ptx::fresh_thread_idx() / 32 == T::kThreads / 32 - 1) list_next();
          }
        });
      } else {
        prepare_next();
        ptx::cp_async_wait<0>();
        __syncthreads();
      }
    } while (work.visits.scanned < work.iterations);

    // Everybody has left all buffers.
    uint32_t drawn = 0;
    if (is_drawer() && next_exists) drawn = draw();
    if constexpr (T::kCounts) {
      if (ptx::fresh_thread_idx() == 0) count_finished(p, work.w);
    }
    if (next_exists) {
      load_keys(next);
      if (next.visits.count > 0) load_first_queries(next);
      ptx::cp_async_commit();
    }
    const int warp = ptx::fresh_thread_idx() / 32, lane = ptx::fresh_lane();
    const int key0 = warp % T::kKeyWarps * 16 * kKeyBlocks;
    if (warp < T::kKeyWarps) {
      write_gradient<T>(acc[0], p.dv, p.problem.head_dim_v, m.keep_scale, smem + T::kPAt, work.w, key0, lane);
    } else {
      write_gradient<T>(acc[0], p.dk, p.problem.head_dim, p.problem.softmax_scale, smem + T::kDsAt, work.w, key0, lane);
    }
    if (is_drawer()) number = drawn;
    __syncthreads();  // everybody has left P, dS and what is shared of this item
    if (!__any_sync(0xffffffffu, next_exists)) break;
    static_assert(sizeof(BwdModWork) % 4 == 0);
    const uint32_t* from = reinterpret_cast<const uint32_t*>(&next);
    uint32_t* to = reinterpret_cast<uint32_t*>(&work);
    constexpr int kWords = sizeof(BwdModWork) / 4;
    for (int i = ptx::fresh_thread_idx(); i < kWords; i += T::kThreads) to[i] = from[i];
    __syncthreads();
  }
  if (threadIdx.x == 0 && atomicAdd(&schedule->ended, 1u) + 1 == gridDim.x) {
    schedule->drawn = 0;
    schedule->ended = 0;
  }
}

template <typename T>
__global__ void __launch_bounds__(T::kThreads, 1)
    bwd_onward_kernel(const __grid_constant__ BwdParams p, const __grid_constant__ Modifiers m,
                      const __grid_constant__ Grid grid, OnwardSchedule* schedule) {
  bwd_onward_body<T>(p, m, grid, schedule);
}

}  // namespace flash_ext::sm80
