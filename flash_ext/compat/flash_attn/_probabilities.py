"""The attention weights that flash-attn returns for tests of dropout, with a sign for what was dropped."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ... import forward

# A kernel of flash-attn writes whole tiles, so its weights have sides of multiples of this.
ROUNDED_TO = 128
# The largest head_dim_v of a GPU call, so the number of weights that one call can carry out.
COLUMNS = 256


def rounded(size: int) -> int:
    return -(-size // ROUNDED_TO) * ROUNDED_TO


def signed_weights(
    q: Tensor,
    k: Tensor,
    rng: Tensor,
    dropout_p: float,
    max_seqlens: tuple[int, int] | None = None,
    **options: Any,
) -> Tensor:
    """The weights of a call with dropout, those that were dropped with a minus.

    Values that are the rows of a unit matrix make an attention's output its weights, 256 keys at a time; one
    run with dropout and one without tell what was dropped. Cost grows with the square of the length.

    Args:
        q: (b, seqlen_q, h, d), or (total_q, h, d) with ``cu_seqlens_q`` among the options.
        k: (b, seqlen_k, h_k, d), or (total_k, h_k, d).
        rng: (2,) int64, seed and offset of the call.
        dropout_p: its probability.
        max_seqlens: packed: the longest sequences of q and of k.
        options: further keywords of :func:`flash_ext.forward`.

    Returns:
        (b, h, seqlen_q, seqlen_k), the last two rounded up to multiples of 128 and filled with 0; dtype of q.
        Softmax weights before the factor 1 / (1 - p).
    """
    cu_seqlens_q, cu_seqlens_k = options.get("cu_seqlens_q"), options.get("cu_seqlens_k")
    if cu_seqlens_q is None or cu_seqlens_k is None or max_seqlens is None:
        batch, rows, keys = q.shape[0], q.shape[1], k.shape[1]
        of_row = of_key = None
    else:
        batch, (rows, keys) = cu_seqlens_q.numel() - 1, max_seqlens
        of_row, of_key = _places(cu_seqlens_q, q.shape[0]), _places(cu_seqlens_k, k.shape[0])
    weights = q.new_zeros(batch, q.shape[-2], rounded(rows), rounded(keys))
    for start in range(0, keys, COLUMNS):
        end = min(start + COLUMNS, keys)
        v = _unit_values(k, start, end, None if of_key is None else of_key[1])
        kept, _ = forward(q, k, v, dropout_p=dropout_p, rng=rng, **options)
        every, _ = forward(q, k, v, **options)
        part = torch.where(kept == 0, -every, every)
        if of_row is None:
            weights[:, :, :rows, start:end] = part.transpose(1, 2)
        else:
            sequence, row = of_row
            inside = (sequence >= 0) & (row < rows)
            weights[sequence[inside], :, row[inside], start:end] = part[inside]
    return weights


def _places(cu_seqlens: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """Sequence (-1 for none) and position in it of every packed row."""
    at = torch.arange(total, device=cu_seqlens.device)
    sequence = torch.searchsorted(cu_seqlens.long(), at, right=True) - 1
    outside = (sequence < 0) | (sequence >= cu_seqlens.numel() - 1)
    start = cu_seqlens.long()[sequence.clamp(0, cu_seqlens.numel() - 1)]
    return sequence.masked_fill(outside, -1), at - start


def _unit_values(k: Tensor, start: int, end: int, position: Tensor | None) -> Tensor:
    """v whose feature c is 1 at the key with position start + c and 0 elsewhere, for every head."""
    if position is None:
        position = torch.arange(k.shape[1], device=k.device)
    unit = (position[:, None] == torch.arange(start, end, device=k.device)).to(k.dtype)
    return unit[:, None, :].expand(*k.shape[:-1], end - start).contiguous()
