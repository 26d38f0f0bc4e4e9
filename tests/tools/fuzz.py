"""Random cases by the thousand: ``python -m tests.tools.fuzz --seconds N --seed S``.

Every case runs through harness.run_case (truth, poison, guards, repeats, the recorded launch) and one in five
also through the exact probes. A failure prints the line that repeats it and, unless the GPU's context is
lost, a smaller case that fails as well. Cases of known defects stand in fuzz_ledger.json: an open one that
holds fails the run, so that a repaired defect is noticed; a fixed one runs every time. Random cases have no
modifiers; the one of --repro may have some, which probes.py has no probes for.

    python -m tests.tools.fuzz --seconds 240                        today's seed, whatever this machine has
    python -m tests.tools.fuzz --repro '{"seqlen_q":5,...}'         one case, as printed by a failing test
    python -m tests.tools.fuzz --target sm80-99k --jsonl out.jsonl  every case and its outcome, one line each

Exit status: 0 nothing new, 1 a failure or a stale ledger entry, 3 the CUDA context was lost.
"""

from __future__ import annotations

import argparse
import collections
import datetime
import json
import random
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch

from tests.cases import Case, random_case
from tests.harness import TARGETS, CaseFailure, DeviceLost, Target, repro_line, run_case
from tests.probes import probe_case

LEDGER = Path(__file__).with_name("fuzz_ledger.json")
PROBED_SHARE = 0.2


@dataclass
class LedgerEntry:
    """One known defect. state: "open" runs and must fail, "quarantined" never runs, "fixed" must hold."""

    case: Case
    targets: list[str]
    state: str
    reason: str

    def concerns(self, case: Case, target: Target) -> bool:
        return target.name in self.targets and case == self.case


@dataclass
class Report:
    """What a run found."""

    cases: int = 0
    refused: int = 0
    probed: int = 0
    failures: list[str] = field(default_factory=list)
    known: int = 0
    seconds: float = 0.0
    kinds: collections.Counter = field(default_factory=collections.Counter)

    def __str__(self) -> str:
        return (
            f"{self.cases} cases in {self.seconds:.0f} s ({self.cases / max(self.seconds, 1e-9):.0f}/s), "
            f"{self.refused} of them to be refused, {self.probed} also probed, {self.known} known to fail, "
            f"{len(self.failures)} new failures; kinds: {dict(self.kinds.most_common(6))}"
        )


def read_ledger(path: Path = LEDGER) -> list[LedgerEntry]:
    """The entries of the ledger file. Raises ValueError on an unknown state."""
    entries = []
    for item in json.loads(path.read_text(encoding="utf-8")):
        entry = LedgerEntry(
            Case.from_json(json.dumps(item["case"])), item["targets"], item["state"], item["reason"]
        )
        if entry.state not in ("open", "quarantined", "fixed"):
            raise ValueError(f"{path.name}: state {entry.state!r}; one of open, quarantined, fixed")
        entries.append(entry)
    return entries


def check_case(case: Case, target: Target, probe: bool) -> None:
    """Everything one case has to hold. Raises CaseFailure or DeviceLost."""
    run_case(case, target)
    if probe and not case.mods:
        probe_case(case, target)


def smaller_cases(case: Case) -> Iterator[Case]:
    """Simpler neighbours of a failing case, the most drastic first."""
    defaults = Case()
    plain = (
        "layout", "dout_layout", "data", "dlse", "scale", "window", "causal", "tail", "hints",
        "deterministic", "head_dim_v", "dtype",
    )  # fmt: skip
    for name in plain:
        if getattr(case, name) != getattr(defaults, name):
            yield case.replace(**{name: getattr(defaults, name)})
    for name in case.mods:
        yield case.replace(mods=tuple(other for other in case.mods if other != name))
    if case.backward:
        yield case.replace(backward=False)
    if case.is_packed:
        half = len(case.lens_q) // 2
        if half:
            yield case.replace(lens_q=case.lens_q[:half], lens_k=case.lens_k[:half])
            yield case.replace(lens_q=case.lens_q[half:], lens_k=case.lens_k[half:])
        yield case.replace(lens_q=tuple(n // 2 for n in case.lens_q))
        yield case.replace(lens_k=tuple(n // 2 for n in case.lens_k))
    for name, least in (("batch", 1), ("seqlen_q", 1), ("seqlen_k", 1), ("head_dim", 1)):
        value = getattr(case, name)
        if value > least and not (case.is_packed and name != "head_dim"):
            for smaller in (least, value // 2, value * 7 // 8, value - 1):
                yield case.replace(**{name: max(smaller, least)})
    if case.num_heads_k > 1:
        yield case.replace(num_heads=case.num_heads // case.num_heads_k, num_heads_k=1)
    if case.num_heads > case.num_heads_k:
        yield case.replace(num_heads=case.num_heads_k)


def reduced(case: Case, fails: Callable[[Case], bool], attempts: int = 300) -> Case:
    """A smaller case that still fails, by taking the first simpler neighbour that does, again and again."""
    progress = True
    while progress:
        progress = False
        for candidate in smaller_cases(case):
            if candidate == case:
                continue
            attempts -= 1
            if attempts < 0:
                return case
            if fails(candidate):
                case, progress = candidate, True
                break
    return case


def fuzz(
    target: Target,
    seed: int,
    seconds: float,
    *,
    least: int = 0,
    most: int = 10**9,
    limit: int = 384,
    jsonl: Path | None = None,
    ledger: list[LedgerEntry] | None = None,
    check: Callable[[Case, Target, bool], None] = check_case,
) -> Report:
    """Runs random cases until the time or ``most`` cases are over, but ``least`` at least, then the ledger.

    Raises DeviceLost.
    """
    rng = random.Random(seed)
    ledger = read_ledger() if ledger is None else ledger
    report, started = Report(), time.monotonic()
    stream = jsonl.open("w", encoding="utf-8") if jsonl else None

    def outcome(case: Case, probe: bool) -> str:
        try:
            check(case, target, probe)
        except CaseFailure as failure:
            return str(failure)
        return ""

    try:
        with target.active():
            while report.cases < least or (report.cases < most and time.monotonic() - started < seconds):
                case, probe = random_case(rng, limit=limit), rng.random() < PROBED_SHARE
                probe = probe and not case.invalid
                if any(e.state == "quarantined" and e.concerns(case, target) for e in ledger):
                    continue
                problem = outcome(case, probe)
                report.cases += 1
                report.refused += bool(case.invalid)
                report.probed += probe
                report.kinds[case.data] += 1
                if stream:
                    stream.write(json.dumps({"case": json.loads(case.to_json()), "problem": problem}) + "\n")
                if problem and any(e.state == "open" and e.concerns(case, target) for e in ledger):
                    report.known += 1
                elif problem:
                    small = reduced(case, lambda c, probe=probe: bool(outcome(c, probe)))
                    report.failures.append(f"{problem}\n    smaller: {repro_line(small, target)}")
            for entry in ledger:
                if target.name in entry.targets and entry.state != "quarantined":
                    problem = outcome(entry.case, not entry.case.invalid)
                    if bool(problem) != (entry.state == "open"):
                        what = (
                            problem
                            or f"holds although the ledger calls it open ({entry.reason}): mark it fixed"
                        )
                        report.failures.append(f"{repro_line(entry.case, target)}\n    {what}")
    finally:
        if stream:
            stream.close()
    report.seconds = time.monotonic() - started
    return report


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.tools.fuzz", description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--cases", type=int, default=10**9, help="stop after this many cases")
    parser.add_argument("--seed", type=int, default=int(datetime.date.today().strftime("%Y%m%d")))
    parser.add_argument("--target", choices=TARGETS, default="sm80" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--limit", type=int, default=384, help="longest sequence")
    parser.add_argument("--jsonl", type=Path, help="write every case and its outcome")
    parser.add_argument("--repro", help="run this one case, given as JSON")
    parser.add_argument(
        "--reduce", action="store_true", help="with --repro: look for a smaller case that fails"
    )
    options = parser.parse_args()
    target = TARGETS[options.target]
    if target.why_not():
        print(f"target {target.name}: {target.why_not()}", file=sys.stderr)
        return 2
    try:
        if options.repro:
            return _repeat(Case.from_json(options.repro), target, options.reduce)
        print(f"seed {options.seed}, target {target.name}", flush=True)
        report = fuzz(target, options.seed, options.seconds, most=options.cases, limit=options.limit,
                      jsonl=options.jsonl)  # fmt: skip
    except DeviceLost as lost:
        print(f"CUDA context lost in\n{lost}", file=sys.stderr)
        return 3
    for failure in report.failures[:20]:
        print(failure)
    print(report)
    return int(bool(report.failures))


def _repeat(case: Case, target: Target, reduce: bool) -> int:
    def outcome(case: Case) -> str:
        try:
            check_case(case, target, not case.invalid)
        except CaseFailure as failure:
            return str(failure)
        return ""

    with target.active():
        problem = outcome(case)
        print(problem or "holds")
        if problem and reduce:
            print("smaller:", repro_line(reduced(case, lambda c: bool(outcome(c))), target))
    return int(bool(problem))


if __name__ == "__main__":
    sys.exit(main())
