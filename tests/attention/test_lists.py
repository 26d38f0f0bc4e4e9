"""Whole lists of cases: every kernel, edges, large shapes, the covering array, and errors beside PyTorch's.

Each test is one pytest item that runs hundreds of cases; a failure names the line that repeats its case.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests import compare
from tests.cases import Case, big_cases, covering_cases, dense, edge_cases, random_cases, small_cases
from tests.gates import check_gates
from tests.harness import (
    Target,
    naming,
    on_all_schedules,
    on_all_tiles,
    on_gpu_paths,
    on_paths,
    run_case,
    run_cases,
)
from tests.probes import probe_case


@on_all_schedules
def test_every_kernel(target: Target) -> None:
    run_cases(small_cases(), target, cpu=8)


@on_all_tiles
def test_edges(target: Target) -> None:
    run_cases(edge_cases(), target, cpu=14)


@on_paths
def test_probes_of_every_kernel(target: Target) -> None:
    run_cases(small_cases(), target, probe_case, cpu=8)


@on_paths
def test_covering_array(target: Target) -> None:
    """Every three choices of shape, head size, mask, layout, heads, packing, type and mode, together once."""
    cases = covering_cases(3 if target.device == "cuda" else 2)
    run_cases(cases, target, cpu=13)


@on_all_schedules
def test_random_cases_of_the_day(target: Target, seed: int) -> None:
    """A few hundred; `python -m tests.tools.fuzz` runs them by the ten thousand."""
    cases = random_cases(seed, 400) if target.device == "cuda" else random_cases(seed, 15, limit=100)
    run_cases(cases, target)


@on_gpu_paths
def test_large_shapes_within_the_gates(target: Target) -> None:
    """The published gates, multiples of unit roundoff, on tensors large enough that they mean something."""
    with target.active():
        for case in big_cases():
            results = run_case(case, target)
            with naming(case, target):
                check_gates(results.inputs, results.tensors, results.truth.value)


def beside_pytorch(
    case: Case, target: Target, backend: SDPBackend
) -> Iterator[tuple[str, Tensor, Tensor, Tensor]]:
    """Of out, dq, dk, dv: the name, ours, the truth, and what PyTorch's backend returns, in our layout."""
    with target.active():
        results = run_case(case, target)
    x, truth = results.inputs, results.truth.value
    q, k, v, dout, causal = x.q, x.k, x.v, x.dout, case.causal
    leaves = [t.detach().transpose(1, 2).requires_grad_() for t in (q, k, v)]
    with sdpa_kernel(backend):
        out = torch.nn.functional.scaled_dot_product_attention(
            *leaves, is_causal=causal, enable_gqa=q.shape[2] != k.shape[2]
        )
    grads = torch.autograd.grad(out, leaves, dout.transpose(1, 2))
    for name, theirs in zip(("out", "dq", "dk", "dv"), (out, *grads)):
        yield name, results.tensors[name], truth[name], theirs.detach().transpose(1, 2)


PEER_CASES = [
    dense(2, s, s, 4, h_k, d, causal=c, dtype=dtype)
    for s, d, h_k, c, dtype in (
        (512, 64, 4, False, "bf16"),
        (512, 64, 4, True, "fp16"),
        (1024, 128, 2, True, "bf16"),
        (1000, 128, 4, False, "fp16"),
        (777, 96, 4, True, "bf16"),
        (640, 256, 4, False, "bf16"),
        (640, 256, 2, True, "fp16"),
        (2048, 128, 4, True, "bf16"),
        (2048, 64, 4, False, "fp16"),
    )
]


@pytest.mark.parametrize("case", PEER_CASES, ids=str)
@on_gpu_paths
def test_errors_are_no_larger_than_those_of_flash_attention_2(target: Target, case) -> None:
    """The relative L2 error beside that of PyTorch's flash backend on the same inputs, for every result."""
    for name, got, truth, peer in beside_pytorch(case, target, SDPBackend.FLASH_ATTENTION):
        ours, theirs = (compare.measure(t, truth).rel_l2 for t in (got, peer))
        assert ours <= compare.PEER_RATIO[name] * theirs, f"{name}: {ours:.3g} against {theirs:.3g}"


@pytest.mark.parametrize("case", PEER_CASES[:4], ids=str)
@on_gpu_paths
def test_errors_are_at_most_twice_those_of_materialised_attention(target: Target, case) -> None:
    """The rule of FlashAttention's own tests, which users know."""
    for name, got, truth, low in beside_pytorch(case, target, SDPBackend.MATH):
        compare.assert_within_twice_pytorch(name, got, truth, low)
