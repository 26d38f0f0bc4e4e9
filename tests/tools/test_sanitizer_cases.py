"""What compute-sanitizer is given: every kernel, on tensors of exactly their size."""

from __future__ import annotations

import re
from typing import get_args

import pytest
import torch

from flash_ext._ops.library import _C
from tests.cases import COMPILED_HEAD_DIMS, Case
from tests.fp8_kernel import KEYS_OF_ACCUMULATOR
from tests.harness import SMALL_SMEM_BYTES, TARGETS, Target, on_gpu_paths
from tests.kernels.plans import plan_of
from tests.modifier_cases import BIASES, DISTANCES, MASKS, SCORES, STRUCTURE
from tests.packaging import test_build as built
from tests.tools.sanitizer_cases import (
    AnyCase,
    Fp8Case,
    LatentCase,
    cache_cases,
    divided_cases,
    fp8_cases,
    groups_of,
    run,
    run_any,
    run_cached,
    run_fp8,
    sanitizer_cases,
    sanitizer_modifier_cases,
)

CPU = TARGETS["cpu"]
# Every kernel of the dispatch table, by path: those of Hopper beside the others.
PORTABLE = {
    *built.BY_CLASS, *built.ONE_CLASS, *built.PASSES, *built.MASK_PASSES, *built.SPLIT, *built.MERGE,
    *built.CACHED, *built.CACHED_SPLIT, *built.QUANTIZED, *built.SHORT_FWD, *built.SHORT_BWD,
}  # fmt: skip
HOPPER = {
    *built.HOPPER, *built.HOPPER_CACHED, *built.HOPPER_PACKED, *built.HOPPER_MOD, *built.HOPPER_BWD,
    *built.HOPPER_BWD_SPLIT, *built.HOPPER_BWD_MOD, *built.HOPPER_BWD_BIAS, *built.HOPPER_BWD_PASSES,
    *built.HOPPER_BWD_WIDE_PASSES, "fwd_fp8_sm90_kernel", "fp8_means_kernel", "fp8_stats_kernel",
    "fp8_numbers_kernel",
}  # fmt: skip
KERNELS = {"sm80": PORTABLE, "sm90": PORTABLE | HOPPER}


def kind(name: str) -> str:
    return re.split(r"[_\d]", name)[0]


def test_every_kind_of_modifier_meets_every_head_size_and_mode():
    cases = sanitizer_modifier_cases()
    kinds = {kind(name) for name in BIASES + DISTANCES + MASKS + STRUCTURE + SCORES} - {"top"}
    for head_dim in COMPILED_HEAD_DIMS:
        found = [m for m in cases if head_dim - 5 < m.head_dim <= head_dim]
        assert {kind(name) for m in found for name in m.mods} == kinds
        assert {m.deterministic for m in found} == {False, True}
        assert {m.is_packed for m in found} == {False, True}
    assert {m.needs for m in cases} == {("qkv", "mods"), ("mods",)}
    assert all(max(q for q, _ in m.sequences()) <= 192 for m in cases)


@pytest.mark.parametrize("path", ["sm80", "sm90"])
def test_heads_are_divided_whatever_the_gpu(pretended_gpu: None, path: str):
    """Without these sum_heads_kernel would be met by luck: on 132 multiprocessors no other case divides heads
    on the sm80 path, and three do on the sm90 path."""
    assert all(case in sanitizer_cases() for case in divided_cases())
    for num_sms in (20, 46, 82, 108, 114, 132, 148, 188):
        _C.set_switch("num_sms", num_sms)
        for smem in (SMALL_SMEM_BYTES, 232448) if path == "sm80" else (232448,):
            _C.set_switch("smem_per_block", smem)
            for case in divided_cases():
                assert plan_of(case, TARGETS[path].choice)["gqa_splits"] > 1, (num_sms, smem, case)


def test_fp8_cases_have_more_keys_than_an_accumulator_takes():
    """The second accumulator is begun and added to, wherever it lies, beside every option."""
    many = [case for case in fp8_cases() if max(case.lengths) > 2 * KEYS_OF_ACCUMULATOR]
    assert {(case.mode, case.head_dim_v) for case in many} == {
        ("fp8", 64), ("fp8", 128), ("fp8", 192), ("fp8", 256), ("mixed", 128),
    }  # fmt: skip
    for option in ("packed", "used", "window", "granularity", "hadamard"):
        assert any(getattr(case, option) != Fp8Case._field_defaults[option] for case in many), option


def test_cases_run_on_the_cpu():
    """Some of every kind; tests/attention judges the values."""
    modified = [m for m in sanitizer_modifier_cases() if m.head_dim <= 64]
    with CPU.active():
        for case in (*modified[::3], *sanitizer_cases()[::8]):
            run(case, CPU)
        for cached in cache_cases()[:5]:
            run_cached(cached, CPU)
        for n, quantized in enumerate(fp8_cases()):
            run_fp8(quantized, CPU, from_host=n % 2 == 0)


def test_the_groups_of_a_target_hold_every_kind_of_case():
    kinds = {
        name: {(type(case), bool(getattr(case, "mods", ()))) for _, _, cases in groups_of(TARGETS[name])
               for case in cases} for name in TARGETS
    }  # fmt: skip
    assert kinds["sm90"] == {(Case, True), *((kind, False) for kind in get_args(AnyCase))}
    assert kinds["sm80"] == kinds["sm80-99k"] == kinds["sm90"] - {(Fp8Case, False), (LatentCase, False)}
    assert kinds["sm80-short"] == kinds["sm90-short"] == {(Case, False), (Case, True)}


@on_gpu_paths
def test_every_kernel_is_launched(target: Target):
    """By what the profiler saw; some virtual GPUs show it nothing."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _, chosen, cases in (*groups_of(target), *groups_of(TARGETS[f"{target.name}-short"])):
            with chosen.active():
                for case in cases:
                    run_any(case, chosen)
        torch.cuda.synchronize()
    names = {event.name for event in seen.events()}
    if not any("kernel" in name for name in names):
        pytest.skip("the profiler sees no kernels here")
    found = {kernel for name in names for kernel in re.findall(r"(\w+_kernel)[<(]", name)}
    assert KERNELS[target.path] - found == set()
