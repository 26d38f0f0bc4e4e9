"""Results of packed sequences in the shapes of the dense call that ran as those, and the other way round."""

from __future__ import annotations

import torch
from torch import Tensor


def dense(t: Tensor, batch: int) -> Tensor:
    """(total, heads, size) as (batch, seqlen, heads, size), no view."""
    rows: Tensor = torch.ops.aten._unsafe_view.default(t, [batch, t.shape[0] // batch, *t.shape[1:]])
    return rows


def packed_rows(t: Tensor) -> Tensor:
    """(batch, heads, seqlen) as (heads, total)."""
    return t.transpose(0, 1).flatten(1)


def dense_rows(t: Tensor, batch: int) -> Tensor:
    """The other way, no view; one that was not asked for, without dimensions for heads, stays as it is."""
    if t.dim() != 2:
        return t
    rows: Tensor = torch.ops.aten._unsafe_view.default(t, [t.shape[0], batch, t.shape[1] // batch])
    return rows.transpose(0, 1).clone(memory_format=torch.contiguous_format)
