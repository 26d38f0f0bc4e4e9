#include "flash1.cuh"

#include "launch.cuh"

namespace flash_ext::ladder {
namespace {

template <typename T>
const char* run(const Problem& p, void* stream) {
  return launch(flash1_kernel<T>, static_cast<unsigned>(p.heads), T::kThreads, T::kSmemBytes, stream, p);
}

}  // namespace
}  // namespace flash_ext::ladder

// q, k, v, out: (heads, seqlen, head_dim) bf16; acc: the shape of out, fp32; row_max, row_sum: (heads, seqlen_q) fp32; all
// contiguous, the last three with any content. block_m queries meet block_n keys; examples/ladder/native.py lists the sizes.
LADDER_API const char* ladder_flash1(const void* q, const void* k, const void* v, void* out, float* acc, float* row_max,
                                     float* row_sum, int64_t heads, int seqlen_q, int seqlen_k, int head_dim,
                                     float scale, int block_m, int block_n, void* stream) {
  using namespace flash_ext::ladder;
  if (seqlen_q <= 0 || seqlen_k <= 0 || heads <= 0 || !(scale > 0)) return "lengths, heads and scale must be positive";
  const Problem p{.q = static_cast<const uint16_t*>(q),
                  .k = static_cast<const uint16_t*>(k),
                  .v = static_cast<const uint16_t*>(v),
                  .out = static_cast<uint16_t*>(out),
                  .heads = heads,
                  .seqlen_q = seqlen_q,
                  .seqlen_k = seqlen_k,
                  .scale = scale,
                  .acc = acc,
                  .row_max = row_max,
                  .row_sum = row_sum};
  const auto is = [&](int d, int m, int n) { return head_dim == d && block_m == m && block_n == n; };
  if (is(64, 32, 256)) return run<Flash1<64, 32, 256, 8, 64>>(p, stream);
  if (is(64, 64, 256)) return run<Flash1<64, 64, 256, 8, 32>>(p, stream);
  if (is(64, 32, 128)) return run<Flash1<64, 32, 128, 4, 64>>(p, stream);
  if (is(128, 32, 256)) return run<Flash1<128, 32, 256, 8, 64>>(p, stream);
  if (is(128, 32, 128)) return run<Flash1<128, 32, 128, 4, 64>>(p, stream);
  if (is(128, 16, 128)) return run<Flash1<128, 16, 128, 4, 128>>(p, stream);
  return "no kernel of these sizes";
}
