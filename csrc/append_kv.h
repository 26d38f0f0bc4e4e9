// New keys and values that go into a cache. No CUDA, no torch.
#pragma once

#include <string>

#include "divisor.h"
#include "kv_cache.h"
#include "params.h"

namespace flash_ext {

// Factors by which keys are turned before they are written: rotary position embedding (Su et al. 2021).
struct Rotary {
  const void* cos = nullptr;  // (positions, dim / 2), of the keys' type or fp32; null: keys are written as they are
  const void* sin = nullptr;
  int64_t cos_stride = 0, sin_stride = 0;  // elements between rows
  bool is_float = false;
  bool interleaved = true;       // pairs are neighbours, else the halves of the first `dim` features
  int32_t dim = 0;               // features that are turned
  int32_t positions = 0;         // rows of factors
  const void* of_token = nullptr;  // (tokens,): which row; int64 or int32
  bool is_wide = false;
};

struct AppendParams {
  DType dtype = DType::kBFloat16;
  StridedView k_new, v_new;      // (tokens, heads, d), (tokens, heads, dv)
  StridedView k_cache, v_cache;  // (num_pages, page_size, heads, d), ..
  const void* slots = nullptr;   // (tokens,): page * page_size + row of the page; others are left out
  bool is_wide = false;          // int64, else int32
  int64_t tokens = 0;
  int64_t num_slots = 0;  // of the cache, below 2^31
  Divisor page_size, heads, chunks;  // chunks: pieces of 8 features of a key and its value
  int32_t head_dim = 0, head_dim_v = 0, key_chunks = 0;
  Rotary rotary;
  // Of a cache of 8 bits. Factors of slots are written, a largest element at a time; others are given for each token and head,
  // with batch_stride between tokens.
  CacheType cache_type = CacheType::k16Bit;
  CacheFactors k_factors, v_factors;
  void* stream = nullptr;  // cudaStream_t
};

// One kernel; an empty string, or what went wrong.
std::string append_kv(const AppendParams& p);

}  // namespace flash_ext
