"""Races, repeatability, batch invariance, concurrent streams and threads."""

from __future__ import annotations

import math
import threading

import pytest
import torch
from torch import Tensor

import flash_ext
from flash_ext import AuxRequest
from tests.attention.calls import results
from tests.cases import dense, packed
from tests.harness import (
    Target,
    choice_of,
    on_gpu_paths,
    on_paths,
    run_cases,
)  # fmt: skip
from tests.inputs import Inputs, make_inputs
from tests.memory import poison_pool

REPEATED = {
    "mha": dense(2, 300, 300, 4, 4, 128, deterministic=True),
    "gqa": dense(2, 300, 300, 8, 2, 128, deterministic=True),
    "mqa": dense(2, 257, 300, 8, 1, 64, deterministic=True, dtype="fp16"),
    "causal": dense(2, 333, 333, 4, 4, 128, causal=True, deterministic=True),
    "local": dense(2, 400, 400, 4, 2, 64, window=(70, 5), deterministic=True),
    "varlen": packed([1, 300, 0, 77, 130], [5, 290, 3, 77, 200], num_heads=4, num_heads_k=2, head_dim=128,
                     causal=True, deterministic=True, dlse=True),
    "hd256": dense(1, 260, 260, 4, 2, 256, causal=True, deterministic=True),
    "hd96": dense(1, 260, 260, 4, 2, 96, deterministic=True),
    "hd192": dense(1, 260, 260, 4, 4, 192, causal=True, deterministic=True),
}  # fmt: skip


def count_differences(x: Inputs, target: Target, expected: list[Tensor], repeats: int) -> Tensor:
    """(5,) number of elements of out, lse, dq, dk, dv that differed in any repeat; one value per tensor."""
    differences = torch.zeros(5, dtype=torch.int64, device=x.q.device)
    for _ in range(repeats):
        differences += torch.stack([(a != b).sum() for a, b in zip(results(x, target), expected)])
    return differences


@pytest.mark.parametrize("name", REPEATED)
@on_paths
def test_a_thousand_repeats_give_the_same_bits(target: Target, name: str) -> None:
    x = make_inputs(REPEATED[name], target.device)
    with target.active():
        expected = results(x, target)
        differences = count_differences(x, target, expected, 1000 if target.device == "cuda" else 1).tolist()
    assert not any(differences), f"elements of out, lse, dq, dk, dv that differed: {differences}"


@pytest.mark.parametrize("name", ["mha", "varlen", "hd256"])
@on_gpu_paths
def test_all_but_dq_repeat_without_the_deterministic_mode(target: Target, name: str) -> None:
    """And dq differs by rounding only: its sums are the same numbers in another order."""
    x = make_inputs(REPEATED[name].replace(deterministic=False), target.device)
    expected = results(x, target)
    for _ in range(200):
        got = results(x, target)
        for label, a, b in zip(
            ("out", "lse", "dk", "dv"), (*got[:2], *got[3:]), (*expected[:2], *expected[3:])
        ):
            assert torch.equal(a, b), label
        torch.testing.assert_close(got[2], expected[2], rtol=2.0**-7, atol=1e-3)


@pytest.mark.alone
@pytest.mark.parametrize("name", ["gqa", "varlen"])
@on_gpu_paths
def test_repeats_under_load(target: Target, name: str) -> None:
    """Half of the memory held and two streams of other work change when kernels run, not what they give."""
    x = make_inputs(REPEATED[name], target.device)
    expected = results(x, target)
    free, _ = torch.cuda.mem_get_info()
    held = torch.empty(free // 2, dtype=torch.uint8, device="cuda")
    a = torch.randn(2048, 2048, dtype=torch.bfloat16, device="cuda")
    copied = torch.empty_like(held[: 256 << 20])
    noise = [torch.cuda.Stream() for _ in range(2)]
    differences = torch.zeros(5, dtype=torch.int64, device="cuda")
    for _ in range(20):
        with torch.cuda.stream(noise[0]):
            for _ in range(10):
                a @ a
        with torch.cuda.stream(noise[1]):
            for _ in range(10):
                copied.copy_(held[: copied.numel()])
        differences += count_differences(x, target, expected, 15)
    torch.cuda.synchronize()
    assert not differences.any(), differences.tolist()


@on_gpu_paths
def test_two_streams_at_once(target: Target) -> None:
    """The same shape on two streams with different inputs: each as alone. Nothing is shared between calls."""
    case = REPEATED["causal"]
    inputs = [make_inputs(case.replace(seed=s), target.device) for s in (1, 2)]
    alone = [results(x, target) for x in inputs]
    streams = [torch.cuda.Stream() for _ in inputs]
    torch.cuda.synchronize()
    differences = torch.zeros(2, dtype=torch.int64, device="cuda")
    for _ in range(100):
        for i, (x, stream) in enumerate(zip(inputs, streams)):
            with torch.cuda.stream(stream):
                got = results(x, target)
                differences[i] += sum((a != b).sum() for a, b in zip(got, alone[i]))
    torch.cuda.synchronize()
    assert not differences.any(), differences.tolist()


@on_paths
def test_threads(target: Target) -> None:
    """Eight threads, each on its own stream, through autograd and its worker threads."""
    on_gpu = target.device == "cuda"
    case = REPEATED["mha"] if on_gpu else dense(1, 40, 40, 2, 1, 64, deterministic=True)
    inputs = [make_inputs(case.replace(seed=s), target.device) for s in range(8)]
    alone = [results(x, target) for x in inputs]
    if on_gpu:
        torch.cuda.synchronize()
    failures: list[str] = []

    def work(i: int) -> None:
        x = inputs[i]
        stream = torch.cuda.stream(torch.cuda.Stream()) if on_gpu else torch.no_grad()
        with stream, torch.enable_grad():
            for _ in range(20 if on_gpu else 1):
                leaves = [t.detach().requires_grad_() for t in (x.q, x.k, x.v)]
                out = flash_ext.attention(*leaves, deterministic=True, backend=target.choice)
                got = [out.detach(), *torch.autograd.grad(out, leaves, x.dout)]
                if not all(torch.equal(a, b) for a, b in zip(got, [alone[i][0], *alone[i][2:]])):
                    failures.append(f"thread {i}")

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(inputs))]
    with target.active():
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not failures, failures


@on_gpu_paths
def test_workspaces_are_not_trusted(target: Target) -> None:
    """Calls after poison, in changing sizes: whatever a call leaves behind means nothing to the next."""
    poison_pool()
    order = [0, 3, 1, 4, 2, 5, 0, 1, 2]
    sizes = (1, 64, 65, 130, 300, 511)
    run_cases(
        [
            dense(2, sizes[i], sizes[i], 4, 2, 128, causal=True, deterministic=j % 2 == 0)
            for j, i in enumerate(order)
        ],
        target,
    )


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
@on_gpu_paths
def test_neighbours_in_the_stream(target: Target, head_dim: int, deterministic: bool) -> None:
    """Kernels may begin before the one ahead of them has ended (programmatic dependent launch; those of the
    backward do up to 1024 rows). A matrix product writes q and dout just before the calls, and all inputs
    become NaN right after them."""
    b, rows, h = 2, 300, 4
    x, weights = (torch.randn(n, 256, device="cuda").bfloat16() for n in (b * rows, 2 * h * head_dim))
    k, v = (torch.randn(b, rows, h, head_dim, device="cuda").bfloat16() for _ in range(2))
    kept = (k.clone(), v.clone())
    both = torch.empty(b * rows, 2 * h * head_dim, dtype=torch.bfloat16, device="cuda")
    q, dout = both.view(b, rows, 2 * h, head_dim).split(h, dim=2)
    options = (None, None, 0, 0, head_dim**-0.5, -1, 0, deterministic, target.path)

    def step() -> list[Tensor]:
        k.copy_(kept[0])
        v.copy_(kept[1])
        torch.mm(x, weights.T, out=both)
        out, lse = torch.ops.flash_ext.fwd(q, k, v, *options)
        dq, dk, dv = torch.ops.flash_ext.bwd(dout, q, k, v, out, lse, None, *options)
        for t in (both, k, v):
            t.fill_(math.nan)
        return [out, lse, dk, dv, *([dq] if deterministic else [])]

    expected = step()
    assert all(torch.isfinite(t).all() for t in expected)
    differences = torch.zeros(len(expected), dtype=torch.int64, device="cuda")
    for _ in range(1000):
        differences += torch.stack([(a != b).sum() for a, b in zip(step(), expected)])
    assert not differences.any(), f"elements of out, lse, dk, dv, dq that differed: {differences.tolist()}"


@on_paths
def test_results_do_not_depend_on_batch_neighbours(target: Target) -> None:
    """A sequence alone, in batches of 2, 7 and 64, and packed behind neighbours of other lengths."""
    for d, causal in ((64, True), (128, False)):
        qkv = [torch.randn(64, 100, h, d, device=target.device).to(torch.bfloat16) for h in (4, 2, 2)]
        # How many tiles there are must not choose between their sizes.
        path = target.path if target.device == "cpu" else choice_of(target.path, fwd_block_m=192)
        options = {"causal": causal, "return_aux": AuxRequest(lse=True), "backend": path}
        one = flash_ext.attention(*(t[:1] for t in qkv), **options)
        for count in (2, 7, 64) if target.device == "cuda" else (2, 7):
            many = flash_ext.attention(*(t[:count] for t in qkv), **options)
            assert torch.equal(many[0][:1], one[0]), f"out, dense, batch {count}"
            assert torch.equal(many[1].lse[:1], one[1].lse), f"lse, dense, batch {count}"
        alone = None
        for neighbours in ([], [3], [1, 0, 250], [64] * 9):
            before = sum(neighbours)
            rows = [torch.cat([t.flatten(0, 1)[:before].flip(0), t[5]]) for t in qkv]
            cu = torch.tensor([0, *neighbours, 100]).cumsum(0).to(target.device, torch.int32)
            out, (lse, _) = flash_ext.attention_varlen(*rows, cu, cu, **options)
            mine = (out[before:], lse[:, before:])
            alone = alone or mine
            assert all(torch.equal(a, b) for a, b in zip(mine, alone)), f"packed after {neighbours}"
