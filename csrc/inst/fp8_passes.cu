#include <algorithm>

#include "../launch.h"
#include "../passes/fp8_passes.cuh"

namespace flash_ext {
namespace {

// Which of q, k and v a launch works on, one after the other.
struct Ctas {
  int64_t count = 0;
  int64_t add(int64_t n) {
    const int64_t first = count;
    count += n;
    return first;
  }
};

template <typename F>
std::string with_lanes(int columns, const F& f) {
  switch (lanes_of_row(columns)) {
    case 8: return f.template operator()<8>();
    case 16: return f.template operator()<16>();
    default: return f.template operator()<32>();
  }
}

struct Shape {
  int64_t batch, rows_q, rows_k;
  explicit Shape(const Problem& p)
      : batch(p.is_varlen() ? 1 : p.batch),
        rows_q(p.is_varlen() ? p.total_q : p.seqlen_q),
        rows_k(p.is_varlen() ? p.total_k : p.seqlen_k) {}
};

StatsPass stats_pass(const QuantizeFp8& x) {
  const Problem& p = x.problem;
  const Shape shape(p);
  StatsPass s{};
  s.batch = p.batch;
  s.rotary[0] = x.rotary[0], s.rotary[1] = x.rotary[1];
  float* partials = x.partials;
  const auto put = [&](int i, bool wanted, const StridedView& view, int heads, int columns, int64_t rows,
                       const int32_t* bounds, const int32_t* used) {
    TensorPass& t = s.of[i];
    t.x = view, t.columns = columns, t.rows = rows, t.partials = partials;
    if (i < 2) t.most = kSmallMax;
    t.heads = wanted ? heads : 0;
    s.parts[i] = static_cast<int>(stat_parts(rows));
    s.bounds[i] = bounds, s.used[i] = used;
    partials += shape.batch * t.heads * s.parts[i] * ChannelStats::kCount * columns;
  };
  put(0, x.needs_q(), x.q, p.num_heads, p.head_dim, shape.rows_q, p.cu_seqlens_q, nullptr);
  put(1, x.needs_k(), x.k, p.num_heads_k, p.head_dim, shape.rows_k, p.cu_seqlens_k, x.seqused_k);
  put(2, true, x.v, p.num_heads_k, p.head_dim_v, shape.rows_k, p.cu_seqlens_k, x.seqused_k);
  return s;
}

std::string run_stats(const QuantizeFp8& x) {
  const Shape shape(x.problem);
  MeansPass m{};
  m.stats = stats_pass(x);
  StatsPass s = m.stats;
  Ctas of_stats, of_means;
  for (int i = 0; i < 3; ++i) {
    s.of[i].first = of_stats.add(shape.batch * s.of[i].heads * s.parts[i]);
    m.stats.of[i].first = of_means.add(shape.batch * s.of[i].heads);
  }
  m.offset[1] = x.k_offset, m.offset[2] = x.v_offset;
  m.channel_factor = x.v_factor;
  m.loss = RoundingLoss::behind_statistics(x.partials, x.problem);
  if (!x.by_block) m.head_factor[0] = x.q_factor, m.head_factor[1] = x.k_factor;
  const std::string error = dispatch_dtype(x.problem.dtype, [&]<typename E>() {
    return launch("fp8_stats", fp8_stats_kernel<E>, of_stats.count, kQuantizeThreads, 0, x.stream, s);
  });
  if (!error.empty()) return error;
  return launch("fp8_means", fp8_means_kernel, of_means.count, kMeansThreads, 0, x.stream, m);
}

std::string run_numbers(const QuantizeFp8& x) {
  const Problem& p = x.problem;
  const Shape shape(p);
  const bool packed = p.is_varlen();
  NumbersPass n;
  n.p = p;
  n.by_block = x.by_block, n.hadamard = x.hadamard;
  Ctas ctas;
  const auto tiles = [&](int64_t total, int64_t rows) {
    return static_cast<int>(packed ? packed_slots(total, p.batch, kFp8Block) : factor_blocks(rows, p.batch, false));
  };
  const auto put = [&](RowsPass& r, const StridedView& view, uint8_t* to, float* factor, int heads, int64_t total,
                       int64_t rows, const RotaryRows& rotary) {
    r.rotary = rotary;
    r.t.x = view, r.t.heads = heads, r.t.columns = p.head_dim, r.t.rows = rows;
    r.t.most = kSmallMax;
    r.to = to, r.factor = factor, r.offset = x.k_offset;
    r.blocks = factor_blocks(packed ? total : rows, p.batch, packed);
    r.tiles = tiles(total, rows);
    r.t.first = ctas.add(to == nullptr ? 0 : shape.batch * heads * r.tiles);
  };
  put(n.rows[0], x.q, x.q8, x.q_factor, p.num_heads, p.total_q, shape.rows_q, x.rotary[0]);
  n.rows[0].row_offset = x.row_offset, n.rows[0].group = p.num_heads / p.num_heads_k;
  put(n.rows[1], x.k, x.k8, x.k_factor, p.num_heads_k, p.total_k, shape.rows_k, x.rotary[1]);
  n.v.x = x.v, n.v.heads = p.num_heads_k, n.v.columns = p.head_dim_v, n.v.rows = shape.rows_k;
  n.v8 = x.v8, n.v_factor = x.v_factor, n.v_offset = x.v_offset;
  n.v_columns = transposed_columns(shape.rows_k, p.batch, packed);
  n.v_tiles = static_cast<int>(RoundingLoss::tiles(p));
  n.loss = RoundingLoss::behind_statistics(x.partials, p);
  n.used = x.seqused_k;
  n.v.first = ctas.add(shape.batch * p.num_heads_k * n.v_tiles);
  const bool is_plain = !x.hadamard && x.rotary[0].cos == nullptr && x.rotary[1].cos == nullptr;
  return dispatch_dtype(p.dtype, [&]<typename E>() {
    return with_lanes(std::max(p.head_dim, p.head_dim_v), [&]<int kLanes>() {
      const auto kernel = is_plain ? fp8_numbers_kernel<true, E, kLanes> : fp8_numbers_kernel<false, E, kLanes>;
      return launch("fp8_numbers", kernel, ctas.count, kNumbersThreads<kLanes>,
                    std::max(p.head_dim_v * kFp8Block, kSumsBytes<kLanes>), x.stream, n);
    });
  });
}

}  // namespace

std::string quantize_fp8(const QuantizeFp8& x) {
  const std::string error = run_stats(x);
  return error.empty() ? run_numbers(x) : error;
}

}  // namespace flash_ext
