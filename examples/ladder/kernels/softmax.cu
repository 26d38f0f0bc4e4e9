#include "softmax.cuh"

#include "launch.cuh"

namespace flash_ext::ladder {
namespace {

template <Passes kPasses>
const char* run(const float* x, float* out, int64_t rows, int64_t length, void* stream) {
  constexpr int kMeeting = kSoftmaxThreads / 32 * sizeof(Stats), kMostSmem = 232448;
  const int64_t kept = kPasses == Passes::kOnChip ? length * 4 : 0;
  if (kept + kMeeting > kMostSmem) return "a row is larger than shared memory";
  return launch(softmax_kernel<kPasses>, static_cast<unsigned>(rows), kSoftmaxThreads,
                static_cast<int>(kept) + kMeeting, stream, reinterpret_cast<const float4*>(x),
                reinterpret_cast<float4*>(out), length / 4);
}

}  // namespace
}  // namespace flash_ext::ladder

// x, out: (rows, length) fp32, contiguous; length is a multiple of 4.
LADDER_API const char* ladder_softmax(const float* x, float* out, int64_t rows, int64_t length, int passes,
                                      void* stream) {
  using namespace flash_ext::ladder;
  if (length <= 0 || length % 4 != 0) return "the length of a row must be a multiple of 4";
  switch (static_cast<Passes>(passes)) {
    case Passes::kThree: return run<Passes::kThree>(x, out, rows, length, stream);
    case Passes::kTwo: return run<Passes::kTwo>(x, out, rows, length, stream);
    case Passes::kBlocks: return run<Passes::kBlocks>(x, out, rows, length, stream);
    case Passes::kOnChip: return run<Passes::kOnChip>(x, out, rows, length, stream);
  }
  return "no such kind of softmax";
}
