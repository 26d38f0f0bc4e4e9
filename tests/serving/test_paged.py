"""attention_varlen over a cache: pages of any size and layout against float64, and what is refused."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

import flash_ext
from flash_ext import AuxRequest, attention_varlen, masks, serving
from flash_ext._ops import dispatch_cached
from flash_ext._ops.library import _C
from tests.covering import pairs_on_cpu
from tests.pages import LAYOUTS, MIXED, check, close, make_cache, packed_queries, run, truth
from tests.qkv import dtype_on, null_kernels, on_devices

LSE = AuxRequest(lse=True)
PAGES = (1, 3, 16, 24, 64, 128, 256)


@on_devices
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("page_size", PAGES)
def test_one_query_a_sequence(page_size: int, layout: str, device: str) -> None:
    near = [page_size - 1, page_size, page_size + 1]
    lengths = [0, 1, *near, 3 * page_size + 2, 700]
    cache = make_cache(lengths, page_size, device=device, dtype=dtype_on(device), layout=layout)
    q, bounds, each = packed_queries([1] * len(lengths), 8, 64, device, dtype_on(device))
    check(*run(q, bounds, cache, max_seqlen_q=1), bounds, each, cache)


# (heads, key heads, head_dim, head_dim_v)
HEADS = ((4, 4, 64, 64), (16, 1, 128, 128), (6, 2, 40, 72), (24, 1, 64, 64), (2, 1, 256, 256), (2, 2, 37, 37))


@pairs_on_cpu(heads=HEADS, window=[(-1, -1), (-1, 0), (50, 0), (30, 7)])
def test_few_and_many_queries_in_one_call(heads: tuple, window: tuple[int, int], device: str) -> None:
    """Decoding steps, a few new tokens and pieces of prompts; rows before and behind the sequences."""
    h, h_k, d, dv = heads
    counts, lengths = MIXED[device]
    cache = make_cache(lengths, 16, h_k, d, dv, device, dtype_on(device), "heads first")
    q, bounds, each = packed_queries(counts, h, d, device, dtype_on(device), outside=3)
    for bound in (None, max(counts)):
        out, lse = run(q, bounds, cache, window_size=window, max_seqlen_q=bound)
        check(out, lse, bounds, each, cache, window)


@on_devices
@pytest.mark.parametrize("count", [1, 4, 17, 64, 65, 200])
def test_as_many_queries_as_there_are(count: int, device: str) -> None:
    """The bound says how many at most; one that is wrong costs time and no result."""
    lengths = [count + 30, 400]
    cache = make_cache(lengths, 32, 1, 64, device=device, dtype=dtype_on(device))
    q, bounds, each = packed_queries([count, 1], 2, 64, device, dtype_on(device))
    for bound in (count, 1, None):
        check(*run(q, bounds, cache, causal=True, max_seqlen_q=bound), bounds, each, cache, (-1, 0))


@on_devices
def test_pages_may_be_shared_and_repeated(device: str) -> None:
    cache = make_cache([100, 64, 90], 16, device=device, dtype=dtype_on(device), shared=3)
    assert (cache.table[0, :3] == cache.table[2, :3]).all()
    q, bounds, each = packed_queries([1, 4, 2], 4, 64, device, dtype_on(device))
    check(*run(q, bounds, cache, causal=True), bounds, each, cache, (-1, 0))
    cache.table[1, 1] = cache.table[1, 0]
    pages = cache.table[1, :4].long()
    cache.rows[1] = tuple(x[pages].flatten(0, 1)[:64] for x in (cache.k, cache.v))
    check(*run(q, bounds, cache, causal=True), bounds, each, cache, (-1, 0))


@on_devices
def test_a_table_may_be_part_of_a_wider_one(device: str) -> None:
    cache = make_cache([40, 9], 8, device=device, dtype=dtype_on(device))
    wide = torch.full((2, 50), -7, dtype=torch.int32, device=device)
    wide[:, : cache.table.shape[1]] = cache.table
    q, bounds, each = packed_queries([1, 1], 4, 64, device, dtype_on(device))
    cache.table = wide[:, :9]
    check(*run(q, bounds, cache), bounds, each, cache)


@on_devices
def test_lengths_of_packed_keys(device: str) -> None:
    """Without a table seqused_k cuts the rows that cu_seqlens_k gives to each sequence."""
    room, used, counts = [50, 7, 0, 300], [33, 7, 0, 1], [2, 1, 1, 3]
    cache = make_cache([sum(room)], 1, device=device, dtype=dtype_on(device), spare=0)
    k, v = cache.rows[0]
    starts = [sum(room[:i]) for i in range(4)]
    cache.rows = [(k[s : s + n], v[s : s + n]) for s, n in zip(starts, used)]
    inside = torch.zeros(len(k), dtype=torch.bool, device=device)
    for s, n in zip(starts, used):
        inside[s : s + n] = True
    k, v = (x.masked_fill(~inside[:, None, None], torch.nan) for x in (k, v))
    q, bounds, each = packed_queries(counts, 4, 64, device, dtype_on(device))
    bounds_k = torch.tensor([0, *room], device=device).cumsum(0).int()
    lengths = torch.tensor(used, device=device).int()
    out, aux = attention_varlen(q, k, v, bounds, bounds_k, seqused_k=lengths, causal=True, return_aux=LSE)
    check(out, aux.lse, bounds, each, cache, (-1, 0))


@on_devices
@pytest.mark.parametrize("window", [(-1, 0), (20, 0)], ids=str)
def test_sinks(window: tuple[int, int], device: str) -> None:
    """One more logit a head, none and a very large one too; rows without keys, and outside of sequences."""
    counts, lengths = [1, 20, 9, 100, 1], [130, 0, 5, 140, 1]
    cache = make_cache(lengths, 16, 2, 64, None, device, dtype_on(device))
    q, bounds, each = packed_queries(counts, 4, 64, device, dtype_on(device), outside=2)
    for dtype in (q.dtype, torch.float32):
        sinks = torch.tensor([0.5, -torch.inf, 30.0, -2.0], device=device, dtype=dtype)
        out, lse = run(q, bounds, cache, window_size=window, sinks=sinks)
        check(out, lse, bounds, each, cache, window, sinks)
        options = {"window_size": window, "sinks": sinks, **cache.places}
        assert torch.equal(attention_varlen(q, cache.k, cache.v, bounds, None, **options), out)
        got, got_lse = serving.flash_attn_varlen_func(
            q, cache.k, cache.v, 100, bounds, 140, seqused_k=cache.lengths, block_table=cache.table,
            window_size=window, s_aux=sinks, return_softmax_lse=True,
        )  # fmt: skip
        check(got, got_lse, bounds, each, cache, window, sinks)
        dense, dense_lse = serving.flash_attn_with_kvcache(
            q[:5, None], cache.k, cache.v, page_table=cache.table, cache_seqlens=cache.lengths, sinks=sinks,
            return_softmax_lse=True,
        )  # fmt: skip
        outs, lses = truth(list(q[:5, None]), cache.rows, (-1, -1), sinks)
        close(dense, torch.stack(outs))
        close(dense_lse, torch.stack(lses))


# (query heads, key heads, head_dim)
GROUPS = ((4, 4, 64), (16, 2, 128), (8, 1, 256), (24, 1, 64))


@pairs_on_cpu(heads=GROUPS, asked=["softcap", "slopes", "slopes of each", "all"], longest=[1, 9, 200])
def test_softcap_and_slopes(heads: tuple[int, int, int], asked: str, longest: int, device: str) -> None:
    """With sequences of one tile of rows, whose keys are in parts, and of several; some without keys."""
    h, h_k, d = heads
    counts = [1, 1, min(longest, 9), 1, longest]
    lengths = [1300, 0, 700, 5, longest + 40]
    cache = make_cache(lengths, 16, h_k, d, None, device, dtype_on(device))
    q, bounds, each = packed_queries(counts, h, d, device, dtype_on(device), outside=2)
    options: dict = {"window": (-1, 0) if h == 16 else (300, 0)}
    if asked in ("softcap", "all"):
        options["softcap"] = 3.0
    if asked != "softcap":
        options["slopes"] = torch.rand((5, h) if asked == "slopes of each" else (h,), device=device)
    if asked == "all":
        options["sinks"] = torch.randn(h, device=device)
    out, lse = serving.flash_attn_varlen_func(
        q, cache.k, cache.v, longest, bounds, 1300, seqused_k=cache.lengths, block_table=cache.table,
        window_size=options["window"], softcap=options.get("softcap", 0.0), s_aux=options.get("sinks"),
        alibi_slopes=options.get("slopes"), return_softmax_lse=True,
    )  # fmt: skip
    check(out, lse, bounds, each, cache, **options)


def test_sinks_that_do_not_fit_are_refused() -> None:
    q, bounds, cache = small()
    call = (q, cache.k, cache.v, bounds, None)
    for sinks, error, words in (
        (1.0, TypeError, "must be a torch.Tensor or None, got float"),
        (torch.ones(4).int(), TypeError, "must be floating point"),
        (torch.ones(3), ValueError, r"must have shape \(num_heads,\) with num_heads 4, got \(3,\)"),
        (torch.ones(4, device="meta"), ValueError, "must be on the device of q"),
    ):
        with pytest.raises(error, match=f"^sinks {words}"):
            attention_varlen(*call, **cache.places, sinks=sinks)
    with pytest.raises(NotImplementedError, match="has no gradient, and sinks requires one"):
        attention_varlen(*call, **cache.places, sinks=torch.ones(4, requires_grad=True))


@on_devices
def test_nothing_to_see(device: str) -> None:
    q, bounds, _ = packed_queries([2, 1], 4, 64, device, dtype_on(device))
    for lengths, pages in (([0, 0], 4), ([0, 0], 0)):
        cache = make_cache(lengths, 16, device=device, dtype=dtype_on(device))
        cache.k, cache.v = cache.k[:pages], cache.v[:pages]
        out, lse = run(q, bounds, cache)
        assert (out == 0).all() and (lse == -torch.inf).all()
        cache.table = cache.table[:, :0]
        assert (run(q, bounds, cache)[0] == 0).all()
    cache = make_cache([3, 4], 16, device=device, dtype=dtype_on(device))
    assert run(q[:0], torch.zeros_like(bounds), cache)[0].shape == (0, 4, 64)


@on_devices
def test_scale_and_parts_may_be_given(device: str) -> None:
    cache = make_cache([900, 40], 16, device=device, dtype=dtype_on(device))
    q, bounds, each = packed_queries([1, 1], 4, 64, device, dtype_on(device))
    half = [one * 0.5 for one in each]
    outs, _ = truth(half, cache.rows)
    close(run(q, bounds, cache, scale=0.5 / 8)[0], torch.cat(outs))
    if device == "cpu":
        return
    for parts in (1, 2, 7, 256):
        check(*run(q, bounds, cache, backend=f"kv_splits={parts}"), bounds, each, cache)
    check(*run(q, bounds, cache, backend="sm80"), bounds, each, cache)


# ---- bad input -----------------------------------------------------------------------------------------


def small() -> tuple[Tensor, Tensor, object]:
    cache = make_cache([40, 9], 8)
    q, bounds, _ = packed_queries([1, 1], 4, 64, "cpu", torch.float32)
    return q, bounds, cache


def test_values_that_the_host_sees_are_refused() -> None:
    q, bounds, cache = small()
    cache.lengths[1] = -1
    with pytest.raises(ValueError, match="seqused_k must hold lengths of at least 0, got -1 for sequence 1"):
        run(q, bounds, cache)
    cache.lengths[1] = 57
    with pytest.raises(ValueError, match=r"got 57 for sequence 1, which has room for 56 keys: 7 pages of 8"):
        run(q, bounds, cache)
    cache.lengths[1] = 9
    for wrong in (-1, cache.k.shape[0]):
        cache.table[0, 4] = wrong
        with pytest.raises(
            ValueError, match=f"block_table must name pages from 0 to .* got {wrong} for sequence 0"
        ):
            run(q, bounds, cache)
    with pytest.raises(ValueError, match="cu_seqlens_q must start at 0 or later"):
        run(q, bounds.flip(0), cache)


@pytest.mark.parametrize("value", ["1", "0", ""])
def test_a_variable_asks_for_values_on_a_gpu(value: str) -> None:
    code = "from flash_ext._ops.dispatch_cached import CHECKS_DEVICE; print(CHECKS_DEVICE)"
    done = subprocess.run([sys.executable, "-c", code], env=os.environ | {"FLASH_EXT_CHECK": value},
                          capture_output=True, text=True, check=True)  # fmt: skip
    assert done.stdout.split() == [str(value == "1")]


@pytest.mark.gpu
def test_values_on_a_gpu_are_looked_at_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch_cached, "CHECKS_DEVICE", True)
    cache = make_cache([40, 9], 8, device="cuda", dtype=torch.bfloat16)
    q, bounds, _ = packed_queries([1, 1], 4, 64, "cuda", torch.bfloat16)
    run(q, bounds, cache)
    cache.lengths[1] = -1
    with pytest.raises(ValueError, match="seqused_k must hold lengths of at least 0, got -1 for sequence 1"):
        run(q, bounds, cache)
    cache.lengths[1], cache.table[0, 4] = 9, cache.k.shape[0]
    with pytest.raises(ValueError, match="block_table must name pages from 0 to .* for sequence 0"):
        run(q, bounds, cache)


@pytest.mark.gpu
@pytest.mark.parametrize("counts", [[1, 1, 1], [3, 20, 100]], ids=str)
def test_gpu_values_are_kept_inside(counts: list[int]) -> None:
    """What is read stays in the cache; clamped as the CPU operator does."""
    cache = make_cache([40, 9, 33], 8, device="cuda", dtype=torch.bfloat16)
    cache.k.nan_to_num_(0.5), cache.v.nan_to_num_(0.25)
    cache.lengths[:] = torch.tensor([2**31 - 1, -5, 1000], device="cuda").int()
    q, bounds, _ = packed_queries(counts, 4, 64, "cuda", torch.bfloat16)
    got, lse = run(q, bounds, cache, causal=True)
    on_cpu = [t.cpu() for t in (q, cache.k, cache.v, bounds)]
    want, want_lse = torch.ops.flash_ext.fwd_cached(
        *on_cpu, None, cache.lengths.cpu(), cache.table.cpu(), 0, 0, 0.125, -1, 0, None, None, 0.0, None
    )
    close(got.cpu(), want.double())
    close(lse.cpu(), want_lse.double())


def test_what_is_refused() -> None:
    q, bounds, cache = small()
    whole = {"q": q, "k": cache.k, "v": cache.v, "cu_seqlens_q": bounds, "cu_seqlens_k": None, **cache.places}

    def refuses(error: type[Exception], words: str, **changed: Any) -> None:
        with pytest.raises(error, match=words):
            attention_varlen(**(whole | changed))

    missing = NotImplementedError
    refuses(missing, "Chunks is not available in a mask .*over a cache", mask=masks.Chunks(8))
    refuses(missing, "dropout_p is not available .*over a cache", dropout_p=0.5)
    refuses(missing, "generator is not available .*over a cache", generator=torch.Generator())
    refuses(missing, "max_scores is not available over a cache", return_aux=AuxRequest(max_scores=True))
    learns = q.clone().requires_grad_()
    refuses(missing, r"attention over a cache .* has no gradient", q=learns)
    with torch.no_grad():
        attention_varlen(**(whole | {"q": learns}))
    table, lengths = cache.table, cache.lengths
    refuses(ValueError, "seqused_k must be given with block_table", seqused_k=None)
    refuses(TypeError, "block_table must be torch.int32, got torch.int64", block_table=table.long())
    refuses(TypeError, "seqused_k must be torch.int32, got torch.float32", seqused_k=lengths.float())
    refuses(TypeError, "seqused_k must be a torch.Tensor or None, got list", seqused_k=[40, 9])
    refuses(ValueError, r"must have shape \(batch, max_pages\) with batch 2", block_table=table[:1])
    refuses(ValueError, r"must have shape \(batch,\) with batch 2, got \(1,\)", seqused_k=lengths[:1])
    pages = r"k must have shape \(num_pages, page_size, num_heads, head_dim\)"
    refuses(ValueError, pages, k=cache.k[0], v=cache.v[0])
    refuses(ValueError, "v must have the pages of k", v=cache.v[:2])
    refuses(ValueError, "num_heads of q must be a positive multiple of num_heads of k", q=q[:, :3])
    empty, options = (cache.k[:, :0], cache.v[:, :0]), (0, 0, 1.0, -1, -1, None, None, 0.0, None)
    with pytest.raises(ValueError, match="a page of k must hold at least 1 key"):
        torch.ops.flash_ext.fwd_cached(q, *empty, bounds, None, lengths, table, *options)
    with pytest.raises(NotImplementedError, match="vmap over attention with a cache"):
        torch.vmap(lambda one: attention_varlen(**(whole | {"q": one})))(torch.stack([q, q]))


# ---- the host side -------------------------------------------------------------------------------------


def launches(
    counts: list[int], bound: int | None, heads: tuple[int, int] = (8, 2), page_size: int = 64,
    length: int = 3000,
) -> list[dict]:  # fmt: skip
    """Of sequences of one length, all of whose pages are one."""
    k = torch.empty(1, page_size, heads[1], 64, dtype=torch.bfloat16)
    table = torch.zeros(len(counts), -(-length // page_size), dtype=torch.int32)
    lengths = torch.full((len(counts),), length, dtype=torch.int32)
    q, bounds, _ = packed_queries(counts, heads[0], 64, "cpu", torch.bfloat16)
    places = {"block_table": table, "seqused_k": lengths}
    with null_kernels():
        attention_varlen(q, k, k, bounds, None, max_seqlen_q=bound, **places)
        return _C.last_launch()["launches"]


def names(*args: Any, **options: Any) -> list[str]:
    return [one["kernel"].removesuffix("_hd64") for one in launches(*args, **options)]


SPLIT, MERGE = "fwd_split_cached_sm80", "fwd_merge_cached_sm80"
WHOLE, PORTABLE, PACKED = "fwd_cached_sm90", "fwd_cached_sm80", "fwd_packed_sm90"


def test_which_kernels_are_launched() -> None:
    """Those that a sequence of at most so many queries may want."""
    assert names([1] * 4, 1) == [SPLIT, MERGE]
    assert names([4] * 4, 4) == [SPLIT, MERGE]  # 16 rows
    assert names([1, 5, 3, 1], 5) == names([1, 64, 3, 1], 64) == [SPLIT, PACKED, MERGE]
    assert names([5], 5) == [PACKED, MERGE]
    assert names([1, 5, 3, 1], 5, page_size=1) == [SPLIT, PACKED, MERGE]
    assert names([1, 129, 3, 1], 129) == names([1, 129, 3, 1], None) == [SPLIT, SPLIT, MERGE, WHOLE]
    assert names([1, 128, 3, 1], 128) == [SPLIT, PACKED, MERGE]
    assert names([129], 129) == [WHOLE]  # a single one is what it is
    assert names([1] * 200, 1, length=200) == [SPLIT]  # enough for the GPU without parts
    assert names([1], 1, (24, 1)) == [PACKED, MERGE]
    assert [one["block_m"] for one in launches([1, 5], 5) if "block_m" in one] == [16, 64]
    assert [one["block_m"] for one in launches([1, 17], 17) if "block_m" in one] == [16, 128]
    # Several waves where there is more than one length, of 2048 keys a part at least.
    grids = [launches([1] * 200, 1, length=length)[0]["grid"] for length in (3000, 4096, 9000)]
    assert grids == [202 * 2 * parts for parts in (1, 2, 3)]


def test_which_prompts_the_hopper_kernel_takes() -> None:
    """All over pages of every size, in every mode, whose rows begin on 16 bytes."""
    for page_size in (1, 12, 16, 64, 1000):
        assert names([200, 3], 200, page_size=page_size)[-1] == WHOLE
    with flash_ext.serving.set_batch_invariant(True):
        assert names([200, 3], 200) == [SPLIT, SPLIT, MERGE, WHOLE]
    _C.set_switch("unaligned", 1)
    try:
        assert names([200, 3], 200)[-1] == PORTABLE
    finally:
        _C.set_switch("unaligned", None)
    for (d, dv), name in (((40, 72), "_hd96"), ((192, 128), "_hd192_v128"), ((200, 8), "_hd256")):
        k, v = (torch.empty(9, 16, 2, dim, dtype=torch.bfloat16) for dim in (d, dv))
        q, bounds, _ = packed_queries([200, 3], 8, d, "cpu", torch.bfloat16)
        places = {"block_table": torch.zeros(2, 7).int(), "seqused_k": torch.tensor([100, 90]).int()}
        with null_kernels():
            attention_varlen(q, k, v, bounds, None, **places)
            assert _C.last_launch()["launches"][-1]["kernel"] == WHOLE + name


def test_launches_depend_on_shapes_alone() -> None:
    """So a graph that was captured serves other lengths."""
    cache = make_cache([3000, 10], 64, dtype=torch.bfloat16)
    q, bounds, _ = packed_queries([1, 1], 8, 64, "cpu", torch.bfloat16)
    found = []
    with null_kernels():
        for lengths in ([3000, 10], [0, 0], [1, 64]):
            cache.lengths[:] = torch.tensor(lengths).int()
            attention_varlen(q, cache.k, cache.v, bounds, None, **cache.places, max_seqlen_q=1)
            found.append(_C.last_launch())
    assert found[0] == found[1] == found[2] and found[0]["workspace_bytes"] > 0


def test_parts_in_the_batch_invariant_mode_are_of_512_keys() -> None:
    with flash_ext.serving.set_batch_invariant(True):
        for batch in (1, 3, 64):
            grid = launches([1] * batch, 1)[0]["grid"]
            assert grid == (batch + 2) * 2 * -(-47 * 64 // 512)  # the room of a row of the table


def test_it_is_traced_as_one_operator() -> None:
    q, bounds, cache = small()
    call = torch.compile(attention_varlen, fullgraph=True, backend="aot_eager")
    for options in ({}, {"softcap": 3.0}, {"sinks": torch.randn(q.shape[1])}):
        traced = call(q, cache.k, cache.v, bounds, None, **options, **cache.places)
        close(traced, run(q, bounds, cache, **options)[0].double())
    options = (0, 0, 0.125, -1, 0, None, None, 0.0, None)
    args = (q, cache.k, cache.v, bounds, None, cache.lengths, cache.table, *options)
    torch.library.opcheck(torch.ops.flash_ext.fwd_cached.default, args)


def test_flops_are_counted() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    q, bounds, cache = small()
    with FlopCounterMode(display=False) as counter:
        run(q, bounds, cache)
    assert counter.get_total_flops() == 2 * 4 * (40 + 9) * 128


def paged_call(device: str) -> tuple:
    cache = make_cache([9, 5], 4, device=device, dtype=dtype_on(device))
    q, bounds, _ = packed_queries([1, 2], 4, 64, device, dtype_on(device))
    return q, cache, bounds


@on_devices
def test_tangents_are_refused(device: str) -> None:
    q, cache, bounds = paged_call(device)

    def call(q: Tensor) -> Tensor:
        return attention_varlen(q, cache.k, cache.v, bounds, None, **cache.places)

    words = "forward-mode automatic differentiation of attention is not implemented"
    with torch.autograd.forward_ad.dual_level(), pytest.raises(NotImplementedError, match=words):
        call(torch.autograd.forward_ad.make_dual(q, q))
    with pytest.raises(NotImplementedError, match=words):
        torch.func.jvp(call, (q,), (q,))


@on_devices
def test_autocast_gives_queries_the_type_of_the_cache(device: str) -> None:
    cache = make_cache([9, 5], 4, device=device, dtype=torch.bfloat16)
    q, bounds, _ = packed_queries([1, 2], 4, 64, device, torch.bfloat16)
    want = attention_varlen(q, cache.k, cache.v, bounds, None, **cache.places)
    with torch.autocast(device, torch.float16 if device == "cuda" else torch.bfloat16):
        got = attention_varlen(q.float(), cache.k, cache.v, bounds, None, **cache.places)
    assert got.dtype == torch.bfloat16 and torch.equal(got, want)


def test_more_rows_than_kernels_count_are_refused() -> None:
    q = torch.zeros(1, 1, 1, 64, dtype=torch.bfloat16).expand(1, 2**26, 32, 64)
    k = torch.zeros(1, 8, 1, 64, dtype=torch.bfloat16)
    with null_kernels(), pytest.raises(NotImplementedError, match="2147483648 rows .* more than 2\\^30"):
        serving.flash_attn_with_kvcache(q, k, k, cache_seqlens=3)
