// flash_ext::condense: a mask's tensor in the form that kernels read, made once and read by every call (condensed.h).
#include <string>

#include "../condensed.h"
#include "api.h"
#include "tensors.h"

namespace flash_ext {
namespace {

void launched(const std::string& error) { TORCH_CHECK(error.empty(), "flash_ext masks: ", error); }

BoolView bool_view(const Tensor& t) {
  BoolView x;
  x.ptr = t.const_data_ptr<bool>();
  for (int dim = 0; dim < 4; ++dim) {
    x.strides[dim] = stride_or_zero(t, dim);
    x.sizes[dim] = static_cast<int32_t>(t.size(dim));
  }
  return x;
}

// Of masks, and in front of the last dimension for the others.
Tensor with_sizes(const Tensor& x, int64_t keep, std::initializer_list<int64_t> rest) {
  c10::SmallVector<int64_t, 4> sizes(x.sizes().slice(0, keep));
  sizes.append(rest.begin(), rest.end());
  return new_tensor(sizes, x.options().dtype(at::kInt));
}

Tensor condense_mask(const Tensor& mask, void* stream) {
  const bool fill = mask.size(3) == 1;
  const int64_t rows = mask.size(2), to_rows = condensed::mask_rows(rows, fill);
  const int64_t words = fill ? 1 : condensed::mask_words(mask.size(3));
  const Tensor made = fill ? with_sizes(mask, 2, {to_rows}) : with_sizes(mask, 2, {to_rows, words});
  if (made.numel() == 0 || !should_launch()) return made;
  auto* bits = reinterpret_cast<uint32_t*>(made.mutable_data_ptr<int32_t>());
  launched(pack_mask(bool_view(mask), bits, static_cast<int>(words), fill, stream));
  launched(
      group_mask(bits, mask.size(0) * mask.size(1), static_cast<int>(rows), static_cast<int>(words), fill, stream));
  return made;
}

Tensor condense_blocks(const Tensor& blocks, int64_t block_rows, int64_t block_cols, void* stream) {
  const int64_t rows = condensed::block_rows(blocks.size(2), block_rows);
  const int64_t words = condensed::block_words(blocks.size(3), block_cols);
  const Tensor made = with_sizes(blocks, 2, {rows, words});
  if (made.numel() == 0 || !should_launch()) return made;
  // Blocks are not broadcast over rows and columns, and a stride of 0 is one like any other.
  BoolView view = bool_view(blocks);
  for (int dim = 2; dim < 4; ++dim) view.strides[dim] = blocks.stride(dim);
  launched(pack_blocks(view, reinterpret_cast<uint32_t*>(made.mutable_data_ptr<int32_t>()), static_cast<int>(rows),
                       static_cast<int>(words), static_cast<int>(block_rows / 16), static_cast<int>(block_cols / 16),
                       stream));
  return made;
}

// The numbers in front of `made`, and zeros between them and the groups, which begin at `groups_at`.
void put_numbers(const Tensor& made, const Tensor& numbers, int64_t groups_at) {
  const int64_t length = numbers.size(-1);
  made.narrow(-1, 0, length).copy_(numbers);
  if (groups_at > length) made.narrow(-1, length, groups_at - length).zero_();
}

Tensor condense_ids(const Tensor& any_ids, void* stream) {
  const Tensor ids = any_ids.contiguous();
  const int64_t length = ids.size(-1);
  const Tensor made = with_sizes(ids, ids.dim() - 1, {condensed::ids_length(length)});
  if (made.numel() == 0 || !should_launch()) return made;
  const int64_t groups_at = condensed::ids_groups_at(length);
  put_numbers(made, ids, groups_at);
  launched(group_document_ids(ids.const_data_ptr<int32_t>(), made.mutable_data_ptr<int32_t>() + groups_at,
                              ids.numel() / length, length, stream));
  return made;
}

Tensor condense_intervals(const Tensor& any_bounds, void* stream) {
  const Tensor bounds = any_bounds.contiguous();
  const int64_t length = bounds.size(-2), count = bounds.size(-1) / 2;
  const Tensor made = with_sizes(bounds, bounds.dim() - 2, {condensed::interval_length(length, count)});
  if (made.numel() == 0 || !should_launch()) return made;
  const int64_t groups_at = condensed::interval_groups_at(length, count);
  put_numbers(made, bounds.flatten(-2), groups_at);
  launched(group_intervals(bounds.const_data_ptr<int32_t>(), made.mutable_data_ptr<int32_t>() + groups_at,
                           bounds.numel() / (length * count * 2), length, static_cast<int>(count), stream));
  return made;
}

}  // namespace

Tensor condense(const Tensor& x, int64_t block_rows, int64_t block_cols, void* stream) {
  if (x.scalar_type() == at::kBool) {
    return block_rows > 0 ? condense_blocks(x, block_rows, block_cols, stream) : condense_mask(x, stream);
  }
  return x.dim() <= 2 ? condense_ids(x, stream) : condense_intervals(x, stream);
}

void check_condense(const Tensor& x, const CallArgs& a) {
  const bool is_bool = x.scalar_type() == at::kBool;
  TORCH_CHECK_TYPE(is_bool || x.scalar_type() == at::kInt,
                   "condense takes a bool mask or block map, or int32 ids or intervals, got ", x.scalar_type(), ".");
  const int64_t rows = a.block_rows.guard_int(__FILE__, __LINE__), cols = a.block_cols.guard_int(__FILE__, __LINE__);
  TORCH_CHECK_VALUE((rows == 0) == (cols == 0) && rows >= 0 && cols >= 0 && rows % 16 == 0 && cols % 16 == 0,
                    "block_rows and block_cols must be multiples of 16, and 0 for what is no block map, got (", rows,
                    ", ", cols, ").");
  TORCH_CHECK_VALUE(is_bool ? x.dim() == 4 : rows == 0 && x.dim() >= 1 && x.dim() <= 4,
                    "condense takes a mask or block map of 4 dimensions, ids of 1 or 2, and intervals of 3 or 4, got ",
                    x.dim(), is_bool ? " of a bool tensor." : ".");
  if (is_bool || x.dim() <= 2) return;
  const int64_t numbers = x.sym_size(-1).guard_int(__FILE__, __LINE__);
  TORCH_CHECK_VALUE(numbers == 2 || numbers == 4, "the last dimension of intervals must have 2 or 4 numbers, got ",
                    numbers, ".");
}

Tensor condense_gpu(const Tensor& x, const CallArgs& a) {
  check_condense(x, a);
  const OnDevice on_device(x);
  return condense(x, a.block_rows.expect_int(), a.block_cols.expect_int(), stream_handle(x.device()));
}

}  // namespace flash_ext
