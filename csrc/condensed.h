// Masks in the form that kernels read: sizes of the int32 tensors that flash_ext::condense makes. They keep the batch
// and head dimensions of what they are made of. N is a plain number or one of torch that is not known yet.
#pragma once

#include <cstdint>

#include "host_device.h"
#include "modifiers.h"

namespace flash_ext::condensed {

template <typename N>
FLASH_EXT_HOST_DEVICE N divided_up(const N& n, int64_t by) {
  return (n + (by - 1)) / by;
}

// A bool mask (batch|1, h|1, rows|1, cols|1) becomes (batch|1, h|1, mask_rows, mask_words): of each head its rows, 32
// columns a word, then for each group of rows the words that any row sees, then those that all see, then all bits once
// more in mask tiles. Rows begin on 16 bytes.
//
// A mask tile has the bits of a group of 64 rows and 16 columns, as a warp of the Hopper backward holds its scores: bit
// 16 i + 8 half + 2 j + c of word t is row 32 i + 8 j + 2 (t % 4) + c and column t / 4 + 8 half. The tiles of a group
// lie in a row.
//
// Masks of fewer rows than a group have no tiles: kernels that read those do not run there. Where one column stands for
// all, a row is a word of all bits or none, and the last dimension and the tiles are missing.
template <typename N>
FLASH_EXT_HOST_DEVICE N summed_rows(const N& rows) {  // with those of its groups
  return rows + divided_up(rows, Modifiers::kMaskGroup) * 2;
}
template <typename N>
FLASH_EXT_HOST_DEVICE N mask_rows(const N& rows, bool one_column) {
  if (one_column || rows < Modifiers::kMaskGroup) return summed_rows(rows);
  return summed_rows(rows) + divided_up(rows, Modifiers::kMaskGroup) * Modifiers::kMaskGroup;
}
template <typename N>
FLASH_EXT_HOST_DEVICE N mask_words(const N& cols) {
  return divided_up(cols, 128) * 4;
}
// The rows of a mask of so many condensed ones.
inline int64_t rows_of_mask(int64_t condensed, bool one_column) {
  const bool has_tiles = !one_column && condensed > summed_rows(int64_t{Modifiers::kMaskGroup} - 1);
  const int64_t of_group = has_tiles ? Modifiers::kMaskGroup + 2 : 2;
  return condensed - of_group * divided_up(condensed, Modifiers::kMaskGroup + of_group);
}

// A block map (batch|1, h|1, row blocks, key blocks): a bit for 16 x 16 scores.
template <typename N>
FLASH_EXT_HOST_DEVICE N block_rows(const N& blocks, const N& rows_of_block) {
  return blocks * (rows_of_block / 16);
}
template <typename N>
FLASH_EXT_HOST_DEVICE N block_words(const N& blocks, const N& cols_of_block) {
  return divided_up(N(blocks * (cols_of_block / 16)), 32);
}

// Document ids (batch, length) or (length): (batch, ids_length) or (ids_length), the ids, then from ids_groups_at() on
// the (smallest, largest) of each group. Pairs begin on 8 bytes.
template <typename N>
FLASH_EXT_HOST_DEVICE N ids_groups_at(const N& length) {
  return divided_up(length, 2) * 2;
}
template <typename N>
FLASH_EXT_HOST_DEVICE N ids_length(const N& length) {
  return ids_groups_at(length) + divided_up(length, DocumentIds::kGroup) * 2;
}

// Intervals (batch|1, h|1, length, 2 count), packed (h|1, length, 2 count): one dimension less, the bounds, then from
// interval_groups_at() on four numbers a group and interval, which begin on 16 bytes.
template <typename N>
FLASH_EXT_HOST_DEVICE N interval_groups_at(const N& length, int64_t count) {
  return divided_up(N(length * (2 * count)), 4) * 4;
}
template <typename N>
FLASH_EXT_HOST_DEVICE N interval_length(const N& length, int64_t count) {
  return interval_groups_at(length, count) + divided_up(length, DocumentIds::kGroup) * (4 * count);
}

}  // namespace flash_ext::condensed
