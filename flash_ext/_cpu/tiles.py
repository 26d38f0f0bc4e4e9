"""The CPU backend: tiled online softmax from torch matmuls, forward and backward, in O(seqlen) memory.

It follows FlashAttention-2 (Dao 2023, https://arxiv.org/abs/2307.08691): query blocks outside, key blocks
inside, an unnormalised accumulator with running maximum and sum, one logsumexp per row kept for the backward
pass, which recomputes the weights from it. Arithmetic is float32, or float64 for float64 inputs; the query
heads that share a key head are folded into the rows of one product.

A NaN or infinity in a key that a row does not see may still reach that row if both lie in one tile, because
the products of a tile multiply it by a zero weight. Other sequences, batches and heads are never reached.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from .._ops.spec import AttnSpec

# Rows and columns of one score tile, chosen for CPU caches; results do not depend on them beyond rounding.
BLOCK_M = 128
BLOCK_N = 256


@torch.no_grad()
def tiled_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: AttnSpec,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention forward; shapes and meaning as :func:`flash_ext.attention`.

    Args:
        q, k, v: float16, bfloat16, float32 or float64, all of one dtype; any strides.
        spec: scale and window.
        cu_seqlens_q, cu_seqlens_k: (batch + 1,) integer prefix sums; both given means packed input.
        out_dtype: what out is rounded to, None for the dtype of q.

    Returns:
        out: contiguous; 0 in rows that see no key or lie outside every sequence.
        lse: float32 (float64 for float64 inputs), contiguous; -inf in such rows.
    """
    acc_dtype, out_dtype = accumulator_dtype(q), out_dtype or q.dtype
    if cu_seqlens_q is None or cu_seqlens_k is None:
        return _forward_dense(q, k, v, spec, acc_dtype, out_dtype)

    out = q.new_zeros(*q.shape[:2], v.shape[2], dtype=out_dtype)
    lse = q.new_full((q.shape[1], q.shape[0]), float("-inf"), dtype=acc_dtype)
    for rows_q, rows_k in packed_sequences(q, k, cu_seqlens_q, cu_seqlens_k):
        q_b, k_b, v_b = q[None, rows_q], k[None, rows_k], v[None, rows_k]
        out_b, lse_b = _forward_dense(q_b, k_b, v_b, spec, acc_dtype, out_dtype)
        out[rows_q], lse[:, rows_q] = out_b[0], lse_b[0]
    return out, lse


@torch.no_grad()
def tiled_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    spec: AttnSpec,
    dlse: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    grad_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v from the output and lse that are given, whoever computed them.

    Args:
        dout: gradient of out, same shape.
        q, k, v, out, lse: inputs and results of the forward pass. ``out`` and ``lse`` may belong to a softmax
            over more keys than these, as in ring attention.
        spec: scale and window of the forward pass.
        dlse: gradient of lse, same shape, or None for zero.
        cu_seqlens_q, cu_seqlens_k: as in the forward pass.
        grad_dtype: what the gradients are rounded to, None for the dtype of q.

    Returns:
        dq, dk, dv: shapes of q, k and v, contiguous. Rows with lse -inf give and get exactly 0.
    """
    acc_dtype, grad_dtype = accumulator_dtype(q), grad_dtype or q.dtype
    if cu_seqlens_q is None or cu_seqlens_k is None:
        return _backward_dense(dout, q, k, v, out, lse, dlse, spec, acc_dtype, grad_dtype)

    dq, dk, dv = (x.new_zeros(x.shape, dtype=grad_dtype) for x in (q, k, v))
    for rows_q, rows_k in packed_sequences(q, k, cu_seqlens_q, cu_seqlens_k):
        grads_b = _backward_dense(
            dout[None, rows_q], q[None, rows_q], k[None, rows_k], v[None, rows_k], out[None, rows_q],
            lse[None, :, rows_q], None if dlse is None else dlse[None, :, rows_q], spec, acc_dtype,
            grad_dtype,
        )  # fmt: skip
        for grad, rows, grad_b in zip((dq, dk, dv), (rows_q, rows_k, rows_k), grads_b, strict=True):
            grad[rows] = grad_b[0]
    return dq, dk, dv


def accumulator_dtype(q: Tensor) -> torch.dtype:
    """What scores, sums and lse are held in: float64 for float64 inputs, else float32."""
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def _sequence_bounds(cu_seqlens: Tensor, total: int) -> list[tuple[int, int]]:
    """(start, end) rows of each packed sequence: in order, inside [0, total], whatever ``cu_seqlens`` holds.

    Each bound is forced between two that a search from the middle meets before it, at first 0 and ``total``.
    Where ``cu_seqlens`` is in order, bounds are what it holds.
    """
    bounds = cu_seqlens.tolist()
    intervals = [(-1, len(bounds) - 1, 0, total)]  # of sequences, -1 and batch those of no sequence
    while intervals:
        lo, hi, start, end = intervals.pop()
        if lo >= hi:
            continue
        mid = lo + (hi - lo + 1) // 2
        bounds[mid] = min(max(bounds[mid], start), end)
        intervals += [(lo, mid - 1, start, bounds[mid]), (mid, hi, bounds[mid], end)]
    return list(itertools.pairwise(bounds))


def _key_bounds(cu_seqlens: Tensor, total: int) -> list[tuple[int, int]]:
    """The same of keys, which nobody owns in a forward: any rows inside [0, total], shared or unordered."""
    cu = cu_seqlens.tolist()
    starts = [min(max(c, 0), total) for c in cu[:-1]]
    return [(start, min(max(end, start), total)) for start, end in zip(starts, cu[1:], strict=True)]


def packed_sequences(
    q: Tensor, k: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor
) -> list[tuple[slice, slice]]:
    """Row slices of q and of k for each packed sequence."""
    bounds_q, bounds_k = _sequence_bounds(cu_seqlens_q, q.shape[0]), _key_bounds(cu_seqlens_k, k.shape[0])
    return [(slice(*bq), slice(*bk)) for bq, bk in zip(bounds_q, bounds_k, strict=True)]


def _fold(x: Tensor, num_heads_k: int, dtype: torch.dtype) -> Tensor:
    """(batch, seqlen, num_heads, features) -> (batch, num_heads_k, group, seqlen, features) of ``dtype``."""
    batch, seqlen, num_heads, features = x.shape
    group = num_heads // num_heads_k if num_heads_k else 1
    return x.to(dtype).view(batch, seqlen, num_heads_k, group, features).permute(0, 2, 3, 1, 4)


def _unfold(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The inverse of :func:`_fold`, contiguous."""
    return x.permute(0, 3, 1, 2, 4).flatten(2, 3).to(dtype).contiguous()


class _QueryBlock:
    """Rows [start, end) of one sequence: the key blocks they need and the scores they may not see."""

    def __init__(self, start: int, end: int, seqlen_q: int, seqlen_k: int, group: int, spec: AttnSpec):
        self.rows = slice(start, end)
        self.group = group
        self.intervals = [spec.visible_interval(row, seqlen_q, seqlen_k) for row in range(start, end)]
        self.lo = torch.tensor([lo for lo, _ in self.intervals]).unsqueeze(1)
        self.hi = torch.tensor([hi for _, hi in self.intervals]).unsqueeze(1)

    def key_blocks(self) -> list[tuple[int, int]]:
        """(start, end) of the key blocks that some row sees; nothing else is touched."""
        seen = [(lo, hi) for lo, hi in self.intervals if lo < hi]
        if not seen:
            return []
        first, last = min(lo for lo, _ in seen), max(hi for _, hi in seen)
        return [(start, min(start + BLOCK_N, last)) for start in range(first, last, BLOCK_N)]

    def hidden(self, start: int, end: int) -> Tensor | None:
        """(group * rows, end - start) bool, True where a score does not count; None if every score counts."""
        if all(lo <= start and end <= hi for lo, hi in self.intervals):
            return None
        cols = torch.arange(start, end)
        return ((cols < self.lo) | (cols >= self.hi)).repeat(self.group, 1)


def _query_blocks(seqlen_q: int, seqlen_k: int, group: int, spec: AttnSpec) -> list[_QueryBlock]:
    starts = range(0, seqlen_q, BLOCK_M)
    return [_QueryBlock(s, min(s + BLOCK_M, seqlen_q), seqlen_q, seqlen_k, group, spec) for s in starts]


def _forward_dense(
    q: Tensor, k: Tensor, v: Tensor, spec: AttnSpec, acc_dtype: torch.dtype, out_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Forward of (batch, seqlen, heads, features) tensors."""
    (batch, seqlen_q, num_heads, _), (_, seqlen_k, num_heads_k, head_dim_v) = q.shape, v.shape
    out = q.new_empty(batch, seqlen_q, num_heads, head_dim_v, dtype=out_dtype)
    lse = q.new_empty(batch, num_heads, seqlen_q, dtype=acc_dtype)
    q = _fold(q, num_heads_k, acc_dtype)
    k, v = (_fold(x, num_heads_k, acc_dtype).squeeze(2).contiguous() for x in (k, v))
    group = q.shape[2]

    for block in _query_blocks(seqlen_q, seqlen_k, group, spec):
        q_block = q[:, :, :, block.rows].flatten(2, 3)
        acc_o = q_block.new_zeros(*q_block.shape[:3], head_dim_v)
        row_sum = q_block.new_zeros(*q_block.shape[:3], 1)
        row_max = torch.full_like(row_sum, float("-inf"))
        for start, end in block.key_blocks():
            scores = (q_block @ k[:, :, start:end].mT).mul_(spec.softmax_scale)
            hidden = block.hidden(start, end)
            if hidden is not None:
                scores.masked_fill_(hidden, float("-inf"))
            new_max = torch.maximum(row_max, scores.amax(dim=-1, keepdim=True))
            # A row that has seen nothing yet has the maximum -inf; shifting by 0 keeps -inf - -inf away.
            shift = new_max.masked_fill(new_max == float("-inf"), 0.0)
            weights = scores.sub_(shift).exp_()
            rescale = (row_max - shift).exp_()
            row_sum = row_sum.mul_(rescale).add_(weights.sum(dim=-1, keepdim=True))
            acc_o = acc_o.mul_(rescale).add_(weights @ v[:, :, start:end])
            row_max = new_max
        empty = row_sum == 0
        lse_block = (row_sum.log() + row_max).masked_fill_(empty, float("-inf"))
        acc_o.div_(row_sum.masked_fill_(empty, 1.0))
        rows = block.rows.stop - block.rows.start
        out[:, block.rows] = _unfold(torch.unflatten(acc_o, 2, (group, rows)), out.dtype)
        lse[:, :, block.rows] = lse_block.view(batch, num_heads, rows)
    return out, lse


def _backward_dense(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dlse: Tensor | None,
    spec: AttnSpec, acc_dtype: torch.dtype, grad_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Backward of (batch, seqlen, heads, features) tensors; lse and dlse are (batch, heads, seqlen_q)."""
    (_, seqlen_q, _, _), (_, seqlen_k, num_heads_k, _) = q.shape, v.shape
    q, dout, out = (_fold(x, num_heads_k, acc_dtype) for x in (q, dout, out))
    k, v = (_fold(x, num_heads_k, acc_dtype).squeeze(2).contiguous() for x in (k, v))
    group = q.shape[2]
    lse = torch.unflatten(lse.to(acc_dtype), 1, (num_heads_k, group)).unsqueeze(-1)

    delta = (dout * out).sum(dim=-1, keepdim=True)
    if dlse is not None:
        delta -= torch.unflatten(dlse.to(acc_dtype), 1, (num_heads_k, group)).unsqueeze(-1)
    # An empty row takes no part whatever its q, dout or dlse hold, NaN included; lse +inf gives weights of 0.
    empty = lse == float("-inf")
    q, dout, delta = (x.masked_fill(empty, 0.0) for x in (q, dout, delta))
    lse = lse.masked_fill(empty, float("inf"))

    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for block in _query_blocks(seqlen_q, seqlen_k, group, spec):
        q_block, dout_block, lse_block, delta_block = (
            x[:, :, :, block.rows].flatten(2, 3) for x in (q, dout, lse, delta)
        )
        dq_block = torch.zeros_like(q_block)
        for start, end in block.key_blocks():
            k_block, v_block = k[:, :, start:end], v[:, :, start:end]
            weights = (q_block @ k_block.mT).mul_(spec.softmax_scale).sub_(lse_block).exp_()
            dscores = (dout_block @ v_block.mT).sub_(delta_block)
            hidden = block.hidden(start, end)
            if hidden is not None:
                weights.masked_fill_(hidden, 0.0)
            dscores.mul_(weights).mul_(spec.softmax_scale)
            dv[:, :, start:end] += weights.mT @ dout_block
            dk[:, :, start:end] += dscores.mT @ q_block
            dq_block += dscores @ k_block
        dq[:, :, :, block.rows] = torch.unflatten(dq_block, 2, (group, -1))
    dk, dv = dk.unsqueeze(2), dv.unsqueeze(2)
    return _unfold(dq, grad_dtype), _unfold(dk, grad_dtype), _unfold(dv, grad_dtype)
