"""The batch-invariant mode over caches of 8 bits and of latents: a sequence has its bits wherever it is.

Alone, beside others of any length and number of queries, in pages of any size and in entries, by tables of
any width, with packed queries and dense ones.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

from flash_ext import AuxRequest, attention_varlen, serving
from flash_ext._ops.library import _C
from tests.pages import Cache, check, in_bytes, make_cache, packed_queries, recorded
from tests.qkv import null_kernels
from tests.serving.test_latents import DV, D, latents, on_hopper
from tests.serving.test_quantized_cache import BYTES, of_each_type

Descales = dict[str, Tensor]
# Keys of a sequence, and those that others have at most. Alone, the shorter one has up to 4 parts, which a
# warp merges and not a CTA.
LENGTHS, LONGEST = (1500, 3000), 3000
# Page size, entries without a table, how many other sequences, columns that the table has beyond its pages.
PLACES = [(16, False, 63, 0), (1, False, 2, 0), (128, False, 5, 40), (24, False, 0, 1), (LONGEST, True, 3, 0)]


@pytest.fixture(autouse=True)
def in_the_mode() -> Iterator[None]:
    serving.set_batch_invariant(True)
    yield
    _C.set_switch("batch_invariant", None)


def attend(
    q: Tensor, bounds: Tensor, cache: Cache, as_entries: bool, more: int, **options: Any
) -> tuple[Tensor, Tensor]:
    """Packed queries by a table with ``more`` columns of junk, or over entries that are the first pages."""
    places = {"seqused_k": cache.lengths}
    if not as_entries:
        places["block_table"] = pad(cache.table, (0, more), value=-7)
    out, aux = attention_varlen(
        q, cache.k, cache.v, bounds, None, causal=True, return_aux=AuxRequest(lse=True), **places, **options
    )
    return out, aux.lse


def own_places(cache: Cache) -> tuple[Tensor, Tensor]:
    """Pages and rows in them of the first sequence."""
    at, size = torch.arange(len(cache.rows[0][0]), device=cache.k.device), cache.k.shape[1]
    return cache.table[0].long()[at // size], at % size


def as_entries(cache: Cache, descales: Descales) -> tuple[Cache, Descales]:
    """Pages in the order of their sequences, of which each has one or none."""
    first = cache.table[:, 0].clamp(0, len(cache.k) - 1).long()
    of_slots = {name: x[first] if x.dim() == 3 else x for name, x in descales.items()}
    return Cache(cache.k[first], cache.v[first], cache.table, cache.lengths, cache.rows), of_slots


def lengths_beside(length: int, count: int) -> list[int]:
    return [length, *(random.randint(0, LONGEST) for _ in range(count))]


# ---- 8 bits ----------------------------------------------------------------------------------------------


def beside(
    own: Cache, descales: Descales, page_size: int, others: int, kind: torch.dtype, factors: str
) -> tuple[Cache, Descales]:
    """The only sequence of ``own``, byte by byte, as the first one of a larger cache."""
    heads, dim = own.k.shape[2:]
    lengths = lengths_beside(len(own.rows[0][0]), others)
    wide = make_cache(lengths, page_size, heads, dim, dim, "cuda", torch.float32)
    cache, found = in_bytes(wide, kind, factors)
    source, place = own_places(own), own_places(cache)
    for to, x in ((cache.k, own.k), (cache.v, own.v)):
        to.view(torch.uint8)[place] = x.view(torch.uint8)[source]
    for name, x in descales.items():
        if factors == "sequences":
            found[name][0] = x[0]
        elif factors == "slots":
            found[name][place] = x[source]
        else:
            found[name] = x
    return cache, found


@pytest.mark.gpu
@of_each_type
@pytest.mark.parametrize("factors", ["heads", "sequences", "slots"])
@pytest.mark.parametrize(("heads", "head_dim"), [((8, 2), 64), ((24, 1), 128), ((4, 1), 256)], ids=str)
def test_caches_of_8_bits(heads: tuple[int, int], head_dim: int, factors: str, kind: torch.dtype) -> None:
    for length, count in itertools.product(LENGTHS, (1, 3, 9, 70)):
        wide = make_cache([length], 16, heads[1], head_dim, head_dim, "cuda", torch.float32)
        own, descales = in_bytes(wide, kind, factors)
        q, bounds, each = packed_queries([count], heads[0], head_dim, "cuda", torch.bfloat16)
        with recorded() as last_launch:
            alone = attend(q, bounds, own, False, 0, **descales)
            assert last_launch()["row"] == "sm80.fwd_cached.quantized"
        check(*alone, bounds, each, own, (-1, 0))
        for page_size, entries, others, more in PLACES:
            there, found = beside(own, descales, page_size, others, kind, factors)
            if entries:
                there, found = as_entries(there, found)
            counts = [count, *(random.choice([0, 1, 2, 30, 100]) for _ in range(others))]
            many, many_bounds, _ = packed_queries(counts, heads[0], head_dim, "cuda", torch.bfloat16)
            many[:count] = q
            out, lse = attend(many, many_bounds, there, entries, more, **found)
            where = (length, count, page_size, others)
            assert torch.equal(out[:count], alone[0]), where
            assert torch.equal(lse[:, :count], alone[1]), where


@pytest.mark.gpu
@of_each_type
@pytest.mark.parametrize("count", [1, 4, 40])
def test_dense_queries_of_caches_of_8_bits(count: int, kind: torch.dtype) -> None:
    """By the function of an engine, in any order of the batch, with bounds on the queries and without."""
    lengths = lengths_beside(3000, 6)
    cache, descales = in_bytes(make_cache(lengths, 16, 2, 64, None, "cuda", torch.float32), kind, "sequences")
    q = torch.randn(7, count, 8, 64, device="cuda", dtype=torch.bfloat16)

    def decode(rows: list[int]) -> tuple[Tensor, Tensor]:
        own = {name: x[rows] for name, x in descales.items()}
        return serving.flash_attn_with_kvcache(
            q[rows], cache.k, cache.v, page_table=cache.table[rows], cache_seqlens=cache.lengths[rows],
            causal=True, return_softmax_lse=True, **own,
        )  # fmt: skip

    whole = decode(list(range(7)))
    for rows in ([0], [3], [6, 2], [5, 4, 3, 2, 1, 0]):
        for found, wanted in zip(decode(rows), whole, strict=True):
            assert torch.equal(found, wanted[rows]), rows
    bounds = torch.arange(8, device="cuda", dtype=torch.int32) * count
    for most in (None, count, 200):
        out, lse = attend(q.flatten(0, 1), bounds, cache, False, 3, max_seqlen_q=most, **descales)
        assert torch.equal(out.view_as(whole[0]), whole[0]), most
        assert torch.equal(lse.view(8, 7, count).transpose(0, 1), whole[1]), most


# ---- latents ---------------------------------------------------------------------------------------------


@on_hopper
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("heads", [3, 16, 71, 128])
def test_latents(heads: int, dtype: torch.dtype) -> None:
    for length, count in itertools.product(LENGTHS, (1, 2, 9)):
        own = latents([length], 64, "cuda", dtype)
        q, bounds, each = packed_queries([count], heads, D, "cuda", dtype)
        with recorded() as last_launch:
            alone = attend(q, bounds, own, False, 0)
            assert last_launch()["launches"][0]["kernel"].startswith("fwd_latent_sm90")
        check(*alone, bounds, each, own, (-1, 0))
        for page_size, entries, others, more in [(64, False, 63, 9), *PLACES]:
            there = latents(lengths_beside(length, others), page_size, "cuda", dtype)
            there.k[own_places(there)] = own.k[own_places(own)]  # whose first columns are v
            if entries:
                there, _ = as_entries(there, {})
                there.v = there.k[..., :DV]
            counts = [count, *(random.choice([0, 1, 2, 5]) for _ in range(others))]
            many, many_bounds, _ = packed_queries(counts, heads, D, "cuda", dtype)
            many[:count] = q
            out, lse = attend(many, many_bounds, there, entries, more)
            where = (length, count, page_size, others)
            assert torch.equal(out[:count], alone[0]), where
            assert torch.equal(lse[:, :count], alone[1]), where


@on_hopper
@pytest.mark.parametrize("count", [1, 2, 9])
def test_latents_as_flash_mla_is_called(count: int) -> None:
    """In any order of the batch, and as packed queries with bounds and without."""
    cache = latents(lengths_beside(3000, 6), 64, "cuda", torch.bfloat16)
    q = torch.randn(7, count, 64, D, device="cuda", dtype=torch.bfloat16)

    def decode(rows: list[int]) -> tuple[Tensor, Tensor]:
        return serving.flash_mla_with_kvcache(
            q[rows], cache.k, cache.table[rows], cache.lengths[rows], DV, causal=True
        )

    whole = decode(list(range(7)))
    for rows in ([0], [3], [6, 2], [5, 4, 3, 2, 1, 0]):
        for found, wanted in zip(decode(rows), whole, strict=True):
            assert torch.equal(found, wanted[rows]), rows
    bounds = torch.arange(8, device="cuda", dtype=torch.int32) * count
    for most in (None, count, 50):
        out, lse = attend(q.flatten(0, 1), bounds, cache, False, 3, max_seqlen_q=most)
        assert torch.equal(out.view_as(whole[0]), whole[0]), most
        assert torch.equal(lse.view(64, 7, count).transpose(0, 1), whole[1]), most


# ---- what is launched, without a GPU ---------------------------------------------------------------------


@pytest.mark.parametrize("kind", [*BYTES, "latents"], ids=str)
@pytest.mark.parametrize("count", [1, 9, 70])
def test_parts_follow_from_the_room_of_a_sequence(count: int, kind: torch.dtype | str) -> None:
    """Not from the batch and the multiprocessors that it keeps busy."""
    of_latents = isinstance(kind, str)
    k = torch.zeros(1, 64, 1, D if of_latents else 64, dtype=torch.bfloat16 if of_latents else kind)

    def launched(batch: int, pages: int) -> tuple[int, list[tuple]]:
        q, bounds, _ = packed_queries([count] * batch, 16, k.shape[-1], "cpu", torch.bfloat16)
        places = {
            "block_table": torch.zeros(batch, pages, dtype=torch.int32),
            "seqused_k": torch.full((batch,), 64 * pages, dtype=torch.int32),
        }
        attention_varlen(q, k, k[..., :DV], bounds, None, max_seqlen_q=count, **places)
        last = _C.last_launch()
        names = ("kernel", "block_m", "block_n", "rows")
        return last["splits"], [tuple(one.get(name) for name in names) for one in last["launches"]]

    with null_kernels():
        for pages in (40, 100):
            alone = launched(1, pages)
            assert alone[0] == pages * 64 // 512 + (pages * 64 % 512 > 0)
            assert launched(2, pages) == launched(64, pages) == alone
        serving.set_batch_invariant(False)
        assert launched(1, 100)[0] != launched(64, 100)[0]
