"""Sequences whose first keys in the cache are padding: against float64 of the keys behind it.

Padding holds NaN everywhere. Some sequences have none, some nothing else.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from flash_ext import _left_padding, serving
from flash_ext.masks import Causal, KeyMask
from tests.covering import pairs_on_cpu
from tests.graphs import capture
from tests.pages import LAYOUTS, Cache, check, close, in_bytes, make_cache, packed_queries, truth
from tests.qkv import dtype_on, on_devices
from tests.serving.asked import ask
from tests.serving.test_append_behind import angles, turned

LENGTHS, PADS = [40, 7, 0, 300, 33, 5, 600], [3, 7, 0, 270, 0, 9, 100]
WINDOWS = [(-1, -1), (-1, 0), (50, 0), (30, 7)]


def pad(cache: Cache, pads: list[int]) -> Tensor:
    """Makes the first keys of each sequence padding; returns cache_leftpad."""
    size = cache.k.shape[1]
    for b, n in enumerate(pads):
        at = torch.arange(min(n, len(cache.rows[b][0])), device=cache.k.device)
        place = cache.table[b].long()[at // size], at % size
        for x in (cache.k, cache.v):
            x.view(torch.uint8)[place] = 0xFF  # NaN; of int8 -1
    cache.rows = [(k[n:], v[n:]) for (k, v), n in zip(cache.rows, pads, strict=True)]
    return torch.tensor(pads, dtype=torch.int32, device=cache.k.device)


def attend(q: Tensor, cache: Cache, leftpad: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    return serving.flash_attn_with_kvcache(
        q, cache.k, cache.v, page_table=cache.table, cache_seqlens=cache.lengths, cache_leftpad=leftpad,
        return_softmax_lse=True, **options,
    )  # fmt: skip


def compare(
    out: Tensor, lse: Tensor, q: Tensor, rows: list[tuple[Tensor, Tensor]], window: tuple[int, int]
) -> None:
    """Dense queries of some sequences."""
    outs, lses = truth(list(q), rows, window)
    close(out, torch.stack(outs), "out")
    close(lse, torch.stack(lses), "lse")


@pairs_on_cpu(page_size=[1, 16, 256], window=WINDOWS, count=[1, 5, 40], layout=LAYOUTS)
def test_pages(page_size: int, window: tuple[int, int], count: int, layout: str, device: str) -> None:
    cache = make_cache(LENGTHS, page_size, 2, 64, None, device, dtype_on(device), layout)
    leftpad = pad(cache, PADS)
    q = torch.randn(len(LENGTHS), count, 8, 64, device=device).to(cache.k.dtype)
    found = attend(q, cache, leftpad, causal=window == (-1, 0), window_size=window)
    compare(*found, q, cache.rows, window)


@on_devices
@pytest.mark.parametrize("page_size", [1, 16, 256])
def test_packed_queries_and_scores_that_are_changed(page_size: int, device: str) -> None:
    counts = [1, 3, 0, 70, 1, 2, 17]
    cache = make_cache(LENGTHS, page_size, 2, 64, None, device, dtype_on(device))
    leftpad = pad(cache, PADS)
    q, bounds, each = packed_queries(counts, 8, 64, device, cache.k.dtype, outside=2)
    sinks, slopes = torch.randn(8, device=device), torch.rand(len(counts), 8, device=device) + 0.1
    for options, asked in (
        ({}, {}),
        ({"sinks": sinks}, {"sinks": sinks}),
        ({"softcap": 3.0}, {"softcap": 3.0}),
        ({"alibi_slopes": slopes}, {"slopes": slopes}),
    ):
        out, lse = attend(
            q, cache, leftpad, cu_seqlens_q=bounds, max_seqlen_q=70, causal=True, **options
        )  # fmt: skip
        check(out, lse, bounds, each, cache, (-1, 0), **asked)


@on_devices
@pytest.mark.parametrize("indexed", [False, True])
@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_entries(window: tuple[int, int], indexed: bool, device: str) -> None:
    """One entry for two sequences with their own padding, one that is not there; gaps between entries."""
    size, pads, lengths = 290, [20, 0, 45, 0, 290], [290, 3, 160, 50, 290]
    entries = [4, 0, 4, 9, 2] if indexed else list(range(5))
    where = torch.tensor(entries, dtype=torch.int32, device=device)
    for room in (size, size + 7):
        caches = torch.randn(2, 5, room, 2, 64, device=device).to(dtype_on(device))[:, :, :size]
        for entry in {*entries} - {9}:
            least = min(n for n, own in zip(pads, entries, strict=True) if own == entry)
            caches[:, entry, :least] = torch.nan
        q = torch.randn(5, 3, 4, 64, device=device).to(caches.dtype)
        rows = [
            (caches[0, e, p:n], caches[1, e, p:n]) if e < 5 else (caches[0, 0, :0], caches[1, 0, :0])
            for e, p, n in zip(entries, pads, lengths, strict=True)
        ]
        leftpad = torch.tensor(pads, device=device)
        for given in (torch.int32, torch.int64):
            found = serving.flash_attn_with_kvcache(
                q, *caches, cache_seqlens=torch.tensor(lengths, dtype=given, device=device),
                cache_batch_idx=where if indexed else None, cache_leftpad=leftpad.to(given),
                causal=window == (-1, 0), window_size=window, return_softmax_lse=True,
            )  # fmt: skip
            compare(*found, q, rows, window)


@on_devices
@pytest.mark.parametrize("paged", [False, True])
def test_without_lengths_all_but_the_padding_is_there(paged: bool, device: str) -> None:
    caches = torch.randn(2, 3, 20, 2, 64, device=device).to(dtype_on(device))
    q = torch.randn(3, 2, 4, 64, device=device).to(caches.dtype)
    leftpad = torch.tensor([0, 12, 20], dtype=torch.int32, device=device)
    table = torch.arange(3, dtype=torch.int32, device=device)[:, None] if paged else None
    found = serving.flash_attn_with_kvcache(
        q, *caches, page_table=table, cache_leftpad=leftpad, return_softmax_lse=True
    )
    compare(*found, q, [(k[n:], v[n:]) for k, v, n in zip(*caches, leftpad.tolist())], (-1, -1))


@pairs_on_cpu(
    way=["pages", "entries", "neither"],
    page_size=[1, 16, 256],
    window=[(-1, -1), (-1, 0), (25, 0)],
    pairs=[False, True],
    half=[0, 16],
)
def test_new_keys_are_turned_by_their_places(
    way: str, page_size: int, window: tuple[int, int], pairs: bool, half: int, device: str
) -> None:
    """And queries likewise. The padding of the third sequence covers the first of its new keys."""
    lengths, pads, new, count = [40, 9, 17, 260], [13, 0, 18, 200], 3, 5
    like = {"device": device, "dtype": dtype_on(device)}
    width = -(-270 // page_size) if way == "pages" else 1
    size = page_size if way == "pages" else 270
    pool = torch.full((2, 4 * width + 1, size, 2, 64), torch.nan, **like)
    table = torch.randperm(4 * width + (way != "neither"), device=device)[: 4 * width].view(4, width)
    table = torch.arange(4, device=device)[:, None] if way == "neither" else table
    q, (k, v) = torch.randn(4, count, 4, 64, **like), torch.randn(2, 4, new, 2, 64, **like)
    start = torch.tensor(lengths, dtype=torch.int32, device=device)
    turned_q, turned_k = q, k
    options: dict[str, Any] = {"causal": window == (-1, 0), "window_size": window}
    if half:
        cos, sin = angles(width * size, half, device, like["dtype"])
        options |= {"rotary_cos": cos, "rotary_sin": sin, "rotary_interleaved": pairs}
        turned_k = turned(k, None, start, True, cos, sin, pairs)
        turned_q = turned(q, None, start, window != (-1, -1), cos, sin, pairs)
    rows = []
    for b, (n, p) in enumerate(zip(lengths, pads, strict=True)):
        at = torch.arange(min(p, n), n, device=device)
        old = torch.randn(2, len(at), 2, 64, **like)
        pool[:, table[b][at // size], at % size] = old
        own = (torch.cat([old[i], x[b]])[max(p - n, 0) :] for i, x in enumerate((turned_k, v)))
        rows.append(tuple(own))
    places = {"page_table": table.int()} if way == "pages" else {}
    if way == "entries":
        places = {"cache_batch_idx": table[:, 0].int()}
    leftpad = torch.tensor(pads, dtype=torch.int32, device=device)
    found = serving.flash_attn_with_kvcache(
        q, *pool, k, v, cache_seqlens=start, cache_leftpad=leftpad, return_softmax_lse=True, **places,
        **options,
    )  # fmt: skip
    compare(*found, turned_q, rows, window)
    for b, n in enumerate(lengths):
        at = torch.arange(n, n + new, device=device)
        place = table[b][at // size], at % size
        assert torch.equal(pool[0][place], turned_k[b]) and torch.equal(pool[1][place], v[b])


@on_devices
@pytest.mark.parametrize("kind", [torch.float8_e4m3fn, torch.int8], ids=str)
@pytest.mark.parametrize("count", [1, 20])
def test_caches_of_8_bits(count: int, kind: torch.dtype, device: str) -> None:
    for page_size, layout in ((1, "apart"), (16, "heads first"), (256, "together")):
        wide = make_cache(LENGTHS, page_size, 2, 64, None, device, torch.float32)
        cache, descales = in_bytes(wide, kind, "sequences", layout)
        leftpad = pad(cache, PADS)
        q, bounds, each = packed_queries([count] * len(LENGTHS), 8, 64, device, dtype_on(device))
        out, lse = attend(
            q, cache, leftpad, cu_seqlens_q=bounds, max_seqlen_q=count, causal=True, **descales
        )  # fmt: skip
        check(out, lse, bounds, each, cache, (-1, 0))


@on_devices
def test_trees(device: str) -> None:
    """Of which the padding of the last sequence covers three keys."""
    n, lengths, pads = 5, [30, 40, 90, 20], [4, 0, 70, 18]
    cache = make_cache(lengths, 16, 2, 64, None, device, dtype_on(device))
    leftpad = pad(cache, pads)
    q, bounds, each = packed_queries([n] * 4, 4, 64, device, cache.k.dtype)
    asked = ask("tree", [n] * 4, lengths, 4, device)
    out, lse = attend(q, cache, leftpad, cu_seqlens_q=bounds, mask=asked.options["mask"], max_seqlen_q=n)
    for b, start in enumerate(bounds[:-1].tolist()):
        own = slice(start, start + n)
        shown = asked.options["mask"].words[own, None].cpu() >> torch.arange(n) & 1 == 1
        keys = len(cache.rows[b][0])
        visible = torch.cat(
            [torch.ones(n, max(keys - n, 0), dtype=torch.bool), shown[:, max(n - keys, 0) :]], 1
        )
        k, v = (x.double().repeat_interleave(2, 1) for x in cache.rows[b])
        scores = torch.einsum("ihd,jhd->hij", each[b].double(), k) / 8
        scores = scores.masked_fill(~visible.to(device), -torch.inf)
        wanted = torch.einsum("hij,jhd->ihd", scores.softmax(-1).nan_to_num(0), v)
        close(out[own], wanted, "out")
        close(lse[:, own], scores.logsumexp(-1), "lse")


@on_devices
@pytest.mark.parametrize("count", [1, 9, 70])
def test_bits_are_those_of_a_cache_without_padding(count: int, device: str) -> None:
    """In the batch-invariant mode, from pages of another size, and alone."""
    lengths, pads = [3000, 700, 60], [900, 0, 59]
    like = {"device": device, "dtype": torch.bfloat16}
    cache = make_cache(lengths, 16, 1, 64, None, **like)
    leftpad = pad(cache, pads)
    other = make_cache([len(k) for k, _ in cache.rows], 24, 1, 64, None, **like)
    for b, own in enumerate(cache.rows):
        at = torch.arange(len(own[0]), device=device)
        for pool, x in zip((other.k, other.v), own, strict=True):
            pool[other.table[b].long()[at // 24], at % 24] = x
    q = torch.randn(3, count, 4, 64, **like)
    with serving.set_batch_invariant(True):
        out, lse = attend(q, cache, leftpad, causal=True)
        wanted = attend(q, other, torch.zeros_like(leftpad), causal=True)
        plain = serving.flash_attn_with_kvcache(
            q, other.k, other.v, page_table=other.table, cache_seqlens=other.lengths, causal=True
        )
        assert torch.equal(out, wanted[0]) and torch.equal(lse, wanted[1]) and torch.equal(out, plain)
        for b in range(3):
            own = slice(b, b + 1)
            one = Cache(cache.k, cache.v, cache.table[own], cache.lengths[own], cache.rows[own])
            alone = attend(q[own], one, leftpad[own], causal=True)
            assert torch.equal(alone[0], out[own]) and torch.equal(alone[1], lse[own])


@on_devices
def test_padding_that_nobody_looks_at_stays_inside(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU; without one the CPU is not allowed to look."""
    monkeypatch.setattr(_left_padding, "may_read", lambda t: False)
    caches = torch.randn(2, 4, 9, 2, 64, device=device).to(dtype_on(device))
    q = torch.randn(4, 1, 4, 64, device=device).to(caches.dtype)
    for given, most in ((torch.int32, 31), (torch.int64, 63)):
        leftpad = torch.tensor([-1, -(2 ** (most - 1)), 2**most - 1, 8], dtype=given, device=device)
        found = serving.flash_attn_with_kvcache(q, *caches, cache_leftpad=leftpad, return_softmax_lse=True)
        rows = [(k[n:], v[n:]) for k, v, n in zip(*caches, (0, 0, 9, 8))]
        compare(*found, q, rows, (-1, -1))


def test_what_is_refused() -> None:
    """Before anything is appended."""
    caches, new = torch.randn(2, 3, 8, 2, 64), torch.randn(2, 2, 1, 2, 64)
    before = caches.clone()
    q, two = torch.randn(2, 1, 4, 64), torch.tensor([2, 2], dtype=torch.int32)
    table = torch.tensor([[1, 2], [0, 2]], dtype=torch.int32)
    uneven = torch.randn(3, 17, 64).as_strided((3, 8, 2, 64), (17 * 64, 128, 64, 1))

    def call(**options: Any) -> None:
        given = {"k_cache": caches[0], "v_cache": caches[1], "cache_leftpad": two, "cache_seqlens": two}
        serving.flash_attn_with_kvcache(q, **given | {"k": new[0], "v": new[1]} | options)

    for options, error, words in (
        ({"cache_leftpad": two[:1]}, ValueError, r"cache_leftpad must have shape \(batch,\) = \(2,\)"),
        ({"cache_leftpad": two.float()}, TypeError, "cache_leftpad must be torch.int32"),
        ({"cache_leftpad": two.to("meta")}, ValueError, "cache_leftpad must be on the device of q"),
        ({"cache_leftpad": two - 3}, ValueError, "at least 0, got -1 for sequence 0"),
        ({"mask": KeyMask(torch.ones(2, 8) > 0)}, NotImplementedError, "mask=KeyMask is not available with"),
        ({"mask": Causal()}, NotImplementedError, "mask=Causal is not available with cache_leftpad"),
        ({"page_table": table.long()}, TypeError, "page_table must be torch.int32, got torch.int64"),
        ({"page_table": table[:1]}, ValueError, r"page_table must have shape \(batch, max_pages\)"),
        ({"k_cache": caches[0, :1]}, ValueError, "v_cache must have shape"),
        ({"k_cache": caches[0, :1], "v_cache": caches[1, :1]}, ValueError, "an entry for each of 2"),
        ({"k_cache": uneven}, NotImplementedError, "a whole number of keys apart"),
        ({"v_cache": caches[1].transpose(1, 2).contiguous().transpose(1, 2)}, NotImplementedError,
         "the same in k_cache and v_cache"),
    ):  # fmt: skip
        with pytest.raises(error, match=words):
            call(**options)
        assert torch.equal(caches, before)
    call()
    assert not torch.equal(caches, before)
    with pytest.raises(ValueError, match="block_table must name pages from 0 to 2"):
        call(k=None, v=None, page_table=torch.full((2, 2), 3, dtype=torch.int32))


def test_it_is_traced_as_a_whole() -> None:
    cache = make_cache([20, 9], 8, spare=0)
    leftpad = pad(cache, [3, 9])
    q, new = torch.randn(2, 1, 4, 64), torch.randn(2, 2, 1, 2, 64)
    table = torch.tensor([[0, 1, 2], [3, 4, 5]], dtype=torch.int32)

    def step(k: Tensor, v: Tensor) -> Tensor:
        return serving.flash_attn_with_kvcache(
            q, k, v, *new, page_table=table, cache_seqlens=cache.lengths, cache_leftpad=leftpad, causal=True
        )

    pools = [torch.randn(6, 8, 2, 64) for _ in "kv"]
    traced = [x.clone() for x in pools]
    wanted = step(*pools)
    close(torch.compile(step, fullgraph=True, backend="aot_eager")(*traced), wanted.double())
    assert all(torch.equal(a, b) for a, b in zip(traced, pools, strict=True))


@pytest.mark.gpu
def test_gpu_a_graph_follows_the_padding_and_nothing_waits() -> None:
    cache = make_cache([300, 77, 64], 16, 2, 64, None, "cuda", torch.bfloat16)
    whole = cache.rows
    q = torch.randn(3, 1, 8, 64, device="cuda", dtype=torch.bfloat16)
    leftpad = torch.zeros(3, dtype=torch.int32, device="cuda")

    def call() -> tuple[Tensor, Tensor]:
        return attend(q, cache, leftpad)

    call()
    torch.cuda.set_sync_debug_mode("error")
    try:
        call()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph, found = capture(call)
    for pads in ([0, 0, 0], [299, 77, 1], [17, 5, 100]):
        leftpad.copy_(torch.tensor(pads))
        graph.replay()
        compare(*found, q, [(k[n:], v[n:]) for (k, v), n in zip(whole, pads, strict=True)], (-1, -1))
