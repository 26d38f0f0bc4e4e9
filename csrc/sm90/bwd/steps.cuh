// What the consumers of the sm90 backward do with one tile: 64 keys (rows) of a warpgroup, 64 queries (columns).
//
// Scores are computed transposed, so that the accumulators of S^T and dS^T are the register operands of dV and dK. A
// thread holds two keys, x[4 j + 2 half + c] is key 8 half and query 8 j + 2 (lane % 4) + c.
#pragma once

#include "config.cuh"

namespace flash_ext::sm90 {

// s = or += A B^T over D columns, tiles of kARows and kBRows rows in shared memory.
template <typename E, int D, int kARows, int kBRows, bool kAccumulate, int kCount>
__device__ __forceinline__ void issue_products(float (&s)[kCount], uint32_t a, uint32_t b) {
  for_steps<0, D / 16>([&](auto step) {
    constexpr int i = decltype(step)::value;
    ptx::wgmma_ss<E, (kAccumulate || i > 0)>(s, a + (i % 4) * 2 + (i / 4) * kARows * 8,
                                             b + (i % 4) * 2 + (i / 4) * kBRows * 8);
  });
}

// A's operands of the first kRsSteps steps of 16 columns, of 64 rows of a tile of kRows in shared memory.
template <int kRsSteps, int kRows = 64>
struct RsOperand {
  static constexpr int kWords = kRsSteps > 0 ? 4 * kRsSteps : 1;
  uint32_t words[kWords];
  __device__ __forceinline__ void load(uint32_t tile, int warp, int lane) {
    const uint32_t row = tile + (warp * 16 + lane % 16) * 128;
#pragma unroll
    for (int i = 0; i < kRsSteps; ++i) {
      uint32_t (&to)[4] = *reinterpret_cast<uint32_t (*)[4]>(words + 4 * i);
      ptx::ldmatrix_x4(to, row + i / 4 * kRows * 128 + (((i % 4 * 2 + lane / 16) ^ (lane % 8)) << 4));
    }
  }
};

// issue_products() with the first operands in registers.
template <typename E, int D, int kBRows, bool kAccumulate, int kRsSteps, int kRows, int kCount>
__device__ __forceinline__ void issue_rs_products(float (&s)[kCount], const RsOperand<kRsSteps, kRows>& rs, uint32_t a,
                                                  uint32_t b) {
  for_steps<0, D / 16>([&](auto step) {
    constexpr int i = decltype(step)::value;
    const uint32_t b_at = b + (i % 4) * 2 + (i / 4) * kBRows * 8;
    if constexpr (i < kRsSteps) {
      const uint32_t* x = rs.words + 4 * i;
      ptx::wgmma_rs_k<E, (kAccumulate || i > 0)>(s, x[0], x[1], x[2], x[3], b_at);
    } else {
      ptx::wgmma_ss<E, (kAccumulate || i > 0)>(s, a + (i % 4) * 2 + (i / 4) * kRows * 8, b_at);
    }
  });
}

// dq = dS K over the keys; dS in chunks of 64 keys, K from some chunk of columns on.
template <typename E, int kKeys = 128, int kCount>
__device__ __forceinline__ void issue_dq(float (&dq)[kCount], uint32_t ds, uint32_t k) {
  for_steps<0, kKeys / 16>([&](auto step) {
    constexpr int i = decltype(step)::value;
    ptx::wgmma_ss_rows<E, (i > 0)>(dq, ds + (i % 4) * 2 + (i / 4) * 64 * 8, k + i * 128);
  });
}

// -lse or -delta of a thread's queries in registers: read before a wait for scores, and once for several blocks of
// keys.
template <int kCount>
struct RegisterStats {
  float2 x[kCount / 4];
  __device__ __forceinline__ void load(const float* stats) {
#pragma unroll
    for (int j = 0; j < kCount / 4; ++j) x[j] = *reinterpret_cast<const float2*>(stats + 8 * j);
  }
};

// dP starts from -delta: the products then give dP - delta.
template <int kCount>
__device__ __forceinline__ void begin_dp(float (&dp)[kCount], const float* minus_delta) {
#pragma unroll
  for (int j = 0; j < kCount / 4; ++j) {
    const float2 x = *reinterpret_cast<const float2*>(minus_delta + 8 * j);
    dp[4 * j] = dp[4 * j + 2] = x.x;
    dp[4 * j + 1] = dp[4 * j + 3] = x.y;
  }
}

// The same afterwards.
template <int kCount>
__device__ __forceinline__ void add_minus_delta(float (&dp)[kCount], const RegisterStats<kCount>& minus_delta) {
#pragma unroll
  for (int j = 0; j < kCount / 4; ++j) {
    const float2 x = minus_delta.x[j];
    dp[4 * j] += x.x;
    dp[4 * j + 1] += x.y;
    dp[4 * j + 2] += x.x;
    dp[4 * j + 3] += x.y;
  }
}

// s = P = 2^(scale s - lse).
template <int kCount>
__device__ __forceinline__ void scores_to_weights(float (&s)[kCount], const RegisterStats<kCount>& minus_lse,
                                                  float scale) {
#pragma unroll
  for (int j = 0; j < kCount / 4; ++j) {
    const float2 x = minus_lse.x[j];
    s[4 * j] = ptx::ex2(fmaf(s[4 * j], scale, x.x));
    s[4 * j + 1] = ptx::ex2(fmaf(s[4 * j + 1], scale, x.y));
    s[4 * j + 2] = ptx::ex2(fmaf(s[4 * j + 2], scale, x.x));
    s[4 * j + 3] = ptx::ex2(fmaf(s[4 * j + 3], scale, x.y));
  }
}

template <int kCount>
__device__ __forceinline__ void scores_to_weights(float (&s)[kCount], const float* minus_lse, float scale) {
  RegisterStats<kCount> held;
  held.load(minus_lse);
  scores_to_weights(s, held, scale);
}

// Weights of pairs that do not see each other become 0. seen_from(8 * half): what rows of that half see of the columns;
// `column` is that of element 0.
template <int kCount, typename SeenFrom>
__device__ __forceinline__ void hide_unseen(float (&s)[kCount], int column, const SeenFrom& seen_from) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const auto seen = seen_from(8 * half);
#pragma unroll
    for (int j = 0; j < kCount / 4; ++j) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        float& x = s[4 * j + 2 * half + c];
        x = seen.contains(column + 8 * j + c) ? x : 0.f;
      }
    }
  }
}

// Where rows are keys. `key` and `query` are those of element 0.
template <int kCount>
__device__ __forceinline__ void hide(float (&s)[kCount], const AttnMod& mod, int key, int query) {
  hide_unseen(s, query, [&](int below) { return mod.visible_queries(key + below); });
}

template <typename E, int kCount>
__device__ __forceinline__ void pack(uint32_t (&words)[kCount], const float (&x)[2 * kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) words[i] = ptx::pack2<E>(x[2 * i], x[2 * i + 1]);
}

// Where a lane's part of dS goes: rows are queries, 64 keys a row, swizzled.
__device__ __forceinline__ uint32_t ds_offset(int warp, int lane) {
  return (lane % 8 + lane / 16 * 8) * 128 + (((2 * warp + lane / 8 % 2) ^ (lane % 8)) << 4);
}

__device__ __forceinline__ void store_ds(uint32_t to, const uint32_t (&words)[16]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    ptx::stmatrix_trans(to + i * 2048, words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3]);
  }
}

// Adds a warp's 16 queries x 2 kCount columns to their place in the fp32 buffer, in the order of the accumulators.
// By way of the warp's own part of shared memory: vector reductions from registers would hold up the shared-memory
// accesses behind them (512 bytes take 16 clocks).
template <bool kStaged, int kCount>
__device__ __forceinline__ void add_dq(float* to, const float (&dq)[kCount], uint32_t staging, int lane) {
  if constexpr (!kStaged) {
#pragma unroll
    for (int i = 0; i < kCount / 4; ++i) {
      const float* x = dq + i / 2 * 8 + i % 2 * 2;
      ptx::red_add_f32x4(to + i * 128 + lane * 4, x[0], x[1], x[4], x[5]);
    }
    return;
  }
  if (lane == 0) ptx::bulk_wait_read();
  __syncwarp();
#pragma unroll
  for (int i = 0; i < kCount / 4; ++i) {
    const float* x = dq + i / 2 * 8 + i % 2 * 2;
    ptx::store_shared(staging + i * 512 + lane * 16, make_float4(x[0], x[1], x[4], x[5]));
  }
  ptx::fence_proxy_async();
  __syncwarp();
  if (lane == 0) {
    ptx::bulk_add_f32(to, staging, kCount * 128);
    ptx::bulk_commit();
  }
}

template <int kCount>
__device__ __forceinline__ float4 four_of(const float (&dq)[kCount], int i) {
  const float* x = dq + i / 2 * 8 + i % 2 * 2;
  return make_float4(x[0], x[1], x[4], x[5]);
}

// The same for a warp that adds in order: leaves it in shared memory, for pass_dq_semaphores() to add.
template <int kCount>
__device__ __forceinline__ void stage_dq(const float (&dq)[kCount], uint32_t staging, int lane) {
#pragma unroll
  for (int i = 0; i < kCount / 4; ++i) ptx::store_shared(staging + i * 512 + lane * 16, four_of(dq, i));
  ptx::fence_proxy_async();
  __syncwarp();
}

// Or adds itself, in its turn; the first one stores.
template <int kCount>
__device__ __forceinline__ void add_dq_in_order(float* to, const float (&dq)[kCount], int lane, bool first) {
  if (first) {
#pragma unroll
    for (int i = 0; i < kCount / 4; ++i) *reinterpret_cast<float4*>(to + i * 128 + lane * 4) = four_of(dq, i);
  } else {
#pragma unroll
    for (int i = 0; i < kCount / 4; ++i) {
      const float4 x = four_of(dq, i);
      ptx::red_add_f32x4(to + i * 128 + lane * 4, x.x, x.y, x.z, x.w);
    }
  }
  __syncwarp();
}

// Stores a warp's 16 rows of a gradient, columns from kFirst on. `row` is this lane's first one in the sequence.
template <typename E, int kFirst = 0, int kCount>
__device__ __forceinline__ void store_rows(const StridedView& view, int b, const Span& span, int h,
                                           const float (&x)[kCount], float scale, int columns, int row, int lane) {
  if (view.is_float) {
    StridedView from_first = view;
    if constexpr (kFirst > 0) from_first.ptr = static_cast<float*>(view.ptr) + kFirst;
    store_float_rows<kCount / 4, true>(from_first, b, span, h, row, columns - kFirst, lane,
                                       [&](int j, int i) { return x[4 * j + i] * scale; });
    return;
  }
  const int q = lane % 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    uint16_t* to = row_pointer(view, b, span.start + row + 8 * half, h);
#pragma unroll
    for (int j = 0; j < kCount / 16; ++j) {
      uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int at = 4 * (4 * j + i) + 2 * half;
        words[i] = ptx::pack2<E>(x[at] * scale, x[at + 1] * scale);
      }
      transpose_quad(words, q);
      const int column = kFirst + 32 * j + 8 * q;
      if (row + 8 * half < span.length && column < columns) {
        *reinterpret_cast<uint4*>(to + column) = make_uint4(words[0], words[1], words[2], words[3]);
      }
    }
  }
}

// The same by way of the warp's own part of shared memory, 64 columns at `staging` and the others kNextChunk bytes
// behind, swizzled: rows then leave as a whole, where registers give segments of 64 bytes.
template <typename E, int kNextChunk, int kCount>
__device__ __forceinline__ void store_rows_staged(const StridedView& view, int b, const Span& span, int h,
                                                  const float (&x)[kCount], float scale, int columns, int warp_row,
                                                  uint32_t staging, int lane) {
  if (view.is_float) return store_rows<E>(view, b, span, h, x, scale, columns, warp_row + lane / 4, lane);
  __syncwarp();
#pragma unroll
  for (int j = 0; j < kCount / 8; ++j) {
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) words[i] = ptx::pack2<E>(x[8 * j + 2 * i] * scale, x[8 * j + 2 * i + 1] * scale);
    const int piece = j % 4 * 2 + lane / 16;
    ptx::stmatrix(staging + j / 4 * kNextChunk + lane % 16 * 128 + ((piece ^ (lane % 8)) << 4), words);
  }
  __syncwarp();
  constexpr int kPieces = kCount / 4;  // of 16 bytes, in a row
  const int odd = lane / kPieces, piece = lane % kPieces;  // two rows at a time
  const int left = odd < 2 && piece * 8 < columns ? span.length - warp_row - odd : 0;
  uint16_t* to = row_pointer(view, b, span.start + warp_row + odd, h) + piece * 8;
  const uint32_t from = staging + piece / 8 * kNextChunk + odd * 128;
#pragma unroll
  for (int i = 0; i < 8; ++i, to += 2 * view.row_stride) {
    if (2 * i >= left) continue;
    *reinterpret_cast<float4*>(to) = ptx::load_shared(from + i * 256 + (((piece ^ (2 * i + odd)) % 8) << 4));
  }
  __syncwarp();
}

// Tiles of queries that matter to `keys` keys from `first` on.
struct KeyReach {
  int seen_begin, seen_end;    // any query sees any of the keys
  int whole_begin, whole_end;  // every query sees all of them; rows outside the sequence have weight 0 anyway
  template <int kBlockM>
  __device__ static KeyReach of(const AttnMod& mod, int first, int keys) {
    const int last = first + keys - 1, last_key = min(last, mod.seqlen_k - 1);
    const int lo = max(0, first - mod.shift() - mod.p.reach_right);
    const int hi = min(mod.seqlen_q - 1, last_key - mod.shift() + mod.p.reach_left);
    KeyReach r;
    const bool any = first < mod.seqlen_k && lo <= hi;
    r.seen_begin = any ? lo / kBlockM : 0;
    r.seen_end = any ? hi / kBlockM + 1 : 0;
    r.whole_begin = (max(0, last - mod.shift() - mod.p.reach_right) + kBlockM - 1) / kBlockM;
    r.whole_end = last < mod.seqlen_k ? max(0, first - mod.shift() + mod.p.reach_left + 1) / kBlockM : 0;
    return r;
  }
  __device__ bool sees(int block) const { return block >= seen_begin && block < seen_end; }
  __device__ bool whole(int block) const { return block >= whole_begin && block < whole_end; }
};

// Independent warpgroups have kBlocks blocks of 64 keys each.
inline constexpr uint32_t kKeyBlockStep = 64 * 128 / 16;  // from one to the next in K and V, for a descriptor
struct KeyBlockTiles {
  uint32_t k, v, q, dout;  // low words of descriptors, K and V of the warpgroup's keys
};

template <int kBlocks, int kCount>
__device__ __forceinline__ void fence_blocks(float (&dk)[kBlocks][kCount], float (&dv)[kBlocks][kCount]) {
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) {
    ptx::warpgroup_fence_operand(dk[b]);
    ptx::warpgroup_fence_operand(dv[b]);
  }
}

// Adds to dK and dV what kM queries give, block by block, because registers do not hold S and dP of two. `form` waits
// for S and dP of a block, leaves P and dS in the words, and stores dS. The last products still run afterwards.
// kFromDelta: the first dP starts from -delta.
template <typename E, int kM, int kRows, bool kFromDelta, int kBlocks, int kCount, typename Form>
__device__ __forceinline__ void take_key_blocks(KeyBlockTiles low, float (&s)[32], float (&dp)[32],
                                                uint32_t (&p_words)[16], uint32_t (&ds_words)[16],
                                                float (&dk)[kBlocks][kCount], float (&dv)[kBlocks][kCount],
                                                const float* minus_delta, const Form& form) {
  constexpr int D = 2 * kCount;
  // Of products over queries, whose columns may come in two chunks.
  constexpr uint32_t kToRows = D > 64 ? (kM * 128 - 16) / 16 << 16 : 0;
  const auto issue_s = [&](int b) {
    ptx::wgmma_fence();
    issue_products<E, D, kRows, kM, false>(s, low.k + b * kKeyBlockStep, low.q);
    ptx::wgmma_commit();
  };
  const auto issue_gradients = [&](int b) {
    ptx::wgmma_fence();
    issue_pv<E>(dv[b], p_words, low.dout + kToRows);
    issue_pv<E>(dk[b], ds_words, low.q + kToRows);
    ptx::wgmma_commit();
  };
  fence_blocks(dk, dv);
  if constexpr (kFromDelta) begin_dp(dp, minus_delta);
  ptx::warpgroup_fence_operand(s);
  ptx::warpgroup_fence_operand(dp);
  issue_s(0);
  issue_products<E, D, kRows, kM, kFromDelta>(dp, low.v, low.dout);
  ptx::wgmma_commit();
  form(0);
  if constexpr (kBlocks == 2) {
    issue_gradients(0);
    ptx::warpgroup_fence_operand(s);
    issue_s(1);
    // The words are free again before dP needs registers: there are not enough for both.
    ptx::wgmma_wait<1>();
    ptx::warpgroup_fence_operand(dk[0]);
    ptx::warpgroup_fence_operand(dv[0]);
    ptx::warpgroup_fence_operand(p_words);
    ptx::warpgroup_fence_operand(ds_words);
    ptx::warpgroup_fence_operand(dp);
    ptx::wgmma_fence();
    issue_products<E, D, kRows, kM, false>(dp, low.v + kKeyBlockStep, low.dout);
    ptx::wgmma_commit();
    form(1);
  }
  ptx::fence_proxy_async();
  issue_gradients(kBlocks - 1);
}

}  // namespace flash_ext::sm90
