"""A short run of the fuzzer on every target, and tests of its own parts."""

from __future__ import annotations

import json
from pathlib import Path

from tests.cases import Case, random_cases
from tests.harness import TARGETS, CaseFailure, DeviceLost, Target, on_all_schedules
from tests.silence import lose_context
from tests.tools import fuzz

CPU = TARGETS["cpu"]


@on_all_schedules
def test_short_run(target: Target, seed: int, tmp_path: Path) -> None:
    """Another seed than the other lists of cases use, so that the two do not repeat each other."""
    # Small tiles are compiled from PTX where the GPU has large ones, file by file; first cases wait for it,
    # on a busy host longer than 20 s in all.
    seconds, limit = (0, 70) if target.device == "cpu" else (20, 512)
    ledger = tmp_path / "cases.jsonl"
    try:
        report = fuzz.fuzz(target, seed + 7919, seconds, least=12, limit=limit, jsonl=ledger)
    except DeviceLost as lost:
        lose_context(str(lost))
    assert not report.failures, "\n".join(report.failures[:8])
    lines = ledger.read_text().splitlines()
    assert len(lines) == report.cases > 10
    assert all(json.loads(line)["problem"] == "" for line in lines)


def fails_on_long_causal_rows(case: Case, target: Target, probe: bool) -> None:
    if case.causal and max(q for q, _ in case.sequences()) > 40:
        raise CaseFailure(f"planted: {case}")


def test_failures_are_reduced() -> None:
    """From anything that fails to a case with little in it but the cause."""

    def fails(case: Case) -> bool:
        try:
            fails_on_long_causal_rows(case, CPU, False)
        except CaseFailure:
            return True
        return False

    found = 0
    for case in random_cases(3, 200):
        if any(True for _ in case.sequences()) and fails(case):
            small = fuzz.reduced(case, fails)
            assert fails(small)
            assert small.causal and small.layout == "bshd" and small.data == "normal" and small.head_dim == 1
            assert max(q for q, _ in small.sequences()) <= 82
            found += 1
    assert found > 20


def test_the_ledger_file_is_well_formed() -> None:
    for entry in fuzz.read_ledger():
        assert entry.reason and set(entry.targets) <= set(TARGETS)
