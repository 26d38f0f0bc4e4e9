"""enable_sdpa on a GPU: what chooses torch's operators, what was there before, and what is built on them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import attention as torch_attention

import flash_ext
from flash_ext.sdpa_override import sdpa_counts
from tests.test_sdpa_override import (
    FLASH,
    FLASH_BACKWARD,
    MASKED,
    MASKED_BACKWARD,
    SDPA,
    SDPA_BACKWARD,
    counted,
    untouched,
)

__all__ = ["untouched"]  # a fixture
pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("untouched")]


def gpu(*shape: int, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    return [torch.randn(shape, device="cuda", dtype=dtype, requires_grad=True) for _ in range(3)]


def close(got: Tensor, expected: Tensor) -> None:
    error = (got.float() - expected.float()).norm() / expected.float().norm().clamp(min=1e-6)
    assert error < 0.02, f"relative error {error:.3g}"


def beside_math(leaves: list[Tensor], served: dict[str, int], **options: Any) -> None:
    """F.sdpa on our kernels against torch's unfused one, forward and backward."""
    bias = options.get("attn_mask")
    every = [*leaves, bias] if bias is not None and bias.requires_grad else leaves
    with torch_attention.sdpa_kernel(torch_attention.SDPBackend.MATH):
        expected = F.scaled_dot_product_attention(*leaves, **options)
        dout = torch.randn_like(expected)
        wanted = torch.autograd.grad(expected, every, dout)
    with flash_ext.enable_sdpa(), counted(**served):
        out = F.scaled_dot_product_attention(*leaves, **options)
        grads = torch.autograd.grad(out, every, dout)
    close(out, expected)
    for got, own in zip(grads, wanted, strict=True):
        close(got, own)


@pytest.mark.parametrize("shape", [(2, 4, 128, 64), (1, 2, 100, 128), (1, 1, 33, 80), (1, 2, 64, 256)])
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"scale": 0.2}], ids=str)
def test_gpu_sdpa(shape: tuple, options: dict) -> None:
    beside_math(gpu(*shape), {SDPA: 1, SDPA_BACKWARD: 1}, **options)


@pytest.mark.parametrize("kind", ["bool", "float", "float with a gradient", "padding"])
def test_gpu_sdpa_with_a_mask(kind: str) -> None:
    leaves = gpu(2, 4, 96, 64)
    mask = torch.randn(2, 4, 96, 96, device="cuda", dtype=torch.bfloat16)
    if kind == "bool":
        mask = mask > -1
    elif kind == "padding":
        mask = (torch.arange(96, device="cuda") < torch.tensor([[96], [50]], device="cuda"))[:, None, None]
    elif kind == "float with a gradient":
        mask.requires_grad_()
    beside_math(leaves, {MASKED: 1, MASKED_BACKWARD: 1}, attn_mask=mask)


def test_gpu_causal_with_lengths_that_differ() -> None:
    q, k, v = gpu(2, 4, 96, 64)
    longer = gpu(2, 4, 160, 64)[1:]
    beside_math([q, *longer], {MASKED: 1, MASKED_BACKWARD: 1}, is_causal=True)
    beside_math([longer[0], k, v], {MASKED: 1, MASKED_BACKWARD: 1}, is_causal=True)


@pytest.mark.parametrize("call", ["dropout", "float32", "head_dim 320"])
def test_gpu_what_is_not_served_runs_as_before(call: str) -> None:
    dtype = torch.float32 if call == "float32" else torch.half
    leaves = gpu(1, 2, 64, 320 if "320" in call else 64, dtype=dtype)
    options = {"dropout_p": 0.5} if call == "dropout" else {}
    torch.manual_seed(0)
    expected = F.scaled_dot_product_attention(*leaves, **options)
    with flash_ext.enable_sdpa():
        before = sdpa_counts()
        torch.manual_seed(0)
        got = F.scaled_dot_product_attention(*leaves, **options)
        got.sum().backward()
        assert all(sdpa_counts()[name][0] == before[name][0] for name in before)
    assert got.shape == expected.shape and got.isfinite().all()
    if call != "dropout":
        close(got, expected)


def test_gpu_order_of_the_selector_is_restored() -> None:
    q, k, v = gpu(1, 1, 16, 64)
    before = F.scaled_dot_product_attention(q, k, v)  # installs torch's order
    own = torch._C._get_sdp_priority_order()
    try:
        for order in ([0, 1, 2, 3, 4], own):
            torch._C._set_sdp_priority_order(order)
            with flash_ext.enable_sdpa():
                assert torch._C._get_sdp_priority_order()[:2] == [1, 2]
            assert torch._C._get_sdp_priority_order() == order
    finally:
        torch._C._set_sdp_priority_order(own)
    assert torch.equal(F.scaled_dot_product_attention(q, k, v), before)


def test_gpu_grouped_heads() -> None:
    q = torch.randn(2, 8, 64, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    k, v = (torch.randn(2, 2, 64, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in "kv")
    beside_math([q, k, v], {SDPA: 1, SDPA_BACKWARD: 1}, enable_gqa=True, is_causal=True)


def test_gpu_varlen_attn() -> None:
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    q, k, v = (t.detach().flatten(0, 1).requires_grad_() for t in gpu(1, 150, 4, 64))
    bounds = torch.tensor([0, 50, 150], dtype=torch.int32, device="cuda")
    with flash_ext.enable_sdpa(), counted(**{FLASH: 1, FLASH_BACKWARD: 1}):
        out = varlen.varlen_attn(q, k, v, bounds, bounds, 100, 100)
        out.sum().backward()
    expected = flash_ext.attention_varlen(q, k, v, bounds, bounds)
    assert torch.equal(out, expected)


def test_gpu_jagged_nested_tensors() -> None:
    rows = [torch.randn(n, 4, 64, device="cuda", dtype=torch.bfloat16) for n in (30, 64)]
    nested = torch.nested.nested_tensor(rows, layout=torch.jagged).transpose(1, 2)
    before = sdpa_counts()[FLASH][0]
    with flash_ext.enable_sdpa():
        out = F.scaled_dot_product_attention(nested, nested, nested)
    assert sdpa_counts()[FLASH][0] == before + 1
    for got, own in zip(out.transpose(1, 2).unbind(), rows):
        close(got, flash_ext.attention(own[None], own[None], own[None])[0])


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("masked", [False, True])
def test_gpu_compiled(backend: str, masked: bool) -> None:
    if backend == "inductor":
        pytest.importorskip("triton")
    leaves = gpu(2, 4, 96, 64)
    options = {"attn_mask": torch.randn(96, 96, device="cuda", dtype=torch.bfloat16)} if masked else {}

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q * 1.5, k, v, **options).sin()

    with flash_ext.enable_sdpa():
        expected = call(*leaves)
        wanted = torch.autograd.grad(expected.sum(), leaves)
        before = sdpa_counts()[MASKED if masked else SDPA][0]
        got = torch.compile(call, fullgraph=True, backend=backend)(*leaves)
        grads = torch.autograd.grad(got.sum(), leaves)
        assert sdpa_counts()[MASKED if masked else SDPA][0] == before + 1
    close(got, expected)
    for a, b in zip(grads, wanted):
        close(a, b)


def test_gpu_graph_capture() -> None:
    q, k, v = (t.detach() for t in gpu(2, 4, 96, 64))
    with flash_ext.enable_sdpa(), counted(**{SDPA: 2}):
        F.scaled_dot_product_attention(q, k, v)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = F.scaled_dot_product_attention(q, k, v)
    q.normal_()
    graph.replay()
    close(out, F.scaled_dot_product_attention(q, k, v))
