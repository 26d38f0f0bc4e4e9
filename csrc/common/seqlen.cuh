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

// Bounds of packed sequences, forced into order whatever cu_seqlens holds.
//
// bound(b), b in [0, batch], is cu_seqlens[b], forced between two bounds that a search from the middle meets before
// it: at first 0 and the number of rows, then those of the search's interval. So bounds lie in [0, total] and never
// decrease, and no two sequences share a row. A search meets all it needs, both ends of what it finds included; where
// cu_seqlens is in order, bounds are what it holds.
struct BoundSearch {
  const int32_t* cu_seqlens;
  int32_t start, end;  // bounds of the interval's first sequence and behind its last one

  __device__ __forceinline__ BoundSearch(const int32_t* cu_seqlens, int64_t total)
      : cu_seqlens(cu_seqlens), start(0), end(static_cast<int32_t>(total)) {}
  __device__ __forceinline__ int32_t bound(int b) const { return min(max(cu_seqlens[b], start), end); }
  __device__ __forceinline__ void halve(int32_t at, bool takes_upper) {
    if (takes_upper) {
      start = at;
    } else {
      end = at;
    }
  }
  // Zeros above a start of 32 bits cost no register; its sign would (sm90 backward in order, head_dim 96: 8 bytes
  // spilled).
  __device__ __forceinline__ Span span() const {
    return {static_cast<int64_t>(static_cast<uint32_t>(start)), end - start};
  }
};

// The middle of sequences [lo, hi], lo < hi: the first one of their upper half.
__device__ __forceinline__ int upper_half(int lo, int hi) { return lo + (hi - lo + 1) / 2; }

// Rows of sequence b; of -1 and batch those of no sequence, before and behind.
__device__ __forceinline__ Span packed_span(const int32_t* cu_seqlens, int batch, int b, int64_t total) {
  BoundSearch found(cu_seqlens, total);
  int lo = -1, hi = batch;
  while (lo < hi) {
    const int mid = upper_half(lo, hi);
    found.halve(found.bound(mid), mid <= b);
    (mid <= b ? lo : hi) = mid <= b ? mid : mid - 1;
  }
  return found.span();
}

// Keys of sequence b in a forward, where nobody owns them: any rows, so that sequences may share some, or take them in
// any order (compat/flash_attn/_kvcache.py does).
__device__ __forceinline__ Span any_span(const int32_t* cu_seqlens, int b, int64_t total) {
  const int64_t lo = min(max(static_cast<int64_t>(cu_seqlens[b]), int64_t{0}), total);
  const int64_t hi = min(max(static_cast<int64_t>(cu_seqlens[b + 1]), lo), total);
  return {lo, static_cast<int32_t>(hi - lo)};
}

// Packed tiles are numbered without knowing any length on the host: sequence b owns the tile slots from
//   first_slot(b) = bound(b) / block + b + 1
// on. Because ceil(len / block) <= floor(bound(b + 1) / block) - floor(bound(b) / block) + 1, the slots of two
// sequences never overlap, and packed_slots() of heuristics.h holds them all; at most about one slot per
// sequence stays idle. Slot numbers grow with b, so a CTA finds its sequence by bisection in
// log2(batch) loads. Rows before bound(0) and after bound(batch) belong to two extra sequences without
// partners (b = -1 and b = batch), whose outputs are written as those of empty rows.
struct TileSlot {
  int b;         // -1 or batch for rows outside every sequence
  int block;     // tile index inside the sequence
  bool outside;  // b is -1 or batch
  Span rows;     // of the sequence, on the side whose tiles are numbered
  Span others;   // on the other side
};

// `scale` counts every row that many times. kAnyOthers: any_span() on the other side.
template <int kBlock, bool kAnyOthers = false>
__device__ __forceinline__ TileSlot find_slot(const int32_t* cu_seqlens, int64_t total, const int32_t* cu_others,
                                              int64_t total_others, int batch, int slot, uint32_t scale = 1) {
  BoundSearch rows(cu_seqlens, total), others(cu_others, total_others);
  const auto first_slot = [&](int32_t bound, int b) {
    return static_cast<int>(static_cast<uint32_t>(bound) * scale / kBlock) + b + 1;
  };
  // Largest b in [-1, batch] whose first slot is not beyond `slot`; first_slot(-1) = 0.
  int lo = -1, hi = batch;
  while (lo < hi) {
    const int mid = upper_half(lo, hi);
    const int32_t at = rows.bound(mid), others_at = kAnyOthers ? 0 : others.bound(mid);
    const bool takes_upper = first_slot(at, mid) <= slot;
    rows.halve(at, takes_upper);
    if (!kAnyOthers) others.halve(others_at, takes_upper);
    if (takes_upper) {
      lo = mid;
    } else {
      hi = mid - 1;
    }
  }
  const bool outside = lo < 0 || lo == batch;
  const int first = lo < 0 ? 0 : first_slot(rows.start, lo);
  Span of_others{0, 0};
  if (!outside) of_others = kAnyOthers ? any_span(cu_others, lo, total_others) : others.span();
  return {lo, slot - first, outside, rows.span(), of_others};
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
// which is -1 or batch for rows outside every one. kAnyKeys: of a forward, see any_span().
template <int kBlock, bool kTilesAreQueries, bool kDescending, bool kOrderIsOpen = false, bool kAnyKeys = false>
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
    const TileSlot slot =
        kTilesAreQueries
            ? find_slot<kBlock, kAnyKeys>(p.cu_seqlens_q, p.total_q, p.cu_seqlens_k, p.total_k, p.batch, tile)
            : find_slot<kBlock>(p.cu_seqlens_k, p.total_k, p.cu_seqlens_q, p.total_q, p.batch, tile);
    w.b = 0;
    w.h = static_cast<int>(bh);
    w.block = slot.block;
    w.q = kTilesAreQueries ? slot.rows : slot.others;
    w.k = kTilesAreQueries ? slot.others : slot.rows;
    w.active = static_cast<int64_t>(slot.block) * kBlock < slot.rows.length;
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
template <int kBlock, bool kTilesAreQueries, bool kDescending, bool kAnyKeys = false>
__device__ __forceinline__ Work decode_work(const Problem& p, const Grid& g, int* sequence = nullptr) {
  return decode_index<kBlock, kTilesAreQueries, kDescending, false, kAnyKeys>(blockIdx.x, p, g, sequence);
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
