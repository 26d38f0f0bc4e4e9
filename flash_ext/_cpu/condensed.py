"""``flash_ext::condense`` on the CPU, and its results read back: layouts as csrc/condensed.h has them.

A condensed tensor is int32 and keeps the batch and head dimensions of what it is made of:

=================  ==========================  ============================================================
a mask             (b, h, rows, cols) bool     (b, h, rows + 66 groups, words): bits of the rows, then for
                                               each 64 rows what any sees, then what all see, then all bits
                                               in mask tiles; 2 groups for 66 where rows < 64; (b, h, rows
                                               + 2 groups) of all bits or none where cols is 1
a block map        (b, h, blocks) bool, twice  (b, h, rows / 16, words): a bit for 16 x 16 scores
document ids       (b, n) or (n,)              (b, even(n) + 2 groups): ids, then (min, max) of each 32
intervals          (b, h, n, 2 m), (h, n, 2 m) (b, h, fours(2 m n) + 4 m groups): intervals, then (min start,
                                               max start, min end, max end) of each 32
=================  ==========================  ============================================================
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .._masks.block_mask import packed_bits, unpacked
from .._ops.modifiers import MASK_GROUP, Modifiers

GROUP = 32
INT32 = torch.iinfo(torch.int32)

# ---- sizes; the numbers may be symbolic ----------------------------------------------------------------


def summed_rows(rows: Any) -> Any:
    """With those of their groups."""
    return rows + 2 * ((rows + MASK_GROUP - 1) // MASK_GROUP)


def mask_rows(rows: Any, one_column: bool) -> Any:
    if one_column or rows < MASK_GROUP:
        return summed_rows(rows)
    return summed_rows(rows) + (rows + MASK_GROUP - 1) // MASK_GROUP * MASK_GROUP


def rows_of_mask(condensed: int, one_column: bool) -> int:
    """The inverse of :func:`mask_rows`."""
    has_tiles = not one_column and condensed > summed_rows(MASK_GROUP - 1)
    of_group = MASK_GROUP + 2 if has_tiles else 2
    return condensed - of_group * -(-condensed // (MASK_GROUP + of_group))


def mask_words(cols: Any) -> Any:
    """Rows begin on 16 bytes."""
    return (cols + 127) // 128 * 4


def ids_groups_at(length: Any) -> Any:
    return (length + 1) // 2 * 2


def ids_length(length: Any) -> Any:
    return ids_groups_at(length) + 2 * ((length + GROUP - 1) // GROUP)


def interval_groups_at(length: Any, count: int) -> Any:
    return (2 * count * length + 3) // 4 * 4


def interval_length(length: Any, count: int) -> Any:
    return interval_groups_at(length, count) + 4 * count * ((length + GROUP - 1) // GROUP)


def condensed_shape(shape: Sequence[Any], is_bool: bool, block_rows: int, block_cols: int) -> list[Any]:
    """That of ``condense`` of a tensor of ``shape``."""
    *lead, rows, cols = shape if len(shape) > 1 else (None, *shape)
    if is_bool and block_rows:
        return [*lead, rows * (block_rows // 16), (cols * (block_cols // 16) + 31) // 32]
    if is_bool:
        return [*lead, mask_rows(rows, cols == 1)] + ([] if cols == 1 else [mask_words(cols)])
    if len(shape) <= 2:
        return [*shape[:-1], ids_length(cols)]
    return [*lead, interval_length(rows, cols // 2)]


# ---- condense ------------------------------------------------------------------------------------------


def condense(x: Tensor, block_rows: int = 0, block_cols: int = 0) -> Tensor:
    """A mask, a block map, ids or intervals in the form that kernels read."""
    if x.dtype == torch.bool and block_rows:
        by_granule = x.repeat_interleave(block_rows // 16, 2).repeat_interleave(block_cols // 16, 3)
        return packed_bits(by_granule)
    if x.dtype == torch.bool:
        return _of_mask(x)
    if x.dim() <= 2:
        groups = _groups(x[..., None], (INT32.max, INT32.min))
        return torch.cat([_filled(x, ids_groups_at(x.shape[-1])), groups.flatten(-3)], -1)
    length, count = x.shape[-2], x.shape[-1] // 2
    starts, ends = (_groups(x[..., side::2], (INT32.max, INT32.min)) for side in (0, 1))
    numbers = _filled(x.flatten(-2), interval_groups_at(length, count))
    return torch.cat([numbers, torch.cat([starts, ends], -1).flatten(-3)], -1)


def _of_mask(mask: Tensor) -> Tensor:
    rows, cols = mask.shape[2:]
    more, groups = -rows % MASK_GROUP, -(-rows // MASK_GROUP)
    of_any, of_all = (
        F.pad(mask, (0, 0, 0, more), value=value).unflatten(2, (groups, MASK_GROUP)) for value in (0, 1)
    )
    whole = torch.cat([mask, of_any.any(3), of_all.all(3)], 2)
    if cols == 1:
        return -whole[..., 0].int()
    words = packed_bits(F.pad(whole, (0, -cols % 128)))
    if rows < MASK_GROUP:
        return words
    tiles = _tiles_of(F.pad(mask, (0, -cols % 128, 0, more)))
    return torch.cat([words, tiles.reshape(*mask.shape[:2], MASK_GROUP * groups, words.shape[3])], 2)


def _tiles_of(bits: Tensor) -> Tensor:
    """(b, h, 64 n, 128 m) bool to (b, h, n, 8 m, 32): the words of mask tiles of 64 rows and 16 columns."""
    batch, heads, rows, cols = bits.shape
    # Row 32 i + 8 j + 2 y + c and column x + 8 half are bit 16 i + 8 half + 2 j + c of word 4 x + y.
    i_j_y_c_half_x = bits.reshape(batch, heads, rows // 64, 2, 4, 4, 2, cols // 16, 2, 8)
    of_words = i_j_y_c_half_x.permute(0, 1, 2, 7, 9, 5, 3, 8, 4, 6)
    return packed_bits(of_words.reshape(batch, heads, rows // 64, cols // 16, 32, 32))[..., 0]


def _groups(numbers: Tensor, beyond: tuple[int, int]) -> Tensor:
    """(..., n, m) to (..., groups, m, 2): smallest and largest of each 32; ``beyond`` counts for neither."""
    more, groups = -numbers.shape[-2] % GROUP, -(-numbers.shape[-2] // GROUP)
    low, high = (
        F.pad(numbers, (0, 0, 0, more), value=value).unflatten(-2, (groups, GROUP)) for value in beyond
    )
    return torch.stack([low.amin(-2), high.amax(-2)], -1)


def _filled(numbers: Tensor, length: int) -> Tensor:
    return F.pad(numbers, (0, length - numbers.shape[-1]))


# ---- and back ------------------------------------------------------------------------------------------


def is_condensed_mask(mask: Tensor) -> bool:
    return mask.dtype == torch.int32


def mask_tile(mask: Tensor, rows: slice, cols: slice) -> Tensor:
    """(n, heads, rows|1, cols|1) bool of a condensed mask (n, heads, ...), False where it ends."""
    count = rows_of_mask(mask.shape[2], mask.dim() == 3)
    span = slice(0, 1) if count == 1 else slice(min(rows.start, count), min(rows.stop, count))
    if mask.dim() == 3:
        part = mask[:, :, span, None] != 0
    else:
        words = mask[:, :, span, cols.start // 32 : -(-cols.stop // 32)]
        first = cols.start % 32
        part = unpacked(words, 32 * words.shape[-1])[..., first : first + cols.stop - cols.start]
    missing_rows = 0 if count == 1 else rows.stop - rows.start - part.shape[2]
    missing_cols = 0 if mask.dim() == 3 else cols.stop - cols.start - part.shape[3]
    return F.pad(part, (0, missing_cols, 0, missing_rows)) if missing_rows or missing_cols else part


def plain_mask(mask: Tensor) -> Tensor:
    """What a condensed mask was made of; its columns are rounded up to a multiple of 128."""
    count = rows_of_mask(mask.shape[2], mask.dim() == 3)
    cols = 1 if mask.dim() == 3 else 32 * mask.shape[3]
    return mask_tile(mask, slice(0, count), slice(0, cols))


def plain_form(mods: Modifiers, rows: int, keys: int, packed: bool) -> Modifiers:
    """``mods`` with everything but ``mask`` as it was before :func:`condense`; ids have summaries behind."""
    own: dict[str, Any] = {}
    if mods.blocks is not None and mods.blocks.dtype == torch.int32:
        bits = unpacked(mods.blocks, 32 * mods.blocks.shape[3])
        # Bits behind the last block are 0: blocks that are not there.
        own["blocks"] = bits[:, :, :: mods.block_rows // 16, :: mods.block_cols // 16]
    for name, given, length in (
        ("hidden_rows", mods.hidden_rows, keys),
        ("hidden_keys", mods.hidden_keys, rows),
    ):
        if given is not None and given.dim() == (2 if packed else 3):
            count = 1 if given.shape[-1] == interval_length(length, 1) else 2
            own[name] = given[..., : 2 * count * length].unflatten(-1, (length, 2 * count))
    return replace(mods, **own) if own else mods
