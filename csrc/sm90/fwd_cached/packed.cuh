// The Hopper forward over a cache for few queries of each sequence. Two things differ from kernel.cuh:
//
//   A tile has the query heads of a key head side by side: row r is query r / group, head r % group of the key head's. So
//   keys come once for all of them, and 16 queries of 4 heads fill 64 rows.
//   CTAs share out the keys of a sequence, in parts by the lengths of all (common/key_parts.cuh). sm80/split_kv/cached.cuh
//   adds them up.
#pragma once

#include "../../common/key_parts.cuh"
#include "../../common/sink.cuh"
#include "kernel.cuh"
#include "tiles.h"

namespace flash_ext::sm90 {

// w.h is the key head, w.block counts tiles of tile_queries.
struct PackedTile : WorkTile {
  int part;  // kWhole: what it finds is the result

  static constexpr int kWhole = -1;
};

struct PackedFwdArgs : CachedFwdArgs {
  SplitGrid parts;
  KvCacheGrid c;
  void* partials;
  int tile_queries, tile_rows;  // of a tile; rows: times the query heads of a key head
  Divisor row_tiles;  // CTAs that share out the tiles of a sequence, a key head and a part
};

// Calls with modifiers (packed_mod.cuh).
template <typename Args>
struct WithModifiers : Args {
  Modifiers m;
};
template <typename T, typename Base>
struct ModifiedNumbers;

template <typename E, int D, bool kSharesKeys, bool kMod = false>
struct PackedTraits : FwdTraits<E, D, D, D <= 128 ? 128 : 192> {
  using Base = FwdTraits<E, D, D, D <= 128 ? 128 : 192>;
  using Numbers =
      std::conditional_t<kMod, ModifiedNumbers<PackedTraits, PlainNumbers<PackedTraits>>, PlainNumbers<PackedTraits>>;
  using Tile = PackedTile;
  using Args = std::conditional_t<kMod, WithModifiers<PackedFwdArgs>, PackedFwdArgs>;
  static constexpr bool kParts = true, kPacked = true, kModified = kMod;
  static constexpr bool kQuantized = false;  // quantized.cuh
  static constexpr bool kCutsQueries = false;  // whether a tile may have some heads of a query (fwd_latent/kernel.cuh)
  static constexpr FwdTile kTile = packed_tile(D, kSharesKeys);
  static constexpr int kBlockM = kTile.block_m(), kKvStages = kTile.kv_stages;
  static constexpr int kKeys = kSharesKeys ? Base::kBlockN / 2 : Base::kBlockN;
  static constexpr int kNarrow = kSharesKeys ? kKeys : Base::kNarrow;
  static constexpr int kQBytes = tile_bytes(kBlockM, D), kQAt = kKvStages * Base::kStageBytes;
  static constexpr int kHandoverAt = kQAt + Base::kQStages * kQBytes;
  static constexpr int kWorkAt = kHandoverAt + kTile.handover_bytes(D);
  static constexpr int kPlaceAt = kWorkAt + Base::kWorkStages * static_cast<int>(sizeof(Tile));  // the scheduler's
  static constexpr int kBarriersAt = (kPlaceAt + static_cast<int>(sizeof(Work)) + 7) / 8 * 8;
  static constexpr int kSmemBytes = packed_smem_bytes(D, kSharesKeys);
  static_assert(kTile.block_n == Base::kBlockN && kTile.consumers == 2 && kTile.q_stages == Base::kQStages);
  static_assert(kBarriersAt + 8 * (3 * kKvStages + 2 * Base::kQStages + Base::kWorkStages + 1) <= kSmemBytes);
};

// Where row `row` of a tile lies.
struct PackedRow {
  int query, head;  // head: among all

  template <typename T>
  __device__ static __forceinline__ PackedRow of(const PackedFwdArgs& a, const Work& w, int row) {
    if constexpr (T::kCutsQueries) {
      row += w.block * T::kBlockM;
      const int query = static_cast<int>(divide(row, a.grid.shared));
      return {query, row - query * static_cast<int>(a.grid.shared.divisor)};
    }
    const int group = static_cast<int>(a.grid.shared.divisor), query = static_cast<int>(divide(row, a.grid.shared));
    return {w.block * a.tile_queries + query, w.h * group + row - query * group};
  }
  __device__ __forceinline__ bool is_there(const PackedFwdArgs& a, const Work& w, int row) const {
    return row < a.tile_rows && query < w.q.length;
  }
};

// The queries of a tile; last < first behind the last one.
template <typename T>
__device__ __forceinline__ QueryRange queries_of_tile(const PackedFwdArgs& a, const Work& w) {
  if constexpr (T::kCutsQueries) {
    const int rows = w.q.length * static_cast<int>(a.grid.shared.divisor), first = w.block * T::kBlockM;
    if (first >= rows) return {1, 0};
    return {static_cast<int>(divide(first, a.grid.shared)),
            static_cast<int>(divide(min(first + T::kBlockM, rows) - 1, a.grid.shared))};
  }
  const int first = w.block * a.tile_queries;
  return {first, min(first + a.tile_queries, w.q.length) - 1};
}

__device__ __forceinline__ float* packed_lse(const PackedFwdArgs& a, const Work& w, const PackedRow& at) {
  return a.p.lse == nullptr ? nullptr : a.p.lse + row_stat_offset(a.p.problem, w, at.head) + at.query;
}

// Rows that have no keys.
template <typename T>
__device__ __forceinline__ void store_empty_packed(const typename T::Args& a, const Work& w, int lane) {
#pragma unroll 1
  for (int row = 0; row < a.tile_rows; ++row) {
    const PackedRow at = PackedRow::of<T>(a, w, row);
    if (!at.is_there(a, w, row)) break;
    const bool has_sink = a.sinks != nullptr && w.b >= 0 && w.b < a.p.problem.batch;
    const float value = has_sink ? a.sinks[at.head] : -INFINITY;
    if (float* const lse = packed_lse(a, w, at); lse != nullptr && lane == 0) *lse = value;
    zero_rows(a.p.out, w.b, w.q.start + at.query, at.head, 1, a.p.problem.head_dim_v, lane);
  }
}

// Two warpgroups that have the same rows and half of the keys each: the second one hands what it holds to the first,
// thread by thread. True in the first, which then holds both. unit: of maxima, in log2.
template <typename T>
__device__ __forceinline__ bool join_halves(uint32_t smem, int group, float (&o)[T::kHeadDimV / 2], RowState& state,
                                            float unit) {
  constexpr int kThreads = 256, kPieces = T::kHeadDimV / 8, kPitch = 128 * 16;
  const uint32_t own = smem + T::kHandoverAt + ptx::fresh_thread_idx() % 128 * 16;
  if (group == 1) {
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      ptx::store_shared(own + i * kPitch, make_float4(o[4 * i], o[4 * i + 1], o[4 * i + 2], o[4 * i + 3]));
    }
    ptx::store_shared(own + kPieces * kPitch,
                      make_float4(state.minus_max[0], state.minus_max[1], state.sum[0], state.sum[1]));
  }
  debug_delay();
  ptx::bar_sync(ptx::kExchangeBarrier, kThreads);
  if (group == 0) {
    const float4 x = ptx::load_shared(own + kPieces * kPitch);
    const float minus_max[2] = {x.x, x.y}, sum[2] = {x.z, x.w};
    float ours[2], theirs[2];  // what sums so far are worth
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float lower = fminf(state.minus_max[half], minus_max[half]);
      const bool unseen = lower == INFINITY;
      ours[half] = unseen ? 1.f : ptx::ex2((lower - state.minus_max[half]) * unit);
      theirs[half] = unseen ? 1.f : ptx::ex2((lower - minus_max[half]) * unit);
      state.minus_max[half] = lower;
      state.sum[half] = state.sum[half] * ours[half] + sum[half] * theirs[half];
    }
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const float4 y = ptx::load_shared(own + i * kPitch);
      o[4 * i] = o[4 * i] * ours[0] + y.x * theirs[0];
      o[4 * i + 1] = o[4 * i + 1] * ours[0] + y.y * theirs[0];
      o[4 * i + 2] = o[4 * i + 2] * ours[1] + y.z * theirs[1];
      o[4 * i + 3] = o[4 * i + 3] * ours[1] + y.w * theirs[1];
    }
  }
  debug_delay();
  ptx::bar_sync(ptx::kExchangeBarrier, kThreads);  // the place is free
  return group == 0;
}

// Stores what a thread holds of two rows: a part, or the result. unit: of maxima, in log2. `from`: the first of the
// columns that it has.
template <typename T, int kCount>
__device__ __forceinline__ void store_packed(const typename T::Args& a, const typename T::Tile& work,
                                             const float (&o)[kCount], const RowState& state, int row, int lane,
                                             float unit = 1.f, int from = 0) {
  const Work& w = work.w;
  const int columns = a.p.problem.head_dim_v - from, quad_lane = lane % 4;
  const bool stores_stats = quad_lane == 0 && from == 0;
  float factor = 1.f;
  if constexpr (T::kQuantized) factor = work.of_v;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float sum = state.sum[half];
    sum += __shfl_xor_sync(ptx::kFullWarp, sum, 1);
    sum += __shfl_xor_sync(ptx::kFullWarp, sum, 2);
    const PackedRow at = PackedRow::of<T>(a, w, row + 8 * half);
    const bool is_there = at.is_there(a, w, row + 8 * half);
    if (work.part != PackedTile::kWhole) {
      if (!is_there) continue;
      const int in_sequence = w.block * a.tile_rows + row + 8 * half;
      const int64_t number =
          work.part * a.parts.total_rows + (int64_t{w.b} * a.p.problem.num_heads_k + w.h) * a.c.rows + in_sequence;
      if (stores_stats) static_cast<float2*>(a.partials)[number] = make_float2(-state.minus_max[half], sum);
      float* const to = reinterpret_cast<float*>(static_cast<char*>(a.partials) + a.parts.stats_bytes) +
                        number * a.parts.pitch + from + quad_lane * 2;
#pragma unroll
      for (int j = 0; j < kCount / 4; ++j) {
        if (8 * j >= columns) break;
        *reinterpret_cast<float2*>(to + 8 * j) =
            make_float2(o[4 * j + 2 * half] * factor, o[4 * j + 2 * half + 1] * factor);
      }
      continue;
    }
    const bool empty = state.minus_max[half] == INFINITY && sum == 0.f;
    float inverse = empty ? 0.f : factor / sum;
    float lse = empty ? -INFINITY : logf(sum) - state.minus_max[half] * (unit * kLn2);
    const float sink = a.sinks != nullptr ? a.sinks[at.head] : -INFINITY;
    if (sink != -INFINITY) inverse *= add_sink(lse, sink);
    if (float* const to = packed_lse(a, w, at); to != nullptr && stores_stats && is_there) *to = lse;
    uint16_t* const out = row_pointer(a.p.out, w.b, w.q.start + at.query, at.head) + from;
    if (a.p.out.is_float) {
      float* const to = float_row_pointer(a.p.out, w.b, w.q.start + at.query, at.head) + from + quad_lane * 2;
#pragma unroll
      for (int j = 0; j < kCount / 4; ++j) {
        if (!is_there || 8 * j >= columns) break;
        *reinterpret_cast<float2*>(to + 8 * j) =
            make_float2(o[4 * j + 2 * half] * inverse, o[4 * j + 2 * half + 1] * inverse);
      }
      continue;
    }
#pragma unroll
    for (int j = 0; j < kCount / 16; ++j) {
      uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int first = 4 * (4 * j + i) + 2 * half;
        words[i] = ptx::pack2<typename T::Element>(o[first] * inverse, o[first + 1] * inverse);
      }
      transpose_quad(words, quad_lane);
      const int column = 32 * j + 8 * quad_lane;
      if (is_there && column < columns) {
        *reinterpret_cast<uint4*>(out + column) = make_uint4(words[0], words[1], words[2], words[3]);
      }
    }
  }
}

// Q of a tile, by one lane: boxes of tile_queries queries and the query heads of a key head.
template <typename T>
__device__ __forceinline__ void copy_packed_q(const PackedFwdArgs& a, const FwdMaps& maps, uint32_t to, uint32_t bar,
                                              const Work& w) {
  if constexpr (T::kCutsQueries) {  // rows of heads, one after the other
    const int64_t queries = a.p.problem.cu_seqlens_q != nullptr ? w.q.start : int64_t{w.b} * a.p.problem.seqlen_q;
    const int row = static_cast<int>(queries) * static_cast<int>(a.grid.shared.divisor) + w.block * T::kBlockM;
    ptx::mbarrier_arrive_expect_tx(bar, T::kQBytes);
#pragma unroll
    for (int i = 0; i < T::kChunks; ++i) {
      ptx::tma_load_5d(to + i * T::kBlockM * 128, &maps.q, bar, T::kChunkColumns * i, row, 0, 0, 0);
    }
    return;
  }
  const RowCoordinates at = row_coordinates(a.p.problem, w.q, w.b, w.block * a.tile_queries);
  ptx::mbarrier_arrive_expect_tx(bar, T::kChunks * a.tile_rows * 128);
#pragma unroll
  for (int i = 0; i < T::kChunks; ++i) {
    ptx::tma_load_5d(to + i * T::kBlockM * 128, &maps.q, bar, T::kChunkColumns * i,
                     w.h * static_cast<int>(a.grid.shared.divisor), at.row, at.outer * a.q_steps.batch, at.outermost);
  }
}

// Zeros in the rows of Q that no box fills. A warp of the consumers votes how its rows are rounded, so whatever was
// there would decide about the rows beside it.
template <typename T>
__device__ __forceinline__ void clear_unused_rows(const PackedFwdArgs& a, uint32_t smem, int lane) {
  const int pieces = (T::kBlockM - a.tile_rows) * 8;  // of 16 bytes, in a chunk
#pragma unroll 1
  for (int chunk = 0; chunk < T::kQStages * T::kChunks; ++chunk) {
    const uint32_t to = smem + T::kQAt + (chunk * T::kBlockM + a.tile_rows) * 128;
#pragma unroll 1
    for (int i = lane; i < pieces; i += 32) ptx::store_shared(to + i * 16, make_float4(0.f, 0.f, 0.f, 0.f));
  }
  ptx::fence_proxy_async();
  __syncwarp();
}

// First warp. Of the numbers, tiles of the same keys are the fastest, so that these come from the L2 cache for all but
// one of them; then key heads and parts, as in sm80/split_kv/cached.cuh. `w`: a place in shared memory, since registers
// are short.
template <typename T>
__device__ __forceinline__ void schedule_packed_work(const typename T::Args& a, const FwdMaps& maps, uint32_t smem,
                                                     typename T::Tile* work_tiles, Barriers<T> bars, Work& w) {
  const Problem& p = a.p.problem;
  const auto is_first_lane = [] { return threadIdx.x % 32 == 0; };
  const auto rows = [&] { return w.q.length * static_cast<int>(a.grid.shared.divisor); };
  const auto is_outside = [&] { return w.b < 0 || w.b == p.batch; };  // in no sequence: no keys
  const auto is_served = [&] {
    if (is_outside()) return a.served.upto == INT32_MAX;
    return rows() > a.served.above && rows() <= a.served.upto;
  };
  if constexpr (!T::kCutsQueries) clear_unused_rows<T>(a, smem, threadIdx.x % 32);
  const PartRule rule = part_rule(p, a.cache, a.c);
  PipelineState<T::kQStages> q_ring;
  PipelineState<T::kWorkStages> work_ring;
  q_ring.phase = 1;
#pragma unroll 1
  for (uint32_t index = blockIdx.x; index < a.scheduler.num_work_tiles; index = next_work_tile(a.scheduler, index)) {
    const uint32_t item = divide(index, a.row_tiles), rest = divide(item, a.parts.heads_k);
    const uint32_t slot = divide(rest, a.parts.parts);
    const int part = static_cast<int>(rest - slot * a.parts.parts.divisor);
    __syncwarp();
    if (is_first_lane()) {
      const int b = slot > static_cast<uint32_t>(p.batch) ? -1 : static_cast<int>(slot);
      w.b = b;
      w.h = static_cast<int>(item - rest * a.parts.heads_k.divisor);
      w.q = queries_of(p, b);
      w.k = {0, CachedKeys::of(p, a.cache, b).length};
      w.block = static_cast<int>(index - item * a.row_tiles.divisor);
      if (is_outside()) w.block += part * static_cast<int>(a.row_tiles.divisor);  // all parts share out these rows
    }
    __syncwarp();
    if (!is_served()) continue;
#pragma unroll 1
    while (true) {
      const auto [first, last] = queries_of_tile<T>(a, w);
      if (last < first) break;
      const KeyParts parts =
          key_parts(AttnMod{p, w.q.length, w.k.length}, a.c, rule, first, last, T::kBlockN, rows() <= a.c.rows);
      const int own_part = is_outside() ? 0 : part;
      if (own_part < parts.count) {  // the queries behind these may see more keys
        const BlockRange blocks = parts.part(own_part);
        if (blocks.begin >= blocks.end) {
          store_empty_packed<T>(a, w, threadIdx.x % 32);
        } else {
          wait(bars.q_empty(q_ring.stage), q_ring.phase);
          if (is_first_lane()) {
            typename T::Tile& work = work_tiles[work_ring.stage];
            static_cast<PackedTile&>(work) = {{w, blocks}, parts.count == 1 ? PackedTile::kWhole : part};
            if constexpr (T::kQuantized) set_factors(work, a);
            ptx::mbarrier_arrive(bars.work_full(work_ring.stage));
            copy_packed_q<T>(a, maps, smem + T::kQAt + q_ring.stage * T::kQBytes, bars.q_full(q_ring.stage), w);
          }
          q_ring.advance();
          static_assert(T::kWorkStages % 2 == 0);  // stages then tell the phase of work_ending
          if (a.scheduler.counter != nullptr) wait(bars.work_ending(), work_ring.stage % 2);
          work_ring.advance();
        }
      }
      __syncwarp();
      if (is_first_lane()) {
        w.block += static_cast<int>(a.row_tiles.divisor) * (is_outside() ? static_cast<int>(a.parts.parts.divisor) : 1);
      }
      __syncwarp();
    }
  }
  wait(bars.q_empty(q_ring.stage), q_ring.phase);
  if (is_first_lane()) {
    work_tiles[work_ring.stage].w.block = -1;
    ptx::mbarrier_arrive(bars.work_full(work_ring.stage));
    ptx::mbarrier_arrive(bars.q_full(q_ring.stage));
  }
}

template <typename T>
__global__ void __launch_bounds__(T::kThreads, 1)
    fwd_packed_sm90_kernel(const __grid_constant__ typename T::Args a, const __grid_constant__ FwdMaps maps) {
  run_cached_cta<T>(a, maps, [&](const auto& cta) {
    Work& place = *reinterpret_cast<Work*>(cta.bytes + T::kPlaceAt);
    schedule_packed_work<T>(a, maps, cta.smem, cta.shared, cta.bars, place);
  });
}

}  // namespace flash_ext::sm90
