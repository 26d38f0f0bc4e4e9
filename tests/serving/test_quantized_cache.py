"""Caches of 8 bits (float8_e4m3fn, int8): attention over them and append_kv, against float64."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor

import flash_ext
from flash_ext import AuxRequest, attention_varlen, masks, serving
from flash_ext._ops.library import _C
from flash_ext.fp8 import Fp8Inputs, attention_fp8
from tests.covering import pairs_on_cpu
from tests.graphs import capture
from tests.pages import (
    FACTORS,
    LAYOUTS,
    MIXED,
    Cache,
    check,
    close,
    in_bytes,
    make_cache,
    packed_queries,
    run,
)  # fmt: skip
from tests.qkv import dtype_on, null_kernels, on_devices

LSE = AuxRequest(lse=True)
BYTES = (torch.float8_e4m3fn, torch.int8)
MOST = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}
of_each_type = pytest.mark.parametrize("kind", BYTES, ids=str)


def make(
    lengths: list[int], page_size: int, kind: torch.dtype, factors: str, device: str, layout: str = "apart",
    heads_k: int = 2, head_dim: int = 64, head_dim_v: int | None = None,
) -> tuple[Cache, dict[str, Tensor]]:  # fmt: skip
    wide = make_cache(lengths, page_size, heads_k, head_dim, head_dim_v, device, torch.float32)
    return in_bytes(wide, kind, factors, layout)


@pairs_on_cpu(layout=LAYOUTS, factors=FACTORS, kind=BYTES, page_size=[1, 16, 24, 128])
def test_one_query_a_sequence(
    layout: str, factors: str, kind: torch.dtype, page_size: int, device: str
) -> None:
    lengths = [0, 1, page_size - 1, page_size, page_size + 1, 700]
    cache, descales = make(lengths, page_size, kind, factors, device, layout)
    q, bounds, each = packed_queries([1] * len(lengths), 8, 64, device, dtype_on(device))
    check(*run(q, bounds, cache, max_seqlen_q=1, **descales), bounds, each, cache)


# (heads, key heads, head_dim, head_dim_v)
HEADS = ((4, 4, 64, 64), (16, 1, 128, 128), (6, 2, 80, 48), (24, 1, 64, 64), (2, 1, 256, 256), (2, 2, 16, 96))
WINDOWS = ((-1, -1), (-1, 0), (50, 0), (30, 7))


@pairs_on_cpu(heads=HEADS, window=WINDOWS, factors=["heads", "slots"], kind=BYTES)
def test_few_and_many_queries_in_one_call(
    heads: tuple, window: tuple[int, int], factors: str, kind: torch.dtype, device: str
) -> None:
    h, h_k, d, dv = heads
    counts, lengths = MIXED[device]
    q, bounds, each = packed_queries(counts, h, d, device, dtype_on(device), outside=3)
    for bound, page_size in ((None, 16), (max(counts), 3)):
        cache, descales = make(lengths, page_size, kind, factors, device, "heads first", h_k, d, dv)
        out, lse = run(q, bounds, cache, window_size=window, max_seqlen_q=bound, **descales)
        rounded = factors == "slots" and q.dtype == torch.bfloat16
        check(out, lse, bounds, each, cache, window, rounded=rounded)


@on_devices
@of_each_type
def test_what_else_a_call_may_have(kind: torch.dtype, device: str) -> None:
    cache, descales = make([333, 5, 130], 16, kind, "slots", device, heads_k=2)
    q, bounds, each = packed_queries([1, 5, 40], 8, 64, device, dtype_on(device))
    sinks, slopes = torch.randn(8, device=device), torch.rand(8, device=device)
    for options, wanted in (
        ({"sinks": sinks}, {"sinks": sinks}),
        ({"softcap": 3.0}, {"softcap": 3.0}),
        ({"bias": masks.ALiBi(slopes)}, {"slopes": slopes}),
    ):
        found = run(q, bounds, cache, causal=True, **options, **descales)
        check(*found, bounds, each, cache, (-1, 0), rounded=q.dtype == torch.bfloat16, **wanted)


@on_devices
@of_each_type
def test_entries_of_a_dense_cache(kind: torch.dtype, device: str) -> None:
    """A page for each sequence, without a table."""
    cache, descales = make([60, 60, 60], 60, kind, "slots", device)
    order = cache.table[:, 0].long()
    k, v = (x.view(torch.uint8)[order].view(kind) for x in (cache.k, cache.v))
    own = {name: x[order] for name, x in descales.items()}
    q, bounds, each = packed_queries([2, 2, 2], 4, 64, device, dtype_on(device))
    out, aux = attention_varlen(q, k, v, bounds, None, seqused_k=cache.lengths, return_aux=LSE, **own)
    check(out, aux.lse, bounds, each, cache)


@on_devices
def test_factors_of_any_strides(device: str) -> None:
    cache, _ = make([70, 300], 16, torch.float8_e4m3fn, "none", device)
    q, bounds, _ = packed_queries([1, 3], 4, 64, device, dtype_on(device))
    one = torch.full((1, 1), 0.5, device=device)
    wanted = run(q, bounds, cache, k_descale=one.expand(2, 2).contiguous(), v_descale=one[0])
    for k_descale in (one.expand(2, 2), one[0, 0], one[0], one[0].expand(2)):
        got = run(q, bounds, cache, k_descale=k_descale, v_descale=k_descale)
        assert torch.equal(got[0], wanted[0]) and torch.equal(got[1], wanted[1])


@pytest.mark.gpu
@of_each_type
@pytest.mark.parametrize("size", [1e-30, 1e-3, 1e5, 1e30])
@pytest.mark.parametrize("count", [1, 30])
def test_gpu_queries_of_any_size(count: int, size: float, kind: torch.dtype) -> None:
    """q becomes fp16, whose range is that of neither 1e30 nor 1e-30."""
    cache, descales = make([333, 90], 16, kind, "heads", "cuda")
    q, bounds, each = packed_queries([count, 1], 8, 64, "cuda", torch.bfloat16)
    large = (q.float() * size).bfloat16()
    out, lse = run(large, bounds, cache, scale=0.125 / size, **descales)
    each = [(large.double() / size).split([count, 1])[i] for i in range(2)]
    check(out, lse, bounds, each, cache)


@pytest.mark.gpu
@of_each_type
@pytest.mark.parametrize("factors", ["heads", "slots"])
def test_gpu_long_caches(factors: str, kind: torch.dtype) -> None:
    for dtype in (torch.float16, torch.bfloat16):
        cache, descales = make([40000, 17, 0, 8191], 16, kind, factors, "cuda", heads_k=1, head_dim=128)
        for counts in ([1] * 4, [1, 3, 1, 130]):
            q, bounds, each = packed_queries(counts, 8, 128, "cuda", dtype)
            out, lse = run(q, bounds, cache, causal=True, max_seqlen_q=max(counts), **descales)
            rounded = factors == "slots" and dtype == torch.bfloat16
            check(out, lse, bounds, each, cache, (-1, 0), rounded=rounded)


@pytest.mark.gpu
def test_gpu_factors_of_values_far_apart() -> None:
    """Weights times factors of v must stay inside fp16, in any order of the keys."""
    cache, descales = make([3000], 16, torch.int8, "slots", "cuda")
    q, bounds, each = packed_queries([3], 8, 64, "cuda", torch.bfloat16)
    for exponents in (
        torch.linspace(-30, 30, 3000),
        torch.linspace(30, -30, 3000),
        torch.full((3000,), -100.0),
    ):
        factor = torch.exp2(exponents).cuda()
        at = torch.arange(3000, device="cuda")
        place = (cache.table[0].long()[at // 16], at % 16)
        v_descale = descales["v_descale"].clone()
        v_descale[place] = factor[:, None].expand(-1, 2)
        k, v = cache.rows[0]
        numbers = v / descales["v_descale"][place].double()[..., None] * factor.double()[:, None, None]
        scale = numbers.abs().max()
        own = Cache(cache.k, cache.v, cache.table, cache.lengths, [(k, numbers / scale)])
        out, lse = run(q, bounds, cache, k_descale=descales["k_descale"], v_descale=v_descale)
        check((out.double() / scale).bfloat16(), lse, bounds, each, own)


@pytest.mark.gpu
@of_each_type
def test_gpu_a_sequence_has_its_bits_in_any_batch(kind: torch.dtype) -> None:
    cache, descales = make([3000, 70, 700], 16, kind, "slots", "cuda")
    with serving.set_batch_invariant(True):
        for counts in ([1, 1, 1], [5, 40, 1]):
            q, bounds, each = packed_queries(counts, 8, 64, "cuda", torch.bfloat16)
            out, lse = run(q, bounds, cache, causal=True, **descales)
            for b, own in enumerate(each):
                alone = torch.tensor([0, counts[b]], dtype=torch.int32, device="cuda")
                got, aux = attention_varlen(
                    own, cache.k, cache.v, alone, None, causal=True, return_aux=LSE,
                    seqused_k=cache.lengths[b : b + 1], block_table=cache.table[b : b + 1], **descales,
                )  # fmt: skip
                rows = slice(int(bounds[b]), int(bounds[b + 1]))
                assert torch.equal(got, out[rows]) and torch.equal(aux.lse, lse[:, rows])


@pytest.mark.gpu
def test_gpu_a_graph_follows_lengths_and_factors() -> None:
    cache, descales = make([333, 90], 16, torch.float8_e4m3fn, "heads", "cuda")
    q, bounds, each = packed_queries([1, 1], 8, 64, "cuda", torch.bfloat16)
    call = {"max_seqlen_q": 1, **descales}
    graph, (out, lse) = capture(lambda: run(q, bounds, cache, **call))
    for lengths, by in (([333, 90], 1.0), ([12, 0], 0.5), ([300, 90], 2.0)):
        cache.lengths.copy_(torch.tensor(lengths))
        rows = [(k[:n] * by, v[:n]) for (k, v), n in zip(cache.rows, lengths)]
        descales["k_descale"].mul_(by)
        graph.replay()
        check(out, lse, bounds, each, Cache(cache.k, cache.v, cache.table, cache.lengths, rows))
        descales["k_descale"].div_(by)


# ---- append ----------------------------------------------------------------------------------------------


def rounded(x: Tensor, factor: Tensor | float, kind: torch.dtype) -> Tensor:
    y = (x.float() / factor).clamp(-MOST[kind], MOST[kind])
    return y.round().to(torch.int8) if kind == torch.int8 else y.to(kind)


@pairs_on_cpu(
    factors=["none", "one", "heads", "tokens", "slots"],
    dims=[(64, 64), (128, 96), (37, 20), (256, 256)],
    kind=BYTES,
)
def test_appended_bytes_are_those_of_torch(
    factors: str, dims: tuple[int, int], kind: torch.dtype, device: str
) -> None:
    caches = [torch.full((5, 12, 3, d), 7, dtype=torch.uint8, device=device) for d in dims]
    for dtype in (torch.float16, torch.bfloat16):
        new = [(torch.randn(7, 3, d, device=device) * 3).to(dtype) for d in dims]
        new[0][3, 1] = 0  # a row without a largest element
        new[1][0, 0, 0] = 600.0
        slots = torch.tensor([0, 59, -1, 12, 11, -1, 30], device=device)
        shape = {"none": (), "one": (1,), "heads": (3,), "tokens": (7, 3), "slots": (5, 12, 3)}[factors]
        given = [None if factors == "none" else torch.rand(shape, device=device) + 0.1 for _ in range(2)]
        before = [None if x is None else x.clone() for x in given]
        serving.append_kv(*new, *(x.view(kind) for x in caches), slots, None, *given)
        for cache, x, factor, old in zip(caches, new, given, before, strict=True):
            for token, slot in enumerate(slots.tolist()):
                if slot < 0:
                    continue
                own: Tensor | float = 1.0
                if factors == "slots":
                    largest = x[token].float().abs().amax(-1)
                    # By a tensor: torch multiplies by the inverse of a number.
                    own = torch.where(largest == 0, 1, largest / torch.full_like(largest, MOST[kind]))
                    assert torch.equal(factor[slot // 12, slot % 12], own)
                    own = own[:, None]
                elif factors == "tokens":
                    own = factor[token][:, None]
                elif factors != "none":
                    own = factor.expand(3)[:, None]
                wanted = rounded(x[token], own, kind).view(torch.uint8)
                assert torch.equal(cache[slot // 12, slot % 12], wanted)
            untouched = torch.ones(5, 12, dtype=torch.bool, device=device)
            kept = slots[slots >= 0]
            untouched[kept // 12, kept % 12] = False
            assert (cache[untouched] == 7).all()
            if factors == "slots":
                assert torch.equal(factor[untouched], old[untouched])
            elif factor is not None:
                assert torch.equal(factor, old)


@on_devices
@of_each_type
@pytest.mark.parametrize("interleaved", [False, True])
def test_keys_are_turned_first(interleaved: bool, kind: torch.dtype, device: str) -> None:
    k, v = (torch.randn(5, 2, 64, device=device).bfloat16() for _ in range(2))
    angles = torch.rand(9, 16, device=device) * 6
    rotary = serving.Rotary(
        angles.cos(), angles.sin(), torch.tensor([0, 8, 3, 4, 1], device=device), interleaved
    )
    slots = torch.tensor([3, 0, 11, 7, 5], device=device)
    wide = [torch.zeros(2, 6, 2, 64, dtype=torch.bfloat16, device=device) for _ in range(2)]
    serving.append_kv(k, v, *wide, slots, rotary)
    narrow = [torch.zeros(2, 6, 2, 64, dtype=torch.uint8, device=device) for _ in range(2)]
    serving.append_kv(
        k, v, *(x.view(kind) for x in narrow), slots, rotary, torch.full((2,), 0.03, device=device)
    )
    for got, wanted, factor in zip(narrow, wide, (0.03, 1.0), strict=True):
        by = torch.tensor(factor, device=device)
        assert torch.equal(got, rounded(wanted, by, kind).view(torch.uint8))


# ---- engines ---------------------------------------------------------------------------------------------


@on_devices
def test_as_vllm_calls_it(device: str) -> None:
    """q in e4m3 as well, with factors of each sequence and key head, expanded from one number."""
    cache, _ = make([333, 5, 130], 16, torch.float8_e4m3fn, "none", device)
    q, bounds, each = packed_queries([1, 5, 20], 8, 64, device, torch.bfloat16)
    factors = [torch.tensor(x, device=device).expand(3, 2) for x in (0.5, 0.25, 2.0)]
    narrow = (q.float() / 0.5).to(torch.float8_e4m3fn)
    exact = narrow.double() * 0.5
    rows = [(k * 0.25, v * 2.0) for k, v in cache.rows]
    wanted = Cache(cache.k, cache.v, cache.table, cache.lengths, rows)
    out = torch.empty_like(q)
    for given, own, to in ((narrow, exact.split([1, 5, 20]), out), (q, each, None)):
        got, lse = serving.flash_attn_varlen_func(
            given, cache.k, cache.v, 20, bounds, 333, seqused_k=cache.lengths, block_table=cache.table,
            causal=True, q_descale=factors[0] if given is narrow else None,
            k_descale=factors[1], v_descale=factors[2],
            return_softmax_lse=True, out=to,
        )  # fmt: skip
        assert got.dtype == torch.bfloat16
        check(got, lse, bounds, [x.double() for x in own], wanted, (-1, 0))


@on_devices
@of_each_type
@pytest.mark.parametrize("paged", [False, True])
def test_flash_attn_with_kvcache_appends(paged: bool, kind: torch.dtype, device: str) -> None:
    caches = [torch.zeros(2, 32, 2, 64, dtype=torch.uint8, device=device) for _ in range(2)]
    q = torch.randn(2, 1, 4, 64, device=device).bfloat16()
    lengths = torch.tensor([0, 0], dtype=torch.int32, device=device)
    k, v = (torch.randn(2, 20, 2, 64, device=device).bfloat16() for _ in range(2))
    factors = [torch.rand(2, 2, device=device) / 50 + 0.01 for _ in range(2)]
    table = torch.tensor([[1], [0]], dtype=torch.int32, device=device) if paged else None
    for start, end in ((0, 15), (15, 16), (16, 20)):
        out = serving.flash_attn_with_kvcache(
            q, *(x.view(kind) for x in caches), k[:, start:end], v[:, start:end], cache_seqlens=lengths,
            page_table=table, k_descale=factors[0], v_descale=factors[1], causal=True,
        )  # fmt: skip
        lengths = lengths + (end - start)
        numbers = [
            rounded(x[:, :end], by[:, None, :, None], kind).double() * by.double()[:, None, :, None]
            for x, by in zip((k, v), factors, strict=True)
        ]
        wanted = flash_ext.attention(q.cpu().double(), *(x.cpu() for x in numbers))
        close(out.cpu(), wanted)


# ---- which kernels, and what is refused ------------------------------------------------------------------


PORTABLE, PACKED = "sm80.fwd_cached.quantized", "sm90.fwd_cached.packed_quantized"


def launched_for(
    count: int, kind: torch.dtype, factors: str = "heads", page_size: int = 64,
    dtype: torch.dtype = torch.bfloat16, head_dim: int = 64, **options: Any,
) -> tuple[str, list[str]]:  # fmt: skip
    """The row and the kernels of a call whose longest sequence has so many queries of 4 heads a key head."""
    cache, descales = make([3000, 10], page_size, kind, factors, "cpu", head_dim=head_dim)
    q, bounds, _ = packed_queries([1, count], 8, head_dim, "cpu", dtype)
    with null_kernels():
        options = {"max_seqlen_q": count, **options, **descales, **cache.places}
        attention_varlen(q, cache.k, cache.v, bounds, None, **options)
        found = _C.last_launch()
    return found["row"], [one["kernel"] for one in found["launches"]]


def test_which_kernels_are_launched() -> None:
    for kind, name in zip(BYTES, ("e4m3", "int8"), strict=True):
        kernel, merge = f"fwd_split_quantized_sm80_hd64_{name}", "fwd_merge_cached_sm80_hd64"
        assert launched_for(1, kind) == (PORTABLE, [kernel, merge])
        packed = f"fwd_packed_quantized_sm90_hd64_{name}"
        assert launched_for(30, kind) == (PACKED, [kernel, packed, merge])


@of_each_type
def test_what_packed_tiles_do_not_take(kind: torch.dtype) -> None:
    def row(*args: Any, **options: Any) -> str:
        return launched_for(30, kind, *args, **options)[0]

    assert (
        row("slots", page_size=4)
        == row(dtype=torch.float16)
        == row(head_dim=128)
        == row(head_dim=80)
        == PACKED
    )
    assert row("slots", dtype=torch.float16) == row(head_dim=192) == PORTABLE
    assert row(softcap=3.0) == PACKED
    with serving.set_batch_invariant(True):
        assert row() == PORTABLE
    # Prompts of any length, whose keys are whole.
    assert launched_for(600, kind)[0] == PACKED


def small(kind: torch.dtype = torch.int8, head_dim: int = 64) -> tuple[Tensor, Tensor, Cache]:
    cache, _ = make([20, 9], 8, kind, "none", "cpu", head_dim=head_dim)
    q, bounds, _ = packed_queries([1, 1], 4, head_dim, "cpu", torch.bfloat16)
    return q, bounds, cache


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"k_descale": torch.ones(3)}, ValueError, "k_descale must have shape"),
        ({"k_descale": torch.ones(2, 3)}, ValueError, "k_descale must have shape"),
        ({"v_descale": torch.ones(2, dtype=torch.float64)}, TypeError, "v_descale must be torch.float32"),
        ({"v_descale": torch.ones(1, 1, 1, 1)}, ValueError, "v_descale must have shape"),
        ({"v_descale": 2.0}, TypeError, "v_descale must be a torch.Tensor"),
    ],
)
def test_wrong_factors_are_refused(change: dict, error: type, words: str) -> None:
    q, bounds, cache = small()
    with pytest.raises(error, match=words):
        run(q, bounds, cache, **change)


def test_what_a_cache_of_bytes_must_be() -> None:
    q, bounds, cache = small()
    with pytest.raises(TypeError, match="k and v must share one dtype"):
        attention_varlen(q, cache.k, cache.v.float(), bounds, None, **cache.places)
    with pytest.raises(TypeError, match="q must be torch.float16 or torch.bfloat16 beside a cache of 8 bits"):
        attention_varlen(q.to(torch.float8_e4m3fn), cache.k, cache.v, bounds, None, **cache.places)
    with pytest.raises(NotImplementedError, match="multiple of 16"):
        run(*small(head_dim=40))
    rows = torch.zeros(30, 2, 64, dtype=torch.int8)
    with pytest.raises(NotImplementedError, match="must lie in pages"):
        attention_varlen(q, rows, rows, bounds, torch.tensor([0, 20, 29]).int(), seqused_k=cache.lengths)
    with pytest.raises(NotImplementedError, match="k_descale and v_descale belong to a cache"):
        flash_ext.attention_varlen(q, q, q, bounds, bounds, k_descale=torch.ones(4))
    wide = make_cache([20, 9], 8, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="k_descale and v_descale belong to k and v of"):
        run(q, bounds, wide, k_descale=torch.ones(2))
    whole = torch.zeros(9, 8, 2, 72, dtype=torch.int8)[..., :64]
    with null_kernels(), pytest.raises(ValueError, match="rows of k must start on 16 bytes"):
        attention_varlen(q, whole, whole, bounds, None, **cache.places)


def test_packed_keys_without_a_cache_are_sent_to_attention_fp8() -> None:
    """Not to a cast of "them to one dtype": a q in e4m3 has become bfloat16 before others look at it."""
    x, bounds = torch.randn(10, 2, 16, dtype=torch.bfloat16), torch.tensor([0, 4, 10], dtype=torch.int32)
    x8, ones = x.to(torch.float8_e4m3fn), torch.ones(2, 2)
    x_int = torch.zeros(10, 2, 16, dtype=torch.int8)
    for name, q, k, v in (("q", x8, x8, x8), ("k", x, x8, x8), ("k", x, x_int, x_int), ("v", x, x, x8)):
        for factors in ({}, {"k_descale": ones}):
            words = f"^{name} of 8 bits must lie in pages .* packed rows of .*attention_fp8 with .*Fp8Inputs"
            with pytest.raises(NotImplementedError, match=words):
                serving.flash_attn_varlen_func(q, k, v, 6, bounds, 6, bounds, **factors)
    inputs = Fp8Inputs.of(x8, x8, x8, cu_seqlens_q=bounds, cu_seqlens_k=bounds)
    assert attention_fp8(inputs).shape == x.shape


def test_what_append_refuses() -> None:
    k = torch.randn(3, 2, 64).bfloat16()
    cache, slots = torch.zeros(2, 4, 2, 64, dtype=torch.int8), torch.tensor([0, 1, 2])
    with pytest.raises(ValueError, match="k_descale must have shape"):
        serving.append_kv(k, k, cache, cache.clone(), slots, None, torch.ones(3))
    with pytest.raises(TypeError, match="v_descale must be torch.float32"):
        serving.append_kv(k, k, cache, cache.clone(), slots, None, None, torch.ones(2).double())
    with pytest.raises(TypeError, match="v_cache must have the dtype of k_cache"):
        serving.append_kv(k, k, cache, torch.zeros(2, 4, 2, 64).bfloat16(), slots)
    with pytest.raises(ValueError, match="k_descale belongs to a cache of"):
        serving.append_kv(k, k, *torch.zeros(2, 2, 4, 2, 64).bfloat16(), slots, None, torch.ones(2))


def test_factors_that_are_written_are_noticed_and_must_be_there() -> None:
    k = torch.randn(3, 2, 64).bfloat16()
    cache, slots = torch.zeros(2, 4, 2, 64, dtype=torch.int8), torch.tensor([0, 1, 2])
    factors, given = torch.ones(2, 2, 4, 2), torch.ones(2)
    for kernels in (contextlib.nullcontext(), null_kernels()):
        with kernels:
            before = [x._version for x in (cache, *factors, given)]
            serving.append_kv(k, k, cache, cache.clone(), slots, None, factors[0], given)
            assert cache._version > before[0] and factors[0]._version > before[1]
            assert given._version == before[3]
    with pytest.raises(ValueError, match="k_descale must not be expanded to be written"):
        serving.append_kv(k, k, cache, cache.clone(), slots, None, factors[0, :, :, :1].expand(-1, -1, 2))


def test_it_is_traced_as_one_operator() -> None:
    cache, descales = make([20, 9], 8, torch.int8, "slots", "cpu")
    q, bounds, _ = packed_queries([1, 3], 4, 64, "cpu", torch.float32)
    call = torch.compile(attention_varlen, fullgraph=True, backend="aot_eager")
    traced = call(q, cache.k, cache.v, bounds, None, **cache.places, **descales)
    close(traced, run(q, bounds, cache, **descales)[0].double())
