"""A model of a GPU kernel in PyTorch that rounds where a tensor-core kernel must and takes planted bugs.

It tells on any machine whether the checks of harness.py are right: the model without bugs has to pass them on
all kinds of data, and each planted bug has to fail.
"""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

from tests.harness import Target
from tests.inputs import Inputs
from tests.reference import visible_interval

BLOCK_N = 64

# What each planted bug does; the numbers of the same bugs in the kernels are in tools/planted.py.
BUGS = {
    "causal_plus": "every row sees one key too many to the right",
    "causal_minus": "every row sees one key too few to the right",
    "newest_key": "the last row loses its newest key",
    "key_tail": "keys beyond the end of the sequence take part, with score 0",
    "window_plus": "the window reaches one key too far to the left",
    "empty_nan": "rows without keys subtract -inf from -inf",
    "stale_max": "the accumulator is not rescaled when the maximum moves",
    "lse_log2": "lse is a base-2 logarithm",
    "gqa_modulo": "query head h reads key head h % num_heads_k",
    "scale_twice": "dq lacks the softmax scale",
    "no_dlse": "the gradient of lse is dropped",
    "delta_unrounded_p": "delta misses the last feature of the output",
    "tail_rows": "packed rows of no sequence are left unwritten",
    "input_write": "q is scaled in place",
    "noise": "each run returns different last bits",
}


def forward(x: Inputs, target: Target, bug: str = "") -> tuple[Tensor, Tensor]:
    """(out, lse) with P rounded to the inputs' type before the second product."""
    case = x.case
    out = x.q.new_full((*x.q.shape[:-1], case.dim_v), float("nan") if bug == "tail_rows" else 0)
    lse_shape = (
        (case.num_heads, x.q.shape[0]) if case.is_packed else (case.batch, case.num_heads, x.q.shape[1])
    )
    lse = torch.full(lse_shape, -math.inf)
    for rows, keys, b in _sequences(x):
        q, k, v = _heads(x, rows, keys, b, bug)
        q, k, v = q.float(), k.float(), v.float()
        visible = _visible(x, q.shape[1], k.shape[1], bug)
        acc = q.new_zeros(*q.shape[:2], v.shape[2])
        row_max, row_sum = q.new_full((*q.shape[:2], 1), -math.inf), q.new_zeros(*q.shape[:2], 1)
        for start in range(0, k.shape[1], BLOCK_N):
            cols = slice(start, start + BLOCK_N)
            s = (case.effective_scale * (q @ k[:, cols].mT)).masked_fill(~visible[:, cols], -math.inf)
            new_max = torch.maximum(row_max, s.amax(-1, keepdim=True))
            shift = new_max if bug == "empty_nan" else new_max.masked_fill(new_max == -math.inf, 0)
            alpha = torch.ones_like(row_max) if bug == "stale_max" else torch.exp(row_max - shift)
            p = torch.exp(s - shift)
            row_sum = row_sum * torch.exp(row_max - shift) + p.sum(-1, keepdim=True)
            acc = acc * alpha + p.to(case.torch_dtype).float() @ v[:, cols]
            row_max = new_max
        if bug == "key_tail":
            extra = -k.shape[1] % BLOCK_N
            row_sum = row_sum + extra * torch.exp(-row_max.masked_fill(row_max == -math.inf, 0))
        here = row_max + row_sum.log()
        if bug == "lse_log2":
            here = here / math.log(2)
        o = acc / row_sum.masked_fill(row_sum == 0, 1)
        if bug == "noise":
            o = o * (1 + 1e-2 * torch.rand(()))
        _rows(out, rows, b).copy_(o.transpose(0, 1))
        (lse if case.is_packed else lse[b])[:, rows] = here.squeeze(-1)
    if bug == "input_write" and x.q.numel():
        x.q[..., :1, :1].mul_(0.5)
    return out, lse


def backward(
    x: Inputs, out: Tensor, lse: Tensor, target: Target, bug: str = ""
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) with P and dS rounded to the inputs' type and delta from the rounded output."""
    case, dtype = x.case, x.case.torch_dtype
    dq = torch.zeros(x.q.shape)
    dk, dv = torch.zeros(x.k.shape), torch.zeros(x.v.shape)
    for rows, keys, b in _sequences(x):
        q, k, v = (t.float() for t in _heads(x, rows, keys, b, bug))
        dout, o = (_rows(t, rows, b).transpose(0, 1).float() for t in (x.dout, out))
        here = (lse if case.is_packed else lse[b])[:, rows, None]
        visible = _visible(x, q.shape[1], k.shape[1], bug) & (here > -math.inf)
        p = torch.exp(case.effective_scale * (q @ k.mT) - here).masked_fill(~visible & ~here.isnan(), 0)
        p = p.masked_fill(p < torch.finfo(torch.float32).tiny, 0)  # as ex2.approx.ftz does
        features = slice(0, -1) if bug == "delta_unrounded_p" else slice(None)
        delta = (dout * o)[..., features].sum(-1, keepdim=True)
        if x.dlse is not None and bug != "no_dlse":
            delta = delta - (x.dlse if case.is_packed else x.dlse[b])[:, rows, None]
        ds = (p * (dout @ v.mT - delta)).to(dtype).float()
        scale = 1.0 if bug == "scale_twice" else case.effective_scale
        _rows(dq, rows, b).copy_((scale * (ds @ k)).transpose(0, 1))
        for grad, part in ((dk, case.effective_scale * (ds.mT @ q)), (dv, p.to(dtype).float().mT @ dout)):
            summed = part.unflatten(0, (case.num_heads_k, -1)).sum(1)
            _rows(grad, keys, b).copy_(summed.transpose(0, 1))
    return dq.to(dtype), dk.to(dtype), dv.to(dtype)


def _sequences(x: Inputs) -> list[tuple[slice, slice, int]]:
    case = x.case
    if not case.num_heads:
        return []
    if not case.is_packed:
        return [(slice(None), slice(None), b) for b in range(case.batch)]
    cu_q, cu_k = x.cu_seqlens_q.tolist(), x.cu_seqlens_k.tolist()
    return [(slice(cu_q[b], cu_q[b + 1]), slice(cu_k[b], cu_k[b + 1]), b) for b in range(len(case.lens_q))]


def _rows(t: Tensor, rows: slice, b: int) -> Tensor:
    """(rows, heads, features) of one sequence."""
    return t[rows] if t.ndim == 3 else t[b]


def _heads(x: Inputs, rows: slice, keys: slice, b: int, bug: str) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v of one sequence as (num_heads, rows, features)."""
    heads = torch.arange(x.case.num_heads)
    group = x.case.num_heads // x.case.num_heads_k
    chosen = heads % x.case.num_heads_k if bug == "gqa_modulo" else heads // group
    q, k, v = (_rows(t, r, b).transpose(0, 1) for t, r in ((x.q, rows), (x.k, keys), (x.v, keys)))
    return q, k[chosen], v[chosen]


def _visible(x: Inputs, seqlen_q: int, seqlen_k: int, bug: str) -> Tensor:
    """(seqlen_q, seqlen_k) bool."""
    spec = x.case.spec
    if bug in ("causal_plus", "causal_minus") and spec.window_right >= 0:
        spec = dataclasses.replace(spec, window_right=spec.window_right + (1 if bug == "causal_plus" else -1))
        if spec.window_right < 0:  # -1 would mean unlimited
            full = dataclasses.replace(spec, window_right=0)
            visible = _mask(full, seqlen_q, seqlen_k)
            return visible & ~torch.ones(seqlen_q, seqlen_k).tril(seqlen_k - seqlen_q).bool() | visible.tril(
                seqlen_k - seqlen_q - 1
            )
    if bug == "window_plus" and spec.window_left >= 0:
        spec = dataclasses.replace(spec, window_left=spec.window_left + 1)
    visible = _mask(spec, seqlen_q, seqlen_k)
    if bug == "newest_key" and seqlen_q and visible[-1].any():
        visible[-1, int(visible[-1].nonzero().max())] = False
    return visible


def _mask(spec, seqlen_q: int, seqlen_k: int) -> Tensor:
    bounds = torch.tensor(
        [visible_interval(spec, row, seqlen_q, seqlen_k) for row in range(seqlen_q)]
    ).reshape(-1, 2)
    cols = torch.arange(seqlen_k)
    return (cols >= bounds[:, :1]) & (cols < bounds[:, 1:])
