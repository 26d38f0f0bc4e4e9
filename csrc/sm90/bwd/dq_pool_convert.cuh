// The producers that make dq of the accumulators of bwd/dq_pool.cuh.
#pragma once

#include "produce.cuh"
#include "steps.cuh"

namespace flash_ext::sm90 {

// A piece is what a warp has of 32 columns of a tile: 16 queries. It becomes rows of dq in its place, swizzled for TMA.
template <typename E>
__device__ __forceinline__ void convert_piece(uint32_t piece, float scale, int lane) {
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    const uint32_t from = piece + j * 1024 + lane * 16;
    const float4 x = ptx::load_shared(from), y = ptx::load_shared(from + 512);
    const uint32_t words[4] = {ptx::pack2<E>(x.x * scale, x.y * scale), ptx::pack2<E>(y.x * scale, y.y * scale),
                               ptx::pack2<E>(x.z * scale, x.w * scale), ptx::pack2<E>(y.z * scale, y.w * scale)};
    if (j == 0) __syncwarp();  // all of the first half has been read
    const int row = lane % 16, column = j * 2 + lane / 16;  // in 16 bytes
    ptx::stmatrix(piece + row * 64 + ((column ^ (row / 2 % 4)) << 4), words);
  }
}

// Where piece `i` of a tile belongs in dq.
struct DqPlace {
  int b, h, row, column;
};
template <int D>
__device__ __forceinline__ DqPlace place_of(const DqPoolView& pool, uint32_t tile, int i) {
  const uint32_t bh = divide(tile, pool.tiles_per_head), b = divide(bh, pool.heads);
  const int first = static_cast<int>(tile - bh * pool.tiles_per_head.divisor) * 64;
  // A chunk of 64 columns has two pieces for each of four warps; one of 32 has one.
  const bool whole = D % 64 == 0 || i < D / 64 * 8;
  return {static_cast<int>(b), static_cast<int>(bh - b * pool.heads.divisor), first + (whole ? i % 8 / 2 : i % 8) * 16,
          i / 8 * 64 + (whole ? i % 2 * 32 : 0)};
}

// The same for a dq of fp32, straight to memory.
__device__ __forceinline__ void store_float_piece(const BwdParams& p, uint32_t piece, const DqPlace& at) {
  const int lane = ptx::fresh_lane(), first = at.column + lane % 4 * 2;
#pragma unroll 1
  for (int i = 0; i < 8; ++i) {  // 8 rows of 8 columns
    const float2 x = ptx::load_shared_pair(piece + i / 4 * 512 + i % 4 / 2 * 1024 + lane * 16 + i % 2 * 8);
    const int row = at.row + i / 4 * 8 + lane / 4, column = first + i % 4 * 8;
    if (row >= p.problem.seqlen_q || column >= p.problem.head_dim) continue;
    const float scale = p.problem.scale;
    float* const to = float_row_pointer(p.dq, at.b, row, at.h) + column;
    *reinterpret_cast<float2*>(to) = make_float2(x.x * scale, x.y * scale);
  }
}

// Second and fourth warp (`which` 0 and 1): dq of the tiles they fetch. The second also tells when a work tile is
// added.
template <typename T>
__device__ __forceinline__ void convert_dq(const BwdArgs& a, const BwdMaps& maps, uint32_t smem,
                                           const BwdWorkTile* work_tiles, BwdBarriers<T> bars, int which) {
  using E = typename T::Element;
  constexpr int D = T::kHeadDim, kPieces = D / 8, kPieceStages = T::kPieceStages;
  constexpr int kPieceFloats = BwdTile::kPieceBytes / 4;
  const DqPoolView& pool = a.pool;
  if (pool.words == nullptr) {
    if (which == 0) for_work_tiles<T>(work_tiles, bars, [](const BwdWorkTile&) {});
    return;
  }
  const uint32_t pieces_at = smem + T::kPiecesAt + which * T::kConverterBytes;
  const auto piece_full = [&](int stage) { return bars.piece_full(which * kPieceStages + stage); };
  if (which == 0) {
    ptx::store_shared(smem + T::kZerosAt + threadIdx.x % 32 * 16, make_float4(0.f, 0.f, 0.f, 0.f));
    ptx::store_shared(smem + T::kZerosAt + 512 + threadIdx.x % 32 * 16, make_float4(0.f, 0.f, 0.f, 0.f));
    ptx::fence_proxy_async();
  }
  debug_delay();
  ptx::bar_sync(ptx::kConverterBarrier, 2 * ptx::kWarpThreads);
  PipelineState<T::kWorkStages> work_ring;
  PipelineState<kPieceStages> pieces;
  bool tells = which == 0;
  const auto fetch = [&] {
    uint32_t tile = 0;
    if (ptx::fresh_lane() == 0) tile = atomicAdd(pool.words, 1u);
    return __shfl_sync(ptx::kFullWarp, tile, 0);
  };
  // Votes of all lanes: each has acquired by its own look, since a vote orders no memory.
  const auto tell = [&] {
    if (!__all_sync(ptx::kFullWarp, ptx::mbarrier_test_wait(bars.work_full(work_ring.stage), work_ring.phase))) return;
    const BwdWorkTile& work = work_tiles[work_ring.stage];
    if (work.w.block < 0) {
      tells = false;
      return;
    }
    if (!__all_sync(ptx::kFullWarp, ptx::mbarrier_test_wait(bars.added(work_ring.stage), work_ring.phase))) return;
    if (ptx::fresh_lane() == 0) {
      ptx::fence_gpu();
      atomicAdd(work_tiles_added(pool, work.round), 1u);
    }
    __syncwarp();  // all have read the work tile
    ptx::mbarrier_arrive_for_warp(bars.work_empty(work_ring.stage), ptx::fresh_lane() == 0);
    work_ring.advance();
  };
  const auto is_added = [&](uint32_t round) {
    const uint32_t heads = min(pool.round_heads, a.grid.head_slots - round * pool.round_heads);
    return __all_sync(ptx::kFullWarp, ptx::load_acquire(work_tiles_added(pool, round)) == heads * a.grid.blocks);
  };
  // Stages go on from tile to tile.
  const auto convert = [&](uint32_t tile) {
    const uint32_t pool_tile = tile - divide(tile, pool.pool_tiles) * pool.pool_tiles.divisor;
    float* const from = a.p.dq_accum + int64_t{pool_tile} * (64 * D);
    const auto load = [&](int piece, int stage) {
      if (ptx::fresh_lane() != 0) return;
      ptx::mbarrier_arrive_expect_tx(piece_full(stage), BwdTile::kPieceBytes);
      ptx::bulk_load(pieces_at + stage * BwdTile::kPieceBytes, from + piece * kPieceFloats, BwdTile::kPieceBytes,
                     piece_full(stage));
    };
    ptx::fence_proxy_async_global();
    int stage = pieces.stage;
#pragma unroll 1
    for (int i = 0; i < kPieceStages; ++i) {
      load(i, stage);
      stage = stage + 1 == kPieceStages ? 0 : stage + 1;
    }
#pragma unroll 1
    for (int i = 0; i < kPieces; ++i) {
      const uint32_t piece = pieces_at + pieces.stage * BwdTile::kPieceBytes;
      wait(piece_full(pieces.stage), pieces.phase);
      if (!a.p.dq.is_float) {
        convert_piece<E>(piece, a.p.problem.scale, ptx::fresh_lane());
        ptx::fence_proxy_async();
      } else {
        store_float_piece(a.p, piece, place_of<D>(pool, tile, i));
      }
      __syncwarp();
      if (ptx::fresh_lane() == 0) {
        if (!a.p.dq.is_float) {
          const DqPlace at = place_of<D>(pool, tile, i);
          ptx::tma_store_5d(&maps.dq, piece, at.column, at.row, at.h, at.b, 0);
        }
        if (divide(tile, pool.round_tiles) + pool.rounds < pool.all_rounds) {
          float* const zeroed = from + i * kPieceFloats;
          ptx::bulk_store(zeroed, smem + T::kZerosAt, BwdTile::kZeroBytes);
          ptx::bulk_store(zeroed + kPieceFloats / 2, smem + T::kZerosAt, BwdTile::kZeroBytes);
        }
        ptx::bulk_commit();
        ptx::bulk_wait_read_all_but_one();
      }
      // The place of the piece before, which has left by now.
      if (i > 0 && i - 1 + kPieceStages < kPieces) {
        load(i - 1 + kPieceStages, pieces.stage == 0 ? kPieceStages - 1 : pieces.stage - 1);
      }
      pieces.advance();
    }
    if (ptx::fresh_lane() == 0) {
      ptx::bulk_wait();
      ptx::fence_gpu();
      atomicAdd(tiles_given_back(pool, divide(tile, pool.round_tiles)), 1u);
    }
    __syncwarp();
  };
  uint32_t tile = fetch();
#if FLASH_EXT_DEBUG
  int tries = 0;
#endif
#pragma unroll 1
  while (tells || tile < pool.all_tiles) {
    debug_delay();
#if FLASH_EXT_DEBUG
    if (++tries > 50'000'000) __trap();  // an error instead of a hang
#endif
    if (tells) tell();
    if (tile >= pool.all_tiles || !is_added(divide(tile, pool.round_tiles))) continue;
    convert(tile);
    tile = fetch();
  }
}

}  // namespace flash_ext::sm90
