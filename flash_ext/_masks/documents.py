"""Where documents begin that stand together, so that dense calls run as packed sequences.

Where the tokens of each document stand together, rows that see their own document alone are packed sequences
that lie in the same memory. Kernels for those begin their tiles where a document begins, and compare no ids;
docs/masks.md has the speeds. Where documents begin is read back once, in the first such call.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .atoms import Causal, Documents, Window
from .value import And, Mask

# Of a document, on average, up to head_dim 128: forward and backward together take 0.97 of the time and less.
# Above that it is 32 (csrc/api/prepared.cpp), where a run of rows of no document counts twice.
LEAST_ROWS = 18


class Borders(NamedTuple):
    """Where documents begin and end in the rows of all batch entries, (documents + 1,) int32.

    Rows of no document are a sequence without keys, and one of their keys without rows.
    """

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor


def says_documents_alone(mask: Mask) -> bool:
    """Whether nothing but documents and their windows limits what a row sees."""
    parts = mask.masks if isinstance(mask, And) else (mask,)
    ids = [part for part in parts if isinstance(part, Documents)]
    return (
        len(ids) == 1
        and ids[0].ids_k is None
        and all(isinstance(part, (Documents, Causal, Window)) for part in parts)
    )


def borders_of(ids: Tensor) -> Borders | None:
    """The borders of documents that stand together; None where they do not, or are too short for tiles.

    Waits for the device.

    Args:
        ids: (batch, seqlen) int32.
    """
    batch, seqlen = ids.shape
    rows = batch * seqlen
    if rows < LEAST_ROWS or rows > torch.iinfo(torch.int32).max:
        return None
    begins = torch.ones_like(ids, dtype=torch.bool)
    torch.ne(ids[:, 1:], ids[:, :-1], out=begins[:, 1:])
    starts = begins.flatten().nonzero().flatten()
    if len(starts) * LEAST_ROWS > rows:
        return None
    starts, own = torch.stack([starts, ids.flatten()[starts].long()]).cpu()
    is_real = own >= 0
    names = (starts // seqlen * 2**32 + own)[is_real]  # those of two batch entries are different documents
    if len(torch.unique(names)) != len(names):
        return None
    ends = torch.cat([starts[1:], starts.new_tensor([rows])])
    sequences = torch.where(is_real, 1, 2)
    at_q, at_k = starts.repeat_interleave(sequences), starts.repeat_interleave(sequences)
    at_q[sequences.cumsum(0)[~is_real] - 1] = ends[~is_real]
    cu_seqlens_q = _bounds(at_q, rows, ids.device)
    return Borders(cu_seqlens_q, cu_seqlens_q if bool(is_real.all()) else _bounds(at_k, rows, ids.device))


def _bounds(starts: Tensor, rows: int, device: torch.device) -> Tensor:
    return torch.cat([starts, starts.new_tensor([rows])]).to(device, torch.int32)
