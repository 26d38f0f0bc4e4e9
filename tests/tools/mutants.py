"""Tests of the tests: planted bugs in the kernels, and which test notices each.

A mutant is a small change of the sources. This program copies the project into build/mutants/<n>/, changes
the copy, builds it for the GPU of this machine and runs the GPU tests there until the first failure, for at
most 60 seconds. At the end every test that noticed a bug runs once more on an unchanged copy (mutant 0): only
where it passes there has it noticed the bug. A mutant that survives is a missing test, or a bug without
effect on this GPU.

Mutant 0 is built first. Of the others only the files that planted.py names are compiled, and all other
objects are those of mutant 0. A bug in fewer kernels is harder to notice, so a kill counts as much.

    python -m tests.tools.mutants --list              what each one does (the bugs are in planted.py)
    python -m tests.tools.mutants                     build all, run all (needs a GPU and the CUDA toolkit)
    python -m tests.tools.mutants --part 1/2          the first, third, fifth, ... of them; then --part 2/2
    python -m tests.tools.mutants --only 301 701 --jobs 2
    python -m tests.tools.mutants --build-only        then --run-only: the two halves in separate commands
    python -m tests.tools.mutants --full              compile everything of each
    python -m tests.tools.mutants --gpus 0 1 --tests-per-gpu 2

Mutants are built while others are tested, which they are once a GPU has room. Results are added to
build/mutants/matrix.json after each, and printed as a table at the end; --json writes them to another file,
too. Exit status: 0 all of them killed, 1 some not.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Container, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.tools import few_objects
from tests.tools.planted import CONTROL, MUTANTS, Mutant

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "build" / "mutants"
COPIED = ("setup.py", "pyproject.toml", "README.md", "LICENSE", "csrc", "flash_ext", "bench", "tests")
RUN_SECONDS = 60  # for all tests of one mutant, the start of Python included
CONTROL_SECONDS = 150  # for the tests that noticed something, on the unchanged kernels
TESTED_IN = ("attention", "kernels", "serving", "fp8")  # folders of tests/
# Quickest to notice most bugs first; files of tests that are not named come last.
FIRST_FILES = ("masks", "varlen", "values", "layout", "lists", "races", "autograd", "modifiers", "bias",
               "dropout", "blocks", "system", "sizes", "split", "paged_gpu", "packed_quantized_gpu",
               "fp8")  # fmt: skip


@dataclass
class Outcome:
    """What became of one mutant.

    status: killed, survived, survived the first 60 s, not counted, not built, not run. test: the id of the
    test that failed, or that was running; note: more of it in words; seconds: of the tests, not of the build.
    """

    number: int
    status: str
    test: str = ""
    note: str = ""
    seconds: float = 0.0


def folder_of(mutant: Mutant) -> Path:
    return FOLDER / str(mutant.number)


def plant(mutant: Mutant, folder: Path, kept: Container[str] = ()) -> None:
    """Puts a fresh copy of the project, with the bug, into a folder; what is there goes, but for ``kept``."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.iterdir():
        if path.name not in kept:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
        else:
            shutil.copy(ROOT / name, folder)
    for file, text in mutant.patched().items():
        (folder / "csrc" / file).write_text(text, encoding="utf-8")


def build(mutant: Mutant, compilers: int, full: bool) -> str:
    """Builds a mutant, that many compilers at a time; returns the end of the log if that failed, else "".

    full: all of it, not only its objects. Without, CONTROL must have been built.
    """
    # Without a bug, ninja compiles what has changed since.
    plant(mutant, folder_of(mutant), kept=("build",) if mutant is CONTROL else ())
    if mutant.objects and not full:
        unchanged, own = folder_of(CONTROL), folder_of(mutant)
        return few_objects.build(unchanged, own, mutant.objects, f"mutant{mutant.number}", compilers)
    environment = {**os.environ, "FLASH_EXT_MUTANT": str(mutant.number)}
    environment.setdefault("FLASH_EXT_ARCHS", arch_of_this_gpu())
    environment.setdefault("MAX_JOBS", str(compilers))
    done = subprocess.run([sys.executable, "setup.py", "build_ext", "--inplace"], cwd=folder_of(mutant),
                          env=environment, capture_output=True, text=True, check=False)  # fmt: skip
    return (done.stdout + done.stderr)[-2000:] if done.returncode else ""


def arch_of_this_gpu() -> str:
    """What to compile for: the GPU that is here, or 8.0 without one."""
    import torch

    if not torch.cuda.is_available():
        return "8.0"
    major, minor = torch.cuda.get_device_capability()
    return f"{major}.{minor}" + ("a" if major == 9 else "")


class Gpus:
    """GPUs by their ids, each with room for so many test processes at a time."""

    def __init__(self, ids: list[str], processes: int) -> None:
        self.count = len(ids)
        self._room = dict.fromkeys(ids, processes)
        self._changed = threading.Condition()

    def _with_room(self) -> list[str]:
        """The idlest first."""
        return sorted((gpu for gpu, room in self._room.items() if room), key=lambda gpu: -self._room[gpu])

    @contextlib.contextmanager
    def take(self, count: int) -> Iterator[dict[str, str]]:
        """Waits for room on so many of them; yields the environment of a process that sees these alone."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._with_room()) >= count)
            taken = self._with_room()[:count]
            for gpu in taken:
                self._room[gpu] -= 1
        try:
            yield {**os.environ, "CUDA_VISIBLE_DEVICES": ",".join(taken)}
        finally:
            with self._changed:
                for gpu in taken:
                    self._room[gpu] += 1
                self._changed.notify_all()


def visible_gpus() -> list[str]:
    import torch

    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return named.split(",") if named else [str(i) for i in range(torch.cuda.device_count())]


def files_of_tests(first: str = "") -> list[str]:
    """All files with tests of kernels, in the order in which they run."""
    paths = [path for folder in TESTED_IN for path in (ROOT / "tests" / folder).glob("test_*.py")]
    named = {path.stem.removeprefix("test_"): str(path.relative_to(ROOT)) for path in paths}
    order = [first, *FIRST_FILES, *sorted(set(named) - {"fuzz"}), "fuzz"]
    return [named[name] for name in sorted(named, key=order.index)]


def _pytest(
    mutant: Mutant, arguments: list[str], seed: int, seconds: float, environment: dict[str, str]
) -> tuple[int | None, str]:
    """Exit status, None if time was up, and output of GPU tests in the mutant's folder."""
    folder = folder_of(mutant)
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-v", "-p", "no:cacheprovider"]
    command += ["--seed", str(seed), *arguments]
    with (folder / "pytest.log").open("w") as log:
        # A session of its own, so that the end of time ends children of the tests as well.
        child = subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=subprocess.STDOUT,
                                 start_new_session=True)  # fmt: skip
        try:
            code = child.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
            code = None
    return code, (folder / "pytest.log").read_text(encoding="utf-8", errors="replace")


def run(mutant: Mutant, seed: int, environment: dict[str, str]) -> Outcome:
    """Runs the tests against a built mutant until the first failure."""
    check = "from flash_ext._ops.library import _C; print(_C.build_info['variant'])"
    found = subprocess.run([sys.executable, "-c", check], cwd=folder_of(mutant), env=environment,
                           capture_output=True, text=True, check=False)  # fmt: skip
    if found.stdout.strip() != f"mutant{mutant.number}":
        note = f"the build is {found.stdout.strip()!r} {found.stderr[-300:]}"
        return Outcome(mutant.number, "not run", note=note)
    started = time.monotonic()
    tests = ["-x", *files_of_tests(mutant.first)]
    code, output = _pytest(mutant, tests, seed, RUN_SECONDS, environment)
    return verdict(mutant.number, code, output, time.monotonic() - started)


def verdict(number: int, code: int | None, output: str, seconds: float) -> Outcome:
    """What an exit status and the output of ``pytest -v -x`` say about a mutant."""
    failed = re.search(r"^(tests/\S+::\S+) FAILED|^FAILED (\S+)", output, re.M)
    started = re.findall(r"^(tests/\S+::\S+)", output, re.M)
    last = started[-1] if started else ""
    if failed:
        return Outcome(number, "killed", failed[1] or failed[2], "", seconds)
    if "CUDA context lost" in output:
        return Outcome(number, "killed", last, "CUDA context lost", seconds)
    if code is None and last:
        return Outcome(number, f"survived the first {RUN_SECONDS} s", last, "was running then", seconds)
    if code is not None and code < 0 and last:
        return Outcome(number, "killed", last, f"the process died with code {code}", seconds)
    if code == 0 and " PASSED" in output:
        return Outcome(number, "survived", "", "all tests", seconds)
    return Outcome(number, "not run", last, output[-300:], seconds)


def cores_beside_tests(gpus: Gpus, tests_per_gpu: int) -> int:
    """While some mutants are tested the next ones are built, with two cores left to each test process."""
    return max(1, len(os.sched_getaffinity(0)) - 2 * gpus.count * tests_per_gpu)


def build_and_run(
    mutant: Mutant, builders: threading.Semaphore, gpus: Gpus, options: argparse.Namespace
) -> Outcome | None:
    """What becomes of a mutant, which waits for its turn to be built, then for a GPU; None: it is built."""
    if not options.run_only:
        cores = cores_beside_tests(gpus, options.tests_per_gpu)
        with builders:
            problem = build(mutant, max(1, cores // options.jobs), options.full)
        if problem:
            print(problem, flush=True)
            return Outcome(mutant.number, "not built", note=problem[-200:])
    if options.build_only:
        return None
    with gpus.take(mutant.needs_gpus) as environment:
        return run(mutant, options.seed, environment)


def hold_against_control(outcomes: list[Outcome], seed: int, environment: dict[str, str]) -> None:
    """Runs every test that killed a mutant on the unchanged kernels; one that fails there proves nothing."""
    kills = sorted((o for o in outcomes if o.status == "killed"), key=lambda o: o.seconds)
    if not kills:
        return
    tests = list(dict.fromkeys(o.test for o in kills))
    _, output = _pytest(CONTROL, tests, seed, CONTROL_SECONDS, environment)
    passed = dict(re.findall(r"^(tests/\S+::\S+) (PASSED|FAILED|ERROR)", output, re.M))
    for outcome in kills:
        result = passed.get(outcome.test)
        if result is None:
            outcome.note += " (not seen to pass without the bug: no time)"
        elif result != "PASSED":
            outcome.status, outcome.note = "not counted", "fails without the bug, too"


def record(outcomes: list[Outcome], copy: Path | None) -> dict[int, Outcome]:
    """Adds outcomes to the matrix file, writes the copy, and returns all of it."""
    path, known = FOLDER / "matrix.json", {}
    if path.exists():
        known = {item["number"]: Outcome(**item) for item in json.loads(path.read_text(encoding="utf-8"))}
    known |= {outcome.number: outcome for outcome in outcomes}
    text = json.dumps([asdict(outcome) for _, outcome in sorted(known.items())], indent=1)
    for target in filter(None, (path, copy)):
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
    return known


def matrix(known: dict[int, Outcome]) -> str:
    """The kill matrix as a markdown table."""
    lines = ["| n | mutant | planted bug | outcome | test | s |", "|---|---|---|---|---|---|"]
    for mutant in MUTANTS:
        o = known.get(mutant.number, Outcome(mutant.number, "not run"))
        words = " ".join(f"{o.test.removeprefix('tests/')} {o.note}".replace("|", "/").split())
        lines.append(
            f"| {mutant.number} | {mutant.name} | {mutant.bug} | {o.status} | {words} | {o.seconds:.0f} |"
        )
    return "\n".join(lines)


def part(text: str) -> slice:
    """ "1/2" is every second one from the first on."""
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if not match or not 1 <= int(match[1]) <= int(match[2]):
        raise argparse.ArgumentTypeError(f"{text!r} is no part such as 1/2")
    return slice(int(match[1]) - 1, None, int(match[2]))


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.tools.mutants", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--list", action="store_true", help="print the mutants and what they change")
    parser.add_argument("--only", type=int, nargs="+", help="numbers of the mutants to take")
    parser.add_argument(
        "--part", type=part, default=slice(None), metavar="I/K", help="each K-th from the I-th"
    )
    parser.add_argument("--jobs", type=int, help="builds at a time; default: one a core, 2 with --full")
    parser.add_argument("--full", action="store_true", help="compile everything of each mutant")
    parser.add_argument("--build-only", action="store_true")
    parser.add_argument("--run-only", action="store_true", help="take what was built before")
    parser.add_argument("--gpus", nargs="+", metavar="ID", help="GPUs to test on; default: all that are here")
    parser.add_argument("--tests-per-gpu", type=int, default=1, help="test processes at a time on each")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the matrix to this file, too")
    options = parser.parse_args()
    chosen = [m for m in MUTANTS if not options.only or m.number in options.only][options.part]
    if options.list:
        for m in chosen:
            print(f"{m.number:5d}  {m.name}: {m.bug}\n       {', '.join(m.patched())}")
        return 0

    gpus = Gpus(options.gpus or visible_gpus(), options.tests_per_gpu)
    runnable = [m for m in chosen if options.build_only or gpus.count >= m.needs_gpus]
    outcomes = [
        Outcome(m.number, "not run", note=f"needs {m.needs_gpus} GPUs") for m in chosen if m not in runnable
    ]
    record(outcomes, options.json)
    if runnable and not options.run_only:
        problem = build(CONTROL, len(os.sched_getaffinity(0)), options.full)
        if problem:
            raise SystemExit(f"{problem}\nmutant 0, of which the others take objects, cannot be built")
        print("0: built", flush=True)
    # Where not everything is compiled, most of a build is one run of the compiler.
    options.jobs = options.jobs or (2 if options.full else cores_beside_tests(gpus, options.tests_per_gpu))
    builders = threading.Semaphore(options.jobs)
    with concurrent.futures.ThreadPoolExecutor(max(1, len(runnable))) as pool:
        turns = {pool.submit(build_and_run, mutant, builders, gpus, options): mutant for mutant in runnable}
        for turn in concurrent.futures.as_completed(turns):
            outcome = turn.result()
            print(f"{turns[turn].number}: {outcome or 'built'}", flush=True)
            outcomes += [outcome] if outcome else []
            record(outcomes, options.json)
    if not options.build_only and runnable:
        with gpus.take(gpus.count) as environment:
            hold_against_control(outcomes, options.seed, environment)
    known = record(outcomes, options.json)
    print(matrix(known))
    return int(any(outcome.status != "killed" for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
