// The passes that quantise to e4m3 (csrc/inst/fp8_passes.cu), kernels and grids, run on a CPU.
//
// Reads a case from the file that the first argument names, and writes what quantize_fp8() makes of it to the second
// one's: numbers and floats in the order of QuantizeFp8, bytes that no thread wrote being 0xee. Further arguments name
// further cases.
#include "ptx/cuda_shim.h"

#include <string>

#include "inst/fp8_passes.cu"

using namespace flash_ext;

namespace {

template <typename X>
std::vector<X> read(std::FILE* file, int64_t count) {
  std::vector<X> x(count);
  if (static_cast<int64_t>(std::fread(x.data(), sizeof(X), count, file)) != count) emu::fail("the case is too short");
  return x;
}

StridedView view(std::vector<uint16_t>& x, bool packed, int64_t rows, int heads, int columns) {
  StridedView v;
  v.ptr = x.data();
  v.batch_stride = packed ? 0 : rows * heads * columns;
  v.row_stride = int64_t{heads} * columns;
  v.head_stride = columns;
  v.aligned = reinterpret_cast<uintptr_t>(x.data()) % 16 == 0;
  return v;
}

void run(const char* from, const char* to) {
  std::FILE* in = std::fopen(from, "rb");
  if (in == nullptr) emu::fail("no case");
  const std::vector<int32_t> n = read<int32_t>(in, 17);
  const int batch = n[0], heads = n[1], heads_k = n[2], rows_q = n[3], rows_k = n[4], d = n[5], dv = n[6];
  const bool packed = n[7] != 0, smooth_k = n[9] != 0, smooth_v = n[10] != 0, mixed = n[12] != 0;
  std::vector<int32_t> cu_q, cu_k, used;
  if (packed) cu_q = read<int32_t>(in, batch + 1), cu_k = read<int32_t>(in, batch + 1);
  if (n[14] != 0) used = read<int32_t>(in, batch);
  const int64_t b = packed ? 1 : batch;
  std::vector<uint16_t> q = read<uint16_t>(in, b * rows_q * heads * d),
                        k = read<uint16_t>(in, b * rows_k * heads_k * d);
  std::vector<uint16_t> v = read<uint16_t>(in, b * rows_k * heads_k * dv);
  // cos and sin of q, and of k, (rows, dim / 2): 1 of the halves of a row, 2 of neighbours.
  const int turns = n[15], half = n[16] / 2;
  std::vector<float> factors[4];
  if (turns != 0) {
    for (int i = 0; i < 4; ++i) factors[i] = read<float>(in, int64_t{i < 2 ? rows_q : rows_k} * half);
  }
  std::fclose(in);

  QuantizeFp8 x;
  for (int i = 0; turns != 0 && i < 2; ++i) {
    RotaryRows& r = x.rotary[i];
    r.cos = factors[2 * i].data(), r.sin = factors[2 * i + 1].data();
    r.cos_row = r.sin_row = half;
    r.is_float = true, r.interleaved = turns == 2, r.dim = 2 * half;
  }
  x.problem.dtype = n[13] != 0 ? DType::kFloat16 : DType::kBFloat16;
  x.problem.batch = batch, x.problem.num_heads = heads, x.problem.num_heads_k = heads_k;
  x.problem.head_dim = d, x.problem.head_dim_v = dv;
  x.problem.seqlen_q = packed ? 0 : rows_q, x.problem.seqlen_k = packed ? 0 : rows_k;
  x.problem.total_q = b * rows_q, x.problem.total_k = b * rows_k;
  if (packed) x.problem.cu_seqlens_q = cu_q.data(), x.problem.cu_seqlens_k = cu_k.data();
  x.q = view(q, packed, rows_q, heads, d), x.k = view(k, packed, rows_k, heads_k, d);
  x.v = view(v, packed, rows_k, heads_k, dv);
  if (n[14] != 0) x.seqused_k = used.data();
  x.by_block = n[8] != 0, x.hadamard = n[11] != 0;

  const int64_t blocks_q = x.by_block ? factor_blocks(rows_q, batch, packed) : 1;
  const int64_t blocks_k = x.by_block ? factor_blocks(rows_k, batch, packed) : 1;
  std::vector<std::vector<uint8_t>> results;
  const auto room = [&](bool wanted, int64_t bytes) -> uint8_t* {
    results.emplace_back(wanted ? bytes : 0, 0xee);
    return wanted ? results.back().data() : nullptr;
  };
  const auto floats = [&](bool wanted, int64_t count) { return reinterpret_cast<float*>(room(wanted, 4 * count)); };
  results.reserve(9);
  x.q8 = room(!mixed, b * rows_q * heads * d);
  x.k8 = room(!mixed, b * rows_k * heads_k * d);
  x.v8 = room(true, b * heads_k * dv * transposed_columns(rows_k, batch, packed));
  x.q_factor = floats(!mixed, b * heads * blocks_q);
  x.k_factor = floats(!mixed, b * heads_k * blocks_k);
  x.v_factor = floats(true, b * heads_k * dv);
  x.v_offset = floats(smooth_v, b * heads_k * dv);
  x.k_offset = floats(smooth_k && !mixed, b * heads_k * d);
  x.row_offset = floats(smooth_k && !mixed, b * heads * rows_q);
  std::vector<float> partials(quantize_floats(x.problem) + RoundingLoss::floats(x.problem), NAN);
  x.partials = partials.data();
  const std::string error = quantize_fp8(x);
  if (!error.empty()) emu::fail(error.c_str());

  std::FILE* out = std::fopen(to, "wb");
  for (const auto& bytes : results) std::fwrite(bytes.data(), 1, bytes.size(), out);
  std::fclose(out);
}

}  // namespace

int main(int argc, char** argv) {
  for (int i = 1; i + 1 < argc; i += 2) run(argv[i], argv[i + 1]);
}
