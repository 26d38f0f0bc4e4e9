// What modifiers do to scores in both kernels of the sm90 split backward: from raw products to P, and to the factor
// between dP - delta and dS.
#pragma once

#include "../bwd_mod/scores.cuh"

namespace flash_ext::sm90 {

// A warp's part of a bias, keys along the rows of the accumulators (kT) or queries, on its way from global memory:
// there is no place for tiles of it. It is asked for before the scores are there; with one trip to memory after the
// other it took five times as long as all else. That is what ends of a bias and strange strides get where queries are
// the rows, because addresses and predicates of all elements do not fit the registers there.
template <typename E, bool kT, int kCount>
class ReadBias {
 public:
  // Of the rows of accumulators from 8 half on. Writes all its registers, which would else be kept from step to step.
  template <int half>
  __device__ __forceinline__ void ask(const ScoreMod& score_mod, int row0, int col0) {
#pragma unroll
    for (int i = 2 * half; i < kCount; i += 4) raw_[i] = raw_[i + 1] = 0;
    if (score_mod.m.bias.ptr == nullptr) return;
    const Part x(score_mod, row0, col0, half);
    if (!kT && !is_asked(score_mod, x)) return;
    if (score_mod.m.bias.is_float) {
      ask_for<half, uint32_t>(x);
    } else {
      ask_for<half, uint16_t>(x);
    }
  }

  template <int half>
  __device__ __forceinline__ void add_to(float (&s)[kCount], const ScoreMod& score_mod, int row0, int col0) const {
    const bool is_float = score_mod.m.bias.is_float;
    if constexpr (!kT) {
      if (const Part x(score_mod, row0, col0, half); !is_asked(score_mod, x)) {
        const char* at = x.at;
#pragma unroll
        for (int i = 2 * half; i < kCount; i += i % 2 == 0 ? 1 : 3) {
          if (i / 4 * 8 + i % 2 < x.left) {
            s[i] += is_float ? ptx::load_late<float>(at) : ptx::to_float<E>(ptx::load_late<E>(at));
          }
          at += i % 2 == 0 ? x.many_bytes : 7 * x.many_bytes;
        }
        return;
      }
    }
#pragma unroll
    for (int i = 2 * half; i < kCount; i += 4) {
      float2 x = ptx::unpack2<E>(kT ? raw_[i] | raw_[i + 1] << 16 : raw_[i]);
      if (is_float) x = make_float2(__uint_as_float(raw_[i]), __uint_as_float(raw_[i + 1]));
      s[i] += x.x;
      s[i + 1] += x.y;
    }
  }

 private:
  // Of this thread: its first element, bytes between those side by side, and how far the bias goes on.
  struct Part {
    const char* at;
    int64_t many_bytes;
    int left;
    __device__ __forceinline__ Part(const ScoreMod& score_mod, int row0, int col0, int half) {
      const BiasView& x = score_mod.m.bias;
      const int lane = ptx::fresh_lane(), size = x.is_float ? 4 : 2;
      const int last_row = min(x.rows, score_mod.seq.seqlen_q), last_col = min(x.cols, score_mod.seq.seqlen_k);
      const int few = (kT ? col0 : row0) + lane / 4 + 8 * half, many = (kT ? row0 : col0) + 2 * (lane % 4);
      many_bytes = (kT ? x.row_stride : x.col_stride) * size;
      at = static_cast<const char*>(x.ptr) + (score_mod.seq.b * x.batch_stride + score_mod.h * x.head_stride) * size +
           few * ((kT ? x.col_stride : x.row_stride) * size) + many * many_bytes;
      left = few < (kT ? last_col : last_row) ? (kT ? last_row : last_col) - many : 0;
    }
  };
  // Up to the thread's last element, which lies 2 (kCount - 4) + 1 behind its first. Pairs of 16 bits want rows that
  // begin on 16 bytes.
  __device__ __forceinline__ static bool is_asked(const ScoreMod& score_mod, const Part& x) {
    const BiasView& bias = score_mod.m.bias;
    const bool has_neighbours = bias.staged || (bias.is_float && bias.col_stride == 1);
    return __all_sync(ptx::kFullWarp, has_neighbours && x.left > 2 * (kCount - 4) + 1);
  }

  template <int half, typename Raw>
  __device__ __forceinline__ void ask_for(const Part& x) {
    const char* at = x.at;
#pragma unroll
    for (int i = 2 * half; i < kCount; i += 4) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        if constexpr (kT) {
          ptx::load_if<Raw>(raw_[i + c], at, i / 4 * 8 + c < x.left);
          at += c == 0 ? x.many_bytes : 7 * x.many_bytes;
        } else if (sizeof(Raw) == 4 || c == 0) {
          ptx::load_if<uint32_t>(raw_[i + c], x.at + i / 4 * 8 * static_cast<int>(sizeof(Raw)) + 4 * c, true);
        }
      }
    }
  }

  uint32_t raw_[kCount];
};

// s = scale s, with what is added by distance and bias, in natural units. kHalf: only the first half of the bias has
// been asked for, because registers are short.
template <typename E, bool kT, bool kHalf, int kCount>
__device__ __forceinline__ void add_naturally(float (&s)[kCount], const ScoreMod& score_mod, int row0, int col0,
                                              ReadBias<E, kT, kCount>& bias) {
  if (score_mod.m.by_distance) {
    auto& x = reinterpret_cast<float (&)[1][kCount / 4][4]>(s);
    score_mod.template add_by_distance<kT>(x, row0, col0, score_mod.p.scale);
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) s[i] *= score_mod.p.scale;
  }
  if (score_mod.m.bias.ptr == nullptr) return;
  bias.template add_to<0>(s, score_mod, row0, col0);
  if constexpr (kHalf) bias.template ask<1>(score_mod, row0, col0);
  bias.template add_to<1>(s, score_mod, row0, col0);
}

// From raw products s and bits of what is hidden and dropped: s = dS / (dP - delta), negative where a weight is
// dropped; pairs of P as it is rounded, 0 there, go to put_weights(). minus_lse(i) is that of score i.
template <typename E, typename T, bool kT, int kCount, typename MinusLse, typename PutWeights>
__device__ __forceinline__ void change_scores(float (&s)[kCount], const typename T::Args& a, const ScoreMod& score_mod,
                                              int row0, int col0, uint32_t visible, uint32_t dropped,
                                              ReadBias<E, kT, kCount>& bias, const MinusLse& minus_lse,
                                              const PutWeights& put_weights) {
  if constexpr (T::kCaps) take_tanh(s, a.cap);
  if constexpr (T::kAdds) {
    if (a.m.has_score_mod) add_naturally<E, kT, T::kByQueries>(s, score_mod, row0, col0, bias);
  }
  const auto is_set = [](uint32_t bits, int i) { return (bits >> bit_of_score(i) & 1) != 0; };
#pragma unroll
  for (int i = 0; i < kCount; i += 2) {
    float p[2];
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      float& x = s[i + c];
      const float t = x;
      p[c] = ptx::ex2(fmaf(t, a.unit, minus_lse(i + c)));
      const bool is_visible = is_set(visible, i + c);
      p[c] = is_visible ? p[c] : 0.f;
      x = !T::kCaps ? p[c] : is_visible ? p[c] * fmaf(-t, t, 1.f) : 0.f;  // tanh of a hidden score may be NaN
      if constexpr (T::kDrops) {
        x = p[c] = __uint_as_float(__float_as_uint(x) | (dropped << (31 - i - c) & 0x80000000u));
      }
    }
    put_weights(i / 2, T::kDrops ? ptx::pack2_positive<E>(p[0], p[1]) : ptx::pack2<E>(p[0], p[1]));
  }
}

// dS from dP and s of change_scores(), or P. `keep` is the factor of kept weights.
template <typename T>
__device__ __forceinline__ float gradient_of(float dp, float s, float minus_delta, float keep) {
  if constexpr (!T::kDrops) return s * (dp + minus_delta);
  return fabsf(s) * fmaf(dp, s < 0.f ? 0.f : keep, minus_delta);
}

// Factor of kept weights, in a register: ptxas would fetch a constant anew, by a predicated load, for every score.
template <typename T>
__device__ __forceinline__ float keep_scale_of(const typename T::Args& a) {
  float keep = 1.f;
  if constexpr (T::kDrops) {
    keep = a.m.keep_scale;
    asm volatile("" : "+f"(keep));
  }
  return keep;
}

}  // namespace flash_ext::sm90
