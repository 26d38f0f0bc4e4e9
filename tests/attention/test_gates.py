"""Large tensors of normal data with every modifier stay within the gates, on every path."""

from __future__ import annotations

import re

import pytest

from tests.cases import dense
from tests.emulated_modifiers import model
from tests.gates import GATED, gate_case, gated_cases
from tests.harness import TARGETS, CaseFailure, Target, on_gpu_paths, run_cases

CPU = TARGETS["cpu"]


@on_gpu_paths
def test_every_modifier_within_the_gates(target: Target) -> None:
    run_cases(gated_cases(), target, gate_case)


def test_a_model_that_rounds_as_kernels_must_stays_within() -> None:
    with model():
        run_cases(gated_cases(256)[::9], CPU, gate_case)


BUGS = {
    "weights_cut": ("padding", "bf16", "out: rel-L2"),
    "small_flushed": ("softcap5", "fp16", "dk: rel-L2"),
    "cap_without_slope": ("softcap5", "bf16", "dq: rel-L2"),
    "bias_rounded": ("bias_qk_f32", "fp16", "lse: "),
    "bias_head": ("bias_1hqk", "bf16", "lse: "),
    "drop_by_tile": ("drop0.1", "bf16", "out: rel-L2"),
    "drop_unscaled": ("drop0.1", "bf16", "out: rel-L2"),
    "distance_off_by_one": ("distance20", "bf16", "lse: "),
    "dbias_of_last_tile": ("bias_b11k", "bf16", "dbias: rel-L2"),
}


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_leaves_the_gates(bug: str) -> None:
    name, dtype, words = BUGS[bug]
    case = dense(1, 300, 400, 4, 2, 64, dtype=dtype, mods=(name,))
    with CPU.active(), model(bug), pytest.raises(CaseFailure, match=words):
        gate_case(case, CPU)


def test_every_kind_of_modifier_is_gated() -> None:
    """All that changes a number of a call; where a mask only hides, its exact probes say which keys."""
    keywords = {re.match("[a-z]+", name).group() for names in GATED for name in names.split(",")}
    assert keywords == {"bias", "distance", "mask", "padding", "documents", "prefix", "sinktok", "chunk",
                        "hrows", "hkeys", "blocks", "alibi", "sinks", "softcap", "drop"}  # fmt: skip
