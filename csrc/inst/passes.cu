#include "../gqa_splits.h"
#include "../launch.h"
#include "../passes/bias_rows.cuh"
#include "../passes/head_sums.cuh"
#include "../passes/mask_passes.cuh"
#include "../paths.h"

namespace flash_ext {
namespace {

int64_t ctas(int64_t threads) { return (threads + kMaskThreads - 1) / kMaskThreads; }

}  // namespace

std::string pack_mask(const BoolView& x, uint32_t* words, int num_words, bool fill, void* stream) {
  const int64_t rows = int64_t{1} * x.sizes[0] * x.sizes[1] * x.sizes[2];
  return launch("pack_mask", pack_mask_kernel, ctas(rows * ((num_words + 31) / 32) * 32), kMaskThreads, 0, stream, x,
                words, num_words, fill);
}

std::string group_mask(uint32_t* words, int64_t heads, int rows, int num_words, bool fill, void* stream) {
  const int64_t groups = (rows + Modifiers::kMaskGroup - 1) / Modifiers::kMaskGroup;
  return launch("group_mask", group_mask_kernel, ctas(heads * groups * ((num_words + 3) / 4) * 32), kMaskThreads, 0,
                stream, words, heads, rows, num_words, fill);
}

std::string pack_blocks(const BoolView& x, uint32_t* words, int granule_rows, int num_words, int rows_per_block,
                        int cols_per_block, void* stream) {
  const PackedBlocks to(x, granule_rows, num_words, rows_per_block, cols_per_block);
  return launch("pack_blocks", pack_blocks_kernel, to.ctas, kMaskThreads, 0, stream, x, words, to);
}

std::string group_document_ids(const int32_t* ids, int32_t* groups, int64_t rows, int64_t length, void* stream) {
  const int64_t count = rows * ((length + DocumentIds::kGroup - 1) / DocumentIds::kGroup);
  return launch("group_document_ids", group_document_ids_kernel, ctas(count), kMaskThreads, 0, stream, ids, groups,
                rows, length);
}

std::string group_intervals(const int32_t* bounds, int32_t* groups, int64_t rows, int64_t length, int count,
                            void* stream) {
  const int64_t threads = rows * ((length + DocumentIds::kGroup - 1) / DocumentIds::kGroup) * count;
  return launch("group_intervals", group_intervals_kernel, ctas(threads), kMaskThreads, 0, stream, bounds, groups, rows,
                length, count);
}

std::string align_bias_rows(const BiasRows& x, void* stream) {
  const int64_t pieces = x.pieces(), threads = x.threads();
  if (threads > INT32_MAX) {
    // Halves of the first dimension that has some: a row alone is never that long.
    const int dim = x.sizes[0] > 1 ? 0 : x.sizes[1] > 1 ? 1 : 2;
    BiasRows low = x, high = x;
    low.sizes[dim] = x.sizes[dim] / 2;
    high.sizes[dim] -= low.sizes[dim];
    const auto moved = [](const void* from, int64_t bytes) { return static_cast<const char*>(from) + bytes; };
    high.from = moved(x.from, low.sizes[dim] * x.strides[dim] * x.element_bytes);
    high.to = const_cast<char*>(moved(x.to, threads / x.sizes[dim] * low.sizes[dim] * BiasRows::kPieceBytes));
    const std::string error = align_bias_rows(low, stream);
    return error.empty() ? align_bias_rows(high, stream) : error;
  }
  const auto divisor = [](int64_t n) { return Divisor(static_cast<uint32_t>(n)); };
  const BiasRowsGrid g{divisor(pieces), divisor(x.sizes[2]), divisor(x.sizes[1]), static_cast<uint32_t>(threads),
                       x.end()};
  const auto kernel = x.element_bytes == 2 ? align_bias_rows_kernel<uint16_t> : align_bias_rows_kernel<uint32_t>;
  return launch("align_bias_rows", kernel, x.ctas(), BiasRows::kThreads, 0, stream, x, g);
}

std::string sum_heads(const Launch& l, const Problem& p, int heads, int num_parts, const PartsOfGradients& parts,
                      const StridedView& dk, const StridedView& dv, void* stream) {
  const auto gradient = [&](const float* from, const StridedView& to, int columns) {
    const bool in_fours = columns % 4 == 0 && to.row_stride % 4 == 0 && to.batch_stride % 4 == 0 &&
                          (heads == 1 || to.head_stride % 4 == 0) && reinterpret_cast<uintptr_t>(to.ptr) % 16 == 0;
    return HeadSums::Gradient{from, to, columns, in_fours};
  };
  HeadSums s;
  s.dk = gradient(parts.dk, dk, p.head_dim);
  s.dv = gradient(parts.dv, dv, p.head_dim_v);
  s.num_parts = num_parts;
  s.heads = heads;
  s.rows = p.is_varlen() ? p.total_k : p.seqlen_k;
  s.all_rows = p.total_k * heads;
  return dispatch_dtype(
      p.dtype, [&]<typename E>() { return launch_planned(l, sum_heads_kernel<E>, kHeadSumThreads, 0, stream, s); });
}

}  // namespace flash_ext
