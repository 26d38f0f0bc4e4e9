"""Measures what the gates are frozen on: ``python -m tests.tools.calibrate [--json FILE]``.

Runs a list of shapes and prints, per type and tensor, the largest value of every metric that compare.py
gates, the gate, and the margin between them; the same for calls with modifiers, and for the noise units of
judge.py. A gate belongs at 1.25 times what is measured, or at the catalogue's value if that is larger.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from tests import compare
from tests.cases import Case, big_cases, dense, random_cases
from tests.harness import TARGETS, CaseFailure, Results, Target, run_case
from tests.judge import LSE_LIMIT, MAX_LIMIT, RMS_LIMIT
from tests.modifier_cases import ModifierCase
from tests.modifier_gates import gated_cases, measured
from tests.modifier_harness import naming


def shapes(on_gpu: bool) -> list[Case]:
    """Normal data: from a single tile to what fills the GPU, each head size, both types, masks and groups."""
    lengths = (256, 512, 1024, 2048, 4096) if on_gpu else (128, 256)
    cases = []
    for dtype in ("bf16", "fp16"):
        for i, s in enumerate(lengths):
            for head_dim in (64, 96, 128, 192, 256) if on_gpu else (64, 128):
                heads = max(1, min(8, 4096 * 4096 * 2 // (s * s)))
                cases.append(dense(1, s, s, heads, heads, head_dim, dtype=dtype, causal=False, seed=i))
                cases.append(dense(1, s, s, heads, 1, head_dim, dtype=dtype, causal=True, seed=i + 1))
    return cases + (big_cases() if on_gpu else [])


def runs(target: Target, cases: list[Case], failures: list[str]) -> Iterator[Results]:
    """The results of every case; cases that do not hold are noted instead."""
    for case in cases:
        try:
            yield run_case(case, target)
        except CaseFailure as failure:
            failures.append(str(failure))


def calibrate(target: Target, cases: list[Case], failures: list[str]) -> dict[str, Any]:
    """{dtype: {tensor: {metric: {"measured", "gate", "margin"}}}} over the cases that hold."""
    found: dict[str, dict[str, dict[str, dict[str, Any]]]] = {}

    def note(dtype: str, name: str, metric: str, value: float, gate: float, case: Case) -> None:
        entry = (
            found.setdefault(dtype, {})
            .setdefault(name, {})
            .setdefault(metric, {"measured": -1.0, "gate": gate, "case": ""})
        )
        if value > entry["measured"]:
            entry |= {
                "measured": value,
                "gate": gate,
                "margin": gate / value if value else None,
                "case": case.to_json(),
            }

    for results in runs(target, cases, failures):
        case = results.inputs.case
        x, truth = results.inputs, results.truth
        for name in ("out", "dq", "dk", "dv"):
            gate = compare.GATES[case.torch_dtype][name]
            errors = compare.measure(results.tensors[name], truth.value[name], gate.row_floor)
            note(case.dtype, name, "rel_l2", errors.rel_l2, gate.rel_l2, case)
            note(case.dtype, name, "worst_row", errors.worst_row, gate.worst_row, case)
            note(case.dtype, name, "signed_bias", errors.signed_bias, gate.signed_bias, case)
        share = compare.assert_lse(
            results.tensors["lse"], truth.value["lse"], compare.max_abs_logit(x.q, x.k, case.scale)
        )
        note(case.dtype, "lse", "share_of_gate", share, 1.0, case)
        for name, error in results.errors.items():
            rms_limit, max_limit = (LSE_LIMIT, LSE_LIMIT) if name == "lse" else (RMS_LIMIT, MAX_LIMIT)
            note(case.dtype, name, "noise_rms", error.rms, rms_limit, case)
            note(case.dtype, name, "noise_max", error.largest, max_limit, case)
    return found


def calibrate_modifiers(target: Target, mcases: list[ModifierCase], failures: list[str]) -> dict[str, Any]:
    """{dtype: {tensor: {metric: {"measured", "gate", "margin", "case"}}}}: the case with the least margin."""
    found: dict[str, dict[str, dict[str, dict[str, Any]]]] = {}
    for mcase in mcases:
        try:
            with naming(mcase, target):
                errors = list(measured(mcase, target))
        except CaseFailure as failure:
            failures.append(str(failure))
            continue
        for name, error, gate in errors:
            for metric in ("rel_l2", "worst_row", "signed_bias"):
                value, limit = getattr(error, metric), getattr(gate, metric)
                if metric == "signed_bias":
                    limit += 5 * error.bias_noise
                margin = limit / value if value else math.inf
                here = found.setdefault(mcase.case.dtype, {}).setdefault(name, {})
                if metric not in here or margin < here[metric]["margin"]:
                    here[metric] = {"measured": value, "gate": limit, "margin": margin, "case": str(mcase)}
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.tools.calibrate", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--target", choices=TARGETS, default="sm80" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--random", type=int, default=300, help="random cases, for the noise units")
    parser.add_argument("--json", type=Path, help="also write the result there")
    options = parser.parse_args()
    target = TARGETS[options.target]
    if target.why_not():
        print(f"target {target.name}: {target.why_not()}", file=sys.stderr)
        return 2
    on_gpu = target.device == "cuda"
    with target.active():
        failures: list[str] = []
        regular = calibrate(target, shapes(on_gpu), failures)
        modified = calibrate_modifiers(target, gated_cases(1024 if on_gpu else 256), failures)
        worst: dict[str, dict[str, float]] = {}
        for results in runs(target, random_cases(0, options.random), failures):
            for name, error in results.errors.items():
                kind = worst.setdefault(results.inputs.case.data, {})
                kind[name] = max(error.largest, kind.get(name, 0.0))
    result = {
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        "torch": torch.__version__,
        "target": target.name,
        "gates": regular,
        "gates_with_modifiers": modified,
        "noise_max_by_data": worst,
        "failures": failures,
    }
    text = json.dumps(result, indent=1)
    print(text)
    if options.json:
        options.json.write_text(text, encoding="utf-8")
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
