"""The float64 oracle: attention by its definition, with every score held in memory.

Clarity is the only goal. Both outputs are differentiable, so autograd through this file is the truth for the
gradients as well. Memory is O(seqlen_q * seqlen_k) per head; for long inputs use :mod:`flash_ext.tiled`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .spec import AttnSpec


def attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: AttnSpec,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    isolate_rows: bool = False,
) -> tuple[Tensor, Tensor]:
    """softmax(scale * q k^T + mask) v and the logarithm of the softmax's denominator, in float64.

    Args:
        q: (batch, seqlen_q, num_heads, head_dim), or (total_q, num_heads, head_dim) when packed; any real
            dtype.
        k: (batch, seqlen_k, num_heads_k, head_dim) or (total_k, num_heads_k, head_dim). Query head ``h``
            reads key head ``h // (num_heads // num_heads_k)``.
        v: as k, with head_dim_v features.
        spec: scale and window.
        cu_seqlens_q, cu_seqlens_k: (batch + 1,) integer prefix sums; both given means packed input.
        isolate_rows: treat each query row by itself, with just the keys it sees. Slow, and needed only when
            something is NaN or infinite: then a value shows exactly where it is visible, forward and
            backward, and not where a matrix product multiplies it by a zero weight.

    Returns:
        out: float64, (batch, seqlen_q, num_heads, head_dim_v) or (total_q, num_heads, head_dim_v); 0 in rows
            that see no key or lie outside every sequence.
        lse: float64 natural logarithm, (batch, num_heads, seqlen_q) or (num_heads, total_q); -inf in such
            rows.
    """
    q, k, v = q.double(), k.double(), v.double()
    if cu_seqlens_q is None or cu_seqlens_k is None:
        return _attend(q, k, v, spec, isolate_rows)

    # Rows are gathered once and split, so that backward adds each gradient once and not once per sequence.
    bounds_q = sequence_bounds(cu_seqlens_q, q.shape[0])
    bounds_k = sequence_bounds(cu_seqlens_k, k.shape[0])
    rows_q, rows_k = _covered_rows(bounds_q, q.device), _covered_rows(bounds_k, q.device)
    lens_q, lens_k = ([end - start for start, end in bounds] for bounds in (bounds_q, bounds_k))
    parts = zip(
        torch.split(q[rows_q], lens_q), torch.split(k[rows_k], lens_k), torch.split(v[rows_k], lens_k),
        strict=True,
    )  # fmt: skip
    # The part without rows keeps the graph connected when there is no sequence at all.
    every_part = [(q[:0], k[:0], v[:0]), *parts]
    results = [_attend(qb[None], kb[None], vb[None], spec, isolate_rows) for qb, kb, vb in every_part]
    out = q.new_zeros(q.shape[0], q.shape[1], v.shape[2])
    lse = q.new_full((q.shape[1], q.shape[0]), float("-inf"))
    out = out.index_copy(0, rows_q, torch.cat([o[0] for o, _ in results]))
    lse = lse.index_copy(1, rows_q, torch.cat([s[0] for _, s in results], dim=1))
    return out, lse


def sequence_bounds(cu_seqlens: Tensor, total: int) -> list[tuple[int, int]]:
    """(start, end) rows of each packed sequence, forced to 0 <= start <= end <= total as in the kernels."""
    cu = cu_seqlens.tolist()
    starts = [min(max(c, 0), total) for c in cu[:-1]]
    return [(start, min(max(end, start), total)) for start, end in zip(starts, cu[1:], strict=True)]


def visible_mask(spec: AttnSpec, seqlen_q: int, seqlen_k: int, device: torch.device | None = None) -> Tensor:
    """(seqlen_q, seqlen_k) bool, True where the query row sees the key."""
    intervals = [spec.visible_interval(row, seqlen_q, seqlen_k) for row in range(seqlen_q)]
    lo, hi = torch.tensor(intervals, dtype=torch.int64, device=device).reshape(seqlen_q, 2, 1).unbind(1)
    cols = torch.arange(seqlen_k, device=device)
    return (cols >= lo) & (cols < hi)


def _covered_rows(bounds: list[tuple[int, int]], device: torch.device) -> Tensor:
    """Row indices of all sequences, one after the other; (sum of lengths,) int64."""
    pieces = [torch.arange(start, end, device=device) for start, end in bounds]
    return torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.int64, device=device)


def _attend(q: Tensor, k: Tensor, v: Tensor, spec: AttnSpec, isolate_rows: bool) -> tuple[Tensor, Tensor]:
    """Dense attention of float64 tensors laid out as (batch, seqlen, heads, features)."""
    group = q.shape[2] // max(k.shape[2], 1)
    q = q.transpose(1, 2)
    k = k.repeat_interleave(group, dim=2).transpose(1, 2)
    v = v.repeat_interleave(group, dim=2).transpose(1, 2)
    seqlen_q, seqlen_k = q.shape[2], k.shape[2]

    if isolate_rows and seqlen_q:
        results = []
        for row in range(seqlen_q):
            lo, hi = spec.visible_interval(row, seqlen_q, seqlen_k)
            keys = slice(lo, max(lo, hi))
            results.append(_softmax_product(q[:, :, row : row + 1], k[:, :, keys], v[:, :, keys], None, spec))
        out = torch.cat([o for o, _ in results], dim=2)
        lse = torch.cat([s for _, s in results], dim=2)
    else:
        visible = visible_mask(spec, seqlen_q, seqlen_k, q.device)
        out, lse = _softmax_product(q, k, v, visible, spec)
    return out.transpose(1, 2).contiguous(), lse


def _softmax_product(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, spec: AttnSpec
) -> tuple[Tensor, Tensor]:
    """out and lse of (batch, heads, rows, features) tensors; ``visible`` (rows, keys) or None for all."""
    scores = spec.softmax_scale * (q @ k.transpose(2, 3))
    if visible is not None:
        scores = scores.masked_fill(~visible, float("-inf"))

    # The shift by the row's maximum cancels exactly, hence detach. A row without keys has the maximum -inf
    # and the denominator 0; both are replaced by harmless values so that no NaN enters its (zero) gradient.
    hidden_key = scores.new_full((*scores.shape[:3], 1), float("-inf"))
    row_max = torch.cat([scores.detach(), hidden_key], dim=-1).amax(dim=-1, keepdim=True)
    row_max = row_max.masked_fill(row_max == float("-inf"), 0.0)
    weights = torch.exp(scores - row_max)
    row_sum = weights.sum(dim=-1, keepdim=True)
    empty = row_sum == 0
    row_sum = row_sum.masked_fill(empty, 1.0)
    out = (weights / row_sum) @ v
    lse = (row_sum.log() + row_max).masked_fill(empty, float("-inf"))
    return out, lse.squeeze(-1)
