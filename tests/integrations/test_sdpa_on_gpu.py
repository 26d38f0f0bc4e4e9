"""enable_sdpa on a GPU: what chooses torch's operators, what was there before, and what is built on them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import attention as torch_attention

import flash_ext
from tests.graphs import capture
from tests.integrations.test_sdpa_override import (
    FLASH,
    FLASH_BACKWARD,
    GROUPED,
    GROUPED_BACKWARD,
    MASKED,
    MASKED_BACKWARD,
    SDPA,
    SDPA_BACKWARD,
    check_jagged,
    counted,
    untouched,
)
from tests.qkv import sdpa_counts

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


def test_gpu_a_scale_that_is_no_number_runs_as_before() -> None:
    leaves = gpu(1, 2, 64, 64)
    before = sdpa_counts()
    with flash_ext.enable_sdpa():
        out = F.scaled_dot_product_attention(*leaves, scale=math.nan)
        out.sum().backward()
    after = sdpa_counts()
    assert out.shape == leaves[0].shape
    for name in (SDPA, SDPA_BACKWARD):
        assert after[name] == (before[name][0], before[name][1] + 1)


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


def grouped(head_dim: int = 64, rows: int = 96) -> list[Tensor]:
    options = {"device": "cuda", "dtype": torch.bfloat16, "requires_grad": True}
    shapes = (8, rows), (2, 96), (2, 96)
    return [torch.randn(2, heads, length, head_dim, **options) for heads, length in shapes]


def asks_cudnn_before_math() -> bool:
    """torch's own order, which it installs at the first selection."""
    probe = torch.empty(1, 1, 1, 8, device="cuda", dtype=torch.float16)
    torch._fused_sdp_choice(probe, probe, probe)
    order = torch._C._get_sdp_priority_order()
    backends = torch_attention.SDPBackend
    return order.index(backends.CUDNN_ATTENTION.value) < order.index(backends.MATH.value)


def is_offered(leaves: list[Tensor], mask: Tensor | None, causal: bool) -> tuple[dict[str, int], str]:
    """What must be served of a call with grouped heads, by the selector's own words, by which operator."""
    params = torch.backends.cuda.SDPAParams(*leaves, mask, 0.0, causal, True)
    if torch.backends.cuda.can_use_efficient_attention(params):
        return {MASKED: 1, MASKED_BACKWARD: 1}, "memory-efficient"
    if asks_cudnn_before_math() and torch.backends.cuda.can_use_cudnn_attention(params):
        return {GROUPED: 1, GROUPED_BACKWARD: 1}, "cuDNN"
    return {}, "nobody"


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("kind", ["bool", "float", "padding", "rows", "causal, lengths differ"])
def test_gpu_grouped_heads_with_a_mask(kind: str, head_dim: int) -> None:
    causal = kind.startswith("causal")
    leaves = grouped(head_dim, rows=64 if causal else 96)
    mask: Tensor | None = torch.randn(2, 8, 96, 96, device="cuda", dtype=torch.bfloat16)
    if kind == "bool":
        mask = mask > -1
    elif kind == "padding":
        mask = (torch.arange(96, device="cuda") < torch.tensor([[96], [50]], device="cuda"))[:, None, None]
    elif kind == "rows":
        mask = mask[0, 0] > -1
    elif causal:
        mask = None
    served, by = is_offered(leaves, mask, causal)
    if kind in ("bool", "float", "rows") and torch.cuda.get_device_capability()[0] == 9:
        assert by != "nobody", "on Hopper the selector asks an operator of ours"
    options = {"is_causal": True} if causal else {"attn_mask": mask}
    beside_math(leaves, served, enable_gqa=True, **options)


@pytest.mark.parametrize("head_dim", [136, 192, 256])
def test_gpu_grouped_heads_with_a_mask_and_larger_heads(head_dim: int) -> None:
    """docs/integrations/sdpa.md says where these are offered. What is offered is served on any GPU."""
    leaves = grouped(head_dim)
    mask = torch.randn(2, 8, 96, 96, device="cuda", dtype=torch.bfloat16)
    served, by = is_offered(leaves, mask, False)
    beside_math(leaves, served, attn_mask=mask, enable_gqa=True)
    if not torch.__version__.startswith("2.11."):
        return
    if not asks_cudnn_before_math():
        assert by == "nobody"
    elif torch.cuda.get_device_capability() == (9, 0):
        largest = 256 if torch.backends.cudnn.version() >= 91000 else 128
        assert by == ("cuDNN" if head_dim <= largest else "nobody")


@pytest.mark.parametrize("kind", ["gradient of the mask", "three dimensions of the mask", "head_dim 68"])
def test_gpu_grouped_heads_with_a_mask_that_nobody_is_offered(kind: str) -> None:
    """docs/integrations/sdpa.md names these. A torch that offers one gets it served, and fails here."""
    leaves = grouped(head_dim=68 if kind == "head_dim 68" else 64)
    mask = torch.randn(2, 8, 96, 96, device="cuda", dtype=torch.bfloat16)
    if kind == "three dimensions of the mask":
        mask = mask[0]
    mask.requires_grad_(kind == "gradient of the mask")
    served, by = is_offered(leaves, mask, False)
    beside_math(leaves, served, attn_mask=mask, enable_gqa=True)
    if torch.__version__.startswith("2.11."):
        assert by == "nobody"


def test_gpu_cudnn_asked_for_by_name_is_cudnn() -> None:
    leaves = [t.detach() for t in gpu(2, 4, 96, 64)]
    mask = torch.randn(96, 96, device="cuda", dtype=torch.bfloat16)
    if not torch.backends.cuda.can_use_cudnn_attention(
        torch.backends.cuda.SDPAParams(*leaves, mask, 0.0, False, False)
    ):
        pytest.skip("this GPU or torch has no attention by cuDNN")
    with torch_attention.sdpa_kernel(torch_attention.SDPBackend.CUDNN_ATTENTION):
        expected = F.scaled_dot_product_attention(*leaves, attn_mask=mask)
        with flash_ext.enable_sdpa():
            before = sdpa_counts()
            got = F.scaled_dot_product_attention(*leaves, attn_mask=mask)
            after = sdpa_counts()
    assert torch.equal(got, expected)
    assert after[GROUPED] == (before[GROUPED][0], before[GROUPED][1] + 1)


def test_gpu_varlen_attn() -> None:
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    q, k, v = (t.detach().flatten(0, 1).requires_grad_() for t in gpu(1, 150, 4, 64))
    bounds = torch.tensor([0, 50, 150], dtype=torch.int32, device="cuda")
    with flash_ext.enable_sdpa(), counted(**{FLASH: 1, FLASH_BACKWARD: 1}):
        out = varlen.varlen_attn(q, k, v, bounds, bounds, 100, 100)
        out.sum().backward()
    expected = flash_ext.attention_varlen(q, k, v, bounds, bounds)
    assert torch.equal(out, expected)


@pytest.mark.parametrize("causal", [False, True])
def test_gpu_jagged_nested_tensors(causal: bool) -> None:
    with flash_ext.enable_sdpa():
        check_jagged("cuda", causal)


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


@pytest.mark.caching
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


def devices_of(names: tuple[str, ...], captured: bool) -> dict[str, list[str | None]]:
    """Where the results of a call of each forward operator are, None for what is no tensor."""
    q, k, v = (t.detach() for t in gpu(2, 4, 96, 64))
    mask = torch.randn(96, 96, device="cuda", dtype=torch.bfloat16)
    as_ours = [t.transpose(1, 2) for t in (q, k, v)]
    k_few, v_few = (t[:, :2].contiguous() for t in (k, v))
    aten = torch.ops.aten
    calls = {
        SDPA: lambda: aten._scaled_dot_product_flash_attention(q, k, v),
        FLASH: lambda: aten._flash_attention_forward(*as_ours, None, None, 96, 96, 0.0, False, False),
        MASKED: lambda: aten._scaled_dot_product_efficient_attention(
            q, k, v, mask.expand(2, 4, 96, 96), True),
        GROUPED: lambda: aten._scaled_dot_product_cudnn_attention(q, k_few, v_few, mask, True),
    }  # fmt: skip
    results = {name: calls[name]() for name in names}
    if captured:
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = {name: calls[name]() for name in names}
        graph.replay()
    torch.cuda.synchronize()
    return {name: [t.device.type if isinstance(t, Tensor) else None for t in values]
            for name, values in results.items()}  # fmt: skip


@pytest.mark.caching
@pytest.mark.parametrize("captured", [False, True])
def test_gpu_results_are_where_torchs_own_are(captured: bool) -> None:
    """While a graph is captured every tensor is on the GPU; else two numbers of one operator are not."""
    names = (SDPA, FLASH, MASKED, GROUPED)
    with flash_ext.enable_sdpa(), counted(**dict.fromkeys(names, 1 + captured)):
        ours = devices_of(names, captured)
    for name, devices in ours.items():
        assert devices.count("cpu") == (2 if name == MASKED and not captured else 0), name
    runs_cudnn = torch.cuda.get_device_capability()[0] == 9
    for name, devices in devices_of(names if runs_cudnn else names[:3], captured).items():
        both = [(a, b) for a, b in zip(ours[name], devices, strict=True) if a is not None and b is not None]
        assert all(a == b for a, b in both), name


@pytest.mark.caching
def test_gpu_gradients_in_a_graph_with_a_mask() -> None:
    """Forward and backward of a masked call, captured and run again on other numbers."""
    leaves = gpu(2, 4, 96, 64)
    mask = torch.randn(96, 96, device="cuda", dtype=torch.bfloat16)
    dout = torch.randn(2, 4, 96, 64, device="cuda", dtype=torch.bfloat16)

    def call() -> list[Tensor]:
        out = F.scaled_dot_product_attention(*leaves, attn_mask=mask)
        return [out, *torch.autograd.grad(out, leaves, dout)]

    with flash_ext.enable_sdpa(), counted(**{MASKED: 3, MASKED_BACKWARD: 3}):
        graph, captured = capture(call)
        with torch.no_grad():
            for leaf in leaves:
                leaf.normal_()
        graph.replay()
        for got, expected in zip(captured, call(), strict=True):
            close(got, expected)


def test_gpu_a_backward_after_switching_off_takes_our_forward() -> None:
    """With rows that are no multiple of 32, where torch's backward reads the padding of lse."""
    leaves = gpu(2, 4, 90, 64)
    mask = torch.randn(90, 96, device="cuda", dtype=torch.bfloat16)[:, :90]
    with flash_ext.enable_sdpa(), counted(**{MASKED: 1}):
        out = F.scaled_dot_product_attention(*leaves, attn_mask=mask)
    dout = torch.randn_like(out)
    got = torch.autograd.grad(out, leaves, dout)
    with torch_attention.sdpa_kernel(torch_attention.SDPBackend.MATH):
        expected = torch.autograd.grad(F.scaled_dot_product_attention(*leaves, attn_mask=mask), leaves, dout)
    for a, b in zip(got, expected, strict=True):
        close(a, b)
