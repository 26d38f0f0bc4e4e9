"""The kernel that appends to a cache, emulated on a CPU, against the implementation for the CPU, bit by bit.

Its own sources are compiled, the grid included; tests/tools/emulation/fp8_launch.h stands in for CUDA.
"""

from __future__ import annotations

import random
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from flash_ext._cpu import behind, cached
from tests.kernels.test_emulation import EMULATION, build, copy_sources
from tests.sources import ROOT

pytestmark = pytest.mark.xdist_group("emulation")  # one builds the program

CACHE_TYPES = {1: torch.float8_e4m3fn, 2: torch.int8}  # CacheType of csrc/kv_cache.h; 0: as new keys have it


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("append_kv")
    csrc = copy_sources(folder)
    for part in ("passes/append_kv.cuh", "inst/append_kv.cu"):
        (csrc / part).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / "csrc" / part, csrc / part)
    shutil.copy(EMULATION / "fp8_launch.h", csrc / "launch.h")
    (csrc / "cuda_fp8.h").write_text("#pragma once\n", encoding="utf-8")
    return build(folder, "append_kv", csrc)


def bytes_of(*tensors: Tensor) -> bytes:
    return b"".join(x.contiguous().view(torch.uint8).numpy().tobytes() for x in tensors if x.numel())


def run(program: Path, folder: Path, numbers: list[Any], *tensors: Tensor) -> bytes:
    head = torch.tensor([int(x) for x in numbers], dtype=torch.int32)
    (folder / "case").write_bytes(bytes_of(head, *tensors))
    done = subprocess.run(
        [str(program), str(folder / "case"), str(folder / "result")],
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return (folder / "result").read_bytes()


def make(cache_type: int, seed: int) -> dict[str, Any]:
    """Caches and factors of a case. Sizes are few, and not all of them powers of two."""
    torch.manual_seed(seed)
    random.seed(seed)
    dtype = random.choice([torch.float16, torch.bfloat16])
    heads, d = random.choice([1, 2, 3]), random.choice([64, 37, 20])
    pages, size = random.choice([(6, 4), (4, 7), (9, 1), (3, 16)])
    dims, kind = (d, random.choice([d, 24])), random.randrange(4) if cache_type else 0
    stored = CACHE_TYPES.get(cache_type, dtype)
    wide = torch.float32 if random.random() < 0.5 else dtype
    turned = 2 * random.choice([0, 4, d // 2 - 1, d // 2])
    angles = torch.rand(random.choice([1, 40, 64]), turned // 2) * 6
    return {
        "dtype": dtype, "heads": heads, "dims": dims, "pages": pages, "size": size, "kind": kind,
        "caches": [torch.randn(pages, size, heads, x).to(stored) for x in dims],
        "factors": [angles.cos().to(wide), angles.sin().to(wide)],
        "interleaved": random.random() < 0.5, "wide": wide,
        "turned": turned,
    }  # fmt: skip


def scales(case: dict[str, Any], batch: int) -> list[Tensor]:
    heads, pages, size = case["heads"], case["pages"], case["size"]
    shape = [(0,), (heads,), (batch, heads), (pages, size, heads)][case["kind"]]
    return [torch.rand(shape) + 0.1 for _ in "kv"]


def numbers_of(case: dict[str, Any], batch: int, count: int, **others: Any) -> list[Any]:
    names = (
        "half", "q_half", "batch", "count", "heads", "heads_q", "d", "dv", "pages", "size", "max_pages",
        "of_entries", "is_wide", "cache_type", "rotary_dim", "positions", "float_factors", "interleaved",
        "packed", "rows_q", "counts", "kind", "has_q", "by_slots",
    )  # fmt: skip
    found = dict.fromkeys(names, 0) | {
        "half": case["dtype"] == torch.float16, "batch": batch, "count": count, "heads": case["heads"],
        "d": case["dims"][0], "dv": case["dims"][1], "pages": case["pages"], "size": case["size"],
        "rotary_dim": case["turned"], "positions": case["factors"][0].shape[0], "kind": case["kind"],
        "float_factors": case["wide"] == torch.float32, "interleaved": case["interleaved"],
    } | others  # fmt: skip
    assert list(found) == list(names)
    return [*found.values()]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("cache_type", [0, 1, 2])
def test_slots_that_are_given(program: Path, tmp_path: Path, cache_type: int, seed: int) -> None:
    case = make(cache_type, seed)
    tokens = 7
    new = [torch.randn(tokens, case["heads"], x).to(case["dtype"]) for x in case["dims"]]
    slots = torch.randperm(case["pages"] * case["size"])[:tokens]
    slots[1], slots[3] = -1, 2**40
    positions = torch.randint(-2, 70, (tokens,))
    given = scales(case, tokens)
    rotary = (*case["factors"], positions) if case["turned"] else (None, None, None)
    numbers = numbers_of(case, 1, tokens, cache_type=cache_type, by_slots=True)
    read = (slots, positions) if case["turned"] else (slots,)
    got = run(program, tmp_path, numbers, *new, *case["caches"], *given, *case["factors"], *read)
    descales = given if case["kind"] else [None, None]
    cached.append(*new, *case["caches"], slots, *rotary, case["interleaved"], *descales)
    assert got == bytes_of(*case["caches"], *given)


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("cache_type", [0, 1, 2])
def test_places_behind_the_keys(program: Path, tmp_path: Path, cache_type: int, seed: int) -> None:
    """Tables, entries or neither; full sequences, pages and entries that are not there, entries of two."""
    case = make(cache_type, seed)
    pages, size, heads, (d, _) = case["pages"], case["size"], case["heads"], case["dims"]
    batch, count = random.choice([1, 3]), random.choice([0, 1, 1, 2, 5])
    way = random.choice(["table", "entries", "neither"])
    new = [torch.randn(batch, count, heads, x).to(case["dtype"]) for x in case["dims"]]
    table = entries = None
    max_pages = 1
    if way == "table":
        max_pages = random.choice([1, 2, pages // batch])
        table = torch.full((batch * max_pages,), -1, dtype=torch.int32)
        order = torch.randperm(pages)[: table.numel()]  # a page of two would be written in no order
        table[: order.numel()] = order.int()
        table = table.view(batch, max_pages)
        table[torch.rand(table.shape) < 0.2] = random.choice([-1, -7, pages, 10**6])
    elif way == "entries":
        entries = torch.randint(-1, pages + 1, (batch,), dtype=torch.int32)
    lengths = torch.randint(-3, max_pages * size + 5, (batch,))
    lengths = lengths if random.random() < 0.5 else lengths.int()
    q = cu_seqlens = None
    rows, counts, q_dtype = 0, random.random() < 0.5, random.choice([torch.float16, torch.bfloat16])
    if case["turned"] and random.random() < 0.8:
        rows = random.choice([0, 1, 5])
        q = torch.randn(batch, rows, 2 * heads, d).to(q_dtype)
        if random.random() < 0.5:
            rows = 11
            q = torch.randn(rows, 2 * heads, d).to(q_dtype)
            cu_seqlens = torch.randint(0, rows + 1, (batch + 1,)).sort().values.int()
    given = scales(case, batch)
    numbers = numbers_of(
        case, batch, count, heads_q=2 * heads, q_half=q_dtype == torch.float16,
        max_pages=max_pages if table is not None else 0, of_entries=entries is not None,
        is_wide=lengths.dtype == torch.int64, cache_type=cache_type, packed=cu_seqlens is not None,
        rows_q=rows, counts=counts, has_q=q is not None,
    )  # fmt: skip
    places = [x for x in (table, entries, cu_seqlens, q) if x is not None]
    got = run(program, tmp_path, numbers, *new, *case["caches"], *given, *case["factors"], lengths, *places)
    found, turned = behind.append(
        *new, *case["caches"], behind.Ends(lengths, table, entries),
        *(case["factors"] if case["turned"] else (None, None)), case["interleaved"], q, cu_seqlens, counts,
        *(given if case["kind"] else (None, None)),
    )  # fmt: skip
    assert got == bytes_of(*case["caches"], *given, found, turned)
