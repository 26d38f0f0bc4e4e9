"""What fp32 allows of lse, row maxima and long sums: soft caps, a million keys."""

from __future__ import annotations

import math

import pytest
import torch

import flash_ext
from flash_ext import AuxRequest
from flash_ext._ops.spec import AttnSpec, default_scale
from tests.harness import Target, on_gpu_paths, on_paths
from tests.many_keys import by_parts
from tests.reference import attention_reference

# Whole numbers: products and their sums are exact in fp32, so all errors are those of cap and softmax.
WHOLE_SIZE = 32.0  # standard deviation of a product of 64 numbers from -3 to 3


def whole_numbers(target: Target, dtype: torch.dtype, d: int = 64) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(3)
    return tuple(torch.randint(-3, 4, (1, 512, 2, d), device=target.device).to(dtype) for _ in range(3))


def has_series(target: Target, d: int) -> bool:
    """Whether small capped scores are formed by a series: portable forwards do at 128 on Hopper."""
    return target.path == "sm90" or (d == 128 and torch.cuda.get_device_capability()[0] == 9)


def capped_truth(q: torch.Tensor, k: torch.Tensor, scale: float, cap: float) -> torch.Tensor:
    scores = torch.einsum("bqhd,bkhd->bhqk", q.double(), k.double()) * scale
    return cap * torch.tanh(scores / cap)


@on_gpu_paths
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize(("size", "bound"), [(1.0, 1.2e-6), (3.0, 3e-6)])
def test_softcap_keeps_the_digits_of_lse(target: Target, d: int, size: float, bound: float) -> None:
    """Where no score exceeds 3/4 of the cap. A quotient, off by 2e-7 of the cap, gives up to 6e-6 here."""
    q, k, v = whole_numbers(target, torch.bfloat16, d)
    scale, cap = size / WHOLE_SIZE * math.sqrt(64 / d), 30.0
    _, (lse, _) = flash_ext.attention(
        q, k, v, scale=scale, softcap=cap, return_aux=AuxRequest(lse=True), backend=target.path
    )
    truth = capped_truth(q, k, scale, cap)
    assert float(truth.abs().max()) < 0.63 * cap
    allowed = bound if has_series(target, d) else max(bound, 2e-6)
    assert float((lse - truth.logsumexp(-1)).abs().max()) <= allowed


@on_gpu_paths
@pytest.mark.parametrize("d", [64, 128])
def test_softcap_keeps_the_digits_of_small_maxima(target: Target, d: int) -> None:
    q, k, v = whole_numbers(target, torch.bfloat16, d)
    scale, cap = 1e-4 / WHOLE_SIZE, 30.0
    asked = {"scale": scale, "softcap": cap, "backend": target.path}
    _, (_, top) = flash_ext.attention(q, k, v, return_aux=AuxRequest(max_scores=True), **asked)
    truth = capped_truth(q, k, scale, cap).amax(-1)
    off = (top - truth).abs()
    assert float(((off / truth.abs()) if has_series(target, d) else off / (0.3 * cap)).max()) <= 1e-6


@on_paths
@pytest.mark.parametrize("d", [64, 128])
def test_tiny_scores(target: Target, d: int) -> None:
    """Of 1e-4 and less: lse is the logarithm of a sum of numbers near 1, and a maximum keeps its digits."""
    q, k, v = whole_numbers(target, torch.bfloat16, d)
    scale = 1e-4 / WHOLE_SIZE
    _, (lse, top) = flash_ext.attention(
        q, k, v, scale=scale, return_aux=AuxRequest(lse=True, max_scores=True), backend=target.path
    )
    truth = torch.einsum("bqhd,bkhd->bhqk", q.double(), k.double()) * scale
    assert float((lse - truth.logsumexp(-1)).abs().max()) <= 1.2e-6
    largest = truth.amax(-1)
    assert float(largest.min()) > 0
    assert float(((top - largest) / largest).abs().max()) <= 1e-6


@on_gpu_paths
def test_a_million_keys(target: Target) -> None:
    """Weights added one by one leave lse off by 1e-5 and more, one sum of products out by 1e-3."""
    torch.manual_seed(4)
    rows, keys = 256, 2**20
    q = torch.randn(1, rows, 1, 64, device=target.device).half()
    k = torch.randn(1, keys, 1, 64, device=target.device).half()
    v = torch.ones_like(k)
    path = target.asking(kv_splits=0).choice
    out, (lse, _) = flash_ext.attention(q, k, v, causal=True, return_aux=AuxRequest(lse=True), backend=path)
    for row in range(0, rows, 37):
        seen = keys - rows + row + 1
        truth = (k[0, :seen, 0].double() @ q[0, row, 0].double() / 8).logsumexp(0)
        assert abs(float(lse[0, 0, row] - truth)) <= 1e-5
    assert float((out.float() - 1).abs().max()) <= 1e-3


@pytest.mark.slow
@on_gpu_paths
@pytest.mark.parametrize("keys", [2**20, 2**22])
def test_millions_of_keys_beside_a_naive_evaluation(target: Target, keys: int) -> None:
    """Rows whose weights are alike, where a sum that loses bits moves all of out: whole keys, and parts."""
    torch.manual_seed(6)
    rows, heads, d = 256, 8, 128
    q, k, v = (torch.randn(n, h, d, device=target.device, dtype=torch.bfloat16)
               for n, h in ((rows, heads), (keys, 1), (keys, 1)))  # fmt: skip
    truth, wanted = by_parts(q, k[:, 0], v[:, 0], exact=True)
    naive, _ = by_parts(q, k[:, 0], v[:, 0], exact=False)
    allowed = 1.5 * float((naive - truth).norm())
    for choice in (target.path, target.asking(kv_splits=0).choice):
        out, (lse, _) = flash_ext.attention(
            q[None], k[None], v[None], causal=True, return_aux=AuxRequest(lse=True), backend=choice
        )
        assert float((lse[0] - wanted).abs().max()) <= 1e-5, choice
        assert float((out[0] - truth).norm()) <= allowed, choice


def test_the_naive_evaluation_is_attention() -> None:
    torch.manual_seed(6)
    q, k, v = (torch.randn(n, h, 64).bfloat16() for n, h in ((20, 4), (300, 1), (300, 1)))
    spec = AttnSpec(default_scale(64), -1, 0)
    wanted, wanted_lse = attention_reference(q[None], k[None], v[None], spec)
    for exact, limit in ((True, 1e-12), (False, 5e-3)):
        out, lse = by_parts(q, k[:, 0], v[:, 0], exact, part=128)
        assert float((out - wanted[0]).norm()) <= limit * float(wanted.norm())
        assert float((lse - wanted_lse[0]).abs().max()) <= limit


@on_gpu_paths
@pytest.mark.parametrize("packed", [False, True])
def test_stretches_meet_windows_and_empty_rows(target: Target, packed: bool) -> None:
    """Rows of one tile begin in different stretches, some see few keys behind a boundary, some none."""
    torch.manual_seed(5)
    rows, keys, left = 500, 100_000, 16_500
    q = torch.randn(1, rows, 1, 64, device=target.device).half()
    k, v = (torch.randn(1, keys, 1, 64, device=target.device).half() for _ in range(2))
    more = {"scale": 0.125, "window_size": (left, 0), "backend": target.asking(kv_splits=0).choice}
    for shift in (0, 1_200, 1_596, 1_696, 30_000, keys):  # 1,696: the last key ends a stretch
        n = keys - min(shift, keys - 1)
        seen_k, seen_v = k[:, :n], v[:, :n]
        if packed:
            bounds = [torch.tensor([0, x], dtype=torch.int32, device=target.device) for x in (rows, n)]
            out, (lse, _) = flash_ext.attention_varlen(
                q[0], seen_k[0], seen_v[0], *bounds, return_aux=AuxRequest(lse=True), **more
            )
            out, lse = out[None], lse[None]
        else:
            out, (lse, _) = flash_ext.attention(q, seen_k, seen_v, return_aux=AuxRequest(lse=True), **more)
        place = torch.arange(n - rows, n, device=target.device)[:, None]
        key = torch.arange(n, device=target.device)[None]
        scores = (q[0, :, 0].double() @ seen_k[0, :, 0].double().T) * 0.125
        scores.masked_fill_((key > place) | (key < place - left), -math.inf)
        truth = torch.nan_to_num(scores.softmax(-1)) @ seen_v[0, :, 0].double()
        wanted = scores.logsumexp(-1)
        assert torch.equal(lse[0, 0].isinf(), wanted.isinf())
        finite = wanted.isfinite()
        assert float((lse[0, 0] - wanted)[finite].abs().max()) <= 1e-5
        assert float((out[0, :, 0] - truth).abs().max()) <= 2e-3 * float(truth.abs().max())
