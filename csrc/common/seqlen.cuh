// Where the rows of one sequence live, and which (tile, head, sequence) a CTA of a one-dimensional grid owns.
#pragma once

#include "../grid.h"
#include "../params.h"

namespace flash_ext {

// One sequence of a batch. A dense batch entry is a sequence whose rows start at 0 of its own batch slice.
struct Span {
  int64_t start;  // first packed row; 0 for dense
  int32_t length;
};

// Bounds of packed sequence b, forced inside [0, total] whatever cu_seqlens holds.
__device__ __forceinline__ Span packed_span(const int32_t* cu_seqlens, int b, int64_t total) {
  const int64_t lo = min(max(static_cast<int64_t>(cu_seqlens[b]), int64_t{0}), total);
  const int64_t hi = min(max(static_cast<int64_t>(cu_seqlens[b + 1]), lo), total);
  return {lo, static_cast<int32_t>(hi - lo)};
}

// Packed tiles are numbered without knowing any length on the host: sequence b owns the tile slots from
//   first_slot(b) = cu[b] / block + b + 1
// on. Because ceil(len / block) <= floor(cu[b+1] / block) - floor(cu[b] / block) + 1, the slots of two
// sequences never overlap, and packed_slots() of heuristics.h holds them all; at most about one slot per
// sequence stays idle. Slot numbers grow with b, so a CTA finds its sequence by bisection in
// log2(batch) loads. Rows before cu[0] and after cu[batch] belong to two extra sequences without
// partners (b = -1 and b = batch), whose outputs are written as those of empty rows.
struct TileSlot {
  int b;         // -1 or batch for rows outside every sequence
  int block;     // tile index inside the sequence
  bool outside;  // b is -1 or batch
};

// `scale` counts every row that many times.
template <int kBlock>
__device__ __forceinline__ TileSlot find_slot(const int32_t* cu_seqlens, int batch, int64_t total, int slot,
                                              int scale = 1) {
  const auto boundary = [&](int b) { return min(max(static_cast<int64_t>(cu_seqlens[b]), int64_t{0}), total) * scale; };
  // Largest b in [-1, batch] whose first slot is not beyond `slot`; first_slot(-1) = 0.
  int lo = -1, hi = batch;
  while (lo < hi) {
    const int mid = lo + (hi - lo + 1) / 2;
    if (boundary(mid) / kBlock + mid + 1 <= slot) {
      lo = mid;
    } else {
      hi = mid - 1;
    }
  }
  const int first = lo < 0 ? 0 : static_cast<int>(boundary(lo) / kBlock + lo + 1);
  return {lo, slot - first, lo < 0 || lo == batch};
}

// Span of the rows a slot's sequence has on one side (query or key).
__device__ __forceinline__ Span slot_span(const int32_t* cu_seqlens, int b, int batch, int64_t total) {
  if (b < 0) return {0, static_cast<int32_t>(min(max(static_cast<int64_t>(cu_seqlens[0]), int64_t{0}), total))};
  if (b >= batch) {
    const int64_t lo = min(max(static_cast<int64_t>(cu_seqlens[batch]), int64_t{0}), total);
    return {lo, static_cast<int32_t>(total - lo)};
  }
  return packed_span(cu_seqlens, b, total);
}

// Which tile of which head this CTA works on.
struct Work {
  int b;      // batch index; only valid for strides when dense
  int h;      // head (query head in the forward, key head in the backward over keys)
  int block;  // tile index inside the sequence
  Span q;
  Span k;
  bool active;  // false: nothing to compute or write
};

__device__ __forceinline__ uint32_t divide(uint32_t n, const Divisor& d) {
  return static_cast<uint32_t>((static_cast<uint64_t>(n) * d.factor) >> d.shift);
}

// Decodes a number in [0, g.ctas); grid.h tells the order. `sequence`, if given, receives the number of the sequence,
// which is -1 or batch for rows outside every one.
template <int kBlock, bool kTilesAreQueries, bool kDescending, bool kOrderIsOpen = false>
__device__ __forceinline__ Work decode_index(uint32_t index, const Problem& p, const Grid& g, int* sequence) {
  const bool packed = p.cu_seqlens_q != nullptr;
  const uint32_t group = divide(index, g.group_tiles);
  const uint32_t rest = index - group * g.group_tiles.divisor;
  const uint32_t first_head = group * g.heads_in_group.divisor;
  // Only the last group may be smaller.
  const uint32_t in_group = min(g.heads_in_group.divisor, g.head_slots - first_head);
  const uint32_t slow = in_group == g.heads_in_group.divisor ? divide(rest, g.heads_in_group) : rest / in_group;
  const uint32_t bh = first_head + (rest - slow * in_group);
  const int tile = kOrderIsOpen ? abs(static_cast<int>(g.first_block - slow))
                                : static_cast<int>(kDescending ? g.blocks - 1 - slow : slow);
  Work w;
  if (packed) {
    const int32_t* cu = kTilesAreQueries ? p.cu_seqlens_q : p.cu_seqlens_k;
    const int64_t total = kTilesAreQueries ? p.total_q : p.total_k;
    const TileSlot slot = find_slot<kBlock>(cu, p.batch, total, tile);
    w.b = 0;
    w.h = static_cast<int>(bh);
    w.block = slot.block;
    const Span mine = slot_span(cu, slot.b, p.batch, total);
    const Span none{0, 0};
    const Span other = slot.outside ? none
                       : kTilesAreQueries ? packed_span(p.cu_seqlens_k, slot.b, p.total_k)
                                          : packed_span(p.cu_seqlens_q, slot.b, p.total_q);
    w.q = kTilesAreQueries ? mine : other;
    w.k = kTilesAreQueries ? other : mine;
    w.active = static_cast<int64_t>(slot.block) * kBlock < mine.length;
    if (sequence != nullptr) *sequence = slot.b;
  } else {
    const uint32_t b = divide(bh, g.heads);
    w.b = static_cast<int>(b);
    w.h = static_cast<int>(bh - b * g.heads.divisor);
    w.block = tile;
    w.q = {0, p.seqlen_q};
    w.k = {0, p.seqlen_k};
    w.active = true;
    if (sequence != nullptr) *sequence = w.b;
  }
  return w;
}

// What a CTA of a grid of g.ctas works on.
template <int kBlock, bool kTilesAreQueries, bool kDescending>
__device__ __forceinline__ Work decode_work(const Problem& p, const Grid& g, int* sequence = nullptr) {
  return decode_index<kBlock, kTilesAreQueries, kDescending>(blockIdx.x, p, g, sequence);
}

// First element of a row of a head; `row` counts from the batch entry's first row.
__device__ __forceinline__ uint16_t* row_pointer(const StridedView& x, int b, int64_t row, int h) {
  return static_cast<uint16_t*>(x.ptr) + b * x.batch_stride + row * x.row_stride + h * x.head_stride;
}

// Offset of a per-row statistic (lse and its kin): (b, h, seqlen_q) or (h, total_q).
__device__ __forceinline__ int64_t row_stat_offset(const Problem& p, const Work& w, int h) {
  return p.cu_seqlens_q != nullptr ? h * p.total_q + w.q.start
                       : (static_cast<int64_t>(w.b) * p.num_heads + h) * p.seqlen_q;
}

}  // namespace flash_ext
