"""What a mask leaves to do and what a bias costs, in numbers and as pictures."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .biases import Bias, DenseBias, terms_of
from .dense import grid, piece_of, pieces, sizes_of
from .documents import borders_of, says_documents_alone
from .lower import Terms, terms_for
from .normal import Refused
from .operands import may_be_copied, operands_of, sources_of_bias, with_aligned_rows
from .tiles import known_tiles
from .value import Mask, Sizes, Value

TILE = 128
POINTS = 512
LARGE_HEAD_DIM = 128  # of the calls whose copies of a bias are counted


class Description(NamedTuple):
    """What a mask leaves to do. Tiles have 128 rows and 128 keys, the last ones of a side fewer.

    Attributes:
        density: share of the pairs of a row and a key that are shown, 0..1.
        skipped: tiles that are hidden in full.
        cut: tiles of which a part is shown.
        whole: tiles that are shown in full.
        memory: bytes of the mask's tensors in the form that kernels read, and of where its documents begin if
            calls run as packed sequences; None if no kernel executes it.
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
    for b, rows, keys in pieces(own, TILE, TILE, device, wanted):
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
        terms = terms_for(mask, None, sizes)
        memory = _bytes(terms, sizes) + (_bytes_of_borders(terms, sizes) if says_documents_alone(mask) else 0)
    except Refused as error:
        refusal = str(error)
    density = shown_pairs / total if total else 0.0
    return Description(density, skipped_tiles, cut_tiles, whole_tiles, memory, refusal)


def _bytes(terms: Terms, sizes: Sizes) -> int:
    """One word of 32 bits a number, as csrc/condensed.h has them.

    Bits of masks, from 64 rows on twice, with their summaries by 64 rows, ids and intervals with those by 32,
    a bit for 16 x 16 scores of a block map, and its cut blocks written out.
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


def _bytes_of_borders(terms: Terms, sizes: Sizes) -> int:
    """Of what calls keep as the borders of documents, one tensor where both sides have the same."""
    assert terms.documents is not None
    borders = borders_of(terms.documents[0].expand(sizes.batch, sizes.q_len)) or ()
    return sum(t.nbytes for t in {id(t): t for t in borders}.values())


def _own_shape(t: Tensor) -> tuple[int, ...]:
    """With 1 where an expand repeats."""
    return tuple(1 if stride == 0 else n for n, stride in zip(t.shape, t.stride()))


def _bits(shape: tuple[int, ...]) -> int:
    batch, num_heads, rows, cols = shape
    groups = -(-rows // 64)
    if cols == 1:
        return batch * num_heads * (rows + 2 * groups)
    return batch * num_heads * (rows + (2 if rows < 64 else 66) * groups) * -(-cols // 128) * 4


def _ids(length: int) -> int:
    return length + length % 2 + 2 * -(-length // 32)


class BiasDescription(NamedTuple):
    """What a bias costs. Where kernels do not execute it, its bytes are None.

    Attributes:
        memory: bytes that a forward reads. A DenseBias has its own dtype, and one entry where it repeats.
            Slopes, and the entries of all distances of a RelativePosition, are float32.
        kept: bytes of the copies that a call on a GPU keeps for later ones. Each mask, ``causal`` and
            ``window_size`` has its own. Copied are a DenseBias whose rows do not begin on 16 bytes, the sum
            of several, slopes of another dtype or with gaps, and the entries of all distances. Nothing is
            kept of a tensor that requires a gradient. The CPU reads rows as they are, and keeps no copy of a
            single DenseBias. Nor does a GPU for up to 64 rows and keys, or up to 80 with head_dim up to 80;
            from 65 to 80 the number is that of a larger head_dim.
        gradient: bytes of the gradients that a backward writes, in the dtypes of ``memory``; 0 where no
            tensor requires one.
        refusal: why no kernel executes it, or None.
    """

    memory: int | None
    kept: int | None
    gradient: int | None
    refusal: str | None

    def __str__(self) -> str:
        if self.refusal is not None:
            return self.refusal
        return (
            f"{self.memory} bytes are read by a forward\n"
            f"{self.kept} bytes of copies are kept on a GPU\n"
            f"{self.gradient} bytes of gradient"
        )


def describe_bias(
    bias: Bias, q_len: int, k_len: int, batch: int | None, num_heads: int | None
) -> BiasDescription:
    """See :meth:`flash_ext.masks.Bias.describe`."""
    sizes = sizes_of(bias, q_len, k_len, batch, num_heads)
    try:
        with torch.enable_grad():  # what requires a gradient does so in any mode
            terms = terms_for(None, bias, sizes)
            is_double = terms.bias is not None and terms.bias.dtype == torch.float64  # then q is
            operands = operands_of(terms, sizes, torch.float64 if is_double else torch.float32, False)
    except Refused as error:
        return BiasDescription(None, None, None, str(error))
    given = [t for t in operands if t is not None]
    memory = sum(math.prod(_own_shape(t)) * t.element_size() for t in given)
    gradient = sum(t.nbytes for t in given if t.requires_grad)
    return BiasDescription(memory, _bytes_kept(bias, terms, sizes, *operands), gradient, None)


def _bytes_kept(bias: Bias, terms: Terms, sizes: Sizes, total: Tensor | None, slopes: Tensor | None) -> int:
    """Of the copies that :func:`flash_ext._ops.calls.keep_call` leaves to later calls on a GPU."""
    found = sources_of_bias(bias, total, slopes)
    if found is None:
        return 0
    kept = 0 if slopes is None or slopes is terms.slopes else slopes.nbytes
    if total is None:
        return kept
    if terms.position is not None:
        return kept + total.nbytes
    read = total if found[0] is None else found[0]
    if may_be_copied(read, max(sizes.q_len, sizes.k_len), LARGE_HEAD_DIM):
        return kept + with_aligned_rows(total.detach().to("meta")).untyped_storage().nbytes()
    is_sum = sum(isinstance(part, DenseBias) for part in terms_of(bias)) > 1
    return kept + (total.nbytes if is_sum else 0)


def plot(mask: Mask, q_len: int, k_len: int, ax: Any, batch_index: int, head_index: int) -> Any:
    """See :meth:`flash_ext.masks.Mask.plot`."""
    _pyplot()
    sizes, batch_index, head_index = _entry(mask, q_len, k_len, batch_index, head_index)
    device = mask.device or torch.device("cpu")

    def shown(rows: range, keys: range) -> Tensor:
        return piece_of(mask, sizes, batch_index, rows, keys, device)[head_index].float()

    return _drawn(_means(sizes, device, shown), sizes, ax, cmap="Blues", vmin=0, vmax=1)


def plot_bias(bias: Bias, q_len: int, k_len: int, ax: Any, batch_index: int, head_index: int) -> Any:
    """See :meth:`flash_ext.masks.Bias.plot`."""
    _pyplot()
    sizes, batch_index, head_index = _entry(bias, q_len, k_len, batch_index, head_index)
    device = bias.device or torch.device("cpu")

    def numbers(rows: range, keys: range) -> Tensor:
        points = grid(sizes, range(batch_index, batch_index + 1), rows, keys, device)
        points = points._replace(h=torch.full_like(points.b, head_index))
        return bias._rule(points).expand(1, 1, len(rows), len(keys))[0, 0].float()

    with torch.no_grad():
        image = _means(sizes._replace(num_heads=1), device, numbers)
    ax = _drawn(image, sizes, ax)
    ax.figure.colorbar(ax.images[-1], ax=ax)
    return ax


def _pyplot() -> Any:
    try:
        from matplotlib import pyplot
    except ImportError as error:
        raise ImportError('plot needs matplotlib: pip install "flash_ext[demo]".') from error
    return pyplot


def _entry(value: Value, q_len: int, k_len: int, batch_index: int, head_index: int) -> tuple[Sizes, int, int]:
    """Sizes of one batch entry, and the indices, 0 where all have the same."""
    sizes = sizes_of(value, q_len, k_len, None, None)
    batch_index, head_index = (i if n > 1 else 0 for i, n in zip((batch_index, head_index), sizes[1:3]))
    indices = ("batch_index", batch_index, sizes.batch), ("head_index", head_index, sizes.num_heads)
    for name, index, size in indices:
        if not 0 <= index < size:
            raise ValueError(f"{name} must be from 0 to {size - 1}, got {index}.")
    return sizes._replace(batch=1), batch_index, head_index


def _means(sizes: Sizes, device: torch.device, part: Callable[[range, range], Tensor]) -> Tensor:
    """The finite numbers of so many pairs as a point has, as means; NaN where there are none.

    Args:
        device: where ``part`` makes them.
        part: (rows, keys) float32 of these rows and keys.
    """
    rows_of, keys_of = (-(-length // POINTS) for length in sizes[3:5])
    image = torch.zeros(*(-(-n // of) if n else 0 for n, of in zip(sizes[3:5], (rows_of, keys_of))))
    for _, rows, keys in pieces(sizes, max(rows_of, 1), max(keys_of, 1), device):
        numbers = part(rows, keys)
        finite = numbers.isfinite()
        columns = torch.stack([numbers.where(finite, 0).sum(0), finite.sum(0).float()])
        padded = torch.nn.functional.pad(columns, (0, -len(keys) % keys_of))
        total, count = padded.unflatten(1, (-1, keys_of)).sum(2)
        start = keys.start // keys_of
        image[rows.start // rows_of, start : start + len(count)] = (total / count).cpu()
    return image


def _drawn(image: Tensor, sizes: Sizes, ax: Any, **colours: Any) -> Any:
    if ax is None:
        ax = _pyplot().figure().add_subplot()
    extent = (0, sizes.k_len, sizes.q_len, 0)
    ax.imshow(image.numpy(), extent=extent, interpolation="nearest", **colours)
    ax.set_xlabel("key")
    ax.set_ylabel("row")
    return ax
