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
  const void* of_token = nullptr;  // (tokens,): which row; int64 or int32. With AppendEnds their places are their rows
  bool is_wide = false;
};

// New tokens that go behind the keys of their sequence, as many for each; then no slots are given.
struct AppendEnds {
  const void* lengths = nullptr;  // (batch,): keys before the call, kept inside 0..room; null: slots are given
  int64_t lengths_stride = 0;
  bool is_wide = false;  // int64, else int32
  int32_t batch = 0;
  const int32_t* table = nullptr;  // (batch, max_pages), rows table_stride apart; null: sequence b has page b
  int64_t table_stride = 0;
  // The table has one page a sequence, an entry of a dense cache: of several sequences with one entry the first has it,
  // where any token is new. The others, and those whose entry is not there, have no keys.
  bool of_entries = false;
  int32_t num_pages = 0;
  int32_t room = 0;  // of a sequence
  int32_t new_tokens = 0;  // of a sequence
  Divisor count;  // the same, at least 1
  int32_t* new_lengths = nullptr;  // (batch,), written
};

// Queries that are turned by the factors of new keys into a copy, rows one after another.
struct TurnedQueries {
  DType dtype = DType::kBFloat16;
  StridedView from;  // (batch, rows, heads, d) or, with cu_seqlens, (tokens, heads, d)
  uint16_t* to = nullptr;
  bool aligned = false;  // 16 bytes of `to` can be written at once
  const int32_t* cu_seqlens = nullptr;  // (batch + 1,)
  int64_t tokens = 0;
  Divisor rows, heads, chunks;  // chunks: pieces of 8 features
  bool counts = false;  // positions count from the length of the sequence; else all of its rows have that of the first
};

struct AppendParams {
  DType dtype = DType::kBFloat16;
  StridedView k_new, v_new;  // (tokens, heads, d), (tokens, heads, dv); with ends (batch, count, heads, d), ..
  StridedView k_cache, v_cache;  // (num_pages, page_size, heads, d), ..
  const void* slots = nullptr;  // (tokens,): page * page_size + row of the page; others are left out
  bool is_wide = false;  // int64, else int32
  int64_t tokens = 0;
  int64_t num_slots = 0;  // of the cache, below 2^31
  Divisor page_size, heads, chunks;  // chunks: pieces of 8 features of a key and its value
  int32_t head_dim = 0, head_dim_v = 0, key_chunks = 0;
  Rotary rotary;
  AppendEnds ends;
  TurnedQueries queries;
  // Of a cache of 8 bits. Factors of slots are written, a largest element at a time; others are given for each token
  // and head, with batch_stride between tokens; with ends between sequences.
  CacheType cache_type = CacheType::k16Bit;
  CacheFactors k_factors, v_factors;
  int64_t query_block = 0;  // the first thread block that turns queries; append_kv() sets it
  void* stream = nullptr;  // cudaStream_t
};

// One kernel; an empty string, or what went wrong.
std::string append_kv(const AppendParams& p);

}  // namespace flash_ext
