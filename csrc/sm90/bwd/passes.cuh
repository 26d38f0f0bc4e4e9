// The two memory-bound passes around the sm90 backward over keys, and how both see the workspace.
//
// Workspace in tiles of 64 queries of one head, so that everything there moves in whole lines:
//   row_stats  [tile][-lse * log2 e of 64 rows, -delta of 64 rows], delta = rowsum(dout * out) - dlse
//   dq_semaphore [tile], for additions in order; words of a pool (bwd/dq_pool.cuh)
//   dq_accum   [tile, or its place in a pool][64 columns][warp][16 columns][half][lane][4]: a warp's accumulators, in the
//              order of its addition
// Rows that see nothing and rows outside the sequence get lse = +inf, hence weights 2^(s - inf) = 0.
#pragma once

#include "../../passes/bwd_passes.cuh"
#include "steps.cuh"

namespace flash_ext::sm90 {

// How the passes are given out tiles of queries.
struct TileGrid {
  Grid grid;
  int tiles_per_head;
  int unit_heads = 1;  // of the same rows that a CTA has (Launch::unit_heads)
};

// A tile of queries as a CTA of the passes sees it.
struct QueryTile {
  Work w;
  int64_t index;  // in the workspace
  bool outside;  // rows of no sequence: no place in the workspace, dq = 0
};

// use(tile) for the tiles of a CTA: one, or those of the same rows of heads that are given out together. One thread
// searches for all: where packed sequences are short, a search by every warp is what a pass spends its time on.
template <int kBlockM = BwdTile::kBlockM, typename Use>
__device__ __forceinline__ void for_query_tiles(const BwdParams& p, const TileGrid& grid, const Use& use) {
  __shared__ QueryTile first;
  if (threadIdx.x == 0) {
    int b = 0;
    QueryTile t;
    t.w = decode_work<kBlockM, true, false>(p.problem, grid.grid, &b);
    t.w.h *= grid.unit_heads;
    t.outside = b < 0 || b >= p.problem.batch;
    t.index = first_tile<kBlockM>(p.problem, t.w, b, t.w.h, grid.tiles_per_head) + t.w.block;
    first = t;
  }
  __syncthreads();
  QueryTile tile = first;
  if (!tile.w.active) return;
#pragma unroll 1
  for (int left = grid.unit_heads; left > 0; --left, ++tile.w.h, tile.index += grid.tiles_per_head) use(tile);
}

// lse and delta of the kBlockM rows of a tile. All loads are on their way before the first sum: row by row the pass has
// half the speed of a copy.
template <typename E, int D, int kBlockM>
__device__ __forceinline__ void store_row_stats(const BwdParams& p, const QueryTile& tile) {
  constexpr int kLanes = kPassLanes<D>, kRows = kPassThreads / kLanes, kCount = kBlockM / kRows;
  const int chunk = threadIdx.x % kLanes, valid = p.problem.head_dim_v - chunk * 8, first = threadIdx.x / kLanes;
  float* const stats = p.row_stats + tile.index * (2 * kBlockM) + first;
  const Span rows = tile.w.q;
  const auto is_inside = [&](int i) { return tile.w.block * kBlockM + first + i * kRows < rows.length; };
  uint4 o[kCount] = {}, d[kCount] = {};
  float lse[kCount], dlse[kCount] = {};
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const int row = tile.w.block * kBlockM + first + i * kRows;
    lse[i] = -INFINITY;
    if (!is_inside(i)) continue;
    if (valid > 0) {
      o[i] = load_8(row_pointer(p.out, tile.w.b, rows.start + row, tile.w.h) + chunk * 8, valid, p.out.aligned);
      d[i] = load_8(row_pointer(p.dout, tile.w.b, rows.start + row, tile.w.h) + chunk * 8, valid, p.dout.aligned);
    }
    if (chunk == 0) {
      const int64_t at = row_stat_offset(p.problem, tile.w, tile.w.h) + row;
      lse[i] = p.lse[at];
      if (p.dlse != nullptr) dlse[i] = p.dlse[at];
    }
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    float sum = dot_8<E>(o[i], d[i]);
#pragma unroll
    for (int step = kLanes / 2; step > 0; step /= 2) sum += __shfl_xor_sync(ptx::kFullWarp, sum, step);
    if (chunk != 0) continue;
    stats[i * kRows] = lse[i] < kLowestLse ? -INFINITY : -lse[i] * kLog2e;
    stats[kBlockM + i * kRows] = dlse[i] - sum;
  }
}

// Accumulators that the first pass zeroes, at a compiled head_dim of 64 it may be those of the first 32 columns, and
// words of a pool or of Stream-K. Sequences with at most `stored_keys` keys have no accumulators, because their dq is
// stored: of them it zeroes rows of dq that nobody else may write, if there are no keys or `dq_rows` says so.
struct Zeroed {
  int64_t tiles = INT64_MAX;
  bool half = false;
  uint32_t* words = nullptr;
  int num_words = 0;
  int stored_keys = -1;
  bool dq_rows = false;
};

template <int D>
__device__ __forceinline__ void zero_tile(const BwdParams& p, const QueryTile& tile, uint32_t* dq_semaphore,
                                          const Zeroed& zeroed) {
  if (dq_semaphore != nullptr) {
    const AttnMod mod{p.problem, tile.w.q.length, tile.w.k.length};
    // Whoever comes first writes the tile.
    if (init_dq_semaphore(dq_semaphore, mod, tile.index, tile.w.block)) return;
  }
  if (tile.w.k.length <= zeroed.stored_keys) {
    if (!zeroed.dq_rows && tile.w.k.length > 0) return;
    const int warp_row = tile.w.block * BwdTile::kBlockM + threadIdx.x / 32 * 8;
    zero_rows(p.dq, tile.w.b, tile.w.q.start + warp_row, tile.w.h, min(8, tile.w.q.length - warp_row),
              p.problem.head_dim, threadIdx.x % 32);
    return;
  }
  if (tile.index >= zeroed.tiles || (zeroed.half && threadIdx.x >= kPassThreads / 2)) return;
  float4* dq = reinterpret_cast<float4*>(p.dq_accum + tile.index * (64 * D));
#pragma unroll
  for (int i = threadIdx.x; i < 16 * D; i += kPassThreads) dq[i] = make_float4(0.f, 0.f, 0.f, 0.f);
}

template <typename E, int D>
__global__ void __launch_bounds__(kPassThreads)
    row_stats_and_zero_kernel(const __grid_constant__ BwdParams p, const __grid_constant__ TileGrid grid,
                              uint32_t* dq_semaphore, const __grid_constant__ Zeroed zeroed) {
  ptx::allow_next_kernel();
  const int64_t thread = int64_t{blockIdx.x} * kPassThreads + threadIdx.x;
  if (thread < zeroed.num_words) zeroed.words[thread] = 0;
  for_query_tiles(p, grid, [&](const QueryTile& tile) {
    if (tile.outside) return;
    store_row_stats<E, D, BwdTile::kBlockM>(p, tile);
    zero_tile<D>(p, tile, dq_semaphore, zeroed);
  });
}

// dq = scale * dq_accum, in the type of dq. A warp takes the 16 rows that it has as a consumer. The kernel leaves out
// sequences with at most `stored_keys` keys, whose dq is there.
template <typename E, int D>
__device__ __forceinline__ void convert_tile(const BwdParams& p, const QueryTile& tile) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  float dq[D / 2];
#pragma unroll
  for (int i = 0; i < D / 8; ++i) {
    float4 x = make_float4(0.f, 0.f, 0.f, 0.f);
    if (!tile.outside && i / 2 * 16 < p.problem.head_dim) {  // columns that there are
      const int columns = min(64, D - i / 8 * 64);
      x = *reinterpret_cast<const float4*>(p.dq_accum + tile.index * (64 * D) + i / 8 * 4096 + warp * 16 * columns +
                                           i % 8 * 128 + lane * 4);
    }
    float* to = dq + i / 2 * 8 + i % 2 * 2;
    to[0] = x.x, to[1] = x.y, to[4] = x.z, to[5] = x.w;
  }
  store_rows<E>(p.dq, tile.w.b, tile.w.q, tile.w.h, dq, p.problem.scale, p.problem.head_dim,
                tile.w.block * 64 + warp * 16 + lane / 4, lane);
}

template <typename E, int D>
__global__ void __launch_bounds__(kDqConvertThreads)
    dq_convert_kernel(const __grid_constant__ BwdParams p, const __grid_constant__ TileGrid grid, int stored_keys) {
  ptx::wait_for_kernel_before();
  for_query_tiles(p, grid, [&](const QueryTile& tile) {
    if (tile.outside || tile.w.k.length > stored_keys) convert_tile<E, D>(p, tile);
  });
}

}  // namespace flash_ext::sm90
