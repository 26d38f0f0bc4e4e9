"""What masks over caches promise on a GPU: parts of keys, graphs that follow them, bits, and no waiting."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import flash_ext
from flash_ext import attention_varlen
from flash_ext.masks import Causal, Dense, DenseBias, Documents, KeyMask, TokenTree
from tests.graphs import capture
from tests.pages import make_cache, packed_queries, recorded, run
from tests.serving.asked import KINDS, Asked, ask, call, fitted, fitted_ids, fitted_keys
from tests.serving.test_paged_gpu import make_long

pytestmark = pytest.mark.gpu
LIKE: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_long_caches_in_parts_and_whole(kind: str, dtype: torch.dtype) -> None:
    """Several parts of the keys, for the rows of a tile and of several."""
    lengths = [9000, 17, 0, 4097, 5000]
    for head_dim, heads_k in ((64, 1), (128, 2), (256, 1)):
        cache = make_long(lengths, 16, heads_k, head_dim, dtype)
        for counts in ([1] * 5, [4, 3, 1, 130, 60]):
            counts = [min(n, 64) for n in counts] if kind == "tree" else counts
            q, bounds, each = packed_queries(counts, 8, head_dim, "cuda", dtype)
            asked = ask(kind, counts, lengths, 8, "cuda")
            for backend in (None, "kv_splits=1", "kv_splits=7"):
                call(q, cache, bounds, asked, each, max_seqlen_q=max(counts), backend=backend)


@pytest.mark.parametrize("in_graph", ["refresh", "built inside", "bool tensor"])
def test_a_graph_follows_masks_and_lengths(in_graph: str) -> None:
    counts, heads = [6, 20], 8
    cache = make_cache([300, 90], 16, 2, 64, None, **LIKE)
    q, bounds, each = packed_queries(counts, heads, 64, **LIKE)
    keep = torch.rand(2, 280, device="cuda") < 0.5
    dense = torch.rand(2, 1, 20, 300, device="cuda") < 0.5
    ids = torch.randint(0, 2, (26,), device="cuda", dtype=torch.int32)
    ids_k = torch.randint(0, 2, (2, 290), device="cuda", dtype=torch.int32)

    def built() -> Any:
        return Causal() & KeyMask(keep) & Dense(dense) & Documents(ids, ids_k)

    mask = built()

    def step() -> tuple[Tensor, Tensor]:
        given = {"refresh": mask, "bool tensor": dense}.get(in_graph)
        if in_graph == "refresh":
            mask.refresh()
        return run(q, bounds, cache, mask=built() if given is None else given, max_seqlen_q=20)

    graph, (out, lse) = capture(step)
    start = bounds.tolist()

    def shown(b: int, m: int, n: int) -> Tensor:
        found = fitted(dense, b, heads, m, n)
        if in_graph != "bool tensor":
            found = found & fitted_keys(keep, b, heads, m, n)
            found = found & fitted_ids(ids[start[b] : start[b + 1]], ids_k, b, heads, n)
        return found

    for lengths in ([300, 90], [64, 20], [7, 5], [0, 33]):
        for t in (keep, dense):
            t.copy_(torch.rand(t.shape, device="cuda") < 0.5)
        for t in (ids, ids_k):
            t.copy_(torch.randint(-1, 2, t.shape, device="cuda"))
        cache.lengths.copy_(torch.tensor(lengths, dtype=torch.int32))
        graph.replay()
        rows = [tuple(x[:n] for x in own) for own, n in zip(cache.rows, lengths)]
        asked = Asked({} if in_graph == "bool tensor" else {"causal": True}, shown)
        asked.check(out, lse, each, rows, start)


def test_a_graph_keeps_all_that_it_refreshes() -> None:
    """Calls of more sizes than a mask keeps do not free what a replay writes."""
    cache = make_cache([40], 16, 2, 64, None, **LIKE)
    keep, dense = (torch.rand(shape, device="cuda") < 0.5 for shape in ((1, 40), (16, 40)))
    mask = KeyMask(keep) & Dense(dense)

    def step(count: int) -> Tensor:
        q = torch.ones(count, 2, 64, **LIKE)
        bounds = torch.tensor([0, count], dtype=torch.int32).cuda()
        return attention_varlen(q, cache.k, cache.v, bounds, None, mask=mask, max_seqlen_q=16, **cache.places)

    for count in range(1, 9):
        step(count)
    q = torch.ones(8, 2, 64, **LIKE)
    bounds = torch.tensor([0, 8], dtype=torch.int32, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        mask.refresh()
        attention_varlen(q, cache.k, cache.v, bounds, None, mask=mask, max_seqlen_q=16, **cache.places)
    for count in range(9, 17):
        step(count)
    torch.cuda.synchronize()
    fresh = [
        torch.full((n,), 7, dtype=torch.int32, device="cuda") for n in range(1, 2049, 8) for _ in range(4)
    ]
    graph.replay()
    torch.cuda.synchronize()
    assert all((t == 7).all() for t in fresh)


def test_a_mask_must_be_prepared_before_a_capture() -> None:
    cache = make_cache([300, 90], 16, 2, 64, None, **LIKE)
    q, bounds, _ = packed_queries([1, 1], 8, 64, **LIKE)
    mask = KeyMask(torch.ones(2, 300, dtype=torch.bool, device="cuda"))
    with pytest.raises(ValueError, match="mask is not prepared for a cache, batch 2 and 8 heads"):
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            attention_varlen(q, cache.k, cache.v, bounds, None, mask=mask, **cache.places)


@pytest.mark.parametrize(
    ("kind", "count"),
    [*itertools.product(["keys", "dense of heads", "everything"], [1, 9, 70]), ("tree", 9)],
)
def test_bits_depend_on_the_sequence_alone_in_the_mode(count: int, kind: str) -> None:
    counts, lengths, heads = [count, 1, 30], [5000, 100, 2000], 4
    cache = make_cache(lengths, 16, 1, 64, None, **LIKE)
    q, bounds, _ = packed_queries(counts, heads, 64, **LIKE)
    mask = ask(kind, counts, lengths, heads, "cuda").options["mask"]
    own = {KeyMask: lambda x: KeyMask(x.keep[:1]), Dense: lambda x: Dense(x.tensor[:1]),
           Documents: lambda x: Documents(x.ids[:count], x.ids_k[:1]),
           TokenTree: lambda x: TokenTree(x.words[:count])}  # fmt: skip
    alone = None
    for part in getattr(mask, "masks", (mask,)):
        first = own[type(part)](part)
        alone = first if alone is None else alone & first
    with flash_ext.serving.set_batch_invariant(True):
        whole = attention_varlen(q, cache.k, cache.v, bounds, None, mask=mask, **cache.places)
        got = attention_varlen(
            q[:count], cache.k, cache.v, bounds[:2], None, mask=alone, block_table=cache.table[:1],
            seqused_k=cache.lengths[:1],
        )  # fmt: skip
    assert torch.equal(whole[:count], got)


def test_results_repeat_bit_for_bit() -> None:
    cache = make_long([9000, 100, 3333], 16, 2, 128, torch.bfloat16)
    q, bounds, _ = packed_queries([1, 9, 80], 8, 128, **LIKE)
    mask = ask("everything", [1, 9, 80], [9000, 100, 3333], 8, "cuda").options["mask"]
    runs = [attention_varlen(q, cache.k, cache.v, bounds, None, mask=mask, **cache.places) for _ in range(10)]
    assert all(torch.equal(runs[0], other) for other in runs)


def test_the_host_does_not_wait() -> None:
    counts, lengths = [4, 4], [300, 77]
    cache = make_cache(lengths, 16, 2, 64, None, **LIKE)
    q, bounds, _ = packed_queries(counts, 8, 64, **LIKE)
    bias = DenseBias(torch.randn(8, 4, 300, device="cuda"))
    given = [ask(kind, counts, lengths, 8, "cuda").options for kind in KINDS]
    given.append({"bias": bias, "mask": torch.rand(4, 300, device="cuda") < 0.5})
    parents = torch.tensor([[-1, 0, 0, 1]], device="cuda")
    run(q, bounds, cache, **given[0])
    torch.cuda.set_sync_debug_mode("error")
    try:
        given.append({"mask": TokenTree.from_parents(parents)})
        given.append({"mask": TokenTree.from_bool(parents[:, None] < parents[..., None])})
        for options in given:
            run(q, bounds, cache, max_seqlen_q=4, **options)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_nothing_is_read_behind_a_mask() -> None:
    """Bits, ids and numbers that end before the keys do lie before others, which would change the result."""
    lengths, heads = [200, 90], 4
    cache = make_cache(lengths, 16, 2, 64, None, **LIKE)
    q, bounds, each = packed_queries([3, 70], heads, 64, **LIKE)
    wide = torch.ones(4, 200, dtype=torch.bool, device="cuda")
    ids_k = torch.zeros(4, 200, dtype=torch.int32, device="cuda")
    bias = torch.full((1, heads, 80, 64), torch.nan, device="cuda")
    bias[:, :, :50, :37] = 1
    for n in (1, 31, 32, 33, 63, 64, 65, 199):
        for mask in (KeyMask(wide[1:3, :n]), Documents(ids_k.new_zeros(73), ids_k[1:3, :n])):
            asked = Asked({"mask": mask}, lambda b, m, k, n=n: fitted_keys(wide[:2, :n], b, heads, m, k))
            call(q, cache, bounds, asked, each)
    cut = bias[:, :, :50, :37]
    asked = Asked({"bias": cut}, None, lambda b, m, k: fitted(cut.double(), b, heads, m, k))
    call(q, cache, bounds, asked, each)


def test_a_call_without_masks_keeps_its_kernels() -> None:
    """A mask that is all bands is a window: prompts have the kernels that they have without one."""
    cache = make_cache([400, 300], 16, 2, 64, None, **LIKE)
    q, bounds, _ = packed_queries([200, 100], 8, 64, **LIKE)
    found = []
    with recorded() as last_launch:
        for options in ({"causal": True}, {"mask": Causal()}):
            out = attention_varlen(q, cache.k, cache.v, bounds, None, **options, **cache.places)
            found.append(([one["kernel"] for one in last_launch()["launches"]], out))
    assert found[0][0] == found[1][0] and torch.equal(found[0][1], found[1][1])
