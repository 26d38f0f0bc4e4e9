"""Gradients under ``torch.func`` transforms.

Ordinary autograd is in the extension module (csrc/api_autograd.cpp), which costs a training step less than a
Python function does. The transforms of torch.func refuse C++ functions, so they get this one, which calls the
same operators.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class AttentionFunction(torch.autograd.Function):
    """``flash_ext::fwd`` with ``flash_ext::bwd`` as its gradient; takes the operator's arguments."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, Tensor]:
        result: tuple[Tensor, Tensor] = torch.ops.flash_ext.fwd.default(*args)
        return result

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        q, k, v, cu_seqlens_q, cu_seqlens_k, *ctx.options = inputs
        ctx.save_for_backward(q, k, v, *output, cu_seqlens_q, cu_seqlens_k)

    @staticmethod
    def backward(ctx: Any, dout: Tensor, dlse: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k = ctx.saved_tensors
        grads = torch.ops.flash_ext.bwd.default(
            dout, q, k, v, out, lse, dlse, cu_seqlens_q, cu_seqlens_k, *ctx.options
        )
        return *grads, None, None, *(None for _ in ctx.options)


def apply_under_transforms(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    """:class:`AttentionFunction` with the operator's arguments.

    Autocast happens here, before anything is saved, as it does above the C++ function.
    """
    device = q.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        q, k, v = (t if t.dtype == torch.float64 else t.to(dtype) for t in (q, k, v))
    result: tuple[Tensor, Tensor] = AttentionFunction.apply(q, k, v, *rest)
    return result
