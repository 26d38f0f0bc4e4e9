// Which steps a CTA of bwd_bias/kernel.cuh takes: tiles of the result one after the other, and for each of them the
// tiles of scores that are summed into it, in a fixed order. One warp looks ahead for all, a candidate a lane.
#pragma once

#include <algorithm>

#include "../../common/modifiers.cuh"
#include "../../common/seqlen.cuh"
#include "../../heuristics.h"

namespace flash_ext::sm80 {

// How the result is cut into tiles, and what walks over a tile divide by.
struct BiasGrid {
  int64_t tiles = 0;  // times the parts
  int slices_qk = 0;  // of a row of Q and K
  int slices = 0;     // and of dO and V
  bool whole = false;  // slices are full, and rows aligned
  int together = 1;    // tiles of the result that are looked at together, where each has the same few lines
  Divisor lines;       // of each of them
  Divisor tiles_m, tiles_n, heads, batch;  // of the result
  Divisor heads_summed;                    // query heads that one of the result stands for
  Divisor tiles_q;                         // of a dense batch entry
  Divisor shared;                          // query heads per key head

  template <typename T>
  static BiasGrid of(const BwdParams& p, const BiasGradient& g) {
    const Problem& x = p.problem;
    const auto parts = [](int64_t n, int size) { return static_cast<uint32_t>((n + size - 1) / size); };
    BiasGrid r;
    r.tiles_m = Divisor(g.sum_rows ? 1 : parts(g.rows, T::kBlockM));
    r.tiles_n = Divisor(g.sum_cols ? 1 : parts(g.cols, T::kBlockN));
    r.heads = Divisor(g.heads);
    r.batch = Divisor(g.batch);
    r.heads_summed = Divisor(g.heads == 1 ? x.num_heads : 1);
    r.tiles_q = Divisor(std::max(1u, parts(x.seqlen_q, T::kBlockM)));
    r.shared = Divisor(x.num_heads / x.num_heads_k);
    r.tiles = g.tiles(T::kBlockM, T::kBlockN);
    r.slices_qk = parts(x.head_dim, T::kSlice);
    r.slices = r.slices_qk + parts(x.head_dim_v, T::kSlice);
    if (!g.sum_rows && !g.sum_cols) {
      r.lines = Divisor(parts(int64_t{g.batch == 1 ? x.batch : 1} * r.heads_summed.divisor, g.splits));
      r.together = std::max(1, 32 / static_cast<int>(r.lines.divisor));
    }
    const bool aligned = p.q.aligned && p.k.aligned && p.v.aligned && p.dout.aligned;
    r.whole = aligned && x.head_dim % T::kSlice == 0 && x.head_dim_v % T::kSlice == 0;
    return r;
  }
};

// Tile (m, n) of head h of batch entry b of the result, and of its lines the part `split`: every splits-th from there
// on.
struct BiasTile {
  uint32_t index;
  int n, m, h, b, split;
};

// A tile of scores.
struct BiasStep {
  BiasTile tile;  // of the result, that it is summed into
  TileTests tests;  // kSkipTile: there are no more steps
  bool whole;       // all loads are of full, aligned slices
  int h;            // query head
  int row0, col0;   // first query and key, inside the sequence
  int rows, keys;   // from there to the end of the sequence
  SeqInfo seq;
  const uint16_t *q, *dout, *k, *v;  // of the first query and key
  const float2* stats;               // (lse * log2 e, delta) of the first query
};
static_assert(sizeof(BiasStep) == BwdBiasTile::kStepBytes);

// State of the search. The rows of scores that a tile of the result sums over are its lines; a line is one tile of
// queries of one head of one sequence.
struct BiasSearch {
  uint32_t index;  // tile of the result
  bool empty;      // nothing found for it yet
  int line;        // next one of it
  int n;           // next tile of keys of that line, with sum_cols; -1: its first
  uint32_t found;  // steps found so far
};

template <typename T>
struct BiasSteps {
  static constexpr int kBlockM = T::kBlockM, kBlockN = T::kBlockN;
  const BwdParams& p;
  const Modifiers& m;
  const BiasGradient& g;
  const BiasGrid& grid;
  BiasSearch& s;
  BiasStep* steps;

  __device__ BiasStep& operator[](uint32_t i) const { return steps[i % BwdBiasTile::kSteps]; }

  __device__ BiasTile tile_of(uint32_t index) const {
    uint32_t rest = index;
    const auto next_digit = [&](const Divisor& base) {
      const uint32_t quotient = divide(rest, base), digit = rest - quotient * base.divisor;
      rest = quotient;
      return static_cast<int>(digit);
    };
    BiasTile tile{index};
    tile.n = next_digit(grid.tiles_n);
    tile.m = next_digit(grid.tiles_m);
    tile.h = next_digit(grid.heads);
    tile.b = next_digit(grid.batch);
    tile.split = static_cast<int>(rest);
    return tile;
  }

  // Sequences, or tiles of queries in them, are counted together, `first` is that of a tile's first line; its lines.
  struct Slots {
    int first, lines;
  };
  __device__ Slots slots_of(const BiasTile& tile) const {
    const bool all = g.batch == 1;
    const int tiles_q = static_cast<int>(grid.tiles_q.divisor);
    int first = 0, count = 0;
    if (!g.sum_rows) {
      first = all ? 0 : tile.b;
      count = all ? p.problem.batch : 1;
    } else if (!packed()) {
      first = all ? 0 : tile.b * tiles_q;
      count = (all ? p.problem.batch : 1) * tiles_q;
    } else if (all) {
      count = static_cast<int>(p.problem.total_q / kBlockM) + p.problem.batch + 1;
    } else {
      const Span q = spans(tile.b).q;
      first = static_cast<int>(q.start / kBlockM) + tile.b + 1;
      count = (q.length + kBlockM - 1) / kBlockM;
    }
    const int lines = count * static_cast<int>(grid.heads_summed.divisor);
    return {first, max(0, (lines - tile.split + g.splits - 1) / g.splits)};
  }

  __device__ bool packed() const { return p.problem.cu_seqlens_q != nullptr; }
  __device__ Work spans(int b) const {
    const Problem& x = p.problem;
    Work w{};
    w.b = packed() ? 0 : b;
    w.q = packed() ? packed_span(x.cu_seqlens_q, x.batch, b, x.total_q) : Span{0, x.seqlen_q};
    w.k = packed() ? packed_span(x.cu_seqlens_k, x.batch, b, x.total_k) : Span{0, x.seqlen_k};
    return w;
  }

  struct Line {
    int b, h, m;  // b < 0: none
  };
  __device__ Line locate(const BiasTile& tile, const Slots& slots, int line) const {
    if (line >= slots.lines) return {-1, 0, 0};
    const int of_all = tile.split + line * g.splits;
    const int at = static_cast<int>(divide(static_cast<uint32_t>(of_all), grid.heads_summed));
    const int h = g.heads == 1 ? of_all - at * static_cast<int>(grid.heads_summed.divisor) : tile.h;
    const int slot = slots.first + at;
    if (!g.sum_rows) return {slot, h, tile.m};
    if (!packed()) {
      const int b = static_cast<int>(divide(static_cast<uint32_t>(slot), grid.tiles_q));
      return {b, h, slot - b * static_cast<int>(grid.tiles_q.divisor)};
    }
    const Problem& x = p.problem;
    const TileSlot found = find_slot<kBlockM>(x.cu_seqlens_q, x.total_q, x.cu_seqlens_k, x.total_k, x.batch, slot);
    return {found.outside ? -1 : found.b, h, found.block};
  }

  // Looks at the next 32 candidates: tiles of keys of one line, or lines with one tile of keys each.
  __device__ void look(int lane) const {
    const bool many = grid.together > 1;
    const int which = many ? static_cast<int>(divide(static_cast<uint32_t>(lane), grid.lines)) : 0;
    const uint32_t index = s.index + which * gridDim.x;
    const bool has_tile = which < grid.together && index < grid.tiles;
    BiasTile tile{};
    Slots slots{0, 0};
    if (has_tile) {
      tile = tile_of(index);
      slots = slots_of(tile);
    }
    const int in_tile = many ? lane - which * static_cast<int>(grid.lines.divisor) : s.line + (g.sum_cols ? 0 : lane);
    const Line line = locate(tile, slots, in_tile);
    int n = tile.n, next_n = -1;
    TileTests tests = kSkipTile;
    Work w{};
    SeqInfo seq{};
    if (line.b >= 0) {
      w = spans(line.b);
      seq = make_seq_info(p.problem, m, w, line.b);
      const ScoreMod score_mod{p.problem, m, seq, line.h};
      bool inside = line.m * kBlockM < w.q.length;
      if (g.sum_cols && inside) {
        const BlockRange range = score_mod.template kv_blocks<kBlockM, kBlockN>(line.m);
        const int first = s.n < 0 ? range.begin : s.n;
        n = first + lane;
        if (first + 32 < range.end) next_n = first + 32;
        inside = n < range.end;
      }
      if (inside && n * kBlockN < w.k.length) tests = score_mod.template classify<kBlockM, kBlockN>(line.m, n);
    }
    const uint32_t listed = __ballot_sync(ptx::kFullWarp, tests != kSkipTile);
    if (tests != kSkipTile) {
      fill((*this)[s.found + __popc(listed & ((1u << lane) - 1))], tile, w, seq, line, n, tests);
    }
    // Tiles that this completes, and of those the ones without a step, by their first lanes.
    const int next_line = s.line + (next_n >= 0 ? 0 : g.sum_cols ? 1 : 32);
    const bool complete = many || next_line >= slots.lines;
    const uint32_t mine = many ? ScoreMod::low_bits(grid.lines.divisor) << (in_tile == 0 ? lane : 0) : ~0u;
    const bool empty = (many || s.empty) && (listed & mine) == 0;
    uint32_t to_clear = __ballot_sync(ptx::kFullWarp, has_tile && complete && empty && (many ? in_tile : lane) == 0);
#pragma unroll 1
    for (; to_clear != 0; to_clear &= to_clear - 1) {
      clear_tile(tile_of(__shfl_sync(ptx::kFullWarp, index, __ffs(to_clear) - 1)), lane);
    }
    __syncwarp();
    if (lane == 0) {
      s.found += __popc(listed);
      s.empty = complete || empty;
      s.n = next_n;
      s.line = complete ? 0 : next_line;
      if (complete) s.index += grid.together * gridDim.x;
    }
    __syncwarp();
  }

  __device__ void fill(BiasStep& step, const BiasTile& tile, const Work& w, const SeqInfo& seq, const Line& line, int n,
                       TileTests tests) const {
    const int row0 = line.m * kBlockM, col0 = n * kBlockN;
    const int h_k = static_cast<int>(divide(static_cast<uint32_t>(line.h), grid.shared));
    step.tile = tile;
    step.tests = tests;
    step.h = line.h;
    step.row0 = row0;
    step.col0 = col0;
    step.rows = w.q.length - row0;
    step.keys = w.k.length - col0;
    step.whole = grid.whole && step.rows >= kBlockM && step.keys >= kBlockN;
    step.seq = seq;
    step.q = row_pointer(p.q, w.b, w.q.start + row0, line.h);
    step.dout = row_pointer(p.dout, w.b, w.q.start + row0, line.h);
    step.k = row_pointer(p.k, w.b, w.k.start + col0, h_k);
    step.v = row_pointer(p.v, w.b, w.k.start + col0, h_k);
    step.stats = reinterpret_cast<const float2*>(p.row_stats) + row_stat_offset(p.problem, w, line.h) + row0;
  }

  // Zeros for a tile that nothing is summed into.
  __device__ void clear_tile(const BiasTile& tile, int lane) const {
    const int row0 = tile.m * kBlockM, col0 = tile.n * kBlockN, size = g.is_float ? 4 : 2;
    const int rows = min(kBlockM, g.rows - row0), bytes = min(kBlockN, g.cols - col0) * size;
    const int64_t pitch = static_cast<int64_t>(g.cols) * size;
    const int64_t head = (static_cast<int64_t>(tile.split) * g.batch + tile.b) * g.heads + tile.h;
    char* out = static_cast<char*>(g.out) + (head * g.rows + row0) * pitch + static_cast<int64_t>(col0) * size;
    constexpr int kRowBytes = 2 * kBlockN, kRowStep = 512 / kRowBytes;
    if (bytes == kRowBytes && ((reinterpret_cast<uintptr_t>(out) | pitch) & 15) == 0) {
      char* at = out + lane * 16 / kRowBytes * pitch + lane * 16 % kRowBytes;
#pragma unroll 4
      for (int r = lane * 16 / kRowBytes; r < rows; r += kRowStep) {
        *reinterpret_cast<uint4*>(at) = make_uint4(0, 0, 0, 0);
        at += kRowStep * pitch;
      }
      return;
    }
#pragma unroll 1
    for (int r = 0; r < rows; ++r) {
      for (int at = lane * 2; at < bytes; at += 64) *reinterpret_cast<uint16_t*>(out + r * pitch + at) = 0;
    }
  }

  // One lane.
  __device__ void begin() const { s = {blockIdx.x, true, 0, -1, 0}; }

  // Sees to it that steps [0, wanted) are known, or that there are no more; all lanes of one warp. Up to 31 more may be
  // found, which take the places of those that lie kSteps behind.
  __device__ void find(uint32_t wanted, int lane) const {
    if (s.found >= wanted || s.index >= grid.tiles) return;
    do {
      look(lane);
    } while (s.found < wanted && s.index < grid.tiles);
    if (s.index >= grid.tiles && lane < 2) (*this)[s.found + lane].tests = kSkipTile;  // two, as loads look two ahead
    __syncwarp();
  }
};

}  // namespace flash_ext::sm80
