// Keys of a forward without a cache, as the kernels over one see them. No CUDA, no torch.
#pragma once

#include "kv_cache.h"
#include "params.h"

namespace flash_ext {

// An entry a sequence, or packed rows.
inline KvCache cache_of(const Problem& p) {
  KvCache c;
  c.max_keys = static_cast<int32_t>(p.is_varlen() ? p.total_k : p.seqlen_k);
  c.num_pages = p.is_varlen() ? 0 : p.batch;
  return c;
}

}  // namespace flash_ext
