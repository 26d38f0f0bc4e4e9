// What the roles of the fp8 forward share: traits and arguments.
#pragma once

#include "../../ptx/sm90_fp8.cuh"
#include "../fwd/config.cuh"
#include "tiles.h"

namespace flash_ext::sm90 {

struct Fp8Args : FwdArgs {
  Fp8Operands x;
};

template <typename T>
struct Fp8Numbers;  // numbers.cuh
template <typename T>
struct Fp8HalfNumbers;  // half_numbers.cuh

// As FwdTraits. E: of out, and in mixed mode of q and k.
template <typename E, int D, int Dv, Operands kOperands>
struct Fp8Traits {
  using Element = E;
  using Numbers =
      std::conditional_t<kOperands == Operands::kSmallFp8, Fp8HalfNumbers<Fp8Traits>, Fp8Numbers<Fp8Traits>>;
  using Tile = WorkTile;
  using Args = Fp8Args;
  static constexpr bool kMixed = kOperands == Operands::kMixed, kNamesSequences = true, kParts = false, kPacked = false,
                        kModified = false, kUnits = false;
  static constexpr int kHeadDim = D, kHeadDimV = Dv;
  static constexpr Fp8Tile kTile = fp8_tile(D, Dv, kOperands);
  static constexpr int kBlockN = kTile.block_n, kConsumers = kTile.consumers, kBlockM = kTile.plain().block_m();
  static constexpr int kKeys = kBlockN, kNarrow = kBlockN;
  static constexpr int kKvStages = kTile.kv_stages, kQStages = kTile.q_stages, kThreads = kTile.plain().threads();
  static constexpr int kChunkColumns = kMixed ? 64 : 128, kChunks = fp8_chunks_of(D, kMixed);
  static constexpr int kChunksV = chunks_of(Dv), kStagingChunks = kTile.staging_chunks(Dv);
  static constexpr bool kSharedTotal = kTile.shared_total;
  static constexpr int kConsumerRegs = kConsumers == 2 ? 232 : 160;
  static constexpr int kProducerRegs = ptx::kRegisterBudget<kConsumers + 1> - kConsumers * kConsumerRegs;
  static constexpr int kVBytes = Dv * kBlockN;
  static constexpr int kStageBytes = kTile.stage_bytes(D, Dv, kMixed), kQBytes = kTile.q_bytes(D, kMixed);
  static constexpr int kQAt = kKvStages * kStageBytes, kStagingAt = kQAt + kQStages * kQBytes;
  static constexpr int kWorkAt = kStagingAt + kTile.staging_bytes(Dv);
  static constexpr int kSmemBytes = kTile.smem_bytes(D, Dv, kMixed);
  static constexpr int kWorkStages = 4;
  static constexpr int kBarriersAt = kWorkAt + kWorkStages * static_cast<int>(sizeof(WorkTile));
  static_assert(kBarriersAt + 8 * (2 * kKvStages + 2 * kQStages + kWorkStages + 1) <= kSmemBytes);
  static_assert(kStageBytes % 1024 == 0 && kQBytes % 1024 == 0, "swizzled tiles start on 1024 bytes");
};

// The factors of a head's blocks of rows in one sequence. `start`: its first packed row, 0 of a dense one.
__device__ __forceinline__ const float* block_factors(const FactorView& x, const Problem& p, int b, int64_t start,
                                                      int h) {
  const int64_t first = p.cu_seqlens_q != nullptr ? start / kFp8Block + b : 0;
  return x.ptr + b * x.batch_stride + h * x.head_stride + first * x.step;
}

}  // namespace flash_ext::sm90
