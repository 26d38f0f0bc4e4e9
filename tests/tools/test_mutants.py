"""Tests of the kill matrix: its planted bugs fit the sources, and its verdicts are fair. Needs no GPU."""

from __future__ import annotations

import collections
import gzip
import json
import re
import sys
import threading
from pathlib import Path

import pytest

from tests.sources import CSRC, ROOT, count, squeezed
from tests.tools import mutants, planted


@pytest.mark.parametrize("mutant", planted.MUTANTS, ids=lambda m: str(m.number))
def test_planted_bugs_fit_the_sources(mutant: planted.Mutant) -> None:
    """Every edit finds its place exactly once and changes it."""
    for file, text in mutant.patched().items():
        source = (CSRC / file).read_text(encoding="utf-8")
        edits = [edit for edit in mutant.edits if edit.file == file]
        pairs = [(squeezed(edit.find), squeezed(edit.replace)) for edit in edits]
        assert all(count(source, find) == 1 and find != replace for find, replace in pairs)
        assert all(replace in squeezed(text) for _, replace in pairs)
        longer = sum(len(replace) - len(find) for find, replace in pairs)
        assert len(squeezed(text)) - len(squeezed(source)) == longer
    assert mutant.edits and mutant.first in mutants.FIRST_FILES


def test_planted_bugs_are_named_apart_and_only_there() -> None:
    """Each number stands for one bug, the kernels hold none, and an edit without its place is refused."""
    numbers = [mutant.number for mutant in (planted.CONTROL, *planted.MUTANTS)]
    assert len(set(numbers)) == len(numbers)
    suffixes = (".cpp", ".cu", ".cuh", ".h")
    sources = [path for path in CSRC.rglob("*") if path.suffix in suffixes]
    assert sources and not [path for path in sources if "MUTANT" in path.read_text(encoding="utf-8")]
    for nowhere in ("no such text", "const"):
        with pytest.raises(ValueError, match=r"mutant 1: csrc/api/ops.cpp holds (0|\d\d+) times"):
            planted.Mutant(1, "", "", (planted.Edit("api/ops.cpp", nowhere, ""),)).patched()


# Not in the stored matrix. One that has them all takes its place, and then none is left here.
YET_TO_RUN = {1201, 1202, 1203, 1301, 1302, 1303, 1304, 2101, 2102, 2103, 2104, 2105}


def test_every_other_planted_bug_has_run() -> None:
    (stored,) = (ROOT / "bench" / "results").glob("*/kill-matrix.json.gz")
    numbers = {mutant["number"] for mutant in json.loads(gzip.decompress(stored.read_bytes()))}
    assert {mutant.number for mutant in planted.MUTANTS} - YET_TO_RUN == numbers


def test_tests_run_from_every_folder_with_kernels_the_likely_ones_first() -> None:
    stems = collections.Counter(
        path.stem for folder in mutants.TESTED_IN for path in (ROOT / "tests" / folder).glob("test_*.py")
    )
    assert set(stems.values()) == {1}  # files are named by their stems
    for mutant in planted.MUTANTS:
        files = mutants.files_of_tests(mutant.first)
        assert Path(files[0]).stem == f"test_{mutant.first}" and files[-1] == "tests/attention/test_fuzz.py"
        assert len(files) == len(set(files)) == len(stems) and all((ROOT / file).is_file() for file in files)


def test_a_copy_has_what_its_tests_import() -> None:
    """Of the folders here: bench, say."""
    files = [path for name in ("", *mutants.TESTED_IN) for path in (ROOT / "tests" / name).glob("*.py")]
    text = "\n".join(path.read_text(encoding="utf-8") for path in files)
    imported = set(re.findall(r"^ *(?:from|import) (\w+)", text, re.M))
    assert {name for name in imported if (ROOT / name).is_dir()} <= set(mutants.COPIED)


def test_gpus_are_shared_out() -> None:
    """Never more processes on one than it has room for, and two GPUs for who wants two."""
    gpus, lock = mutants.Gpus(["0", "5", "7"], 2), threading.Lock()
    running: collections.Counter[str] = collections.Counter()
    most, together = 0, threading.Barrier(6)

    def work(count: int, waits: bool) -> None:
        nonlocal most
        with gpus.take(count) as environment:
            taken = environment["CUDA_VISIBLE_DEVICES"].split(",")
            with lock:
                running.update(taken)
                most = max(most, *running.values())
            assert len(set(taken)) == count
            if waits:
                together.wait(60)  # six of them at once
            with lock:
                running.subtract(taken)

    asked = [(1, True)] * 6 + [(n % 3 + 1, False) for n in range(30)]
    threads = [threading.Thread(target=work, args=each, daemon=True) for each in asked]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert most == 2 and not any(running.values()) and not any(thread.is_alive() for thread in threads)


def test_mutants_are_built_and_run_side_by_side(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One is tested while others are built, and all come into one file, whatever becomes of them."""
    first, second, third, wide = (m.number for m in planted.MUTANTS if m.number in (101, 201, 301, 2301))
    tested, held = threading.Event(), []

    def build(mutant: planted.Mutant, compilers: int) -> str:
        if mutant.number == third:
            assert tested.wait(60)  # builds go on when the first mutant has been tested
        return "no compiler" if mutant.number == second else ""

    def run(mutant: planted.Mutant, seed: int, environment: dict[str, str]) -> mutants.Outcome:
        tested.set()
        return mutants.Outcome(mutant.number, "killed", environment["CUDA_VISIBLE_DEVICES"])

    monkeypatch.setattr(mutants, "FOLDER", tmp_path)
    monkeypatch.setattr(mutants, "build", build)
    monkeypatch.setattr(mutants, "run", run)
    monkeypatch.setattr(mutants, "hold_against_control", lambda *given: held.append(given[2]))
    arguments = f"--gpus 3 4 --jobs 2 --only {first} {second} {third} {wide}"
    monkeypatch.setattr(sys, "argv", ["mutants", *arguments.split()])
    assert mutants.main() == 1
    stored = {x["number"]: x for x in json.loads((tmp_path / "matrix.json").read_text(encoding="utf-8"))}
    assert {number: x["status"] for number, x in stored.items()} == {
        first: "killed", second: "not built", third: "killed", wide: "killed",
    }  # fmt: skip
    assert stored[wide]["test"] == held[0]["CUDA_VISIBLE_DEVICES"] == "3,4"


def test_what_a_run_says_about_a_mutant() -> None:
    """A kill needs a failing test; time that is up and a run without tests are neither kill nor proof."""
    b = "tests/attention/test_masks.py::test_b[x-1]"
    started = f"tests/attention/test_masks.py::test_a PASSED [ 1%]\n{b} "
    expected = {
        (1, started + "FAILED [ 2%]\n"): ("killed", b),
        (1, started + f"\nFAILED {b} - AssertionError: 1"): ("killed", b),
        (3, started + "\n!!! Exit: CUDA context lost in\n"): ("killed", b),
        (-11, started): ("killed", b),
        (None, started): (f"survived the first {mutants.RUN_SECONDS} s", b),
        (0, started + "PASSED\n"): ("survived", ""),
        (0, started.replace("PASSED", "SKIPPED") + "SKIPPED\n"): ("not run", b),
        (None, "no test yet"): ("not run", ""),
        (4, "no module named torch"): ("not run", ""),
        (-9, ""): ("not run", ""),
    }
    for (code, output), (status, test) in expected.items():
        outcome = mutants.verdict(101, code, output, 1.0)
        assert (outcome.status, outcome.test) == (status, test), output
