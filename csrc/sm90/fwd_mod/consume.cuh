// The consumers of the sm90 forward with modifiers: those of fwd/consume.cuh, with two differences. What a step is and
// which tests a warpgroup needs comes with each K, and a work tile may hold tiles that a warpgroup sees nowhere.
//
// Tiles of 128 queries (m128) serve every modifier: their words of masks are asked for before a step's products and
// made into bits while they run. Tiles of 192 (m192) serve masks that leave most tiles whole: bits are made where a
// step asks for them, behind its scores, because words kept over a step, or asked for ahead, cost registers that all
// steps pay. A tile that a warpgroup sees whole then costs what it costs in the plain kernel. Bool masks, whose words
// every step asks for, have a kernel that finds them in shared memory.
#pragma once

#include "../fwd/consume.cuh"
#include "kv_position.cuh"
#include "loose_bias.cuh"
#include "mask_words.cuh"
#include "scores.cuh"
#include "slopes.cuh"
#include "weights.cuh"

namespace flash_ext::sm90 {

// Arrays are the caller's variables: as members they would keep all others in memory until loops are unrolled.
template <typename T>
struct MaskedConsumer {
  using E = typename T::Element;
  static constexpr int kN = T::kBlockN, kO = T::kHeadDimV / 2;
  static constexpr int kPingpongThreads = 256;  // of the warpgroup whose turn it is and of the one before

  // What a step knows beside its scores. m128: words of the mask, asked for before the products, and bits made of them.
  // With slopes in the product: from the tile's first key to the warp's first row, and what follows from it.
  struct Beside {
    OwnWords<kN> mask;
    ScoreBits<kN> visible;
    int ahead;
    uint32_t terms;
    RowBias bias;
    BroughtWords words[T::kBringsWords ? T::kBiasPieces : 1];
  };

  const FwdModArgs& a;
  const FwdModMaps& maps;
  uint32_t smem;
  ModShared<T>& shared;
  ModBarriers<T> bars;
  int group;

  float (&o)[kO], (&s)[kN / 2];
  uint32_t (&weights)[kN / 4];
  StateOf<T>& state;
  KvPosition<T> kv;
  int work_tiles = -1;  // begun before the present one
  OwnStep now{}, next{};
  int own_row;  // warp_row() for slopes in the product, which ask for it in each step

  // ---- Who this is. Registers are short: what follows from the thread's number is made anew where it is used.

  __device__ __forceinline__ int warp_row() const {
    const uint32_t warp = ptx::fresh_thread_idx() / 32u % 4;  // of signed numbers four instructions more
    return group * 64 + static_cast<int>(warp * 16);
  }
  __device__ __forceinline__ const typename T::WorkTile& work_at(int n) const {
    return shared.work_tiles[stage_of(n, T::kWorkStages)];
  }
  __device__ __forceinline__ int first_row() const { return work_at(work_tiles).w.block * T::kBlockM + warp_row(); }
  __device__ __forceinline__ int first_col() const { return now.tile() * kN; }
  __device__ __forceinline__ ScoreMod score_mod() const {
    const ModWorkTile& work = work_at(work_tiles);
    return ScoreMod{a.plain.p.problem, a.m, work.seq, work.w.h};
  }

  // ---- Barriers and stages.

  __device__ __forceinline__ void arrive(uint32_t bar) const {
    if constexpr (T::kM192) {
      ptx::mbarrier_arrive_for_warp_flat(bar, ptx::fresh_lane() == 0);
    } else {
      ptx::mbarrier_arrive_for_warp(bar, ptx::fresh_lane() == 0);
    }
  }
  // Warpgroups take turns in issuing the products of a step, so that one computes weights while another's products run.
  __device__ __forceinline__ void pingpong_wait() const {
    debug_delay();
    ptx::bar_sync(ptx::kPingpongBarrier + group, kPingpongThreads);
  }
  __device__ __forceinline__ void pingpong_arrive() const {
    ptx::bar_arrive_only(ptx::kPingpongBarrier + (group + 1) % T::kConsumers, kPingpongThreads);
  }
  __device__ __forceinline__ void wait_for_stage() const { wait(bars.kv_full(kv.stage()), kv.phase()); }
  __device__ __forceinline__ uint32_t stage_address() const { return smem + kv.stage() * T::kStageBytes; }
  __device__ __forceinline__ void free_stage(int ago) const { arrive(bars.kv_empty(kv.stage_ago(ago))); }
  __device__ __forceinline__ void skip_stage() {
    wait_for_stage();
    arrive(bars.kv_empty(kv.stage()));
    kv.advance();
  }
  __device__ __forceinline__ int q_stage() const { return stage_of(work_tiles, q_stages<T>(a)); }
  __device__ __forceinline__ void finish_q() const {
    if (now.is_last()) arrive(bars.q_empty(q_stage()));
  }
  // Step i has used 2 i or 2 i + 1 stages when it comes to its bias, the first step one. Pieces before it:
  __device__ __forceinline__ uint32_t bias_count(int piece) const {
    return static_cast<uint32_t>(kv.used) / 2 * T::kBiasPieces + piece;
  }
  __device__ __forceinline__ uint32_t bias_place(int piece) const { return bias_count(piece) % T::kBiasPlaces; }
  __device__ __forceinline__ uint32_t wait_for_bias(int piece) const {
    wait(bars.bias_full(bias_place(piece)), bias_count(piece) / T::kBiasPlaces % 2);
    return smem + T::kBiasAt + bias_place(piece) * T::kBiasBytes;
  }
  __device__ __forceinline__ void free_bias(int piece) const {
    __syncwarp();
    arrive(bars.bias_empty(bias_place(piece)));
  }
  // K of a step that this warpgroup does not see, and its bias.
  __device__ __forceinline__ void skip_step() {
    skip_stage();
    if constexpr (T::kBiasPlaces > 0) {
      if (!T::kBringsWords && !has_bias<T>(a)) return;
#pragma unroll 1
      for (int piece = 0; piece < T::kBiasPieces; ++piece) {
        wait_for_bias(piece);
        free_bias(piece);
      }
    }
  }

  // ---- From step to step.

  // The next step, looked up while a product runs: behind its wait that lengthens the chain from scores to scores.
  __device__ __forceinline__ void look_ahead() {
    wait_for_stage();
    next.take(shared.steps[kv.stage()], group);
  }
  // On to the step that has been looked at.
  __device__ __forceinline__ void enter_step() {
    now = next;
    if (!now.is_first()) return;
    ++work_tiles;
    wait(bars.q_full(q_stage()), phase_of(work_tiles, q_stages<T>(a)));
  }
  // The same; false after the last one of all work tiles.
  __device__ __forceinline__ bool begin_step() {
    // m192 has the step in a uniform register, which it would leave for a copy ahead of the test.
    if constexpr (!T::kM192) now = next;
    if (next.bits & kNoStep) {
      kv.advance();
      return false;
    }
    enter_step();
    return true;
  }
  // The same where there is a step and it is seen, in one test for both.
  __device__ __forceinline__ bool enter_seen_step() {
    if ((next.bits & (kNoStep | kSkipped << kTestsAt)) != 0) return false;
    enter_step();
    return true;
  }
  __device__ __forceinline__ bool next_step() {
    look_ahead();
    return begin_step();
  }

  // ---- What stands beside the scores.

  __device__ __forceinline__ Beside prepare() const {
    Beside beside{};
    if constexpr (T::kSlopesInProduct) {
      beside.ahead = work_at(work_tiles).centre + own_row - first_col();
      beside.terms = own_terms<kN>(work_at(work_tiles), beside.ahead);
    } else if constexpr (!T::kM192) {
      beside.mask = fetch_own_words<kN>(score_mod(), work_at(work_tiles), first_row(), first_col(), now.tests());
    }
    return beside;
  }
  // While products run.
  __device__ __forceinline__ void complete(Beside& beside) const {
    if constexpr (T::kSlopesInProduct) beside.bias = bias_of_rows<kN>(a.m, work_at(work_tiles), beside.ahead);
    if constexpr (!T::kM192 && !T::kLateBits) beside.visible = find_visible(beside);
    if constexpr (T::kBringsWords) {
#pragma unroll
      for (int piece = 0; piece < T::kBiasPieces; ++piece) {
        beside.words[piece].load(wait_for_bias(piece) + warp_row() * 8);
        free_bias(piece);
      }
    }
  }
  __device__ __forceinline__ ScoreBits<kN> find_visible(const Beside& beside) const {
    return visible_scores<kN>(score_mod(), beside.mask, [this] { return first_row(); }, first_col(), now.tests());
  }

  // ---- Products.

  // The K has been waited for, when its step was looked up.
  __device__ __forceinline__ void issue_scores(const Beside& beside) {
    const uint32_t q_at = smem + T::kQAt + group * 64 * 128 + q_stage() * T::kQBytes;
    const uint32_t q_low = uniform(descriptor_low(q_at, 16));
    const uint32_t k_low = uniform(descriptor_low(stage_address(), 16));
    ptx::warpgroup_fence_operand(s);
    ptx::wgmma_fence();
    issue_qk<E, T::kHeadDim, T::kBlockM, kN>(s, q_low, k_low);
    if constexpr (T::kSlopesInProduct) {
      ptx::wgmma_rs_one_group(s, beside.terms, uniform(descriptor_low(smem + T::kNumbersAt, kNumberBytes)));
    }
    ptx::wgmma_commit();
    kv.advance();
  }
  __device__ __forceinline__ void issue_output() {
    const uint32_t v_low = uniform(descriptor_low(stage_address(), kN * 128));
    wait_for_stage();
    ptx::wgmma_fence();
    issue_pv<E>(o, weights, v_low);
    ptx::wgmma_commit();
    kv.advance();
  }
  __device__ __forceinline__ void finish_products(int k_ago) {
    ptx::warpgroup_fence_operand(s);
    free_stage(k_ago);
    finish_q();
  }

  // ---- Scores.

  __device__ __forceinline__ void add_bias() {
    const int row0 = first_row();
    const bool is_staged = has_bias<T>(a) && !T::kInParts;
    const uint32_t bias = is_staged ? wait_for_bias(0) : 0;
    [[maybe_unused]] int behind = 0;
    if constexpr (T::kLoose) {
      behind = behind_below(work_at(work_tiles).behind, a.m.bias, warp_row() + ptx::fresh_lane() / 4);
    }
#pragma unroll
    for (int part = 0; part < kN / kPartKeys; ++part) {
      ScorePart& x = part_of(s, part);
      modify_scores<T>(x, a, score_mod(), row0, first_col() + part * kPartKeys, [&](float scale) {
        const uint32_t place = T::kInParts ? wait_for_bias(part) : bias + part * T::kBlockM * 128;
        if constexpr (T::kFloat) {
          add_staged_float_bias<T::kBlockM>(x, scale, place, warp_row());
        } else if constexpr (T::kLoose) {
          const int keys = work_at(work_tiles).seq.seqlen_k - first_col() - part * kPartKeys;
          add_loose_bias<E>(x, scale, place, warp_row(), behind, keys);
        } else {
          add_staged_bias<E>(x, scale, place, warp_row(), a.bias_rows == 1);
        }
        if constexpr (T::kInParts) free_bias(part);
      });
      ptx::warpgroup_fence_operand(x);
    }
    if (is_staged) free_bias(0);
  }
  // Raw products to exponents, less the maxima there are.
  __device__ __forceinline__ void make_exponents() {
    // A work tile's state is not begun before the output of the last one has left.
    const float shift[2] = {now.is_first() ? 0.f : shift_of(state.max[0]),
                            now.is_first() ? 0.f : shift_of(state.max[1])};
#pragma unroll
    for (int part = 0; part < kN / kPartKeys; ++part) {
      ScorePart& x = part_of(s, part);
      if constexpr (T::kKind == FwdModKind::kHides) {
        shift_scores(x, a.scale_log2, shift);
      } else if (T::kM192 || !a.m.by_distance) {
        cap_to_exponents(x, a, shift);
      } else if constexpr (T::kMaySlope) {
        add_distances(x, a.scale_log2, work_at(work_tiles).distances, score_mod(), first_row(),
                      first_col() + part * kPartKeys, shift);
      }
      ptx::warpgroup_fence_operand(x);
    }
  }
  // A tile that the diagonal crosses: each score has its own distance.
  __device__ __forceinline__ void bend(Beside& beside) {
    if (!beside.bias.bends) return;
    beside.bias.of[0] = beside.bias.of[1] = 0.f;
    const auto& work = work_at(work_tiles);
    const HeadDistances raw{work.raw_slope};
    raw.add_bent<false>(as_blocks(s), a.m.by_distance, work.seq.b, work.w.h, first_distance<false>(beside.ahead, 0),
                        ptx::reciprocal(a.plain.p.problem.scale));
    ptx::warpgroup_fence_operand(s);
  }
  __device__ __forceinline__ void hide(const Beside& beside) {
    if constexpr (T::kM192) {
#pragma unroll
      for (int i = 0; i < (T::kBringsWords ? T::kBiasPieces : 0); ++i) beside.words[i].hide(part_of(s, i), now.tests());
      const TileTests tests = T::kBringsWords ? now.tests() & ~kTestRows : now.tests();
      // The vote makes the branch warp-uniform; otherwise ptxas clones what follows.
      if (!__any_sync(ptx::kFullWarp, tests != 0)) return;
      hide_tile(s, score_mod(), work_at(work_tiles), first_row(), first_col(), tests);
    } else {
      hide_scores(s, T::kLateBits ? find_visible(beside) : beside.visible);
    }
    ptx::warpgroup_fence_operand(s);
  }
  __device__ __forceinline__ void change_scores(Beside& beside) {
    if constexpr (T::kSlopesInProduct) bend(beside);
    if constexpr (T::kChanges) add_bias();
    if constexpr (T::kUnits == ScoreUnits::kExponents) make_exponents();
    hide(beside);
  }

  // ---- Weights and output.

  // By the maxima there are; false where they do not serve.
  __device__ __forceinline__ bool try_own_weights(const RowBias& bias) {
    if constexpr (T::kUnits == ScoreUnits::kExponents) return try_exponents<E>(s, weights, state);
    else if constexpr (T::kUnits == ScoreUnits::kChanged) return try_mod_weights<E>(s, weights, state, a.m.unit_log2);
    else if constexpr (T::kSlopesInProduct) return try_biased_weights<E>(s, weights, state, a.scale_log2, bias);
    else return try_weights<E>(s, weights, state, a.scale_log2);
  }
  __device__ __forceinline__ void own_weights_by_maximum(float (&factor)[2], const RowBias& bias) {
    if constexpr (T::kUnits == ScoreUnits::kExponents) {
      weights_by_maximum_of_exponents<E>(s, weights, state, factor);
    } else if constexpr (T::kUnits == ScoreUnits::kChanged) {
      mod_weights_by_maximum<E>(s, weights, state, factor, a.m.unit_log2);
    } else if constexpr (T::kSlopesInProduct) {
      biased_weights_by_maximum<E>(s, weights, state, factor, a.scale_log2, bias);
    } else {
      weights_by_maximum<E>(s, weights, state, factor, a.scale_log2);
    }
  }
  __device__ __forceinline__ void prepare_weights(const Beside& beside) {
    // Maxima that are wanted must be true ones. The first tile of a work tile takes its own, so that no result depends
    // on which hidden tiles were visited.
    const bool asks = now.is_first() || a.m.row_max != nullptr;
    if (asks || !try_own_weights(beside.bias)) {
      float factor[2];
      own_weights_by_maximum(factor, beside.bias);
#pragma unroll
      for (int i = 0; i < kO; ++i) o[i] *= factor[(i / 2) % 2];
    }
    if constexpr (T::kDrops) {
      if (T::kM192 || a.m.rng != nullptr) drop_packed(weights, a.m, first_row(), first_col(), work_at(work_tiles).drop);
    }
  }
  __device__ __forceinline__ void begin_output() {
    clear(o);
    state = {};
  }
  __device__ __forceinline__ void store(int n) const {
    const ModWorkTile& work = work_at(n);
    const int lane = ptx::fresh_lane(), first = warp_row(), row_in_tile = first + lane / 4;
    float inverse[2];
    finish_mod_rows(a, work, mod_state(state), work.w.block * T::kBlockM + row_in_tile, lane, inverse);
    if constexpr (T::kStaged) {
      if (T::kModTile.bias_has_place || !has_bias<T>(a)) {
        const uint32_t staging = smem + T::kStagingAt + first / 16 * T::kStagingChunks * 16 * 128;
        store_staged<T>(a.plain, maps.plain, work.w, o, inverse, staging, first, lane);
        return;
      }
    }
    store_direct<T>(a.plain, work.w, o, inverse, work.w.block * T::kBlockM + row_in_tile, lane);
  }

  // ---- The loop.

  // Scores of this step beside the output of the one before.
  __device__ __forceinline__ void step() {
    Beside beside = prepare();
    ptx::warpgroup_fence_operand(o);
    ptx::warpgroup_fence_operand(weights);
    pingpong_wait();
    issue_scores(beside);
    issue_output();
    pingpong_arrive();
    complete(beside);
    ptx::wgmma_wait<1>();
    finish_products(2);
    change_scores(beside);
    look_ahead();
    ptx::wgmma_wait<0>();
    ptx::warpgroup_fence_operand(o);
    ptx::warpgroup_fence_operand(weights);
    free_stage(1);
    if (now.is_first()) {
      store(work_tiles - 1);
      begin_output();
    }
    prepare_weights(beside);
  }

  __device__ __forceinline__ void run() {
    if constexpr (T::kSlopesInProduct) {
      own_row = warp_row();
      asm volatile("" : "+r"(own_row));
    }
    if (group == T::kConsumers - 1) ptx::bar_arrive_only(ptx::kPingpongBarrier, kPingpongThreads);
    bool started = false;  // from the second step on a V comes with it
    bool is_passed = false;  // the step's turn has been taken already, by the last product before it
    bool has_step = next_step();
#pragma unroll 1
    while (true) {
      // No weights wait for their V here.
      if (!has_step || now.is_first()) {
        const int finished = has_step ? work_tiles - 1 : work_tiles;
        if (finished >= 0) store(finished);
        if (!has_step) break;
        begin_output();
      }
      if (!now.is_seen()) {
        if (!is_passed) {
          pingpong_wait();
          skip_step();
          if (started) skip_stage();
          pingpong_arrive();
        }
        is_passed = false;
        started = true;
        finish_q();
        has_step = next_step();
        continue;
      }
      Beside beside = prepare();
      pingpong_wait();
      issue_scores(beside);
      pingpong_arrive();
      complete(beside);
      if (started) skip_stage();
      ptx::wgmma_wait<0>();
      finish_products(started ? 2 : 1);
      started = true;
      change_scores(beside);
      prepare_weights(beside);
      look_ahead();
#pragma unroll 1
      while (T::kM192 ? enter_seen_step() : (has_step = begin_step()) && now.is_seen()) step();
      if constexpr (T::kM192) has_step = begin_step();
      // The last product, which no scores accompany: the step's tile is not seen, or there is none.
      if (has_step) {
        pingpong_wait();
        skip_step();
      }
      ptx::warpgroup_fence_operand(o);
      ptx::warpgroup_fence_operand(weights);
      issue_output();
      if (has_step) pingpong_arrive();
      is_passed = has_step;
      ptx::wgmma_wait<0>();
      ptx::warpgroup_fence_operand(o);
      free_stage(1);
    }
    if (T::kStaged && ptx::fresh_lane() == 0) ptx::bulk_wait_read();
  }
};

template <typename T>
__device__ __forceinline__ void consume_masked(const FwdModArgs& a, const FwdModMaps& maps, uint32_t smem,
                                               ModShared<T>& shared, ModBarriers<T> bars, int group) {
  float o[T::kHeadDimV / 2], s[T::kBlockN / 2];
  uint32_t weights[T::kBlockN / 4];
  StateOf<T> state;
  MaskedConsumer<T>{a, maps, smem, shared, bars, group, o, s, weights, state}.run();
}

}  // namespace flash_ext::sm90
