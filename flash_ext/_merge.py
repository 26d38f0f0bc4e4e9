"""Merging of attention over disjoint sets of keys."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ._count import counting, tally
from ._ops.words import refuse_kind


def merge_attention_states(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor
) -> tuple[Tensor, Tensor]:
    """Attention over the union of two disjoint key sets, from the results over each. Differentiable.

    With weights w = exp(lse - max(lse_a, lse_b)), out is (w_a * out_a + w_b * out_b) / (w_a + w_b) and lse is
    log(exp(lse_a) + exp(lse_b)). The operation is associative and commutative up to rounding, and a state
    with lse -inf is its neutral element; where both are -inf, out is 0 and lse -inf.

    Args:
        out_a, out_b: (b, seqlen, h, dv), or packed (total, h, dv). Keep a running result in float32 when
            merging many times: then nothing is rounded in between.
        lse_a, lse_b: (b, h, seqlen), or packed (h, total); natural logarithm, -inf for rows without keys.

    Returns:
        out, lse: shapes of the inputs; dtypes as torch promotes those of the two outs and of the two lses.

    Raises:
        ValueError, TypeError: the shapes do not agree, or something is no tensor of floating point numbers;
            the message names the argument.

    Source: the rescaling of partial softmax results in Milakov and Gimelshein 2018,
    https://arxiv.org/abs/1805.02867.
    """
    if counting:
        tally("merge_attention_states")
    _check_types(out_a=out_a, lse_a=lse_a, out_b=out_b, lse_b=lse_b)
    _check_shapes(out_a, lse_a, out_b, lse_b)
    share_a, share_b, lse = _shares(lse_a, lse_b)
    out = _per_row(share_a) * out_a + _per_row(share_b) * out_b
    return out.to(torch.promote_types(out_a.dtype, out_b.dtype)), lse


@torch.no_grad()
def merge_into(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> None:
    """:func:`merge_attention_states` in the place of the first state, in one pass over both.

    Both have one dtype, and rows without keys are 0.
    """
    _, share_b, lse = _shares(lse_a, lse_b)
    out_a.lerp_(out_b, _per_row(share_b))
    lse_a.copy_(lse)


def add_sinks(
    out: Tensor, lse: Tensor, sinks: Tensor | None, cu_seqlens_q: Tensor | None, wants_lse: bool
) -> Tensor:
    """Gives the denominator of each head one more logit: ``out`` changes in place, its lse is returned.

    sum / (exp(sink) + exp(lse)) is out * sigmoid(lse - sink). A row without keys has lse = sink, one outside
    of all sequences -inf.
    """
    if sinks is None:
        return lse
    sink = sinks.to(lse.dtype)[:, None]
    # A sink of -inf is none: beside a row without keys sigmoid would see -inf - -inf.
    factor = torch.sigmoid(lse - sink).masked_fill(sink == -torch.inf, 1)
    out.mul_(factor.transpose(-1, -2).unsqueeze(-1))
    if not wants_lse:
        return lse.new_empty(0)
    joined = torch.logaddexp(lse, sink)
    if cu_seqlens_q is None:
        return joined
    row = torch.arange(lse.shape[-1], device=lse.device)
    return joined.where((row >= cu_seqlens_q[0]) & (row < cu_seqlens_q[-1]), lse)


def _shares(lse_a: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The weights of both states, 0 where neither has keys, and the lse of their union."""
    largest = torch.maximum(lse_a, lse_b).detach()
    # A finite stand-in where both are empty keeps the arithmetic free of inf - inf, forward and backward.
    largest = torch.where(largest == -torch.inf, 0.0, largest)
    weight_a, weight_b = torch.exp(lse_a - largest), torch.exp(lse_b - largest)
    total = weight_a + weight_b
    is_empty = total == 0
    total = torch.where(is_empty, 1.0, total)
    return weight_a / total, weight_b / total, torch.where(is_empty, -torch.inf, largest + torch.log(total))


def _per_row(weight: Tensor) -> Tensor:
    """(..., h, rows) to (..., rows, h, 1), to scale an out."""
    return weight.transpose(-1, -2).unsqueeze(-1)


def _check_types(**tensors: Any) -> None:
    for name, t in tensors.items():
        if not isinstance(t, Tensor):
            refuse_kind(name, t)
        if not t.is_floating_point():
            raise TypeError(f"{name} must be floating point, got {t.dtype}.")


def _check_shapes(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> None:
    if out_a.dim() not in (3, 4):
        raise ValueError(
            f"out_a must have shape (b, seqlen, h, dv) or (total, h, dv), got {tuple(out_a.shape)}."
        )
    if out_b.shape != out_a.shape:
        raise ValueError(
            f"out_b must have the shape of out_a, {tuple(out_a.shape)}, got {tuple(out_b.shape)}."
        )
    *batch, rows, heads, _ = out_a.shape
    for name, lse in (("lse_a", lse_a), ("lse_b", lse_b)):
        if lse.shape != (*batch, heads, rows):
            raise ValueError(f"{name} must have shape {(*batch, heads, rows)}, got {tuple(lse.shape)}.")
