"""The backward in the order of both versions of FlashAttention: the loops in float64 against autograd, and,
with a GPU, the kernels against float64.
"""

from __future__ import annotations

import pytest
import torch

from examples.ladder import native
from examples.ladder.algorithms import BlockSizes, Memory, blocks, flash_attention_2
from examples.ladder.backward import flash_attention_1_backward, flash_attention_2_backward
from tests.examples.test_ladder import close, exact, random_qkv

LOOPS = [flash_attention_1_backward, flash_attention_2_backward]
SCALE = 0.4


def by_autograd(q, k, v, dout, scale):
    """Gradients in float64."""
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    return torch.autograd.grad(exact(*leaves, scale=scale), leaves, dout.double())


def with_forward(seqlen_q, seqlen_k, sizes):
    """q, k, v, out, lse, dout in float64."""
    q, k, v = random_qkv(seqlen_q, seqlen_k, 5, 5)
    out, lse = flash_attention_2(q, k, v, sizes, SCALE)
    return q, k, v, out, lse, torch.randn_like(out)


# ---- the loops


@pytest.mark.parametrize("backward", LOOPS)
@pytest.mark.parametrize("seqlen_q, seqlen_k", [(29, 37), (40, 12), (1, 9), (16, 1)])
@pytest.mark.parametrize("sizes", [BlockSizes(8, 8), BlockSizes(3, 16), BlockSizes(64, 64)], ids=str)
def test_the_loops_agree_with_autograd(backward, seqlen_q, seqlen_k, sizes) -> None:
    q, k, v, out, lse, dout = with_forward(seqlen_q, seqlen_k, sizes)
    found = backward(q, k, v, out, lse, dout, sizes, SCALE)
    for got, expected in zip(found, by_autograd(q, k, v, dout, SCALE), strict=True):
        close(got, expected)


def test_key_blocks_may_come_in_any_order() -> None:
    sizes = BlockSizes(8, 8)
    inputs = with_forward(29, 37, sizes)
    forth = flash_attention_2_backward(*inputs, sizes, SCALE)
    back = flash_attention_2_backward(*inputs, sizes, SCALE, order=[4, 3, 2, 1, 0])
    for one, other in zip(forth, back, strict=True):
        close(one, other)


@pytest.mark.parametrize("backward", LOOPS)
def test_dq_crosses_the_border_twice_for_every_key_block(backward) -> None:
    """K and V are read once, dK and dV written once; what belongs to queries moves for every key block."""
    sizes = BlockSizes(6, 4)
    q, k, v, out, lse, dout = with_forward(24, 19, sizes)
    memory = Memory()
    backward(q, k, v, out, lse, dout, sizes, SCALE, memory)
    passes = len(blocks(19, 4))
    assert memory.read == 2 * k.numel() + 2 * q.numel() + passes * (3 * q.numel() + 2 * len(q))
    assert memory.written == 2 * k.numel() + len(q) + (passes + 1) * q.numel()


# ---- the kernels


def errors(version, batch, num_heads, seqlen_q, seqlen_k, head_dim) -> list[float]:
    """Of dq, dk and dv, as shares of the largest element of what is expected."""
    torch.manual_seed(0)
    q, k, v, dout = (
        torch.randn(batch, num_heads, n, head_dim, device="cuda").bfloat16()
        for n in (seqlen_q, seqlen_k, seqlen_k, seqlen_q)
    )
    out, lse = native.flash2(q, k, v)
    assert lse is not None
    scratch = native.BackwardScratch.empty(q)
    for x in scratch:
        x.fill_(torch.nan)  # any content will do
    found = native.backward(version, q, k, v, out, lse, dout, scratch)
    expected = by_autograd(q, k, v, dout, head_dim**-0.5)
    return [
        ((got.double() - right).abs().max() / right.abs().max()).item()
        for got, right in zip(found, expected, strict=True)
    ]


@pytest.mark.gpu
@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(
    "seqlen_q, seqlen_k", [(128, 128), (200, 200), (333, 333), (1, 300), (300, 2), (70, 513), (1024, 1024)]
)
def test_kernels_agree_with_float64(version, head_dim, seqlen_q, seqlen_k) -> None:
    assert max(errors(version, 2, 3, seqlen_q, seqlen_k, head_dim)) < 0.015


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128])
def test_the_first_version_has_the_same_bits_every_time(head_dim) -> None:
    """One CTA adds to a head's dQ, in one order; of the second version dK and dV alone have that."""
    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(2, 4, 1000, head_dim, device="cuda").bfloat16() for _ in range(4))
    out, lse = native.flash2(q, k, v)
    assert lse is not None
    for version, fixed in ((1, 3), (2, 2)):
        once, again = (native.backward(version, q, k, v, out, lse, dout) for _ in range(2))
        for one, other in list(zip(once, again, strict=True))[-fixed:]:
            assert torch.equal(one, other)
