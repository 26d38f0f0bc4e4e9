// Work tiles and steps of the sm90 split backward as its consumers take them, and what their threads know of
// themselves.
#pragma once

#include "../bwd/steps.cuh"
#include "config.cuh"

namespace flash_ext::sm90 {

// A consumer's lane and warp. With modifiers registers are short, so it reads them again at each use.
template <typename T>
class ConsumerThread {
 public:
  __device__ __forceinline__ int lane() const {
    if constexpr (T::kPlain) return lane_;
    return ptx::fresh_lane();
  }
  // Warp and thread of its warpgroup.
  __device__ __forceinline__ int warp() const { return of_block() / 32 % 4; }
  __device__ __forceinline__ int thread() const { return of_block() % 128; }
  // The thread's first row of the warpgroup's 64. Computed at each use: kept in a register it makes 192 spill.
  __device__ __forceinline__ int row() const { return warp() * 16 + lane() / 4; }
  __device__ __forceinline__ void arrive(uint32_t bar) const { ptx::mbarrier_arrive_for_warp(bar, lane() == 0); }

 private:
  __device__ __forceinline__ static auto of_block() {
    if constexpr (T::kPlain) {
      return threadIdx.x;
    } else {
      return ptx::fresh_thread_idx();
    }
  }
  // At (192, 128) it stays in a register: ptxas would read it in every step again. 192 gains without a mask what
  // it loses with a causal one, and 256 has no register left.
  __device__ __forceinline__ static int first_lane() {
    if constexpr (T::kPlain && T::kHeadDim == 192 && T::kHeadDimV == 128) return ptx::fresh_lane();
    return threadIdx.x % 32;
  }
  int lane_ = first_lane();
};

// Calls make() once and gives what it returned at each use; with modifiers, where registers are short, calls it there.
template <typename T, typename Make>
__device__ __forceinline__ auto kept(const Make& make) {
  if constexpr (T::kPlain) {
    return [x = make()] { return x; };
  } else {
    return make;
  }
}

// Without modifiers a work tile tells which tiles it has, perhaps none, and consumers walk over them themselves, or
// (not kWalks) only count.
template <typename T, bool kWalks>
class PlainSteps {
 public:
  __device__ PlainSteps(const SplitArgs& a, SplitShared<T>& shared, SplitBarriers<T> bars, ConsumerThread<T> me)
      : a_(a), shared_(shared), bars_(bars), me_(me) {}

  // Waits for the next work tile with steps and returns its place, or -1 at the end. Those without go to clear(work) on
  // the way. The caller holds no other work tile: of two places, one with a work tile that is not released and one with
  // a work tile without steps would leave none for what follows.
  template <typename Clear>
  __device__ __forceinline__ int take_work(const Clear& clear) {
    while (true) {
      wait(bars_.work_full(work_ring_.stage), work_ring_.phase);
      const int at = work_ring_.stage;
      if (work(at).w.block < 0) return -1;
      if (work(at).steps > 0) return begin_work();
      work_ring_.advance();
      clear(work(at));
      release_work(at);
    }
  }
  // The same while another work tile is held: -1 also before a work tile without steps, which stays the next one.
  __device__ __forceinline__ int take_following_work() {
    wait(bars_.work_full(work_ring_.stage), work_ring_.phase);
    const BwdWorkTile& next = work(work_ring_.stage);
    return next.w.block < 0 || next.steps == 0 ? -1 : begin_work();
  }
  __device__ __forceinline__ void release_work(int at) const {
    __syncwarp();
    me_.arrive(bars_.work_empty(at));
  }
  // Of what comes once a work tile, for the one taken last.
  __device__ __forceinline__ uint32_t work_phase() const { return work_phase_; }
  __device__ __forceinline__ const BwdWorkTile& work(int at) const { return shared_.work_tiles[at]; }
  __device__ __forceinline__ AttnMod mod(int at) const {
    return AttnMod{a_.plain.p.problem, work(at).w.q.length, work(at).w.k.length};
  }

  // To the next step of a work tile. The step itself is not read from shared memory.
  __device__ __forceinline__ void advance(int at) {
    if constexpr (kWalks) {
      walk_.advance(work(at), static_cast<int>(a_.plain.grid.shared.divisor));
    } else {
      --walk_.left;
    }
  }
  __device__ __forceinline__ void read_step(int) {}
  __device__ __forceinline__ bool is_last() const { return walk_.left == 1; }
  __device__ __forceinline__ int block() const { return walk_.block; }
  // Whether all queries of the step see all keys of the work tile.
  __device__ __forceinline__ bool is_whole() const { return reach_.whole(walk_.block); }

 private:
  __device__ __forceinline__ int begin_work() {
    const int at = work_ring_.stage;
    work_ring_.advance();
    work_phase_ ^= 1;
    walk_ = Walk<T>(work(at));
    if constexpr (kWalks && !T::kByQueries) {
      reach_ = KeyReach::of<T::kBlockM>(mod(at), work(at).w.block * T::kBlockN, T::kBlockN);
    }
    return at;
  }

  const SplitArgs& a_;
  SplitShared<T>& shared_;
  SplitBarriers<T> bars_;
  ConsumerThread<T> me_;
  PipelineState<T::kWorkStages> work_ring_;
  uint32_t work_phase_ = 1;
  Walk<T> walk_;
  KeyReach reach_;
};

// With modifiers every work tile has steps. What a step is, and which of its tests a warpgroup needs, comes beside Q or
// K.
template <typename T>
class ModSteps {
 public:
  __device__ ModSteps(const SplitModArgs& a, SplitShared<T>& shared, SplitBarriers<T> bars, ConsumerThread<T> me)
      : a_(a), shared_(shared), bars_(bars), me_(me) {}

  // Place of the next work tile, or -1 at the end.
  __device__ __forceinline__ int take_following_work() {
    const int at = stage_of(work_tiles_, T::kWorkStages);
    wait(bars_.work_full(at), phase_of(work_tiles_, T::kWorkStages));
    if (shared_.work_tiles[at].w.block < 0) return -1;
    ++work_tiles_;
    return at;
  }
  template <typename Clear>
  __device__ __forceinline__ int take_work(const Clear&) {
    return take_following_work();
  }
  __device__ __forceinline__ void release_work(int at) const {
    __syncwarp();
    me_.arrive(bars_.work_empty(at));
  }
  __device__ __forceinline__ uint32_t work_phase() const { return (work_tiles_ - 1) % 2; }
  __device__ __forceinline__ const BwdModWorkTile& work(int at) const { return shared_.work_tiles[at]; }

  __device__ __forceinline__ void advance(int) {}
  __device__ __forceinline__ void read_step(int stage) { now_ = shared_.steps[stage]; }
  __device__ __forceinline__ bool is_last() const { return now_.is_last(); }
  __device__ __forceinline__ int block() const { return now_.block; }
  __device__ __forceinline__ ScoreMod score_mod(int at) const {
    const BwdModWorkTile& x = work(at);
    return ScoreMod{a_.plain.p.problem, a_.m, x.seq, x.first_head + now_.head()};
  }

  // Bits of this thread's scores. The vote makes the branch uniform for ptxas, which else would not know that the warp
  // stays together.
  __device__ __forceinline__ uint32_t visible(int group) {
    const uint32_t tests = now_.tests(group);
    uint32_t bits = ~0u;
    if (__any_sync(ptx::kFullWarp, now_.has_tests())) {
      const uint32_t word = take_mask_word();
      bits = tests == 0 ? ~0u : word;
    }
    return tests == kSkipped ? 0 : bits;
  }
  // The same of what dropout hits: bit i is score i.
  template <int kCount>
  __device__ __forceinline__ uint32_t dropped(int row0, int col0, int keys_at) const {
    if constexpr (!T::kDrops) return 0;
    return draw_own<!T::kByQueries, kCount>(a_.m, row0, col0, shared_.drop[keys_at]);
  }

 private:
  __device__ __forceinline__ uint32_t take_mask_word() {
    const int stage = stage_of(mask_words_, T::kMaskStages);
    wait(bars_.mask_full(stage), phase_of(mask_words_, T::kMaskStages));
    const uint32_t* words = reinterpret_cast<const uint32_t*>(shared_.mask_words(WordKind::kVisible, stage));
    const uint32_t word = words[ptx::fresh_thread_idx() - 128];
    __syncwarp();
    me_.arrive(bars_.mask_empty(stage));
    ++mask_words_;
    return word;
  }

  const SplitModArgs& a_;
  SplitShared<T>& shared_;
  SplitBarriers<T> bars_;
  ConsumerThread<T> me_;
  BwdStep now_;
  uint32_t work_tiles_ = 0, mask_words_ = 0;  // taken so far; registers are short
};

template <typename T, bool kWalks = true>
using WorkSteps = std::conditional_t<T::kPlain, PlainSteps<T, kWalks>, ModSteps<T>>;

// Zeros in a warp's 16 rows of a gradient, from `row` of the sequence on.
__device__ __forceinline__ void clear_rows(const StridedView& view, int b, const Span& span, int h, int columns,
                                           int row, int lane) {
  zero_rows(view, b, span.start + row, h, min(16, span.length - row), columns, lane);
}

}  // namespace flash_ext::sm90
