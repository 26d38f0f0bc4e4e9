"""Block-sparse attention: which blocks of the score matrix take part, and how to say it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK_GRANULE = 16  # block sizes are multiples of it

# rule(b, h, q_idx, k_idx) -> bool: index tensors (int64) that broadcast with each other in, True where the
# query sees the key out.
Rule = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class BlockMask:
    """A map of the score blocks that take part; blocks left out cost no time, forward or backward.

    Build one from the map itself, or with :meth:`from_dense`, :meth:`from_rule` or :meth:`from_torch`. Where
    the rule or the mask cuts through a block, that block stays in the map and ``elements`` says which of its
    scores count; a mask made of whole blocks carries no ``elements`` and needs no memory beyond the map.
    Building looks at values, so it waits for the device: build once, outside graphs, and reuse.

    Rows and keys count from the start of each sequence, whatever the alignment of a causal mask. Combining
    with ``causal``, ``window``, ``attn_mask`` and everything else keeps what all of them let through; for a
    causal block pattern, a map of whole blocks with ``causal=True`` is cheaper than a rule that says both.

    Source: block-sparse attention, section 3.3 of Dao et al. 2022, https://arxiv.org/abs/2205.14135.

    Args:
        blocks: (batch or 1, num_heads or 1, row blocks, key blocks) bool, query heads; fewer dimensions are
            completed with 1 from the left. Dense calls need ceil(seqlen_q / rows) row blocks and
            ceil(seqlen_k / cols) key blocks; packed ones may have any number, and what lies beyond is hidden.
        block_size: (rows, cols) of one block, or one number for both; positive multiples of 16.
        elements: bool mask like ``attn_mask``, ANDed with the map; None when whole blocks say everything.

    Raises:
        TypeError, ValueError: an argument has a dtype, shape or value that does not fit.
    """

    def __init__(
        self, blocks: Tensor, block_size: int | tuple[int, int] = 128, elements: Tensor | None = None
    ) -> None:
        _check_bool(blocks, "blocks")
        if not 2 <= blocks.dim() <= 4:
            raise ValueError(
                "blocks must have shape (batch, num_heads, row blocks, key blocks), got "
                f"{tuple(blocks.shape)}."
            )
        if elements is not None:
            _check_bool(elements, "elements")
        self.blocks = with_leading(blocks, 4)
        self.block_size = checked_block_size(block_size)
        self.elements = elements

    @classmethod
    def from_dense(cls, mask: Tensor, block_size: int | tuple[int, int] = 128) -> BlockMask:
        """The blocks in which a bool mask has any True; ``elements`` if it cuts through one of them.

        Args:
            mask: bool (..., seqlen_q, seqlen_k) of 2 to 4 dimensions, True = take part.
            block_size: as in :class:`BlockMask`.
        """
        _check_bool(mask, "mask")
        if not 2 <= mask.dim() <= 4:
            raise ValueError(
                f"mask must have shape (batch, num_heads, seqlen_q, seqlen_k), got {tuple(mask.shape)}."
            )
        mask, size = with_leading(mask, 4), checked_block_size(block_size)
        some, whole = _seen(mask, size), ~_seen(~mask, size)
        return cls(some, size, mask if bool((some & ~whole).any()) else None)

    @classmethod
    def from_rule(
        cls,
        rule: Rule,
        batch: int | None,
        num_heads: int | None,
        seqlen_q: int,
        seqlen_k: int,
        block_size: int | tuple[int, int] = 128,
        device: torch.device | str = "cpu",
    ) -> BlockMask:
        """The blocks that a rule leaves, found strip by strip.

        Args:
            rule: function of four int64 index tensors b, h, q_idx, k_idx that broadcast with each other;
                returns bool, True where the query sees the key.
            batch, num_heads: sizes of the map; None when the rule does not look at b or h.
            seqlen_q, seqlen_k: lengths the map is for.
            block_size: as in :class:`BlockMask`.
            device: where the map is built and lives.
        """
        rows, cols = checked_block_size(block_size)
        shape = (batch or 1, num_heads or 1)

        def strip(start: int) -> Tensor:
            end = min(start + rows, seqlen_q)
            sides = (range(shape[0]), range(shape[1]), range(start, end), range(seqlen_k))
            index = [torch.arange(s.start, s.stop, device=device) for s in sides]
            seen = rule(*(i.view([-1 if at == dim else 1 for at in range(4)]) for dim, i in enumerate(index)))
            _check_bool(seen, "the result of rule")
            return seen.expand(*shape, end - start, seqlen_k)

        starts = range(0, seqlen_q, rows)
        some, whole = [torch.empty(*shape, 0, -(-seqlen_k // cols), dtype=torch.bool, device=device)], True
        for start in starts:
            seen = strip(start)
            some.append(_seen(seen, (rows, cols)))
            whole &= not bool((some[-1] & _seen(~seen, (rows, cols))).any())
        elements = None if whole else torch.cat([strip(start) for start in starts], dim=2)
        return cls(torch.cat(some, dim=2), (rows, cols), elements)

    @classmethod
    def from_torch(cls, block_mask: Any) -> BlockMask:
        """The same mask as a ``torch.nn.attention.flex_attention.BlockMask``.

        Its full blocks need its map only; for the others its ``mask_mod`` is evaluated.

        Raises:
            TypeError: it is none, or its numbers and indices of blocks are no tensors of integers.
            ValueError: their shapes or devices do not fit each other or its lengths, a number is negative or
                above the number of key blocks, or an index that is used is outside them. Entries beyond the
                number are not used, and may hold anything.
        """
        from torch.nn.attention.flex_attention import BlockMask as TorchBlockMask
        from torch.nn.attention.flex_attention import create_mask

        if not isinstance(block_mask, TorchBlockMask):
            raise TypeError(
                "block_mask must be a torch.nn.attention.flex_attention.BlockMask, got "
                f"{type(block_mask).__qualname__}."
            )
        rows, cols = checked_block_size(block_mask.BLOCK_SIZE)
        seqlen_q, seqlen_k = block_mask.seq_lengths
        partial, full = _maps_of(block_mask)
        if partial.shape[2] * rows < seqlen_q or partial.shape[3] * cols < seqlen_k:
            raise ValueError(
                f"block_mask has {partial.shape[2]} row blocks of {rows} and {partial.shape[3]} key blocks "
                f"of {cols}, too few for its lengths {seqlen_q} and {seqlen_k}."
            )
        if not bool(partial.any()):
            return cls(full, (rows, cols))
        batch, num_heads = partial.shape[:2]
        seen = create_mask(block_mask.mask_mod, batch, num_heads, seqlen_q, seqlen_k, partial.device)
        whole, cut = (
            t.repeat_interleave(rows, 2).repeat_interleave(cols, 3)[:, :, :seqlen_q, :seqlen_k]
            for t in (full, partial)
        )
        return cls.from_dense(whole | (cut & seen), (rows, cols))

    def to(self, device: torch.device | str) -> BlockMask:
        """The same mask on another device."""
        elements = None if self.elements is None else self.elements.to(device)
        return BlockMask(self.blocks.to(device), self.block_size, elements)

    def density(self) -> float:
        """Share of the blocks that take part, 0..1."""
        return float(self.blocks.double().mean()) if self.blocks.numel() else 0.0

    def __repr__(self) -> str:
        kind = "whole blocks" if self.elements is None else "with element mask"
        return f"BlockMask(blocks {tuple(self.blocks.shape)}, block_size {self.block_size}, {kind})"


def checked_block_size(block_size: Any) -> tuple[int, int]:
    """(rows, cols), or a ValueError or TypeError."""
    pair = (block_size, block_size) if isinstance(block_size, int) else block_size
    is_pair = isinstance(pair, (tuple, list)) and len(pair) == 2
    if not is_pair or not all(isinstance(size, int) and not isinstance(size, bool) for size in pair):
        raise TypeError(f"block_size must be an int or a pair of ints (rows, cols), got {block_size!r}.")
    if any(size <= 0 or size % BLOCK_GRANULE for size in pair):
        raise ValueError(f"block_size must be positive multiples of {BLOCK_GRANULE}, got {block_size!r}.")
    return pair[0], pair[1]


def with_leading(t: Tensor, dims: int) -> Tensor:
    """``t`` with dimensions of size 1 in front, up to ``dims``."""
    while t.dim() < dims:
        t = t.unsqueeze(0)
    return t


def _check_bool(t: Any, name: str) -> None:
    if not isinstance(t, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(t).__qualname__}.")
    if t.dtype != torch.bool:
        raise TypeError(
            f"{name} must be torch.bool (True = take part), got {t.dtype}. Convert it with .bool()."
        )


def _seen(mask: Tensor, size: tuple[int, int]) -> Tensor:
    """(b, h, seqlen_q, seqlen_k) to (b, h, row blocks, key blocks): whether a block has any True.

    Blocks at the end may be cut short; what is missing counts as False.
    """
    (rows, cols), (seqlen_q, seqlen_k) = size, mask.shape[2:]
    padded = F.pad(mask, (0, -seqlen_k % cols, 0, -seqlen_q % rows))
    return padded.unflatten(3, (-1, cols)).unflatten(2, (-1, rows)).any(5).any(3)


def _maps_of(block_mask: Any) -> tuple[Tensor, Tensor]:
    """The blocks that the rule of a torch BlockMask cuts, and the full ones: bool (b, h, row, column).

    On a GPU an index outside, once it is followed, takes the GPU from the process. So values are compared
    first, on their device, and the answers are read back together.
    """
    maps: list[Tensor] = []
    names, wrong = [], []
    for kind in ("kv", "full_kv"):
        counts, indices = (getattr(block_mask, f"{kind}_{what}") for what in ("num_blocks", "indices"))
        if kind == "full_kv" and counts is None and indices is None:
            continue
        counts, indices = _checked_lists(kind, counts, indices)
        if maps and (indices.shape, indices.device) != (maps[0].shape, maps[0].device):
            raise ValueError(
                "block_mask.full_kv_indices must have the shape and device of kv_indices, "
                f"{tuple(maps[0].shape)} on {maps[0].device}, got {tuple(indices.shape)} on {indices.device}."
            )
        columns = indices.shape[3]
        used = torch.arange(columns, device=indices.device) < counts[..., None]
        outside = (indices < 0) | (indices >= columns)
        # What is not used, or not there, is sent to one more column, which is dropped.
        target = indices.where(used & ~outside, columns)
        maps.append(used.new_zeros(*used.shape[:3], columns + 1).scatter(3, target, True)[..., :-1])
        names += [f"{kind}_num_blocks", f"{kind}_indices"]
        wrong += [((counts < 0) | (counts > columns)).any(), (used & outside).any()]
    for name, is_wrong in zip(names, torch.stack(wrong).tolist()):
        if is_wrong:
            limit = f"{columns}" if name.endswith("num_blocks") else f"{columns - 1} where they are used"
            raise ValueError(f"block_mask.{name} must be from 0 to {limit}, and holds other values.")
    return maps[0], maps[1] if len(maps) == 2 else torch.zeros_like(maps[0])


def _checked_lists(kind: str, counts: Any, indices: Any) -> tuple[Tensor, Tensor]:
    """(b, h, row blocks) and (b, h, row blocks, key blocks), int64, of one kind of blocks."""
    for name, t in ((f"{kind}_num_blocks", counts), (f"{kind}_indices", indices)):
        if not isinstance(t, Tensor):
            raise TypeError(f"block_mask.{name} must be a tensor of integers, got {type(t).__qualname__}.")
        if t.dtype == torch.bool or t.is_floating_point() or t.is_complex():
            raise TypeError(f"block_mask.{name} must be a tensor of integers, got {t.dtype}.")
    if not 2 <= indices.dim() <= 4 or counts.shape != indices.shape[:-1] or counts.device != indices.device:
        raise ValueError(
            f"block_mask.{kind}_num_blocks must have the shape of {kind}_indices without its last dimension, "
            f"and its device: got {tuple(counts.shape)} on {counts.device} for {tuple(indices.shape)} on "
            f"{indices.device}."
        )
    return with_leading(counts, 3).long(), with_leading(indices, 4).long()
