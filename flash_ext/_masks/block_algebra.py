"""Expressions of block masks as one block mask: blocks against blocks, bits against bits."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from .block_mask import BlockMask, packed_bits, unpacked
from .value import And, Mask, Not, Or, Sizes, leaves


def value_of(mask: Mask, sizes: Sizes) -> BlockMask:
    """An expression of block masks as one, in blocks of the largest size that divides those of all.

    Raises:
        ValueError: a union in a packed call has parts that end differently.
    """
    if isinstance(mask, BlockMask):
        return mask
    given = [leaf for leaf in leaves(mask) if isinstance(leaf, BlockMask)]
    rows, cols = (math.gcd(*sides) for sides in zip(*(leaf.block_size for leaf in given)))
    ready = {id(leaf): _trimmed(refined(leaf, (rows, cols)), sizes) for leaf in given}
    if sizes.packed and any(isinstance(part, Or) for part in _nodes(mask)):
        ends = {_extent(leaf) for leaf in given}
        if len(ends) > 1:
            raise ValueError(
                f"{mask!r}: a union of block masks needs the same number of rows and keys in all of them in "
                f"packed calls, got {' and '.join(map(str, sorted(ends)))}."
            )

    def evaluated(part: Mask, negated: bool) -> BlockMask:
        if isinstance(part, Not):
            return evaluated(part.mask, not negated)
        if isinstance(part, (And, Or)):
            total = evaluated(part.masks[0], negated)
            for other in part.masks[1:]:
                join = _conjunction if isinstance(part, And) != negated else _disjunction
                total = join(total, evaluated(other, negated))
            return total
        return _inverse(ready[id(part)]) if negated else ready[id(part)]

    return evaluated(mask, False)


def _nodes(mask: Mask) -> Iterator[Mask]:
    yield mask
    for part in mask.masks if isinstance(mask, (And, Or)) else [mask.mask] if isinstance(mask, Not) else []:
        yield from _nodes(part)


def _inverse(mask: BlockMask) -> BlockMask:
    """What the mask hides. Cut blocks stay cut."""
    if mask.bits is None or mask.index is None:
        return BlockMask(~mask.blocks, mask.block_size)
    blocks = ~mask.blocks | (mask.index >= 0)
    return BlockMask._of(blocks, mask.block_size, ~mask.bits, mask.index, mask.lengths)


def _disjunction(a: BlockMask, b: BlockMask) -> BlockMask:
    return _inverse(_conjunction(_inverse(a), _inverse(b)))


def _conjunction(a: BlockMask, b: BlockMask) -> BlockMask:
    rows, cols = a.block_size
    row_blocks, key_blocks = (min(n) for n in zip(a.blocks.shape[2:], b.blocks.shape[2:]))
    blocks = a.blocks[:, :, :row_blocks, :key_blocks] & b.blocks[:, :, :row_blocks, :key_blocks]
    if a.bits is None and b.bits is None:
        return BlockMask(blocks, (rows, cols))
    found = [_places(mask, row_blocks, key_blocks) for mask in (a, b)]
    cut = blocks & ((found[0][1] >= 0) | (found[1][1] >= 0))
    own = []
    for bits, places in found:
        full = bits.new_full((1, rows, -(-cols // 32)), -1)
        places = torch.where(places >= 0, places, len(bits)).expand_as(blocks)
        own.append(torch.cat([bits, full])[places[cut]])
    index = torch.full_like(blocks, -1, dtype=torch.int32)
    index[cut] = torch.arange(len(own[0]), dtype=torch.int32, device=blocks.device)
    return BlockMask._of(blocks, (rows, cols), own[0] & own[1], index, _shorter(a, b))


def _trimmed(mask: BlockMask, sizes: Sizes) -> BlockMask:
    """Without blocks beyond the lengths of the call, which a finer size may leave."""
    if sizes.packed:
        return mask
    ends = [-(-length // size) for length, size in zip((sizes.q_len, sizes.k_len), mask.block_size)]
    blocks, index = (t if t is None else t[:, :, : ends[0], : ends[1]] for t in (mask.blocks, mask.index))
    assert blocks is not None
    return BlockMask._of(blocks, mask.block_size, mask.bits, index, mask.lengths)


def refined(mask: BlockMask, size: tuple[int, int]) -> BlockMask:
    """The same mask in blocks of a size that divides its own."""
    down, across = (own // new for own, new in zip(mask.block_size, size))
    if (down, across) == (1, 1):
        return mask
    blocks = mask.blocks.repeat_interleave(down, 2).repeat_interleave(across, 3)
    if mask.bits is None or mask.index is None:
        return BlockMask(blocks, size)
    elements = unpacked(mask.bits, mask.block_size[1])
    parts = elements.unflatten(2, (across, size[1])).unflatten(1, (down, size[0]))
    bits = packed_bits(parts.transpose(2, 3).flatten(0, 2))
    index = mask.index.repeat_interleave(down, 2).repeat_interleave(across, 3)
    steps = torch.arange(index.shape[2], device=index.device, dtype=torch.int32)[:, None] % down * across
    steps = steps + torch.arange(index.shape[3], device=index.device, dtype=torch.int32) % across
    index = torch.where(index >= 0, index * (down * across) + steps, -1)
    return BlockMask._of(blocks, size, bits, index, mask.lengths)


def _places(mask: BlockMask, row_blocks: int, key_blocks: int) -> tuple[Tensor, Tensor]:
    """The bits, and for each block its place in them or -1."""
    if mask.bits is None or mask.index is None:
        rows, cols = mask.block_size
        bits = torch.empty(0, rows, -(-cols // 32), dtype=torch.int32, device=mask.blocks.device)
        return bits, torch.full_like(mask.blocks, -1, dtype=torch.int32)[:, :, :row_blocks, :key_blocks]
    return mask.bits, mask.index[:, :, :row_blocks, :key_blocks]


def _extent(mask: BlockMask) -> tuple[int, int]:
    """Rows and keys beyond which everything is hidden."""
    covered = [n * size for n, size in zip(mask.blocks.shape[2:], mask.block_size)]
    lengths = mask.lengths or (None, None)
    rows, keys = (most if n is None else n for n, most in zip(lengths, covered))
    return rows, keys


def _shorter(a: BlockMask, b: BlockMask) -> tuple[int | None, int | None]:
    """Lengths of what both show. Where only one ends inside its last block, so does the result."""
    rows, keys = (
        min((n for n in side if n is not None), default=None)
        for side in zip(a.lengths or (None, None), b.lengths or (None, None))
    )
    return rows, keys
