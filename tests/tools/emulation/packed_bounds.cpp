// What common/seqlen.cuh makes of cu_seqlens, run on a CPU.
//
// Reads cases from standard input: batch, rows of queries, rows of keys, then batch + 1 bounds of each. For every case it
// prints the bounds of both sides, or what is wrong: a row that not exactly one tile has, or a tile outside the rows.
#include "ptx/cuda_shim.h"

#include <cstdio>
#include <vector>

#include "common/seqlen.cuh"

namespace flash_ext {

// Which tiles of kBlock rows a grid of all slots finds, with `scale` rows for each.
template <int kBlock>
bool covers(const std::vector<int32_t>& cu, int64_t total, const std::vector<int32_t>& others, int64_t total_others,
            int batch, int scale) {
  std::vector<int> found(total * scale, 0);
  const int64_t slots = packed_slots(total * scale, batch, kBlock);
  for (int slot = 0; slot < slots; ++slot) {
    const TileSlot any = find_slot<kBlock, true>(cu.data(), total, others.data(), total_others, batch, slot, scale);
    const TileSlot t = find_slot<kBlock>(cu.data(), total, others.data(), total_others, batch, slot, scale);
    const Span mine = packed_span(cu.data(), batch, t.b, total);
    const Span other = t.outside ? Span{0, 0} : packed_span(others.data(), batch, t.b, total_others);
    const Span any_other = t.outside ? Span{0, 0} : any_span(others.data(), t.b, total_others);
    if (any.b != t.b || any.block != t.block || any.rows.start != t.rows.start) return false;
    if (any.others.start != any_other.start || any.others.length != any_other.length) return false;
    if (t.outside != (t.b < 0 || t.b == batch)) return false;
    if (mine.start != t.rows.start || mine.length != t.rows.length) return false;
    if (other.start != t.others.start || other.length != t.others.length) return false;
    if (t.rows.start < 0 || t.rows.length < 0 || t.rows.start + t.rows.length > total) return false;
    if (t.others.start < 0 || t.others.length < 0 || t.others.start + t.others.length > total_others) return false;
    const int64_t length = int64_t{t.rows.length} * scale;
    for (int64_t row = int64_t{t.block} * kBlock; row < std::min(length, int64_t{t.block + 1} * kBlock); ++row) {
      ++found[t.rows.start * scale + row];
    }
  }
  for (const int count : found) {
    if (count != 1) return false;
  }
  return true;
}

void print_bounds(const std::vector<int32_t>& cu, int64_t total, int batch) {
  for (int b = 0; b <= batch; ++b) std::printf("%d ", static_cast<int>(packed_span(cu.data(), batch, b, total).start));
}

}  // namespace flash_ext

int main() {
  using namespace flash_ext;
  int batch;
  long long total_q, total_k;
  while (std::scanf("%d %lld %lld", &batch, &total_q, &total_k) == 3) {
    std::vector<int32_t> cu_q(batch + 1), cu_k(batch + 1);
    for (auto* cu : {&cu_q, &cu_k}) {
      for (int32_t& x : *cu) {
        if (std::scanf("%d", &x) != 1) return 2;
      }
    }
    const bool good =
        covers<16>(cu_q, total_q, cu_k, total_k, batch, 1) && covers<64>(cu_k, total_k, cu_q, total_q, batch, 1) &&
        covers<192>(cu_q, total_q, cu_k, total_k, batch, 1) && covers<64>(cu_q, total_q, cu_k, total_k, batch, 3);
    if (!good) std::printf("wrong: ");
    print_bounds(cu_q, total_q, batch);
    std::printf("| ");
    print_bounds(cu_k, total_k, batch);
    std::printf("\n");
  }
  return 0;
}
