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
from tests.gates import gated_cases, measured, share_of_lse_gate
from tests.harness import TARGETS, CaseFailure, Results, Target, naming, run_case
from tests.judge import LSE_LIMIT, MAX_LIMIT, RMS_LIMIT


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
    """{dtype: {tensor: {metric: {"measured", "gate", "margin", "case"}}}}: the case with the least margin."""
    found: dict[str, dict[str, dict[str, dict[str, Any]]]] = {}

    def note(case: Case, name: str, metric: str, value: float, gate: float) -> None:
        margin = gate / value if value else math.inf
        here = found.setdefault(case.dtype, {}).setdefault(name, {})
        if metric not in here or margin < here[metric]["margin"]:
            here[metric] = {"measured": value, "gate": gate, "margin": margin, "case": case.to_json()}

    for results in runs(target, cases, failures):
        x, got, truth = results.inputs, results.tensors, results.truth.value
        try:
            with naming(x.case, target):
                errors = list(measured(x, got, truth))
                share = share_of_lse_gate(x, got["lse"], truth["lse"])
        except CaseFailure as failure:
            failures.append(str(failure))
            continue
        for name, error, gate in errors:
            for metric, (value, limit) in compare.limits(error, gate).items():
                note(x.case, name, metric, value, limit)
        note(x.case, "lse", "share of gate", share, 1.0)
        for name, noise in results.errors.items():
            rms_limit, max_limit = (LSE_LIMIT, LSE_LIMIT) if name == "lse" else (RMS_LIMIT, MAX_LIMIT)
            note(x.case, name, "noise rms", noise.rms, rms_limit)
            note(x.case, name, "noise max", noise.largest, max_limit)
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
        modified = calibrate(target, gated_cases(1024 if on_gpu else 256), failures)
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
