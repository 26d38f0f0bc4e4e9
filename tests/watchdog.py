"""F8: cases that have hung or crashed other kernels, run in a child process that can be lost.

The child says when it starts a case and when it is done. When it stays silent for longer than a case may
take, or dies, the parent knows which case did it and starts a new child for the rest.
"""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

import torch

from tests.cases import Case
from tests.harness import TARGETS, CaseFailure, Target, repro_line, run_case
from tests.memory import poisoned
from tests.silence import WATCH

CASE_SECONDS = 20.0
START_SECONDS = 120.0  # importing torch and making a CUDA context on a busy machine
ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Outcome:
    """How one case ended: "" when it held, else what happened, in words."""

    case: Case
    problem: str


def run_guarded(cases: list[Case], target: Target, seconds: float = CASE_SECONDS) -> list[Outcome]:
    """Runs the cases in children, each with ``seconds`` to finish."""
    outcomes: list[Outcome] = []
    while len(outcomes) < len(cases):
        outcomes += _one_child(cases[len(outcomes) :], target, seconds)
    return outcomes


def _one_child(cases: list[Case], target: Target, seconds: float) -> list[Outcome]:
    """Runs cases until all are done or one takes the child with it; at least one outcome."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    child = subprocess.Popen(
        [sys.executable, "-m", "tests.watchdog", target.name], cwd=ROOT, env=environment, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)  # fmt: skip
    lines: queue.Queue[str | None] = queue.Queue()
    errors: list[str] = []
    readers = [
        threading.Thread(target=_forward_lines, args=(child.stdout, lines), daemon=True),
        threading.Thread(target=lambda: errors.append(child.stderr.read()), daemon=True),
    ]
    for reader in readers:
        reader.start()
    outcomes: list[Outcome] = []
    try:
        child.stdin.write("".join(case.to_json() + "\n" for case in cases))
        child.stdin.close()
        allowed = START_SECONDS
        while len(outcomes) < len(cases):
            running = cases[len(outcomes)]
            WATCH.alive(repro_line(running, target))  # of this process, which is not the one that may hang
            try:
                line = lines.get(timeout=allowed)
            except queue.Empty:
                outcomes.append(Outcome(running, f"no answer within {allowed:.0f} s"))
                break
            allowed = seconds
            if line is None:
                readers[1].join(5)
                words = "".join(errors).strip().splitlines()[-1:]
                outcomes.append(
                    Outcome(running, f"the process died with code {child.wait()}: {' '.join(words)}")
                )
                break
            kind, _, text = line.partition(" ")
            if kind == "done":
                outcomes.append(Outcome(running, bytes.fromhex(text).decode()))
    finally:
        child.kill()
        child.wait()
        WATCH.alive("")
    return outcomes


def _forward_lines(stream, lines: queue.Queue) -> None:
    for line in stream:
        lines.put(line.rstrip("\n"))
    lines.put(None)


def problems(outcomes: list[Outcome], target: Target) -> str:
    """The cases that did not hold, each with the line that repeats it."""
    return "\n".join(f"{repro_line(o.case, target)}\n    {o.problem}" for o in outcomes if o.problem)


def main() -> None:
    """The child: reads cases from standard input; answers "ready", then "start" and "done" for each."""
    target = TARGETS[sys.argv[1]]
    with target.active():
        with poisoned(target.device, []):  # what only the first call in a process pays for
            torch.zeros(1, device=target.device).sum().item()
        print("ready", flush=True)
        for line in sys.stdin:
            print("start", flush=True)
            problem = ""
            try:
                run_case(Case.from_json(line), target)
            except CaseFailure as failure:
                problem = str(failure)
            print("done", problem.encode().hex(), flush=True)


if __name__ == "__main__":
    main()
