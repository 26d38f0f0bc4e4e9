"""What compute-sanitizer is given: every kernel, on tensors of exactly their size."""

from __future__ import annotations

import re

import pytest
import torch

from tests.cases import COMPILED_HEAD_DIMS
from tests.harness import TARGETS, Target, on_gpu_paths
from tests.modifier_cases import BIASES, MASKS, SCORES, STRUCTURE, ModifierCase
from tests.sanitizer_cases import exact, run, run_modified, sanitizer_cases, sanitizer_modifier_cases
from tests.test_build import BY_CLASS, MASK_PASSES, MERGE, ONE_CLASS, PASSES, SPLIT

CPU = TARGETS["cpu"]
KERNELS = {*BY_CLASS, *ONE_CLASS, *PASSES, *MASK_PASSES, *SPLIT, *MERGE}  # every kernel of the dispatch table


def kind(name: str) -> str:
    return re.split(r"[_\d]", name)[0]


def test_every_kind_of_modifier_meets_every_head_size_and_mode():
    cases = sanitizer_modifier_cases()
    kinds = {kind(name) for name in BIASES + MASKS + STRUCTURE + SCORES} - {"top"}
    for head_dim in COMPILED_HEAD_DIMS:
        found = [m for m in cases if head_dim - 5 < m.case.head_dim <= head_dim]
        assert {kind(name) for m in found for name in m.mods} == kinds
        assert {m.case.deterministic for m in found} == {False, True}
        assert {m.case.is_packed for m in found} == {False, True}
    assert {m.needs for m in cases} == {("qkv", "mods"), ("mods",)}
    assert all(max(q for q, _ in m.case.sequences()) <= 192 for m in cases)


def test_cases_run_on_the_cpu():
    """One head size of the modified ones and some plain ones; the gauntlet has the values."""
    with CPU.active():
        for mcase in [m for m in sanitizer_modifier_cases() if m.case.head_dim <= 64]:
            run_modified(mcase, CPU)
        for case in sanitizer_cases()[::8]:
            run(case, CPU)


@pytest.mark.parametrize(
    "t",
    [
        torch.arange(24.0).view(2, 3, 4),
        torch.arange(24.0).view(2, 3, 4).transpose(1, 2),
        torch.arange(24.0).view(2, 12)[:, ::3],
        torch.arange(24.0)[5:17].view(3, 4),
        torch.arange(3.0).view(1, 3, 1).expand(2, 3, 4),
    ],
)
def test_tensors_end_with_their_last_element(t: torch.Tensor):
    found = exact(t)
    assert torch.equal(found, t) and found.stride() == t.stride() and found.storage_offset() == 0
    last = sum((size - 1) * stride for size, stride in zip(t.shape, t.stride()))
    assert found.untyped_storage().nbytes() == 4 * (last + 1)


def test_nan_is_noticed(monkeypatch: pytest.MonkeyPatch):
    from tests import sanitizer_cases as module

    mcase = ModifierCase(sanitizer_modifier_cases()[0].case, ("sinks",))
    real = module.flash_ext.attention
    monkeypatch.setattr(
        module.flash_ext, "attention", lambda *a, **k: tuple(t * float("nan") for t in real(*a, **k))
    )
    with CPU.active(), pytest.raises(AssertionError, match="a result holds NaN"):
        run_modified(mcase, CPU)


@on_gpu_paths
def test_every_kernel_is_launched(target: Target):
    """By what the profiler saw; some virtual GPUs show it nothing."""
    from torch.profiler import ProfilerActivity, profile

    with target.active(), profile(activities=[ProfilerActivity.CUDA]) as seen:
        for case in sanitizer_cases():
            run(case, target)
        for mcase in sanitizer_modifier_cases():
            run_modified(mcase, target)
        torch.cuda.synchronize()
    names = {event.name for event in seen.events()}
    if not any("kernel" in name for name in names):
        pytest.skip("the profiler sees no kernels here")
    found = {kernel for name in names for kernel in re.findall(r"(\w+_kernel)[<(]", name)}
    assert KERNELS - found == set()
