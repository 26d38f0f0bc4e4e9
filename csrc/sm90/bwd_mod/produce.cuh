// The producers of the sm90 backward with modifiers. The first warp finds out which tiles a work tile visits and what
// their scores are tested for, here also for the two kernels of bwd_split/kernel.cuh, as are mask words. In the one of
// bwd_mod/kernel.cuh one of the others loads K, V and tiles of a bias, one Q, one dO; all three make mask words.
#pragma once

#include "mask_words.cuh"

namespace flash_ext::sm90 {

// Writes work tile `index` to shared memory; false if there is nothing to compute or write.
template <typename T, typename Args>
__device__ __forceinline__ bool make_bwd_work(const Args& a, uint32_t index, BwdModWorkTile& work) {
  const Problem& p = a.plain.p.problem;
  int b = 0;
  Work w = decode_index<T::kOwnRows, T::kByQueries, T::kByQueries, T::kByQueries>(tile_of_index(a, index), p,
                                                                                  a.plain.grid, &b);
  if (!w.active) return false;
  reorder_batch(a.m, w, T::kByQueries ? p.num_heads : p.num_heads_k, b);
  if (ptx::fresh_lane() == 0) {
    work.w = w;
    work.first_head = T::kByQueries ? w.h : w.h * static_cast<int>(a.plain.grid.shared.divisor);
    work.tile = static_cast<int>(first_tile<T::kStatRows>(p, w, b, work.first_head, a.plain.tiles_per_head));
    work.seq = make_seq_info(p, a.m, w, b);
    const ScoreMod score_mod{p, a.m, work.seq, work.first_head};
    if constexpr (T::kByQueries) {
      work.blocks = score_mod.template kv_blocks<T::kBlockM, T::kBlockN>(w.block);
    } else {
      work.blocks = score_mod.template q_blocks<T::kBlockM, T::kBlockN>(w.block);
    }
  }
  __syncwarp();
  return true;
}

// Two lanes classify a tile, one for each warpgroup's keys or queries: both get the bits of a step, or 0 where both
// skip the tile. A work tile of 64 keys has the same tests twice.
//
// Where consumers hide keys behind a sequence's last one, rows behind its last one ask for no test either: their lse
// makes their weights 0. But a table by distance may hold NaN for distances that only they have.
template <typename T>
__device__ __forceinline__ uint32_t classify_bwd_tile(const ScoreMod& score_mod, int block, int tile, int lane) {
  constexpr uint32_t kBothSkip = (kSkipped * 0x11) << kKeyTestsAt, kListedStep = 1u << 31;
  constexpr int kGroupRows = T::kOwnRows > 128 ? T::kOwnRows / 2 : 64, kGroups = T::kOwnRows / kGroupRows;
  const int group = lane % 2, own = block * kGroups + (kGroups == 2 ? group : 0);
  TileTests tests = kSkipTile;
  if constexpr (T::kByQueries) {
    if (tile >= 0 && own * 64 < score_mod.seq.seqlen_q) tests = score_mod.template classify<64, T::kBlockN>(own, tile);
  } else if (tile >= 0 && own * kGroupRows < score_mod.seq.seqlen_k) {
    constexpr bool kEnds = T::kMakersHideEnds;
    tests = score_mod.template classify<T::kBlockM, kGroupRows, 1, kEnds, kEnds>(tile, own);
    if constexpr (!kEnds) {
      const bool rows_end = (tile + 1) * T::kBlockM > score_mod.seq.seqlen_q;
      if (tests == 0 && rows_end && score_mod.m.by_distance.may_be_nan()) tests = kTestInterval;
    }
  }
  uint32_t bits = (tests == kSkipTile ? kSkipped : static_cast<uint32_t>(tests)) << (kKeyTestsAt + 4 * group);
  bits |= __shfl_xor_sync(ptx::kFullWarp, bits, 1);
  return bits == kBothSkip ? 0 : bits | kListedStep;
}

// Keys or queries that no tile is visited for have no gradients.
template <typename T, typename Args>
__device__ __forceinline__ void clear_unvisited(const Args& a, const BwdModWorkTile& work, int split, int lane) {
  const BwdParams& p = a.plain.p;
  const Work& w = work.w;
  const Span& own = T::kByQueries ? w.q : w.k;
  const int first = w.block * T::kOwnRows, rows = min(T::kOwnRows, own.length - first);
  if constexpr (T::kByQueries) {
    zero_rows(p.dq, w.b, own.start + first, w.h, rows, p.problem.head_dim, lane);
  } else {
    const int h = gradients_head(a, w, split);
    zero_rows(p.dk, w.b, own.start + first, h, rows, p.problem.head_dim, lane);
    zero_rows(p.dv, w.b, own.start + first, h, rows, p.problem.head_dim_v, lane);
  }
}

// First warp: decides what is next and classifies its tiles.
template <typename T, typename Args, typename Shared, typename Bars>
__device__ __forceinline__ void schedule_bwd_work(const Args& a, Shared& shared, Bars bars) {
  const BwdArgs& plain = a.plain;
  const bool dynamic = plain.scheduler.counter != nullptr;
  // Registers are short: counts of work tiles with tiles to visit, and of published chunks, are in shared memory.
  if (ptx::fresh_lane() == 0) shared.work_tiles_found = shared.chunks_found = 0;
  __syncwarp();
  const auto count_one = [](int& count) {
    __syncwarp();
    if (ptx::fresh_lane() == 0) ++count;
    __syncwarp();
  };
  const auto work_stage = [&] { return stage_of(shared.work_tiles_found, T::kWorkStages); };
  const auto chunk = [&] { return stage_of(shared.chunks_found, T::kChunkStages); };
  const auto wait_for_stage = [&] {
    wait(bars.work_empty(work_stage()), phase_of(shared.work_tiles_found, T::kWorkStages) ^ 1);
  };
  const auto publish_chunk = [&](bool is_last) {
    __syncwarp();
    if (ptx::fresh_lane() == 0) shared.chunks[chunk()].is_last = is_last;
    ptx::mbarrier_arrive_for_warp(bars.chunk_full(chunk()), ptx::fresh_lane() == 0);
    count_one(shared.chunks_found);
  };
  // Publishes a work tile and its steps; false if there are none. A chunk waits for the next one: it may be the last.
  // With static scheduling a block of keys begins its walk later than the block before it.
  const auto publish = [&](const BwdModWorkTile& work, int split) -> bool {
    const int count = max(work.blocks.end - work.blocks.begin, 0);
    const int total = T::kByQueries ? count : count * static_cast<int>(plain.grid.shared.divisor);
    const int last = first_step_of(a, split + 1, total);
    bool found = false;
#pragma unroll 1
    for (int x0 = first_step_of(a, split, total); x0 < last; x0 += BwdChunk::kCapacity) {
      const int lane = ptx::fresh_lane(), x = x0 + lane / 2;
      int block = -1, head = 0;
      if constexpr (T::kByQueries) {
        if (x < last) block = work.blocks.begin + x;
      } else if (x < last) {
        const int turned = x + work.w.block * plain.rotate % count;
        head = turned / count;
        block = work.blocks.begin + turned - head * count;
        if (head == static_cast<int>(plain.grid.shared.divisor)) head = 0;
      }
      const ScoreMod score_mod{plain.p.problem, a.m, work.seq, work.first_head + head};
      const uint32_t bits = classify_bwd_tile<T>(score_mod, work.w.block, block, lane);
      const uint32_t listed = __ballot_sync(ptx::kFullWarp, bits != 0) & 0x55555555u;
      if (listed == 0) continue;
      if (found) {
        publish_chunk(false);
      } else if (lane == 0) {
        ptx::mbarrier_arrive(bars.work_full(work_stage()));
      }
      found = true;
      wait(bars.chunk_empty(chunk()), phase_of(shared.chunks_found, T::kChunkStages) ^ 1);
      BwdChunk& to = shared.chunks[chunk()];
      if (bits != 0 && lane % 2 == 0) {
        const uint32_t of_head = static_cast<uint32_t>(head) << kHeadAt;
        to.steps[__popc(listed & ((1u << lane) - 1))] = {block, of_head | (bits & ((1u << kHeadAt) - 1))};
      }
      if (lane == 0) to.count = __popc(listed);
    }
    if (found) publish_chunk(true);
    return found;
  };
  uint32_t index = blockIdx.x;
#pragma unroll 1
  while (index < plain.scheduler.num_work_tiles) {
    if (ptx::fresh_lane() == 0) shared.index = index;  // registers are short
    wait_for_stage();
    BwdModWorkTile& work = shared.work_tiles[work_stage()];
    const int split = split_of_index(a, index);
    if constexpr (kSplitsSteps<Args>) {
      if (ptx::fresh_lane() == 0) shared.split[work_stage()] = static_cast<unsigned char>(split);
    }
    if (make_bwd_work<T>(a, index, work)) {
      if (publish(work, split)) {
        static_assert(T::kWorkStages % 2 == 0);  // stages then tell the phase of work_ending
        if (dynamic) wait(bars.work_ending(), work_stage());
        count_one(shared.work_tiles_found);
      } else {
        clear_unvisited<T>(a, work, split, ptx::fresh_lane());
        __syncwarp();  // before the work tile's place is written again
      }
    }
    index = next_work_tile(plain.scheduler, shared.index);
  }
  wait_for_stage();
  if (ptx::fresh_lane() == 0) {
    shared.work_tiles[work_stage()].w.block = -1;
    ptx::mbarrier_arrive(bars.work_full(work_stage()));
  }
}

// What the loaders do for every work tile, and for every step: use(work, step, whether it is where the next work tile
// is fetched).
template <typename T, typename Shared, typename Bars, typename Begin, typename Use>
__device__ __forceinline__ void for_bwd_steps(const Shared& shared, Bars bars, const Begin& begin, const Use& use) {
  PipelineState<T::kWorkStages> work_ring;
  PipelineState<T::kChunkStages> chunk;
#pragma unroll 1
  while (true) {
    wait(bars.work_full(work_ring.stage), work_ring.phase);
    const BwdModWorkTile& work = shared.work_tiles[work_ring.stage];
    if (work.w.block < 0) break;
    begin(work);
    bool is_last = false, is_first = true;  // chunk
#pragma unroll 1
    while (!is_last) {
      wait(bars.chunk_full(chunk.stage), chunk.phase);
      const BwdChunk& from = shared.chunks[chunk.stage];
      const int count = from.count;
      is_last = from.is_last;
#pragma unroll 1
      for (int i = 0; i < count; ++i) {
        BwdStep step = from.steps[i];
        if (is_first && i == 0) step.bits |= kFirstStep;
        if (is_last && i == count - 1) step.bits |= kLastStep;
        use(work, step, is_last && i == max(0, count - T::kFetchAhead));
      }
      __syncwarp();
      ptx::mbarrier_arrive_for_warp(bars.chunk_empty(chunk.stage), threadIdx.x % 32 == 0);
      chunk.advance();
      is_first = false;
    }
    __syncwarp();
    ptx::mbarrier_arrive_for_warp(bars.work_empty(work_ring.stage), threadIdx.x % 32 == 0);
    work_ring.advance();
  }
}

// What leave() may do in place of making words: nothing.
struct BringsNothing {
  __device__ bool wanted(const BwdStep&) const { return false; }
  __device__ void operator()(const BwdModWorkTile&, const BwdStep&, uint32_t, uint32_t) const {}
};

// The mask tiles of a step by TMA, where it asks for nothing else.
template <typename T>
struct BringsMaskTiles {
  const BwdModArgs& a;
  const CUtensorMap& map;

  __device__ __forceinline__ bool wanted(const BwdStep& step) const {
    return __any_sync(ptx::kFullWarp, a.brings_words && step.has_tests() && step.tests_only_rows());
  }
  __device__ __forceinline__ void operator()(const BwdModWorkTile& work, const BwdStep& step, uint32_t to,
                                             uint32_t full) const {
    ptx::mbarrier_expect_tx(full, T::kMaskWordBytes);
    ptx::tma_load_5d(to, &map, full, 0, work.w.block * (T::kBlockN / 16), step.block,
                     (work.first_head + step.head()) * a.mask_steps.head, work.seq.b * a.mask_steps.batch);
  }
};

// What a loader does for the consumers beside its loads: mask words of up to kParts parts of 32 queries and 32 keys, of
// 16, 8 or 4 in a work tile of 256, 128 or 64 keys. Two parts cover a tile along what the work tile walks.
template <typename T>
class MaskWordMaker {
 public:
  static constexpr int kAllParts = T::kOwnRows / 16, kParts = (kAllParts + 2) / 3;
  static constexpr int kGroupParts = kAllParts > 8 ? kAllParts / 2 : 4;  // of a warpgroup
  static constexpr int kAtOnce = kParts < 3 ? kParts : 3,
                       kRounds = kParts / kAtOnce;  // parts whose words are asked for at once
  static_assert(kAllParts == 16 || kAllParts == 8 || kAllParts == 4);
  __device__ explicit MaskWordMaker(int loader) : loader_(loader) {}
  __device__ __forceinline__ void begin_work() { head_ = -1; }

  // Before the loader waits for the place of its tile where it can: mask words take longer than is left then.
  template <typename Args, typename Shared, typename Bars, typename Bring = BringsNothing>
  __device__ __forceinline__ void leave(const Args& a, Shared& shared, Bars bars, const BwdModWorkTile& work,
                                        const BwdStep& step, const Bring& bring = {}) {
    const ScoreMod score_mod{a.plain.p.problem, a.m, work.seq, work.first_head + step.head()};
    const auto row_of = [&](int part) {
      return T::kByQueries ? work.w.block * T::kBlockM + part / 2 * 32 : step.block * T::kBlockM + part % 2 * 32;
    };
    const auto col_of = [&](int part) {
      return T::kByQueries ? step.block * T::kBlockN + part % 2 * 32 : work.w.block * T::kBlockN + part / 2 * 32;
    };
    const auto tests_of = [&](int part) { return static_cast<TileTests>(step.tests(part / kGroupParts)); };
    const auto wait_for_stage = [&] { wait(bars.mask_empty(mask_ring_.stage), mask_ring_.phase); };
    const auto hand_over = [&] {
      __syncwarp();
      ptx::mbarrier_arrive_for_warp(bars.mask_full(mask_ring_.stage), ptx::fresh_lane() == 0);
      mask_ring_.advance();
    };
    const auto put = [&](WordKind which, int part, uint32_t bits) {
      uint16_t* const to = reinterpret_cast<uint16_t*>(shared.mask_words(which, mask_ring_.stage)) + part / 2 * 128 +
                           2 * ptx::fresh_lane() + part % 2;
      to[0] = static_cast<uint16_t>(bits);
      to[64] = static_cast<uint16_t>(bits >> 16);
    };
    if (bring.wanted(step)) {
      wait_for_stage();
      if (loader_ == 0 && ptx::fresh_lane() == 0) {
        bring(work, step, ptx::smem_address(shared.mask_words(WordKind::kVisible, mask_ring_.stage)),
              bars.mask_full(mask_ring_.stage));
      }
      hand_over();
    } else if (__any_sync(ptx::kFullWarp, step.has_tests())) {
#pragma unroll 1
      for (int round = 0; round < kRounds; ++round) {
        const int first = first_part() + round * kAtOnce;
        uint32_t of_row[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          const int part = min(first + i, kAllParts - 1);
          of_row[i] = mask_word(score_mod, row_of(part) + ptx::fresh_lane(), col_of(part), tests_of(part));
        }
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          const int part = first + i;
          if (part >= end_part()) break;
          const uint32_t tests = tests_of(part);
          uint32_t visible = ~0u;
          if (__any_sync(ptx::kFullWarp, (tests & (kTestInterval | kTestRows)) != 0)) {
            const int row = row_of(part) + ptx::fresh_lane();
            visible = MaskWordLayout<T::kByQueries>::of_rows(
                row_word(of_row[i], score_mod, row, col_of(part), tests_of(part)));
          }
          if (__any_sync(ptx::kFullWarp, (tests & kTestKeys) != 0)) {
            visible &= bits_by_keys<T::kByQueries>(score_mod, row_of(part), col_of(part));
          }
          wait_for_stage();
          put(WordKind::kVisible, part, visible);
        }
      }
      hand_over();
    }
    if constexpr (T::kLoadersDraw) {
      if (step.head() != head_) {
        head_ = step.head();
        __syncwarp();
        if (ptx::fresh_lane() == 0) shared.drop[loader_].make(a.m, work.seq.b, work.first_head + head_);
        __syncwarp();
      }
#pragma unroll 1
      for (int part = first_part(); part < end_part(); ++part) {
        const uint32_t bits = dropped_bits(a.m, row_of(part), col_of(part), shared.drop[loader_]);
        wait_for_stage();
        put(WordKind::kDropped, part, bits);
      }
      hand_over();
    }
  }

 private:
  // Six, six and four of 16; three, three and two of 8; two, one and one of 4.
  __device__ __forceinline__ int first_part() const {
    return kAllParts > 4 ? kParts * loader_ : loader_ == 0 ? 0 : loader_ + 1;
  }
  __device__ __forceinline__ int end_part() const {
    return kAllParts > 4 ? min(kParts * (loader_ + 1), kAllParts) : loader_ + 2;
  }

  int loader_, head_ = -1;
  PipelineState<T::kMaskStages> mask_ring_{0, 1};
};

// The loaders: number 0 has K and V of a work tile, then the tiles of its bias; 1 streams Q, with lse and delta, and
// beside them the step; 2 streams dO. One body for all, because what they have in common, the mask words, is most of
// it.
template <typename T>
__device__ __forceinline__ void load_mod_steps(const BwdModArgs& a, const BwdModMaps& maps, uint32_t smem,
                                               ModKeyShared<T>& shared, ModKeyBarriers<T> bars, int loader) {
  const Problem& p = a.plain.p.problem;
  MaskWordMaker<T> mask_words(loader);
  const BringsMaskTiles<T> bring{a, maps.mask_tiles};
  PipelineState<T::kStages> ring;  // of Q or of dO
  ring.phase = 1;
  uint32_t work_phase = 1, bias_phase = 1;
  int k_place = 0, step_place = 0;
  int stale = 0, head_before = -1;  // stages whose keys of dropout are those of another head
  const auto is_first_lane = [] { return threadIdx.x % 32 == 0; };
  const auto load_work = [&](const BwdModWorkTile& work) {
    const RowCoordinates at = row_coordinates(p, work.w.k, work.w.b, work.w.block * T::kBlockN);
    const auto load = [&](const CUtensorMap& map, const Steps& steps, int place) {
      wait(bars.place_empty(place), work_phase);
      if (!is_first_lane()) return;
      copy_tile<T::kChunks, T::kBlockN>(map, steps, smem + place * T::kVAt, bars.place_full(place), at, work.w.h);
    };
    load(maps.plain.k, a.plain.k, k_place);
    load(maps.plain.v, a.plain.v, k_place ^ 1);
    work_phase ^= 1;
    k_place ^= 1;
  };
  const auto load_bias = [&](const BwdModWorkTile& work, const BwdStep& step) {
    constexpr int kKeys = T::kBlockN / T::kBiasPlaces;  // of a place
    const int boxes = kKeys / (a.m.bias.is_float ? 32 : 64);
#pragma unroll 1
    for (int place = 0; place < T::kBiasPlaces; ++place) {
      wait(bars.bias_empty(place), bias_phase);
      if (!is_first_lane()) continue;
      ptx::mbarrier_arrive_expect_tx(bars.bias_full(place), boxes * T::kBlockM * 128);
#pragma unroll 1
      for (int i = 0; i < boxes; ++i) {
        ptx::tma_load_5d(smem + T::kBiasAt + (place * boxes + i) * T::kBlockM * 128, &maps.bias, bars.bias_full(place),
                         work.w.block * T::kBlockN + place * kKeys + kKeys / boxes * i, step.block * T::kBlockM,
                         (work.first_head + step.head()) * a.bias_steps.head, work.seq.b * a.bias_steps.batch, 0);
      }
    }
    bias_phase ^= 1;
  };
  const auto queries_at = [&](const BwdModWorkTile& work, const BwdStep& step) {
    return row_coordinates(p, work.w.q, work.w.b, step.block * T::kBlockM);
  };
  const auto load_query = [&](const BwdModWorkTile& work, const BwdStep& step, bool is_ending) {
    wait(bars.q_empty(ring.stage), ring.phase);
    const int head = work.first_head + step.head();
    if (T::kConsumersDraw && head != head_before) stale = T::kStages;
    head_before = head;
    if (is_first_lane()) {
      const uint32_t full = bars.q_full(ring.stage);
      const int64_t tile = work.tile + static_cast<int64_t>(step.head()) * a.plain.tiles_per_head + step.block;
      copy_tile<T::kChunks, T::kBlockM>(maps.plain.q, a.plain.q, smem + T::kQAt + ring.stage * T::kQBytes, full,
                                        queries_at(work, step), head);
      ptx::mbarrier_arrive_expect_tx(full, T::kStatsBytes);
      ptx::bulk_load(smem + T::kStatsAt + ring.stage * T::kStatsBytes, a.plain.p.row_stats + tile * (2 * T::kBlockM),
                     T::kStatsBytes, full);
      shared.steps[step_place] = step;
      if constexpr (T::kAdds) {
        shared.distances[ring.stage] = HeadDistances::of(a.m.by_distance, work.seq.b, head, kLog2e);
      }
      if (T::kConsumersDraw && stale > 0) shared.drop[ring.stage].make(a.m, work.seq.b, head);
      ptx::mbarrier_arrive(full);
      const bool dynamic = a.plain.scheduler.counter != nullptr;  // else nobody waits for that
      if (dynamic && is_ending) ptx::mbarrier_arrive(bars.work_ending());
    }
    --stale;
    if (++step_place == T::kSteps) step_place = 0;
    ring.advance();
  };
  const auto load_dout = [&](const BwdModWorkTile& work, const BwdStep& step) {
    wait(bars.dout_empty(ring.stage), ring.phase);
    if (is_first_lane()) {
      copy_tile<T::kChunks, T::kBlockM>(maps.plain.dout, a.plain.dout, smem + T::kDoutAt + ring.stage * T::kQBytes,
                                        bars.dout_full(ring.stage), queries_at(work, step),
                                        work.first_head + step.head());
    }
    ring.advance();
  };
  const auto begin = [&](const BwdModWorkTile& work) {
    mask_words.begin_work();
    head_before = -1;
    if (loader == 0) load_work(work);
  };
  for_bwd_steps<T>(shared, bars, begin, [&](const BwdModWorkTile& work, const BwdStep& step, bool is_ending) {
    if constexpr (!T::kLoadersDraw) mask_words.leave(a, shared, bars, work, step, bring);
    if (loader == 1) {
      load_query(work, step, is_ending);
    } else if (loader == 2) {
      load_dout(work, step);
    } else if (T::kAdds && a.brings_bias) {
      load_bias(work, step);
    }
    // Where both mask words of a step share a place, the second one waits until consumers have read the first, which
    // they do once its Q is there.
    if constexpr (T::kLoadersDraw) mask_words.leave(a, shared, bars, work, step, bring);
  });
}

}  // namespace flash_ext::sm90
