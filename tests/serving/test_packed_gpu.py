"""The Hopper forward for few queries over a cache: tiles of several query heads, keys in parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

import flash_ext
from flash_ext import attention_varlen
from tests.graphs import capture
from tests.pages import LAYOUTS, Cache, check, make_cache, packed_queries, recorded, run
from tests.qkv import ON_HOPPER
from tests.serving.test_paged_gpu import WINDOWS, make_long

pytestmark = ON_HOPPER
KERNEL = "fwd_packed_sm90"
LENGTHS = (200, 500, 0, 1000, 5, 1, 129, 2049)


def few(
    cache: Cache, heads: int, head_dim: int, window: tuple[int, int], counts: Sequence[int], **options: object
) -> None:
    """Few queries of each sequence, compared with float64."""
    q, bounds, each = packed_queries(list(counts), heads, head_dim, "cuda", cache.k.dtype, outside=3)
    with recorded() as last_launch:
        out, lse = run(q, bounds, cache, window_size=window, max_seqlen_q=max(counts), **options)
        kernels = [one["kernel"] for one in last_launch()["launches"]]
    assert any(name.startswith(KERNEL) for name in kernels), kernels
    check(out, lse, bounds, each, cache, window)


# (heads, key heads, queries of each sequence): groups that divide a tile and such that do not, tiles of one
# query, and sequences of up to 16 rows, which the kernel of 16 rows has.
GROUPS = (
    (4, 4, (200, 256, 70, 17, 0, 1, 128, 129)),
    (8, 4, (32, 64, 100, 128, 0, 8, 9, 65)),
    (8, 2, (5, 16, 17, 64, 0, 1, 33, 32)),
    (10, 2, (5, 26, 25, 51, 0, 3, 4, 30)),
    (14, 2, (3, 18, 19, 36, 0, 2, 1, 20)),
    (16, 2, (4, 16, 17, 32, 0, 2, 3, 9)),
    (32, 1, (2, 4, 5, 8, 0, 1, 3, 7)),
    (71, 1, (1, 2, 3, 3, 0, 1, 2, 1)),
    (128, 1, (1, 2, 1, 2, 0, 1, 2, 1)),
)


@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("group", GROUPS, ids=lambda x: f"{x[0]}-{x[1]}")
def test_groups_of_every_size(group: tuple, window: tuple[int, int]) -> None:
    heads, heads_k, counts = group
    for head_dim, page_size in ((64, 16), (128, 8)):
        cache = make_cache(list(LENGTHS), page_size, heads_k, head_dim, None, "cuda", torch.bfloat16)
        few(cache, heads, head_dim, window, counts)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dims", [(64, 64), (40, 48), (128, 128), (96, 80), (192, 128), (256, 256)], ids=str)
def test_head_sizes(dims: tuple[int, int], dtype: torch.dtype, layout: str) -> None:
    for page_size in (1, 48, 64, 1000):
        cache = make_cache(list(LENGTHS), page_size, 2, *dims, "cuda", dtype, layout)
        few(cache, 8, dims[0], (-1, 0), (5, 16, 17, 64, 0, 1, 33, 32))


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_keys_in_many_parts(head_dim: int) -> None:
    cache = make_long([40000, 17, 0, 8191, 12345], 16, 2, head_dim, torch.bfloat16)
    for counts in ((16, 3, 1, 20, 8), (64, 1, 64, 33, 50)):
        few(cache, 8, head_dim, (-1, 0), counts)
        few(cache, 8, head_dim, (5000, 0), counts)
    few(cache, 8, head_dim, (-1, 0), (16, 3, 1, 20, 8), backend="kv_splits=7")


@pytest.mark.parametrize("count", [0, 1, 5, 64])
def test_one_sequence(count: int) -> None:
    for length in (0, 3, 300, 5000, 20001):
        cache = make_long([length], 16, 2, 128, torch.bfloat16)
        q, bounds, each = packed_queries([count], 8, 128, "cuda", torch.bfloat16, outside=3)
        check(*run(q, bounds, cache, causal=True, max_seqlen_q=64), bounds, each, cache, (-1, 0))


def test_very_many_keys() -> None:
    """No part has more than 65,536."""
    cache = make_long([70000, 100, 65536, 131073], 64, 1, 64, torch.bfloat16)
    few(cache, 2, 64, (-1, 0), (100, 12, 70, 128))


def test_the_largest_queries_may_be_understated() -> None:
    """A sequence of more queries than max_seqlen_q says is slower, and right."""
    cache = make_cache(list(LENGTHS), 16, 2, 64, None, "cuda", torch.bfloat16)
    counts = [5, 100, 17, 300, 0, 1, 33, 32]
    q, bounds, each = packed_queries(counts, 8, 64, "cuda", torch.bfloat16, outside=3)
    check(*run(q, bounds, cache, causal=True, max_seqlen_q=20), bounds, each, cache, (-1, 0))


def test_negative_and_zero_scales_and_expanded_heads() -> None:
    cache = make_cache(list(LENGTHS), 16, 2, 64, None, "cuda", torch.bfloat16)
    q, bounds, _ = packed_queries([5, 16, 17, 64, 0, 1, 33, 32], 8, 64, "cuda", torch.bfloat16)
    call = {"causal": True, "max_seqlen_q": 64, **cache.places}
    for scale in (-0.3, 0.0):
        one = attention_varlen(q, cache.k, cache.v, bounds, None, scale=scale, **call)
        other = attention_varlen(q, cache.k, cache.v, bounds, None, scale=scale, backend="sm80", **call)
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)
    shared = q[:, :1].expand(-1, 8, -1)
    one = attention_varlen(shared, cache.k, cache.v, bounds, None, **call)
    other = attention_varlen(shared.contiguous(), cache.k, cache.v, bounds, None, **call)
    torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)
    k, v = torch.randn(2, 2, 8192, 2, 64, device="cuda", dtype=torch.bfloat16)
    shared = torch.randn(2, 40, 1, 64, device="cuda", dtype=torch.bfloat16).expand(-1, -1, 8, -1)
    one, other = (flash_ext.attention(x, k, v) for x in (shared, shared.contiguous()))
    torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)


def test_runs_repeat_bit_for_bit() -> None:
    cache = make_long([9000, 100, 3333], 16, 2, 128, torch.bfloat16)
    q, bounds, _ = packed_queries([40, 9, 30], 8, 128, "cuda", torch.bfloat16)
    call = {"causal": True, "max_seqlen_q": 40, **cache.places}
    runs = [attention_varlen(q, cache.k, cache.v, bounds, None, **call) for _ in range(50)]
    assert all(torch.equal(runs[0], other) for other in runs)


@pytest.mark.parametrize(("heads", "head_dim"), [(6, 64), (10, 128), (6, 160), (14, 256)], ids=str)
def test_rows_of_no_query_do_not_decide_how_others_are_rounded(heads: int, head_dim: int) -> None:
    """Groups that do not divide a tile leave rows of it, which hold what other kernels left there."""
    cache = make_long([91, 1000], 16, 2, head_dim, torch.bfloat16)
    q, bounds, _ = packed_queries([40, 30], heads, head_dim, "cuda", torch.bfloat16)
    others = [torch.randn(2, 333, 8, head_dim, device="cuda").mul(10**i).bfloat16() for i in range(4)]
    runs = []
    for other in 3 * others:
        flash_ext.attention(other, other, other)
        runs.append(run(q, bounds, cache, causal=True, max_seqlen_q=40))
    for out, lse in runs[1:]:
        assert torch.equal(out, runs[0][0]) and torch.equal(lse, runs[0][1])


def test_a_graph_follows_lengths() -> None:
    cache = make_long([9000, 100, 3333], 16, 2, 128, torch.bfloat16)
    q, bounds, _ = packed_queries([40, 9, 30], 8, 128, "cuda", torch.bfloat16)

    follows_lengths(cache, lambda: run(q, bounds, cache, causal=True, max_seqlen_q=40)[0])


def follows_lengths(cache: Cache, call: Callable[[], Tensor]) -> None:
    """A graph of the call, with other lengths of three sequences in the cache."""
    graph, out = capture(call)
    for lengths in ([9000, 100, 3333], [1, 50, 700], [8000, 9, 0]):
        cache.lengths.copy_(torch.tensor(lengths))
        graph.replay()
        assert torch.equal(out, call())
