"""The portable backward whose CTAs go on from item to item, and the pass that begins while it runs
(csrc/sm80/bwd/persistent.cuh, csrc/passes/bwd_overlapped_pass.cuh), with many work tiles for each CTA.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import flash_ext
from tests.cases import dense, packed
from tests.harness import Target, on_targets
from tests.modifier_cases import ModifierCase
from tests.modifier_harness import for_each
from tests.test_gauntlet_system import warmed_up

HIDING = (
    "blocks64x128",
    "blocks128x128_h",
    "blocks16x32_bh",
    "padding",
    "documents",
    "mask_b1qk",
    "chunk100",
    "drop0.5",
)


def on_few_multiprocessors(target: Target, count: int = 3) -> Target:
    return target.pretending(num_sms=count)


@pytest.mark.parametrize("count", [1, 3])
@on_targets("sm80")
def test_many_items_of_a_thread_block_within_the_gates(target: Target, count: int) -> None:
    """Lists made ahead and not, of one segment and of several, of calls with and without the late pass."""
    mcases = [
        ModifierCase(
            dense(2, 500, 900, 2, 2, head_dim, dtype=dtype, causal=causal, deterministic=deterministic),
            (name,),
        )
        for i, name in enumerate(HIDING)
        for head_dim, dtype in (((128, "bf16"), (104, "fp16"))[i % 2],)
        for causal in (False, True)
        for deterministic in (False, True)
    ]
    mcases += [
        ModifierCase(dense(1, 300, 700, 4, 2, 128), ("blocks64x128",)),  # grouped heads
        ModifierCase(dense(2, 70, 1500, 3, 3, 128, causal=True), ("blocks64x128", "drop0.1")),
        ModifierCase(
            dense(1, 9000, 200, 2, 2, 128), ("blocks64x64",)
        ),  # lists longer than a segment has room
        ModifierCase(
            packed([300, 0, 7, 190], [290, 5, 130, 400], num_heads=2, num_heads_k=2, head_dim=128),
            ("blocks64x128",),
        ),
        ModifierCase(dense(1, 400, 600, 2, 2, 128), ()),
    ]
    for_each(mcases, on_few_multiprocessors(target, count))


def sparse_call(target: Target, seed: int = 0) -> tuple[dict[str, Tensor], Callable[[], list[Tensor]]]:
    """Tensors of a call on some of the blocks, 24 items, and the call: out, lse, dk, dv, deterministic dq."""
    generator = torch.Generator("cuda").manual_seed(seed)
    shape = (2, 512, 3, 128)
    tensors = {
        name: torch.randn(shape, device="cuda", generator=generator).bfloat16()
        for name in ("q", "k", "v", "dout")
    }
    blocks = torch.rand(1, 3, 8, 8, device="cuda", generator=generator) < 0.4
    mask = flash_ext.masks.BlockMask(blocks, 64)

    def step() -> list[Tensor]:
        q, k, v, dout = tensors.values()
        options = {"mask": mask, "backend": target.choice}
        out, lse = flash_ext.forward(q, k, v, **options)
        results = [out, lse]
        for deterministic in (False, True):
            dq, dk, dv = flash_ext.backward(dout, q, k, v, out, lse, deterministic=deterministic, **options)[
                :3
            ]
            results += [dk, dv, *([dq] if deterministic else [])]
        return results

    return tensors, step


@on_targets("sm80")
def test_kernels_that_overlap(target: Target) -> None:
    """A product writes q just before the calls, and all inputs become NaN right behind them."""
    with on_few_multiprocessors(target).active():
        tensors, step = sparse_call(target)
        kept = {name: t.clone() for name, t in tensors.items()}
        one = torch.eye(128, device="cuda").bfloat16()

        def run() -> list[Tensor]:
            for name, t in tensors.items():
                torch.mm(kept[name].view(-1, 128), one, out=t.view(-1, 128))
            results = step()
            for t in tensors.values():
                t.fill_(math.nan)
            return results

        expected = run()
        assert all(torch.isfinite(t).all() for i, t in enumerate(expected) if i != 1)  # rows may see nothing
        differences = torch.zeros(len(expected), dtype=torch.int64, device="cuda")
        for _ in range(300):
            differences += torch.stack([(a != b).sum() for a, b in zip(run(), expected, strict=True)])
        assert not differences.any(), differences.tolist()


@on_targets("sm80")
def test_two_streams_at_once(target: Target) -> None:
    """Each has counts of its own, whatever the other leaves of the GPU."""
    with on_few_multiprocessors(target, 64).active():
        steps = [sparse_call(target, seed)[1] for seed in (1, 2)]
        expected = [step() for step in steps]
        torch.cuda.synchronize()
        streams = [torch.cuda.Stream() for _ in steps]
        found: list[list[list[Tensor]]] = [[], []]
        for _ in range(50):
            for i, (stream, step) in enumerate(zip(streams, steps, strict=True)):
                with torch.cuda.stream(stream):
                    found[i].append(step())
        torch.cuda.synchronize()
        for runs, right in zip(found, expected, strict=True):
            assert all(torch.equal(a, b) for results in runs for a, b in zip(results, right, strict=True))


@pytest.mark.caching
@on_targets("sm80")
def test_in_a_graph(target: Target) -> None:
    with on_few_multiprocessors(target).active():
        tensors, step = sparse_call(target)
        warmed_up(step)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = step()
        for _ in range(5):
            for t in tensors.values():
                t.normal_()
            graph.replay()
            assert all(torch.equal(a, b) for a, b in zip(captured, step(), strict=True))
