"""The rungs of the ladder that can be timed side by side: attention from the textbook to flash_ext."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import flash_ext

from . import native
from .algorithms import BlockSizes

Call = Callable[[], object]
# From q, k, v and the gradient of the output to the call that is timed, which returns dq, dk and dv.
Backward = Callable[[Tensor, Tensor, Tensor, Tensor], Call]


@dataclass(frozen=True)
class Rung:
    """One way to compute attention.

    Attributes:
        name: as tables and files call it.
        label: as pictures call it.
        prepare: from q, k, v (batch, num_heads, seqlen, head_dim), contiguous, to the call that is timed.
        needs: "", "cuda" or "triton".
        algorithm: as :func:`examples.ladder.costs.kernel_bytes` knows it; "" where its tiles are not ours to
            say.
        sizes: tiles by head_dim.
        backward: as ``prepare``, for the gradients; None where they are not timed.
    """

    name: str
    label: str
    prepare: Callable[[Tensor, Tensor, Tensor], Call]
    needs: str = ""
    algorithm: str = ""
    sizes: dict[int, BlockSizes] | None = None
    backward: Backward | None = None

    def takes(self, device: torch.device) -> bool:
        """Whether it can run there."""
        if not self.needs:
            return True
        there = device.type == "cuda" and torch.version.hip is None
        return there and (self.needs != "triton" or importlib.util.find_spec("triton") is not None)


def standard(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Scores and weights in memory."""
    return ((q * q.shape[-1] ** -0.5) @ k.mT).softmax(-1) @ v


def _pytorch(backend: SDPBackend) -> Callable[[Tensor, Tensor, Tensor], Call]:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v)

    return lambda q, k, v: lambda: attend(q, k, v)


def _ours(backend: str | None) -> Callable[[Tensor, Tensor, Tensor], Call]:
    def prepare(q: Tensor, k: Tensor, v: Tensor) -> Call:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return lambda: flash_ext.attention(q, k, v, backend=backend)

    return prepare


def _flash1(q: Tensor, k: Tensor, v: Tensor) -> Call:
    state = native.Flash1State.empty(q)
    return lambda: native.flash1(q, k, v, state=state)


def _flash2(one_cta_per_head: bool = False, normalise_each_step: bool = False) -> Callable[..., Call]:
    return lambda q, k, v: lambda: native.flash2(q, k, v, one_cta_per_head, normalise_each_step)


def _triton(q: Tensor, k: Tensor, v: Tensor) -> Call:
    from . import triton_flash2

    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return lambda: triton_flash2.attention(q, k, v)


def _ladder_backward(version: int) -> Backward:
    def prepare(q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> Call:
        out, lse = native.flash2(q, k, v)
        assert lse is not None
        scratch = native.BackwardScratch.empty(q)
        return lambda: native.backward(version, q, k, v, out, lse, dout, scratch)

    return prepare


def _by_autograd(
    forward: Callable[[Tensor, Tensor, Tensor], Call], is_seqlen_first: bool = False
) -> Backward:
    """The gradients of a rung as its users ask for them; the forward is no part of the call."""

    def prepare(q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> Call:
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out = forward(*leaves)()
        assert isinstance(out, Tensor)
        dout = dout.transpose(1, 2) if is_seqlen_first else dout
        return lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)

    return prepare


FLASH1_SIZES = {head_dim: sizes[0] for head_dim, sizes in native.FLASH1_SIZES.items()}
RUNGS = {
    rung.name: rung
    for rung in (
        Rung("standard", "standard attention", lambda q, k, v: lambda: standard(q, k, v),
             algorithm="standard"),
        Rung("fa1", "FlashAttention (ladder)", _flash1, "cuda", "flash1", FLASH1_SIZES, _ladder_backward(1)),
        Rung("fa2-one-cta", "FlashAttention-2 (ladder), one CTA a head", _flash2(one_cta_per_head=True),
             "cuda", "flash2", native.FLASH2_SIZES),
        Rung("fa2-divided", "FlashAttention-2 (ladder), divided at each step",
             _flash2(normalise_each_step=True), "cuda", "flash2", native.FLASH2_SIZES),
        Rung("fa2-ladder", "FlashAttention-2 (ladder)", _flash2(), "cuda", "flash2", native.FLASH2_SIZES,
             _ladder_backward(2)),
        Rung("triton", "FlashAttention-2 (Triton)", _triton, "triton"),
        Rung("mem", "memory-efficient (PyTorch)", _pytorch(SDPBackend.EFFICIENT_ATTENTION), "cuda"),
        Rung("fa2", "FlashAttention-2 (PyTorch)", _pytorch(SDPBackend.FLASH_ATTENTION),
             backward=_by_autograd(_pytorch(SDPBackend.FLASH_ATTENTION))),
        Rung("sm80", "flash_ext, sm80", _ours("sm80"), "cuda"),
        Rung("flash_ext", "flash_ext", _ours(None), backward=_by_autograd(_ours(None), is_seqlen_first=True)),
    )
}  # fmt: skip


def rungs_for(device: torch.device) -> list[Rung]:
    """Those that can run there, in order."""
    return [rung for rung in RUNGS.values() if rung.takes(device)]
