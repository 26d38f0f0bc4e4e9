// The rows of the tables for forwards over a cache (kv_cache.h).
#pragma once

#include "table.h"

namespace flash_ext::plans {

bool supports_cached(Req r, Dev d);
bool supports_cached_mod(Req r, Dev d);
bool supports_quantized(Req r, Dev d);
bool supports_cached_tma(Req r, Dev d);
bool supports_packed(Req r, Dev d);
bool supports_packed_dense(Req r, Dev d);
bool supports_packed_mod(Req r, Dev d);
bool supports_packed_quantized(Req r, Dev d);
bool supports_latents(Req r, Dev d);
bool prefers_packed_cached(Req r, Dev d);

void build_packed(Req r, Dev d, Plan& p);
void build_packed_dense(Req r, Dev d, Plan& p);
void build_cached_hopper(Req r, Dev d, Plan& p);
void build_cached_portable(Req r, Dev d, Plan& p);
void build_cached_mod(Req r, Dev d, Plan& p);
void build_quantized(Req r, Dev d, Plan& p);
void build_latents(Req r, Dev d, Plan& p);

}  // namespace flash_ext::plans
