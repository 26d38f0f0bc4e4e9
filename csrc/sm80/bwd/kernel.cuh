// FlashAttention backward over keys on mma.sync (Dao 2023, Algorithm 2), for sm_80 and newer.
//
//   P = exp(scale * Q K^T - lse)        dV = P^T dO
//   dP = dO V^T                         dK = scale * dS^T Q
//   dS = P * (dP - delta)               dQ = scale * dS K
//
// One CTA owns kBlockN keys of one key/value head and walks the query tiles of all query heads that read it,
// so dK and dV stay in registers and grouped heads need no further reduction. Scores are computed
// transposed, keys along the rows: the accumulator of S^T is then already the A operand of dV and dK.
//
// A key group is one warp while dK and dV of 16 * kKeyBlocks keys fit its registers (D = 64). Beyond that it is
// a pair of warps on the same keys:
//   first warp:  S^T -> P^T (handed over in fp32 through shared memory) -> dV += P^T dO
//   second warp: dP^T, dS^T = P^T * (dP^T - delta) (to shared memory)   -> dK += dS^T Q
// The first never waits for the second. dQ of the previous query tile, which needs the dS of all warps, is
// computed by all warps one iteration late and added to an fp32 buffer; so one barrier an iteration is
// enough. With p.dq_accum null (deterministic mode) dQ is left to bwd_dq/kernel.cuh.
//
// With modifiers (kMods) the tiles to visit come from a list, P is handed over times the derivative of the softcap and
// with the sign set where dropout hit it, the first warp stages its own keys of a 16-bit bias, and the second warps
// compute all of dQ.
//
// Shared memory (bytes, D = padded head_dim):
//   K, V       [kBlockN][D]            2 x 2 D kBlockN
//   Q, dO      [kStages][kBlockM][D]   2 x 2 D kBlockM kStages
//   row stats  [kStages][kBlockM]      8 kBlockM kStages    (lse * log2 e, delta)
//   P          fragments, fp32         4 kBlockN kBlockM   (pairs only)
//   dS         [2][kBlockN][kBlockM]   4 kBlockN kBlockM
//   mask       [kStages][kBlockM]      kBlockN / 8 kBlockM kStages (modifiers only)
//   bias       queries x a warp's keys, 16-bit, padded (modifiers only, where it fits)
// Named barriers of pairs: kPairBarrier + key_warp * kParts + part, "this part of P is written", 64 threads.
#pragma once

#include "../../common/float_results.cuh"
#include "../core/compiled_here.cuh"
#include "../core/wait_for_copies.cuh"
#include "search.cuh"
#include "warps.cuh"

namespace flash_ext::sm80 {

// Stages this warp's keys of the bias of a query tile, if it is one that can be staged.
template <typename T>
__device__ __forceinline__ void load_bias(const BwdParams& p, const Modifiers& m, const BwdModWork& work, uint32_t smem,
                                          const ListedTile& tile, int key_warp) {
  if (T::Stage::kBytes == 0 || m.bias.ptr == nullptr || !m.bias.staged) return;
  __syncwarp();
  T::Stage::load(smem + T::kBiasAt + key_warp * T::Stage::kBytes,
                 ScoreMod{p.problem, m, work.seq, work.first_head + tile.head}, tile.block * T::kBlockM,
                 work.w.block * T::kBlockN + key_warp * 16 * T::kKeyBlocks);
  ptx::cp_async_commit();
}

// Brings this warp's keys of dropout to a head of the group.
__device__ __forceinline__ void renew_drop_keys(const Modifiers& m, BwdModWork& work, int head, int key_warp) {
  if (m.rng == nullptr || work.drop_head[key_warp] == head) return;
  __syncwarp();
  if (ptx::fresh_lane() == 0) {
    work.drop_keys[key_warp].make(m, work.seq.b, work.first_head + head);
    work.drop_head[key_warp] = head;
  }
  __syncwarp();
}

struct NothingBeside {
  __device__ void operator()(int) const {}
};

// The whole walk of one warp, with modifiers that of one segment of the list. With pairs acc[0] is dV in the first warp
// of a pair and dK in the second; without, acc[0] is dV and acc[1] is dK. `beside` runs in every iteration behind the
// barrier.
template <typename T, int kAcc, typename Beside = NothingBeside>
__device__ __forceinline__ void walk_queries(float (&acc)[kAcc][T::kKeyBlocks][T::kHeadDim / 8][4], const BwdParams& p,
                                             const ModifiersOf<T>& m, WorkOf<T>& work, uint32_t smem,
                                             const Beside& beside = {}) {
  constexpr int D = T::kHeadDim, kBlockM = T::kBlockM;
  const auto iterations = [&] {
    if constexpr (T::kMods) {
      return work.tile_list.count;
    } else {
      return work.iterations;
    }
  };
  // dQ of the iteration before (it, g, m_block), whose dS all warps have written.
  const auto add_previous_dq = [&]<int kFirstCol, int kCols>(int it, int g, int m_block) {
    if constexpr (kCols == 0) return;
    if (it == 0 || work.dq_accum == nullptr) return;
    const int thread_idx = ptx::fresh_thread_idx();
    add_dq<T, kCols>(kFirstCol, smem + T::kDsAt + ((it - 1) & 1) * T::kDsBytes, smem + T::kKAt,
                     thread_idx / 32 % T::kKeyWarps, thread_idx % 32, [&]() -> DqRows {
                       int tile_g, row;
                       if constexpr (T::kMods) {
                         const ListedTile tile = work.tile_list[it - 1];
                         tile_g = tile.head;
                         row = tile.block * kBlockM;
                       } else {
                         const bool first_tile = m_block == work.range.begin;
                         tile_g = first_tile ? g - 1 : g;
                         row = (first_tile ? work.range.end - 1 : m_block - 1) * kBlockM;
                       }
                       return {work.dq_accum + (tile_g * work.stats_per_head + row) * D, work.w.q.length - row};
                     });
  };
  const auto add_first_columns = [&](int it, int g, int m_block) {
    add_previous_dq.template operator()<0, T::kDqColsFirst>(it, g, m_block);
  };
  const auto add_other_columns = [&](int it, int g, int m_block) {
    add_previous_dq.template operator()<T::kDqColsFirst, D - T::kDqColsFirst>(it, g, m_block);
  };
  const auto is_second = [] { return T::kPaired && ptx::fresh_thread_idx() >= 32 * T::kKeyWarps; };
  // Head of the group and query tile of an iteration: counted, or read from the list.
  int g = 0, m_block = work.range.begin;
  const auto current = [&](int it) -> ListedTile {
    if constexpr (T::kMods) {
      return work.tile_list[it];
    } else {
      return {m_block, g, 0};
    }
  };
#pragma unroll 1
  for (int it = 0; it < iterations(); ++it) {
    const int thread_idx = ptx::fresh_thread_idx(), lane = thread_idx % 32, key_warp = thread_idx / 32 % T::kKeyWarps;
    const int stage = T::kStages > 1 ? it & 1 : 0;
    if constexpr (T::kStages == 1) {
      debug_delay();
      __syncthreads();  // everybody has left the Q and dO of the previous iteration
      debug_delay();
      const ListedTile tile = current(it);
      load_queries<T>(p, work, smem, 0, tile.head, tile.block, thread_idx);
      if constexpr (T::kMods) load_mask<T>(p, m, work, smem, 0, tile, thread_idx);
      ptx::cp_async_commit();
    }
    debug_delay();
    ptx::cp_async_wait<0>();
    // Q, dO of this iteration and dS of the previous one are visible; the other stage and the P and dS
    // buffers of two iterations ago are free.
    __syncthreads();
    debug_delay();
    beside(it);
    // Asked for behind the first matrix products, so that the tensor cores do not wait for address arithmetic.
    const auto prefetch = [&] {
      if (T::kStages > 1 && it + 1 < iterations()) {
        if constexpr (T::kMods) {
          const ListedTile next = work.tile_list[it + 1];
          load_queries<T>(p, work, smem, stage ^ 1, next.head, next.block, ptx::fresh_thread_idx());
          load_mask<T>(p, m, work, smem, stage ^ 1, next, ptx::fresh_thread_idx());
        } else {
          const bool last_tile = m_block + 1 == work.range.end;
          load_queries<T>(p, work, smem, stage ^ 1, last_tile ? g + 1 : g, last_tile ? work.range.begin : m_block + 1,
                          ptx::fresh_thread_idx());
        }
        ptx::cp_async_commit();
      }
    };
    if constexpr (!T::kPaired) {
      add_first_columns(it, g, m_block);
      prefetch();
      step_both<T>(acc[0], acc[1], p, work.w, smem, stage, it & 1, m_block, key_warp, lane);
    } else if (is_second()) {
      // It waits for P of the first warp: dQ comes first here and last there.
      add_other_columns(it, g, m_block);
      prefetch();
      step_ds<T>(acc[0], m, smem, stage, it & 1, key_warp, lane);
    } else {
      if constexpr (T::kMods) renew_drop_keys(m, work, work.tile_list[it].head, key_warp);
      step_p<T>(acc[0], p, m, work, smem, stage, current(it), key_warp, lane);
      prefetch();
      if constexpr (T::kMods) {
        if (it + 1 < iterations()) load_bias<T>(p, m, work, smem, work.tile_list[it + 1], key_warp);
      }
      add_first_columns(it, g, m_block);
    }
    if (!T::kMods && ++m_block == work.range.end) {
      m_block = work.range.begin;
      ++g;
    }
  }
  debug_delay();
  __syncthreads();
  debug_delay();
  if constexpr (T::kPaired) {
    if (is_second()) add_other_columns(iterations(), g, m_block);
    else add_first_columns(iterations(), g, m_block);
  } else {
    add_first_columns(iterations(), g, m_block);
  }
  debug_delay();
  __syncthreads();
  debug_delay();
}

// With modifiers: the tiles of all heads of the group that matter, a segment of the list at a time.
template <typename T, int kAcc>
__device__ __forceinline__ void walk_segments(float (&acc)[kAcc][T::kKeyBlocks][T::kHeadDim / 8][4], const BwdParams& p,
                                              const Modifiers& m, BwdModWork& work, uint32_t smem) {
  __shared__ int counts[T::kThreads / 32];
#pragma unroll 1
  do {
    const int thread_idx = ptx::fresh_thread_idx();
    const int length = max(work.range.end - work.range.begin, 1);
    find_by_cta<T::kThreads / 32>(work.tile_list, counts, work.iterations, [&](int x, ListedTile& tile) {
      tile.head = x / length;
      tile.block = work.range.begin + x - tile.head * length;
      return scores_of<T>(p, m, work, tile).template classify<T::kBlockM, T::kBlockN>(tile.block, work.w.block);
    });
    const int count = work.tile_list.count;
    if (count > 0) {
      const ListedTile tile = work.tile_list[0];
      if constexpr (T::kStages > 1) {
        load_queries<T>(p, work, smem, 0, tile.head, tile.block, thread_idx);
        load_mask<T>(p, m, work, smem, 0, tile, thread_idx);
      }
      if (thread_idx < 32 * T::kKeyWarps) load_bias<T>(p, m, work, smem, tile, thread_idx / 32);
      ptx::cp_async_commit();
      walk_queries<T>(acc, p, m, work, smem);
    } else {
      // K and V may still be on their way to where dK and dV will lie.
      wait_for_copies();
    }
  } while (work.tile_list.scanned < work.iterations);
}

// Rounds this warp's dK or dV into its rows of a tile whose input is no longer needed, and stores them; in fp32 from
// registers.
template <typename T>
__device__ __forceinline__ void write_gradient(float (&acc)[T::kKeyBlocks][T::kHeadDim / 8][4], const StridedView& grad,
                                               int cols, float scale, uint32_t tile, const Work& w, int key0,
                                               int lane) {
  constexpr int D = T::kHeadDim;
  if (grad.is_float) {
#pragma unroll
    for (int kb = 0; kb < T::kKeyBlocks; ++kb) {
      store_float_rows<D / 8, false>(grad, w.b, w.k, w.h, w.block * T::kBlockN + key0 + kb * 16 + lane / 4, cols, lane,
                                     [&](int j, int i) { return acc[kb][j][i] * scale; });
    }
    return;
  }
  const uint32_t at = T::Tile::by_rows(tile, lane) + key0 * T::Tile::kRowBytes;
#pragma unroll
  for (int kb = 0; kb < T::kKeyBlocks; ++kb) {
#pragma unroll
    for (int db = 0; db < D / 16; ++db) {
      scale_block(acc[kb][2 * db], scale, scale);
      scale_block(acc[kb][2 * db + 1], scale, scale);
      put_block<typename T::Element>(T::Tile::block(at, kb * 16, db), acc[kb][2 * db], acc[kb][2 * db + 1], lane);
    }
  }
  __syncwarp();
  const int first = w.block * T::kBlockN;
  const TileDestination dst{row_pointer(grad, w.b, w.k.start + first, w.h), grad.row_stride, cols, grad.aligned};
  store_tile<16 * T::kKeyBlocks, D, 32>(dst, tile, key0, w.k.length - first, lane);
}

template <typename T>
__device__ __forceinline__ void bwd_body(const BwdParams& p, const ModifiersOf<T>& m, const Grid& grid) {
  constexpr int D = T::kHeadDim, kBlockM = T::kBlockM, kBlockN = T::kBlockN, kKeyBlocks = T::kKeyBlocks;
  extern __shared__ __align__(128) unsigned char smem_raw[];
  const int thread_idx = threadIdx.x;

  __shared__ WorkOf<T> work;
  const int group = static_cast<int>(grid.shared.divisor);
  if (thread_idx == 0) {
    int b = 0;
    Work w = decode_work<kBlockN, false, false>(p.problem, grid, T::kMods ? &b : nullptr);
    if constexpr (T::kMods) reorder_batch(m, w, p.problem.num_heads_k, b);
    const int h = w.h * group;
    const int64_t stat = row_stat_offset(p.problem, w, h);
    work.w = w;
    if constexpr (T::kMods) {
      work.seq = make_seq_info(p.problem, m, w, b);
      work.first_head = h;
      for (int& head : work.drop_head) head = -1;
      work.tile_list.scanned = 0;
      work.range = ScoreMod{p.problem, m, work.seq, h}.template q_blocks<kBlockM, kBlockN>(w.block);
    } else {
      work.range = AttnMod{p.problem, w.q.length, w.k.length}.template q_blocks<kBlockM, kBlockN>(w.block);
    }
    work.iterations = max(work.range.end - work.range.begin, 0) * group;
    work.stats_per_head = p.problem.cu_seqlens_q != nullptr ? p.problem.total_q : p.problem.seqlen_q;
    work.q = row_pointer(p.q, w.b, w.q.start, h);
    work.dout = row_pointer(p.dout, w.b, w.q.start, h);
    work.stats = reinterpret_cast<const float2*>(p.row_stats) + stat;
    work.dq_accum = p.dq_accum == nullptr ? nullptr : p.dq_accum + stat * D;
  }
  debug_delay();
  __syncthreads();
  debug_delay();
  const Work& w = work.w;
  if (!w.active) return;

  const uint32_t smem = ptx::smem_address(smem_raw);
  if (work.iterations > 0) {
    const int first = w.block * kBlockN, keys = w.k.length - first;
    const TileSource k{row_pointer(p.k, w.b, w.k.start + first, w.h), p.k.row_stride, p.problem.head_dim, p.k.aligned};
    const TileSource v{row_pointer(p.v, w.b, w.k.start + first, w.h), p.v.row_stride, p.problem.head_dim_v,
                       p.v.aligned};
    load_tile<kBlockN, D, T::kThreads>(smem + T::kKAt, k, keys, thread_idx);
    load_tile<kBlockN, D, T::kThreads>(smem + T::kVAt, v, keys, thread_idx);
    if constexpr (T::kStages > 1 && !T::kMods) load_queries<T>(p, work, smem, 0, 0, work.range.begin, thread_idx);
    ptx::cp_async_commit();
  }
  float acc[T::kPaired ? 1 : 2][kKeyBlocks][D / 8][4];
  for (auto& part : acc) clear(part);
  if constexpr (T::kMods) {
    walk_segments<T>(acc, p, m, work, smem);
  } else {
    walk_queries<T>(acc, p, m, work, smem);
  }

  const int warp = ptx::fresh_thread_idx() / 32, lane = ptx::fresh_thread_idx() % 32;
  const int key0 = warp % T::kKeyWarps * 16 * kKeyBlocks;
  if (warp < T::kKeyWarps) {
    float scale = 1.f;
    if constexpr (T::kMods) scale = m.keep_scale;
    write_gradient<T>(acc[0], p.dv, p.problem.head_dim_v, scale, smem + T::kVAt, w, key0, lane);
  }
  if (!T::kPaired || warp >= T::kKeyWarps) {
    write_gradient<T>(acc[T::kPaired ? 0 : 1], p.dk, p.problem.head_dim, p.problem.scale, smem + T::kKAt, w, key0,
                      lane);
  }
}

template <typename T>
__global__ void __launch_bounds__(T::kThreads, T::kTile.ctas_per_sm)
    bwd_kernel(const __grid_constant__ BwdParams p, const __grid_constant__ Grid grid) {
  if constexpr (kCompiledHere<T::kClass>) bwd_body<T>(p, NoModifiers{}, grid);
  else __trap();
}

template <typename T>
__global__ void __launch_bounds__(T::kThreads, T::kTile.ctas_per_sm)
    bwd_mod_kernel(const __grid_constant__ BwdParams p, const __grid_constant__ Modifiers m,
                   const __grid_constant__ Grid grid) {
  if constexpr (kCompiledHere<T::kClass>) {
    ptx::wait_for_kernel_before();
    bwd_body<T>(p, m, grid);
  } else {
    __trap();
  }
}

}  // namespace flash_ext::sm80
