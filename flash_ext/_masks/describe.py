"""What a mask leaves to do, in numbers and as a picture."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .dense import piece_of, pieces, sizes_of
from .lower import Terms, terms_for
from .normal import Refused
from .tiles import known_tiles
from .value import Mask, Sizes

TILE = 128
POINTS = 512


class Description(NamedTuple):
    """What a mask leaves to do. Tiles have 128 rows and 128 keys, the last ones of a side fewer.

    Attributes:
        density: share of the pairs of a row and a key that are shown, 0..1.
        skipped: tiles that are hidden in full.
        cut: tiles of which a part is shown.
        whole: tiles that are shown in full.
        memory: bytes of the mask's tensors in the form that kernels read; None if no kernel executes it.
        refusal: why no kernel executes it, or None.
    """

    density: float
    skipped: int
    cut: int
    whole: int
    memory: int | None
    refusal: str | None

    def __str__(self) -> str:
        tiles = self.skipped + self.cut + self.whole
        lines = [
            f"{100 * self.density:.1f} % of the pairs are shown",
            f"{tiles} tiles: {self.skipped} skipped, {self.cut} cut, {self.whole} whole",
            f"{self.memory} bytes" if self.refusal is None else self.refusal,
        ]
        return "\n".join(lines)


def describe(mask: Mask, q_len: int, k_len: int, batch: int | None, num_heads: int | None) -> Description:
    """See :meth:`flash_ext.masks.Mask.describe`."""
    sizes = sizes_of(mask, q_len, k_len, batch, num_heads)
    device = mask.device or torch.device("cpu")
    # Along dimensions in which the mask repeats one entry is counted for all.
    lead = mask._lead(False)
    own = sizes._replace(batch=lead[0], num_heads=lead[1])
    repeats = sizes.batch * sizes.num_heads // max(lead[0] * lead[1], 1)
    known = known_tiles(mask, own, (TILE, TILE), device)
    wanted = (known.some & ~known.every).any(1)
    # Shown pairs, and tiles that are skipped, cut and whole: first of those that need no look at their pairs.
    every, some = ((x & ~wanted[:, None]).sum((0, 1)) for x in (known.every, known.some))
    heights, widths = (
        (length - torch.arange(0, length, TILE, device=device)).clamp(max=TILE) for length in (q_len, k_len)
    )
    skipped = known.some.numel() - own.num_heads * wanted.sum() - some.sum()
    pairs = (every * heights[:, None] * widths).sum()
    counts = torch.stack([pairs, skipped, torch.zeros_like(pairs), every.sum()])
    for b, rows, keys in pieces(own, TILE, TILE, wanted):
        shown = piece_of(mask, own, b, rows, keys, device).sum(1, dtype=torch.int32)
        tiles = torch.nn.functional.pad(shown, (0, -len(keys) % TILE)).unflatten(1, (-1, TILE)).sum(2)
        full = torch.full(tiles.shape[1:], TILE, device=device)
        full[-1] = len(keys) - TILE * (len(full) - 1)
        whole, skipped = (tiles == full * len(rows)).sum(), (tiles == 0).sum()
        counts += torch.stack([tiles.sum(), skipped, tiles.numel() - whole - skipped, whole])
    shown_pairs, skipped_tiles, cut_tiles, whole_tiles = (counts * repeats).tolist()
    total = sizes.batch * sizes.num_heads * q_len * k_len
    memory, refusal = None, None
    try:
        memory = _bytes(terms_for(mask, None, sizes), sizes)
    except Refused as error:
        refusal = str(error)
    density = shown_pairs / total if total else 0.0
    return Description(density, skipped_tiles, cut_tiles, whole_tiles, memory, refusal)


def _bytes(terms: Terms, sizes: Sizes) -> int:
    """One word of 32 bits a number, as csrc/condensed.h has them.

    Bits of masks with their summaries by 64 rows, ids and intervals with those by 32, a bit for 16 x 16
    scores of a block map, and its cut blocks written out.
    """
    words = 0
    if terms.prefix_lens is not None:
        words += sizes.batch
    if terms.documents is not None:
        of_rows, of_keys = terms.documents
        words += sizes.batch * _ids(sizes.q_len)
        if terms.keys is not None or of_keys is not of_rows:  # hidden keys get ids of their own
            words += sizes.batch * _ids(sizes.k_len)
    elif terms.keys is not None:
        words += _bits((_own_shape(terms.keys)[0], 1, 1, sizes.k_len))
    for intervals in (terms.hidden_rows, terms.hidden_keys):
        if intervals is not None:
            *lead, length, numbers = _own_shape(intervals)
            of_head = -(-numbers * length // 4) * 4 + 2 * numbers * -(-length // 32)
            words += math.prod(lead) * of_head
    shapes = [] if terms.dense is None else [(1, 1, 1, *_own_shape(terms.dense))[-4:]]
    if terms.blocks is not None:
        batch, num_heads, row_blocks, key_blocks = _own_shape(terms.blocks.blocks)
        granules = [n * size // 16 for n, size in zip((row_blocks, key_blocks), terms.blocks.block_size)]
        words += batch * num_heads * granules[0] * -(-granules[1] // 32)
        if terms.blocks.index is not None:  # cut blocks are written out
            shapes.append((*terms.blocks.index.shape[:2], sizes.q_len, sizes.k_len))
    if shapes:
        words += _bits(tuple(torch.broadcast_shapes(*shapes)))
    return 4 * words


def _own_shape(t: Tensor) -> tuple[int, ...]:
    """With 1 where an expand repeats."""
    return tuple(1 if stride == 0 else n for n, stride in zip(t.shape, t.stride()))


def _bits(shape: tuple[int, ...]) -> int:
    batch, num_heads, rows, cols = shape
    return batch * num_heads * (rows + 2 * -(-rows // 64)) * -(-cols // 32)


def _ids(length: int) -> int:
    return length + length % 2 + 2 * -(-length // 32)


def plot(mask: Mask, q_len: int, k_len: int, ax: Any, batch_index: int, head_index: int) -> Any:
    """See :meth:`flash_ext.masks.Mask.plot`."""
    try:
        from matplotlib import pyplot
    except ImportError as error:
        raise ImportError('plot needs matplotlib: pip install "flash_ext[demo]".') from error
    sizes = sizes_of(mask, q_len, k_len, None, None)
    batch_index, head_index = (i if n > 1 else 0 for i, n in zip((batch_index, head_index), sizes[1:3]))
    indices = ("batch_index", batch_index, sizes.batch), ("head_index", head_index, sizes.num_heads)
    for name, index, size in indices:
        if not 0 <= index < size:
            raise ValueError(f"{name} must be from 0 to {size - 1}, got {index}.")
    device = mask.device or torch.device("cpu")
    rows_of, keys_of = (-(-length // POINTS) for length in (q_len, k_len))
    image = torch.zeros(-(-q_len // rows_of) if q_len else 0, -(-k_len // keys_of) if k_len else 0)
    own = sizes._replace(batch=1)
    for _, rows, keys in pieces(own, max(rows_of, 1), max(keys_of, 1)):
        shown = piece_of(mask, own, batch_index, rows, keys, device)[head_index].float().mean(0)
        padded = torch.nn.functional.pad(shown, (0, -len(keys) % keys_of)).unflatten(0, (-1, keys_of)).sum(1)
        there = torch.full_like(padded, keys_of)
        there[-1] = len(keys) - keys_of * (len(there) - 1)
        start = keys.start // keys_of
        image[rows.start // rows_of, start : start + len(there)] = (padded / there).cpu()
    if ax is None:
        ax = pyplot.figure().add_subplot()
    extent = (0, k_len, q_len, 0)
    ax.imshow(image.numpy(), cmap="Blues", vmin=0, vmax=1, extent=extent, interpolation="nearest")
    ax.set_xlabel("key")
    ax.set_ylabel("row")
    return ax
