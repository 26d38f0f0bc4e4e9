// The append to a cache (csrc/inst/append_kv.cu), kernels and grid, run on a CPU.
//
// Reads one case from the file that the first argument names, and writes to the second one's what append_kv() makes of it:
// both caches, their factors, new lengths and turned queries. Lengths and queries that no thread wrote are bytes 0xee.
#include "ptx/cuda_shim.h"

#include <string>

inline float __fsub_rn(float x, float y) { return x - y; }
inline float __fdiv_rn(float x, float y) { return x / y; }
inline int __float2int_rn(float x) { return static_cast<int>(std::nearbyint(x)); }
inline __half __ushort_as_half(uint16_t x) { return {x}; }
float __half2float(__half x);
#define __nv_cvt_float_to_fp8(x, saturation, kind) e4m3_of(x)

#include "inst/append_kv.cu"

float __half2float(__half x) { return flash_ext::ptx::to_float(x); }

using namespace flash_ext;

namespace {

template <typename X>
std::vector<X> read(std::FILE* file, int64_t count) {
  std::vector<X> x(count);
  if (static_cast<int64_t>(std::fread(x.data(), sizeof(X), count, file)) != count) emu::fail("the case is too short");
  return x;
}

// Of a contiguous tensor (batch, rows, heads, columns).
StridedView view(void* data, int64_t rows, int heads, int columns, int bytes) {
  StridedView v;
  v.ptr = data;
  v.batch_stride = rows * heads * columns, v.row_stride = int64_t{heads} * columns, v.head_stride = columns;
  v.aligned = columns * bytes % 16 == 0 && reinterpret_cast<uintptr_t>(data) % 16 == 0;
  return v;
}

// 0: none, 1: of heads, 2: of sequences, or tokens, and heads, 3: of slots and heads.
CacheFactors factors(std::vector<float>& x, int kind, int page_size, int heads) {
  CacheFactors f;
  if (kind == 0) return f;
  f.ptr = x.data(), f.of_slots = kind == 3, f.head_stride = 1;
  if (kind == 2) f.batch_stride = heads;
  if (kind == 3) f.batch_stride = int64_t{page_size} * heads, f.row_stride = heads;
  return f;
}

}  // namespace

int main(int, char** argv) {
  std::FILE* in = std::fopen(argv[1], "rb");
  if (in == nullptr) emu::fail("no case");
  const std::vector<int32_t> n = read<int32_t>(in, 24);
  const int batch = n[2], count = n[3], heads = n[4], heads_q = n[5], d = n[6], dv = n[7], pages = n[8], size = n[9];
  const int max_pages = n[10], rotary_dim = n[14], rows_q = n[19], kind = n[21];
  const bool of_entries = n[11] != 0, packed = n[18] != 0, has_q = n[22] != 0, by_slots = n[23] != 0;
  const int64_t tokens = int64_t{batch} * count, tokens_q = packed ? rows_q : int64_t{batch} * rows_q;
  const int bytes = n[13] != 0 ? 1 : 2;
  std::vector<uint16_t> k = read<uint16_t>(in, tokens * heads * d), v = read<uint16_t>(in, tokens * heads * dv);
  std::vector<uint8_t> k_cache = read<uint8_t>(in, int64_t{pages} * size * heads * d * bytes);
  std::vector<uint8_t> v_cache = read<uint8_t>(in, int64_t{pages} * size * heads * dv * bytes);
  const int64_t numbers[] = {0, heads, (by_slots ? tokens : batch) * heads, int64_t{pages} * size * heads};
  std::vector<float> k_factors = read<float>(in, numbers[kind]), v_factors = read<float>(in, numbers[kind]);
  std::vector<uint8_t> cos = read<uint8_t>(in, int64_t{n[15]} * rotary_dim / 2 * (n[16] != 0 ? 4 : 2));
  std::vector<uint8_t> sin = read<uint8_t>(in, static_cast<int64_t>(cos.size()));
  std::vector<int64_t> slots, positions;
  std::vector<uint8_t> lengths;
  std::vector<int32_t> table, cu_seqlens;
  std::vector<uint16_t> q;
  if (by_slots) {
    slots = read<int64_t>(in, tokens);
    if (rotary_dim > 0) positions = read<int64_t>(in, tokens);
  } else {
    lengths = read<uint8_t>(in, batch * (n[12] != 0 ? 8 : 4));
    table = read<int32_t>(in, of_entries ? batch : int64_t{batch} * max_pages);
    if (packed) cu_seqlens = read<int32_t>(in, batch + 1);
    if (has_q) q = read<uint16_t>(in, tokens_q * heads_q * d);
  }
  std::fclose(in);

  AppendParams p;
  p.dtype = n[0] != 0 ? DType::kFloat16 : DType::kBFloat16;
  p.k_new = view(k.data(), by_slots ? 0 : count, heads, d, 2),
  p.v_new = view(v.data(), by_slots ? 0 : count, heads, dv, 2);
  p.k_cache = view(k_cache.data(), size, heads, d, bytes), p.v_cache = view(v_cache.data(), size, heads, dv, bytes);
  p.tokens = tokens, p.num_slots = int64_t{pages} * size;
  const auto divisor = [](int64_t x) { return Divisor(static_cast<uint32_t>(max(x, int64_t{1}))); };
  p.page_size = divisor(size), p.heads = divisor(heads);
  p.head_dim = d, p.head_dim_v = dv, p.key_chunks = (d + 7) / 8;
  p.chunks = divisor(p.key_chunks + (dv + 7) / 8);
  p.cache_type = static_cast<CacheType>(n[13]);
  p.k_factors = factors(k_factors, kind, size, heads), p.v_factors = factors(v_factors, kind, size, heads);
  if (rotary_dim > 0) {
    p.rotary.cos = cos.data(), p.rotary.sin = sin.data();
    p.rotary.cos_stride = p.rotary.sin_stride = rotary_dim / 2;
    p.rotary.is_float = n[16] != 0, p.rotary.interleaved = n[17] != 0;
    p.rotary.dim = rotary_dim, p.rotary.positions = n[15];
    p.rotary.of_token = positions.data(), p.rotary.is_wide = true;
  }
  std::vector<int32_t> new_lengths(by_slots ? 0 : batch, static_cast<int32_t>(0xeeeeeeee));
  std::vector<uint16_t> turned(q.size(), 0xeeee);
  if (by_slots) {
    p.slots = slots.data(), p.is_wide = true;
  } else {
    AppendEnds& e = p.ends;
    e.lengths = lengths.data(), e.lengths_stride = 1, e.is_wide = n[12] != 0;
    e.batch = batch, e.of_entries = of_entries, e.num_pages = pages;
    if (of_entries || max_pages > 0) e.table = table.data(), e.table_stride = of_entries ? 1 : max_pages;
    e.room = (max_pages > 0 ? max_pages : 1) * size;
    e.new_tokens = count, e.count = divisor(count), e.new_lengths = new_lengths.data();
  }
  if (has_q) {
    TurnedQueries& t = p.queries;
    t.dtype = n[1] != 0 ? DType::kFloat16 : DType::kBFloat16;
    t.from = view(q.data(), packed ? 0 : rows_q, heads_q, d, 2), t.to = turned.data();
    t.aligned = view(turned.data(), 0, heads_q, d, 2).aligned;
    t.cu_seqlens = packed ? cu_seqlens.data() : nullptr;
    t.tokens = tokens_q, t.rows = divisor(rows_q), t.heads = divisor(heads_q), t.chunks = divisor(p.key_chunks);
    t.counts = n[20] != 0;
  }
  const std::string error = append_kv(p);
  if (!error.empty()) emu::fail(error.c_str());

  std::FILE* out = std::fopen(argv[2], "wb");
  const auto write = [&](const auto& x) { std::fwrite(x.data(), sizeof(x[0]), x.size(), out); };
  write(k_cache), write(v_cache), write(k_factors), write(v_factors), write(new_lengths), write(turned);
  std::fclose(out);
}
