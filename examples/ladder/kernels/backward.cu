#include "backward.cuh"

#include "flash1_backward.cuh"
#include "flash2_backward.cuh"
#include "launch.cuh"

namespace flash_ext::ladder {
namespace {

unsigned pass_grid(const BackwardProblem& p) {
  return static_cast<unsigned>((p.heads * p.seqlen_q + kPassRows - 1) / kPassRows);
}

template <typename T>
const char* run_flash1(const BackwardProblem& p, void* stream) {
  return launch(flash1_backward_kernel<T>, static_cast<unsigned>(p.heads), T::kThreads, T::kSmemBytes, stream, p);
}

template <typename T>
const char* run_flash2(const BackwardProblem& p, void* stream) {
  const size_t bytes = sizeof(float) * p.heads * p.seqlen_q * T::D;
  const cudaError_t error = cudaMemsetAsync(p.acc, 0, bytes, static_cast<cudaStream_t>(stream));
  if (error != cudaSuccess) return cudaGetErrorString(error);
  const int64_t key_blocks = (p.seqlen_k + T::kBlockN - 1) / T::kBlockN;
  const char* refusal = launch(flash2_backward_kernel<T>, static_cast<unsigned>(p.heads * key_blocks), T::kThreads,
                               T::kSmemBytes, stream, p);
  if (refusal == nullptr) refusal = launch(round_kernel<T::D>, pass_grid(p), kPassThreads, 0, stream, p);
  return refusal;
}

template <int D>
const char* run(const BackwardProblem& p, int version, void* stream) {
  if (version != 1 && version != 2) return "version must be 1 or 2";
  const char* refusal = launch(stats_kernel<D>, pass_grid(p), kPassThreads, 0, stream, p);
  if (refusal != nullptr) return refusal;
  return version == 1 ? run_flash1<Flash1BackwardOf<D>>(p, stream) : run_flash2<Flash2BackwardOf<D>>(p, stream);
}

}  // namespace
}  // namespace flash_ext::ladder

// q, k, v, out, dout and the gradients: (heads, seqlen, head_dim) bf16; lse: (heads, seqlen_q) fp32. stats, of
// (2, heads, seqlen_q), and acc, of the shape of q, are fp32 with any content. All are contiguous. version: of
// FlashAttention.
LADDER_API const char* ladder_backward(const void* q, const void* k, const void* v, const void* out, const float* lse,
                                       const void* dout, void* dq, void* dk, void* dv, float* stats, float* acc,
                                       int64_t heads, int seqlen_q, int seqlen_k, int head_dim, float scale,
                                       int version, void* stream) {
  using namespace flash_ext::ladder;
  if (seqlen_q <= 0 || seqlen_k <= 0 || heads <= 0 || !(scale > 0)) return "lengths, heads and scale must be positive";
  const BackwardProblem p{.q = static_cast<const uint16_t*>(q),
                          .k = static_cast<const uint16_t*>(k),
                          .v = static_cast<const uint16_t*>(v),
                          .out = static_cast<const uint16_t*>(out),
                          .lse = lse,
                          .dout = static_cast<const uint16_t*>(dout),
                          .dq = static_cast<uint16_t*>(dq),
                          .dk = static_cast<uint16_t*>(dk),
                          .dv = static_cast<uint16_t*>(dv),
                          .stats = stats,
                          .acc = acc,
                          .heads = heads,
                          .seqlen_q = seqlen_q,
                          .seqlen_k = seqlen_k,
                          .scale = scale};
  switch (head_dim) {
    case 64: return run<64>(p, version, stream);
    case 128: return run<128>(p, version, stream);
    default: return "head_dim must be 64 or 128";
  }
}
