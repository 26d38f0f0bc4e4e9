// What the trials fwd_onward_sm80.cuh and bwd_onward_sm80.cuh share: items drawn by a fixed number of CTAs, searches of
// block maps whose words have come ahead.
#pragma once

#include "common/visits.cuh"

namespace flash_ext::sm80 {

// Zeros before the first launch, and zeros again behind each. The items follow, where they are sorted.
struct OnwardSchedule {
  uint32_t drawn;  // items beyond the first of each CTA
  uint32_t ended;  // CTAs

  __device__ uint32_t sorted_item(uint32_t n) const { return reinterpret_cast<const uint32_t*>(this + 1)[n]; }
};

// Is the block map all that a search has to look up?
__device__ __forceinline__ bool looks_up_blocks_only(const Modifiers& m) {
  return m.document_k.ids == nullptr && m.hidden_rows.count == 0 && m.hidden_keys.count == 0 && m.mask.words == nullptr;
}

// What visit() finds out without memory.
template <int kBlockM, int kBlockN>
__device__ __forceinline__ TileTests interval_tests(const Scores& s, int m_block, int n_block) {
  const Seat& seat = s.seat;
  const int r0 = m_block * kBlockM, r1 = min(r0 + kBlockM, seat.seqlen_q) - 1;
  const int c0 = n_block * kBlockN, c1 = min(c0 + kBlockN, seat.seqlen_k) - 1;
  const RowKeys first = s.row_keys(r0), last = s.row_keys(r1);
  if (!((c0 < last.end && c1 >= first.begin) || c0 < last.always)) return kSkipTile;
  const bool inside = c1 < first.always || (c1 < first.end && (c0 >= last.begin || first.always >= last.begin));
  const bool whole = c0 + kBlockN <= seat.seqlen_k && r0 + kBlockM <= seat.seqlen_q;
  return inside && whole ? 0 : kTestInterval;
}

}  // namespace flash_ext::sm80
