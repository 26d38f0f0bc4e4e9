// Keys and values that lie in a cache, of forwards: how many of them each sequence has, and where. No CUDA, no torch.
#pragma once

#include "divisor.h"

namespace flash_ext {

// A cache is a pool of pages, of which a table names those of each sequence in order; or an entry a sequence (one page
// each, without a table); or rows one after another (FwdParams::k of three dimensions, Problem::cu_seqlens_k).
struct KvCache {
  const int32_t* seqused_k = nullptr;    // (batch,): keys of each sequence; null: as many as it has room for
  const int32_t* block_table = nullptr;  // (batch, max_pages), rows table_stride apart
  int64_t table_stride = 0;
  int32_t max_keys = 0;       // room of a sequence, at most
  int32_t num_pages = 0;      // of the pool; 0: rows one after another
  Divisor page_size{1u << 30};
};

// Elements of k and v in a cache. Those of 8 bits stand for themselves times a factor.
enum class CacheType : uint8_t { k16Bit, kE4m3, kInt8 };

// The factors of k or v, one for each sequence and head or one for each slot and head. Strides count floats and may be
// 0.
struct CacheFactors {
  const float* ptr = nullptr;  // null: 1
  int64_t batch_stride = 0;    // of sequences, or of pages
  int64_t row_stride = 0;      // of slots
  int64_t head_stride = 0;
  bool of_slots = false;
};
struct QuantizedCache {
  CacheFactors k, v;
};

// How a call with a cache goes over the kernels, which each sequence chooses by the number of its own packed rows
// (queries x query heads of a key head): up to 16, up to 64, more. The host knows bounds only, so it launches what may
// be needed.
struct KvCacheGrid {
  int splits = 1;         // parts of the keys of a sequence, at most
  int keys_of_part = 0;   // batch-invariant mode: a part for so many keys
  // Else, where lengths (KvCache::seqused_k) may differ: parts of each sequence when they do not, and of all sequences
  // together when they do. 0: each sequence has `splits` parts.
  int equal_splits = 0, all_parts = 0;
  int seen_keys = 0;  // keys of a sequence that count in that, at most
  int most_keys = INT32_MAX;  // of a part
  int least_keys = 0;  // of a part
  int rows = 0;  // of a sequence whose keys may be split, at most
  int queries = 1;  // those are its queries, at most
  int64_t part_rows = 0;  // of all sequences: rows of one part
  int narrow_block_n = 0;  // keys of a block of the tile of 16 rows
  // Of the kernel that takes more rows than the smallest tile has: its tile, and whether its maxima are in units of
  // log2.
  int tile_rows = 64, block_n = 64;
  bool scaled_maxima = false;
};

// The sequences that one launch serves: those of so many packed rows.
struct RowRange {
  int above = 0;
  int upto = INT32_MAX;  // the launch without a limit serves rows outside every sequence, too
};

}  // namespace flash_ext
