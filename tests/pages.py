"""Caches for tests: pages in any order, NaN in slots that no length covers, junk behind each length."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flash_ext import AuxRequest, attention_varlen, serving
from flash_ext._ops.library import _C
from flash_ext._ops.modifiers import Modifiers
from flash_ext._ops.spec import AttnSpec, default_scale
from flash_ext.masks import Mask
from tests.reference import attention_reference

PLACES = ("pages", "entries", "packed keys")
LAYOUTS = ("apart", "together", "heads first")
# Queries and keys of sequences: decoding steps, a few new tokens, pieces of prompts, nothing.
MIXED = {
    "cpu": ([1, 5, 0, 1, 20, 40, 30, 9], [270, 5, 77, 0, 130, 40, 90, 3]),
    "cuda": ([1, 5, 0, 1, 20, 150, 70, 9], [333, 5, 77, 0, 130, 150, 421, 3]),
}
JUNK = (-1, 2**31 - 1, -(2**31), 10**6)


@dataclass
class Cache:
    """Keys of some sequences in pages, and the same as rows.

    Attributes:
        k, v: (num_pages, page_size, h_k, d).
        table: (batch, max_pages) int32; entries behind a length are junk.
        lengths: (batch,) int32.
        rows: keys and values of each sequence, (length, h_k, d).
    """

    k: Tensor
    v: Tensor
    table: Tensor
    lengths: Tensor
    rows: list[tuple[Tensor, Tensor]]

    @property
    def places(self) -> dict[str, Tensor]:
        return {"block_table": self.table, "seqused_k": self.lengths}


def make_cache(
    lengths: list[int],
    page_size: int,
    heads_k: int = 2,
    head_dim: int = 64,
    head_dim_v: int | None = None,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    layout: str = "apart",
    spare: int = 2,
    shared: int = 0,
) -> Cache:
    """A cache of N(0, 1) keys; ``spare`` entries more than needed, ``shared`` first pages common to all."""
    head_dim_v = head_dim_v or head_dim
    needed = [-(-n // page_size) for n in lengths]
    num_pages = sum(needed) + 3
    pool = _pool(num_pages, page_size, heads_k, (head_dim, head_dim_v), device, dtype, layout)
    order = random.sample(range(num_pages), num_pages)
    table = torch.empty(len(lengths), max([*needed, 0]) + spare, dtype=torch.int32)
    at, used, filled = shared, [], torch.zeros(num_pages, page_size, dtype=torch.bool)
    for b, (length, count) in enumerate(zip(lengths, needed, strict=True)):
        own = order[: min(count, shared)] + order[at : at + max(count - shared, 0)]
        at += max(count - shared, 0)
        table[b] = torch.tensor(own + random.choices(JUNK, k=table.shape[1] - count), dtype=torch.int64).int()
        position = torch.arange(length)
        used.append((torch.tensor(own, dtype=torch.long)[position // page_size], position % page_size))
        filled[used[-1]] = True
    for x in pool:
        x[filled.to(device)] = torch.randn(int(filled.sum()), *x.shape[2:], device=device).to(dtype)
    rows = [(pool[0][place], pool[1][place]) for place in used]
    lengths_there = torch.tensor(lengths, dtype=torch.int32, device=device)
    return Cache(*pool, table.to(device), lengths_there, rows)


def run(q: Tensor, bounds: Tensor, cache: Cache, **options: Any) -> tuple[Tensor, Tensor]:
    """out and lse of packed queries over the cache."""
    request = AuxRequest(lse=True)
    out, aux = attention_varlen(
        q, cache.k, cache.v, bounds, None, return_aux=request, **cache.places, **options
    )
    assert out.dtype == q.dtype
    return out, aux.lse


@contextlib.contextmanager
def recorded() -> Iterator[Callable[[], dict[str, Any]]]:
    """Inside, launches are recorded; what is yielded tells those of the last call."""
    _C.set_switch("record_launches", 1)
    try:
        yield _C.last_launch
    finally:
        _C.set_switch("record_launches", None)


def attend(
    where: str, cache: Cache, q: Tensor, bounds: Tensor, mask: Mask, of_dense: Mask | None = None
) -> tuple[Tensor, Tensor]:
    """out (total_q, h, d) and lse (h, total_q) of queries of one length over the keys in one of PLACES.

    Pages and entries go through the function of an engine, with dense queries, whose mask is ``of_dense``
    where that differs; packed keys are cut by a length.
    """
    k, v, places = cache.k, cache.v, {"page_table": cache.table}
    lengths = [len(own) for own, _ in cache.rows]
    if where == "packed keys":
        k, v = (torch.cat(side) for side in zip(*cache.rows))
        bounds_k = torch.tensor([0, *lengths], device=q.device).cumsum(0).int()
        out, aux = attention_varlen(
            q, k, v, bounds, bounds_k, seqused_k=cache.lengths, mask=mask, return_aux=AuxRequest(lse=True)
        )
        return out, aux.lse
    if where == "entries":
        shape = (len(lengths), max(lengths) + 17, *k.shape[2:])
        k, v = (torch.full(shape, torch.nan, device=q.device, dtype=q.dtype) for _ in range(2))
        for b, own in enumerate(cache.rows):
            k[b, : lengths[b]], v[b, : lengths[b]] = own
        places = {}
    out, lse = serving.flash_attn_with_kvcache(
        q.unflatten(0, (len(lengths), -1)), k, v, cache_seqlens=cache.lengths,
        mask=mask if of_dense is None else of_dense, return_softmax_lse=True, **places,
    )  # fmt: skip
    return out.flatten(0, 1), lse.transpose(0, 1).flatten(1)


FACTORS = ("none", "one", "heads", "sequences", "slots")


def in_bytes(
    cache: Cache, dtype: torch.dtype, factors: str, layout: str = "apart"
) -> tuple[Cache, dict[str, Tensor]]:
    """The cache in float8_e4m3fn or int8, with rows of what its bytes stand for, and the factors of k and v.

    Slots that no length covers hold NaN, or -1 where there is none, and so do their factors.
    """
    device = str(cache.k.device)
    pages, size, heads, dim = cache.k.shape
    batch = len(cache.rows)
    pool = _pool(pages, size, heads, (dim, cache.v.shape[-1]), device, torch.uint8, layout, 0xFF)
    used = torch.zeros(pages, size, dtype=torch.bool, device=device)
    places = []
    for b, (k, _) in enumerate(cache.rows):
        at = torch.arange(len(k), device=device)
        places.append((cache.table[b].long()[at // size], at % size))
        used[places[-1]] = True
    descales, rows = {}, []
    for name, x, to in zip(("k_descale", "v_descale"), (cache.k, cache.v), pool, strict=True):
        shape = {"none": (), "one": (1,), "heads": (heads,), "sequences": (batch, heads)}.get(
            factors, (pages, size, heads)
        )
        factor = (
            torch.rand(shape, device=device) + 0.5 if factors != "none" else torch.ones((), device=device)
        )
        most = 127 if dtype == torch.int8 else 448
        x = x.float().clamp(-3, 3)
        if dtype == torch.int8:
            steps = 1 if factors == "none" else 40
            factor = factor / steps
            values = (x * steps).nan_to_num(0).round().clamp(-most, most).to(torch.int8)
        else:
            values = x.to(dtype)
        to[used] = values.view(torch.uint8)[used]
        if factors == "slots":
            factor = factor.masked_fill(~used[..., None], torch.nan)
        if factors != "none":
            descales[name] = factor
        numbers = to.view(dtype).double()
        rows.append([])
        for b, place in enumerate(places):
            own = factor
            if factors in ("sequences", "slots"):
                own = factor[b if factors == "sequences" else place]
            rows[-1].append(numbers[place] * own.double()[..., None])
    pairs = list(zip(*rows, strict=True))
    return Cache(pool[0].view(dtype), pool[1].view(dtype), cache.table, cache.lengths, pairs), descales


def _pool(
    pages: int,
    size: int,
    heads: int,
    dims: tuple[int, int],
    device: str,
    dtype: torch.dtype,
    layout: str,
    fill: float = torch.nan,
) -> tuple[Tensor, Tensor]:
    """k and v full of NaN: each by itself, side by side in a token, or so with heads outside of rows."""
    like = {"device": device, "dtype": dtype}
    if layout == "apart":
        k, v = (torch.full((pages, size, heads, dim), fill, **like) for dim in dims)
    elif layout == "together":
        k, v = torch.full((pages, size, heads, sum(dims)), fill, **like).split(dims, -1)
    else:
        whole = torch.full((pages, heads, size, sum(dims)), fill, **like)
        k, v = whole.transpose(1, 2).split(dims, -1)
    return k, v


def truth(
    q: list[Tensor],
    rows: list[tuple[Tensor, Tensor]],
    window: tuple[int, int] = (-1, -1),
    sinks: Tensor | None = None,
    slopes: Tensor | None = None,
    softcap: float = 0.0,
) -> tuple[list[Tensor], list[Tensor]]:
    """out (rows, h, dv) and lse (h, rows) of each sequence, float64."""
    found = []
    for b, (own, (k, v)) in enumerate(zip(q, rows, strict=True)):
        spec = AttnSpec(default_scale(own.shape[-1]), *window)
        own_slopes = slopes if slopes is None or slopes.dim() == 1 else slopes[b]
        mods = Modifiers(sinks=sinks, slopes=own_slopes, softcap=softcap)
        out, lse = attention_reference(own[None], k[None], v[None], spec, mods=mods)
        found.append((out[0], lse[0]))
    return [out for out, _ in found], [lse for _, lse in found]


def packed_queries(
    counts: list[int], heads: int, head_dim: int, device: str, dtype: torch.dtype, outside: int = 0
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """q (total_q, h, d), its bounds, and what each sequence has; ``outside`` rows before and behind all."""
    q = torch.randn(sum(counts) + 2 * outside, heads, head_dim, device=device).to(dtype)
    bounds = (torch.tensor([0, *counts]).cumsum(0) + outside).to(device, torch.int32)
    return q, bounds, list(q[outside : outside + sum(counts)].split(counts))


# Of numbers times factors of slots that become bf16: of results, and of logsumexp. The rounding of keys alone
# moves that of 64 columns by up to 0.0102 (30 draws of what MIXED holds, a window of 50).
ROUNDED = {torch.bfloat16: 4e-2, torch.float32: 2e-2}


def close(got: Tensor, wanted: Tensor, name: str = "", rounded: bool = False) -> None:
    """Within what the type of ``got`` can hold, a row that is empty exactly."""
    limits = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 2.5e-2}
    limit = (limits | ROUNDED if rounded else limits)[got.dtype]
    assert got.shape == wanted.shape, name
    same = (got.double() == wanted) | ((got.double() - wanted).abs() < limit)
    assert same.all(), f"{name}: off by {(got.double() - wanted).abs().nan_to_num(torch.inf).max():.3g}"


def check(
    out: Tensor,
    lse: Tensor | None,
    bounds: Tensor,
    q: list[Tensor],
    cache: Cache,
    window: tuple[int, int] = (-1, -1),
    sinks: Tensor | None = None,
    slopes: Tensor | None = None,
    softcap: float = 0.0,
    rounded: bool = False,
) -> None:
    """Every row of a packed call, those outside of sequences as well.

    ``rounded``: the kernel may have rounded keys and values to bf16, which ``cache.rows`` are not.
    """
    outs, lses = truth(q, cache.rows, window, sinks, slopes, softcap)
    wanted = torch.zeros(out.shape, dtype=torch.float64, device=out.device)
    wanted_lse = torch.full((out.shape[1], out.shape[0]), -torch.inf, dtype=torch.float64, device=out.device)
    for start, one, other in zip(bounds.tolist(), outs, lses):
        wanted[start : start + one.shape[0]] = one
        wanted_lse[:, start : start + one.shape[0]] = other
    close(out, wanted, "out", rounded)
    if lse is not None:
        close(lse, wanted_lse, "lse", rounded)
