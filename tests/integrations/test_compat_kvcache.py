"""flash_attn_with_kvcache: all that flash-attn's own test of it combines, and entries that sequences share.

The truth is float64: features of new keys and queries are turned as complex numbers, each sequence attends by
itself to what its entry of the cache holds. On a GPU the error may be three times that of the same sums in
the type of the inputs, five times with ALiBi, as in flash-attn's test.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from flash_ext import _owners
from flash_ext.compat import flash_attn as fa
from tests.integrations.test_compat_flash_attn import by_definition, close, draw
from tests.qkv import on_devices

HEADS = {"mha": (6, 6), "mqa": (6, 1), "gqa": (6, 3)}
HEAD_DIMS = (32, 59, 64, 80, 128, 256)
BATCH = 2


class Case(NamedTuple):
    """One call; the names are those of flash-attn's test."""

    new_kv: bool
    alibi: bool
    local: bool
    causal: bool
    seqlen_new_eq_seqlen_q: bool
    rotary_fraction: float
    rotary_interleaved: bool
    has_leftpad: bool
    has_batch_idx: bool

    def is_one(self) -> bool:
        """Whether the call exists, and differs from the others."""
        if not self.new_kv and (self.rotary_fraction > 0 or not self.seqlen_new_eq_seqlen_q):
            return False
        return self.rotary_fraction > 0 or not self.rotary_interleaved


BOTH = (False, True)
CASES = [case for case in itertools.starmap(
    Case, itertools.product(*(BOTH,) * 5, (0.0, 0.5, 1.0), *(BOTH,) * 3)) if case.is_one()]  # fmt: skip


def turned(x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """x (rows, heads, features) in float64, its first features turned by the angles of its positions."""
    x, half = x.double(), cos.shape[1]
    first, rest = x[..., : 2 * half], x[..., 2 * half :]
    pairs = first.unflatten(-1, (half, 2) if interleaved else (2, half))
    pairs = pairs if interleaved else pairs.transpose(-1, -2)
    angles = torch.complex(cos.double(), sin.double())[positions][:, None]
    pairs = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * angles)
    first = pairs.flatten(-2) if interleaved else pairs.transpose(-1, -2).flatten(-2)
    return torch.cat([first, rest], -1)


def by_the_same_type(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor, bias: Tensor | None) -> Tensor:
    """Plain attention that rounds scores, weights and results as the type of q does: how large errors are.

    One key head after the other, for the memory that a long cache takes.
    """
    heads_k, outs = k.shape[1], []
    biases = [None] * heads_k if bias is None else bias.chunk(heads_k)
    parts = zip(q.chunk(heads_k, 1), k.unbind(1), v.unbind(1), hidden.chunk(heads_k), biases)
    for own_q, own_k, own_v, own_hidden, own_bias in parts:
        scores = torch.einsum("ihd,jd->hij", own_q, own_k * q.shape[-1] ** -0.5)
        if own_bias is not None:
            scores = scores + own_bias.to(q.dtype)
        scores = scores.masked_fill(own_hidden, -torch.inf).float()
        weights = torch.softmax(scores, -1).to(q.dtype).nan_to_num(0.0)
        outs.append(torch.einsum("hij,jd->ihd", weights, own_v))
    return torch.cat(outs, 1)


def check(case: Case, heads: str, lengths: tuple[int, int], head_dim: int, device: str) -> None:
    seqlen_q, size = lengths
    num_heads, num_heads_k = HEADS[heads]
    ints = {"dtype": torch.int32, "device": device}
    new = seqlen_q if case.seqlen_new_eq_seqlen_q else int(torch.randint(1, seqlen_q + 1, ()))
    rotary_dim = int(case.rotary_fraction * head_dim) // 16 * 16
    entries_there = 2 * BATCH if case.has_batch_idx else BATCH
    q, k_cache, v_cache, k, v = draw(
        device, (BATCH, seqlen_q, num_heads, head_dim), *((entries_there, size, num_heads_k, head_dim),) * 2,
        *((BATCH, new, num_heads_k, head_dim),) * 2,
    )  # fmt: skip
    # Positions of queries need a row of factors, too.
    turns_each = (case.causal or case.local) and rotary_dim > 0
    room = max(new, seqlen_q) if turns_each else new
    used = torch.randint(0 if case.new_kv else 1, size - (room if case.new_kv else 0) + 1, (BATCH,))
    pads = (torch.rand(BATCH) * used).long() if case.has_leftpad else torch.zeros(BATCH, dtype=torch.long)
    entries = torch.randperm(entries_there)[:BATCH] if case.has_batch_idx else torch.arange(BATCH)
    window = tuple(torch.randint(0, size, (2,)).tolist()) if case.local else (-1, -1)
    slopes = torch.rand(BATCH, num_heads, device=device) * 0.3 if case.alibi else None
    angles = torch.rand(size, rotary_dim // 2, device=device) * 6.28
    cos, sin = angles.cos().to(q.dtype), angles.sin().to(q.dtype)
    options: dict[str, Any] = {"k": k, "v": v} if case.new_kv else {}
    if rotary_dim:
        options |= {"rotary_cos": cos, "rotary_sin": sin, "rotary_interleaved": case.rotary_interleaved}
    if case.has_leftpad:
        options["cache_leftpad"] = pads.to(**ints)
    if case.has_batch_idx:
        options["cache_batch_idx"] = entries.to(**ints)
    expected_caches = k_cache.clone(), v_cache.clone()
    out, lse = fa.flash_attn_with_kvcache(
        q, k_cache, v_cache, cache_seqlens=used.to(**ints), causal=case.causal, window_size=window,
        alibi_slopes=slopes, return_softmax_lse=True, **options,
    )  # fmt: skip
    assert out.shape == q.shape and out.dtype == q.dtype

    for i, (entry, start, pad) in enumerate(zip(entries.tolist(), used.tolist(), pads.tolist())):
        end = start + new if case.new_kv else start
        turned_q = q[i]
        if case.new_kv:
            added = k[i].double()
            if rotary_dim:
                rows = torch.arange(max(new, seqlen_q), device=device) + start
                factors = (cos, sin, case.rotary_interleaved)
                added = turned(k[i], rows[:new], *factors)
                of_q = rows[:seqlen_q] if turns_each else rows[:1].expand(seqlen_q)
                turned_q = turned(q[i], of_q, *factors)
            close(k_cache[entry, start:end], added)
            expected_caches[0][entry, start:end] = k_cache[entry, start:end]
            expected_caches[1][entry, start:end] = v[i]
        keys, values = k_cache[entry, pad:end], v_cache[entry, pad:end]
        own = None if slopes is None else slopes[i : i + 1]
        truth, truth_lse, weights = by_definition(
            turned_q[None], keys[None], values[None], causal=case.causal, window=window, slopes=own
        )
        close(lse[i], truth_lse[0])
        if device == "cpu":
            close(out[i], truth[0])
            continue
        offset = torch.arange(end - pad, device=device) - torch.arange(seqlen_q, device=device)[:, None]
        bias = None if own is None else -own[0, :, None, None] * (offset - (end - pad) + seqlen_q).abs()
        plain = by_the_same_type(turned_q.to(q.dtype), keys, values, weights[0] == 0, bias)
        error, usual = ((t.double() - truth[0]).abs().max() for t in (out[i], plain))
        assert error <= (5 if case.alibi else 3) * usual + 1e-5, f"error {error:.3g}, usual {usual:.3g}"
    assert torch.equal(k_cache, expected_caches[0]) and torch.equal(v_cache, expected_caches[1])


# (seqlen_q, length of the cache): all cases of the first two, every seventeenth of the others.
LENGTHS = [(1, 48), (5, 33), (1, 339), (3, 799), (64, 256), (128, 128)]
LONG = [(3, 1024), (64, 800), (64, 2048), (16, 20000), (1, 131072), (16, 131072)]
# Of a CPU, whose backend has tiles of 128: each case with one of the shapes.
SHAPES_ON_CPU = [*itertools.product([(1, 48), (5, 33), (3, 299), (130, 140)], HEADS)]


def check_some(heads: str, lengths: tuple[int, int], device: str, first: int, step: int) -> None:
    """Every case, or some that differ from shape to shape, each with one of the sizes of a head."""
    for number in range(first, len(CASES), step):
        head_dim = HEAD_DIMS[number // step % len(HEAD_DIMS)]
        if device == "cpu":
            head_dim = min(head_dim, 64)
        try:
            check(CASES[number], heads, lengths, head_dim, device)
        except AssertionError as error:
            raise AssertionError(f"{CASES[number]}, head_dim {head_dim}: {error}") from error


def test_the_cases_are_those_of_flash_attn() -> None:
    assert len(CASES) == 16 * 5 * 4 + 8 * 4 == len(set(CASES))
    for name, field in zip(Case._fields, zip(*CASES)):
        assert set(field) == ({0.0, 0.5, 1.0} if name == "rotary_fraction" else {False, True})


@pytest.mark.parametrize("lengths, heads", SHAPES_ON_CPU, ids=str)
def test_every_combination(lengths: tuple[int, int], heads: str) -> None:
    first = SHAPES_ON_CPU.index((lengths, heads))
    check_some(heads, lengths, "cpu", first, len(SHAPES_ON_CPU))


@pytest.mark.gpu
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize(
    "lengths",
    [
        *LENGTHS,
        *(
            pytest.param(long, marks=pytest.mark.xdist_group("long-caches")) for long in LONG
        ),  # up to 8 GiB each
    ],
    ids=str,
)
def test_gpu_combinations(lengths: tuple[int, int], heads: str) -> None:
    step = 1 if lengths in LENGTHS[:2] else 17
    check_some(heads, lengths, "cuda", (LENGTHS + LONG).index(lengths) % step, step)


@on_devices
@pytest.mark.parametrize("shape", [(), (2,)])
@pytest.mark.parametrize("softcap", [0.0, 3.0])  # the second road hides keys by a mask
def test_numbers_may_be_one_for_all(softcap: float, shape: tuple, device: str) -> None:
    q, k, v = draw(device, (2, 1, 2, 16), *((2, 9, 2, 16),) * 2)
    six, two = (torch.full(shape, n, dtype=torch.int32, device=device) for n in (6, 2))
    out = fa.flash_attn_with_kvcache(q, k, v, cache_seqlens=six, cache_leftpad=two, softcap=softcap)
    close(out, by_definition(q, k[:, 2:6], v[:, 2:6], softcap=softcap)[0])


@on_devices
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", [(4,), (2, 4)])
def test_alibi_over_pages_is_that_of_entries(shape: tuple, causal: bool, device: str) -> None:
    q, k, v = draw(device, (2, 5, 4, 16), *((2, 3, 2, 16),) * 2)
    entries = draw(device, *((2, 48, 2, 16),) * 2)
    order = torch.randperm(6, device=device)
    pages = [torch.empty_like(cache).view(6, 16, 2, 16) for cache in entries]
    for pool, cache in zip(pages, entries):
        pool[order] = cache.view(6, 16, 2, 16)
    slopes = torch.rand(shape, device=device) + 0.1
    lengths = torch.tensor([41, 7], dtype=torch.int32, device=device)
    call = {"cache_seqlens": lengths, "causal": causal, "alibi_slopes": slopes, "return_softmax_lse": True}
    expected, expected_lse = fa.flash_attn_with_kvcache(q, *entries, k, v, **call)
    out, lse = fa.flash_attn_with_kvcache(q, *pages, k, v, block_table=order.view(2, 3).int(), **call)
    close(out, expected.double())
    close(lse, expected_lse.double())
    for pool, cache in zip(pages, entries):
        assert torch.equal(pool[order].view_as(cache), cache)


@on_devices
@pytest.mark.parametrize("gaps", [False, True])
@pytest.mark.parametrize("rotates", [False, True])
@pytest.mark.parametrize(
    "options", [{}, {"softcap": 3.0}, {"slopes": True, "causal": True}, {"window": (9, 0)}], ids=str
)
def test_padding_is_never_read(options: dict, rotates: bool, gaps: bool, device: str) -> None:
    """NaN in it, on every road and beside new keys; pages with the same keys give the same."""
    q, k, v = draw(device, (3, 2, 4, 16), *((3, 2, 2, 16),) * 2)
    entries = [
        cache[:, : 48 if gaps else None] for cache in draw(device, *((3, 56 if gaps else 48, 2, 16),) * 2)
    ]
    lengths, pads = [41, 7, 20], [30, 0, 21]
    for cache in entries:
        for b, n in enumerate(pads):
            cache[b, : min(n, lengths[b])] = torch.nan
    order = torch.randperm(9, device=device)
    pages = [torch.empty(9, 16, 2, 16, dtype=q.dtype, device=device) for _ in entries]
    for pool, cache in zip(pages, entries):
        pool[order] = cache.reshape(9, 16, 2, 16)
    options = dict(options)
    if "slopes" in options:
        options["slopes"] = torch.rand(1, 4, device=device) + 0.1
    names = {"slopes": "alibi_slopes", "window": "window_size"}
    call = {names.get(name, name): value for name, value in options.items()} | {"return_softmax_lse": True}
    if rotates:
        angles = torch.rand(48, 8, device=device) * 6.28
        call |= {"rotary_cos": angles.cos().to(q.dtype), "rotary_sin": angles.sin().to(q.dtype)}
    if "slopes" in options:
        call["alibi_slopes"] = options["slopes"][0]
    ints = {"dtype": torch.int32, "device": device}
    call |= {"cache_seqlens": torch.tensor(lengths, **ints), "cache_leftpad": torch.tensor(pads, **ints)}
    out, lse = fa.flash_attn_with_kvcache(q, *entries, k, v, **call)
    paged = fa.flash_attn_with_kvcache(q, *pages, k, v, block_table=order.view(3, 3).int(), **call)
    close(paged[0], out)
    close(paged[1], lse)
    for i, (start, pad) in enumerate(zip(lengths, pads)):
        own = q[i]
        if rotates:
            turns_each = options.get("causal") or "window" in options
            at = torch.arange(start, start + 2, device=device) if turns_each else torch.tensor([start] * 2)
            own = turned(own, at.to(device), call["rotary_cos"], call["rotary_sin"], True)
        keys, values = (cache[i, None, pad : start + 2] for cache in entries)
        truth, truth_lse, _ = by_definition(own[None], keys, values, **options)
        close(out[i], truth[0])
        close(lse[i], truth_lse[0])


@on_devices
@pytest.mark.parametrize(
    "options", [{"softcap": 3.0}, {"alibi_slopes": True}, {"softcap": 3.0, "causal": True}]
)
def test_packed_queries_over_pages_have_softcap_and_alibi(options: dict, device: str) -> None:
    """What the page of flash-attn and the words of the function say is excluded there is all that is."""
    q, k, v = draw(device, (7, 4, 16), *((2, 16, 2, 16),) * 2)
    options = dict(options)
    if options.pop("alibi_slopes", False):
        options["alibi_slopes"] = torch.rand(4, device=device) + 0.1
    bounds_q, bounds_k = (torch.tensor(n, dtype=torch.int32, device=device) for n in ([0, 3, 7], [0, 9, 25]))
    table = torch.tensor([[1], [0]], dtype=torch.int32, device=device)
    out = fa.flash_attn_varlen_func(q, k, v, bounds_q, bounds_k, 4, 16, block_table=table, **options)
    gathered = (torch.cat([t[1, :9], t[0]]) for t in (k, v))
    expected = fa.flash_attn_varlen_func(q, *gathered, bounds_q, bounds_k, 4, 16, **options)
    close(out, expected.double())


# ---- one entry for several sequences ---------------------------------------------------------------------


def shared(device: str, entries: list[int]) -> dict[str, Any]:
    ints = {"dtype": torch.int32, "device": device}
    lengths = [3, 5, 0, 4][: len(entries)]
    return {"cache_batch_idx": torch.tensor(entries, **ints), "cache_seqlens": torch.tensor(lengths, **ints)}


@pytest.mark.parametrize("entries, twice", [([1, 0, 1, 3], 1), ([2, 2, 2, 2], 2), ([9, 0, -1, 0], 0)])
def test_appending_twice_to_an_entry_is_refused(entries: list[int], twice: int) -> None:
    q, k, v = draw("cpu", (4, 2, 4, 16), (4, 2, 2, 16), (4, 2, 2, 16))
    caches = draw("cpu", (4, 9, 2, 16), (4, 9, 2, 16))
    before = [cache.clone() for cache in caches]
    with pytest.raises(ValueError, match=f"cache_batch_idx must not name entry {twice} for two sequences"):
        fa.flash_attn_with_kvcache(q, *caches, k, v, **shared("cpu", entries))
    assert torch.equal(caches[0], before[0]) and torch.equal(caches[1], before[1])


@on_devices
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("softcap", [0.0, 3.0])
def test_where_values_are_not_seen_the_first_has_the_entry(
    softcap: float, causal: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU; without one the CPU is not allowed to look."""
    monkeypatch.setattr(_owners, "may_read", lambda t: False)
    q, k, v = draw(device, (4, 2, 4, 16), (4, 2, 2, 16), (4, 2, 2, 16))
    caches = draw(device, (4, 9, 2, 16), (4, 9, 2, 16))
    before = [cache.clone() for cache in caches]
    call = shared(device, [1, 0, 1, 3]) | {"softcap": softcap, "causal": causal}
    out, lse = fa.flash_attn_with_kvcache(q, *caches, k, v, return_softmax_lse=True, **call)
    for cache, old, new in zip(caches, before, (k, v), strict=True):
        old[1, 3:5], old[0, 5:7], old[3, 4:6] = new[0], new[1], new[3]
        assert torch.equal(cache, old)
    for i, (entry, end) in {0: (1, 5), 1: (0, 7), 3: (3, 6)}.items():
        keys, values = before[0][entry, None, :end], before[1][entry, None, :end]
        close(out[i], by_definition(q[i : i + 1], keys, values, causal=causal, softcap=softcap)[0][0])
    assert (out[2] == 0).all() and (lse[2] == -torch.inf).all()


@on_devices
def test_reading_an_entry_twice_is_not_refused(device: str) -> None:
    q, k, v = draw(device, (4, 1, 4, 16), *((4, 9, 2, 16),) * 2)
    call = shared(device, [2, 2, 1, 2])
    out = fa.flash_attn_with_kvcache(q, k, v, **call)
    none = fa.flash_attn_with_kvcache(q, k, v, k[:, :0], v[:, :0], **call)
    for i, (entry, length) in enumerate(zip([2, 2, 1, 2], [3, 5, 0, 4])):
        close(out[i], by_definition(q[i : i + 1], k[entry, None, :length], v[entry, None, :length])[0][0])
    assert torch.equal(none, out)


def test_what_else_is_refused() -> None:
    q, k = draw("cpu", (2, 1, 1, 8), (2, 4, 1, 8))
    expanded = k[:1].expand(2, -1, -1, -1)
    for caches, name in (((expanded, k), "k_cache"), ((k, expanded), "v_cache")):
        with pytest.raises(ValueError, match=f"{name} must not be expanded to append to it"):
            fa.flash_attn_with_kvcache(q, *caches, q, q, cache_seqlens=1)
    close(fa.flash_attn_with_kvcache(q, expanded, expanded), by_definition(q, expanded, expanded)[0])
    for name in ("cache_seqlens", "cache_batch_idx", "cache_leftpad"):
        elsewhere = torch.zeros(2, dtype=torch.int32, device="meta")
        with pytest.raises(ValueError, match=f"{name} must be on the device of k_cache, cpu, got meta"):
            fa.flash_attn_with_kvcache(q, k, k, **{name: elsewhere})
    with pytest.raises(TypeError, match="cache_leftpad must be torch.int32, got torch.float32"):
        fa.flash_attn_with_kvcache(q, k, k, cache_leftpad=torch.zeros(2))
    with pytest.raises(ValueError, match=r"cache_leftpad must have shape \(batch,\) = \(2,\), got \(3,\)"):
        fa.flash_attn_with_kvcache(q, k, k, cache_leftpad=torch.zeros(3).int())
