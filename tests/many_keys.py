"""Attention over more keys than scores can be held of: exactly, and as a plain program would evaluate it."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def by_parts(q: Tensor, k: Tensor, v: Tensor, exact: bool, part: int = 16_384) -> tuple[Tensor, Tensor]:
    """out (rows, h, d) and lse (h, rows) of causal rows at the end of one head's keys, in float64 or naively.

    Naively: all in float32, but for weights, which are rounded to the type of v, and a rounded result. The
    largest score is small enough to be left out.

    Args:
        q: (rows, h, d).
        k, v: (keys, d).
        part: how many keys are taken at a time.
    """
    wide = torch.float64 if exact else torch.float32
    rows, heads, d = q.shape
    queries = q.to(wide).transpose(0, 1)
    out, total = torch.zeros(heads, rows, d, dtype=wide, device=q.device), 0.0
    place = torch.arange(rows, device=q.device)[:, None] + k.shape[0] - rows
    for at in range(0, k.shape[0], part):
        keys, values = k[at : at + part].to(wide), v[at : at + part].to(wide)
        weights = (queries @ keys.T / math.sqrt(d)).exp_()
        key = torch.arange(at, at + keys.shape[0], device=q.device)
        weights.masked_fill_(key > place, 0)
        total = total + weights.sum(-1)
        out += (weights if exact else weights.to(v.dtype).to(wide)) @ values
    out = out.transpose(0, 1) / total.transpose(0, 1)[..., None]
    return out if exact else out.to(v.dtype), total.log()
