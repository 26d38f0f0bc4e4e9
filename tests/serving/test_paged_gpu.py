"""What a cache promises on a GPU: graphs whose lengths and tables change, and bits apart from the batch."""

from __future__ import annotations

import random

import pytest
import torch

import flash_ext
from flash_ext import attention_varlen
from tests.graphs import capture
from tests.pages import LAYOUTS, Cache, check, close, make_cache, packed_queries, recorded, run, truth

pytestmark = pytest.mark.gpu
LIKE = {"device": "cuda", "dtype": torch.bfloat16}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("heads", "head_dim"), [((8, 1), 64), ((16, 16), 128), ((4, 2), 256)], ids=str)
def test_long_caches(heads: tuple[int, int], head_dim: int, dtype: torch.dtype) -> None:
    lengths = [40000, 17, 0, 8191, 12345]
    cache = make_long(lengths, 16, heads[1], head_dim, dtype)
    for counts in ([1] * 5, [1, 3, 1, 130, 8]):
        q, bounds, each = packed_queries(counts, heads[0], head_dim, "cuda", dtype)
        check(*run(q, bounds, cache, causal=True, max_seqlen_q=max(counts)), bounds, each, cache, (-1, 0))


@pytest.mark.parametrize(("head_dim", "heads"), [(128, 8), (256, 2)], ids=str)
@pytest.mark.parametrize("count", [0, 1, 2])
def test_one_sequence_of_fewer_queries_than_there_are_rows(count: int, head_dim: int, heads: int) -> None:
    """Up to 64 rows of batch 1 launch one tile, whatever the bounds on the device leave of them."""
    for length in (300, 5000, 20001):
        cache = make_long([length], 16, 1, head_dim, torch.bfloat16)
        q, bounds, each = packed_queries([count], heads, head_dim, **LIKE, outside=3)
        for most, backend in ((None, None), (6, None), (None, "kv_splits=5")):
            out, lse = run(q, bounds, cache, causal=True, max_seqlen_q=most, backend=backend)
            check(out, lse, bounds, each, cache, (-1, 0))


# (heads, key heads, head_dim, head_dim_v)
PROMPT_HEADS = (
    (8, 2, 64, 64), (4, 4, 128, 128), (6, 1, 96, 80), (4, 1, 192, 128), (2, 1, 192, 192), (2, 2, 256, 256),
)  # fmt: skip
WINDOWS = ((-1, -1), (-1, 0), (100, 0), (30, 7))
# Beside prompts, what other kernels serve in the same call.
COUNTS, LENGTHS = [200, 1, 70, 400, 0, 130, 333, 80], [200, 500, 0, 1000, 5, 1, 129, 2049]


def prompts(
    cache: Cache, heads: int, head_dim: int, window: tuple[int, int], counts: list[int], **options: object
) -> None:
    """Pieces of prompts, compared with float64."""
    q, bounds, each = packed_queries(counts, heads, head_dim, "cuda", cache.k.dtype, outside=3)
    with recorded() as last_launch:
        out, lse = run(q, bounds, cache, window_size=window, **options)
        last = last_launch()["launches"][-1]["kernel"]
    check(out, lse, bounds, each, cache, window)
    if torch.cuda.get_device_capability() == (9, 0) and not options:
        assert last.startswith("fwd_cached_sm90")


@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("page_size", [1, 3, 16, 24, 48, 64, 128, 1000])
def test_prompts_over_pages(page_size: int, window: tuple[int, int]) -> None:
    for dtype, head_dim, layout in (
        (torch.bfloat16, 64, "heads first"),
        (torch.float16, 128, "apart"),
    ):
        cache = make_cache(LENGTHS, page_size, 2, head_dim, None, "cuda", dtype, layout)
        prompts(cache, 8, head_dim, window, COUNTS)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("heads", PROMPT_HEADS, ids=str)
def test_prompts_of_every_head_size(heads: tuple, dtype: torch.dtype, layout: str) -> None:
    h, h_k, d, dv = heads
    for page_size in (1, 64):
        cache = make_cache(LENGTHS, page_size, h_k, d, dv, "cuda", dtype, layout)
        prompts(cache, h, d, (-1, 0), COUNTS)
        prompts(cache, h, d, (-1, 0), COUNTS, backend="sm80")


@pytest.mark.parametrize("page_size", [1, 16])
def test_columns_that_end_within_16_bytes(page_size: int) -> None:
    """Behind the 100 columns of q and k there is NaN."""
    cache = make_cache(LENGTHS, page_size, 2, 104, 96, "cuda", torch.bfloat16)
    cache.k[..., 100:] = torch.nan
    cache.k, cache.rows = cache.k[..., :100], [(k[..., :100], v) for k, v in cache.rows]
    q, bounds, each = packed_queries(COUNTS, 4, 104, **LIKE)
    q[..., 100:] = torch.nan
    with recorded() as last_launch:
        out, lse = run(q[..., :100], bounds, cache, causal=True)
        kernel = last_launch()["launches"][-1]["kernel"]
    check(out, lse, bounds, [own[..., :100] for own in each], cache, (-1, 0))
    if torch.cuda.get_device_capability() == (9, 0):
        assert kernel.startswith("fwd_cached_sm90")


@pytest.mark.parametrize("page_size", [3, 64, 256])
def test_prompts_at_the_borders_of_tiles_and_pages(page_size: int) -> None:
    """Behind each length there is NaN in the page and junk in the table."""
    edges = [64, 128, 192, page_size, 3 * page_size]
    lengths = sorted({0, 1, 2, *(edge + step for edge in edges for step in (-1, 0, 1))})
    for head_dim in (64, 128):
        cache = make_cache(lengths, page_size, 1, head_dim, None, "cuda", torch.bfloat16)
        for window in WINDOWS:
            prompts(cache, 2, head_dim, window, [70] * len(lengths))


@pytest.mark.parametrize("page_size", [1, 64])
def test_a_prompt_in_pieces(page_size: int) -> None:
    """Slots are NaN until their piece of the prompt is there."""
    cache = make_long([1000, 300], page_size, 2, 128, torch.bfloat16)
    rows, (k, v) = cache.rows, (cache.k.clone(), cache.v.clone())
    cache.k.fill_(torch.nan), cache.v.fill_(torch.nan)
    done = [0, 0]
    for pieces in ([256, 100], [256, 100], [300, 50], [188, 50]):
        for b, count in enumerate(pieces):
            position = torch.arange(done[b], done[b] + count, device="cuda")
            at = cache.table[b].long()[position // page_size], position % page_size
            cache.k[at], cache.v[at] = k[at], v[at]
            done[b] += count
        cache.lengths.copy_(torch.tensor(done))
        cache.rows = [(k_own[:n], v_own[:n]) for (k_own, v_own), n in zip(rows, done)]
        prompts(cache, 8, 128, (-1, 0), pieces)


def test_prompts_over_very_many_keys() -> None:
    """Those of more than 65,536 keys are taken in stretches."""
    cache = make_long([70000, 100, 65536, 131073], 64, 1, 64, torch.bfloat16)
    prompts(cache, 2, 64, (-1, 0), [130, 100, 70, 193])
    prompts(cache, 2, 64, (66000, 0), [130, 100, 70, 193])


@pytest.mark.parametrize("in_pages", [False, True])
@pytest.mark.parametrize("count", [8, 16, 50, 150])
def test_dense_queries_of_entries_and_pages(count: int, in_pages: bool) -> None:
    lengths = [500, 77, count, 0]
    cache = make_cache(lengths, 504 if not in_pages else 24, 2, 128, None, "cuda", torch.bfloat16)
    q = torch.randn(4, count, 8, 128, **LIKE)
    if in_pages:
        places = {"page_table": cache.table}
    else:  # pages in their order
        first = cache.table[:, 0].clamp(0, cache.k.shape[0] - 1).long()
        cache.k, cache.v, places = cache.k[first], cache.v[first], {}
    out = flash_ext.serving.flash_attn_with_kvcache(
        q, cache.k, cache.v, cache_seqlens=cache.lengths, causal=True, **places
    )
    outs, _ = truth(list(q), cache.rows, (-1, 0))
    close(out, torch.stack(outs))


def make_long(lengths: list[int], page_size: int, heads_k: int, head_dim: int, dtype: torch.dtype) -> Cache:
    """As make_cache, filled a sequence at a time."""
    needed = [-(-n // page_size) for n in lengths]
    k, v = torch.full(
        (2, sum(needed) + 2, page_size, heads_k, head_dim), torch.nan, device="cuda", dtype=dtype
    )
    order = torch.randperm(sum(needed) + 2)
    table = torch.full((len(lengths), max(needed) + 1), -9, dtype=torch.int32)
    rows, at = [], 0
    for b, (n, count) in enumerate(zip(lengths, needed, strict=True)):
        own = order[at : at + count]
        table[b, :count], at = own.int(), at + count
        both = torch.randn(2, n, heads_k, head_dim, device="cuda").to(dtype)
        position = torch.arange(n)
        k[own[position // page_size], position % page_size] = both[0]
        v[own[position // page_size], position % page_size] = both[1]
        rows.append((both[0], both[1]))
    return Cache(k, v, table.cuda(), torch.tensor(lengths, dtype=torch.int32, device="cuda"), rows)


# Keys are divided in one of two ways (csrc/common/key_parts.cuh): is the longest at most 9/8 of the mean?
SPREADS = {
    "equal": [2048] * 40,
    "at the limit": [2048] * 39 + [2304],
    "above it": [2048] * 39 + [2560],
    "one long": [100] * 39 + [9000],
    "one short": [3000] * 39 + [1],
    "mostly empty": [0] * 37 + [1, 700, 5000],
    "empty": [0] * 40,
}


@pytest.mark.parametrize("count", [1, 9])
@pytest.mark.parametrize("spread", SPREADS)
def test_keys_divided_by_all_lengths(spread: str, count: int) -> None:
    lengths = random.sample(SPREADS[spread], 40)
    for head_dim, dtype, window in ((64, torch.bfloat16, (-1, 0)), (128, torch.float16, (700, 0))):
        cache = make_long(lengths, 16, 1, head_dim, dtype)
        q, bounds, each = packed_queries([count] * 40, 4, head_dim, "cuda", dtype)
        out, lse = run(q, bounds, cache, window_size=window, max_seqlen_q=count)
        check(out, lse, bounds, each, cache, window)


@pytest.mark.parametrize("counts", [[1] * 6, [1, 4, 1, 100, 20, 1]], ids=str)
def test_a_graph_follows_lengths_and_tables(counts: list[int]) -> None:
    first = make_cache([300, 77, 16, 200, 90, 1], 16, **LIKE, spare=10)
    q, bounds, each = packed_queries(counts, 8, 64, **LIKE)

    graph, (out, _) = capture(lambda: run(q, bounds, first, causal=True, max_seqlen_q=max(counts)))
    for lengths in (
        [300, 77, 16, 200, 90, 1],
        [0, 0, 0, 0, 0, 0],
        [1, 15, 17, 0, 300, 64],
        [5, 200, 1, 150, 2, 40],
    ):
        other = make_cache(lengths, 16, **LIKE)
        pages = min(first.k.shape[0], other.k.shape[0])
        table = torch.where(other.table < pages, other.table, -3)[:, : first.table.shape[1]]
        rows = []
        first.k.fill_(torch.nan), first.v.fill_(torch.nan)
        first.k[:pages], first.v[:pages] = other.k[:pages], other.v[:pages]
        usable = []
        for b, n in enumerate(lengths):
            named = table[b, : -(-n // 16)]
            usable.append(n if bool((named >= 0).all()) and len(named) == -(-n // 16) else 0)
            rows.append(tuple(x[: usable[-1]] for x in other.rows[b]))
        first.table[:, : table.shape[1]] = table
        first.table[:, table.shape[1] :] = 2**30
        first.lengths.copy_(torch.tensor(usable, dtype=torch.int32))
        graph.replay()
        outs, _ = truth(each, rows, (-1, 0))
        close(out, torch.cat(outs))


@pytest.mark.parametrize("group", [1, 4, 24])
@pytest.mark.parametrize("count", [1, 3, 9, 70])
def test_bits_depend_on_the_sequence_alone_in_the_mode(count: int, group: int) -> None:
    """By itself, in a batch of 64 of other lengths and numbers of queries, in pages of another size."""
    length = 5000
    cache = make_long([length], 16, 1, 64, torch.bfloat16)
    q, bounds, _ = packed_queries([count], group, 64, **LIKE)
    with flash_ext.serving.set_batch_invariant(True):
        alone, alone_lse = run(q, bounds, cache, causal=True)
        k, v = cache.rows[0]
        for page_size, others in ((16, 63), (1, 2), (128, 5), (5000, 1)):
            counts = [count, *(random.choice([1, 2, 30, 100]) for _ in range(others))]
            lengths = [length, *(random.randint(0, 9000) for _ in range(others))]
            there = make_long(lengths, page_size, 1, 64, torch.bfloat16)
            position = torch.arange(length, device="cuda")
            at = there.table[0].long()[position // page_size], position % page_size
            there.k[at], there.v[at] = k, v
            more, more_bounds, _ = packed_queries(counts, group, 64, **LIKE)
            more[:count] = q
            out, lse = run(more, more_bounds, there, causal=True)
            assert torch.equal(out[:count], alone), (page_size, others)
            assert torch.equal(lse[:, :count], alone_lse)


@pytest.mark.parametrize(("length", "counts"), [(9000, [1, 9, 2]), (900, [400, 90, 300])])
def test_results_repeat_bit_for_bit(length: int, counts: list[int]) -> None:
    cache = make_long([length, 100, 3333], 16, 2, 128, torch.bfloat16)
    q, bounds, _ = packed_queries(counts, 8, 128, **LIKE)
    first, *others = (run(q, bounds, cache, causal=True)[0] for _ in range(10))
    assert all(torch.equal(first, other) for other in others)


def test_the_host_does_not_wait() -> None:
    cache = make_cache([300, 77], 16, **LIKE)
    q, bounds, _ = packed_queries([1, 4], 8, 64, **LIKE)
    attention_varlen(q, cache.k, cache.v, bounds, None, **cache.places)
    torch.cuda.set_sync_debug_mode("error")
    try:
        attention_varlen(q, cache.k, cache.v, bounds, None, **cache.places, max_seqlen_q=4)
    finally:
        torch.cuda.set_sync_debug_mode("default")
