// The producers of the sm90 backward with modifiers. The first warp finds out which tiles an item visits and what their
// scores are tested for, here also for the two kernels of bwd_split.cuh, as are marks. In the one of bwd_mod.cuh one
// of the others loads K, V and tiles of a bias, one Q, one dO; all three make marks.
#pragma once

#include "bwd_mod_bits.cuh"

namespace flash_ext::sm90 {

// Writes item `index` to shared memory; false if there is nothing to compute or write.
template <typename T, typename Args>
__device__ __forceinline__ bool make_bwd_item(const Args& a, uint32_t index, BwdModItem& item) {
  const Problem& p = a.plain.p.problem;
  int b = 0;
  Work w = decode_index<T::kOwnRows, T::kByQueries, T::kByQueries, T::kByQueries>(index, p, a.plain.grid, &b);
  if (!w.active) return false;
  reorder_batch(a.m, w, T::kByQueries ? p.num_heads : p.num_heads_k, b);
  if (ptx::fresh_lane() == 0) {
    item.w = w;
    item.first_head = T::kByQueries ? w.h : w.h * static_cast<int>(a.plain.grid.shared.divisor);
    item.tile = static_cast<int>(first_tile<T::kStatRows>(p, w, b, item.first_head, a.plain.tiles_per_head));
    item.seat = make_seat(p, a.m, w, b);
    const Scores scores{p, a.m, item.seat, item.first_head};
    if constexpr (T::kByQueries) {
      item.blocks = scores.template kv_blocks<T::kBlockM, T::kBlockN>(w.block);
    } else {
      item.blocks = scores.template q_blocks<T::kBlockM, T::kBlockN>(w.block);
    }
  }
  __syncwarp();
  return true;
}

// Two lanes judge a tile, one for each warpgroup's 64 keys or queries: both get the bits of a step, or 0 where both
// skip the tile. An item of 64 keys has the same tests twice.
template <typename T>
__device__ __forceinline__ uint32_t judge_bwd_tile(const Scores& scores, int block, int tile, int lane) {
  constexpr uint32_t kBothSkip = (kSkipped * 0x11) << kKeyTestsAt, kVisitedStep = 1u << 31;
  constexpr int kGroups = T::kOwnRows / 64;
  const int group = lane % 2, own = block * kGroups + (kGroups == 2 ? group : 0);
  TileTests tests = kSkipTile;
  if constexpr (T::kByQueries) {
    if (tile >= 0 && own * 64 < scores.seat.seqlen_q) tests = scores.template visit<64, T::kBlockN>(own, tile);
  } else {
    if (tile >= 0 && own * 64 < scores.seat.seqlen_k) tests = scores.template visit<T::kBlockM, 64>(tile, own);
  }
  uint32_t bits = (tests == kSkipTile ? kSkipped : static_cast<uint32_t>(tests)) << (kKeyTestsAt + 4 * group);
  bits |= __shfl_xor_sync(ptx::kFullWarp, bits, 1);
  return bits == kBothSkip ? 0 : bits | kVisitedStep;
}

// Keys or queries that no tile is visited for have no gradients.
template <typename T, typename Args>
__device__ __forceinline__ void clear_unvisited(const Args& a, const BwdModItem& item, int lane) {
  const BwdParams& p = a.plain.p;
  const Work& w = item.w;
  const Span& own = T::kByQueries ? w.q : w.k;
  const int first = w.block * T::kOwnRows, rows = min(T::kOwnRows, own.length - first);
  if constexpr (T::kByQueries) {
    zero_rows(p.dq, w.b, own.start + first, w.h, rows, p.problem.head_dim, lane);
  } else {
    zero_rows(p.dk, w.b, own.start + first, w.h, rows, p.problem.head_dim, lane);
    zero_rows(p.dv, w.b, own.start + first, w.h, rows, p.problem.head_dim_v, lane);
  }
}

// First warp: decides what is next and judges its tiles.
template <typename T, typename Args, typename Shared, typename Bars>
__device__ __forceinline__ void schedule_bwd_items(const Args& a, Shared& shared, Bars bars) {
  const BwdArgs& plain = a.plain;
  const bool draws = plain.draw.counter != nullptr;
  if (draws && ptx::fresh_lane() == 0) own_counter(plain.draw);
  // Registers are short: counts of items with tiles to visit, and of published chunks, are in shared memory.
  if (ptx::fresh_lane() == 0) shared.items_found = shared.chunks_found = 0;
  __syncwarp();
  const auto count_one = [](int& count) {
    __syncwarp();
    if (ptx::fresh_lane() == 0) ++count;
    __syncwarp();
  };
  const auto place = [&] { return slot_of(shared.items_found, T::kItems); };
  const auto chunk = [&] { return slot_of(shared.chunks_found, T::kRingChunks); };
  const auto wait_for_place = [&] {
    wait(bars.item_empty(place()), parity_of(shared.items_found, T::kItems) ^ 1);
  };
  const auto publish_chunk = [&](bool is_last) {
    __syncwarp();
    if (ptx::fresh_lane() == 0) shared.chunks[chunk()].is_last = is_last;
    ptx::mbarrier_arrive_for_warp(bars.chunk_full(chunk()), ptx::fresh_lane() == 0);
    count_one(shared.chunks_found);
  };
  // Publishes an item and its steps; false if there are none. A chunk waits for the next one: it may be the last.
  // Without draws a block of keys begins its walk later than the block before it.
  const auto publish = [&](const BwdModItem& item) -> bool {
    const int count = max(item.blocks.end - item.blocks.begin, 0);
    const int total = T::kByQueries ? count : count * static_cast<int>(plain.grid.shared.divisor);
    bool found = false;
#pragma unroll 1
    for (int x0 = 0; x0 < total; x0 += BwdChunk::kCapacity) {
      const int lane = ptx::fresh_lane(), x = x0 + lane / 2;
      int block = -1, head = 0;
      if constexpr (T::kByQueries) {
        if (x < total) block = item.blocks.begin + x;
      } else if (x < total) {
        const int turned = x + item.w.block * plain.rotate % count;
        head = turned / count;
        block = item.blocks.begin + turned - head * count;
        if (head == static_cast<int>(plain.grid.shared.divisor)) head = 0;
      }
      const Scores scores{plain.p.problem, a.m, item.seat, item.first_head + head};
      const uint32_t bits = judge_bwd_tile<T>(scores, item.w.block, block, lane);
      const uint32_t visited = __ballot_sync(ptx::kFullWarp, bits != 0) & 0x55555555u;
      if (visited == 0) continue;
      if (found) {
        publish_chunk(false);
      } else if (lane == 0) {
        ptx::mbarrier_arrive(bars.item_full(place()));
      }
      found = true;
      wait(bars.chunk_empty(chunk()), parity_of(shared.chunks_found, T::kRingChunks) ^ 1);
      BwdChunk& to = shared.chunks[chunk()];
      if (bits != 0 && lane % 2 == 0) {
        const uint32_t of_head = static_cast<uint32_t>(head) << kHeadAt;
        to.steps[__popc(visited & ((1u << lane) - 1))] = {block, of_head | (bits & ((1u << kHeadAt) - 1))};
      }
      if (lane == 0) to.count = __popc(visited);
    }
    if (found) publish_chunk(true);
    return found;
  };
  uint32_t index = blockIdx.x;
#pragma unroll 1
  while (index < plain.draw.num_items) {
    if (ptx::fresh_lane() == 0) shared.index = index;  // registers are short
    wait_for_place();
    BwdModItem& item = shared.items[place()];
    if (make_bwd_item<T>(a, index, item)) {
      if (publish(item)) {
        static_assert(T::kItems % 2 == 0);  // places then tell the parity of item_ending
        if (draws) wait(bars.item_ending(), place());
        count_one(shared.items_found);
      } else {
        clear_unvisited<T>(a, item, ptx::fresh_lane());
        __syncwarp();  // before the item's place is written again
      }
    }
    index = next_item(plain.draw, shared.index);
  }
  wait_for_place();
  if (ptx::fresh_lane() == 0) {
    shared.items[place()].w.block = -1;
    ptx::mbarrier_arrive(bars.item_full(place()));
  }
}

// What the loaders do for every item, and for every step: use(item, step, whether it is where the next item is drawn).
template <typename T, typename Shared, typename Bars, typename Begin, typename Use>
__device__ __forceinline__ void for_bwd_steps(const Shared& shared, Bars bars, const Begin& begin, const Use& use) {
  RingPosition<T::kItems> place;
  RingPosition<T::kRingChunks> chunk;
#pragma unroll 1
  while (true) {
    wait(bars.item_full(place.slot), place.parity);
    const BwdModItem& item = shared.items[place.slot];
    if (item.w.block < 0) break;
    begin(item);
    bool is_last = false, is_first = true;  // chunk
#pragma unroll 1
    while (!is_last) {
      wait(bars.chunk_full(chunk.slot), chunk.parity);
      const BwdChunk& from = shared.chunks[chunk.slot];
      const int count = from.count;
      is_last = from.is_last;
#pragma unroll 1
      for (int i = 0; i < count; ++i) {
        BwdStep step = from.steps[i];
        if (is_first && i == 0) step.bits |= kFirstOfItem;
        if (is_last && i == count - 1) step.bits |= kLastOfItem;
        use(item, step, is_last && i == max(0, count - T::kDrawAhead));
      }
      __syncwarp();
      ptx::mbarrier_arrive_for_warp(bars.chunk_empty(chunk.slot), threadIdx.x % 32 == 0);
      chunk.advance();
      is_first = false;
    }
    __syncwarp();
    ptx::mbarrier_arrive_for_warp(bars.item_empty(place.slot), threadIdx.x % 32 == 0);
    place.advance();
  }
}

// What a loader does for the consumers beside its loads: marks of up to kParts parts of 32 queries and 32 keys, of 8
// or, in an item of 64 keys, of 4. Two parts cover a tile along what the item walks.
template <typename T>
class MarkMaker {
 public:
  static constexpr int kAllParts = T::kOwnRows / 16, kParts = kAllParts == 8 ? 3 : 2;
  static_assert(kAllParts == 8 || kAllParts == 4);
  __device__ explicit MarkMaker(int loader) : loader_(loader) {}
  __device__ __forceinline__ void begin_item() { head_ = -1; }

  // Before the loader waits for the place of its tile where it can: marks take longer than is left then.
  template <typename Args, typename Shared, typename Bars>
  __device__ __forceinline__ void leave(const Args& a, Shared& shared, Bars bars, const BwdModItem& item,
                                        const BwdStep& step) {
    const Scores scores{a.plain.p.problem, a.m, item.seat, item.first_head + step.head()};
    const auto row_of = [&](int part) {
      return T::kByQueries ? item.w.block * T::kBlockM + part / 2 * 32 : step.block * T::kBlockM + part % 2 * 32;
    };
    const auto col_of = [&](int part) {
      return T::kByQueries ? step.block * T::kBlockN + part % 2 * 32 : item.w.block * T::kBlockN + part / 2 * 32;
    };
    const auto tests_of = [&](int part) { return static_cast<TileTests>(step.tests(part / 4)); };
    const auto wait_for_place = [&] { wait(bars.marks_empty(place_.slot), place_.parity); };
    const auto hand_over = [&] {
      __syncwarp();
      ptx::mbarrier_arrive_for_warp(bars.marks_full(place_.slot), ptx::fresh_lane() == 0);
      place_.advance();
    };
    const auto put = [&](Mark which, int part, uint32_t bits) {
      uint16_t* const to = reinterpret_cast<uint16_t*>(shared.marks(which, place_.slot)) + part / 2 * 128 +
                           2 * ptx::fresh_lane() + part % 2;
      to[0] = static_cast<uint16_t>(bits);
      to[64] = static_cast<uint16_t>(bits >> 16);
    };
    if (__any_sync(ptx::kFullWarp, step.has_tests())) {
      uint32_t of_row[kParts];
#pragma unroll
      for (int i = 0; i < kParts; ++i) {
        const int part = min(first_part() + i, kAllParts - 1);
        of_row[i] = mask_word(scores, row_of(part) + ptx::fresh_lane(), col_of(part), tests_of(part));
      }
#pragma unroll
      for (int i = 0; i < kParts; ++i) {
        const int part = first_part() + i;
        if (part == end_part()) break;
        const uint32_t tests = tests_of(part);
        uint32_t visible = ~0u;
        if (__any_sync(ptx::kFullWarp, (tests & (kTestInterval | kTestRows)) != 0)) {
          const int row = row_of(part) + ptx::fresh_lane();
          visible = MarkLayout<T::kByQueries>::of_rows(row_word(of_row[i], scores, row, col_of(part), tests_of(part)));
        }
        if (__any_sync(ptx::kFullWarp, (tests & kTestKeys) != 0)) {
          visible &= bits_by_keys<T::kByQueries>(scores, row_of(part), col_of(part));
        }
        wait_for_place();
        put(Mark::kVisible, part, visible);
      }
      hand_over();
    }
    if constexpr (T::kLoadersDraw) {
      if (step.head() != head_) {
        head_ = step.head();
        __syncwarp();
        if (ptx::fresh_lane() == 0) shared.drop[loader_].make(a.m, item.seat.b, item.first_head + head_);
        __syncwarp();
      }
#pragma unroll 1
      for (int part = first_part(); part < end_part(); ++part) {
        const uint32_t bits = dropped_bits(a.m, row_of(part), col_of(part), shared.drop[loader_]);
        wait_for_place();
        put(Mark::kDropped, part, bits);
      }
      hand_over();
    }
  }

 private:
  // Three, three and two of 8; two, one and one of 4.
  __device__ __forceinline__ int first_part() const {
    return kAllParts == 8 ? kParts * loader_ : loader_ == 0 ? 0 : loader_ + 1;
  }
  __device__ __forceinline__ int end_part() const {
    return kAllParts == 8 ? min(kParts * (loader_ + 1), 8) : loader_ + 2;
  }

  int loader_, head_ = -1;
  RingPosition<T::kMarkSlots> place_{0, 1};
};

// The loaders: number 0 has K and V of an item, then the tiles of its bias; 1 streams Q, with lse and delta, and beside
// them the step; 2 streams dO. One body for all, because what they have in common, the marks, is most of it.
template <typename T>
__device__ __forceinline__ void load_mod_steps(const BwdModArgs& a, const BwdModMaps& maps, uint32_t smem,
                                               ModKeyShared<T>& shared, ModKeyBarriers<T> bars, int loader) {
  const Problem& p = a.plain.p.problem;
  MarkMaker<T> marks(loader);
  RingPosition<T::kSlots> ring;  // of Q or of dO
  ring.parity = 1;
  uint32_t item_parity = 1, bias_parity = 1;
  int k_place = 0, step_place = 0;
  int stale = 0, head_before = -1;  // slots whose keys of dropout are those of another head
  const auto is_first_lane = [] { return threadIdx.x % 32 == 0; };
  const auto load_item = [&](const BwdModItem& item) {
    const RowCoordinates at = row_coordinates(p, item.w.k, item.w.b, item.w.block * T::kBlockN);
    const auto load = [&](const CUtensorMap& map, const Steps& steps, int place) {
      wait(bars.place_empty(place), item_parity);
      if (!is_first_lane()) return;
      copy_tile<T::kChunks, T::kBlockN>(map, steps, smem + place * T::kVAt, bars.place_full(place), at, item.w.h);
    };
    load(maps.plain.k, a.plain.k, k_place);
    load(maps.plain.v, a.plain.v, k_place ^ 1);
    item_parity ^= 1;
    k_place ^= 1;
  };
  const auto load_bias = [&](const BwdModItem& item, const BwdStep& step) {
    wait(bars.bias_empty(), bias_parity);
    bias_parity ^= 1;
    if (!is_first_lane()) return;
    const int boxes = T::kBlockN / (a.m.bias.is_float ? 32 : 64);
    ptx::mbarrier_arrive_expect_tx(bars.bias_full(), boxes * T::kBlockM * 128);
#pragma unroll 1
    for (int i = 0; i < boxes; ++i) {
      ptx::tma_load_5d(smem + T::kBiasAt + i * T::kBlockM * 128, &maps.bias, bars.bias_full(),
                       item.w.block * T::kBlockN + T::kBlockN / boxes * i, step.block * T::kBlockM,
                       (item.first_head + step.head()) * a.bias_steps.head, item.seat.b * a.bias_steps.batch, 0);
    }
  };
  const auto queries_at = [&](const BwdModItem& item, const BwdStep& step) {
    return row_coordinates(p, item.w.q, item.w.b, step.block * T::kBlockM);
  };
  const auto load_query = [&](const BwdModItem& item, const BwdStep& step, bool is_ending) {
    wait(bars.q_empty(ring.slot), ring.parity);
    const int head = item.first_head + step.head();
    if (T::kConsumersDraw && head != head_before) stale = T::kSlots;
    head_before = head;
    if (is_first_lane()) {
      const uint32_t full = bars.q_full(ring.slot);
      const int64_t tile = item.tile + static_cast<int64_t>(step.head()) * a.plain.tiles_per_head + step.block;
      copy_tile<T::kChunks, T::kBlockM>(maps.plain.q, a.plain.q, smem + T::kQAt + ring.slot * T::kQBytes, full,
                                        queries_at(item, step), head);
      ptx::mbarrier_arrive_expect_tx(full, T::kStatsBytes);
      ptx::bulk_load(smem + T::kStatsAt + ring.slot * T::kStatsBytes, a.plain.p.row_stats + tile * (2 * T::kBlockM),
                     T::kStatsBytes, full);
      shared.steps[step_place] = step;
      if (T::kConsumersDraw && stale > 0) shared.drop[ring.slot].make(a.m, item.seat.b, head);
      ptx::mbarrier_arrive(full);
      const bool draws = a.plain.draw.counter != nullptr;  // else nobody waits for that
      if (draws && is_ending) ptx::mbarrier_arrive(bars.item_ending());
    }
    --stale;
    step_place = slot_of(step_place + 1, T::kSteps);
    ring.advance();
  };
  const auto load_dout = [&](const BwdModItem& item, const BwdStep& step) {
    wait(bars.dout_empty(ring.slot), ring.parity);
    if (is_first_lane()) {
      copy_tile<T::kChunks, T::kBlockM>(maps.plain.dout, a.plain.dout, smem + T::kDoutAt + ring.slot * T::kQBytes,
                                        bars.dout_full(ring.slot), queries_at(item, step),
                                        item.first_head + step.head());
    }
    ring.advance();
  };
  const auto begin = [&](const BwdModItem& item) {
    marks.begin_item();
    head_before = -1;
    if (loader == 0) load_item(item);
  };
  for_bwd_steps<T>(shared, bars, begin, [&](const BwdModItem& item, const BwdStep& step, bool is_ending) {
    if constexpr (!T::kLoadersDraw) marks.leave(a, shared, bars, item, step);
    if (loader == 1) {
      load_query(item, step, is_ending);
    } else if (loader == 2) {
      load_dout(item, step);
    } else if (T::kAdds && a.brings_bias) {
      load_bias(item, step);
    }
    // Where both marks of a step share a place, the second one waits until consumers have read the first, which they do
    // once its Q is there.
    if constexpr (T::kLoadersDraw) marks.leave(a, shared, bars, item, step);
  });
}

}  // namespace flash_ext::sm90
