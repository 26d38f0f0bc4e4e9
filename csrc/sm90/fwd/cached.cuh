// The Hopper forward over pages (kv_cache.h): lengths and pages come from the device. Only the producers differ.
//
// A tile of keys is boxes of box_rows rows, each inside a page: lane i of the loader looks up the page of box i and starts
// its copy. Rows behind the last whole box of a sequence are copied by hand, zeros behind the length, so that nothing of
// a slot that is not in use is read.
#pragma once

#include "../../common/kv_rows.cuh"
#include "../core/roles.cuh"
#include "consume.cuh"
#include "produce.cuh"

namespace flash_ext::sm90 {

struct CachedFwdArgs : FwdArgs {
  KvCache cache;
  RowRange served;
  int box_rows = 0;  // a power of two from 8 on that divides the page and the tile
};

// A work tile, w.b being the sequence; not active where another kernel serves the sequence.
template <typename T>
__device__ __forceinline__ Work decode_cached(const CachedFwdArgs& a, uint32_t index) {
  const Problem& p = a.p.problem;
  int sequence = 0;
  Work w = decode_index<T::kBlockM, true, true, true, true>(index, p, a.grid, &sequence);
  const bool outside = sequence < 0 || sequence == p.batch;
  if (!outside && w.q.length * static_cast<int>(a.grid.shared.divisor) <= a.served.above) w.active = false;
  w.b = outside ? 0 : sequence;
  w.k = {0, CachedKeys::of(p, a.cache, sequence).length};
  return w;
}

// Rows [begin, kRows) of a tile by a warp, zeros from row `end` on. `from`: row `begin`.
template <int kRows, int kChunks>
__device__ __forceinline__ void copy_rows(uint32_t to, const uint16_t* from, int64_t row_stride, int columns, int begin,
                                          int end, int lane) {
#pragma unroll 2
  for (int i = begin * (8 * kChunks) + lane; i < kRows * (8 * kChunks); i += 32) {
    const int r = i / (8 * kChunks), piece = i % (8 * kChunks);
    float4 x{};
    if (r < end && piece * 8 < columns) {
      x = *reinterpret_cast<const float4*>(from + (r - begin) * row_stride + piece * 8);
    }
    ptx::store_shared(to + piece / 8 * (kRows * 128) + r * 128 + ((piece % 8) ^ (r % 8)) * 16, x);
  }
  ptx::fence_proxy_async();
}

// Where the box of a lane lies: page and row of the page, of a box that begins before the end of the sequence.
struct BoxPlace {
  int page, row;
};

template <typename T, int kChunks>
__device__ __forceinline__ void copy_boxes(const CachedFwdArgs& a, const CUtensorMap& map, const Steps& steps,
                                           const StridedView& view, int columns, uint32_t to, uint32_t bar, int left,
                                           BoxPlace place, int h, int lane) {
  constexpr int kRows = T::kBlockN;
  const int whole = min(left, kRows) & -a.box_rows;  // rows of whole boxes
  if (lane * a.box_rows < whole) {
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      ptx::tma_load_5d(to + i * kRows * 128 + lane * a.box_rows * 128, &map, bar, 64 * i, place.row, h * steps.head,
                       place.page * steps.batch, 0);
    }
  }
  if (whole < kRows) {
    const int source = min(whole / a.box_rows, 31);
    const int64_t page = __shfl_sync(ptx::kFullWarp, place.page, source);
    const int64_t row = __shfl_sync(ptx::kFullWarp, place.row, source);
    const uint16_t* from = static_cast<const uint16_t*>(view.ptr) + page * view.batch_stride + row * view.row_stride +
                           h * view.head_stride;
    copy_rows<kRows, kChunks>(to, from, view.row_stride, columns, whole, left, lane);
  }
  __syncwarp();
  if (lane == 0) ptx::mbarrier_arrive_expect_tx(bar, kChunks * whole * 128);
}

// load_tiles() over pages.
template <typename T>
__device__ __forceinline__ void load_cached_tiles(const CachedFwdArgs& a, const FwdMaps& maps, uint32_t smem,
                                                  const WorkTile* work_tiles, Barriers<T> bars) {
  const Problem& p = a.p.problem;
  const int lane = threadIdx.x % 32;
  PipelineState<T::kKvStages> ring;
  PipelineState<T::kWorkStages> work_ring;
  ring.phase = 1;
  int v_h = -1, v_left = 0;  // of the V tile that is still to load
  BoxPlace v_place{};
  const auto load_v = [&] {
    wait(bars.kv_empty(ring.stage), ring.phase);
    copy_boxes<T, T::kChunksV>(a, maps.v, a.v_steps, a.p.v, p.head_dim_v, smem + ring.stage * T::kStageBytes,
                               bars.kv_full(ring.stage), v_left, v_place, v_h, lane);
    ring.advance();
  };
#pragma unroll 1
  while (true) {
    wait(bars.work_full(work_ring.stage), work_ring.phase);
    const WorkTile& work = work_tiles[work_ring.stage];
    if (work.w.block < 0) break;
    work_ring.advance();
    const int h = static_cast<int>(divide(work.w.h, a.grid.shared)), b = work.w.b, length = work.w.k.length;
    const int tiles = work.blocks.end - work.blocks.begin;
    int first = work.blocks.end * T::kBlockN;
#pragma unroll 1
    for (int left = tiles; left > 0; --left) {
      const bool dynamic = a.scheduler.counter != nullptr;
      if (dynamic && left == min(kFetchAhead, tiles) && lane == 0) ptx::mbarrier_arrive(bars.work_ending());
      first -= T::kBlockN;
      const int own = first + lane * a.box_rows;
      BoxPlace place{b, own};
      if (a.cache.block_table != nullptr && own < length && lane * a.box_rows < T::kBlockN) {
        const int number = static_cast<int>(divide(own, a.cache.page_size));
        place.page = min(max(a.cache.block_table[b * a.cache.table_stride + number], 0), a.cache.num_pages - 1);
        place.row = own - number * static_cast<int>(a.cache.page_size.divisor);
      }
      wait(bars.kv_empty(ring.stage), ring.phase);
      copy_boxes<T, T::kChunks>(a, maps.k, a.k_steps, a.p.k, p.head_dim, smem + ring.stage * T::kStageBytes,
                                bars.kv_full(ring.stage), length - first, place, h, lane);
      ring.advance();
      if (v_h >= 0) load_v();
      v_place = place, v_h = h, v_left = length - first;
    }
  }
  if (v_h >= 0) load_v();
}

template <typename T>
__global__ void __launch_bounds__(T::kThreads, 1)
    fwd_sm90_cached_kernel(const __grid_constant__ CachedFwdArgs a, const __grid_constant__ FwdMaps maps) {
  run_cta<T, WorkTile, Barriers<T>>(
      T::kWorkAt, T::kBarriersAt, [](const auto&) {},
      [&](const auto& cta, int warp) {
        if (warp == 0) {
          schedule_work<T>(a, maps, cta.smem, cta.shared, cta.bars, [&](uint32_t i) { return decode_cached<T>(a, i); });
        } else if (warp == 1) {
          load_cached_tiles<T>(a, maps, cta.smem, cta.shared, cta.bars);
        }
      },
      [&](const auto& cta, int group) { consume<T>(a, maps, cta.smem, cta.shared, cta.bars, group - 1); });
}

}  // namespace flash_ext::sm90
