// What the warps of the portable backward over keys do with a query tile: a pair of them, of which the first has P and
// dV and the second dS and dK, or one that has both.
#pragma once

#include "steps.cuh"

namespace flash_ext::sm80 {

// Leaves P to the second warp of the pair.
template <typename T>
__device__ __forceinline__ void hand_over(uint32_t p_slot, const float (&weights)[T::kKeyBlocks][T::kPartM / 8][4]) {
#pragma unroll
  for (int mb = 0; mb < T::kPartM / 8; ++mb) {
#pragma unroll
    for (int kb = 0; kb < T::kKeyBlocks; ++kb) {
      const float (&x)[4] = weights[kb][mb];
      ptx::store_shared(p_slot + (mb * T::kKeyBlocks + kb) * 512, make_float4(x[0], x[1], x[2], x[3]));
    }
  }
}

// dP^T of kPartM queries and this warp's keys, as weights() has P^T.
template <typename T>
__device__ __forceinline__ void multiply_values(float (&acc)[T::kKeyBlocks][T::kPartM / 8][4], uint32_t smem,
                                                uint32_t smem_do, int query0, int key0, int lane) {
  multiply_transposed<typename T::Element, T::kHeadDim, T::kAhead>(
      acc, T::Tile::by_rows(smem + T::kVAt, lane) + key0 * T::Tile::kRowBytes,
      T::Tile::by_cols(smem_do, lane) + query0 * T::Tile::kRowBytes);
}

// sum += acc times kPartM queries of a tile: dV from P^T and dO, dK from dS^T and Q.
template <typename T, bool kPositive = false>
__device__ __forceinline__ void add_product(float (&sum)[T::kKeyBlocks][T::kHeadDim / 8][4],
                                            const float (&acc)[T::kKeyBlocks][T::kPartM / 8][4], uint32_t tile,
                                            int query0, int lane) {
  multiply_accumulate<typename T::Element, T::kHeadDim, T::kAhead, kPositive>(
      sum, acc, T::Tile::by_rows(tile, lane) + query0 * T::Tile::kRowBytes);
}

// A query tile by parts of kPartM queries, one at a time: use(part, its first query).
template <typename T, typename Use>
__device__ __forceinline__ void for_parts(const Use& use) {
#pragma unroll 1
  for (int part = 0; part < T::kParts; ++part) use(part, part * T::kPartM);
}

// S^T, P^T and dV of one query tile: the first warp of a pair.
template <typename T>
__device__ __forceinline__ void step_p(float (&acc_dv)[T::kKeyBlocks][T::kHeadDim / 8][4], const BwdParams& p,
                                       const ModifiersOf<T>& m, const WorkOf<T>& work, uint32_t smem, int stage,
                                       const ListedTile& tile, int key_warp, int lane) {
  const int key0 = key_warp * 16 * T::kKeyBlocks;
  const uint32_t smem_q = smem + T::kQAt + stage * T::kQBytes, smem_do = smem + T::kDoAt + stage * T::kQBytes;
  for_parts<T>([&](int part, int query0) {
    float acc_p[T::kKeyBlocks][T::kPartM / 8][4];
    const uint32_t p_slot = smem + T::kPAt + (key_warp * T::kParts + part) * T::kPBytesOfPart + lane * 16;
    const uint32_t stats = smem + T::kStatsAt + stage * T::kStatsBytes + query0 * 8;
    if constexpr (T::kMods) {
      uint32_t bias = 0;
      if constexpr (T::Stage::kBytes > 0)
        bias = smem + T::kBiasAt + key_warp * T::Stage::kBytes + query0 * T::Stage::kPitch;
      const int row0 = tile.block * T::kBlockM + query0, col0 = work.w.block * T::kBlockN + key0;
      const uint32_t mask = smem + T::kMaskAt + stage * T::kMaskBytes + (query0 * T::kMaskWords + key0 / 32) * 4;
      float slopes[T::kKeyBlocks][T::kPartM / 8][4];  // written and read only with a softcap
      modified_weights<T>(acc_p, slopes, scores_of<T>(p, m, work, tile), smem, smem_q + query0 * T::Tile::kRowBytes,
                          stats, mask, bias, p_slot, tile.tests, row0, col0, key0, work.drop_keys[key_warp], lane);
      // Two loops: as one, every call would pay for both.
      if (m.softcap > 0.f) {
#pragma unroll
        for (int kb = 0; kb < T::kKeyBlocks; ++kb) {
#pragma unroll
          for (int mb = 0; mb < T::kPartM / 8; ++mb) {
            if constexpr (T::kSlopesWait) {
              const float4 slope = ptx::load_shared(p_slot + (mb * T::kKeyBlocks + kb) * 512);
              slopes[kb][mb][0] = slope.x, slopes[kb][mb][1] = slope.y;
              slopes[kb][mb][2] = slope.z, slopes[kb][mb][3] = slope.w;
            }
#pragma unroll
            for (int i = 0; i < 4; ++i) slopes[kb][mb][i] *= acc_p[kb][mb][i];
          }
        }
        hand_over<T>(p_slot, slopes);
      } else {
        hand_over<T>(p_slot, acc_p);
      }
    } else {
      weights<T>(acc_p, p, work.w, smem, smem_q, stats, tile.block, query0, key0, lane);
      hand_over<T>(p_slot, acc_p);
    }
    debug_delay();
    ptx::bar_arrive(ptx::kPairBarrier + key_warp * T::kParts + part, 2 * ptx::kWarpThreads);
    debug_delay();
    add_product<T, T::kMods>(acc_dv, acc_p, smem_do, query0, lane);
  });
}

// dP^T, dS^T and dK of one query tile: the second warp of a pair.
template <typename T>
__device__ __forceinline__ void step_ds(float (&acc_dk)[T::kKeyBlocks][T::kHeadDim / 8][4], const ModifiersOf<T>& m,
                                        uint32_t smem, int stage, int ds_buffer, int key_warp, int lane) {
  const int key0 = key_warp * 16 * T::kKeyBlocks;
  const uint32_t smem_q = smem + T::kQAt + stage * T::kQBytes, smem_do = smem + T::kDoAt + stage * T::kQBytes;
  for_parts<T>([&](int part, int query0) {
    float acc_ds[T::kKeyBlocks][T::kPartM / 8][4];
    multiply_values<T>(acc_ds, smem, smem_do, query0, key0, lane);
    debug_delay();
    ptx::bar_sync(ptx::kPairBarrier + key_warp * T::kParts + part, 2 * ptx::kWarpThreads);
    debug_delay();
    const auto for_each_block = [&](const auto& gradient) {
      const uint32_t p_slot = smem + T::kPAt + (key_warp * T::kParts + part) * T::kPBytesOfPart + lane * 16;
#pragma unroll
      for (int mb = 0; mb < T::kPartM / 8; ++mb) {
        const float4 s = load_stats(smem + T::kStatsAt + stage * T::kStatsBytes + query0 * 8, mb, lane);
#pragma unroll
        for (int kb = 0; kb < T::kKeyBlocks; ++kb) {
          gradient(acc_ds[kb][mb], ptx::load_shared(p_slot + (mb * T::kKeyBlocks + kb) * 512), s);
        }
      }
    };
    bool has_dropout = false;
    if constexpr (T::kMods) has_dropout = m.rng != nullptr;
    if (has_dropout) {
      if constexpr (T::kMods) {
        for_each_block(
            [&](float (&dp)[4], float4 weight, float4 s) { dropped_score_gradient(dp, weight, s, m.keep_scale); });
      }
    } else {
      for_each_block([](float (&dp)[4], float4 weight, float4 s) { score_gradient(dp, weight, s); });
    }
    put_score_gradients<T>(smem + T::kDsAt + ds_buffer * T::kDsBytes, acc_ds, key0, query0, lane);
    add_product<T>(acc_dk, acc_ds, smem_q, query0, lane);
  });
}

// Everything of one query tile for one key group: a warp that holds both dK and dV.
template <typename T>
__device__ __forceinline__ void step_both(float (&acc_dv)[T::kKeyBlocks][T::kHeadDim / 8][4],
                                          float (&acc_dk)[T::kKeyBlocks][T::kHeadDim / 8][4], const BwdParams& p,
                                          const Work& w, uint32_t smem, int stage, int ds_buffer, int m_block,
                                          int key_warp, int lane) {
  const int key0 = key_warp * 16 * T::kKeyBlocks;
  const uint32_t smem_q = smem + T::kQAt + stage * T::kQBytes, smem_do = smem + T::kDoAt + stage * T::kQBytes;
  for_parts<T>([&](int, int query0) {
    const uint32_t stats = smem + T::kStatsAt + stage * T::kStatsBytes + query0 * 8;
    float acc_p[T::kKeyBlocks][T::kPartM / 8][4];
    weights<T>(acc_p, p, w, smem, smem_q, stats, m_block, query0, key0, lane);
    add_product<T>(acc_dv, acc_p, smem_do, query0, lane);
    float acc_ds[T::kKeyBlocks][T::kPartM / 8][4];
    multiply_values<T>(acc_ds, smem, smem_do, query0, key0, lane);
#pragma unroll
    for (int mb = 0; mb < T::kPartM / 8; ++mb) {
      const float4 s = load_stats(stats, mb, lane);
#pragma unroll
      for (int kb = 0; kb < T::kKeyBlocks; ++kb) {
        const float (&weight)[4] = acc_p[kb][mb];
        score_gradient(acc_ds[kb][mb], make_float4(weight[0], weight[1], weight[2], weight[3]), s);
      }
    }
    put_score_gradients<T>(smem + T::kDsAt + ds_buffer * T::kDsBytes, acc_ds, key0, query0, lane);
    add_product<T>(acc_dk, acc_ds, smem_q, query0, lane);
  });
}

}  // namespace flash_ext::sm80
