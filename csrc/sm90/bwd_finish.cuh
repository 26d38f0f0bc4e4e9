// The producers that make dq of the accumulators of bwd_ring.cuh.
#pragma once

#include "bwd_produce.cuh"
#include "bwd_steps.cuh"

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
__device__ __forceinline__ DqPlace place_of(const Ring& ring, uint32_t tile, int i) {
  const uint32_t bh = divide(tile, ring.tiles_per_head), b = divide(bh, ring.heads);
  const int first = static_cast<int>(tile - bh * ring.tiles_per_head.divisor) * 64;
  // A chunk of 64 columns has two pieces for each of four warps; one of 32 has one.
  const bool whole = D % 64 == 0 || i < D / 64 * 8;
  return {static_cast<int>(b), static_cast<int>(bh - b * ring.heads.divisor),
          first + (whole ? i % 8 / 2 : i % 8) * 16, i / 8 * 64 + (whole ? i % 2 * 32 : 0)};
}

// The same for a dq of fp32, straight to memory.
__device__ __forceinline__ void store_float_piece(const BwdParams& p, uint32_t piece, const DqPlace& at) {
  const int lane = ptx::fresh_lane(), first = at.column + lane % 4 * 2;
#pragma unroll 1
  for (int i = 0; i < 8; ++i) {  // 8 rows of 8 columns
    const float2 x = ptx::load_shared_pair(piece + i / 4 * 512 + i % 4 / 2 * 1024 + lane * 16 + i % 2 * 8);
    const int row = at.row + i / 4 * 8 + lane / 4, column = first + i % 4 * 8;
    if (row >= p.problem.seqlen_q || column >= p.problem.head_dim) continue;
    const float scale = p.problem.softmax_scale;
    float* const to = float_row_pointer(p.dq, at.b, row, at.h) + column;
    *reinterpret_cast<float2*>(to) = make_float2(x.x * scale, x.y * scale);
  }
}


// Second and fourth warp (`which` 0 and 1): dq of the tiles they draw. The second also tells when an item is added.
template <typename T>
__device__ __forceinline__ void finish_queries(const BwdArgs& a, const BwdMaps& maps, uint32_t smem,
                                               const BwdItem* items, BwdBarriers<T> bars, int which) {
  using E = typename T::Element;
  constexpr int D = T::kHeadDim, kPieces = D / 8, kPieceSlots = T::kPieceSlots;
  constexpr int kPieceFloats = BwdTile::kPieceBytes / 4;
  const Ring& ring = a.ring;
  if (ring.words == nullptr) {
    if (which == 0) for_items<T>(items, bars, [](const BwdItem&) {});
    return;
  }
  const uint32_t pieces_at = smem + T::kPiecesAt + which * T::kFinisherBytes;
  const auto piece_full = [&](int slot) { return bars.piece_full(which * kPieceSlots + slot); };
  if (which == 0) {
    ptx::store_shared(smem + T::kZerosAt + threadIdx.x % 32 * 16, make_float4(0.f, 0.f, 0.f, 0.f));
    ptx::store_shared(smem + T::kZerosAt + 512 + threadIdx.x % 32 * 16, make_float4(0.f, 0.f, 0.f, 0.f));
    ptx::fence_proxy_async();
  }
  debug_delay();
  ptx::bar_sync(ptx::kFinisherBarrier, 64);
  RingPosition<T::kItems> place;
  RingPosition<kPieceSlots> pieces;
  bool tells = which == 0;
  const auto draw = [&] {
    uint32_t tile = 0;
    if (ptx::fresh_lane() == 0) tile = atomicAdd(ring.words, 1u);
    return __shfl_sync(ptx::kFullWarp, tile, 0);
  };
  // Votes of all lanes: each has acquired by its own look, since a vote orders no memory.
  const auto tell = [&] {
    if (!__all_sync(ptx::kFullWarp, ptx::mbarrier_test_wait(bars.item_full(place.slot), place.parity))) return;
    const BwdItem& item = items[place.slot];
    if (item.w.block < 0) {
      tells = false;
      return;
    }
    if (!__all_sync(ptx::kFullWarp, ptx::mbarrier_test_wait(bars.added(place.slot), place.parity))) return;
    if (ptx::fresh_lane() == 0) {
      ptx::fence_gpu();
      atomicAdd(items_added(ring, item.round), 1u);
    }
    __syncwarp();  // all have read the item
    ptx::mbarrier_arrive_for_warp(bars.item_empty(place.slot), ptx::fresh_lane() == 0);
    place.advance();
  };
  const auto is_added = [&](uint32_t round) {
    const uint32_t heads = min(ring.round_heads, a.grid.head_slots - round * ring.round_heads);
    return __all_sync(ptx::kFullWarp, ptx::load_acquire(items_added(ring, round)) == heads * a.grid.blocks);
  };
  // Slots go on from tile to tile.
  const auto convert = [&](uint32_t tile) {
    const uint32_t ring_tile = tile - divide(tile, ring.ring_tiles) * ring.ring_tiles.divisor;
    float* const from = a.p.dq_accum + int64_t{ring_tile} * (64 * D);
    const auto load = [&](int piece, int slot) {
      if (ptx::fresh_lane() != 0) return;
      ptx::mbarrier_arrive_expect_tx(piece_full(slot), BwdTile::kPieceBytes);
      ptx::bulk_load(pieces_at + slot * BwdTile::kPieceBytes, from + piece * kPieceFloats, BwdTile::kPieceBytes,
                     piece_full(slot));
    };
    ptx::fence_proxy_async_global();
    int slot = pieces.slot;
#pragma unroll 1
    for (int i = 0; i < kPieceSlots; ++i) {
      load(i, slot);
      slot = slot + 1 == kPieceSlots ? 0 : slot + 1;
    }
#pragma unroll 1
    for (int i = 0; i < kPieces; ++i) {
      const uint32_t piece = pieces_at + pieces.slot * BwdTile::kPieceBytes;
      wait(piece_full(pieces.slot), pieces.parity);
      if (!a.p.dq.is_float) {
        convert_piece<E>(piece, a.p.problem.softmax_scale, ptx::fresh_lane());
        ptx::fence_proxy_async();
      } else {
        store_float_piece(a.p, piece, place_of<D>(ring, tile, i));
      }
      __syncwarp();
      if (ptx::fresh_lane() == 0) {
        if (!a.p.dq.is_float) {
          const DqPlace at = place_of<D>(ring, tile, i);
          ptx::tma_store_5d(&maps.dq, piece, at.column, at.row, at.h, at.b, 0);
        }
        if (divide(tile, ring.round_tiles) + ring.rounds < ring.all_rounds) {
          float* const zeroed = from + i * kPieceFloats;
          ptx::bulk_store(zeroed, smem + T::kZerosAt, BwdTile::kZeroBytes);
          ptx::bulk_store(zeroed + kPieceFloats / 2, smem + T::kZerosAt, BwdTile::kZeroBytes);
        }
        ptx::bulk_commit();
        ptx::bulk_wait_read_all_but_one();
      }
      // The place of the piece before, which has left by now.
      if (i > 0 && i - 1 + kPieceSlots < kPieces) {
        load(i - 1 + kPieceSlots, pieces.slot == 0 ? kPieceSlots - 1 : pieces.slot - 1);
      }
      pieces.advance();
    }
    if (ptx::fresh_lane() == 0) {
      ptx::bulk_wait();
      ptx::fence_gpu();
      atomicAdd(tiles_given_back(ring, divide(tile, ring.round_tiles)), 1u);
    }
    __syncwarp();
  };
  uint32_t tile = draw();
#if FLASH_EXT_DEBUG
  int tries = 0;
#endif
#pragma unroll 1
  while (tells || tile < ring.all_tiles) {
    debug_delay();
#if FLASH_EXT_DEBUG
    if (++tries > 50'000'000) __trap();  // an error instead of a hang
#endif
    if (tells) tell();
    if (tile >= ring.all_tiles || !is_added(divide(tile, ring.round_tiles))) continue;
    convert(tile);
    tile = draw();
  }
}

}  // namespace flash_ext::sm90
