"""Rotary position embedding of q and k, which :func:`flash_ext.fp8.quantize_fp8` takes along.

Source: Su et al. 2021, https://arxiv.org/abs/2104.09864.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
from torch import Tensor

from ._cpu.rotary import turned

Factors: TypeAlias = tuple[Tensor, Tensor]
RotaryFactors: TypeAlias = Factors | tuple[Factors, Factors]


def factors_of(rotary: Any, q: Tensor, k: Tensor) -> tuple[Factors, Factors]:
    """cos and sin of q, and those of k, with a last stride of 1.

    Raises:
        TypeError, ValueError: rotary is neither a pair nor a pair of pairs, or one of them does not fit.
    """
    if not isinstance(rotary, (tuple, list)) or len(rotary) != 2:
        raise TypeError(f"rotary must be (cos, sin) or ((cos, sin) of q, (cos, sin) of k), got {rotary!r}.")
    alike = isinstance(rotary[0], Tensor)
    if alike and q.shape[-3] != k.shape[-3]:
        raise ValueError(
            f"rotary=(cos, sin) is for q and k with the same rows, got {q.shape[-3]} and {k.shape[-3]}. Give "
            "((cos, sin) of q, (cos, sin) of k)."
        )
    pairs = (rotary, rotary) if alike else rotary
    of_q, of_k = (_checked(pair, x, name) for pair, x, name in zip(pairs, (q, k), ("q", "k"), strict=True))
    if of_q[0].shape[-1] != of_k[0].shape[-1] or of_q[0].dtype != of_k[0].dtype:
        raise ValueError(
            "rotary must turn as many features of q as of k, with factors of one dtype, got "
            f"{2 * of_q[0].shape[-1]} {of_q[0].dtype} and {2 * of_k[0].shape[-1]} {of_k[0].dtype}."
        )
    return of_q, of_k


def _checked(pair: Any, x: Tensor, name: str) -> Factors:
    if not isinstance(pair, (tuple, list)) or len(pair) != 2 or not all(isinstance(t, Tensor) for t in pair):
        raise TypeError(f"rotary of {name} must be (cos, sin), two tensors, got {pair!r}.")
    cos, sin = pair
    rows, d = x.shape[-3], x.shape[-1]
    for t in pair:
        if t.dtype not in (torch.float32, x.dtype) or t.dtype != cos.dtype:
            raise TypeError(
                f"rotary must be torch.float32 or {x.dtype}, cos as sin, got {cos.dtype} and {sin.dtype}."
            )
        if t.device != x.device:
            raise ValueError(f"rotary must be on the device of {name}, {x.device}, got {t.device}.")
        if t.requires_grad and torch.is_grad_enabled():
            raise ValueError("rotary requires a gradient, and gets none: detach it.")
        dims = (2,) if x.dim() == 3 else (2, 3)
        fits = t.dim() in dims and t.shape[-2] == rows and t.shape == cos.shape
        if not fits or (t.dim() == 3 and t.shape[0] != x.shape[0]):
            shape = f"({rows}, rotary_dim / 2)" + ("" if x.dim() == 3 else f", or with {x.shape[0]} in front")
            raise ValueError(f"rotary of {name} must have shape {shape}, got {tuple(t.shape)}.")
    features = 2 * cos.shape[-1]
    if features % 16 != 0 or not 0 < features <= d:
        raise ValueError(f"rotary must turn a multiple of 16 features up to {d}, got {features}.")
    return tuple(t if t.stride(-1) == 1 else t.contiguous() for t in (cos, sin))


def turn(x: Tensor, factors: Factors, interleaved: bool) -> Tensor:
    """x, (.., rows, h, d), turned in float32 and rounded to its dtype; differentiable in x."""
    cos, sin = (t.float().unsqueeze(-2) for t in factors)
    return turned(x, cos, sin, interleaved)
