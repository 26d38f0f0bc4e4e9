// Keys and values of 8 bits (e4m3 or int8) in the forward for few queries over a cache.
//
// They become fp16, which holds each of them exactly, in the registers that multiply them: shared memory and the way to
// it carry a byte an element. Q becomes fp16 too, each row times a power of two that keeps its largest element in
// range, and so do weights; sums are fp32. Factors of k multiply scores, factors of v the weights or, where a head has
// one, the result.
//
// A 16-bit unit of a tile is two features of a key. Fragments that ldmatrix brings hold other elements than an mma of
// 16 bits wants, so the features of Q and of the result change places:
//   Q K^T: of 16 features, a lane's four bytes are 4 i .. 4 i + 3 (i = lane % 4), in place of 2 i, 2 i + 1, 2 i + 8, 2 i + 9
//   P V:   a lane's bytes of two keys are features 2 n, 2 n + 1 (n = lane / 4), for two products; of 16 features it has 4 i
//          .. 4 i + 3 of the result
#pragma once

#include "../../dtype.cuh"
#include "cached_mod.cuh"

namespace flash_ext::sm80 {

template <typename T>
struct ByteOperands;

template <CacheType kCacheType, int D, int kPackedRows>
struct QuantizedTraits {
  using Element = __half;  // of the products
  using Operands = ByteOperands<QuantizedTraits>;
  static constexpr CacheType kType = kCacheType;
  static constexpr int kHeadDim = D;
  static constexpr SplitTile kTile = quantized_tile(D, kPackedRows);
  static constexpr int kRows = kTile.rows, kKeys = kTile.keys, kStages = kTile.stages, kBlockN = kTile.block_n();
  static constexpr int kRowWarps = kTile.row_warps(), kKeyWarps = kTile.key_warps(), kThreads = SplitTile::kThreads;
  static constexpr int kSharing = 32 * kRowWarps;  // threads of a ring
  static constexpr int kStageBytes = D * kKeys, kRingBytes = kStages * kStageBytes;
  static constexpr int kOutPitch = D + SplitTile::kOutPad;  // floats
  static constexpr int kAhead = D == 256 ? 1 : 2;  // at 256 there are no registers for more
  using Tile = SmemTile<D / 2>;

  // Loaders count K and V in units of 16 bits.
  static constexpr int kLoadedDim = D / 2;
  __device__ static int loaded(int columns) { return columns / 2; }
};

// The factor of a sequence and head; 1 where each slot has its own.
__device__ __forceinline__ float factor_of_head(const CacheFactors& f, const CachedWork& x, int batch) {
  if (f.ptr == nullptr || f.of_slots) return 1.f;
  return f.ptr[min(max(x.w.sequence, 0), batch - 1) * f.batch_stride + x.w.h_k * f.head_stride];
}
// That of key `row` < length.
__device__ __forceinline__ float factor_of_slot(const CacheFactors& f, const CachedWork& x, const KvCache& c, int row) {
  return f.ptr[x.keys.offset(c, f.batch_stride, f.row_stride, row) + x.w.h_k * f.head_stride];
}

// One of the thread's two rows of Q, in place, from E to fp16 times 2^-exponent. Returns what undoes it.
template <typename E, int kSteps>
__device__ __forceinline__ float to_half(uint32_t (&q)[kSteps][4], int half) {
  if constexpr (std::is_same_v<E, __half>) {
    return 1.f;
  } else {
    static_assert(std::is_same_v<E, __nv_bfloat16>, "another element type");
    constexpr uint32_t kLargestInFp16 = 127 + 14;  // exponent of an fp32 number that leaves room above it
    uint32_t largest = 0;  // magnitudes are in order as integers
#pragma unroll
    for (int ks = 0; ks < kSteps; ++ks) {
#pragma unroll
      for (int i = half; i < 4; i += 2) {
        largest = max(largest, max(q[ks][i] & 0x7fff, q[ks][i] >> 16 & 0x7fff));
      }
    }
    largest = max(largest, __shfl_xor_sync(ptx::kFullWarp, largest, 1));
    largest = max(largest, __shfl_xor_sync(ptx::kFullWarp, largest, 2));
    // Zeros, infinities and NaN stay as they are.
    const uint32_t exponent = largest >> 7;
    const bool scales = largest != 0 && exponent != 0xff;
    const int up = scales ? max(static_cast<int>(exponent) - static_cast<int>(kLargestInFp16), -126) : 0;
    const float down = __uint_as_float(static_cast<uint32_t>(127 - up) << 23);
#pragma unroll
    for (int ks = 0; ks < kSteps; ++ks) {
#pragma unroll
      for (int i = half; i < 4; i += 2) {
        const float2 x = ptx::unpack2<E>(q[ks][i]);
        q[ks][i] = ptx::pack2<__half>(x.x * down, x.y * down);
      }
    }
    return __uint_as_float(static_cast<uint32_t>(127 + up) << 23);
  }
}

// Q of 16 rows as fp16; factor: what scores of each are multiplied by.
template <typename T>
__device__ __forceinline__ void load_queries_as_half(uint32_t (&q)[T::kHeadDim / 16][4], float (&factor)[2],
                                                     const FwdParams& p, const SplitGrid& g, const SplitWork& w,
                                                     int warp_row, int lane) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    load_half_of_queries<T, 2>(q, p, g, w, warp_row, half, lane);
    with_dtype(p.problem.dtype, [&]<typename E>() { factor[half] = to_half<E>(q, half); });
  }
}

template <typename T>
struct ByteOperands {
  static constexpr int D = T::kHeadDim, kKeys = T::kKeys;
  static constexpr int kHeld = (kKeys + 31) / 32;  // keys of a tile whose factors a lane looks up
  static constexpr bool kLooksAhead = D < 256;  // while the tile before is used; at 256 there are no registers for that
  const QuantizedCache& factors;  // kernel parameters and shared memory: registers are short
  const KvCache& cache;
  const CachedWork& work;
  uint32_t q[D / 16][4];
  float of_k[kHeld], of_v[kHeld];  // of the lane's keys of a tile
  int exponent = 0;  // outputs are divided by 2^(exponent - 127), which no factor of v so far exceeds twofold; 0: none

  __device__ ByteOperands(const QuantizedCache& f, const KvCache& c, const CachedWork& w)
      : factors(f), cache(c), work(w) {}

  __device__ void begin(const FwdParams& p, const SplitGrid& g, const SplitWork& w, int warp_row, int lane) {
    float of_row[2];
    load_queries_as_half<T>(q, of_row, p, g, w, warp_row, lane);
    const float of_head = factor_of_head(factors.k, work, p.problem.batch);
    if (lane % 4 == 0) own_row_factor(0) = of_row[0] * of_head, own_row_factor(8) = of_row[1] * of_head;
    __syncwarp();
  }

  __device__ void expect(int first) {
    if (kLooksAhead) look_up(first);
  }

  template <int kN, typename First>
  __device__ void score(float (&s)[1][kN][4], uint32_t k_lane, const First& first_of) {
    constexpr int kBlocks = kN / 2;
    float* const own = own_key_factors();
    if (kLooksAhead) share(own), look_up(first_of(1));
    clear(s);
    stream_fragments<D / 32 * kBlocks, T::kAhead>(
        [&](int i, uint32_t (&b)[4]) { ptx::ldmatrix_x4(b, T::Tile::block(k_lane, i % kBlocks * 16, i / kBlocks)); },
        [&](int i, const uint32_t (&b)[4]) {
          const int ks = 2 * (i / kBlocks), nb = 2 * (i % kBlocks);
#pragma unroll
          for (int n = 0; n < 2; ++n) {
#pragma unroll
            for (int j = 0; j < 2; ++j) {
              const uint2 x = ptx::bytes_as_half<T::kType == CacheType::kInt8>(b[2 * n + j]);
              ptx::mma_m16n8k16<__half>(s[0][nb + n], q[ks + j], x.x, x.y);
            }
          }
        });
    if (!kLooksAhead) look_up(first_of(0)), share(own);
    const float of_row[2] = {own_row_factor(0), own_row_factor(8)};
#pragma unroll
    for (int nb = 0; nb < kN; ++nb) {
      const float2 x = factors.k.of_slots ? pair(own, nb) : make_float2(1.f, 1.f);
      s[0][nb][0] *= of_row[0] * x.x, s[0][nb][1] *= of_row[0] * x.y;
      if (!has_upper_rows()) continue;
      s[0][nb][2] *= of_row[1] * x.x, s[0][nb][3] *= of_row[1] * x.y;
    }
  }

  template <int kN>
  __device__ void add(float (&acc_o)[1][D / 8][4], float (&weights)[1][kN][4], uint32_t v_lane) {
    if (factors.v.of_slots) weigh_by_factors(acc_o, weights);
    constexpr int kBlocks = D / 32;
    uint32_t a[4];
    stream_fragments<kN / 2 * kBlocks, T::kAhead>(
        [&](int i, uint32_t (&b)[4]) {
          ptx::ldmatrix_x4_trans(b, T::Tile::block(v_lane, i / kBlocks * 16, i % kBlocks));
        },
        [&](int i, const uint32_t (&b)[4]) {
          const int ks = i / kBlocks, db = 4 * (i % kBlocks);
          if (db == 0) {
            const float (&lo)[4] = weights[0][2 * ks];
            const float (&hi)[4] = weights[0][2 * ks + 1];
            a[0] = ptx::pack2<__half>(lo[0], lo[1]), a[1] = ptx::pack2<__half>(lo[2], lo[3]);
            a[2] = ptx::pack2<__half>(hi[0], hi[1]), a[3] = ptx::pack2<__half>(hi[2], hi[3]);
          }
#pragma unroll
          for (int j = 0; j < 2; ++j) {  // bytes of two keys: both of one feature, then both of the next
            const uint2 x = ptx::bytes_as_half<T::kType == CacheType::kInt8>(__byte_perm(b[2 * j], 0, 0x3120));
            const uint2 y = ptx::bytes_as_half<T::kType == CacheType::kInt8>(__byte_perm(b[2 * j + 1], 0, 0x3120));
            ptx::mma_m16n8k16<__half>(acc_o[0][db + 2 * j], a, x.x, y.x);
            ptx::mma_m16n8k16<__half>(acc_o[0][db + 2 * j + 1], a, x.y, y.y);
          }
        });
  }

  __device__ void leave(const Problem& p, const float (&acc_o)[1][D / 8][4], int half, float* row, int lane) const {
    const float by = !factors.v.of_slots ? factor_of_head(factors.v, work, p.batch)
                     : exponent == 0     ? 1.f
                                         : power_of_two(exponent);
#pragma unroll
    for (int j = 0; j < D / 16; ++j) {
      const float (&x)[4] = acc_o[0][2 * j], (&y)[4] = acc_o[0][2 * j + 1];
      *reinterpret_cast<float4*>(row + 16 * j + lane % 4 * 4) =
          make_float4(x[2 * half] * by, y[2 * half] * by, x[2 * half + 1] * by, y[2 * half + 1] * by);
    }
  }
  template <typename Store>
  __device__ static void with_result_type(const Problem& p, const Store& store) {
    with_dtype(p.dtype, store);
  }

 private:
  // What scores of the thread's row lane / 4 or lane / 4 + 8 are multiplied by.
  __device__ static float& own_row_factor(int row) {
    __shared__ float factors_of_rows[T::kThreads / 2];
    const int thread = ptx::fresh_thread_idx();
    return factors_of_rows[thread / 32 * 16 + thread % 32 / 4 + row];
  }
  __device__ static float power_of_two(int biased) { return __uint_as_float(static_cast<uint32_t>(biased) << 23); }
  // The query heads of one key head and a single new token often fill the first 8 rows alone.
  __device__ bool has_upper_rows() const { return T::kRows > 16 || work.w.rows > 8; }

  __device__ void look_up(int first) {
    const int lane = ptx::fresh_lane();
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      const int row = min(first + 32 * i + lane, work.keys.length - 1);
      if (factors.k.of_slots) of_k[i] = factor_of_slot(factors.k, work, cache, row);
      if (factors.v.of_slots) of_v[i] = factor_of_slot(factors.v, work, cache, row);
    }
  }
  // Those of the tile in use, k before v, for all lanes of the warp.
  __device__ static float* own_key_factors() {
    __shared__ __align__(8) float factors_of_keys[SplitTile::kWarps * 2 * kKeys];
    return factors_of_keys + ptx::fresh_thread_idx() / 32 * 2 * kKeys;
  }
  __device__ void share(float* own) const {
    const int lane = ptx::fresh_lane();
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      const int key = 32 * i + lane;
      if (key >= kKeys) break;
      if (factors.k.of_slots) own[key] = of_k[i];
      if (factors.v.of_slots) own[kKeys + key] = of_v[i];
    }
    __syncwarp();
  }
  // Of a lane's two keys of 8 neighbours.
  __device__ static float2 pair(const float* own, int nb) {
    return *reinterpret_cast<const float2*>(own + 8 * nb + ptx::fresh_lane() % 4 * 2);
  }

  // Weights times factors of v, which fp16 need not hold: outputs are kept divided by a power of two.
  template <int kN>
  __device__ __forceinline__ void weigh_by_factors(float (&acc_o)[1][D / 8][4], float (&weights)[1][kN][4]) {
    const float* const own = own_key_factors() + kKeys;
    uint32_t largest = 0;
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      largest = max(largest, __float_as_uint(own[(32 * i + ptx::fresh_lane()) % kKeys]) & 0x7fffffff);
    }
    // An exponent of 1 at least, and of 253 at most: both powers below are normal numbers.
    const int found = static_cast<int>(min(max(__reduce_max_sync(ptx::kFullWarp, largest) >> 23, 1u), 253u));
    if (found > exponent) {
      const float by = exponent == 0 ? 1.f : power_of_two(max(127 + exponent - found, 0));
      exponent = found;
#pragma unroll
      for (int j = 0; j < D / 8; ++j) scale_block(acc_o[0][j], by, by);
    }
    const float down = power_of_two(254 - exponent);
#pragma unroll
    for (int nb = 0; nb < kN; ++nb) {
      float2 x = pair(own, nb);
      x.x *= down, x.y *= down;
      weights[0][nb][0] *= x.x, weights[0][nb][1] *= x.y;
      if (!has_upper_rows()) continue;
      weights[0][nb][2] *= x.x, weights[0][nb][3] *= x.y;
    }
  }
};

template <typename T, Knows kKnows>
__global__ void __launch_bounds__(T::kThreads, 2)
    fwd_split_quantized_kernel(const __grid_constant__ FwdParams p, const __grid_constant__ SplitGrid g,
                               const __grid_constant__ KvCache cache, const __grid_constant__ KvCacheGrid c,
                               const __grid_constant__ RowRange served, const __grid_constant__ Modifiers m,
                               const __grid_constant__ QuantizedCache quantized) {
  attend_cached_mod<T, kKnows>(p, g, cache, c, served, m,
                               [&](const CachedWork& x) { return ByteOperands<T>(quantized, cache, x); });
}

}  // namespace flash_ext::sm80
