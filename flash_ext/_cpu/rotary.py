"""Rotary position embedding (Su et al. 2021, https://arxiv.org/abs/2104.09864), with torch operations."""

from __future__ import annotations

import torch
from torch import Tensor


def turned(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """x (.., features) with its first 2 * cos.shape[-1] features turned; cos and sin broadcast."""
    first, rest = x.to(cos.dtype).split([2 * cos.shape[-1], x.shape[-1] - 2 * cos.shape[-1]], dim=-1)
    a, b = (first[..., ::2], first[..., 1::2]) if interleaved else first.chunk(2, dim=-1)
    parts = (a * cos - b * sin, a * sin + b * cos)
    first = torch.stack(parts, dim=-1).flatten(-2) if interleaved else torch.cat(parts, dim=-1)
    return torch.cat([first, rest], dim=-1).to(x.dtype)
