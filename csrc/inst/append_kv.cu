#include <algorithm>

#include "../dtype.cuh"
#include "../launch.h"
#include "../passes/append_kv.cuh"

namespace flash_ext {

std::string append_kv(const AppendParams& given) {
  AppendParams p = given;
  const bool in_bytes = p.cache_type != CacheType::k16Bit;
  const auto blocks_of = [](int64_t threads) { return (threads + kAppendThreads - 1) / kAppendThreads; };
  const int64_t threads = p.tokens * p.heads.divisor * (in_bytes ? 2 * 32 : p.chunks.divisor);
  const int64_t of_queries = p.queries.tokens * p.queries.heads.divisor * p.queries.chunks.divisor;
  if (std::max(threads, of_queries) > INT32_MAX) {
    return "append_kv: more than 2^31 - 1 pieces of 8 features; append fewer tokens at once";
  }
  p.query_block = blocks_of(threads);
  const int64_t blocks = std::max(p.query_block + blocks_of(of_queries), blocks_of(p.ends.batch));
  return dispatch_dtype(p.dtype, [&]<typename E>() {
    return launch("append_kv", in_bytes ? append_bytes_kernel<E> : append_kv_kernel<E>, blocks, kAppendThreads, 0,
                  p.stream, p);
  });
}

}  // namespace flash_ext
