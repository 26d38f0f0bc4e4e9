"""Infinities, range, rounding; NaN that stays where it is, and memory that was not written."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import flash_ext
from tests import compare
from tests.attention.calls import RESULTS, attend, differentiate, normal
from tests.cases import DATA_KINDS, dense, packed
from tests.harness import Target, on_all_tiles, on_paths, on_targets, run_case, run_cases
from tests.memory import poison_pool


def full(target: Target, shape: tuple[int, ...], value: float, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.full(shape, value, dtype=dtype, device=target.device)


# ---- infinities, range, rounding ----


@on_all_tiles
def test_every_kind_of_data(target: Target) -> None:
    """Outliers, large values, subnormal numbers, moving maxima."""
    rows, keys = (150, 200) if target.device == "cuda" else (40, 60)
    cases = [
        dense(2, rows, keys, 4, 2, d, data=data, dtype=dtype, causal=causal, backward=data != "inf_value")
        for data in DATA_KINDS
        for dtype in ("bf16", "fp16")
        for d in (64, 128)
        for causal in (False, True)
    ]
    run_cases(cases, target, cpu=21)


@on_paths
def test_one_key_with_a_hugely_negative_logit(target: Target) -> None:
    """The raw dot product is -524,288, below every sentinel: the weight is 1 all the same, out is v."""
    q, k, v = (
        full(target, (1, 3, 2, 128), 64),
        full(target, (1, 1, 2, 128), -64),
        normal(target, 1, 1, 2, 128),
    )
    out, lse = attend(target, q, k, v)
    assert torch.equal(out, v.expand_as(out))
    assert float((lse + 64 * 64 * math.sqrt(128)).abs().max()) <= 3e-6 * 64 * 64 * math.sqrt(128)


@on_paths
def test_raw_logits_beyond_the_range_of_fp16(target: Target) -> None:
    q = full(target, (1, 70, 2, 80), 256, torch.float16)
    v = normal(target, 1, 70, 2, 80, dtype=torch.float16)
    got = differentiate(target, (q, q, v), deterministic=False)
    assert all(torch.isfinite(t).all() for t in got)
    # All rows are one mean and round alike: taken for 70 independent ones they would look like a bias.
    for row in got[0].unbind(1):
        compare.assert_within_gates("out", row, v.double().mean(1))


@on_paths
def test_strongly_negative_lse(target: Target) -> None:
    """lse near -122: keys beyond the end, with score 0, would have the weight e^122."""
    for seqlen_k in (128, *range(1, 128, 7)):
        q, k = normal(target, 1, 3, 2, 64) * 0.1 + 1, normal(target, 1, seqlen_k, 2, 64) * 0.1
        k = (k - 128 / 8).to(torch.bfloat16)
        qkv = (q.to(torch.bfloat16), k, normal(target, 1, seqlen_k, 2, 64))
        got = differentiate(target, qkv, deterministic=False)
        assert all(torch.isfinite(t).all() for t in got), f"{seqlen_k} keys"
        # dv sums the weights of each row over the keys: one per row, whatever the logits are.
        assert float((got[4].double().sum(1) - 3).abs().max()) < 0.1, f"{seqlen_k} keys"


@on_all_tiles
def test_unusual_scales(target: Target) -> None:
    cases = [
        dense(2, 100, 130, 4, 2, 64, scale=scale, causal=causal, dlse=causal)
        for scale in (0.0, -1 / 8, 1e-30, 1e4, -0.5)
        for causal in (False, True)
    ]
    run_cases(cases, target, cpu=4)
    run_cases([c.replace(window=(20, 5)) for c in cases], target, cpu=3)


@pytest.mark.parametrize("scale", [math.nan, math.inf, -math.inf])
@on_paths
def test_scales_that_are_no_numbers(target: Target, scale: float) -> None:
    q = normal(target, 1, 8, 1, 64)
    with pytest.raises(ValueError, match="scale must be finite"):
        flash_ext.attention(q, q, q, scale=scale, backend=target.path)


@on_paths
def test_the_largest_fp16_value_does_not_overflow(target: Target) -> None:
    q, k = (normal(target, 2, 200, 4, 64, dtype=torch.float16) for _ in range(2))
    out = flash_ext.attention(q, k, full(target, (2, 200, 4, 64), 65504, torch.float16), backend=target.path)
    assert torch.isfinite(out).all()


@on_paths
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_fp16_gradients_of_large_numbers(target: Target, head_dim: int, deterministic: bool) -> None:
    """dO and V of size 100 make a dS of some ten thousand, which fp16 still holds."""
    torch.manual_seed(5)
    sizes = [(200, 1.0), (head_dim, 1.0), (head_dim, 100.0), (200, 100.0)]
    q, k, v, dout = ((torch.randn(2, n, 2, head_dim) * size).half().to(target.device) for n, size in sizes)
    q64, k64, v64, dout64 = (t.double().transpose(1, 2) for t in (q, k, v, dout))
    p = (q64 @ k64.mT / math.sqrt(head_dim)).softmax(-1)
    dp = dout64 @ v64.mT
    ds = p * (dp - (p * dp).sum(-1, keepdim=True))
    assert 1e4 < float(ds.abs().max()) < 65504
    truth = {"dq": ds @ k64, "dk": ds.mT @ q64}
    leaves = [t.requires_grad_() for t in (q, k, v)]
    out = flash_ext.attention(*leaves, deterministic=deterministic, backend=target.path)
    for name, found in zip(("dq", "dk", "dv"), torch.autograd.grad(out, leaves, dout)):
        assert found.isfinite().all(), name
        if name in truth:
            wanted = truth[name].transpose(1, 2) / math.sqrt(head_dim)
            assert float((found - wanted).norm()) < 5e-3 * float(wanted.norm()), name


@on_paths
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_gradients_of_rows_of_one_key(
    target: Target, dtype: torch.dtype, head_dim: int, deterministic: bool
) -> None:
    """dq and dk are 0 in mathematics; their products and statistics are summed in different orders."""
    for rows, window in ((300, (0, 0)), (1, (-1, -1))):
        leaves = [normal(target, 2, rows, 2, head_dim, dtype=dtype).requires_grad_() for _ in range(3)]
        dout = normal(target, 2, rows, 2, head_dim, dtype=dtype)
        out = flash_ext.attention(
            *leaves, window_size=window, deterministic=deterministic, backend=target.path
        )
        dq, dk, dv = torch.autograd.grad(out, leaves, dout)
        assert torch.equal(dv, dout)
        assert float(dq.abs().max()) <= 2e-5
        assert float(dk.abs().max()) <= 2e-5


def asked(more: str, q: Tensor, k: Tensor) -> dict[str, Any]:
    """Keywords of a call, beyond its tensors."""
    return {
        "": {}, "causal": {"causal": True}, "sinks": {"sinks": torch.zeros(q.shape[2], device=q.device)},
        "mask": {"mask": torch.ones(q.shape[1], k.shape[1], dtype=torch.bool, device=q.device)},
        "dropout": {"dropout_p": 1e-5},
    }[more]  # fmt: skip


def mean_of_what_is_seen(q: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """Of equal scores, float64; and (rows, keys), 1 where a row sees a key."""
    rows, keys = q.shape[1], v.shape[1]
    seen = torch.ones(rows, keys, device=q.device)
    seen = seen.tril(keys - rows) if causal else seen
    weights = seen / seen.sum(1, keepdim=True).clamp(min=1)
    return torch.einsum("qk,bkhd->bqhd", weights.double(), v.double()), seen


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("more", ["", "causal", "sinks", "mask"])
@on_targets("sm90")
def test_equal_scores_of_a_thousand_million(target: Target, more: str, dtype: torch.dtype) -> None:
    """fp32 has steps of 64 there, so that 2^(score - maximum) is 1 only where both were rounded alike.

    The portable forward makes fp16 weights infinite of them, and kernels of head_dim 256 that only hide
    weigh tiles differently.
    """
    for head_dim in (64, 96, 128, 192, *([256] if more in ("", "causal") else [])):
        q, k = (full(target, (2, n, 3, head_dim), 1e4, dtype) for n in (400, 333))
        v = normal(target, 2, 333, 3, head_dim, dtype=dtype)
        out, lse = attend(target, q, k, v, **asked(more, q, k))
        want, seen = mean_of_what_is_seen(q, v, "causal" in more)
        torch.testing.assert_close(out.double(), want, atol=4e-3, rtol=8e-3)
        assert torch.isfinite(lse[seen.sum(1).expand(lse.shape) > 0]).all()


@pytest.mark.parametrize("size", [200, 300, 448, 900, 2000])
@pytest.mark.parametrize("more", ["", "causal", "sinks", "dropout"])
@on_targets("sm90")
def test_equal_scores_weigh_the_same_in_all_tiles(target: Target, more: str, size: int) -> None:
    """Tiles weighed by their own maximum and others are rounded in one way: scores here are 5e5 to 5e7."""
    for head_dim in (64, 128):
        q, k = (full(target, (2, n, 3, head_dim), size) for n in (400, 320))
        # Each 64 keys have a column of their own.
        v = torch.eye(5, head_dim, device=target.device).bfloat16().repeat_interleave(64, 0)
        v = v[None, :, None].expand(2, -1, 3, -1).contiguous()
        out = flash_ext.attention(q, k, v, backend=target.path, **asked(more, q, k)).double()
        want, _ = mean_of_what_is_seen(q, v, "causal" in more)
        torch.testing.assert_close(out, want, atol=5e-3, rtol=8e-3)  # a key that was dropped takes 4e-3


@on_paths
def test_equal_maxima_do_not_bias_the_result(target: Target) -> None:
    """Several keys with P exactly 1 and a V around -2: rounding must not lean to one side."""
    for dtype in ("bf16", "fp16"):
        with target.active():
            results = run_case(dense(2, 256, 256, 4, 4, 128, data="twins", dtype=dtype), target)
        for name in ("out", "dv"):
            compare.assert_within_gates(name, results.tensors[name], results.truth.value[name])


# ---- NaN, and memory that was not written ----


@on_all_tiles
def test_nan_in_one_query_row(target: Target) -> None:
    """Only that row of out, lse and dq is NaN; in dk and dv its head's keys; nothing else."""
    cases = [
        dense(2, 100, 130, h, h_k, d, data="nan_row", window=window, deterministic=det)
        for h, h_k in ((4, 4), (4, 2))
        for d in (64, 128, 256)
        for window in ((-1, -1), (-1, 0), (20, 5))
        for det in (False, True)
    ]
    cases += [
        packed([60, 70], [65, 75], num_heads=2, num_heads_k=1, data="nan_row", causal=c)
        for c in (False, True)
    ]
    run_cases(cases, target, cpu=5)


def packed_tensors(target: Target, total: int) -> tuple[list[Tensor], Tensor]:
    tensors = [normal(target, total, h, 64) for h in (4, 2, 2)]
    cu = torch.tensor([0, 40, 97, 97, 150], dtype=torch.int32, device=target.device)
    return tensors, cu


def run_packed(target: Target, tensors: list[Tensor], cu: Tensor) -> list[Tensor]:
    return differentiate(target, tensors, None, cu, cu, causal=True)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@on_all_tiles
def test_rows_beyond_the_last_sequence(target: Target, value: float) -> None:
    """NaN or infinity in rows of no sequence reaches nothing; their own results are 0 and -inf."""
    tensors, cu = packed_tensors(target, 170)
    for t in tensors:
        t[150:] = 0
    clean = run_packed(target, tensors, cu)
    for t in tensors:
        t[150:] = value
    got = run_packed(target, tensors, cu)
    for name, a, b in zip(RESULTS, got, clean):
        assert torch.equal(a, b), name
        tail = a[:, 150:] if name == "lse" else a[150:]
        assert (tail == (-math.inf if name == "lse" else 0)).all(), name


@on_all_tiles
def test_nan_stays_in_its_sequence(target: Target) -> None:
    tensors, cu = packed_tensors(target, 150)
    clean = run_packed(target, tensors, cu)
    for t in tensors:
        t[40:97] = math.nan
    got = run_packed(target, tensors, cu)
    for name, a, b in zip(RESULTS, got, clean):
        rows_first = (a.T, b.T) if name == "lse" else (a, b)
        for rows in (slice(0, 40), slice(97, 150)):
            assert torch.equal(rows_first[0][rows], rows_first[1][rows]), name
        assert rows_first[0][40:97].isnan().all(), name


@on_all_tiles
def test_shared_memory_left_over_from_a_nan_call(target: Target) -> None:
    """1 to 15 keys right after a call whose tiles were all NaN: what they leave unused counts for nothing."""
    for head_dim in (64, 128, 256):
        nan = full(target, (4, 128, 8, head_dim), math.nan)
        cases = [
            dense(2, 20, n, 4, 2, head_dim - r, deterministic=r > 0) for n in range(1, 16) for r in (0, 5)
        ]
        for case in target.pick(cases, cpu=2):
            with target.active():
                flash_ext.attention(nan, nan, nan, backend=target.choice)
            run_cases([case], target)


@on_all_tiles
def test_workspaces_hold_garbage_on_entry(target: Target) -> None:
    if target.device == "cuda":
        poison_pool()
    step = 2 if target.device == "cuda" else 16
    lens_q, lens_k = list(range(1, 129, step)), list(range(130, 2, -step))
    cases = [
        packed(lens_q, lens_k, num_heads=2, num_heads_k=1, head_dim=d, causal=True, deterministic=det)
        for d in (64, 128)
        for det in (False, True)
    ]
    run_cases(cases, target, cpu=1)
