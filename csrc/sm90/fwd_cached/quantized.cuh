// The packed Hopper forward over a cache of 8 bits (e4m3 or int8), for more packed rows than the tile of 16 has.
//
// Tiles of queries, parts of keys and consumers are those of packed.cuh. What differs is how keys and values come:
//
//   Copies bring bytes to a ring of their own, in the order of the ring that consumers read: K0, K1, V0, K2, V1, ...
//   One warpgroup or two turn them into elements of the type of q (convert.cuh), in the place and the swizzle that TMA
//   would give those of a 16-bit cache.
//
// A factor of a head belongs to a whole work tile: that of k to the scale of the scores, that of v to the result.
// Factors of slots, which the fourth warp of the first warpgroup brings beside the bytes, are multiplied by the
// converters. fp16 has not the range of such products, so q in fp16 beside factors of slots is another kernel's.
//
// Shared memory, 128-byte swizzled tiles of elements first:
//   ring [kKvStages], Q [kQStages]
//   ring [kRawStages] of bytes, factors of their slots
//   what one warpgroup hands to the other, where they share keys
//   control: work tiles, the scheduler's place, barriers
#pragma once

#include "../../dtype.cuh"
#include "convert.cuh"
#include "packed_mod.cuh"
#include "tiles.h"

namespace flash_ext::sm90 {

struct QuantizedTile : PackedTile {
  float of_k, of_v;  // factors of its sequence and head; 1 where slots have their own
};

struct QuantizedFwdArgs : PackedFwdArgs {
  QuantizedCache quantized;
  CacheType cache_type;

  __device__ __forceinline__ bool has_slot_factors() const { return quantized.k.of_slots || quantized.v.of_slots; }
};

__device__ __forceinline__ float factor_of_head(const CacheFactors& f, const Work& w, int batch) {
  if (f.ptr == nullptr || f.of_slots) return 1.f;
  return f.ptr[min(max(w.b, 0), batch - 1) * f.batch_stride + w.h * f.head_stride];
}
__device__ __forceinline__ void set_factors(QuantizedTile& work, const QuantizedFwdArgs& a) {
  work.of_k = factor_of_head(a.quantized.k, work.w, a.p.problem.batch);
  work.of_v = factor_of_head(a.quantized.v, work.w, a.p.problem.batch);
}

template <typename T>
struct QuantizedNumbers : PlainNumbers<T> {
  using PlainNumbers<T>::PlainNumbers;
  float of_scores = 1.f;  // what the scale does not hold

  // A factor is multiplied apart if it is not positive, takes the scale to the ends of fp32, or modifiers follow.
  __device__ __forceinline__ void begin_work(const QuantizedFwdArgs& a, const WorkTile& work, int) {
    const float own = a.p.problem.abs_scale_log2, factor = static_cast<const QuantizedTile&>(work).of_k;
    const float both = own * factor;
    const bool fits = !T::kModified && both >= 0x1p-100f && both <= 0x1p100f;
    this->scale = fits ? both : own;
    of_scores = fits ? 1.f : factor;
  }
  template <int kCount>
  __device__ __forceinline__ void scale_scores(float (&s)[kCount]) const {
    if (of_scores == 1.f) return;
#pragma unroll
    for (int i = 0; i < kCount; ++i) s[i] *= of_scores;
  }
};

template <typename E, int D, bool kSharesKeys, bool kMod = false>
struct QuantizedTraits : PackedTraits<E, D, kSharesKeys, kMod> {
  using Base = PackedTraits<E, D, kSharesKeys, kMod>;
  using Numbers = std::conditional_t<kMod, ModifiedNumbers<QuantizedTraits, QuantizedNumbers<QuantizedTraits>>,
                                     QuantizedNumbers<QuantizedTraits>>;
  using Tile = QuantizedTile;
  using Args = std::conditional_t<kMod, WithModifiers<QuantizedFwdArgs>, QuantizedFwdArgs>;
  static constexpr bool kQuantized = true;
  static constexpr bool kSlotFactors = holds_any_factor(DTypeOf<E>::value);
  static constexpr ConvertedTile kConverted = converted_tile(D, kSharesKeys, kMod);
  static_assert(kConverted.plain.block_n == Base::kBlockN && kConverted.plain.block_m() == Base::kBlockM);
  static constexpr int kKvStages = kConverted.plain.kv_stages, kQStages = kConverted.plain.q_stages;
  static constexpr int kRawStages = kConverted.raw_stages, kThreads = kConverted.threads();
  static constexpr int kConverterGroups = kConverted.converters, kConverterWarps = 4;  // warps: that convert a tile
  static constexpr int kConsumerRegs = kConverterGroups == 2 ? 160 : 208, kConverterRegs = 56, kProducerRegs = 40;
  static constexpr int kRawRowBytes = D < 128 ? D : 128;  // of a chunk, which TMA swizzles by as many bytes
  static constexpr int kRawBytes = kConverted.raw_bytes(D), kFactorBytes = kConverted.factor_bytes();
  static constexpr int kQAt = kKvStages * Base::kStageBytes;
  static constexpr int kRawAt = kQAt + kQStages * Base::kQBytes;
  static constexpr int kFactorsAt = kRawAt + kRawStages * kRawBytes;
  static constexpr int kHandoverAt = kFactorsAt + kRawStages * kFactorBytes;
  static constexpr int kWorkAt = kHandoverAt + kConverted.plain.handover_bytes(D);
  static constexpr int kPlaceAt = kWorkAt + Base::kWorkStages * static_cast<int>(sizeof(Tile));
  static constexpr int kBarriersAt = (kPlaceAt + static_cast<int>(sizeof(Work)) + 7) / 8 * 8;
  static constexpr int kSmemBytes = kConverted.smem_bytes(D);
  static_assert(kBarriersAt + 8 * (2 * kKvStages + 2 * kQStages + Base::kWorkStages + 1 + 3 * kRawStages) <=
                kSmemBytes);
  static_assert(kRawAt % 1024 == 0 && kRawBytes % 1024 == 0, "swizzled tiles start on 1024 bytes");
};

template <typename T>
struct QuantizedBarriers : Barriers<T> {
  __device__ uint32_t raw_full(int stage) const { return this->work_ending() + 8 * (1 + stage); }
  __device__ uint32_t raw_empty(int stage) const { return raw_full(T::kRawStages + stage); }
  __device__ uint32_t factors_full(int stage) const { return raw_full(2 * T::kRawStages + stage); }

  __device__ void init() const {
    init_pairs(raw_full(0), T::kRawStages, 1, T::kConverterWarps);
    for (int i = 0; i < T::kRawStages; ++i) ptx::mbarrier_init(factors_full(i), 1);
    Barriers<T>::init(T::kConverterWarps);
  }
};

// Where copies of bytes go.
template <typename T>
struct RawRing {
  static constexpr int kStages = T::kRawStages, kColumns = T::kRawRowBytes, kRowBytes = T::kRawRowBytes;
  static constexpr int kElementBytes = 1;
  uint32_t smem;
  QuantizedBarriers<T> bars;
  __device__ uint32_t tile(int stage) const { return smem + T::kRawAt + stage * T::kRawBytes; }
  __device__ uint32_t factors(int stage) const { return smem + T::kFactorsAt + stage * T::kFactorBytes; }
  __device__ uint32_t full(int stage) const { return bars.raw_full(stage); }
  __device__ uint32_t landed(int stage) const { return full(stage); }  // no wgmma reads bytes
  __device__ uint32_t empty(int stage) const { return bars.raw_empty(stage); }
  template <bool kIsV>
  static constexpr int kChunks = T::kHeadDim / T::kRawRowBytes;
};

// Fourth warp: factors of the slots of a tile beside its bytes, 0 where no key is, 1 where slots have none. The tiles
// are those of one ring, K0, K1, V0, K2, V1, ... A lane has a few neighbouring keys, looked up before the stage is
// free. They share a page where rows come in pieces.
template <typename T, bool kByRows>
__device__ __forceinline__ void load_slot_factors(const QuantizedFwdArgs& a, const QuantizedTile* work_tiles,
                                                  const RawRing<T>& copies) {
  if (!a.has_slot_factors()) return;
  const int lane = threadIdx.x % 32;
  PipelineState<T::kRawStages> ring;
  PipelineState<T::kWorkStages> work_ring;
  ring.phase = 1;
  constexpr int kOwn = T::kBlockN / 32;
  const auto load = [&](const CacheFactors& f, int b, int h, int tile) {
    const float* from[kByRows ? kOwn : 1] = {f.ptr};
    int there = 0;  // of the lane's keys
    if (f.of_slots) {
      const CachedKeys keys = CachedKeys::of(a.p.problem, a.cache, b);
      const int first = tile * T::kBlockN + lane * kOwn;
      there = keys.length - first;
#pragma unroll
      for (int i = 0; i < (kByRows ? kOwn : 1); ++i) {
        from[i] = f.ptr;
        if (i < there) from[i] += keys.offset(a.cache, f.batch_stride, f.row_stride, first + i) + h * f.head_stride;
      }
    }
    wait(copies.empty(ring.stage), ring.phase);
    const uint32_t bar = copies.bars.factors_full(ring.stage), to = copies.factors(ring.stage) + lane * kOwn * 4;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      if (f.of_slots) {
        ptx::cp_async_4(to + 4 * i, from[kByRows ? i : 0], i < there ? 4 : 0);
        if (!kByRows && i + 1 < there) from[0] += f.row_stride;
      } else {
        ptx::store_shared_word(to + 4 * i, __float_as_uint(1.f));
      }
    }
    ptx::cp_async_mbarrier_arrive(bar);
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(bar);
    ring.advance();
  };
  int v_b = 0, v_h = 0, v_tile = -1;  // the tile of V that is still to load
#pragma unroll 1
  while (true) {
    const WorkTile& work = wait_for_work<T>(work_tiles, copies.bars, work_ring);
    if (work.w.block < 0) break;
    work_ring.advance();
    const int b = work.w.b, h = work.w.h, begin = work.blocks.begin;
#pragma unroll 1
    for (int tile = work.blocks.end - 1; tile >= begin; --tile) {
      load(a.quantized.k, b, h, tile);
      if (v_tile >= 0) load(a.quantized.v, v_b, v_h, v_tile);
      v_b = b, v_h = h, v_tile = tile;
    }
  }
  if (v_tile >= 0) load(a.quantized.v, v_b, v_h, v_tile);
}

template <typename T>
__global__ void __launch_bounds__(T::kThreads, 1)
    fwd_packed_quantized_sm90_kernel(const __grid_constant__ typename T::Args a, const __grid_constant__ FwdMaps maps) {
  run_cta<T, QuantizedTile, QuantizedBarriers<T>>(
      [&](const auto& cta, int warp) {
        const RawRing<T> copies{cta.smem, cta.bars};
        if (warp == 0) {
          Work& place = *reinterpret_cast<Work*>(cta.bytes + T::kPlaceAt);
          schedule_packed_work<T>(a, maps, cta.smem, cta.shared, cta.bars, place);
        } else if (warp == 1) {
          load_cached_tiles<T, false>(a, maps.k, cta.shared, cta.bars, copies);
        } else if (warp == 2) {
          load_cached_tiles<T, true>(a, maps.v, cta.shared, cta.bars, copies);
        } else {
          if (a.by_rows) load_slot_factors<T, true>(a, cta.shared, copies);
          else load_slot_factors<T, false>(a, cta.shared, copies);
        }
      },
      [&](const auto& cta, int group) { consume<T>(a, maps, cta.smem, cta.shared, cta.bars, group - 1); },
      [&](const auto& cta, int index) { convert_tiles<T>(a, cta.shared, RawRing<T>{cta.smem, cta.bars}, index); });
}

}  // namespace flash_ext::sm90
