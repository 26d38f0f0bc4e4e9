"""Which tiles of a mask are hidden or shown in full, found without a look at their pairs where that can be.

Long masks are mostly such tiles: only the others are evaluated pair by pair.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .atoms import Causal, Chunks, Documents, HiddenKeys, HiddenRows, Prefix, SinkTokens, Window
from .value import And, Mask, Not, Or, Sizes


class Known(NamedTuple):
    """bool (batch or 1, num_heads or 1, row tiles, key tiles).

    Attributes:
        some: the tile may show a pair; where it is False it shows none.
        every: the tile shows all its pairs; where it is False that is not known.
    """

    some: Tensor
    every: Tensor


class _Tiles(NamedTuple):
    """First and last row of each row of tiles, (row tiles, 1); first and last key, (key tiles,)."""

    size: tuple[int, int]
    row_first: Tensor
    row_last: Tensor
    key_first: Tensor
    key_last: Tensor
    shift: int

    def centres(self, alignment: str) -> tuple[Tensor, Tensor]:
        """The least and the greatest position among the keys."""
        shift = 0 if alignment == "top_left" else self.shift
        return self.row_first + shift, self.row_last + shift


def known_tiles(mask: Mask, sizes: Sizes, size: tuple[int, int], device: torch.device | str) -> Known:
    """What is known of tiles of so many rows and keys, for a call that is not packed."""
    first = [
        torch.arange(0, max(length, 1), step, device=device)[: -(-length // step)]
        for length, step in zip((sizes.q_len, sizes.k_len), size)
    ]
    (row_first, row_last), (key_first, key_last) = (
        (start, (start + step).clamp(max=length) - 1)
        for start, step, length in zip(first, size, (sizes.q_len, sizes.k_len))
    )
    shift = sizes.k_len - sizes.q_len
    tiles = _Tiles(size, row_first[:, None], row_last[:, None], key_first, key_last, shift)
    some, every = _known(mask, tiles)
    shape = (sizes.batch, sizes.num_heads, len(row_first), len(key_first))
    return Known(some.expand(shape), every.expand(shape))


def _known(mask: Mask, tiles: _Tiles) -> Known:
    if isinstance(mask, Not):
        some, every = _known(mask.mask, tiles)
        return Known(~every, ~some)
    if isinstance(mask, (And, Or)):
        some, every = _known(mask.masks[0], tiles)
        for part in mask.masks[1:]:
            other = _known(part, tiles)
            if isinstance(mask, And):
                some, every = some & other.some, every & other.every
            else:
                some, every = some | other.some, every | other.every
        return Known(some, every)
    if isinstance(mask, (Causal, Window)):
        bounds = (-1, 0) if isinstance(mask, Causal) else (mask.left, mask.right)
        return _of_window(*bounds, mask.alignment, tiles)
    if isinstance(mask, Chunks):
        ends = (*tiles.centres(mask.alignment), tiles.key_first, tiles.key_last)
        return _of_equal(*(end // mask.size for end in ends))
    if isinstance(mask, SinkTokens):
        first, last = tiles.key_first[None], tiles.key_last[None]
        return Known(first < mask.count, last < mask.count)
    if isinstance(mask, Prefix):
        lens = mask.lens[:, None, None, None]
        return Known(tiles.key_first < lens, tiles.key_last < lens)
    if isinstance(mask, Documents):
        return _of_documents(mask, tiles)
    if isinstance(mask, (HiddenRows, HiddenKeys)) and mask.intervals.shape[-1] == 2:
        return _of_intervals(mask, tiles)
    nothing = torch.zeros(1, 1, device=tiles.key_first.device, dtype=torch.bool)
    return Known(~nothing, nothing)


def _of_window(left: int, right: int, alignment: str, tiles: _Tiles) -> Known:
    first, last = tiles.centres(alignment)
    some = every = (tiles.key_first >= 0) & (tiles.row_first >= 0)
    if left >= 0:
        some, every = some & (tiles.key_last >= first - left), every & (tiles.key_first >= last - left)
    if right >= 0:
        some, every = some & (tiles.key_first <= last + right), every & (tiles.key_last <= first + right)
    return Known(some, every)


def _of_equal(row_least: Tensor, row_most: Tensor, key_least: Tensor, key_most: Tensor) -> Known:
    """Rows and keys that see each other where they have the same number."""
    some = (row_least <= key_most) & (key_least <= row_most)
    return Known(some, (row_least == row_most) & (key_least == key_most) & (row_least == key_least))


def _of_documents(mask: Documents, tiles: _Tiles) -> Known:
    both = ((ids if ids.dim() == 2 else ids[None]) for ids in (mask.ids, mask.of_keys))
    of_rows, of_keys = (_ends(ids, size) for ids, size in zip(both, tiles.size))
    rows, keys = [end[:, None, :, None] for end in of_rows], [end[:, None, None] for end in of_keys]
    some, every = _of_equal(*rows, *keys)
    return Known(some & (keys[1] >= 0), every & (keys[0] >= 0))


def _of_intervals(mask: HiddenRows | HiddenKeys, tiles: _Tiles) -> Known:
    """From the least and the greatest start and end of the intervals of a tile."""
    of_rows = isinstance(mask, HiddenRows)
    own = tiles.size[1] if of_rows else tiles.size[0]
    intervals = mask.intervals[(None,) * (4 - mask.intervals.dim())]
    (start_least, start_most), (end_least, end_most) = (
        [end[..., None, :] if of_rows else end[..., None] for end in _ends(intervals[..., side], own)]
        for side in (0, 1)
    )
    if of_rows:
        first, last = tiles.row_first, tiles.row_last
    else:
        first, last = tiles.key_first, tiles.key_last
    some = (start_most > first) | (end_least <= last)
    return Known(some, (start_least > last) | (end_most <= first))


def _ends(numbers: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """The least and the greatest of each ``size`` numbers along the last dimension."""
    count = -(-numbers.shape[-1] // size)
    if missing := -numbers.shape[-1] % size:
        numbers = torch.cat([numbers, numbers[..., -1:].expand(*numbers.shape[:-1], missing)], -1)
    parts = numbers.unflatten(-1, (count, size))
    return parts.amin(-1), parts.amax(-1)
