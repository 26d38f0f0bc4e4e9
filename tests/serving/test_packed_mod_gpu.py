"""Packed Hopper tiles with masks, biases, softcap and sinks, over 16 and 8 bits, against float64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from flash_ext import attention_varlen
from flash_ext.masks import ALiBi, DenseBias, KeyMask
from tests.pages import Cache, in_bytes, make_cache, packed_queries, recorded, run
from tests.qkv import ON_HOPPER
from tests.serving.asked import KINDS, Asked, ask, fitted
from tests.serving.test_packed_gpu import GROUPS, LENGTHS
from tests.serving.test_paged_gpu import make_long

pytestmark = ON_HOPPER
KERNELS = {16: "fwd_packed_mod_sm90", 8: "fwd_packed_quantized_mod_sm90"}
COUNTS = (5, 16, 17, 64, 0, 1, 33, 32)
LIKE: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}


def make(bits: int, page_size: int, heads_k: int, head_dim: int) -> tuple[Cache, dict[str, Tensor]]:
    if bits == 16:
        return make_cache(list(LENGTHS), page_size, heads_k, head_dim, None, **LIKE), {}
    wide = make_cache(list(LENGTHS), page_size, heads_k, head_dim, head_dim, "cuda", torch.float32)
    return in_bytes(wide, torch.float8_e4m3fn, "heads")


def few(
    bits: int, made: tuple[Cache, dict[str, Tensor]], heads: int, head_dim: int, asked: Asked,
    counts: Sequence[int] = COUNTS, **more: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Few queries of each sequence, by the kernel that is meant, compared with float64."""
    cache, descales = made
    q, bounds, each = packed_queries(list(counts), heads, head_dim, **LIKE)
    with recorded() as last_launch:
        out, lse = run(q, bounds, cache, max_seqlen_q=max(counts), **descales, **asked.options, **more)
        kernels = [one["kernel"] for one in last_launch()["launches"]]
    assert any(name.startswith(KERNELS[bits]) for name in kernels), kernels
    asked.check(out, lse, each, cache.rows, bounds.tolist())
    return out, lse


def with_everything(counts: Sequence[int], heads: int, cap: float, sinks: bool) -> Asked:
    asked = ask("everything", list(counts), list(LENGTHS), heads, "cuda")
    asked.options |= {"causal": True, "softcap": cap}
    if sinks:
        asked.options["sinks"] = torch.randn(heads, device="cuda")
    return asked


@pytest.mark.parametrize("bits", [16, 8])
@pytest.mark.parametrize("group", GROUPS, ids=lambda x: f"{x[0]}-{x[1]}")
def test_groups_of_every_size(group: tuple, bits: int) -> None:
    heads, heads_k, counts = group
    fits = heads // heads_k <= 64  # into tiles of 64 rows, as masks and caches of 8 bits have them
    if bits == 8 and not fits:
        pytest.skip("tiles of 8 bits with modifiers have 64 rows")
    for head_dim, page_size in ((64, 16), (128, 8)):
        made = make(bits, page_size, heads_k, head_dim)
        for asked in (
            Asked({"sinks": torch.randn(heads, device="cuda"), "causal": True, "softcap": 9.0}),
            Asked({"window_size": (100, 3), "softcap": 3.0}),
            *([with_everything(counts, heads, 4.0, True)] if fits else []),
        ):
            few(bits, made, heads, head_dim, asked, counts)


@pytest.mark.parametrize("bits", [16, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_masks_of_every_kind(kind: str, bits: int) -> None:
    for head_dim in (64, 128):
        made = make(bits, 24, 2, head_dim)
        asked = ask(kind, list(COUNTS), list(LENGTHS), 8, "cuda")
        for parts in (None, "kv_splits=1", "kv_splits=7"):
            few(bits, made, 8, head_dim, asked, backend=parts)


@pytest.mark.parametrize("bits", [16, 8])
def test_biases(bits: int) -> None:
    """In both types, of all pairs and of keys alone, ending before the keys do; ALiBi."""
    made, most = make(bits, 16, 2, 128), max(LENGTHS)
    slopes = torch.rand(8, device="cuda") / 8
    for shape in ((8, 64, most), (8, 1, 4, 700), (1, 1, 64, most - 7), (8, 8, 1, most)):
        for dtype in (torch.float32, torch.bfloat16) if bits == 16 else (torch.float32,):
            bias = torch.randn(shape, device="cuda", dtype=dtype)
            asked = Asked(
                {"bias": DenseBias(bias), "causal": True},
                None,
                lambda b, m, n, bias=bias: fitted(bias.double(), b, 8, m, n),
            )
            few(bits, made, 8, 128, asked)
    asked = Asked({"bias": ALiBi(slopes)}, None, lambda b, m, n: ALiBi(slopes).to_dense(m, n)[0])
    few(bits, made, 8, 128, asked)


def test_long_keys_in_parts() -> None:
    lengths = [40000, 17, 0, 8191, 12345]
    for head_dim in (64, 128):
        cache = make_long(lengths, 16, 2, head_dim, torch.bfloat16)
        for counts in ((16, 3, 1, 20, 8), (64, 1, 64, 33, 50)):
            for kind in ("keys and dense", "tree"):
                few(16, (cache, {}), 8, head_dim, ask(kind, list(counts), lengths, 8, "cuda"), counts)


def test_more_queries_than_are_divided() -> None:
    """Chunks of prompts, whose tiles CTAs share out."""
    lengths = [3000, 700, 20, 1500]
    for bits in (16, 8):
        made = make_long(lengths, 16, 2, 64, torch.bfloat16), {}
        if bits == 8:
            wide = make_long(lengths, 16, 2, 64, torch.float32)
            made = in_bytes(wide, torch.int8, "heads")
        asked = Asked({"causal": True, "softcap": 9.0, "sinks": torch.randn(8, device="cuda")})
        few(bits, made, 8, 64, asked, (1000, 300, 20, 7))


@pytest.mark.parametrize("bits", [16, 8])
def test_rows_that_see_nothing(bits: int) -> None:
    """Zeros, and the sink alone as lse, in sequences without keys as in others."""
    cache, descales = make(bits, 16, 2, 64)
    q, bounds, _ = packed_queries(list(COUNTS), 8, 64, **LIKE)
    sinks = torch.randn(8, device="cuda")
    mask = KeyMask(torch.zeros(len(LENGTHS), max(LENGTHS), dtype=torch.bool, device="cuda"))
    for given, want in (({}, torch.tensor(-torch.inf).cuda()), ({"sinks": sinks}, sinks[:, None])):
        out, lse = run(q, bounds, cache, mask=mask, max_seqlen_q=64, **descales, **given)
        assert not out.any() and torch.equal(lse, want.expand_as(lse))


@pytest.mark.parametrize("bits", [16, 8])
def test_a_bias_of_the_smallest_number_means_what_it_says(bits: int) -> None:
    """Rows that hold nothing else are averages of all keys."""
    made = make(bits, 16, 2, 64)
    least = torch.full((8, 1, 64, max(LENGTHS)), torch.finfo(torch.float32).min, device="cuda")
    least[:, :, 3] = 0
    asked = Asked({"bias": DenseBias(least)}, None, lambda b, m, n: fitted(least.double(), b, 8, m, n))
    few(bits, made, 8, 64, asked)


@pytest.mark.parametrize("bits", [16, 8])
def test_runs_repeat_bit_for_bit(bits: int) -> None:
    cache, descales = make(bits, 16, 2, 128)
    q, bounds, _ = packed_queries(list(COUNTS), 8, 128, **LIKE)
    options = ask("everything", list(COUNTS), list(LENGTHS), 8, "cuda").options
    call = {"max_seqlen_q": 64, **cache.places, **descales, **options}
    runs = [attention_varlen(q, cache.k, cache.v, bounds, None, **call) for _ in range(50)]
    assert all(torch.equal(runs[0], other) for other in runs)
