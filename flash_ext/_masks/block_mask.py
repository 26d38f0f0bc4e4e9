"""Block-sparse attention: which blocks of the score matrix take part, and how to say it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .dense import piece_of, pieces, sizes_of
from .tiles import Known, known_tiles
from .value import Mask, Points, Sizes

BLOCK_GRANULE = 16  # block sizes are multiples of it

# rule(b, h, q_idx, k_idx) -> bool: index tensors (int64) that broadcast with each other in, True where the
# query sees the key out.
Rule = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

# piece(b, rows, keys) -> (num_heads or 1, rows, keys) bool: a part of the mask of one batch entry.
Piece = Callable[[int, range, range], Tensor]


class BlockMask(Mask):
    """A map of the score blocks that take part; blocks left out cost no time, forward or backward.

    Build one from the map itself, or with :meth:`from_mask`, :meth:`from_dense`, :meth:`from_rule` or
    :meth:`from_torch`. Where the mask cuts through a block, that block stays in the map and keeps a bit for
    each of its scores; whole blocks need no memory beyond the map. Building looks at values, so it waits for
    the device: build once, outside graphs, and reuse.

    Rows and keys count from the start of each sequence, whatever the alignment of a causal mask. Combining
    with other masks keeps what all of them let through; for a causal block pattern, a map of whole blocks
    with a causal mask is cheaper than a rule that says both.

    Source: block-sparse attention, section 3.3 of Dao et al. 2022, https://arxiv.org/abs/2205.14135.

    Args:
        blocks: (batch or 1, num_heads or 1, row blocks, key blocks) bool, query heads; fewer dimensions are
            completed with 1 from the left. Dense calls need ceil(q_len / rows) row blocks and
            ceil(k_len / cols) key blocks; packed ones may have any number, and what lies beyond is hidden,
            also by ``~``.
        block_size: (rows, cols) of one block, or one number for both; positive multiples of 16.
        elements: bool mask that broadcasts to (batch, num_heads, q_len, k_len), ANDed with the map; None when
            whole blocks say everything. Blocks in which it is False everywhere leave the map.

    Attributes:
        blocks: the map, of 4 dimensions.
        block_size: (rows, cols).
        bits: (cut blocks, rows, ceil(cols / 32)) int32, bit i of word w is key 32 w + i; None if the mask
            says nothing inside blocks.
        index: int32 like ``blocks``, the place of a block in ``bits`` or -1; None with ``bits``.
        lengths: (q_len, k_len) that ``bits`` are for, None for a side on which they repeat; None with
            ``bits``.

    Raises:
        TypeError, ValueError: an argument has a dtype, shape or value that does not fit.
    """

    __slots__ = ("blocks", "block_size", "bits", "index", "lengths")
    _FIELDS = ("blocks", "block_size", "bits", "index", "lengths")
    _CHILDREN = ("blocks", "bits", "index")
    blocks: Tensor
    block_size: tuple[int, int]
    bits: Tensor | None
    index: Tensor | None
    lengths: tuple[int | None, int | None] | None

    def __init__(
        self, blocks: Tensor, block_size: int | tuple[int, int] = 128, elements: Tensor | None = None
    ) -> None:
        _check_bool(blocks, "blocks")
        if not 2 <= blocks.dim() <= 4:
            raise ValueError(
                "blocks must have shape (batch, num_heads, row blocks, key blocks), got "
                f"{tuple(blocks.shape)}."
            )
        blocks, (rows, cols) = with_leading(blocks, 4), checked_block_size(block_size)
        if elements is None:
            self._fill(blocks, (rows, cols), None, None, None)
            return
        _check_bool(elements, "elements")
        if not 1 <= elements.dim() <= 4:
            raise ValueError(f"elements must have 1 to 4 dimensions, got shape {tuple(elements.shape)}.")
        elements = with_leading(elements, 4)
        covered = blocks.shape[2] * rows, blocks.shape[3] * cols
        own_q, own_k = (None if n == 1 else min(n, most) for n, most in zip(elements.shape[2:], covered))
        q_len, k_len = (most if n is None else n for n, most in zip((own_q, own_k), covered))
        batch, num_heads = torch.broadcast_shapes(blocks.shape[:2], elements.shape[:2])
        wide = elements[:, :, :q_len, :k_len].expand(batch, num_heads, q_len, k_len)

        def piece(b: int, of_rows: range, of_keys: range) -> Tensor:
            return wide[b, :, of_rows.start : of_rows.stop, of_keys.start : of_keys.stop]

        sizes = Sizes(False, batch, num_heads, q_len, k_len)
        seen = _condensed(piece, sizes, (rows, cols), blocks.device)
        # Of a length below the map's, what lies beyond is hidden.
        missing = (0, blocks.shape[3] - seen.blocks.shape[3], 0, blocks.shape[2] - seen.blocks.shape[2])
        kept = blocks & F.pad(seen.blocks, missing)
        index = torch.full_like(seen.blocks, -1, dtype=torch.int32) if seen.index is None else seen.index
        index = F.pad(index, missing, value=-1).masked_fill(~kept, -1)
        bits = index.new_empty(0, rows, -(-cols // 32)) if seen.bits is None else seen.bits
        self._fill(kept, (rows, cols), bits, index, (own_q, own_k))

    @classmethod
    def _of(
        cls, blocks: Tensor, size: tuple[int, int], bits: Tensor | None, index: Tensor | None,
        lengths: tuple[int | None, int | None] | None,
    ) -> BlockMask:  # fmt: skip
        made = object.__new__(cls)
        made._fill(blocks, size, bits, index, lengths)
        return made

    @classmethod
    def from_mask(
        cls,
        mask: Mask,
        q_len: int,
        k_len: int,
        *,
        batch: int | None = None,
        num_heads: int | None = None,
        block_size: int | tuple[int, int] = 128,
        device: torch.device | str | None = None,
    ) -> BlockMask:
        """Any mask of :mod:`flash_ext.masks` as blocks, also one that no kernel executes by itself.

        It is evaluated piece by piece, 4 million pairs at most, and only where a block may be cut: nothing of
        size q_len * k_len is formed.

        Args:
            mask: the mask.
            q_len, k_len: lengths the blocks are for; other lengths need others.
            batch, num_heads: None is what the mask's tensors have, 1 where they repeat.
            block_size: as in :class:`BlockMask`.
            device: where blocks are built and live; None is that of the mask's tensors, or the CPU.

        Example:
            >>> masks = flash_ext.masks
            >>> both = masks.Causal() | masks.Chunks(64)
            >>> flash_ext.masks.BlockMask.from_mask(both, 256, 256, block_size=64)
            BlockMask(blocks (1, 1, 4, 4), block_size (64, 64), whole blocks)
        """
        if not isinstance(mask, Mask):
            raise TypeError(f"mask must be a mask of flash_ext.masks, got {type(mask).__qualname__}.")
        size = checked_block_size(block_size)
        sizes = sizes_of(mask, q_len, k_len, batch, num_heads)
        own = mask.device or torch.device("cpu" if device is None else device)
        known = known_tiles(mask, sizes, size, own)

        def piece(b: int, rows: range, keys: range) -> Tensor:
            return piece_of(mask, sizes, b, rows, keys, own)

        made = _condensed(piece, sizes, size, own, known)
        return made if device is None else made.to(device)

    @classmethod
    def from_dense(cls, mask: Tensor, block_size: int | tuple[int, int] = 128) -> BlockMask:
        """The blocks in which a bool mask has any True, with the bits of those that it cuts through.

        Args:
            mask: bool (..., q_len, k_len) of 2 to 4 dimensions, True = take part.
            block_size: as in :class:`BlockMask`.
        """
        _check_bool(mask, "mask")
        if not 2 <= mask.dim() <= 4:
            raise ValueError(
                f"mask must have shape (batch, num_heads, seqlen_q, seqlen_k), got {tuple(mask.shape)}."
            )
        wide = with_leading(mask, 4)
        batch, num_heads, q_len, k_len = wide.shape

        def piece(b: int, rows: range, keys: range) -> Tensor:
            return wide[b, :, rows.start : rows.stop, keys.start : keys.stop]

        sizes = Sizes(False, batch, num_heads, q_len, k_len)
        return _condensed(piece, sizes, checked_block_size(block_size), mask.device)

    @classmethod
    def from_rule(
        cls,
        rule: Rule,
        batch: int | None,
        num_heads: int | None,
        q_len: int,
        k_len: int,
        block_size: int | tuple[int, int] = 128,
        device: torch.device | str = "cpu",
    ) -> BlockMask:
        """The blocks that a rule leaves, found piece by piece.

        Args:
            rule: function of four int64 index tensors b, h, q_idx, k_idx that broadcast with each other;
                returns bool, True where the query sees the key.
            batch, num_heads: sizes of the map; None when the rule does not look at b or h.
            q_len, k_len: lengths the map is for.
            block_size: as in :class:`BlockMask`.
            device: where the map is built and lives.
        """
        sizes = Sizes(False, batch or 1, num_heads or 1, q_len, k_len)

        def piece(b: int, rows: range, keys: range) -> Tensor:
            sides = (range(b, b + 1), range(sizes.num_heads), rows, keys)
            index = [torch.arange(s.start, s.stop, device=device) for s in sides]
            seen = rule(*(i.view([-1 if at == dim else 1 for at in range(4)]) for dim, i in enumerate(index)))
            _check_bool(seen, "the result of rule")
            return seen.expand(1, sizes.num_heads, len(rows), len(keys))[0]

        return _condensed(piece, sizes, checked_block_size(block_size), device)

    @classmethod
    def from_torch(cls, block_mask: Any) -> BlockMask:
        """The same mask as a ``torch.nn.attention.flex_attention.BlockMask``.

        Its full blocks need its map only; for the others its ``mask_mod`` is evaluated, piece by piece.

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
        sizes = Sizes(False, partial.shape[0], partial.shape[1], seqlen_q, seqlen_k)

        def piece(b: int, of_rows: range, of_keys: range) -> Tensor:
            def mask_mod(batch: Tensor, h: Tensor, row: Tensor, key: Tensor) -> Tensor:
                return block_mask.mask_mod(batch + b, h, row + of_rows.start, key + of_keys.start)

            lengths = len(of_rows), len(of_keys)
            seen = create_mask(mask_mod, 1, sizes.num_heads, *lengths, device=str(partial.device))[0]
            at = slice(of_rows.start // rows, of_rows.stop // rows + 1), slice(of_keys.start // cols, None)
            whole, cut = (
                t[b][:, at[0], at[1]].repeat_interleave(rows, 1).repeat_interleave(cols, 2)
                [:, : lengths[0], : lengths[1]]
                for t in (full, partial)
            )  # fmt: skip
            return whole | (cut & seen)

        return _condensed(piece, sizes, (rows, cols), partial.device, Known(partial | full, full & ~partial))

    @property
    def elements(self) -> Tensor | None:
        """The bits written out, bool (batch or 1, num_heads or 1, q_len, k_len); None without bits.

        It is made at each look, and costs a byte for each pair of a row and a key.
        """
        return self._elements_of(slice(None))

    def _elements_of(self, row_blocks: slice) -> Tensor | None:
        """The same of the rows of some row blocks."""
        if self.bits is None or self.index is None or self.lengths is None:
            return None
        blocks, index = self.blocks[:, :, row_blocks], self.index[:, :, row_blocks]
        (rows, cols), (q_len, k_len) = self.block_size, self.lengths
        if q_len is not None:
            q_len = max(q_len - rows * (row_blocks.start or 0), 0)
        at = torch.where(index >= 0, index, len(self.bits) + (~blocks).int())
        listed = unpacked(self.bits, cols)
        ends = torch.stack([listed.new_ones(rows, cols), listed.new_zeros(rows, cols)])
        spread = torch.cat([listed, ends])[at].transpose(3, 4)
        return spread.flatten(4, 5).flatten(2, 3)[:, :, :q_len, :k_len]

    def density(self) -> float:
        """Share of the blocks that take part, 0..1."""
        return float(self.blocks.double().mean()) if self.blocks.numel() else 0.0

    def __repr__(self) -> str:
        kind = "whole blocks" if self.bits is None else f"{len(self.bits)} cut blocks"
        return f"BlockMask(blocks {tuple(self.blocks.shape)}, block_size {self.block_size}, {kind})"

    def _shown(self, points: Points, negated: bool) -> Tensor:
        (rows, cols), (row_blocks, key_blocks) = self.block_size, self.blocks.shape[2:]
        m, n = points.row // rows, points.key // cols
        inside = (m < row_blocks) & (n < key_blocks)
        for number, length in zip((points.row, points.key), self.lengths or (None, None)):
            inside = inside if length is None else inside & (number < length)
        if 0 in self.blocks.shape:
            return inside & (points.row < 0)
        b, h = (
            at if n > 1 else torch.zeros_like(at)
            for at, n in zip((points.b, points.h), self.blocks.shape[:2])
        )
        at = b, h, m.clamp(max=row_blocks - 1), n.clamp(max=key_blocks - 1)
        shown = self.blocks[at]
        if self.bits is not None and self.index is not None and len(self.bits):
            place, col = self.index[at], points.key % cols
            word = self.bits[place.clamp(min=0).long(), points.row % rows, col // 32]
            shown = torch.where(place >= 0, (word >> (col % 32)) & 1 == 1, shown)
        return inside & (~shown if negated else shown)

    def _lead(self, packed: bool) -> tuple[int, int]:
        return (1 if packed else self.blocks.shape[0]), self.blocks.shape[1]

    def _check(self, sizes: Sizes) -> None:
        (rows, cols), given = self.block_size, tuple(self.blocks.shape)
        want = (sizes.batch, sizes.num_heads, -(-sizes.q_len // rows), -(-sizes.k_len // cols))
        fits = all(n in (1, size) for n, size in zip(given[:2], want))
        if not fits or (not sizes.packed and given[2:] != want[2:]):
            tail = ", any, any)" if sizes.packed else f", {want[2]}, {want[3]})"
            raise ValueError(
                f"BlockMask: blocks must have shape ({want[0]} or 1, {want[1]} or 1{tail} for blocks of "
                f"{rows} by {cols}, got {given}."
            )
        lengths = zip(self.lengths or (None, None), (sizes.q_len, sizes.k_len))
        if not sizes.packed and any(own not in (None, length) for own, length in lengths):
            raise ValueError(
                f"BlockMask: its cut blocks are for {self.lengths} rows and keys, got a call with "
                f"{(sizes.q_len, sizes.k_len)}."
            )


# ---- bits of cut blocks -------------------------------------------------------------------------------


def packed_bits(elements: Tensor) -> Tensor:
    """(..., cols) bool to (..., ceil(cols / 32)) int32."""
    if elements.shape[-1] == 0:
        return elements.to(torch.int32)
    wide = F.pad(elements, (0, -elements.shape[-1] % 32))
    eights: Tensor = wide.unflatten(-1, (wide.shape[-1] // 8, 8))
    weights = 2 ** torch.arange(8, device=elements.device, dtype=torch.uint8)
    return (eights * weights).sum(-1, dtype=torch.uint8).view(torch.int32)


def unpacked(bits: Tensor, cols: int) -> Tensor:
    """What :func:`packed_bits` was given."""
    shifts = torch.arange(32, device=bits.device, dtype=torch.int32)
    return ((bits[..., None] >> shifts) & 1).bool().flatten(-2)[..., :cols]


class _Collected:
    """Tensors that come one after the other, joined along the first dimension.

    They are copied into a few large ones. A small tensor that stays takes the place of a larger one that was
    freed, whose size fits there no more: the heap of a CPU would grow by all temporaries together.

    Args:
        like: a tensor of their type, device and further dimensions.
        most: how many rows may come.
    """

    BYTES = 1 << 26  # of a large one: malloc gives back at once what has more than 32 MB

    def __init__(self, like: Tensor, most: int) -> None:
        self.like, self.count = like, 0
        self.rows = min(max(self.BYTES // (like.shape[1:].numel() * like.element_size()), 1), most)
        self.parts: list[Tensor] = []

    def add(self, rows: Tensor) -> None:
        while len(rows):
            start = self.count % self.rows
            if start == 0:
                self.parts.append(self.like.new_empty(self.rows, *self.like.shape[1:]))
            fitting = rows[: self.rows - start]
            self.parts[-1][start : start + len(fitting)] = fitting
            self.count += len(fitting)
            rows = rows[len(fitting) :]

    def joined(self) -> Tensor:
        """All of them; nothing is kept here."""
        whole = self.like.new_empty(self.count, *self.like.shape[1:])
        for place in whole.split(self.rows):
            place.copy_(self.parts.pop(0)[: len(place)])
        return whole


def _condensed(
    piece: Piece,
    sizes: Sizes,
    size: tuple[int, int],
    device: torch.device | str,
    known: Known | None = None,
) -> BlockMask:
    """Blocks, and the bits of those that are cut; ``piece`` is asked for a part after the other.

    It is not asked for blocks that are ``known`` in all heads.
    """
    rows, cols = size
    shape = (*sizes[1:3], -(-sizes.q_len // rows), -(-sizes.k_len // cols))
    wanted = None if known is None else (known.some & ~known.every).any(1)
    blocks = torch.zeros(shape, dtype=torch.bool, device=device) if known is None else known.every.clone()
    index = torch.full(shape, -1, dtype=torch.int32, device=device)
    bits = _Collected(index.new_empty(0, rows, -(-cols // 32)), index.numel())
    for b, of_rows, of_keys in pieces(sizes, rows, cols, device, wanted):
        seen = piece(b, of_rows, of_keys)
        tiles = F.pad(seen, (0, -len(of_keys) % cols, 0, rows - len(of_rows)))
        tiles = tiles.unflatten(2, (-1, cols)).transpose(1, 2)  # (num_heads, key blocks, rows, cols)
        shown = tiles.sum((2, 3), dtype=torch.int32)
        there = torch.full(shown.shape[1:], cols, dtype=torch.int32, device=device)
        there[-1] = len(of_keys) - cols * (len(there) - 1)
        cut = (shown > 0) & (shown < there * len(of_rows))
        m, n = of_rows.start // rows, of_keys.start // cols
        blocks[b, :, m, n : n + len(there)] = shown > 0
        own = tiles[cut]
        if len(own):
            places = torch.arange(bits.count, bits.count + len(own), dtype=torch.int32, device=device)
            index[b, :, m, n : n + len(there)] = index.new_full(cut.shape, -1).masked_scatter(cut, places)
            bits.add(packed_bits(own))
    if not bits.count:
        return BlockMask(blocks, size)
    return BlockMask._of(blocks, size, bits.joined(), index, (sizes.q_len, sizes.k_len))


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
