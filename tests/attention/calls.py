"""Tensors and calls on a target, for tests that look at the results themselves."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

import flash_ext
from flash_ext import AuxRequest
from tests.harness import Target, call_backward, call_forward
from tests.inputs import Inputs

RESULTS = ("out", "lse", "dq", "dk", "dv")


def normal(target: Target, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, device=target.device).to(dtype)


def make_qkv(
    target: Target, batch: int, rows: int, keys: int, heads: int, heads_k: int, head_dim: int,
    dtype: torch.dtype = torch.bfloat16,
) -> list[Tensor]:  # fmt: skip
    """q, k, v of a dense call, each with a gradient."""
    shapes = ((rows, heads), (keys, heads_k), (keys, heads_k))
    return [normal(target, batch, n, h, head_dim, dtype=dtype).requires_grad_() for n, h in shapes]


def attend(target: Target, q: Tensor, k: Tensor, v: Tensor, *cu: Tensor, **options) -> tuple[Tensor, Tensor]:
    """out and lse; of a packed call where cu_seqlens are given."""
    function = flash_ext.attention_varlen if cu else flash_ext.attention
    options = {"return_aux": AuxRequest(lse=True), "backend": target.path} | options
    out, aux = function(q, k, v, *cu, **options)
    return out, aux.lse


def differentiate(
    target: Target, tensors: Sequence[Tensor], dout: Tensor | None = None, *cu: Tensor, **options
) -> list[Tensor]:
    """out, lse, dq, dk, dv in the deterministic mode, of copies that keep the strides.

    Without ``dout`` the gradients are those of out.sum().
    """
    leaves = [t.detach().requires_grad_() for t in tensors]
    out, lse = attend(target, *leaves, *cu, **({"deterministic": True} | options))
    dout = torch.ones_like(out) if dout is None else dout
    return [out.detach(), lse.detach(), *torch.autograd.grad(out, leaves, dout)]


def results(x: Inputs, target: Target) -> list[Tensor]:
    """The same of a case's inputs, by the operators."""
    out, lse = call_forward(x, target)
    return [out, lse, *call_backward(x, out, lse, target)]


def assert_same(got: Sequence[Tensor], expected: Sequence[Tensor], what: str = "") -> None:
    """Bit for bit, of out, lse and the gradients as far as they are given."""
    for name, a, b in zip(RESULTS, got, expected):
        assert torch.equal(a, b), f"{what}: {name} differs in {int((a != b).sum())} of {a.numel()} elements"
