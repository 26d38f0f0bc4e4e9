#include "flash2.cuh"

#include "launch.cuh"

namespace flash_ext::ladder {
namespace {

template <int D, bool kNormaliseEachStep>
const char* run(Problem p, bool one_cta_per_head, void* stream) {
  using T = Flash2<D, kNormaliseEachStep>;
  p.ctas_per_head = one_cta_per_head ? 1 : (p.seqlen_q + T::kBlockM - 1) / T::kBlockM;
  return launch(flash2_kernel<T>, static_cast<unsigned>(p.heads * p.ctas_per_head), T::kThreads, T::kSmemBytes, stream,
                p);
}

template <int D>
const char* run(const Problem& p, bool one_cta_per_head, bool normalise_each_step, void* stream) {
  return normalise_each_step ? run<D, true>(p, one_cta_per_head, stream) : run<D, false>(p, one_cta_per_head, stream);
}

}  // namespace
}  // namespace flash_ext::ladder

// q, k, v, out: (heads, seqlen, head_dim) bf16, contiguous. lse: (heads, seqlen_q) fp32, or null.
LADDER_API const char* ladder_flash2(const void* q, const void* k, const void* v, void* out, float* lse, int64_t heads,
                                     int seqlen_q, int seqlen_k, int head_dim, float scale, int one_cta_per_head,
                                     int normalise_each_step, void* stream) {
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
                  .lse = lse};
  switch (head_dim) {
    case 64: return run<64>(p, one_cta_per_head, normalise_each_step, stream);
    case 128: return run<128>(p, one_cta_per_head, normalise_each_step, stream);
    default: return "head_dim must be 64 or 128";
  }
}
