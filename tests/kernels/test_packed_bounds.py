"""cu_seqlens of any values: what bounds they stand for, and that every row of every result is written."""

from __future__ import annotations

import random
import subprocess
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor

import flash_ext
from flash_ext import masks
from flash_ext._ops.spec import AttnSpec
from tests.harness import Target, on_all_tiles, on_paths
from tests.kernels.test_emulation import build
from tests.memory import poison_pool
from tests.reference import attention_reference, sequence_bounds

MOST, LEAST = 2**31 - 1, -(2**31)


def tamed(cu: list[int], total: int) -> list[int]:
    """The bounds that ``cu`` stands for: each is forced between those of the halves that it lies in."""
    bounds = list(cu)

    def halve(first: int, last: int, start: int, end: int) -> None:  # bounds of [first, last] are to be found
        if first <= last:
            middle = (first + last) // 2
            bounds[middle] = min(max(cu[middle], start), end)
            halve(first, middle - 1, start, bounds[middle])
            halve(middle + 1, last, bounds[middle], end)

    halve(0, len(cu) - 1, 0, total)
    return bounds


def wild_bounds(generator: random.Random, batch: int, total: int) -> list[int]:
    """In order, nearly in order, or anything."""
    kind = generator.randrange(4)
    cu = sorted(generator.randint(0, total) for _ in range(batch + 1))
    if kind == 1:
        cu[generator.randrange(batch + 1)] = generator.randint(-5, total + 5)
    if kind == 2:
        generator.shuffle(cu)
    if kind == 3:
        cu = [generator.choice((MOST, LEAST, -1, total + 1, generator.randint(-5, total + 5))) for _ in cu]
    return cu


def wild_cases(count: int, seed: int) -> list[tuple[int, int, int, list[int], list[int]]]:
    """(batch, rows, keys, cu_q, cu_k)."""
    generator, cases = random.Random(seed), []
    for _ in range(count):
        batch, rows, keys = generator.randint(0, 9), generator.randint(0, 700), generator.randint(0, 700)
        cases.append(
            (batch, rows, keys, wild_bounds(generator, batch, rows), wild_bounds(generator, batch, keys))
        )
    return cases


# ---- what the bounds are ----


def test_bounds_in_order_are_what_was_given() -> None:
    for cu in ([0, 5, 5, 12], [3, 7], [12, 12, 12], [0], [0, 0, 0, 0, 0, 12, 12]):
        assert sequence_bounds(torch.tensor(cu), 12) == list(pairwise(cu))


@pytest.mark.parametrize("cu, bounds",
                         [
                             ([-5, 3, 50, 10**6], [0, 3, 50, 120]), ([LEAST, 0, 0, MOST], [0, 0, 0, 120]),
                             ([MOST, MOST], [120, 120]), ([0, 100, 50], [0, 100, 100]),
                             ([0, 100, 50, 120], [0, 100, 100, 120]),
                             ([0, 50, 100, 20, 120], [0, 50, 100, 100, 120]), ([80, 20], [80, 80]),
                         ])  # fmt: skip
def test_bounds_out_of_order_and_outside(cu: list[int], bounds: list[int]) -> None:
    assert tamed(cu, 120) == bounds
    assert sequence_bounds(torch.tensor(cu), 120) == list(pairwise(bounds))


def test_bounds_are_in_order_whatever_is_given(seed: int) -> None:
    for _, rows, _, cu, _ in wild_cases(300, seed):
        expected = tamed(cu, rows)
        assert expected == sorted(expected) and 0 <= expected[0] and expected[-1] <= rows
        assert sequence_bounds(torch.tensor(cu, dtype=torch.int32), rows) == list(pairwise(expected))


def test_every_row_has_one_tile(tmp_path: Path, seed: int) -> None:
    """The search of the kernels, on a CPU: the same bounds, and no tile missing, shared or outside."""
    cases = wild_cases(400, seed)
    text = "".join(
        f"{batch} {rows} {keys} {' '.join(map(str, cu_q + cu_k))}\n"
        for batch, rows, keys, cu_q, cu_k in cases
    )
    program = build(tmp_path, "packed_bounds")
    done = subprocess.run([program], input=text, capture_output=True, text=True, check=True, timeout=60)
    lines = done.stdout.splitlines()
    assert len(lines) == len(cases)
    for line, (_, rows, keys, cu_q, cu_k) in zip(lines, cases):
        both = [[int(x) for x in side.split()] for side in line.split("|")] if "wrong" not in line else line
        assert both == [tamed(cu_q, rows), tamed(cu_k, keys)], (line, cu_q, rows, cu_k, keys)


# ---- results ----


def rows_between(bounds: list[int], total: int, like: Tensor) -> Tensor:
    covered = torch.zeros(total, dtype=torch.bool, device=like.device)
    covered[bounds[0] : bounds[-1]] = True
    return covered


@pytest.fixture(autouse=True)
def bounds_are_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where they can be, as on the CPU, they are refused before any kernel sees them."""
    monkeypatch.setattr("flash_ext._pair.check_bounds", lambda *_: None)


def call(
    qkv: list[Tensor], dout: Tensor, cu_q: list[int], cu_k: list[int], options: dict
) -> tuple[Tensor, ...]:
    """out, lse, dq, dk, dv, in memory that holds NaN before the calls."""
    cu = {f"cu_seqlens_{x}": torch.tensor(c, dtype=torch.int32, device=dout.device)
          for x, c in (("q", cu_q), ("k", cu_k))}  # fmt: skip
    if dout.is_cuda:
        poison_pool()
    out, lse = flash_ext.forward(*qkv, **cu, **options)
    return (out, lse, *flash_ext.backward(dout, *qkv, out, lse, **cu, **options))


def make_options(name: str, heads: int, rows: int, keys: int, device: str) -> dict:
    made = {
        "plain": lambda: {},
        "causal": lambda: {"causal": True},
        "window": lambda: {"window_size": (70, 5)},
        "padding": lambda: {"mask": masks.KeyMask(torch.rand(keys, device=device) < 0.8)},
        "slopes": lambda: {"bias": masks.ALiBi(torch.rand(heads, device=device)), "causal": True},
        "by distance": lambda: {"bias": masks.RelativePosition(torch.rand(heads, 32, device=device))},
        "softcap": lambda: {"softcap": 20.0},
        "dropout": lambda: {"dropout_p": 0.2, "rng": torch.tensor([3, 4], device=device)},
    }
    return made[name]()


def check_wild(target: Target, name: str, head_dim: int, deterministic: bool, seed: int, rounds: int) -> None:
    generator = random.Random(seed)
    on_gpu = target.device == "cuda"
    rows, keys = (1200, 1100) if on_gpu else (60, 50)
    dout, *qkv = (
        torch.randn(n, h, head_dim, device=target.device).bfloat16()
        for n, h in ((rows, 4), (rows, 4), (keys, 2), (keys, 2))
    )
    options = make_options(name, 4, rows, keys, target.device)
    options |= {"deterministic": deterministic, "backend": target.path}
    for i in range(rounds):
        batch = generator.choice((1, 2, 3, 5, 9))
        cu_q = wild_bounds(generator, batch, rows)
        # A forward takes keys from anywhere; with keys in order both directions are those of tamed bounds.
        wild_k = list(cu_q) if i % 3 == 0 else wild_bounds(generator, batch, keys)
        tame_q, tame_k = tamed(cu_q, rows), tamed(wild_k, keys)
        for result in call(qkv, dout, cu_q, wild_k, options)[2:]:
            assert not result.isnan().any(), (cu_q, wild_k)
        cu_k = tame_k
        got = call(qkv, dout, cu_q, cu_k, options)
        expected = call(qkv, dout, tame_q, tame_k, options)
        for label, a, b in zip(("out", "lse", "dq", "dk", "dv"), got, expected):
            where = f"{label} of {cu_q}, {cu_k}"
            if label == "dq" and not deterministic:
                torch.testing.assert_close(a, b, rtol=2.0**-7, atol=2e-3, msg=where)
            else:
                assert torch.equal(a, b), where
        outside_q = ~rows_between(tame_q, rows, dout)
        outside_k = ~rows_between(tame_k, keys, dout)
        assert not got[0][outside_q].any() and got[1][:, outside_q].isneginf().all(), (cu_q, cu_k)
        assert not got[2][outside_q].any(), (cu_q, cu_k)
        assert not got[3][outside_k].any() and not got[4][outside_k].any(), (cu_q, cu_k)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
@on_all_tiles
def test_results_of_any_cu_seqlens(target: Target, head_dim: int, deterministic: bool, seed: int) -> None:
    """Those of the bounds that they stand for, bit for bit: every row is written."""
    with target.active():
        for name in ("plain", "causal", "window"):
            check_wild(target, name, head_dim, deterministic, seed, 12 if target.device == "cuda" else 1)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", ["padding", "slopes", "by distance", "softcap", "dropout"])
@on_all_tiles
def test_results_of_any_cu_seqlens_with_modifiers(
    target: Target, name: str, deterministic: bool, seed: int
) -> None:
    with target.active():
        for head_dim in (64, 128, 256) if target.device == "cuda" else (64,):
            check_wild(target, name, head_dim, deterministic, seed, 6 if target.device == "cuda" else 1)


@on_paths
def test_few_queries_of_any_cu_seqlens(target: Target, seed: int) -> None:
    """Keys in parts, and the gradient of a bias, which look for sequences themselves."""
    generator = random.Random(seed)
    on_gpu = target.device == "cuda"
    rows, keys = 20, 5000 if on_gpu else 60
    q, k, v, dout = (torch.randn(n, h, 128, device=target.device).bfloat16()
                     for n, h in ((rows, 8), (keys, 2), (keys, 2), (rows, 8)))  # fmt: skip
    bias = torch.randn(1, 8, rows, keys, device=target.device).bfloat16()
    with target.active():
        for _ in range(10 if on_gpu else 2):
            batch = generator.choice((1, 2, 5))
            cu = wild_bounds(generator, batch, rows), tamed(wild_bounds(generator, batch, keys), keys)
            tame = tamed(cu[0], rows), tamed(cu[1], keys)
            results = []
            for bounds in (cu, tame):
                if on_gpu:
                    poison_pool()
                packed = dict(
                    zip(
                        ("cu_seqlens_q", "cu_seqlens_k"),
                        (torch.tensor(x, dtype=torch.int32, device=target.device) for x in bounds),
                    )
                )
                out, lse = flash_ext.forward(q, k, v, **packed, backend=target.path)
                results.append([out, lse])
                options = {**packed, "bias": bias, "backend": target.path}
                out, lse = flash_ext.forward(q, k, v, **options)
                (dbias,) = flash_ext.backward(dout, q, k, v, out, lse, needs=("bias",), **options)
                results[-1] += [out, lse, dbias]
            assert all(torch.equal(a, b) for a, b in zip(*results)), cu


def test_the_oracle_takes_any_cu_seqlens(seed: int) -> None:
    """And agrees with the CPU backend about what they mean."""
    generator = random.Random(seed)
    q, k, v = (torch.randn(40, 2, 16, dtype=torch.float64) for _ in range(3))
    for _ in range(20):
        cu = [torch.tensor(wild_bounds(generator, 3, 40), dtype=torch.int32) for _ in range(2)]
        got = flash_ext.forward(q, k, v, cu_seqlens_q=cu[0], cu_seqlens_k=cu[1], scale=1.0)
        expected = attention_reference(q, k, v, AttnSpec(scale=1.0), *cu)
        torch.testing.assert_close(got, expected)
