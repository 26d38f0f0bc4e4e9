"""Sinks over a cache: the kernels of calls without them, against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flash_ext import attention_varlen
from tests.pages import Cache, check, in_bytes, make_cache, packed_queries, recorded, run
from tests.qkv import only_hopper
from tests.serving.test_latents import latents

pytestmark = pytest.mark.gpu
LIKE: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
# Sequences of one part and of several, without keys, and of fewer keys than queries: first rows see nothing.
LENGTHS = (1500, 40, 0, 17, 333)
FEW, SOME, MANY = (1, 2, 1, 0, 1), (9, 20, 3, 31, 16), (400, 70, 130, 200, 1)


def sinks_of(heads: int) -> torch.Tensor:
    """Below and above what rows hold, and none."""
    sinks = torch.linspace(-3, 12, heads, device="cuda")
    sinks[1] = -torch.inf
    return sinks


def same_kernels(
    cache: Cache, heads: int, head_dim: int, counts: tuple[int, ...], kernels: tuple[str, ...], **options: Any
) -> None:
    q, bounds, each = packed_queries(list(counts), heads, head_dim, **LIKE, outside=3)
    sinks, options = sinks_of(heads), {"max_seqlen_q": max(counts), **options}
    launched = []
    with recorded() as last_launch:
        for more in ({}, {"sinks": sinks}):
            out, lse = run(q, bounds, cache, causal=True, **options, **more)
            launched.append([one["kernel"] for one in last_launch()["launches"]])
    assert launched[0] == launched[1]
    assert all(any(name.startswith(kernel) for name in launched[1]) for kernel in kernels), launched
    check(out, lse, bounds, each, cache, (-1, 0), sinks)


@pytest.mark.parametrize("backend", ["sm80", pytest.param("sm90", marks=only_hopper)])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
def test_every_kernel(head_dim: int, backend: str) -> None:
    cache = make_cache(list(LENGTHS), 16, 2, head_dim, **LIKE)
    wide = "fwd_packed_sm90" if backend == "sm90" else "fwd_split_cached_sm80"
    for counts, kernels in (
        (FEW, ("fwd_split_cached_sm80", "fwd_merge_cached_sm80")),
        (SOME, (wide, "fwd_merge_cached_sm80")),
        (MANY, (f"fwd_cached_{backend}",)),
    ):
        same_kernels(cache, 8, head_dim, counts, kernels, backend=backend)


@pytest.mark.parametrize("backend", ["sm80", pytest.param("sm90", marks=only_hopper)])
def test_values_of_another_size(backend: str) -> None:
    cache = make_cache(list(LENGTHS), 8, 4, 192, 128, **LIKE)
    same_kernels(cache, 4, 192, MANY, (f"fwd_cached_{backend}",), backend=backend)


@only_hopper
@pytest.mark.parametrize("heads", [16, 128])
def test_latents(heads: int) -> None:
    for counts in ((1, 2, 1, 0, 1), (9, 3, 2, 5, 1)):
        same_kernels(latents(LENGTHS, 64, "cuda"), heads, 576, counts, ("fwd_latent_sm90",))


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("counts", [FEW, SOME, MANY], ids=["few", "some", "many"])
def test_caches_of_8_bits(counts: tuple[int, ...], head_dim: int) -> None:
    wide = make_cache(list(LENGTHS), 16, 2, head_dim, head_dim, "cuda", torch.float32)
    cache, descales = in_bytes(wide, torch.float8_e4m3fn, "heads")
    same_kernels(cache, 8, head_dim, counts, (), **descales)


def test_without_lse() -> None:
    """Output takes the sink's share where nobody asks for lse."""
    cache = make_cache(list(LENGTHS), 16, 2, 64, **LIKE)
    for counts in (FEW, SOME, MANY):
        q, bounds, _ = packed_queries(list(counts), 8, 64, **LIKE)
        options = {"causal": True, "sinks": sinks_of(8)}
        out = attention_varlen(q, cache.k, cache.v, bounds, None, **cache.places, **options)
        assert torch.equal(out, run(q, bounds, cache, **options)[0])
