"""Masks and biases over caches: against float64 with both written out, and what is refused."""

from __future__ import annotations

import gc
import itertools
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from flash_ext import AuxRequest, attention_varlen, masks, serving
from flash_ext._ops.library import _C
from flash_ext._ops.prepared import MOST_PREPARED, kept_in
from flash_ext.masks import (
    ALiBi,
    Causal,
    Dense,
    DenseBias,
    Documents,
    KeyMask,
    RelativePosition,
    TokenTree,
    Window,
)
from tests.covering import pairs_on_cpu
from tests.pages import FACTORS, PLACES, Cache, attend, close, in_bytes, make_cache, packed_queries, run
from tests.qkv import dtype_on, null_kernels, on_devices
from tests.serving.asked import KINDS, Asked, ask, call, fitted, fitted_ids, fitted_keys

LSE = AuxRequest(lse=True)


# ---- against float64 ------------------------------------------------------------------------------------

# (query heads, key heads, head_dim, head_dim_v)
HEADS = ((4, 4, 64, 64), (16, 2, 128, 128), (8, 1, 256, 256), (6, 2, 40, 72))
COUNTS = {"cpu": [1, 7, 0, 34, 16, 3, 5], "cuda": [1, 7, 0, 90, 16, 33, 5]}
LENGTHS = {"cpu": [270, 7, 20, 300, 9, 40, 0], "cuda": [300, 7, 20, 700, 9, 400, 0]}


@pairs_on_cpu(
    heads=HEADS, kind=KINDS, page_size=[1, 16, 24], beside=["nothing", "causal and sinks", "softcap", "both"]
)
def test_masks_of_every_kind(heads: tuple, kind: str, page_size: int, beside: str, device: str) -> None:
    """One new token and several, prompts, sequences without keys or queries, rows of no sequence."""
    h, h_k, d, dv = heads
    counts, lengths = COUNTS[device], LENGTHS[device]
    if kind == "tree":
        counts = [min(n, 64) for n in counts]
    cache = make_cache(lengths, page_size, h_k, d, dv, device, dtype_on(device))
    q, bounds, each = packed_queries(counts, h, d, device, dtype_on(device), outside=2)
    asked = ask(kind, counts, lengths, h, device, outside=2)
    if beside in ("causal and sinks", "both"):
        asked.options |= {"causal": True, "sinks": torch.randn(h, device=device)}
    if beside in ("softcap", "both"):
        asked.options["softcap"] = 4.0
    for bound in (max(counts), None):
        call(q, cache, bounds, asked, each, max_seqlen_q=bound)


@on_devices
@pytest.mark.parametrize("kind", ["keys", "dense", "everything"])
@pytest.mark.parametrize("count", [1, 2, 16])
def test_decoding_steps(count: int, kind: str, device: str) -> None:
    """As many queries of each sequence, in tiles of 16 rows and of 64."""
    lengths = [500, 3, 128, 129]
    for heads in ((8, 8), (8, 2), (8, 1)):
        cache = make_cache(lengths, 16, heads[1], 64, None, device, dtype_on(device))
        q, bounds, each = packed_queries([count] * 4, heads[0], 64, device, dtype_on(device))
        asked = ask(kind, [count] * 4, lengths, heads[0], device)
        call(q, cache, bounds, asked, each, max_seqlen_q=count)


@on_devices
@pytest.mark.parametrize("kind", ["keys", "dense of heads", "everything"])
@pytest.mark.parametrize("window", [(-1, 0), (50, 0), (30, 7)], ids=str)
def test_beside_windows_and_changed_scores(window: tuple[int, int], kind: str, device: str) -> None:
    counts, lengths, h = [3, 1, 70], [300, 7, 333], 8
    cache = make_cache(lengths, 16, 2, 64, None, device, dtype_on(device))
    q, bounds, each = packed_queries(counts, h, 64, device, dtype_on(device))
    asked = ask(kind, counts, lengths, h, device)
    slopes, sinks = torch.rand(3, h, device=device) / 8, torch.randn(h, device=device)

    def by_distance(b: int, m: int, n: int) -> Tensor:
        row, key = torch.arange(m, device=device)[:, None] + n - m, torch.arange(n, device=device)
        return -slopes[b, :, None, None] * (row - key).abs()

    asked.options |= {"window_size": window, "softcap": 4.0, "sinks": sinks, "bias": ALiBi(slopes)}
    asked.added = by_distance
    call(q, cache, bounds, asked, each, max_seqlen_q=70)
    # The same window as a part of the mask, which joins the one beside it.
    both = asked.options["mask"] & Window(*window)
    moved = {**asked.options, "mask": both, "window_size": (-1, -1)}
    for options in (moved, {**moved, "mask": both & Causal(), "window_size": (-1, -1)}):
        again = Asked(options, asked.shown, by_distance)
        out, lse = run(q, bounds, cache, **options)
        right = 0 if options is not moved else window[1]
        again.options = {**options, "window_size": (window[0], right)}
        again.check(out, lse, each, cache.rows, bounds.tolist())


@on_devices
@pytest.mark.parametrize("kind", ["dense", "dense, one row", "dense, in q's dtype", "by distance", "both"])
def test_biases(kind: str, device: str) -> None:
    """Of every pair, repeated, ending before the keys do, and by distance; beside ALiBi and a mask."""
    counts, lengths, h = [3, 1, 70], [300, 7, 333], 8
    cache = make_cache(lengths, 16, 2, 64, None, device, dtype_on(device))
    q, bounds, each = packed_queries(counts, h, 64, device, dtype_on(device))
    asked = ask("keys", counts, lengths, h, device)
    shape = {"dense, one row": (h, 1, 320), "dense, in q's dtype": (3, 1, 60, 333)}.get(kind, (1, h, 70, 301))
    dense = torch.randn(shape, device=device).to(q.dtype if "dtype" in kind else torch.float32)
    position = RelativePosition(torch.randn(h, 32, device=device), max_distance=100)
    slopes = torch.rand(h, device=device) / 8
    bias: Any = position if kind == "by distance" else DenseBias(dense)

    def added(b: int, m: int, n: int) -> Tensor:
        total = fitted(dense.double(), b, h, m, n)
        if kind == "by distance":
            total = position.to_dense(m, n)[0].double()
        if kind == "both":
            total = total + ALiBi(slopes).to_dense(m, n)[0]
        return total

    asked.added = added
    for given in (bias, dense if isinstance(bias, DenseBias) else bias):
        asked.options["bias"] = given
        if kind == "both":
            asked.options["bias"] = bias + ALiBi(slopes)
        call(q, cache, bounds, asked, each, max_seqlen_q=70)
    plain = Asked({"bias": asked.options["bias"], "causal": True, "softcap": 5.0}, None, added)
    call(q, cache, bounds, plain, each)


@on_devices
@pytest.mark.parametrize("kind", ["keys", "dense", "documents", "tree"])
@pytest.mark.parametrize("where", PLACES)
def test_masks_wherever_keys_lie(where: str, kind: str, device: str) -> None:
    """Queries of one length in the function of an engine; packed keys that are cut by a length."""
    n, lengths = 12, [40, 12, 333]
    cache = make_cache(lengths, 16, 2, 64, None, device, dtype_on(device))
    q, bounds, each = packed_queries([n] * 3, 4, 64, device, dtype_on(device))
    asked = ask(kind, [n] * 3, lengths, 4, device)
    mask = asked.options["mask"]
    of_dense = None
    if kind == "documents":
        of_dense = Documents(mask.ids.view(3, n), mask.ids_k)
    elif kind == "tree":
        of_dense = TokenTree(mask.words.view(3, n))
    out, lse = attend(where, cache, q, bounds, mask, of_dense)
    asked.check(out, lse, each, cache.rows, bounds.tolist())


@on_devices
@pytest.mark.parametrize("factors", FACTORS)
@pytest.mark.parametrize("kind", ["keys", "everything", "bias", "tree"])
def test_caches_of_8_bits(kind: str, factors: str, device: str) -> None:
    counts, lengths, h = [1, 5, 40], [333, 5, 130], 8
    wide = make_cache(lengths, 16, 2, 64, None, device, torch.float32)
    q, bounds, each = packed_queries(counts, h, 64, device, dtype_on(device))
    for dtype in (torch.float8_e4m3fn, torch.int8):
        cache, descales = in_bytes(wide, dtype, factors)
        asked = ask("keys" if kind == "bias" else kind, counts, lengths, h, device)
        if kind == "bias":
            dense = torch.randn(3, h, 40, 200, device=device).to(q.dtype)
            asked.options["bias"] = dense
            asked.added = lambda b, m, n, dense=dense: fitted(dense.double(), b, h, m, n)
        asked.options["causal"] = True
        rounded = factors == "slots" and q.dtype == torch.bfloat16
        call(q, cache, bounds, asked, each, rounded, max_seqlen_q=40, **descales)


@on_devices
def test_expressions(device: str) -> None:
    """Unions and what is turned around; both end where their masks do, and one key is one key."""
    counts, lengths, h = [2, 9], [90, 40], 4
    cache = make_cache(lengths, 8, 2, 64, None, device, dtype_on(device))
    q, bounds, each = packed_queries(counts, h, 64, device, dtype_on(device))
    short, long = torch.rand(2, 30, device=device) < 0.5, torch.rand(1, 95, device=device) < 0.5
    one, dense = torch.tensor([True], device=device), torch.rand(9, 60, device=device) < 0.5

    def keys(t: Tensor) -> Any:
        return lambda b, m, n: fitted_keys(t, b, h, m, n)

    def pairs(t: Tensor) -> Any:
        return lambda b, m, n: fitted(t, b, h, m, n)

    cases: list[tuple[Any, Any]] = [
        (KeyMask(short) | KeyMask(long), lambda *at: keys(short)(*at) | keys(long)(*at)),
        (KeyMask(short) & KeyMask(long), lambda *at: keys(short)(*at) & keys(long)(*at)),
        (~KeyMask(short), keys(~short)),
        (~Dense(dense) & KeyMask(long), lambda *at: pairs(~dense)(*at) & keys(long)(*at)),
        (Dense(dense) | Dense(~dense[:5, :20]), lambda *at: pairs(dense)(*at) | pairs(~dense[:5, :20])(*at)),
        (KeyMask(one), keys(one)),
        (~KeyMask(~one), keys(one)),
        (KeyMask(one[:0]), keys(one[:0])),
        (Dense(one), pairs(one)),
        (Dense(dense[:, :0]), pairs(dense[:, :0])),
        (Dense(dense[:1].expand(9, -1)), pairs(dense[:1].expand(9, -1))),
        (dense, pairs(dense)),
    ]
    for mask, shown in cases:
        call(q, cache, bounds, Asked({"mask": mask}, shown), each)


@on_devices
def test_ids_of_any_number(device: str) -> None:
    """Negative ids match nothing, also each other, and so do keys behind the last id."""
    cache = make_cache([90, 40], 8, 2, 64, None, device, dtype_on(device))
    q, bounds, each = packed_queries([2, 9], 4, 64, device, dtype_on(device))
    ids = torch.tensor([0, -1, -2, 2**31 - 1, 5, 5, 0, -5, 5, -(2**31), 1], device=device)
    ids_k = ids.repeat(6)
    start = bounds.tolist()

    def shown(b: int, m: int, n: int) -> Tensor:
        return fitted_ids(ids[start[b] : start[b + 1]], ids_k, b, 4, n)

    call(q, cache, bounds, Asked({"mask": Documents(ids, ids_k)}, shown), each)


@on_devices
def test_it_is_the_mask_of_gathered_keys(device: str) -> None:
    """A call without a cache, dense: the same mask and bias, made to its lengths."""
    n, length, h = 5, 77, 4
    cache = make_cache([length, length], 16, 2, 64, None, device, dtype_on(device))
    q = torch.randn(2, n, h, 64, device=device).to(dtype_on(device))
    keep, dense = torch.rand(2, length, device=device) < 0.5, torch.rand(h, n, length, device=device) < 0.7
    k, v = (torch.stack(side) for side in zip(*cache.rows))
    mask = Causal() & KeyMask(keep) & Dense(dense)
    want = serving.flash_attn_with_kvcache(q, k, v, mask=mask)
    got = serving.flash_attn_with_kvcache(
        q, cache.k, cache.v, cache_seqlens=cache.lengths, page_table=cache.table, mask=mask
    )
    close(got, want.double())
    import flash_ext

    close(got, flash_ext.attention(q, k, v, mask=mask).double())


# ---- what is refused ------------------------------------------------------------------------------------


def small() -> tuple[Tensor, Tensor, Cache]:
    cache = make_cache([40, 9], 8)
    q, bounds, _ = packed_queries([3, 3], 4, 64, "cpu", torch.float32)
    return q, bounds, cache


TRUE = torch.ones(2, 40, dtype=torch.bool)
NUMBERS = torch.zeros(6, dtype=torch.int32)
REFUSED: list[tuple[Any, type[Exception], str]] = [
    (masks.Chunks(4), NotImplementedError, "Chunks is not available in a mask over a cache"),
    (masks.PrefixLM(torch.ones(2).int()), NotImplementedError, "Prefix is not available in a mask over"),
    (masks.SlidingWindow(4, sink_tokens=2), NotImplementedError, "SinkTokens is not available in a mask"),
    (masks.HiddenKeys(NUMBERS.view(1, 1, 3, 2)), NotImplementedError, "HiddenKeys is not available"),
    (masks.HiddenRows(NUMBERS.view(1, 1, 3, 2)), NotImplementedError, "HiddenRows is not available"),
    (masks.BlockMask(TRUE[:1, :1], 16), NotImplementedError, "BlockMask is not available in a mask"),
    (Causal("top_left"), NotImplementedError, r"Causal\('top_left'\) is not available in a mask over"),
    (Causal() & TokenTree(NUMBERS.long()), NotImplementedError, r"TokenTree\(words\) stands by itself"),
    (Documents(NUMBERS), ValueError, "Documents needs ids_k over a cache, the ids of key positions"),
    (Documents(NUMBERS[:5], NUMBERS), ValueError, r"ids must have shape \(total_q,\) = \(6,\)"),
    (Documents(NUMBERS, NUMBERS.view(3, 2)), ValueError, r"ids_k must have shape \(batch, any\) over"),
    (KeyMask(TRUE[:1].expand(3, -1)), ValueError, r"keep must have shape \(batch, any\) .* with batch 2"),
    (Dense(TRUE[:, None, None].expand(2, 3, 4, 40)), ValueError, r"\(2, 4, any, any\) inside each sequence"),
    (KeyMask(TRUE) | Dense(TRUE), ValueError, "where a KeyMask repeats its row"),
    (KeyMask(TRUE) | Causal(), ValueError, "a union with KeyMask has no kernel"),
    (TRUE.float(), TypeError, "mask must be torch.bool, got torch.float32"),
    ("causal", TypeError, "mask must be a mask of flash_ext.masks, a bool tensor or None, got str"),
]  # fmt: skip


@pytest.mark.parametrize(("mask", "error", "words"), REFUSED, ids=[words[:40] for _, _, words in REFUSED])
def test_masks_that_are_refused(mask: Any, error: type[Exception], words: str) -> None:
    q, bounds, cache = small()
    with pytest.raises(error, match=words):
        attention_varlen(q, cache.k, cache.v, bounds, None, mask=mask, **cache.places)


def test_biases_that_are_refused() -> None:
    q, bounds, cache = small()
    parts = (q, cache.k, cache.v, bounds, None)
    tree = TokenTree(NUMBERS.long())
    zeros = torch.zeros(4, 3, 40)
    for given, error, words in (
        ({"bias": zeros, "mask": tree}, NotImplementedError, "a TokenTree has no bias beside it"),
        ({"bias": zeros.int()}, TypeError, "bias must be floating point, got torch.int32"),
        ({"bias": zeros.double()}, TypeError, "bias must be torch.float32 or the dtype of q"),
        ({"bias": zeros[:3]}, ValueError, r"must broadcast to .* \(2, 4, any, any\)"),
        ({"bias": RelativePosition(torch.zeros(3, 32))}, ValueError, r"shape \(4 or 1, buckets\)"),
        ({"bias": zeros.clone().requires_grad_()}, NotImplementedError, "has no gradient"),
    ):
        with pytest.raises(error, match=words):
            attention_varlen(*parts, **given, **cache.places)


def test_what_the_operator_refuses() -> None:
    q, bounds, cache = small()
    rest = (cache.k, cache.v, bounds, None, cache.lengths, cache.table, 0, 0, 0.125, -1, -1, None, None, 0.0)
    mask, ids, ids_k, bias = TRUE[:, None, None], NUMBERS, NUMBERS.view(2, 3), torch.zeros(1, 4, 3, 40)

    def refuses(error: type[Exception], words: str, **given: Tensor) -> None:
        with pytest.raises(error, match=words):
            torch.ops.flash_ext.fwd_cached(q, *rest, None, True, **given)

    alone = "a tree stands by itself"
    refuses(NotImplementedError, alone, tree=NUMBERS.long(), mask=mask)
    refuses(NotImplementedError, alone, tree=NUMBERS.long(), document_q=ids, document_k=ids_k)
    refuses(ValueError, "a condensed mask has rows and those of its groups", mask=mask.int())
    refuses(ValueError, r"mask must have shape \(2 or 1, 4 or 1", mask=mask.expand(-1, 3, -1, -1))
    refuses(ValueError, "document_q and document_k must be given together", document_q=ids)
    refuses(ValueError, r"document_q must have shape \(6\)", document_q=ids[:5], document_k=ids_k)
    refuses(ValueError, r"document_k must have shape \(2, any\)", document_q=ids, document_k=ids)
    by_columns = ids_k.t().contiguous().t()
    refuses(ValueError, "document_k must be contig", document_q=ids, document_k=by_columns)
    refuses(ValueError, "bias must have shape", bias=bias[:, :3])
    refuses(ValueError, "an odd number of entries", bias=bias[:, :, 0].contiguous())


# ---- the host side --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "count"),
    [
        *itertools.product(["keys", "everything", "bias", "by distance"], [1, 20, 90]),
        *itertools.product(["tree"], [1, 4, 20, 64]),
    ],
)
def test_all_sizes_have_the_kernel_for_few_rows(count: int, kind: str) -> None:
    k = torch.empty(1, 64, 2, 64, dtype=torch.bfloat16)
    table, lengths = torch.zeros(3, 50).int(), torch.full((3,), 3000).int()
    q, bounds, _ = packed_queries([count] * 3, 8, 64, "cpu", torch.bfloat16)
    given = {} if kind in ("bias", "by distance") else ask(kind, [count] * 3, [3000] * 3, 8, "cpu").options
    if kind == "bias":
        given = {"bias": torch.zeros(8, count, 77)}
    elif kind == "by distance":
        given = {"bias": RelativePosition(torch.zeros(8, 32))}
    with null_kernels():
        attention_varlen(
            q, k, k, bounds, None, block_table=table, seqused_k=lengths, max_seqlen_q=count, **given
        )
        found = [one["kernel"] for one in _C.last_launch()["launches"]]
    kernel = "fwd_split_cached_mod_sm80_hd64" + ("" if kind == "tree" else "_all")
    wide = {"fwd_packed_mod_sm90_hd64"} if 4 * count > 16 else set()
    assert {kernel, *wide} <= set(found) <= {kernel, *wide, "fwd_merge_cached_sm80_hd64"}


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_caches_of_8_bits_have_a_kernel_for_masks_as_well(dtype: torch.dtype) -> None:
    k = torch.zeros(1, 64, 2, 64, dtype=dtype)
    table, lengths = torch.zeros(3, 50).int(), torch.full((3,), 3000).int()
    q, bounds, _ = packed_queries([4] * 3, 8, 64, "cpu", torch.bfloat16)
    name = {torch.int8: "int8"}.get(dtype, "e4m3")
    with null_kernels():
        for mask, suffix in ((None, ""), (KeyMask(torch.ones(3, 3000, dtype=torch.bool)), "_all")):
            attention_varlen(
                q, k, k, bounds, None, block_table=table, seqused_k=lengths, max_seqlen_q=4, mask=mask
            )
            found = [one["kernel"] for one in _C.last_launch()["launches"]]
            assert f"fwd_split_quantized_sm80_hd64_{name}{suffix}" in found


def test_keys_of_all_packed_rows_are_refused_beside_lengths() -> None:
    """Without seqused_k (total_k,) are the rows of all sequences, and not the first of each."""
    q, k = torch.randn(4, 2, 16), torch.randn(30, 2, 16)
    bounds_q, bounds_k = torch.tensor([0, 2, 4]).int(), torch.tensor([0, 10, 30]).int()
    used, keep = torch.tensor([5, 20]).int(), torch.rand(30) < 0.5
    for mask in (KeyMask(keep), Causal() & KeyMask(keep), Documents(torch.zeros(4).int(), keep.int())):
        with pytest.raises(ValueError, match="a row of keys for each sequence beside seqused_k"):
            attention_varlen(q, k, k, bounds_q, bounds_k, seqused_k=used, mask=mask)
    attention_varlen(q, k, k, bounds_q, bounds_k, seqused_k=used, mask=KeyMask(keep.expand(2, -1)))


def test_a_bias_goes_along_with_autocast() -> None:
    """Where q becomes the dtype of the cache, a bias in the dtype that q had becomes float32."""
    q, bounds, cache = small()
    bias = torch.randn(4, 3, 30, dtype=torch.bfloat16)
    want = attention_varlen(q, cache.k, cache.v, bounds, None, bias=bias.float(), **cache.places)
    with torch.autocast("cpu", torch.bfloat16):
        own = q.bfloat16()
        got = attention_varlen(own, cache.k, cache.v, bounds, None, bias=bias, **cache.places)
    assert got.dtype == cache.k.dtype
    torch.testing.assert_close(got, want, rtol=0.02, atol=0.02)


def test_what_a_capture_refreshes_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay writes it, also after calls of more sizes than a mask keeps."""
    cache = make_cache([40], 16)
    mask = KeyMask(torch.rand(1, 40) < 0.5) & Dense(torch.rand(2 * MOST_PREPARED, 40) < 0.5)

    def step(count: int) -> None:
        q, bounds = torch.ones(count, 2, 64), torch.tensor([0, count], dtype=torch.int32)
        attention_varlen(q, cache.k, cache.v, bounds, None, mask=mask, **cache.places)

    for count in range(1, MOST_PREPARED + 1):
        step(count)
    written = [weakref.ref(found.mods.document_q) for found in kept_in(mask).made.values()]
    assert len(written) == MOST_PREPARED
    with monkeypatch.context() as capture:
        capture.setattr("flash_ext._ops.prepared.is_capturing", lambda: True)
        mask.refresh()
    for count in range(MOST_PREPARED + 1, 2 * MOST_PREPARED + 1):
        step(count)
    gc.collect()
    assert all(ref() is not None for ref in written)


@pytest.mark.parametrize("name", ["bias", "sinks"])
def test_tangents_are_refused(name: str) -> None:
    q, bounds, cache = small()
    shape = (4, 3, 30) if name == "bias" else (4,)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(torch.zeros(shape), torch.ones(shape))
        with pytest.raises(NotImplementedError, match="forward-mode|tangent"):
            attention_varlen(q, cache.k, cache.v, bounds, None, **{name: dual}, **cache.places)


def test_it_is_traced_as_one_operator(request: pytest.FixtureRequest) -> None:
    """With sizes that are symbols all that a mask may have, and with numbers masks that lack some of it."""
    request.addfinalizer(torch._dynamo.reset)  # which counts what a process has compiled
    torch._dynamo.reset()
    q, bounds, cache = small()
    dense, documents = torch.rand(4, 3, 30) < 0.5, Documents(NUMBERS, NUMBERS.expand(2, -1))
    added = {"bias": DenseBias(torch.randn(4, 3, 30)), "sinks": torch.randn(4)}
    for dynamic, given in (
        (True, {"mask": Causal() & Dense(dense) & KeyMask(TRUE[:, :33]) & documents, **added}),
        (True, {"mask": TokenTree(NUMBERS.long()), "sinks": torch.randn(4)}),
        (False, {"mask": KeyMask(TRUE)}),
        (False, {"mask": dense, **added}),
    ):
        compiled = torch.compile(attention_varlen, fullgraph=True, backend="aot_eager", dynamic=dynamic)
        traced = compiled(q, cache.k, cache.v, bounds, None, **given, **cache.places)
        plain = attention_varlen(q, cache.k, cache.v, bounds, None, **given, **cache.places)
        close(traced, plain.double())
    args = (q, cache.k, cache.v, bounds, None, cache.lengths, cache.table, 0, 0, 0.125, -1, -1, None, None)
    later = (None, None, None, TRUE[:, None, None], NUMBERS, NUMBERS.expand(2, -1).contiguous())
    operator, tree = torch.ops.flash_ext.fwd_cached.default, NUMBERS.long()
    torch.library.opcheck(operator, (*args, 0.0, None, True, *later))
    some = ("test_schema", "test_autograd_registration", "test_faketensor")  # a tree was traced above
    torch.library.opcheck(operator, (*args, 0.0, None, True, tree), test_utils=some)


def test_a_mask_is_prepared_once() -> None:
    """For calls of any number of queries, unless something has an id for each."""
    cache, mask = make_cache([40, 9], 8), KeyMask(TRUE.clone())
    for count in (1, 2, 3):
        q, bounds, each = packed_queries([count] * 2, 4, 64, "cpu", torch.float32)
        shown = Asked({"mask": mask}, lambda b, m, n: fitted_keys(mask.keep, b, 4, m, n))
        call(q, cache, bounds, shown, each)
    assert len(mask._prepared.made) == 1
    mask.keep[:, 3:7] = False
    call(q, cache, bounds, shown, each)
    both = mask & Dense(torch.rand(3, 40) < 0.5)
    for count in (1, 2):
        q, bounds, _ = packed_queries([count] * 2, 4, 64, "cpu", torch.float32)
        attention_varlen(q, cache.k, cache.v, bounds, None, mask=both, **cache.places)
    assert len(both._prepared.made) == 2
