"""The packed Hopper forward over caches of 8 bits, which a warpgroup turns into 16, against float64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import flash_ext
from flash_ext import attention_varlen
from tests.pages import (
    FACTORS,
    LAYOUTS,
    Cache,
    check,
    close,
    in_bytes,
    make_cache,
    packed_queries,
    recorded,
    run,
    truth,
)  # fmt: skip
from tests.qkv import ON_HOPPER
from tests.serving.test_packed_gpu import GROUPS, LENGTHS, follows_lengths
from tests.serving.test_paged_gpu import WINDOWS, make_long
from tests.serving.test_quantized_cache import BYTES, of_each_type

pytestmark = ON_HOPPER
KERNEL = "fwd_packed_quantized_sm90"
COUNTS = (5, 16, 17, 64, 0, 1, 33, 32)


def make(
    page_size: int, kind: torch.dtype, factors: str, heads_k: int = 2, dims: tuple[int, int] = (64, 64),
    layout: str = "apart", lengths: Sequence[int] = LENGTHS,
) -> tuple[Cache, dict[str, Tensor]]:  # fmt: skip
    wide = make_cache(list(lengths), page_size, heads_k, *dims, "cuda", torch.float32)
    return in_bytes(wide, kind, factors, layout)


def few(
    made: tuple[Cache, dict[str, Tensor]], heads: int, head_dim: int, window: tuple[int, int],
    counts: Sequence[int] = COUNTS, dtype: torch.dtype = torch.bfloat16, **options: Any,
) -> None:  # fmt: skip
    """Few queries of each sequence, compared with float64."""
    cache, descales = made
    q, bounds, each = packed_queries(list(counts), heads, head_dim, "cuda", dtype, outside=3)
    options |= {"window_size": window, "max_seqlen_q": max(counts)}
    with recorded() as last_launch:
        out, lse = run(q, bounds, cache, **descales, **options)
        kernels = [one["kernel"] for one in last_launch()["launches"]]
    assert any(name.startswith(KERNEL) for name in kernels), kernels
    rounded = any(x.dim() == 3 for x in descales.values())
    check(out, lse, bounds, each, cache, window, rounded=rounded)


@of_each_type
@pytest.mark.parametrize("group", GROUPS, ids=lambda x: f"{x[0]}-{x[1]}")
def test_groups_of_every_size(group: tuple, kind: torch.dtype) -> None:
    heads, heads_k, counts = group
    for head_dim, page_size, factors in ((64, 16, "heads"), (128, 8, "slots")):
        made = make(page_size, kind, factors, heads_k, (head_dim, head_dim))
        for window in WINDOWS:
            few(made, heads, head_dim, window, counts)


@of_each_type
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dims", [(64, 64), (48, 32), (128, 128), (96, 80), (16, 128)], ids=str)
def test_head_sizes(dims: tuple[int, int], layout: str, kind: torch.dtype) -> None:
    for page_size, factors in ((1, "none"), (48, "slots"), (64, "sequences"), (3, "slots")):
        made = make(page_size, kind, factors, 2, dims, layout)
        few(made, 8, dims[0], (-1, 0))
        if factors != "slots":
            few(made, 8, dims[0], (-1, 0), dtype=torch.float16)


@of_each_type
@pytest.mark.parametrize("factors", FACTORS)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_factors_of_every_shape(head_dim: int, factors: str, kind: torch.dtype) -> None:
    """Of k and of v together, and of one alone."""
    cache, descales = make(16, kind, factors, 2, (head_dim, head_dim))
    few((cache, descales), 8, head_dim, (-1, -1))
    few((cache, descales), 8, head_dim, (-1, 0), backend="kv_splits=5")
    q, bounds, each = packed_queries(list(COUNTS), 8, head_dim, "cuda", torch.bfloat16)
    for name in descales:
        one = {name: descales[name]}
        outs = [
            attention_varlen(q, cache.k, cache.v, bounds, None, max_seqlen_q=64, backend=backend, scale=0.01,
                             **cache.places, **one)
            for backend in ("sm90", "sm90 row=sm80.fwd_cached.quantized")
        ]  # fmt: skip
        scale = outs[1].float().abs().max()
        assert (outs[0].float() - outs[1].float()).abs().max() < 0.02 * scale


@of_each_type
def test_factors_that_are_not_positive(kind: torch.dtype) -> None:
    """And such that the scale alone cannot hold."""
    cache, _ = make(16, kind, "none")
    q, bounds, each = packed_queries(list(COUNTS), 8, 64, "cuda", torch.bfloat16)
    cases = ((-0.5, 0.0, 0.02), (0.0, -2.0, 0.1), (1e-36, 1e20, 1e34), (0.25, 1.0, -0.1))
    for k_factor, v_factor, scale in cases:
        factors = {
            "k_descale": torch.tensor(k_factor, device="cuda"),
            "v_descale": torch.tensor(v_factor, device="cuda"),
        }
        one, other = (
            attention_varlen(q, cache.k, cache.v, bounds, None, max_seqlen_q=64, causal=True, scale=scale,
                             backend=backend, **cache.places, **factors)
            for backend in ("sm90", "sm90 row=sm80.fwd_cached.quantized")
        )  # fmt: skip
        size = max(abs(v_factor), 1e-30)
        torch.testing.assert_close(one.float() / size, other.float() / size, rtol=2e-2, atol=2e-2)


@of_each_type
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("factors", ["heads", "slots"])
def test_keys_in_many_parts(factors: str, head_dim: int, kind: torch.dtype) -> None:
    wide = make_long([20000, 17, 0, 8191, 12345], 16, 2, head_dim, torch.float32)
    made = in_bytes(wide, kind, factors)
    for counts in ((16, 3, 1, 20, 8), (64, 1, 64, 33, 50)):
        few(made, 8, head_dim, (-1, 0), counts)
    few(made, 8, head_dim, (5000, 0), (64, 1, 64, 33, 50))
    few(made, 8, head_dim, (-1, 0), (16, 3, 1, 20, 8), backend="kv_splits=7")


@of_each_type
@pytest.mark.parametrize("counts", [(700, 3, 0, 33), (2000, 0, 5, 1)], ids=str)
def test_prompts(counts: tuple[int, ...], kind: torch.dtype) -> None:
    """Sequences of any number of queries, whose keys are whole."""
    for head_dim in (64, 128):
        made = make(16, kind, "heads", 2, (head_dim, head_dim), lengths=(1500, 7, 200, 333))
        few(made, 8, head_dim, (-1, 0), counts)
        few(made, 8, head_dim, (100, 0), counts)


@of_each_type
@pytest.mark.parametrize("count", [8, 16, 50])
@pytest.mark.parametrize("in_pages", [False, True])
def test_dense_queries_of_entries_and_pages(in_pages: bool, count: int, kind: torch.dtype) -> None:
    cache, descales = make(24 if in_pages else 504, kind, "heads", 2, (128, 128), lengths=(500, 77, 50, 0))
    q = torch.randn(4, count, 8, 128, device="cuda", dtype=torch.bfloat16)
    k, v, places = cache.k, cache.v, {"page_table": cache.table}
    if not in_pages:
        first = cache.table[:, 0].clamp(0, cache.k.shape[0] - 1).long()
        k, v = (x.view(torch.uint8)[first].view(kind) for x in (k, v))
        places = {}
    out = flash_ext.serving.flash_attn_with_kvcache(
        q, k, v, cache_seqlens=cache.lengths, causal=True,
        **{name: x.expand(4, 2).contiguous() for name, x in descales.items()}, **places,
    )  # fmt: skip
    outs, _ = truth(list(q), cache.rows, (-1, 0))
    close(out, torch.stack(outs))


def test_every_byte_is_the_number_it_stands_for() -> None:
    """One key a sequence: its value is the result, in fp16 and in bf16."""
    every = torch.arange(256, dtype=torch.uint8, device="cuda")
    bounds, lengths, table = (torch.tensor(x, device="cuda").int() for x in ([0, 20, 40], [1, 1], [[0], [1]]))
    for kind in BYTES:
        v = every.view(2, 1, 1, 128).expand(2, 8, 1, 128).contiguous()
        k = torch.zeros_like(v)
        for dtype in (torch.float16, torch.bfloat16):
            q = torch.randn(40, 1, 128, device="cuda").to(dtype)
            out = attention_varlen(
                q, k.view(kind), v.view(kind), bounds, None, seqused_k=lengths, block_table=table,
                max_seqlen_q=20,
            )  # fmt: skip
            wanted = every.view(kind).to(torch.float32).view(2, 1, 1, 128)
            got = out.float().view(2, 20, 1, 128)
            assert torch.equal(got.nan_to_num(1e4), wanted.expand(2, 20, 1, 128).nan_to_num(1e4))


def test_runs_repeat_bit_for_bit() -> None:
    wide = make_long([9000, 100, 3333], 16, 2, 128, torch.float32)
    for kind, factors in zip(BYTES, ("heads", "slots"), strict=True):
        cache, descales = in_bytes(wide, kind, factors)
        q, bounds, _ = packed_queries([40, 9, 30], 8, 128, "cuda", torch.bfloat16)
        call = {"causal": True, "max_seqlen_q": 40, **cache.places, **descales}
        runs = [attention_varlen(q, cache.k, cache.v, bounds, None, **call) for _ in range(50)]
        assert all(torch.equal(runs[0], other) for other in runs)


def test_a_graph_follows_lengths() -> None:
    wide = make_long([9000, 100, 3333], 16, 2, 128, torch.float32)
    cache, descales = in_bytes(wide, torch.int8, "heads")
    q, bounds, _ = packed_queries([40, 9, 30], 8, 128, "cuda", torch.bfloat16)

    call = {"causal": True, "max_seqlen_q": 40, **descales}
    follows_lengths(cache, lambda: run(q, bounds, cache, **call)[0])
