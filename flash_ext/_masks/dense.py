"""Masks written out: whole, for tests and pictures, or piece by piece within a bounded memory."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .value import Mask, Points, Sizes, Value

# Pairs that are evaluated at once on a GPU. On the CPU it is a quarter: more numbers of 8 bytes fit no cache.
PIECE = 1 << 22


def sizes_of(
    value: Value, q_len: int, k_len: int, batch: int | None, num_heads: int | None, packed: bool = False
) -> Sizes:
    """Sizes of a call, those left out from the value's tensors, which must fit them."""
    lead = value._lead(packed)
    sizes = Sizes(
        packed, lead[0] if batch is None else batch, lead[1] if num_heads is None else num_heads, q_len, k_len
    )
    value._check(sizes)
    return sizes


def grid(sizes: Sizes, batch: range, rows: range, keys: range, device: torch.device | str | None) -> Points:
    """The points of a piece of a call that is not packed, (batch, num_heads, rows, keys)."""
    ranges = (batch, range(sizes.num_heads), rows, keys)
    b, h, row, key = (
        torch.arange(part.start, part.stop, device=device).view([-1 if at == dim else 1 for at in range(4)])
        for dim, part in enumerate(ranges)
    )
    return Points(b, h, row, key, sizes.q_len, sizes.k_len, row, key)


def packed_grid(
    sizes: Sizes, cu_seqlens: tuple[Tensor, Tensor], device: torch.device
) -> tuple[Points, Tensor]:
    """All points of a packed call, (1, num_heads, total_q, total_k), and which are of one sequence."""
    cu_q, cu_k = (cu.to(device, torch.int64) for cu in cu_seqlens)
    row_at = torch.arange(sizes.q_len, device=device)
    key_at = torch.arange(sizes.k_len, device=device)
    sequence = torch.searchsorted(cu_q[1:], row_at, right=True)
    covered = (sequence < sizes.batch) & (row_at >= cu_q[0])
    sequence = sequence.clamp(max=sizes.batch - 1)
    row, b = (row_at - cu_q[sequence])[:, None], sequence[:, None]
    key = key_at - cu_k[b]
    q_len, k_len = ((cu[1:] - cu[:-1])[b] for cu in (cu_q, cu_k))
    together = covered[:, None] & (key >= 0) & (key < k_len)
    h = torch.arange(sizes.num_heads, device=device).view(1, -1, 1, 1)
    b, row, key, q_len, k_len = (x[None, None] for x in (b, row, key.clamp(min=0), q_len, k_len))
    points = Points(b, h, row, key, q_len, k_len, row_at[None, None, :, None], key_at[None, None, None], True)
    return points, together[None, None]


def dense(
    mask: Mask,
    q_len: int,
    k_len: int,
    batch: int | None,
    num_heads: int | None,
    cu_seqlens: tuple[Tensor, Tensor] | None,
    device: torch.device | str | None,
) -> Tensor:
    """See :meth:`flash_ext.masks.Mask.to_dense`."""
    own = mask.device or torch.device("cpu" if device is None else device)
    if cu_seqlens is None:
        sizes = sizes_of(mask, q_len, k_len, batch, num_heads)
        shown = mask._shown(grid(sizes, range(sizes.batch), range(q_len), range(k_len), own), False)
        shown = shown.expand(sizes.batch, sizes.num_heads, q_len, k_len).contiguous()
    else:
        sequences = cu_seqlens[0].shape[0] - 1
        if batch not in (None, sequences):
            raise ValueError(f"batch must be the number of sequences, {sequences}, or left out, got {batch}.")
        sizes = sizes_of(mask, q_len, k_len, sequences, num_heads, packed=True)
        if sequences == 0:
            return torch.zeros(1, sizes.num_heads, q_len, k_len, dtype=torch.bool, device=device or own)
        points, together = packed_grid(sizes, cu_seqlens, own)
        shown = (mask._shown(points, False) & together).expand(1, sizes.num_heads, q_len, k_len).contiguous()
    return shown if device is None else shown.to(device)


def pieces(
    sizes: Sizes,
    block_rows: int,
    block_cols: int,
    device: torch.device | str,
    wanted: Tensor | None = None,
) -> Iterator[tuple[int, range, range]]:
    """Batch entry, rows and keys of the pieces of a call: neighbours in a row of blocks, some million pairs.

    Args:
        sizes, block_rows, block_cols: of the call and of its blocks.
        device: where they are evaluated.
        wanted: bool (batch, row blocks, key blocks), the blocks that pieces are made of; None is all.
    """
    most = PIECE // 4 if torch.device(device).type == "cpu" else PIECE
    together = max(most // (block_rows * block_cols * max(sizes.num_heads, 1)), 1)
    listed = None if wanted is None else wanted.tolist()
    everything = [True] * -(-sizes.k_len // block_cols)
    for b in range(sizes.batch):
        for m, first in enumerate(range(0, sizes.q_len, block_rows)):
            rows = range(first, min(first + block_rows, sizes.q_len))
            for start, end in _runs(everything if listed is None else listed[b][m], together):
                yield b, rows, range(start * block_cols, min(end * block_cols, sizes.k_len))


def _runs(wanted: list[bool], most: int) -> Iterator[tuple[int, int]]:
    """(start, end) of neighbours that are True, ``most`` of them at most."""
    start = 0
    while start < len(wanted):
        end = start
        while end < len(wanted) and end - start < most and wanted[end]:
            end += 1
        if end > start:
            yield start, end
        start = max(end, start + 1)


def piece_of(
    mask: Mask, sizes: Sizes, b: int, rows: range, keys: range, device: torch.device | str
) -> Tensor:
    """(num_heads, rows, keys) bool of one batch entry."""
    shown = mask._shown(grid(sizes, range(b, b + 1), rows, keys, device), False)
    return shown.expand(1, sizes.num_heads, len(rows), len(keys))[0]
