#include "../dtype.cuh"
#include "../launch.h"
#include "../passes/append_kv.cuh"

namespace flash_ext {

std::string append_kv(const AppendParams& p) {
  const bool in_bytes = p.cache_type != CacheType::k16Bit;
  const int64_t threads = p.tokens * p.heads.divisor * (in_bytes ? 2 * 32 : p.chunks.divisor);
  if (threads > INT32_MAX) return "append_kv: more than 2^31 - 1 pieces of 8 features; append fewer tokens at once";
  return dispatch_dtype(p.dtype, [&]<typename E>() {
    return launch("append_kv", in_bytes ? append_bytes_kernel<E> : append_kv_kernel<E>,
                  (threads + kAppendThreads - 1) / kAppendThreads, kAppendThreads, 0, p.stream, p);
  });
}

}  // namespace flash_ext
