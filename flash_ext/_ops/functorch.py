"""Gradients under ``torch.func`` transforms.

Ordinary autograd of ``fwd`` is in the extension module (csrc/api/autograd.cpp), which costs a training step
less than a Python function does; that of ``fwd_mod`` is in ops_mod.py. The transforms of
torch.func accept neither, so they get these functions, which call the same operators.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import library_mod as ops_mod


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
    result: tuple[Tensor, Tensor] = AttentionFunction.apply(*cast_as_autocast(q, k, v), *rest)
    return result


class ModifiedAttentionFunction(torch.autograd.Function):
    """``flash_ext::fwd_mod`` with ``flash_ext::bwd_mod`` as its gradient; takes the operator's arguments."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
        result: tuple[Tensor, Tensor, Tensor] = torch.ops.flash_ext.fwd_mod.default(*args)
        return result

    setup_context = staticmethod(ops_mod.setup_context)

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        return ops_mod.gradients(ModifiedGradientFunction.apply, ctx, dout, dlse)


class ModifiedGradientFunction(torch.autograd.Function):
    """``flash_ext::bwd_mod``, whose own derivative raises."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, ...]:
        grads: tuple[Tensor, ...] = torch.ops.flash_ext.bwd_mod.default(*args)
        return grads

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *_: Any) -> None:
        ops_mod.refuse_second_derivative()


def apply_modified_under_transforms(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    """:class:`ModifiedAttentionFunction` with the operator's arguments, cast as autocast would."""
    q, k, v = cast_as_autocast(*args[:3])
    rest = list(args[3:])
    bias = ops_mod.BIAS - 3
    if rest[bias] is not None and rest[bias].dtype not in (torch.float32, q.dtype):
        rest[bias] = rest[bias].float()
    result: tuple[Tensor, Tensor, Tensor] = ModifiedAttentionFunction.apply(q, k, v, *rest)
    return result


def cast_as_autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors in autocast's dtype where it is on, except those of float64."""
    device = tensors[0].device.type
    if not torch.amp.is_autocast_available(device) or not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(t if t.dtype == torch.float64 else t.to(dtype) for t in tensors)
