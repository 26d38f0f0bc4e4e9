"""Gradients under ``torch.func`` transforms.

Ordinary autograd is in the extension module (csrc/api/autograd.cpp), which costs a training step less than a
Python function does. The transforms of torch.func that differentiate do not accept it, so they get these
functions, which call the same operators. vmap alone takes the operators, which have rules for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

from .modifiers import NAMES, NUM_TENSORS

FIRST_MODIFIER = 10  # places in the arguments of fwd_mod
NUM_FWD_ARGUMENTS = FIRST_MODIFIER + len(NAMES) + 3
BIAS, SLOPES, SINKS = (FIRST_MODIFIER + NAMES.index(name) for name in ("bias", "slopes", "sinks"))


def differentiates() -> bool:
    """Whether one of the transforms that are active may ask for a derivative: any but vmap."""
    levels = torch._C._functorch.get_interpreter_stack() or ()
    return any(level.key() != torch._C._functorch.TransformType.Vmap for level in levels)


def refuse_tangents(ctx: Any, *_: Any) -> NoReturn:
    """The derivative in forward mode, of every function here."""
    raise NotImplementedError(
        "forward-mode automatic differentiation of attention is not implemented; use reverse mode."
    )


class AttentionFunction(torch.autograd.Function):
    """``flash_ext::fwd`` with ``flash_ext::bwd`` as its gradient; takes the operator's arguments."""

    generate_vmap_rule = True
    jvp = staticmethod(refuse_tangents)

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


_attention: Callable[..., tuple[Tensor, Tensor]] = AttentionFunction.apply


def apply_under_transforms(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    """:class:`AttentionFunction` with the operator's arguments.

    Autocast happens here, before anything is saved, as it does above the C++ function.
    """
    return _attention(*cast_as_autocast(q, k, v), *rest)


class ModifiedAttentionFunction(torch.autograd.Function):
    """``flash_ext::fwd_mod`` with ``flash_ext::bwd_mod`` as its gradient; takes the operator's arguments."""

    generate_vmap_rule = True
    jvp = staticmethod(refuse_tangents)

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
        result: tuple[Tensor, Tensor, Tensor] = torch.ops.flash_ext.fwd_mod.default(*args)
        return result

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
        out, lse, row_max = output
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(row_max)
        first_number = FIRST_MODIFIER + NUM_TENSORS
        ctx.save_for_backward(*inputs[:3], out, lse, *inputs[3:5], *inputs[10:first_number])
        *ctx.modifier_numbers, _, deterministic, backend = inputs[first_number:]
        ctx.numbers = inputs[5:10]
        ctx.flags = (deterministic or torch.are_deterministic_algorithms_enabled(), backend)

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        grads: list[Tensor | None] = [None] * NUM_FWD_ARGUMENTS
        if dout is None and dlse is None:
            return tuple(grads)
        q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, *modifier_tensors = ctx.saved_tensors
        need_q, need_k, need_v, *_ = ctx.needs_input_grad
        needs = [need_q or need_k or need_v, *(ctx.needs_input_grad[at] for at in (BIAS, SLOPES, SINKS))]
        found = _modified_gradient(
            torch.zeros_like(out) if dout is None else dout, q, k, v, out, lse, dlse, cu_seqlens_q,
            cu_seqlens_k, *ctx.numbers, *modifier_tensors, *ctx.modifier_numbers, *needs, *ctx.flags,
        )  # fmt: skip
        for at, grad in zip((0, 1, 2, BIAS, SLOPES, SINKS), found, strict=True):
            if ctx.needs_input_grad[at]:
                grads[at] = grad
        return tuple(grads)


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
        raise RuntimeError(
            "the second derivative of attention is not implemented. F.scaled_dot_product_attention has one "
            "under torch.nn.attention.sdpa_kernel(SDPBackend.MATH)."
        )


_modified_attention: Callable[..., tuple[Tensor, Tensor, Tensor]] = ModifiedAttentionFunction.apply
_modified_gradient: Callable[..., tuple[Tensor, ...]] = ModifiedGradientFunction.apply


def apply_modified_under_transforms(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    """:class:`ModifiedAttentionFunction` with the operator's arguments, cast as autocast would."""
    q, k, v = cast_as_autocast(*args[:3])
    rest = list(args[3:])
    bias = BIAS - 3
    if rest[bias] is not None and rest[bias].dtype not in (torch.float32, q.dtype):
        rest[bias] = rest[bias].float()
    return _modified_attention(q, k, v, *rest)


def cast_as_autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors in autocast's dtype where it is on, except those of float64."""
    device = tensors[0].device.type
    if not torch.amp.autocast_mode.is_autocast_available(device) or not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(t if t.dtype == torch.float64 else t.to(dtype) for t in tensors)
