// The backward over keys of bwd/kernel.cuh for calls that only hide, head_dim 128, large tiles. There is one CTA a
// multiprocessor, so nothing else hides what a CTA does outside its tiles; with a quarter of the blocks of a map that
// is a fourth of the time. So as many CTAs as there are multiprocessors go on from work tile to work tile (a block of
// keys of a head):
//
//   last but one tile   the words of the block map that the next work tile needs are on their way
//   last tile           one warp makes the list of the next work tile
//   behind it           K, V, the first Q and dO of the next work tile are on their way, while dK and dV of this one leave
//                       through the buffers of P and dS instead of those of K and V
//
// The list is made ahead where a search needs no memory but the block map's (intervals of rows and a map), no grouped
// heads, at most kThreads granules of queries a head, and at least three tiles in the last segment of the work tile
// before; elsewhere it is made when the work tile begins.
//
// Shared memory is that of bwd/kernel.cuh, with the next work tile's work and words beside this one's.
#pragma once

#include "../../common/bwd_schedule.cuh"
#include "../../common/tile_list.cuh"
#include "../../mask_kinds.h"
#include "kernel.cuh"

namespace flash_ext::sm80 {

// The work tile behind the one that a CTA works on.
template <int kThreads>
struct NextWork {
  BwdModWork work;
  uint32_t number;
  bool exists, ahead;  // ahead: its list is made beside the last tiles
  uint32_t words[kThreads];
};

// Work tile `number`, by the first lanes of three second warps side by side, which wait for the first ones anyway.
template <typename T>
__device__ __forceinline__ void begin_work(BwdModWork& to, uint32_t number, const BwdParams& p, const Modifiers& m,
                                           const Grid& grid) {
  const int warp = ptx::fresh_thread_idx() / 32 - T::kKeyWarps;
  if (ptx::fresh_lane() != 0 || warp < 0 || warp >= 3) return;
  int b = 0;
  const Work w = decode_index<T::kBlockN, false, false>(number, p.problem, grid, &b);
  const int group = static_cast<int>(grid.shared.divisor), h = w.h * group;
  if (warp == 0) {
    const SeqInfo seq = make_seq_info(p.problem, m, w, b);
    BlockRange range{0, 0};
    if (w.active) range = ScoreMod{p.problem, m, seq, h}.template q_blocks<T::kBlockM, T::kBlockN>(w.block);
    to.w = w;
    to.seq = seq;
    to.first_head = h;
    to.range = range;
    to.iterations = max(range.end - range.begin, 0) * group;
  } else if (warp == 1) {
    to.q = row_pointer(p.q, w.b, w.q.start, h);
    to.dout = row_pointer(p.dout, w.b, w.q.start, h);
  } else {
    const int64_t stat = row_stat_offset(p.problem, w, h);
    to.stats_per_head = p.problem.cu_seqlens_q != nullptr ? p.problem.total_q : p.problem.seqlen_q;
    to.stats = reinterpret_cast<const float2*>(p.row_stats) + stat;
    to.dq_accum = p.dq_accum == nullptr ? nullptr : p.dq_accum + stat * T::kHeadDim;
    for (int& head : to.drop_head) head = -1;
    to.tile_list.scanned = to.tile_list.count = 0;
  }
}

template <typename T>
__device__ __forceinline__ void begin_next_work(NextWork<T::kThreads>& next, const BwdParams& p, const Modifiers& m,
                                                const Grid& grid) {
  const uint32_t number = next.number;
  const bool exists = number < static_cast<uint32_t>(grid.ctas);
  if (exists) begin_work<T>(next.work, number, p, m, grid);
  if (ptx::fresh_thread_idx() == 32 * T::kKeyWarps) {  // which has made the range
    const BlockRange& range = next.work.range;
    next.exists = exists;
    next.ahead = exists && asks_only<kFoundByBlocks>(m) && grid.shared.divisor == 1 &&
                 (range.end - range.begin) * (T::kBlockM / 16) <= T::kThreads;
  }
}

// Asynchronously, a word a thread: those of the block map for all granules of rows of the next work tile.
template <typename T>
__device__ __forceinline__ void fetch_next_words(NextWork<T::kThreads>& next, const Modifiers& m) {
  const BwdModWork& work = next.work;
  if (m.blocks.words == nullptr || work.iterations == 0) return;
  const int thread_idx = ptx::fresh_thread_idx(), word = work.w.block * T::kBlockN / 512;
  const int row = min(work.range.begin * (T::kBlockM / 16) + thread_idx, (work.seq.seqlen_q - 1) / 16);
  const bool in = row < m.blocks.rows && word < m.blocks.num_words;
  const uint32_t* of_head = m.blocks.words + work.seq.b * m.blocks.batch_stride + work.w.h * m.blocks.head_stride;
  const int64_t at = row * m.blocks.row_stride + word * m.blocks.word_stride;
  ptx::cp_async_4(ptx::smem_address(&next.words[thread_idx]), in ? of_head + at : of_head, in ? 4 : 0);
}

// By one warp, from words that all threads have fetched: what find_by_cta() would find.
template <typename T>
__device__ __forceinline__ void list_next_work(NextWork<T::kThreads>& next, const BwdParams& p, const Modifiers& m) {
  BwdModWork& work = next.work;
  const int lane = ptx::fresh_lane();
  const ScoreMod score_mod{p.problem, m, work.seq, work.w.h};
  const SeqInfo& seq = work.seq;
  const int c0 = work.w.block * T::kBlockN, c1 = min(c0 + T::kBlockN, seq.seqlen_k) - 1;
  const uint32_t wanted = ((1u << (c1 / 16 - c0 / 16 + 1)) - 1) << (c0 / 16 % 32);
  int found = 0;
#pragma unroll 1
  for (int first = work.range.begin; first < work.range.end; first += 32) {
    const int tile = first + lane;
    TileTests tests = kSkipTile;
    if (tile < work.range.end) {
      const int r0 = tile * T::kBlockM, r1 = min(r0 + T::kBlockM, seq.seqlen_q) - 1;
      tests = score_mod.template tests_of_intervals<T::kBlockM, T::kBlockN>(r0, r1, c0, c1);
      if (m.blocks.words != nullptr && tests != kSkipTile) {
        uint32_t any = 0, all = ~0u;
#pragma unroll
        for (int i = 0; i < T::kBlockM / 16; ++i) {
          const uint32_t word = next.words[(tile - work.range.begin) * (T::kBlockM / 16) + i];
          any |= word;
          all &= word;
        }
        if ((any & wanted) == 0) tests = kSkipTile;
        else if ((all & wanted) != wanted) tests |= kTestRows;
      }
    }
    const uint32_t listed = __ballot_sync(ptx::kFullWarp, tests != kSkipTile);
    if (tests != kSkipTile) {
      const int at = found + __popc(listed & ((1u << lane) - 1));
      work.tile_list.tiles[at] = static_cast<uint32_t>(tests);
      work.tile_list.blocks[at] = tile;
    }
    found += __popc(listed);
  }
  if (lane == 0) {
    work.tile_list.count = found;
    work.tile_list.scanned = work.iterations;
  }
}

template <typename E, int D, SmemClass kSmemClass>
struct BwdPersistentTraits : BwdTraits<E, D, kSmemClass, true, false> {
  using Base = BwdTraits<E, D, kSmemClass, true, false>;
  using Next = NextWork<Base::kThreads>;
  static_assert(Base::kPaired && Base::kStages == 2 && Base::kThreads / 32 - Base::kKeyWarps >= 3);
  static_assert(Base::kTile.p_bytes() == Base::kKBytes && 2 * Base::kTile.ds_bytes() == Base::kKBytes);
  static_assert(Base::kThreads / (Base::kBlockM / 16) <= TileList::kCapacity);
  static_assert(Base::kSmemBytes + sizeof(BwdModWork) + sizeof(Next) + 256 <= smem_limit(kSmemClass));
};

template <typename T>
__device__ __forceinline__ void bwd_persistent_body(const BwdParams& p, const Modifiers& m, const Grid& grid) {
  constexpr int D = T::kHeadDim, kBlockM = T::kBlockM, kBlockN = T::kBlockN, kKeyBlocks = T::kKeyBlocks;
  extern __shared__ __align__(128) unsigned char smem_raw[];
  __shared__ BwdModWork work;
  __shared__ NextWork<T::kThreads> next;
  __shared__ int counts[T::kThreads / 32];
  const auto is_fetcher = [] { return ptx::fresh_thread_idx() == T::kThreads - 32; };
  const uint32_t smem = ptx::smem_address(smem_raw);
  const auto load_keys = [&](const BwdModWork& of) {
    if (of.iterations == 0) return;
    const int first = of.w.block * kBlockN, keys = of.w.k.length - first;
    const TileSource k{row_pointer(p.k, of.w.b, of.w.k.start + first, of.w.h), p.k.row_stride, p.problem.head_dim,
                       p.k.aligned};
    const TileSource v{row_pointer(p.v, of.w.b, of.w.k.start + first, of.w.h), p.v.row_stride, p.problem.head_dim_v,
                       p.v.aligned};
    load_tile<kBlockN, D, T::kThreads>(smem + T::kKAt, k, keys, ptx::fresh_thread_idx());
    load_tile<kBlockN, D, T::kThreads>(smem + T::kVAt, v, keys, ptx::fresh_thread_idx());
  };
  const auto load_first_queries = [&](const BwdModWork& of) {
    const ListedTile tile = of.tile_list[0];
    load_queries<T>(p, of, smem, 0, tile.head, tile.block, ptx::fresh_thread_idx());
    load_mask<T>(p, m, of, smem, 0, tile, ptx::fresh_thread_idx());
  };

  begin_work<T>(work, blockIdx.x, p, m, grid);
  debug_delay();
  __syncthreads();
  debug_delay();
  load_keys(work);
  ptx::cp_async_commit();
  // Up to here nothing is read that kernels just before this one have made. The pass behind it reads words that the one
  // before has cleared, so it may not begin before that is over.
  ptx::wait_for_kernel_before();
  ptx::allow_next_kernel();
  if (is_fetcher()) next.number = fetch_work_tile(p);
  // A count that the compiler knows to be the same for all lanes keeps the loops inside in uniform registers: 20 bytes
  // spilled less.
#pragma unroll 1
  for (uint32_t turn = 0; turn < static_cast<uint32_t>(grid.ctas); ++turn) {
    float acc[1][kKeyBlocks][D / 8][4];
    clear(acc[0]);
#pragma unroll 1
    do {
      // A list that was made ahead is whole, and its first tile is on its way.
      if (work.tile_list.scanned < work.iterations) {
        const int length = work.range.end - work.range.begin;
        find_by_cta<T::kThreads / 32>(work.tile_list, counts, work.iterations, [&](int x, ListedTile& tile) {
          tile.head = x / length;
          tile.block = work.range.begin + x - tile.head * length;
          return scores_of<T>(p, m, work, tile).template classify<kBlockM, kBlockN>(tile.block, work.w.block);
        });
        if (work.tile_list.count > 0) load_first_queries(work);
        ptx::cp_async_commit();
      }
      if (work.tile_list.count > 0) {
        walk_queries<T>(acc, p, m, work, smem, [&](int it) {
          const int left = work.tile_list.count - it;
          if (it == 0) {
            begin_next_work<T>(next, p, m, grid);
          } else if (left <= 2 && next.ahead && work.tile_list.scanned >= work.iterations) {
            if (left == 2) fetch_next_words<T>(next, m);
            else if (it > 1 && ptx::fresh_thread_idx() / 32 == T::kThreads / 32 - 1) list_next_work<T>(next, p, m);
          }
        });
      } else {
        debug_delay();
        __syncthreads();  // the first work tile fetched is there
        debug_delay();
        begin_next_work<T>(next, p, m, grid);
        debug_delay();
        ptx::cp_async_wait<0>();
        __syncthreads();
        debug_delay();
      }
    } while (work.tile_list.scanned < work.iterations);

    // Everybody has left all buffers.
    uint32_t fetched = 0;
    if (is_fetcher() && next.exists) fetched = fetch_work_tile(p);
    if (ptx::fresh_thread_idx() == 0) count_finished(p, work.w);
    if (next.exists) {
      load_keys(next.work);
      if (next.work.tile_list.count > 0) load_first_queries(next.work);
      ptx::cp_async_commit();
    }
    const int warp = ptx::fresh_thread_idx() / 32, lane = ptx::fresh_lane();
    const int key0 = warp % T::kKeyWarps * 16 * kKeyBlocks;
    if (warp < T::kKeyWarps) {
      write_gradient<T>(acc[0], p.dv, p.problem.head_dim_v, m.keep_scale, smem + T::kPAt, work.w, key0, lane);
    } else {
      write_gradient<T>(acc[0], p.dk, p.problem.head_dim, p.problem.softmax_scale, smem + T::kDsAt, work.w, key0, lane);
    }
    if (is_fetcher()) next.number = fetched;
    debug_delay();
    __syncthreads();  // everybody has left P, dS and what is shared of this work tile
    debug_delay();
    if (!__any_sync(ptx::kFullWarp, next.exists)) break;
    static_assert(sizeof(BwdModWork) % 4 == 0);
    const uint32_t* from = reinterpret_cast<const uint32_t*>(&next.work);
    uint32_t* to = reinterpret_cast<uint32_t*>(&work);
    constexpr int kWords = sizeof(BwdModWork) / 4;
    for (int i = ptx::fresh_thread_idx(); i < kWords; i += T::kThreads) to[i] = from[i];
    debug_delay();
    __syncthreads();
    debug_delay();
  }
}

template <typename T>
__global__ void __launch_bounds__(T::kThreads, 1)
    bwd_persistent_kernel(const __grid_constant__ BwdParams p, const __grid_constant__ Modifiers m,
                      const __grid_constant__ Grid grid) {
  if constexpr (kCompiledHere<T::kClass>) bwd_persistent_body<T>(p, m, grid);
  else __trap();
}

}  // namespace flash_ext::sm80
